"""What ranks must agree on, and how they find out: before the first step, and in every step.

Ranks that disagree hang each other or, worse, train. Before the first step each rank tells the others what it was
configured with and which parameters it has; a difference is raised on *every* rank, with what differs and on which
rank. Models that let ranks part are refused (:func:`check_modules`); buffers begin as rank 0's, and some take
the dtype of the weights (:func:`place_buffers`).

In each step they exchange one small message (:class:`StepAgreement`): the exact sum of squares of the gradients, from
which all compute the same norm, the losses, from which all compute the same mean, and whether any rank cannot take the
step, so that none does. It travels as integers in a single all-reduce, which is exact and has no order. And the same
parameters must train as did when the engine was built (:class:`TrainedParameters`).
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import operator
import platform
import re
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.utils import _pytree as pytree

from deepzero.comm import process_group
from deepzero.comm.collectives import Communicator
from deepzero.comm.process_group import raise_on_all_ranks
from deepzero.config.strict import ConfigError
from deepzero.device import accelerator_of
from deepzero.runtime.grad_norm import EXPONENT_BINS, norm_from_bins
from deepzero.runtime.zero.partition_parameters import PartitionedParameter
from deepzero.runtime.zero.stage_1_and_2 import SETUP_BROADCAST, ParamGroup
from deepzero.utils.formatting import flatten

log = logging.getLogger(__name__)

AGREEMENT = "agreement.all_reduce"

OWN_WORDS = 5
"""Integers of the message besides the norm's and the losses: how many ranks were asked to stop, are in trouble, have a
loss that is not finite; and two that show whether all ranks took the same path."""

PATH_BITS = 1 << 20
"""Of the fingerprint; its square, summed over a million ranks, fits into an integer of 64 bits."""
NO_LOSS = 0x7FF8_0000_0000_0001
"""The bits of a NaN that no arithmetic makes, in the place of a rank that has seen no loss."""


class RankMismatchError(RuntimeError):
    """Ranks were started with different settings or different models."""


def describe(config: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Everything in which ranks must be alike, by name: settings, parameters, buffers, optimizer and its groups."""
    lines = {key: _by_value(value) for key, value in flatten(dataclasses.asdict(config)).items()}
    names = {param: name for name, param in model.named_parameters()}
    tensors = {
        "parameter": [f"{name!r} {tuple(p.shape)} {p.dtype} trained={p.requires_grad}" for p, name in names.items()],
        "buffer": [f"{name!r} {tuple(b.shape)} {b.dtype}" for name, b in model.named_buffers()],
    }
    for kind, texts in tensors.items():
        lines[f"number of {kind}s"] = str(len(texts))
        lines.update({f"{kind} {i}": text for i, text in enumerate(texts)})
    lines["optimizer class"] = type(optimizer).__qualname__
    lines["number of optimizer groups"] = str(len(optimizer.param_groups))
    for i, group in enumerate(optimizer.param_groups):
        held = [names.get(p, "a tensor outside the model") for p in group["params"]]
        state = {names.get(p): dict(optimizer.state[p]) for p in group["params"] if optimizer.state.get(p)}
        alike = {**group, "params": held, "state": state}
        lines.update({f"optimizer group {i} {key}": _by_value(value) for key, value in alike.items()})
    return lines


def _by_value(value: Any) -> str:
    """A text without what each rank has for itself: a tensor's device, an object's address."""
    plain = lambda t: t.tolist() if t.numel() == 1 else tuple(t.shape)
    return re.sub(r" at 0x[0-9a-f]+", "", repr(pytree.tree_map_only(torch.Tensor, plain, value)))


def agree_to_start(problem: Exception | None, mine: dict[str, str]) -> None:
    """Raise on every rank when one cannot start, or when ranks differ. ``mine`` is :func:`describe`'s, empty then.

    A rank that has a ``problem`` raises that; the others, or all, a RankMismatchError with the first difference.
    """
    raise_on_all_ranks(problem, lambda text: RankMismatchError(f"could not start: {text}"))
    first, *others = process_group.all_gather_object(mine)
    for rank, lines in enumerate(others, start=1):
        for key in {**first, **lines}:
            ours, other = first.get(key, "absent"), lines.get(key, "absent")
            if ours != other:
                raise RankMismatchError(
                    f"ranks 0 and {rank} differ in {key}: {ours} on rank 0, {other} on rank {rank}. "
                    "Start all ranks with the same configuration, model and optimizer"
                )


def check_parameters(model: nn.Module) -> None:
    """Refuse what a flat buffer of one real dtype cannot hold: complex and fp64 values, two parameters in one memory.

    And a sparse buffer, of which ranks could have different numbers of elements.
    """
    for name, buffer in model.named_buffers():
        if buffer.layout is not torch.strided:
            raise ConfigError(
                f"buffer {name!r} is {buffer.layout}; deepzero gives every rank rank 0's buffers, and sends dense ones "
                "only. Register its indices and its values as two buffers, or keep it as a plain attribute"
            )
    places: list[tuple[int, int, str, nn.Parameter]] = []
    for name, param in model.named_parameters():
        if param.layout is not torch.strided:
            raise ConfigError(f"parameter {name!r} is {param.layout}; deepzero trains dense parameters")
        if param.is_inference():
            raise ConfigError(f"parameter {name!r} was made in torch.inference_mode; build the model outside of it")
        if param.is_complex() or param.dtype == torch.float64:
            raise ConfigError(
                f"parameter {name!r} is {param.dtype}; deepzero takes fp32, bf16 and fp16 parameters, frozen ones too. "
                "Cast it with .float(), a complex one with torch.view_as_real; or make it a buffer if it does not train"
            )
        # Without bytes: one whose engine has its states on the host.
        if param.numel() and not isinstance(param, PartitionedParameter) and param.untyped_storage().nbytes():
            start, steps = param.data_ptr(), zip(param.shape, param.stride(), strict=True)
            elements = 1 + sum((size - 1) * stride for size, stride in steps)
            places.append((start, start + elements * param.itemsize, name, param))
    cluster: list[tuple[int, int, str, nn.Parameter]] = []  # of extents that overlap
    for place in sorted(places, key=lambda place: place[:2]):
        if cluster and place[0] >= max(end for _, end, *_ in cluster):
            _check_disjoint(cluster)
            cluster = []
        cluster.append(place)
    _check_disjoint(cluster)


def _check_disjoint(cluster: Sequence[tuple[int, int, str, nn.Parameter]]) -> None:
    """Extents may overlap where no element does: of columns of one matrix. So bytes are claimed, one by one."""
    if len(cluster) < 2:
        return
    first = cluster[0][0]
    claimed = torch.zeros(max(end for _, end, *_ in cluster) - first, dtype=torch.int16, device="cpu")
    for number, (start, _, name, param) in enumerate(cluster, start=1):
        size = param.itemsize
        mine = claimed.as_strided((*param.shape, size), (*(s * size for s in param.stride()), 1), start - first)
        if other := int(mine.max()):
            raise ConfigError(
                f"parameters {cluster[other - 1][2]!r} and {name!r} share memory but are two objects; tie them by "
                "assigning one nn.Parameter to both places"
            )
        mine.fill_(number)


def check_modules(model: nn.Module, world_size: int, stage: int) -> None:
    """Refuse, in training, modules that reduce gradients, or write their weights: ranks would not have the same ones.

    They are torch's DataParallels and an embedding with ``max_norm`` that trains on several ranks; in stage 3 any with
    ``max_norm``, and what ``torch.jit`` has compiled.
    """
    for name, module in model.named_modules():
        if stage == 3 and isinstance(module, torch.jit.ScriptModule):
            raise ConfigError(
                f"module {name!r} is a {type(module).__name__}: stage 3 fetches weights in hooks of modules, which "
                "torch.jit does not support. Use the module that it was made of, or zero stage 0 to 2"
            )
        if isinstance(module, (nn.DataParallel, DistributedDataParallel)):
            raise ConfigError(
                f"{f'module {name!r}' if name else 'model='} is wrapped in {type(module).__name__}, which spreads data "
                "or adds up gradients by itself; pass what it wraps (its .module)"
            )
        writes = isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and getattr(module, "max_norm", None) is not None
        if writes and (stage == 3 or (world_size > 1 and module.weight.requires_grad)):
            part = "and ranks would part" if world_size > 1 else "and stage 3 keeps no write into gathered values"
            raise ConfigError(
                f"module {name!r} has max_norm={module.max_norm}: each rank's forward pass would write into the weight "
                f"what its own batch asks for, {part}. Leave max_norm out, and renormalise after "
                "engine.step(), inside `with deepzero.zero.GatheredParameters(weight, modifier_rank=0):`"
            )


def _asks_for_one_dtype(module: nn.Module) -> bool:
    """Whether it is one of torch's own that computes with buffers and weights of one dtype."""
    kind = type(module)
    if isinstance(module, torch.jit.ScriptModule):  # of one class, whatever it was made of
        kind = getattr(nn, module.original_name, kind)
    return issubclass(kind, _SpectralNorm) or (
        issubclass(kind, _NormBase) and getattr(module, "weight", None) is not None
    )


@torch.no_grad()
def place_buffers(model: nn.Module, comm: Communicator, dtype: torch.dtype) -> None:
    """Buffers go to the device and take rank 0's values; they keep their dtype, as in DeepSpeed.

    But torch's batch norm, instance norm and spectral norm compute with buffers and weights of one dtype, ``dtype``.
    Others may need their precision (rotary frequencies; statistics beside no weights, which take any input).
    """
    placed: dict[torch.Tensor, torch.Tensor] = {}  # one that two modules share stays one, as torch's own needs it
    for module in sorted(model.modules(), key=_asks_for_one_dtype, reverse=True):
        hooks = [hook.name for hook in module._forward_pre_hooks.values() if isinstance(hook, SpectralNorm)]
        named = {f"{name}_{vector}" for name in hooks for vector in "uv"}
        for key, buffer in module._buffers.items():
            if buffer is not None:
                cast = (_asks_for_one_dtype(module) or key in named) and buffer.is_floating_point()
                if buffer not in placed:
                    moved = buffer.to(comm.device, dtype if cast else buffer.dtype)
                    placed[buffer] = moved = moved.resolve_conj().resolve_neg().contiguous()
                    comm.broadcast(SETUP_BROADCAST, moved)
                module._buffers[key] = placed[buffer]


@dataclass(frozen=True)
class StepAgreement:
    """What all ranks have alike about a step before the optimizer runs."""

    norm: float
    """2-norm of the summed gradients: times ranks, micro-batches and loss scale. ``inf``: not finite."""
    loss: float
    """Mean over ranks and micro-batches, rounded once; NaN when no loss was seen."""
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


def sum_rounded_once(values: Sequence[float]) -> float:
    """The sum, rounded once: the same however ranks share the values, as long as these are fp32 and no 2**25 apart."""
    # A rank's sum of such values has no more bits than a double, so nothing is lost before the ranks' sums are added.
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):  # inf - inf
        return sum(values)


def agree(
    comm: Communicator,
    norm_sq_partials: torch.Tensor,
    loss: float | None,
    micro_batches: int,
    stop: bool = False,
    trouble: bool = False,
) -> StepAgreement:
    """One all-reduce: norm and loss, the same bits on every rank; and whether all took the same path to here.

    This rank brings its share of the sum of squares (``GradientReducer.norm_sq_partials``), the sum of its losses over
    so many micro-batches (None: it has seen none), whether it has been asked to stop, and whether it cannot take the
    step. A RankMismatchError: ranks have launched different collectives, which a backend that pairs them by their
    number (NCCL) does not notice as long as extents agree.
    """
    path = comm.flight_recorder.fingerprint & (PATH_BITS - 1)
    # A double travels as the signed integer of its bits, each in its rank's place: the sum adds only zeros to it.
    losses = [0] * comm.world_size
    losses[comm.rank] = NO_LOSS if loss is None else struct.unpack("<q", struct.pack("<d", loss))[0]
    flags = [int(flag) for flag in (stop, trouble, loss is not None and not math.isfinite(loss))]
    own = torch.tensor([*losses, *flags, path, path * path], dtype=torch.int64)
    device = norm_sq_partials.device
    # From locked memory, so that the all-reduce is launched before the GPU has come to it; then the CPU waits, once.
    words = torch.cat([norm_sq_partials, accelerator_of(device).pin(own).to(device, non_blocking=True)])
    comm.all_reduce(AGREEMENT, words).wait()
    numbers = comm.read(words)
    # By Cauchy and Schwarz W * sum(p^2) = (sum p)^2 exactly if all p are equal.
    if comm.world_size * numbers[-1] != numbers[-2] ** 2:
        raise RankMismatchError(
            f"ranks have launched different collectives in this step (rank {comm.rank} was last in "
            f"{comm.flight_recorder.position}): what they received may have been meant for something else, and nothing "
            "is updated. Let all ranks run the same modules in the same order; mark mixtures of experts with "
            "set_z3_leaf_modules"
        )
    losses = numbers[EXPONENT_BINS:-OWN_WORDS]
    everyone = struct.unpack(f"<{comm.world_size}d", struct.pack(f"<{comm.world_size}q", *losses))
    stopping, troubled, bad = (count > 0 for count in numbers[-OWN_WORDS:-2])
    seen = [(rank, value) for rank, value in enumerate(everyone) if losses[rank] != NO_LOSS]
    bad_losses = tuple((rank, value) for rank, value in seen if bad and not math.isfinite(value))
    mean = sum_rounded_once(everyone) / (comm.world_size * micro_batches)
    return StepAgreement(norm_from_bins(numbers[:EXPONENT_BINS]), mean, stopping, troubled, bad_losses)


def _changed(name: str, what: str) -> RuntimeError:
    advice = "call engine.destroy(), then deepzero.initialize with the model as it is to be trained"
    return RuntimeError(f"parameter {name!r} {what}; or {advice}")


class TrainedParameters:
    """The parameters that an engine trains, and the model that they must stay in.

    Masters, gradients and optimizer states exist for the parameters that trained at ``deepzero.initialize``. One that
    is frozen afterwards would go on moving by its momentum and weight decay; one that is unfrozen or added would never
    move, and might have other values on every rank. So each optimizer step looks whether the same parameters train.
    Between two steps a program may freeze and unfreeze as it likes, as it does where two models train in turn.
    """

    def __init__(self, model: nn.Module, groups: Iterable[ParamGroup]) -> None:
        self._model = model
        names = {param: name for name, param in model.named_parameters()}
        grouped = {param for group in groups for param in group.params}
        self._trained = {param: name for param, name in names.items() if param in grouped}
        # With whether it may require grad all the same: it is in no group of the optimizer, and that has been said.
        self._untrained = [(param, name, param.requires_grad) for param, name in names.items() if param not in grouped]
        self._remember()

    def _remember(self) -> None:
        """The model's tree: the step compares it, object by object, instead of naming all parameters anew."""
        self._tree = [(m, list(m._parameters.values()), list(m._modules.values())) for m in self._model.modules()]

    def _same_tree(self) -> bool:
        return all(
            len(module._parameters) == len(params)
            and len(module._modules) == len(children)
            and all(map(operator.is_, module._parameters.values(), params))
            and all(map(operator.is_, module._modules.values(), children))
            for module, params, children in self._tree
        )

    def check(self) -> None:
        """Raise a :class:`RuntimeError` when other parameters train than did when the engine was built."""
        with torch._C.DisableTorchFunctionSubclass():  # flags need no values, and no detour through Python
            for param, name in self._trained.items():
                if not param.requires_grad:
                    raise _changed(
                        name, "was frozen (requires_grad=False) after deepzero.initialize: its momentum and weight "
                        "decay would go on moving it. Let it train again, or give it a param group of its own from the "
                        "start and set that group's lr to 0"
                    )  # fmt: skip
                if param.grad is not None:
                    raise RuntimeError(
                        f"parameter {name!r} has a .grad that was assigned by hand: engine.step() takes what backward "
                        "passes have left, and would ignore it. Use deepzero.utils.safe_set_full_grad, or set it to "
                        "None"
                    )
            for param, name, trainable in self._untrained:
                if param.requires_grad and not trainable:
                    raise _changed(
                        name, "was unfrozen (requires_grad=True) after deepzero.initialize: ZeRO has no master and no "
                        "optimizer state for it, and it would never change. Freeze it again"
                    )  # fmt: skip
            if self._same_tree():
                return
            now = {param: name for name, param in self._model.named_parameters()}
            for name in (name for param, name in self._trained.items() if param not in now):
                raise _changed(
                    name, "has been replaced or removed since deepzero.initialize, and the optimizer would go on "
                    "training the old one. Put it back"
                )  # fmt: skip
            known = {*self._trained, *(param for param, *_ in self._untrained)}
            for name in (name for param, name in now.items() if param.requires_grad and param not in known):
                raise _changed(
                    name, "has been added since deepzero.initialize: the optimizer does not know it, and every rank "
                    "has its own values of it. Freeze it (requires_grad_(False))"
                )  # fmt: skip
            self._remember()


def check_precision(dtype: str, device: torch.device) -> None:
    """Raise a :class:`ConfigError` when ``device`` cannot compute in ``dtype``; say it when it does so slowly."""
    if dtype == "bf16" and not accelerator_of(device).supports_bf16(device):
        name = accelerator_of(device).device_name(device)
        raise ConfigError(f"precision=bf16: {name} has no bf16 arithmetic; use precision=fp16 or precision=fp32")
    if dtype != "bf16" or device.type != "cpu" or platform.machine().lower() not in ("x86_64", "amd64"):
        return
    # Torch's queries are private names, which a later version may drop.
    queries = [getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")]
    if process_group.rank() == 0 and all(query is not None and not query() for query in queries):
        _say_slow()


@functools.cache
def _say_slow() -> None:
    log.warning(
        "precision=bf16: this processor has no bf16 arithmetic (AVX512_BF16, AMX) and is slow at it; precision=fp32 is "
        "likely faster, and takes more memory (said once)"
    )
