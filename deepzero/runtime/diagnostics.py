"""Looking at a run from outside: the hash of the parameters, the ledger of all ranks, the first bad gradient."""

from __future__ import annotations

import hashlib
import itertools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from deepzero.comm import process_group
from deepzero.comm.ledger import UNPREDICTED, Ledger, Traffic
from deepzero.device import accelerator_of
from deepzero.runtime.zero.optimizer_shard import OptimizerShard
from deepzero.runtime.zero.partition_parameters import GatheredParameters, PartitionedParameter, ZeroParameter
from deepzero.runtime.zero.stage3 import PartitionedParamGroup
from deepzero.utils.storage import as_bytes, storage_ptr_of

if TYPE_CHECKING:
    from deepzero.runtime.build import ZeroComponents


def params_sha256(engine: Any) -> str:
    """SHA-256 over the raw bytes of every parameter, by sorted name; a tied parameter counts once. A collective."""
    digest = hashlib.sha256()
    for param in gathered_in_turn(param for _, param in sorted(engine.module.named_parameters())):
        digest.update(as_bytes(param.cpu().contiguous()).numpy().tobytes())
    return digest.hexdigest()


def gathered_in_turn(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The same tensors; a partitioned parameter has its values until the next tensor is asked for. A collective.

    A bucket is gathered once for all of its parameters that follow each other, not once for each.
    """
    bucket_of = lambda tensor: tensor._record.placed()[0] if isinstance(tensor, ZeroParameter) else None
    for bucket, row in itertools.groupby(tensors, bucket_of):
        following = list(row)
        with GatheredParameters(following[0] if bucket is not None else None):
            yield from following


def whole_state_dict(model: nn.Module, with_frozen: bool = True, on_cpu_of_rank_0: bool = False) -> dict[str, Any]:
    """The model's state dict with a copy of each whole parameter, gathered bucket by bucket. A collective.

    Without ``with_frozen`` parameters that are not trained are left out; ``on_cpu_of_rank_0`` gives others nothing.
    """
    state, names, mine = model.state_dict(), dict[nn.Parameter, list[str]](), process_group.rank() == 0
    # Hooks of the model may have given an entry another name than its parameter's (checkpoint_wrapper's do), or values
    # of their own. So a parameter's entry is known by its record, or by the memory that it shows.
    named = dict(model.named_parameters(remove_duplicate=False))
    buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}  # some may lie in a parameter's memory
    params = {_identity(param): param for param in named.values()}
    for name, value in list(state.items()):
        param = params.get(_identity(value)) if name not in buffers else None
        known = named.get(name) if param is None else param
        if not with_frozen and known is not None and not known.requires_grad:
            del state[name]
            continue
        if param is not None:
            names.setdefault(param, []).append(name)  # several if it is tied: one tensor under all of them
    for whole, its_names in zip(gathered_in_turn(names), names.values(), strict=True):
        device = whole.device if not on_cpu_of_rank_0 else "cpu" if mine else "meta"
        state |= dict.fromkeys(its_names, whole.detach().to(device, copy=True))
    if on_cpu_of_rank_0:
        return {name: value.cpu() if torch.is_tensor(value) else value for name, value in state.items() if mine}
    return state


def _identity(value: Any) -> Any:
    """Equal for a parameter and what a state dict has of it; None: neither."""
    if not torch.is_tensor(value) or value.layout is not torch.strided or value.is_nested:
        return None
    if isinstance(value, PartitionedParameter):
        return value._record
    return storage_ptr_of(value), value.storage_offset(), value.shape, value.stride()


def tensor_words(ledger: Ledger, zero: ZeroComponents, tensor: torch.Tensor) -> str:
    """What a tensor is in ZeRO's words: its category in the ledger, its buckets and their parameters; or "".

    Asked without torch function modes, and with partitioned parameters as plain tensors.
    """

    def same(other: torch.Tensor | None) -> bool:
        if other is None or storage_ptr_of(other) != storage_ptr_of(tensor):
            return False
        (lo, hi), (begin, end) = ((t.data_ptr(), t.data_ptr() + t.nbytes) for t in (tensor, other))
        return lo < end and begin < hi

    buffers = [(f"send buffer {n}", b.send) for n, b in enumerate(zero.bucket_reducer._all_buffers)]
    buffers += [(f"receive buffer {n}", b.recv_buffer) for n, b in enumerate(zero.bucket_reducer._all_buffers)]
    places = [name for name, buffer in buffers if same(buffer)]
    for number, group in enumerate(zero.all_groups):
        grads = zero.optimizer_shard.grad_S[number] if number < len(zero.groups) else None
        for bucket in group.layout.buckets:
            parts: list[torch.Tensor | None] = [None if group.replicated else group.param_shard(bucket)]
            if grads is not None:
                start = group.layout.shard_numel - grads.numel()
                parts.append(bucket.of(grads) if group.replicated else bucket.shard_of(grads, start))
            if isinstance(group, PartitionedParamGroup):
                parts.append(group.buckets[bucket.index]._gathered)
            else:
                parts.append(bucket.of(group.flat_P))
            parts += [m for m, f in zip(group.masters, group.fragments, strict=False) if f.slot in bucket.slots]
            if any(same(part) for part in parts):
                names = [group.names[slot.index] for slot in bucket.slots]
                more = f" and {len(names) - 3} more" if len(names) > 3 else ""
                places.append(f"bucket {bucket.index} of group {number} ({', '.join(names[:3])}{more})")
    return ", ".join([*ledger.categories_of(tensor), *places])


def tensor_namer(ledger: Ledger, zero: ZeroComponents) -> Callable[[torch.Tensor], str]:
    """:func:`tensor_words` of an engine, for as long as there is one."""
    parts = weakref.ref(ledger), weakref.ref(zero)

    def name(tensor: torch.Tensor) -> str:
        ledger, zero = parts[0](), parts[1]()
        return "" if ledger is None or zero is None else tensor_words(ledger, zero, tensor)

    return name


def gather_report(engine: Any) -> dict[str, Any]:
    """All ranks' ledgers in one: means over ranks, and for memory also the most that any rank held.

    The mean is what the closed forms speak of: with padding at the end of a bucket the last rank owns and sends a
    few true elements fewer than the first, and the sum over ranks is exact.

    ``activations`` is a residual, without prediction: the peak of memory over what was in use when everything stood.
    ``snapshot``, where asynchronous saves were made, is their copy of the model state, in host memory; ``host_states``
    what ``offload_states`` has moved there; ``host_activations`` what checkpointed activations take there.
    """
    ledger, device = engine.comm.ledger, engine.comm.device
    residual = max(0, accelerator_of(device).max_memory_allocated(device) - engine.zero.bytes_at_build)
    unpredicted = {"activations": residual, **{name: ledger.held.get(name, 0) for name in UNPREDICTED}}
    mine = ledger.report()
    mine["memory"] |= {name: {"predicted": None, "measured": held} for name, held in unpredicted.items()}
    reports = process_group.all_gather_object(mine)
    memory: dict[str, Any] = {}
    for category, entry in reports[0]["memory"].items():
        held = [report["memory"][category]["measured"] for report in reports]
        if category not in UNPREDICTED or any(held):
            measured = {"measured": _whole(sum(held) / len(held)), "largest": max(held)}
            memory[category] = {"predicted": entry["predicted"], **measured}
    communication: dict[str, Any] = {}
    for kind in sorted({kind for report in reports for kind in report["communication"]}):
        none = {"measured": Traffic().as_dict(), "predicted": Traffic().as_dict()}
        entries, total = [report["communication"].get(kind, none) for report in reports], Traffic()
        for entry in entries:
            total.add(Traffic(**entry["measured"]))
        mean = {name: _whole(value / len(reports)) for name, value in total.as_dict().items()}
        communication[kind] = {"predicted": entries[0]["predicted"], "measured": mean}
    return {"memory": memory, "communication": communication}


def _whole(value: float) -> float:
    return int(value) if float(value).is_integer() else value


def find_bad_gradient(model: nn.Module, shard: OptimizerShard) -> str:
    """The model's first parameter with an inf or NaN in its reduced gradient, on any rank. A collective."""
    places = {name: place for place, (name, _) in enumerate(model.named_parameters())}
    bad = [
        group.names[fragment.slot.index]
        for group in shard.groups
        for fragment, master in zip(group.fragments, group.masters, strict=True)
        if not bool(torch.isfinite(shard.grads[master]).all())
    ]
    everyone = [name for names in process_group.all_gather_object(bad) for name in names]
    return min(everyone, key=places.__getitem__) if everyone else "no parameter alone; the sum of squares"


def layer_of(name: str) -> str:
    """The layer that a parameter belongs to: its block, where modules are numbered, else the module that has it.

    Example:
        >>> layer_of("blocks.3.attention.query.weight"), layer_of("embedding.weight"), layer_of("scale")
        ('blocks.3', 'embedding', 'scale')
    """
    words = name.split(".")
    numbered = [at for at, word in enumerate(words[:-1]) if word.isdigit()]
    return ".".join(words[: numbered[0] + 1] if numbered else words[:-1] or words)


def gradient_norms(engine: Any) -> dict[str, float]:
    """The last step's gradient norm, layer by layer, before clipping: ``gradients/LAYER``. A collective.

    It is made of what the global norm was made of (``grad_norm.py``), so that no gradient is read again; one gather
    brings 8 bytes a layer to every rank. Empty before the first step and after one that was skipped.
    """
    if engine.last_step is None or engine.last_step.skipped:
        return {}
    squares = engine.zero.stage.gradients.param_norm_sq()
    divisor = engine.comm.world_size * engine.batch.accumulation * engine.last_step.loss_scale
    names = [name for group in engine.zero.groups for name in group.names]
    layers = dict.fromkeys(map(layer_of, names), 0.0)  # the same layers in the same order on every rank
    for name, square in zip(names, torch.cat(list(squares)).tolist(), strict=True):
        layers[layer_of(name)] += square
    mine = torch.tensor(list(layers.values()), dtype=torch.float64)
    sums = process_group.gather_and_sum(mine, engine.comm.device).tolist()
    return {f"gradients/{layer}": math.sqrt(square) / divisor for layer, square in zip(layers, sums, strict=True)}


def describe_offload(engine: Any) -> str | None:
    """One line for rank 0's log: what is in host memory, how many threads step on it and with which kernel."""
    return engine.zero.offload.describe(engine.optimizer) if engine.zero.offload is not None else None


def quantization_report(engine: Any) -> dict[str, Any]:
    """What the error meter has read last, in dB, by bucket, for ``weights`` and ``gradients``; empty without one.

    ``unquantized`` names what fell below a bound and travels as it is.
    """
    if (meter := engine.zero.meter) is None:
        return {}
    return {"weights": {**meter.weights}, "gradients": {**meter.gradients}, "unquantized": [*meter.unquantized]}


def step_metrics(engine: Any) -> dict[str, float]:
    """What the last step has to say beside its record, in flat words for a log.

    Communication that was hidden (``profiler_ranges.py``), the offload's report (``offload/optimizer_step/seconds`` and
    so on), the error meter's readings.
    """
    report = engine.zero.offload_report().items()
    offload = {f"offload/{part}/{name}": value for part, leg in report for name, value in leg.items()}
    meter = engine.zero.meter
    return {**engine.comm.overlap.metrics(), **offload, **(meter.metrics() if meter is not None else {})}
