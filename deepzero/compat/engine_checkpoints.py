"""DeepSpeed's methods of an engine that save and load: checkpoints, and the model's values.

:class:`~deepzero.compat.deepspeed_engine.DeepSpeedEngine` has these functions as methods. They give DeepSpeed's names
and arguments to the engine's :class:`~deepzero.checkpoint.checkpointer.Checkpointer`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from deepzero.checkpoint.checkpoint_dir import latest_tag
from deepzero.checkpoint.errors import CheckpointError, agree_on, as_folder, together
from deepzero.checkpoint.export import DEFAULT_MAX_SHARD
from deepzero.compat import zero_to_fp32
from deepzero.compat.deepspeed_checkpoint import LATEST_UNIVERSAL
from deepzero.compat.engine_getters import EngineGetters
from deepzero.durable import flush_folder, write_whole
from deepzero.runtime.diagnostics import whole_state_dict

# ---- checkpoints -----------------------------------------------------------------------------------------------------


def save_checkpoint(  # noqa: D417  of the method
    self: EngineGetters, save_dir: str | Path, tag: str | None = None, client_state: Mapping[str, Any] | None = None,
    save_latest: bool = True, exclude_frozen_parameters: bool = False, asynchronous: bool = False,
    keep_last: int | None = None,
) -> bool:  # fmt: skip
    """Save everything that training needs to go on; True. A collective; atomic: the folder appears when whole.

    Args:
        save_dir: the folder that checkpoints lie in; made if it is not there.
        tag: name of this one; None: ``global_step`` and the number. A checkpoint of this name is replaced.
        client_state: of rank 0, given back by :meth:`load_checkpoint`: numbers, strings, lists, tuples,
            dictionaries, tensors, arrays.
        save_latest: let the file ``latest`` name it, which is what is loaded without a tag.
        exclude_frozen_parameters: leave out parameters that are not trained.
        asynchronous: return after a copy was taken in memory, and write in the background. The next save, the end
            of the program and :meth:`wait_for_checkpoint` wait for it, and raise what it failed with: the end of one
            that deepzero's launcher has not started is told by Python, which leaves the exit status as it is.
        keep_last: remove older checkpoints whose tags differ from ``tag`` by digits only, but for the newest.

    Raises a CheckpointError on every rank; what was saved before is untouched.

    Source: ``save_checkpoint`` in ``runtime/engine.py`` of [DeepSpeed].
    """
    with_frozen = not exclude_frozen_parameters
    self.checkpointer.save(save_dir, tag, client_state, save_latest, with_frozen, asynchronous, keep_last)
    if self.global_rank == 0:
        zero_to_fp32.leave_script(Path(os.path.expanduser(save_dir)))
    return True


def wait_for_checkpoint(self: EngineGetters) -> None:
    """Return when the last asynchronous save is on the disk, or raise a CheckpointError if it failed."""
    self.checkpointer.wait()


def save_16bit_model(  # noqa: D417  of the method
    self: EngineGetters, save_dir: str | Path, save_filename: str | None = None,
    exclude_frozen_parameters: bool = False, max_shard_size: str | int = DEFAULT_MAX_SHARD,
) -> bool:  # fmt: skip
    """Save the model in the compute dtype as safetensors that Hugging Face's libraries read; True. A collective.

    Parameters are gathered bucket by bucket and written by rank 0 as they come, as by ``python -m tools.export``. A
    model that is there is replaced when the new one is complete.

    Args:
        save_dir: the folder; made if it is not there.
        save_filename: of the file; None: ``model.safetensors``. A name in ``.bin`` or ``.pt`` is a file of
            ``torch.save``, undivided (no ``max_shard_size``), for which rank 0's host holds the whole model.
        exclude_frozen_parameters: leave out parameters that are not trained.
        max_shard_size: a larger model is divided among several files and an index.

    Raises a CheckpointError on every rank; what was there before is untouched.

    Source: ``save_16bit_model`` in ``runtime/engine.py`` of [DeepSpeed], which writes ``pytorch_model.bin``.
    """
    if not str(save_filename).endswith((".bin", ".pt")):
        self.checkpointer.save_16bit_model(save_dir, save_filename, not exclude_frozen_parameters, max_shard_size)
        return True
    self.check("save_16bit_model")
    self.finish_delayed_update()
    path = as_folder("save_16bit_model", save_dir) / str(save_filename)
    agree_on("save_16bit_model", {
        "save_dir": str(path.parent), "save_filename": path.name,
        "exclude_frozen_parameters": exclude_frozen_parameters, "max_shard_size": max_shard_size,
    })  # fmt: skip
    if max_shard_size != DEFAULT_MAX_SHARD:
        raise CheckpointError(f"{path.name} is one file: leave max_shard_size out, or name a file in .safetensors")
    state = consolidated_16bit_state_dict(self, exclude_frozen_parameters)
    with together():
        if state is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, lambda file: torch.save(state, file))
            flush_folder(path.parent)
    return True


def load_checkpoint(  # noqa: D417  of the method
    self: EngineGetters, load_dir: str | Path, tag: str | None = None, load_module_strict: bool = True,
    load_optimizer_states: bool = True, load_lr_scheduler_states: bool = True, load_module_only: bool = False,
    custom_load_fn: None = None,
) -> tuple[str, dict[str, Any]] | tuple[None, None]:  # fmt: skip
    """Go on where a checkpoint was saved, by any number of ranks in any stage. A collective.

    Args:
        load_dir: the folder that checkpoints were saved to, or one checkpoint: deepzero's, or DeepSpeed's own of
            stages 1 to 3 and universal ones (``docs/checkpoints.md``). With ``load_module_only`` also a folder
            with ``model.safetensors`` or its index, or one safetensors file: see ``docs/export.md``.
        tag: which one; None: the one that ``latest`` names, or with ``checkpoint.load_universal`` the one of
            ``latest_universal`` if that is there.
        load_module_strict: False loads the parameters and buffers that model and checkpoint have in common.
        load_optimizer_states: False leaves moments and hyper-parameters of the optimizer as they are.
        load_lr_scheduler_states: False leaves the schedule where it is.
        load_module_only: parameters, their masters and buffers, and nothing else: no counters either.
        custom_load_fn: not here, and refused: values go into partitions, by ranges of elements.

    Returns:
        The checkpoint's path and the client state that was saved with it; twice None, with a warning, where
        nothing has been saved yet: no folder, or an empty one (but weights alone have to be there).

    Raises:
        CheckpointError: on every rank, with the file and what is wrong: of another model, not complete, damaged.
            Where that is found when some tensors are filled, every use of the engine raises until a load succeeds.

    Source: ``load_checkpoint`` in ``runtime/engine.py`` of [DeepSpeed], which warns without ``latest`` in any case.
    """
    if custom_load_fn is not None:
        raise CheckpointError(
            "load_checkpoint(custom_load_fn=…): deepzero fills partitions and has no whole state dict to give; "
            "give the model other names or values before deepzero.initialize, or use load_module_strict=False"
        )
    if tag is None and self.config.load_universal:
        with together():
            tag = latest_tag(Path(os.path.expanduser(load_dir)), LATEST_UNIVERSAL)
    return self.checkpointer.load(
        load_dir, tag, load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only
    )


# ---- the model's values ----------------------------------------------------------------------------------------------


def module_state_dict(self: EngineGetters, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
    """The model's own state dict, in the compute dtype, whole on every rank; stage 3: a collective, a copy.

    Parameters that are tied in the model are one tensor in stage 3's copy too.
    """
    if self.config.zero.stage == 3 or exclude_frozen_parameters:
        return whole_state_dict(self.module, not exclude_frozen_parameters)
    return self.module.state_dict()


def load_module_state_dict(self: EngineGetters, state_dict: dict[str, Any], strict: bool = True) -> None:
    """Load values into the model on every rank; the masters follow before the next step.

    ``state_dict`` may be what DeepSpeed 0.19.8 asks for, a dictionary that has the state dict under ``"module"``.
    """
    self.check("load_module_state_dict")
    self.finish_delayed_update()
    self.prepare_writes()
    inner = state_dict.get("module")
    self.module.load_state_dict(inner if isinstance(inner, Mapping) else state_dict, strict=strict)


def consolidated_16bit_state_dict(
    self: EngineGetters, exclude_frozen_parameters: bool = False
) -> dict[str, Any] | None:
    """The model's whole state dict in the compute dtype on rank 0's CPU; None on other ranks. A collective."""
    state = whole_state_dict(self.module, not exclude_frozen_parameters, on_cpu_of_rank_0=True)
    return state if self.global_rank == 0 else None
