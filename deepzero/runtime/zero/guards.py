"""What is refused because it would be lost: ownership of parameters, writes to gathered ones, uses of offloaded ones.

A parameter belongs to at most one engine. Two engines over one model would both reduce its gradients, and
``model.to()`` would move it out of ZeRO's buffers; both are refused before anything changes. A model that broke off
half-built belongs to no engine, and none takes it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.overrides import get_default_nowrap_functions
from torch.utils.weak import WeakIdKeyDictionary

from deepzero.utils.errors import ConfigError, PartitionedUseError

if TYPE_CHECKING:
    from deepzero.runtime.zero.overlap_param_gather import HiddenParameter
    from deepzero.runtime.zero.partition_parameters import ParamRecord, PartitionedParameter, ZeroParameter
    from deepzero.runtime.zero.partitioned_bucket import PartitionedBucket
    from deepzero.runtime.zero.tensor_fragment import TensorFragments

log = logging.getLogger(__name__)

# ---- ownership -------------------------------------------------------------------------------------------------------

# Parameter -> whether an engine owns it, and who knows its fragments, by a weak reference: a parameter may outlive its
# engine. None: an exception came while the model was being moved, and nobody can tell which parameters have values.
# Not an attribute of the parameter, which a pickled model would carry.
_OWNERS: WeakIdKeyDictionary = WeakIdKeyDictionary()
FREE: tuple[bool | None, Callable[[], TensorFragments | None]] = (False, lambda: None)

STAY = (
    "Device and dtype of a model's parameters are settled by deepzero.initialize (precision, the rank's device): move "
    "or cast the model before it, or after engine.destroy()"
)
ANEW = "Build model and optimizer anew"
_APPLY = nn.Module._apply


def left_buffer_error(param: nn.Parameter, name: str, turned_from: torch.Size | None) -> RuntimeError:
    """The error of a parameter that has left its flat buffer, or was transposed or reshaped in it."""
    if turned_from is None:
        now, how = f"other memory, {param.dtype} on {param.device}", "an assignment to param.data, or set_"
        text = f"has left ZeRO's flat buffer: it is now {now} ({how}). {STAY}; write values with param.copy_"
    else:
        now = f"shape {tuple(param.shape)} and strides {param.stride()}, not {tuple(turned_from)} row by row"
        text = (
            f"was transposed or reshaped in ZeRO's flat buffer: it has {now} (t_, or an assignment to param.data). "
            "Undo that, and write or load its values again, with param.copy_; transposed ones: "
            "param.copy_(param.t().clone())"
        )
    return RuntimeError(f"parameter {name!r} {text}")


def _apply(module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
    """In place of ``nn.Module._apply``, which is ``to``, ``half``, ``cuda`` and their like, of every module.

    A call that leaves an engine's parameters alone (``to`` the device where they are) goes on with everything else; one
    that would move or cast any raises a RuntimeError before anything is changed.
    """
    staying: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter]] = []
    for prefix, inside in module.named_modules() if recurse else [("", module)]:
        for key, param in inside._parameters.items():
            if param is not None and _OWNERS.get(param, FREE)[0]:
                staying.append((inside._parameters, key, param))
                # An empty tensor shows what ``fn`` does: it returns the same object only if nothing would change.
                probe = torch.empty([0] * param.dim(), dtype=param.dtype, device=param.device)
                shared = probe.is_shared()
                moved = fn(probe)
                if moved is not probe or probe.is_shared() != shared:
                    name = f"{prefix}.{key}" if prefix else key
                    raise RuntimeError(
                        f"parameter {name!r}, {param.dtype} on {param.device}, belongs to an engine: model.to(), "
                        f".half() and their like would make it {moved.dtype} on {moved.device}, outside of ZeRO's "
                        f"buffers. {STAY}"
                    )
    try:
        for params, key, _ in staying:
            params[key] = None
        return _APPLY(module, fn, recurse)
    finally:
        for params, key, param in staying:
            params[key] = param


def check_unclaimed(names: Mapping[nn.Parameter, str]) -> None:
    """Raise a :class:`ConfigError` if any of these parameters belongs to an engine, or was lost on the way to one."""
    for param, name in names.items():
        owned, engine = _OWNERS.get(param, FREE)
        if owned and engine is not FREE[1] and engine() is None:
            gone = "belongs to an engine that was let go of without engine.destroy()"
            raise ConfigError(f"parameter {name!r} {gone}. {ANEW}, or give copy.deepcopy(model) in stages 0-2")
        if owned:
            raise ConfigError(f"parameter {name!r} belongs to another engine; call engine.destroy() on that one first")
        if owned is None:
            raise ConfigError(
                f"parameter {name!r} is of a model that an earlier deepzero.initialize left in pieces, as it broke off "
                f"while it moved the parameters. {ANEW}"
            )


def register_owner(param: nn.Parameter, name: str) -> None:
    """``param`` belongs to an engine from now on. Raises a :class:`ConfigError` if it belongs to one already."""
    check_unclaimed({param: name})
    _OWNERS[param] = (True, FREE[1])
    # Never put back: somebody may have wrapped it since, and for parameters of no engine it changes nothing.
    nn.Module._apply = _apply  # type: ignore[method-assign]


def register_fragments(of_engine: TensorFragments) -> None:
    """Let :func:`fragments_of` find what an engine knows of its model's parameters; of a shared one the last engine."""
    for param in of_engine.names:
        _OWNERS[param] = (_OWNERS.get(param, FREE)[0], weakref.ref(of_engine))


def fragments_of(param: nn.Parameter) -> TensorFragments | None:
    """What the engine that has this very parameter, frozen or not, knows of its model's; None without an engine."""
    found = _OWNERS.get(param, FREE)[1]()
    return found if found is not None and param in found.names else None


def unregister_owners(params: Iterable[nn.Parameter]) -> None:
    """These parameters belong to no engine any more."""
    for param in params:
        _OWNERS.pop(param, None)


@contextlib.contextmanager
def lost_on_error(model: nn.Module) -> Iterator[None]:
    """While a model's parameters are being moved: after an exception no engine takes what is left of them."""
    try:
        yield
    except BaseException as error:
        for param in model.parameters():
            _OWNERS[param] = (None, FREE[1])
        text = f"deepzero.initialize broke off while it moved the model's parameters, which it leaves in pieces. {ANEW}"
        getattr(error, "add_note", log.error)(text)  # Python 3.10 has no notes
        raise


# ---- what torch may do with a partitioned parameter without its values -----------------------------------------------

_PROPERTIES = """
shape dtype device grad _grad requires_grad is_leaf grad_fn ndim layout is_cuda is_cpu is_meta is_sparse is_mps
is_sparse_csr is_quantized is_mkldnn is_nested is_xpu is_hpu is_ipu is_xla is_vulkan is_maia is_mtia output_nr _version
_backward_hooks _post_accumulate_grad_hooks retains_grad name itemsize nbytes names _cdata
""".split()  # noqa: SIM905
_WRITABLE = ("grad", "_grad", "requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks")
_METHODS = """
size dim numel nelement ndimension is_floating_point is_complex is_signed is_conj is_neg register_hook requires_grad_
register_post_accumulate_grad_hook element_size get_device is_contiguous __len__ __hash__ is_inference is_same_size
is_pinned is_shared retain_grad new_empty new_empty_strided new_zeros new_ones
""".split()  # noqa: SIM905
_FUNCTIONS = """
is_floating_point is_complex is_signed is_conj is_neg numel is_same_size is_inference
empty_like zeros_like ones_like rand_like randn_like _has_compatible_shallow_copy_type
""".split()  # noqa: SIM905


def _metadata_functions() -> frozenset[Any]:
    names = [(getattr(torch.Tensor, name, None), "__get__") for name in _PROPERTIES]
    names += [(getattr(torch.Tensor, name), access) for name in _WRITABLE for access in ("__set__", "__delete__")]
    names += [(torch.Tensor, name) for name in _METHODS] + [(torch, name) for name in _FUNCTIONS]
    # Torch's releases differ in what they have.
    found = [getattr(owner, name) for owner, name in names if hasattr(owner, name)]
    return frozenset({*get_default_nowrap_functions(), *found})


METADATA = _metadata_functions()
"""Functions and property accessors that need no values; they see the logical shape."""

SET_DATA: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_MOVES = ["to", "cpu", "cuda", "float", "double", "half", "bfloat16"]
MOVES = frozenset({SET_DATA, *(getattr(torch.Tensor, name) for name in _MOVES)})
"""What ``module.to`` and its like call; a call that changes nothing needs no values."""


def changes_nothing(func: Any, at: torch.Tensor, /, *args: Any, **kwargs: Any) -> bool:
    """Whether ``func``, one of ``MOVES``, would give back ``at`` itself, or would set ``at.data = at``.

    Not of an alias (``param.detach()``): there its values are asked for.
    """
    if func == SET_DATA:
        return args[0] is at
    record = getattr(at, "_record", None)
    if record is not None and not any(at is param for param in record.placed()[0].params):
        return False
    with torch._C.DisableTorchFunctionSubclass():
        probe = torch.empty([0] * at.dim(), dtype=at.dtype, device=at.device)  # as in _apply
        return func(probe, *args, **kwargs) is probe


FILLS = frozenset({torch.full_like, torch.Tensor.new_full, torch.randint_like})
"""They need no values of their first argument, or of ``input``; those of the others they write into what they make."""

READS_WITHOUT_VALUES = frozenset({torch.Tensor.detach, torch.detach, torch.Tensor.data.__get__})  # type: ignore[attr-defined]
"""They return an alias, which is as partitioned as the parameter."""


def notice_scripted_calls(find: Callable[[Any], Sequence[PartitionedParameter | HiddenParameter]]) -> None:
    """Let what ``torch.jit`` has compiled tell the parameters that ``find`` sees in its arguments, as torch's own does.

    Never put back: somebody may have wrapped it since, and for other arguments it changes nothing.
    """
    for kind in (torch._C.ScriptFunction, torch._C.ScriptMethod):
        finds = getattr(kind.__call__, "finds", ())  # of those that are wrapped around each other
        if find not in finds:
            kind.__call__ = told = _told(kind.__call__, find)  # type: ignore[method-assign]
            told.finds = (*finds, find)  # type: ignore[attr-defined]


def _told(original: Callable[..., Any], find: Callable[[Any], Sequence[Any]]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(compiled: Any, *args: Any, **kwargs: Any) -> Any:
        if not (hidden := find((args, kwargs))):
            return original(compiled, *args, **kwargs)
        run = functools.partial(original, compiled)
        # For messages; with its parentheses ``add_`` is not taken for torch's, which writes to its first argument.
        run.__name__ = f"{compiled.name}()"  # type: ignore[attr-defined]
        return hidden[0].__torch_function__(run, (), args, kwargs)

    return call


# ---- writes to gathered parameters, and uses of offloaded ones (stage 3) ---------------------------------------------

SAMPLES = 512
"""Elements of a bucket's shard that are compared to find a write that left no other trace."""


def use_error(record: ParamRecord, verb: str) -> PartitionedUseError:
    """The error of a partitioned parameter that cannot be ``verb`` (``used``, ``written``, ``copied``) here."""
    what = f"parameter {record.name!r} of shape {tuple(record.shape)} is partitioned"
    use = "`with deepzero.zero.GatheredParameters(param):` to read it, the same with modifier_rank=0 to write it"
    if record.bucket is not None and record.bucket.param_group is None:  # a bucket of zero.Init's own
        first = f"Give the model to deepzero.initialize first, or use {use}"
        return PartitionedUseError(f"{what} by zero.Init, and it cannot be {verb} yet. {first}")
    why = f"(zero stage 3): its values are not on this rank, and it cannot be {verb} here"
    return PartitionedUseError(f"{what} {why}. Use {use}, engine.module_state_dict() for the whole model")


def writes_in_place(name: str) -> bool:
    """By torch's convention; and assignment to ``.data``."""
    return (name.endswith("_") and not name.endswith("__")) or name == "__set__"


def take_back(param: torch.Tensor, values: torch.Tensor) -> str:
    """Let ``param`` be ``values`` again, where its place is, with what ``param.data = …`` has put elsewhere.

    Returns what is wrong with that: the other ranks wait for values, and get what was there.
    """
    given, param.data = param.data, values
    if given.shape != values.shape:
        name = repr(param._record.name) if hasattr(param, "_record") else "a parameter"
        wrong = f"{name} of shape {tuple(values.shape)} was given {tuple(given.shape)}: a write keeps the shape"
        return f"{wrong}; for another one give the module a new nn.Parameter, before deepzero.initialize"
    if given.numel() and given.data_ptr() != values.data_ptr():
        values.copy_(given)
    elif given.stride() != values.stride():  # transposed where it lies
        values.copy_(given.clone())
    return ""


def check_on_device(bucket: PartitionedBucket) -> None:
    """Raise while this rank's shard of ``bucket`` is offloaded (``offload_states``)."""
    if bucket.offloaded_notice is not None:
        raise PartitionedUseError(f"the values of {bucket.label} are not on the device: {bucket.offloaded_notice}")


def accept_writes(bucket: PartitionedBucket) -> None:
    """Take everything that was written to the gathered bucket so far as its values; later writes are found."""
    with torch._C.DisableTorchFunctionSubclass():  # a question that needs no values: no detour through Python
        versions = [param._version for param in bucket.params]
    bucket.accepted = (versions, _samples(bucket))


def accept_write(param: ZeroParameter) -> None:
    """The same for one parameter."""
    bucket, slot = param._record.placed()
    bucket.accepted[0][bucket.in_layout.slots.index(slot)] = param._version


def accept_values(bucket: PartitionedBucket) -> None:
    """The values have changed, by the engine itself, and no version."""
    bucket.accepted = (bucket.accepted[0], _samples(bucket))


def _samples(bucket: PartitionedBucket) -> torch.Tensor | None:
    """Values of this rank's shard where they were gathered quantised, and so differ from it; None elsewhere."""
    sampled = bucket.gathered_by.quantizes and bucket.gathered.device.type == "cpu"
    return _shard_within(bucket)[:: _sample_step(bucket)].clone() if sampled else None


def modified_param(bucket: PartitionedBucket, every_element: bool = False) -> ZeroParameter | None:
    """A parameter that was written since :func:`accept_writes`, if any: the write would vanish, as no shard follows it.

    A write in place counts up autograd's version; an assignment to ``.data`` moves the parameter out of the buffer, or
    turns it where it lies. A write *through* ``.data`` does none of it: on a CPU a sample of this rank's shard within
    the buffer is compared with what it was, which finds whatever touches all of a parameter. (On a GPU the comparison
    would make the CPU wait.)
    With ``every_element`` no sample is taken, and no device spared.
    """
    gathered, (versions, samples) = bucket.gathered, bucket.accepted
    with torch._C.DisableTorchFunctionSubclass():  # as in ``accept_writes``
        for param, version in zip(bucket.params, versions, strict=True):
            if param._version != version:
                return param
    if bucket.shown:
        data_ptr, itemsize = bucket.strategy.comm.data_ptr, gathered.itemsize
        start = data_ptr(gathered) - bucket.in_layout.offset * itemsize
        for param, slot in zip(bucket.params, bucket.in_layout.slots, strict=True):
            turned = param.shape != param._record.shape or not param.is_contiguous()
            if turned or (data_ptr(param) != start + slot.offset * itemsize and slot.numel):
                return param
    # With one rank the shard would be compared with itself, which tells nothing.
    itself = bucket.shard_is_buffer and samples is None
    looks = not itself and (every_element or gathered.device.type == "cpu")
    return _written_through_data(bucket, 1 if every_element else _sample_step(bucket)) if looks else None


def _written_through_data(bucket: PartitionedBucket, step: int) -> ZeroParameter | None:
    mine, samples = _shard_within(bucket), bucket.accepted[1]
    shard = bucket.shard.to(mine.device)  # one in host memory is copied
    expected = shard[::step] if samples is None else samples
    # Bits are compared: a NaN equals itself, and -0.0 is not 0.0.
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[mine.itemsize]
    if torch.equal(mine[::step].view(bits), expected.view(bits)):
        return None
    if samples is None:  # the first element that differs names the parameter
        step, expected = 1, shard
    differs = (mine[::step].view(bits) != expected.view(bits)).nonzero()[0].item()
    offset = bucket.in_layout.part_start(bucket.strategy.comm.rank) + int(differs) * step
    slots = zip(bucket.params, bucket.in_layout.slots, strict=True)
    return next((param for param, slot in slots if slot.offset <= offset < slot.end), bucket.params[0])


def check_writes(bucket: PartitionedBucket, every_element: bool = False) -> None:
    """Raise a :class:`PartitionedUseError` if there is a :func:`modified_param`."""
    if (param := modified_param(bucket, every_element)) is not None:
        raise write_lost(param, "would be lost")


def _sample_step(bucket: PartitionedBucket) -> int:
    return max(1, bucket.in_layout.shard_numel // SAMPLES)


def _shard_within(bucket: PartitionedBucket) -> torch.Tensor:
    start, numel = bucket.strategy.comm.rank * bucket.in_layout.shard_numel, bucket.in_layout.shard_numel
    return bucket.gathered[start : start + numel]


def write_lost(param: ZeroParameter, verb: str) -> PartitionedUseError:
    """The error of a write that ``verb`` (``is lost``, ``would be lost``)."""
    return PartitionedUseError(
        f"parameter {param._record.name!r} was written while it was gathered for reading, and the in-place "
        f"modification {verb}; write inside `with deepzero.zero.GatheredParameters(param, modifier_rank=0):`, and "
        "leave it before the next step"
    )
