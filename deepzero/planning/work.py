"""What a rehearsal computes and holds: floating-point operations, bytes read and written, memory in use, op by op.

torch's own formulas say how many operations a matrix product, an attention or a convolution takes
(``torch.utils.flop_counter``). Everything else is taken to be bound by memory: its time is that of reading its inputs
and writing its outputs once. Memory in use is that of all storages alive, model state and temporaries alike; what an
allocator adds by rounding and fragmentation is not in it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from deepzero.comm.pretended import stands_for

_FORMULAS = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[
        torch.ops.aten._scaled_dot_product_flash_attention
    ],
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        torch.ops.aten._scaled_dot_product_flash_attention_backward
    ],
    **flop_registry,
}
"""torch counts the CPU's attention nowhere; it has the same products and the same arguments."""


@dataclass
class Work:
    """One op after the other."""

    flops: list[int] = field(default_factory=list)
    """Multiplications and additions, two for a fused pair."""
    bytes: list[int] = field(default_factory=list)
    """Read and written; 0 for an op that only makes a view."""


class WorkMeter(TorchDispatchMode):
    """Counts, while it is entered, what is dispatched on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.work = Work()
        self.alive_bytes = self.peak_bytes = 0
        self._seen: set[int] = set()

    def clock(self) -> float:
        """How many ops there have been: for :attr:`Ledger.clock`."""
        return float(len(self.work.flops))

    def restart_peak(self) -> None:
        """The peak from here on."""
        self.peak_bytes = self.alive_bytes

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Count one op, and let it run."""
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        made = [t for t in pytree.tree_leaves(output) if isinstance(t, torch.Tensor) and t.is_meta]
        if not made:
            return output
        formula: Callable[..., int] | None = _FORMULAS.get(func._overloadpacket)
        flops = int(formula(*args, **kwargs, out_val=output)) if formula is not None else 0
        moved = 0
        if not func.is_view:
            given = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.is_meta]
            moved = sum(_bytes_of(t) for t in (*given, *made))
        if moved or flops:
            self.work.flops.append(flops)
            self.work.bytes.append(moved)
            for tensor in made:
                self._hold(tensor)
        return output

    def _hold(self, tensor: torch.Tensor) -> None:
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


def _bytes_of(tensor: torch.Tensor) -> int:
    """What reading a tensor moves: a dimension that is stretched (stride 0) is read once."""
    numel = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        numel *= size if stride else min(size, 1)
    return numel * tensor.itemsize


@contextlib.contextmanager
def fused_attention() -> Iterator[None]:
    """Let attention be one kernel on the meta device too, as it will be: torch's own shapes, torch's own count.

    torch takes it apart there, and would hold a T by T matrix per head that no real device holds. A mode cannot tell
    it otherwise: torch takes modes away in a backward pass, where checkpointed blocks run once more. So the function is
    exchanged for as long as the rehearsal lasts; what is not on the meta device reaches the original.
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
        kernels = torch.ops.aten
        kernel = kernels._scaled_dot_product_flash_attention
        if stands_for(query.device) == "cpu":
            kernel = kernels._scaled_dot_product_flash_attention_for_cpu
        output: torch.Tensor = kernel(query, key, value, dropout_p, is_causal, scale=scale)[0]
        return output

    F.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        F.scaled_dot_product_attention = original
