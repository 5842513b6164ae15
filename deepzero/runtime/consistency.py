"""What ranks must agree on, and how they find out: before the first step, and in every step.

Ranks that disagree hang each other or, worse, train. Before the first step each rank tells the others what it was
configured with and which parameters it has; a difference is raised on *every* rank, with what differs and on which
rank.

In each step they exchange one small message (:class:`StepAgreement`): the exact sum of squares of the gradients, from
which all compute the same norm, the losses, from which all compute the same mean, and whether any rank cannot take the
step, so that none does. It travels as integers in a single all-reduce, which is exact and has no order.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import math
import platform
import struct
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from deepzero.comm import process_group
from deepzero.comm.collectives import Communicator
from deepzero.comm.process_group import raise_on_all_ranks
from deepzero.config.strict import ConfigError
from deepzero.runtime.grad_norm import WORDS, norm_from_words
from deepzero.runtime.zero.partition_parameters import PartitionedParameter
from deepzero.utils.formatting import flatten

log = logging.getLogger(__name__)

AGREEMENT = "agreement.all_reduce"

PATH_WORDS = 2
"""Integers that show whether all ranks took the same path."""
FLAG_WORDS = 3
"""Integers that count ranks: asked to stop, in trouble, with a loss that is not finite."""
OWN_WORDS = FLAG_WORDS + PATH_WORDS
"""Integers of the message besides the norm's and the losses."""
PATH_BITS = 1 << 20
"""Of the fingerprint; its square, summed over a million ranks, fits into an integer of 64 bits."""


class RankMismatchError(RuntimeError):
    """Ranks were started with different settings or different models."""


def describe(config: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Everything in which ranks must be alike, by name: settings, parameters, buffers, optimizer and its groups."""
    lines = {key: repr(value) for key, value in flatten(dataclasses.asdict(config)).items()}
    names = {param: name for name, param in model.named_parameters()}
    parameters = [f"{name} {tuple(p.shape)} {p.dtype} trained={p.requires_grad}" for p, name in names.items()]
    buffers = [f"{name} {tuple(b.shape)} {b.dtype}" for name, b in model.named_buffers()]
    for kind, texts in (("parameter", parameters), ("buffer", buffers)):
        lines[f"number of {kind}s"] = str(len(texts))
        lines.update({f"{kind} {i}": text for i, text in enumerate(texts)})
    lines["optimizer class"] = type(optimizer).__qualname__
    lines["number of optimizer groups"] = str(len(optimizer.param_groups))
    for i, group in enumerate(optimizer.param_groups):
        lines[f"optimizer group {i} params"] = str(
            [names.get(p, "a tensor outside the model") for p in group["params"]]
        )
        lines.update({f"optimizer group {i} {key}": repr(v) for key, v in group.items() if key != "params"})
    return lines


def agree_to_start(problem: Exception | None, mine: dict[str, str]) -> None:
    """Raise on every rank when one cannot start, or when ranks differ.

    Args:
        problem: what keeps this rank from starting, if anything does.
        mine: from :func:`describe`; empty with a problem.

    Raises:
        problem: on the rank that has one.
        RankMismatchError: on the others; or everywhere, with the first difference and both ranks.
    """
    raise_on_all_ranks(problem, lambda text: RankMismatchError(f"could not start: {text}"))
    first, *others = process_group.all_gather_object(mine)
    for rank, lines in enumerate(others, start=1):
        for key in [*first, *(k for k in lines if k not in first)]:
            ours, other = first.get(key, "absent"), lines.get(key, "absent")
            if ours != other:
                raise RankMismatchError(
                    f"ranks 0 and {rank} differ in {key}: {ours} on rank 0, {other} on rank {rank}. "
                    "Start all ranks with the same configuration, model and optimizer"
                )


def check_parameters(model: nn.Module) -> None:
    """Refuse what a flat buffer of one real dtype cannot hold: complex and fp64 values, two parameters in one memory.

    Raises:
        ConfigError: names the parameters; or a sparse buffer, of which ranks could have different numbers of elements.
    """
    for name, buffer in model.named_buffers():
        if buffer.layout is not torch.strided:
            raise ConfigError(
                f"buffer {name!r} is {buffer.layout}; deepzero gives every rank rank 0's buffers, and sends dense ones "
                "only. Register its indices and its values as two buffers, or keep it as a plain attribute"
            )
    places: list[tuple[int, int, int, str]] = []
    for name, param in model.named_parameters():
        if param.is_complex() or param.dtype == torch.float64:
            raise ConfigError(f"parameter {name!r} is {param.dtype}; deepzero trains fp32, bf16 and fp16 parameters")
        if param.is_meta:
            raise ConfigError(
                f"parameter {name!r} is on the meta device and has no values; load them first, or use zero stage 3, "
                "which makes them module by module"
            )
        if param.numel() and not isinstance(param, PartitionedParameter):
            start = param.data_ptr()
            places.append((param.untyped_storage().data_ptr(), start, start + param.nbytes, name))
    places.sort()
    for (storage, _, end, name), (other, start, _, another) in itertools.pairwise(places):
        if storage == other and start < end:
            raise ConfigError(
                f"parameters {name!r} and {another!r} share memory but are two objects; tie them by assigning one "
                "nn.Parameter to both places"
            )


def double_to_bits(value: float) -> int:
    """The 64 bits of a double, as a signed integer."""
    return struct.unpack("<q", struct.pack("<d", value))[0]


def bits_to_double(bits: int) -> float:
    """The inverse of :func:`double_to_bits`."""
    return struct.unpack("<d", struct.pack("<q", bits))[0]


@dataclass(frozen=True)
class StepAgreement:
    """What all ranks know alike about a step before the optimizer runs."""

    norm: float
    """2-norm of the summed gradients: times ranks, micro-batches and loss scale. ``inf``: not finite."""
    loss: float
    """Mean over ranks of each rank's mean over its micro-batches; NaN when no loss was seen."""
    stop: bool = False
    """Some rank has been asked to stop."""
    trouble: bool = False
    """Some rank cannot take this step."""
    bad_losses: tuple[tuple[int, float], ...] = ()
    """Ranks that saw a loss which is not finite, and that loss."""

    @property
    def finite(self) -> bool:
        """Whether every gradient of every rank is finite."""
        return math.isfinite(self.norm)


def agree(
    comm: Communicator, norm_sq_partials: torch.Tensor, loss: float | None, stop: bool = False, trouble: bool = False
) -> StepAgreement:
    """One all-reduce: norm and loss, the same bits on every rank; and whether all took the same path to here.

    Args:
        comm: the ranks.
        norm_sq_partials: this rank's share of the sum of squares, from ``GradientReducer.norm_sq_partials``.
        loss: this rank's mean loss; None: it has seen none.
        stop: whether this rank has been asked to stop.
        trouble: whether this rank cannot take the step.

    Raises:
        RankMismatchError: ranks have launched different collectives, which a backend that pairs them by their number
            (NCCL) does not notice as long as extents agree. Nothing has been updated.
    """
    path = comm.fingerprint() & (PATH_BITS - 1)
    losses = torch.zeros(comm.world_size, dtype=torch.int64)
    losses[comm.rank] = double_to_bits(math.nan if loss is None else loss)
    flags = [stop, trouble, loss is not None and not math.isfinite(loss)]
    own = torch.cat([losses, torch.tensor([*map(int, flags), path, path * path])])
    words = torch.cat([norm_sq_partials, own.to(norm_sq_partials.device)])
    comm.all_reduce(AGREEMENT, words).wait()
    numbers = comm.read(words)
    total = 0.0
    # By Cauchy and Schwarz W * sum(p^2) = (sum p)^2 exactly if all p are equal.
    if comm.world_size * numbers[-1] != numbers[-2] ** 2:
        raise RankMismatchError(
            f"ranks have launched different collectives in this step (rank {comm.rank} was last in {comm.position}): "
            "what they received may have been meant for something else, and nothing is updated. Let all ranks run the "
            "same modules in the same order; mark mixtures of experts with set_z3_leaf_modules"
        )
    everyone = [bits_to_double(bits) for bits in numbers[WORDS : WORDS + comm.world_size]]
    for value in everyone:
        total += value
    stopping, troubled, bad = (count > 0 for count in numbers[-OWN_WORDS:-PATH_WORDS])
    bad_losses = tuple((rank, value) for rank, value in enumerate(everyone) if bad and not math.isfinite(value))
    return StepAgreement(norm_from_words(numbers[:WORDS]), total / comm.world_size, stopping, troubled, bad_losses)


def check_precision(dtype: str, device: torch.device) -> None:
    """Raise a :class:`ConfigError` when ``device`` cannot compute in ``dtype``; say it when it does so slowly."""
    if dtype == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        name = torch.cuda.get_device_name(device)
        raise ConfigError(f"precision=bf16: {name} has no bf16 arithmetic; use precision=fp16 or precision=fp32")
    if dtype == "bf16" and device.type == "cpu" and process_group.rank() == 0 and lacks_bf16_arithmetic():
        _say_slow()


def lacks_bf16_arithmetic() -> bool:
    """Whether this is an x86 processor without bf16 instructions; False where torch cannot tell."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return False
    # Torch's queries are private names, which a later version may drop.
    queries = [getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")]
    return all(query is not None and not query() for query in queries)


@functools.cache
def _say_slow() -> None:
    log.warning(
        "precision=bf16: this processor has no bf16 arithmetic (AVX512_BF16, AMX) and is slow at it; precision=fp32 is "
        "likely faster, and takes more memory (said once)"
    )
