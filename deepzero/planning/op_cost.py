"""What a rehearsal computes and holds: floating-point operations, bytes read and written, memory in use, op by op.

torch's own formulas say how many operations a matrix product, an attention or a convolution takes
(``torch.utils.flop_counter``). Everything else is taken to be bound by memory: its time is that of reading its inputs
and writing its outputs once. Two kinds are told from the others, because a CPU runs them at speeds of their own:
attention, whose small products reach a third of what large ones do, and what only copies, casts and adds, which goes
at the memory's speed where functions (norms, GELUs) do not. Memory in use is that of all storages alive, model state
and temporaries alike; what an allocator adds by rounding and fragmentation is not in it.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

_ATEN = torch.ops.aten
_FLASH, _FLASH_CPU = _ATEN._scaled_dot_product_flash_attention, _ATEN._scaled_dot_product_flash_attention_for_cpu
_FLASH_BACKWARD = _ATEN._scaled_dot_product_flash_attention_backward
_FORMULAS = {
    # torch counts the CPU's attention nowhere; it has the same products and the same arguments.
    _FLASH_CPU: flop_registry[_FLASH],
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[_FLASH_BACKWARD],
    **flop_registry,
}
_COPIES = {
    getattr(_ATEN, name)
    for name in (
        "copy_", "_to_copy", "clone", "cat", "add", "add_", "sub", "sub_", "mul", "mul_", "div", "div_", "neg",
        "zero_", "fill_", "zeros", "zeros_like", "_foreach_copy_", "_foreach_add_", "_foreach_mul_", "_foreach_div_",
    )
}  # fmt: skip


class OpCost(NamedTuple):
    """What one op takes."""

    flops: int  # multiplications and additions, two for a fused pair
    bytes: int  # read and written
    kind: Literal["product", "attention", "copy", "function"]


@dataclass(frozen=True)
class _Recipe:
    """What an op makes of inputs of such shapes, and what it costs: a model of a hundred alike blocks asks again."""

    outputs: tuple[tuple[torch.Size, tuple[int, ...], torch.dtype], ...]
    single: bool  # one tensor, not a tuple
    cost: OpCost


class WorkMeter(TorchDispatchMode):
    """Counts, while it is entered, what is dispatched on one kind of device: ``meta``, or a real run's."""

    def __init__(self, device_type: str = "meta") -> None:
        super().__init__()
        self.device_type = device_type
        self.work: list[OpCost] = []
        self.alive_bytes = self.peak_bytes = 0
        self._seen: set[int] = set()
        self._recipes: dict[Any, _Recipe | None] = {}

    def clock(self) -> float:
        """How many ops there have been: for :attr:`Ledger.clock`."""
        return float(len(self.work))

    def restart(self) -> int:
        """Count ops from here on, and begin a new peak at what is alive now: so many bytes."""
        self.work, self.peak_bytes = [], self.alive_bytes
        return self.alive_bytes

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Count one op, and let it run."""
        kwargs = kwargs or {}
        if func.is_view:
            return func(*args, **kwargs)  # moves nothing and holds nothing new; and there are many of them
        key = self._key(func, args, kwargs)
        if key is not None and (recipe := self._recipes.get(key)) is not None:
            made = [torch.empty_strided(n, s, dtype=dtype, device="meta") for n, s, dtype in recipe.outputs]
            self._count(recipe.cost, made)
            return made[0] if recipe.single else tuple(made)
        output = func(*args, **kwargs)
        # What writes into a list of tensors (torch._foreach_copy_) gives none back.
        made, given = self._mine(output), self._mine((args, kwargs))
        if made or (output is None and given):
            formula: Callable[..., int] | None = _FORMULAS.get(func._overloadpacket)
            flops = int(formula(*args, **kwargs, out_val=output)) if formula is not None else 0
            cost = OpCost(flops, sum(_bytes_of(t) for t in (*given, *made)), _kind_of(func, flops))
            if key is not None:
                self._recipes[key] = _recipe_of(output, cost)
            self._count(cost, made)
        return output

    def _mine(self, tree: Any) -> list[torch.Tensor]:
        leaves = pytree.tree_leaves(tree)
        return [t for t in leaves if isinstance(t, torch.Tensor) and t.device.type == self.device_type]

    def _key(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Ops with the same key make the same; None for what writes into its inputs, or has to be run."""
        if self.device_type != "meta" or not _makes_new_tensors(func):
            return None
        try:
            key = (func, _shape_of(args), _shape_of(tuple(kwargs.items())))
            hash(key)
        except TypeError:
            return None
        return key

    def _count(self, cost: OpCost, made: Iterable[torch.Tensor]) -> None:
        if not cost.bytes and not cost.flops:
            return
        self.work.append(cost)
        for tensor in made:
            storage = tensor.untyped_storage()
            key, nbytes = storage._cdata, storage.nbytes()
            if nbytes and key not in self._seen:
                self._seen.add(key)
                self.alive_bytes += nbytes
                self.peak_bytes = max(self.peak_bytes, self.alive_bytes)
                weakref.finalize(storage, self._let_go, key, nbytes)

    def _let_go(self, key: int, nbytes: int) -> None:
        self._seen.discard(key)
        self.alive_bytes -= nbytes


def _kind_of(func: Any, flops: int) -> Literal["product", "attention", "copy", "function"]:
    if flops:
        return "attention" if "attention" in func.__name__ else "product"
    return "copy" if func._overloadpacket in _COPIES else "function"


@functools.cache
def _makes_new_tensors(func: Any) -> bool:
    """Whether nothing that it returns is, or lies in, what it is given."""
    schema = func._schema
    return not any(item.alias_info is not None for item in (*schema.arguments, *schema.returns))


def _shape_of(value: Any) -> Any:
    """What of an argument the shape of the result depends on; TypeError for a tensor that has values."""
    if isinstance(value, torch.Tensor):
        if not value.is_meta:
            raise TypeError("a tensor with values")
        return (value.shape, value.stride(), value.dtype)
    if isinstance(value, (list, tuple)):
        return tuple(map(_shape_of, value))
    return type(value), value  # 1, 1.0 and True are equal, and make different dtypes


def _recipe_of(output: Any, cost: OpCost) -> _Recipe | None:
    """None where the outputs are something else than new tensors without gaps, all on the meta device."""
    single = isinstance(output, torch.Tensor)
    made = (output,) if single else output
    if not isinstance(made, tuple) or any(type(t) is not torch.Tensor or not t.is_meta for t in made):
        return None
    for tensor in made:
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        if tensor.untyped_storage().nbytes() != ((last + 1) * tensor.itemsize if tensor.numel() else 0):
            return None
    return _Recipe(tuple((t.shape, t.stride(), t.dtype) for t in made), single, cost)


def _bytes_of(tensor: torch.Tensor) -> int:
    """What reading a tensor moves: a dimension that is stretched (stride 0) is read once."""
    numel = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        numel *= size if stride else min(size, 1)
    return numel * tensor.itemsize


def fused_attention(device_type: str = "cuda") -> contextlib.AbstractContextManager[Any]:
    """Let attention be one kernel on the meta device too, as it will be: torch's own shapes, torch's own count.

    torch takes it apart there, and would hold a T by T matrix per head that no real device holds. A mode cannot tell
    it otherwise: torch takes modes away in a backward pass, where checkpointed blocks run once more. So the function is
    exchanged for as long as this lasts; what is not on the meta device reaches the original. ``device_type`` is the
    kind of device that the meta device stands for.
    """
    original = F.scaled_dot_product_attention

    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if not query.is_meta or attn_mask is not None or query.dim() != 4:
            rest = (attn_mask, dropout_p, is_causal)
            return original(query, key, value, *rest, scale=scale, enable_gqa=enable_gqa)
        if (times := query.size(1) // key.size(1)) > 1:
            key, value = (t.repeat_interleave(times, 1) for t in (key, value))
        kernel = _FLASH_CPU if device_type == "cpu" else _FLASH
        output: torch.Tensor = kernel(query, key, value, dropout_p, is_causal, scale=scale)[0]
        return output

    return mock.patch.object(F, "scaled_dot_product_attention", attention)


def nothing_is_packed() -> contextlib.AbstractContextManager[Any]:
    """While it lasts, position numbers on the meta device are those of one sequence to a row.

    Before each forward pass ``transformers`` looks at the position numbers, whether several short sequences were packed
    into a row; on the meta device there are none to look at. A run of deepzero gives none either: nothing is packed.
    Releases of ``transformers`` that do not ask have nothing to be exchanged.
    """
    # Importing it takes seconds: only where the model has done so already.
    masking: Any = sys.modules.get("transformers.masking_utils")
    if (original := getattr(masking, "find_packed_sequence_indices", None)) is None:
        return contextlib.nullcontext()

    def find(position_ids: torch.Tensor, *rest: Any, **options: Any) -> Any:
        return None if position_ids.is_meta else original(position_ids, *rest, **options)

    return mock.patch.object(masking, "find_packed_sequence_indices", find)
