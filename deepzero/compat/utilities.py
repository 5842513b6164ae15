"""Small things that scripts take from DeepSpeed's modules of utilities: constants, its logger, its groups, and others.

Sources: ``runtime/dataloader.py``, ``runtime/utils.py``, ``utils/torch.py``, ``utils/logging.py``, ``utils/groups.py``,
``moe/utils.py``, ``checkpoint/utils.py``, ``runtime/activation_checkpointing/checkpointing.py`` of [DeepSpeed].
"""

from __future__ import annotations

import functools
import logging
import os
import random
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from deepzero.comm import process_group
from deepzero.comm.flight_recorder import world_group
from deepzero.comm.rendezvous import MPI_PORT
from deepzero.compat.accelerator import get_accelerator
from deepzero.compat.import_paths import VERSION
from deepzero.config.deepspeed_json import load_block
from deepzero.utils.formatting import binary_bytes

# ---- constants -------------------------------------------------------------------------------------------------------

__version_major__, __version_minor__, __version_patch__ = map(int, VERSION.split("."))
HAS_TRITON = False
MIN_SWAPPABLE_BYTES = 2**20
TORCH_DISTRIBUTED_DEFAULT_PORT = MPI_PORT
default_pg_timeout = timedelta(minutes=int(os.environ.get("DEEPSPEED_TIMEOUT", "10")))
"""How long a collective may take; minutes in the environment, as there."""
_BUILT_FOR = {"version": torch.__version__, "cuda_version": torch.version.cuda, "hip_version": torch.version.hip}
torch_info: dict[str, Any] = {name: ".".join((version or "0.0").split(".")[:2]) for name, version in _BUILT_FOR.items()}
torch_info |= {"nccl_version": "0.0", "bf16_support": True}
"""What torch was built for; ``0.0`` where it was not, and for NCCL, which a program asks for itself."""

# ---- the logger ------------------------------------------------------------------------------------------------------


@functools.cache
def _made() -> logging.Logger:
    made = logging.getLogger("DeepSpeed")
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("[%(asctime)s] [%(levelname)s] %(message)s"))
    made.addHandler(handler)
    made.setLevel(logging.INFO)
    made.propagate = False
    # As DeepSpeed has them on its logger, too.
    made.warning_once = functools.cache(made.warning)  # type: ignore[attr-defined]
    made.log_dist_once = lambda *words, **more: log_dist_once(*words, **more)  # type: ignore[attr-defined]
    return made


logger = _made()
"""What libraries set levels of; what it says goes to standard output, as there."""
warning_once = logger.warning_once  # type: ignore[attr-defined]


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log on these ranks; with -1 among them on all. Without ranks on none, but where no group has been joined."""
    if not process_group.is_initialized() or (ranks and (-1 in ranks or process_group.rank() in ranks)):
        logger.log(level, f"[Rank {process_group.rank()}] {message}")


def log_dist_once(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """:func:`log_dist`, and not again with these words."""
    _log_dist_once(message, tuple(ranks or ()), level)


_log_dist_once = functools.cache(log_dist)


def set_log_level_from_string(level: str, custom_logger: logging.Logger | None = None) -> None:
    """Set the level by its name, in any case; ValueError where no level has this name."""
    (custom_logger or logger).setLevel(level.upper())


# ---- groups: all ranks share the data, and nothing else is parallel --------------------------------------------------

_OF_DATA = {
    "group": world_group,
    "group_ranks": lambda: range(process_group.world_size()),
    "rank": process_group.rank,
    "world_size": process_group.world_size,
}
_OF_ONE = {"rank": lambda: 0, "world_size": lambda: 1, "src_rank": process_group.rank}
globals().update({
    f"{mark}get_{kind}_parallel_{what}": answer
    for kinds, answers in ((("data", "sequence_data"), _OF_DATA), (("model", "tensor_model", "sequence"), _OF_ONE))
    for kind in kinds
    for what, answer in answers.items()
    for mark in ("", "_")
})  # fmt: skip
_clone_world_group = world_group


def initialize(ep_size: int = 1, mpu: Any = None) -> None:
    """Nothing to do: groups are there when the process group is. NotImplementedError for any other parallelism."""
    if ep_size != 1 or mpu is not None:
        raise NotImplementedError("deepzero shards data-parallel training alone: ep_size must be 1 and mpu None")


# ---- data ------------------------------------------------------------------------------------------------------------


class RepeatingLoader:
    """The batches of a loader, over and over."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)


def move_to_device(item: Any, device: Any, criterion_func: Callable[[Any], bool] | None = None) -> Any:
    """Tensors in lists, tuples and dictionaries on ``device``: those that ``criterion_func`` chooses, None: all."""
    if torch.is_tensor(item):
        return item.to(device) if criterion_func is None or criterion_func(item) else item
    if isinstance(item, (list, tuple)):
        moved = [move_to_device(one, device, criterion_func) for one in item]
        return type(item)(*moved) if hasattr(item, "_fields") else type(item)(moved)  # a namedtuple takes each
    if isinstance(item, Mapping):
        return {key: move_to_device(one, device, criterion_func) for key, one in item.items()}
    return item


def set_random_seed(seed: int) -> None:
    """Seed Python, numpy and torch."""
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


# ---- what is here ----------------------------------------------------------------------------------------------------


def required_torch_version(min_version: float | None = None, max_version: float | None = None) -> bool:
    """Whether this torch is of the versions from ``min_version`` to ``max_version``."""
    number = lambda version: tuple(map(int, re.findall(r"\d+", str(version))[:2]))
    here = number(torch.__version__)
    return (min_version is None or here >= number(min_version)) and (max_version is None or here <= number(max_version))


def see_memory_usage(message: str, force: bool = False) -> None:
    """With ``force`` log on rank 0 what the device has in use now, and had at most."""
    if force and process_group.rank() == 0:
        now, most = get_accelerator().memory_allocated(), get_accelerator().max_memory_allocated()
        logger.info(f"{message}: {binary_bytes(now)} in use, {binary_bytes(most)} at most")


compatible_ops = defaultdict(bool, {"cpu_adam": True, "fused_adam": True, "quantizer": True, "utils": True})
"""DeepSpeed's compiled operations by name, and whether deepzero has what they do, which needs no compiler here."""


class OpBuilder:
    """Stands for one of these operations; there is nothing to build."""

    NAME = ""

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether deepzero has it."""
        return compatible_ops[self.NAME]


def __getattr__(name: str) -> Any:
    if not name.endswith("Builder"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    words = re.sub("(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name.removesuffix("Builder"))
    return type(name, (OpBuilder,), {"NAME": words.lower()})


# ---- models ----------------------------------------------------------------------------------------------------------


def is_moe_param(param: torch.Tensor) -> bool:
    """False: there are no experts."""
    return False


def split_params_into_different_moe_groups_for_optimizer(param_groups: Any, max_group_size: Any = None) -> list[Any]:
    """The parameter groups, or the one, in a list: no parameter is an expert's."""
    return [param_groups] if isinstance(param_groups, Mapping) else list(param_groups)


def zero_wrapper_for_fp_tensor_constructor(fn: Callable[..., Any], *_: Any, **__: Any) -> Callable[..., Any]:
    """``fn``: ``zero.Init`` wraps no constructor of tensors, so that transformers has nothing to except from it."""
    return fn


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Torch's activation checkpointing, not reentrant."""
    return torch_checkpoint(function, *args, use_reentrant=False)


def configure(mpu_: Any, deepspeed_config: Any = None, **switches: Any) -> None:
    """Nothing to do for what is off: what activations are to become is in ``initialize``'s configuration.

    Of ``deepspeed_config`` the block ``activation_checkpointing`` is read, as ``initialize`` reads it. A
    NotImplementedError: a switch is on, here or there.
    """
    if deepspeed_config is not None:
        switches["cpu_checkpointing"] = load_block(deepspeed_config, "activation_checkpointing").cpu_checkpointing
    if on := [name for name, value in {"mpu_": mpu_, **switches}.items() if value]:
        raise NotImplementedError(
            f"deepspeed.checkpointing.configure({on[0]}=…): set activation_checkpointing in initialize's "
            "configuration, whose cpu_checkpointing deepzero has, and leave it out here"
        )


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def get_model_ckpt_name_for_rank(base_folder: str, mp_rank_str: str) -> str:
    """The file in which DeepSpeed keeps a model; deepzero's own checkpoints have none of this name."""
    return str(Path(base_folder) / f"mp_rank_{mp_rank_str}_model_states.pt")


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """Copies of all tensors in lists, tuples and dictionaries, on ``device``; other values as they are.

    ``torch.save`` would write the whole buffer that a view looks at, and of a copy writes what it is.
    """
    if torch.is_tensor(item):
        return item.detach().to(device, copy=True)
    if isinstance(item, dict):
        return type(item)({key: clone_tensors_for_torch_save(value, device) for key, value in item.items()})
    if isinstance(item, (list, tuple)):
        copies = [clone_tensors_for_torch_save(value, device) for value in item]
        return copies if isinstance(item, list) else tuple(copies)
    return item
