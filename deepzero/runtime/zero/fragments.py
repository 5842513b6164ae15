"""From a bare parameter to its master, its reduced gradient and its optimizer state, wherever their pieces lie.

An engine registers its parameters when it is built (:class:`TensorFragments`) and forgets them when it is destroyed; in
between :func:`fragment_of` finds a parameter's :class:`ParamFragment`. Only weak references are kept: an engine that
nobody holds any more is not kept alive by its parameters.

The functions that scripts call are in ``tensor_fragment.py``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from deepzero.comm import process_group
from deepzero.comm.reduce_scatter import ALL_GATHER_GRADIENTS, ALL_REDUCE, REDUCE_SCATTER, BucketReducer
from deepzero.layout import Bucket, Fragment, ParamSlot, plan_layout
from deepzero.runtime.zero.delayed_update import DelayedStep
from deepzero.runtime.zero.gradient_reduction import GradAccumulator
from deepzero.runtime.zero.sharded_step import MasterFragment, ParamGroup, ShardedStep
from deepzero.runtime.zero.stage_1_and_2 import FlatParamGroup

SUFFIX = "_on_request"
ALL_GATHER = f"fragments.all_gather{SUFFIX}"
_NO_PART_OF_A_STEP = {ALL_GATHER, *(kind + SUFFIX for kind in (ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER_GRADIENTS))}


class ReducedGradients(Protocol):
    """What has an engine's gradients: stage 0 itself, the ``GradientReducer`` of the others."""

    source: GradAccumulator
    reducer: BucketReducer
    grad_dtype: torch.dtype
    present: bool
    reduced: bool

    def reduce_now(self) -> None:
        """Reduce what waits for the boundary. A collective."""

    def drain(self) -> None:
        """Everything that is under way has arrived."""

    def sums_changed(self, group: int, bucket: Bucket) -> None:
        """Sums of this bucket have been changed."""


@dataclass(frozen=True, eq=False)
class ParameterAddress:
    """One record of the registry. A parameter that is not trained has no fragment."""

    param: nn.Parameter
    name: str
    fragment: ParamFragment | None
    engine: TensorFragments


_ADDRESSES: weakref.WeakValueDictionary[int, ParameterAddress] = weakref.WeakValueDictionary()
"""By the parameter's id. The record, and with it the id, lives as long as its engine."""


def address_of(param: nn.Parameter) -> ParameterAddress:
    """What an engine has registered for ``param``.

    Raises:
        ValueError: no engine has.
        RuntimeError: its engine's states are away.
    """
    address = _ADDRESSES.get(id(param))
    if address is None:
        raise ValueError(
            f"a tensor of shape {tuple(param.shape)} is no parameter of an engine: pass one of engine.module's "
            "parameters, itself and not a copy or a view, after deepzero.initialize and before engine.destroy()"
        )
    if address.engine.away is not None:
        address.engine.away(f"parameter {address.name!r}")
    return address


class TensorFragments:
    """The registry's records of one engine, and what all of them need of it.

    Args:
        model: whose parameters are registered.
        groups: of the trained ones.
        step: has the optimizer, and a part for each piece of each group, in order.
        gradients: where they are.
        mean_divisor: what the sum of gradients is divided by for their mean, without loss scale.
        last_pass: whether the micro-batch under way is the last of its optimizer step.
        finish_delayed_update: called before anything is written.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: Sequence[ParamGroup],
        step: ShardedStep | DelayedStep,
        gradients: ReducedGradients,
        mean_divisor: Callable[[], float],
        last_pass: Callable[[], bool],
        finish_delayed_update: Callable[[], None],
    ) -> None:
        self.step, self.finish_delayed_update = step, finish_delayed_update
        self.optimizer, self.gradients = step.optimizer, gradients
        self.mean_divisor, self.last_pass = mean_divisor, last_pass
        self.comm = gradients.reducer.comm
        self.away: Callable[[str], None] | None = None
        """Set while model states are away (``offload_states``): raises."""
        self.comm.ledger.untracked_kinds |= _NO_PART_OF_A_STEP
        parts = iter(step.parts)
        fragments: dict[nn.Parameter, ParamFragment] = {}
        for number, group in enumerate(groups):
            for fragment in self._fragments_of(number, group, parts):
                fragments[group.params[fragment.slot.index]] = fragment
        self._addresses = [
            ParameterAddress(param, name, fragments.get(param), self) for name, param in model.named_parameters()
        ]
        for address in self._addresses:
            _ADDRESSES[id(address.param)] = address

    def _fragments_of(self, number: int, group: ParamGroup, parts: Iterator[MasterFragment]) -> list[ParamFragment]:
        mine = {fragment.slot.index: (fragment, next(parts)) for fragment in group.fragments}
        return [
            ParamFragment(
                self, group, number, slot, bucket, group.params[slot.index].shape, *mine.get(slot.index, (None, None))
            )
            for bucket in group.layout.buckets
            for slot in bucket.slots
        ]

    def forget(self) -> None:
        """The engine is destroyed: its parameters are nobody's again."""
        for address in self._addresses:
            if _ADDRESSES.get(id(address.param)) is address:
                del _ADDRESSES[id(address.param)]
        self._addresses = []


@dataclass(frozen=True, eq=False)
class ParamFragment:
    """A trained parameter, and this rank's piece of it."""

    engine: TensorFragments
    group: ParamGroup
    number: int
    """The group's."""
    slot: ParamSlot
    bucket: Bucket
    shape: torch.Size
    fragment: Fragment | None
    """None when no element of the parameter is this rank's."""
    part: MasterFragment | None
    """Master and gradient of the piece."""

    @property
    def numel(self) -> int:
        """Elements of this rank's piece."""
        return self.fragment.numel if self.fragment is not None else 0

    @property
    def unpartitioned(self) -> bool:
        """Stage 0: every rank has all."""
        return isinstance(self.group, FlatParamGroup) and self.group.whole

    # ---- pieces and wholes -------------------------------------------------------------------------------------------

    def copy_of(self, tensor: torch.Tensor | None) -> torch.Tensor:
        """A copy of this rank's piece of something, 1-D, fp32; without elements for None."""
        if tensor is None:
            return torch.zeros(0, dtype=torch.float32, device=self.group.device)
        # On the device, also when it is kept in host memory: pieces are put together there.
        return tensor.detach().to(device=self.group.device, dtype=torch.float32, copy=True)

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's piece of a whole parameter's extent, 1-D."""
        return (
            whole[self.fragment.start : self.fragment.start + self.fragment.numel]
            if self.fragment is not None
            else whole[:0]
        )

    def numel_of(self, rank: int) -> int:
        """Elements of ``rank``'s piece."""
        if self.unpartitioned:
            return self.slot.numel
        first = self.bucket.part_start(rank)
        return max(0, min(self.slot.end, first + self.bucket.shard_numel) - max(self.slot.offset, first))

    def assemble(self, mine: torch.Tensor) -> torch.Tensor:
        """The whole of which ``mine`` is this rank's piece, 1-D, fp32. A collective."""
        comm = self.engine.comm
        counts = [self.numel_of(rank) for rank in range(comm.world_size)]
        largest = max(counts)
        if self.unpartitioned or comm.world_size == 1 or largest == 0:
            return mine
        gathered = torch.zeros(comm.world_size * largest, dtype=torch.float32, device=mine.device)
        parts = gathered.split(largest)
        parts[comm.rank][: mine.numel()].copy_(mine)
        padding = (comm.world_size - 1) * (largest - mine.numel())
        comm.all_gather(ALL_GATHER, gathered, padding, f"slot {self.slot.index}").wait()
        # Ranks own their pieces in ascending order.
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    # ---- masters -----------------------------------------------------------------------------------------------------

    def master(self) -> torch.Tensor:
        """This rank's piece, with what was written into a whole parameter since the last step."""
        self.engine.step.join()
        if isinstance(self.group, FlatParamGroup) and not self.engine.step.update_pending:
            self.group.sync_masters_from_params()
        return self.copy_of(self.part.master if self.part is not None else None)

    # ---- optimizer state ---------------------------------------------------------------------------------------------

    def state_keys(self) -> list[str] | None:
        """What the optimizer keeps for each element of this rank's piece; None where there is no piece."""
        if self.part is None:
            return None
        master = self.part.master
        state = self.engine.optimizer.state.get(master, {})
        return sorted(key for key, value in state.items() if torch.is_tensor(value) and value.shape == master.shape)

    def has_state(self, key: str, name: str, everywhere: bool) -> bool:
        """Whether there is state of that name; False when there is none at all yet.

        Args:
            key: the optimizer's name for it.
            name: the parameter's, for the message.
            everywhere: ask all ranks, of which some may have no piece. A collective.

        Raises:
            ValueError: the optimizer keeps other state, or a number for the whole parameter.
        """
        mine = self.state_keys()
        asked = process_group.all_gather_object(mine) if everywhere else [mine]
        known = sorted({key for keys in asked for key in keys or ()})
        if known and key not in known:
            raise ValueError(
                f"the optimizer keeps no state {key!r} for each element of parameter {name!r}; it keeps "
                f"{', '.join(known)}"
            )
        return bool(known)

    def state(self, key: str) -> torch.Tensor | None:
        """This rank's piece of one state, as the optimizer holds it."""
        self.engine.step.join()
        return self.engine.optimizer.state[self.part.master][key] if self.part is not None else None

    # ---- gradients ---------------------------------------------------------------------------------------------------

    def divisor(self) -> torch.Tensor:
        """The number that makes sums to means, as the step uses it: fp32, one element."""
        return torch.tensor(self.engine.mean_divisor(), dtype=torch.float32, device=self.group.device)

    def gradient_sum(self) -> torch.Tensor:
        """This rank's piece of the reduced sum as it would be now, 1-D, fp32. Nothing changes by it. A collective."""
        gradients = self.engine.gradients
        if not gradients.reduced:
            return self.copy_of(self.cut(self._reduce_aside()))
        gradients.drain()
        return self.copy_of(self.part.grad if self.part is not None else None)

    def _reduce_aside(self) -> torch.Tensor:
        """Reduce this parameter's waiting gradients as the boundary will, into fresh memory; they go on waiting."""
        gradients = self.engine.gradients
        reducer, comm = gradients.reducer, self.engine.comm
        bucket = plan_layout([self.slot.numel], comm.world_size, max(self.slot.numel, 1)).buckets[0]
        aside = BucketReducer(
            comm, bucket.numel, reducer.wire_dtype, reducer.method, whole=True, depth=1, suffix=SUFFIX
        )
        output = torch.zeros(bucket.numel, dtype=gradients.grad_dtype, device=self.group.device)
        send_buffer = aside.acquire(bucket, output, accumulate=False)
        send_buffer.zero_()
        waiting = gradients.source.waiting_of(self.group.params[self.slot.index])
        if waiting is not None:
            send_buffer[: self.slot.numel].copy_(waiting)
        aside.launch(bucket, output, accumulate=False)
        aside.drain()
        return output[: self.slot.numel]

    def set_gradient(self, mine: torch.Tensor) -> None:
        """Let the next step find this mean: reduce what waits, then replace this rank's piece. A collective."""
        gradients = self.engine.gradients
        gradients.reduce_now()
        gradients.sums_changed(self.number, self.bucket)
        if self.part is not None:
            self.part.grad.copy_(mine * self.divisor())
