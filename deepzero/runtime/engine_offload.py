"""The engine's part of offload: states that leave between two phases, activations that wait on the host, late updates.

``offload_states`` and ``reload_states`` are in DeepSpeed's names.

Whoever alternates training with something else on the same GPU, for example with generation by another engine, moves
model states into host memory and back. By category (DeepSpeed's words)::

    optim_states             the optimizer's state of this rank's masters (Adam: both moments)
    hp_params                fp32 masters
    lp_params                parameters in the compute dtype: the flat buffers, or in stage 3 this rank's share;
                             frozen parameters too
    lp_grads                 gradients, reduced and unreduced
    contiguous_grad_buffer   the reducer's buckets

In fp32 the parameters are their own masters: one storage, and whichever of the two is named, both are away. What
``zero.offload_optimizer`` and ``zero.offload_param`` keep in host memory is there already, and stays. Buffers of the
model stay on the device, as do norms of gradient blocks (a sixty-fourth of the gradients).

What can go on meanwhile: a forward pass needs ``lp_params``, a backward pass the gradients and buckets too, everything
else all of it. Whatever needs what is away raises, on every rank.

Sources: ``offload_states`` and ``reload_states`` in DeepSpeed's ``runtime/engine.py`` and
``runtime/zero/offload_states.py``; there for stage 3 and without ``offload_optimizer`` alone.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterable
from enum import Enum
from typing import Any

import torch
from torch import nn

from deepzero.checkpoint.async_save import Saver
from deepzero.comm import process_group
from deepzero.comm.collectives import Communicator
from deepzero.comm.process_group import raise_on_all_ranks
from deepzero.offload.activations import HOST_ACTIVATIONS, HostActivations
from deepzero.offload.arena import HostMemoryError, available_host_bytes, required_bytes
from deepzero.offload.copy_streams import HostDeviceCopier, OffloadStats
from deepzero.runtime.engine_facts import EngineFacts
from deepzero.runtime.offload_states import (
    ADVICE,
    HOST_STATES,
    STATES_TO_DEVICE,
    STATES_TO_HOST,
    OffloadedStorages,
    StatesOffloadedError,
    StorageSpec,
    plan,
)
from deepzero.runtime.zero.buffer_pool import references
from deepzero.runtime.zero.delayed_update import DelayedStep
from deepzero.runtime.zero.flat_param_group import FlatParamGroup
from deepzero.runtime.zero.fragments import TensorFragments
from deepzero.runtime.zero.grad_accumulator import GradientHooks
from deepzero.runtime.zero.partition_parameters import ZeroParameter, ZeroParamStatus
from deepzero.runtime.zero.partitioned_param_coordinator import in_backward
from deepzero.runtime.zero.partitioned_param_group import PartitionedParamGroup
from deepzero.runtime.zero.sharded_step import ShardedStep
from deepzero.runtime.zero_components import ZeroComponents

STATES = ("optim_states", "hp_params", "lp_params", "lp_grads", "contiguous_grad_buffer")
"""What can be moved, in DeepSpeed's words."""

NEEDS = {"forward": ("lp_params",), "backward": ("lp_params", "lp_grads", "contiguous_grad_buffer")}
"""Which states a call needs; those that are not listed need all."""


class EngineOffload(EngineFacts):
    """Model states that come and go."""

    module: nn.Module
    device: torch.device
    comm: Communicator
    stage: Any
    _zero: ZeroComponents
    _hooks: GradientHooks
    _fragments: TensorFragments
    _sharded_step: ShardedStep | DelayedStep
    _saver: Saver | None = None
    _destroyed: bool
    _departures: tuple[OffloadedStorages, ...] = ()
    """Away, one for each call of :meth:`offload_states`."""
    _arriving: tuple[OffloadedStorages, ...] = ()
    """Back; perhaps the last bytes are still on their way."""
    _away: frozenset[str] = frozenset()
    """Which categories are away, on any rank."""
    _away_hook: Any = None
    _state_wire: HostDeviceCopier | None = None
    _activations: HostActivations | None = None

    # ---- delayed update (zero.offload_optimizer) ---------------------------------------------------------------------

    def finish_delayed_update(self) -> None:
        """Let the parameters be those of the masters now, if an update is on its way. A collective.

        Saving does so by itself: a checkpoint holds one state, not two halves of a step. It changes the course of
        training as if this step had not been delayed; a run that is continued takes the same course.
        """
        if not self._sharded_step.update_pending:
            return
        self._before_writes()
        self._sharded_step.finish()
        with self.comm.ledger.aside():
            self.stage.publish()
        for group in self._zero.groups:
            group.bump_param_versions()

    def _before_writes(self) -> None:
        """Parameters and masters are about to be written: nothing old stays gathered, or on its way from the host."""
        self.stage.before_writes()
        if self._zero.offload is not None:
            self._zero.offload.side.wire.finish_reads()

    # ---- offload_states and reload_states ----------------------------------------------------------------------------

    def offload_states(
        self,
        include: Iterable[str | Enum] | str | None = None,
        device: Any = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move model states to host memory and give the device's memory back. A collective.

        What is away already stays away. Gradients of an optimizer step that is not complete are kept; an asynchronous
        save is waited for. Views that the program itself holds of moved tensors (a ``state_dict`` that was taken
        before) must not be read meanwhile.

        Args:
            include: which, of :data:`STATES` or DeepSpeed's ``OffloadStateTypeEnum``; None: all.
            device: ``cpu``, the only one.
            pin_memory: lock the host's pages, without which copies are slow and never in the background.
            non_blocking: return while copies are under way. The device is in order: what is issued there afterwards
                comes after them. The memory is then this process's, for whatever it computes; without, it is given back
                to the system, and other processes have it.

        Raises:
            ValueError: an unknown name or device.
            HostMemoryError: a host has not enough memory; on every rank, and nothing has been moved.
            RuntimeError: inside a backward pass or ``GatheredParameters``, after a pass that broke off, after
                ``destroy``.
        """
        chosen = _chosen(include)
        place = str(device.value if isinstance(device, Enum) else device)
        if place != "cpu":
            raise ValueError(f"offload_states(device={place!r}): model states can be moved to 'cpu' alone")
        self._come_to_rest("lp_params" in chosen or "hp_params" in chosen)
        with torch._C.DisableTorchFunctionSubclass():
            leaving, moved = self._leaving(chosen)
            reachable = self._reachable()
        moved = self._check_hosts(leaving, moved)
        departure = None
        problem = None
        try:
            if leaving:
                departure = OffloadedStorages(leaving, reachable, self._wire_of_states(), pin_memory, non_blocking)
        except HostMemoryError as error:
            problem = f"{error} (or pass pin_memory=False to offload_states)" if pin_memory else str(error)
        try:
            raise_on_all_ranks(problem, lambda text: HostMemoryError(f"offload_states: {text}"))
        except HostMemoryError:
            if departure is not None:
                departure.come_back(non_blocking=False)
            self._after_return()
            raise
        self._departures = (*self._departures, *([departure] if departure is not None else []))
        self._away |= moved
        self._post_notices()
        self.comm.ledger.sample()
        if self.device.type == "cuda" and not non_blocking:
            torch.cuda.empty_cache()  # for other processes: another engine generates, perhaps

    def reload_states(self, non_blocking: bool = False) -> None:
        """Move everything that is away back to the device, to the bits that it had. Nothing to do is no error.

        Args:
            non_blocking: return while copies are under way; the device waits for them by itself.

        Raises:
            torch.OutOfMemoryError: the device has no room for it. What has not come back yet is still away.
        """
        self._settle_arrivals()
        while self._departures:
            departure = self._departures[0]
            departure.come_back(non_blocking)
            self._arriving = (*self._arriving, departure)
            self._departures = self._departures[1:]
        self._away = frozenset()
        self._after_return()
        if not non_blocking:
            self._settle_arrivals()

    def _after_return(self) -> None:
        for group in self._zero.stores:
            if isinstance(group, FlatParamGroup):
                group.refresh_data_ptrs()
        self._post_notices()

    def _refuse_away(self, call: str) -> None:
        """Raise when ``call`` needs what is away."""
        self._settle_arrivals()
        missing = [name for name in NEEDS.get(call, STATES) if name in self._away]
        if missing:
            raise StatesOffloadedError(f"{call}: {', '.join(missing)} are away, {ADVICE}")

    # ---- 1: at rest --------------------------------------------------------------------------------------------------

    def _come_to_rest(self, parameters: bool) -> None:
        """Nothing is under way that reads or writes model states; with ``parameters`` nothing is gathered."""
        if self._destroyed:
            raise RuntimeError("offload_states after engine.destroy(): there is nothing to move")
        if in_backward():
            raise RuntimeError("offload_states inside a backward pass: call it between two passes")
        if self._hooks.backward_aborted():
            raise RuntimeError(
                "offload_states: the last backward pass broke off before its end; call engine.discard_gradients() first"
            )
        self.finish_delayed_update()
        if self._saver is not None:
            self._saver.wait()
        self._settle_arrivals()
        self._zero.reducer.drain()
        if self._zero.offload is not None and self._zero.offload.gradients is not None:
            self._zero.offload.gradients.drain()
        partitioning = self._zero.partitioning
        if parameters and partitioning is not None and "lp_params" not in self._away:
            partitioning.coordinator.release_all()
            for bucket in partitioning.coordinator.buckets:
                if bucket.status is not ZeroParamStatus.NOT_AVAILABLE:
                    raise RuntimeError(f"offload_states inside GatheredParameters({bucket.names}): leave it first")
                _ = bucket.shard  # what is on its way to it from the host has arrived
            partitioning.clear()

    def _settle_arrivals(self) -> None:
        for departure in self._arriving:
            departure.close()
        self._arriving = ()

    # ---- 2: which storages -------------------------------------------------------------------------------------------

    def _leaving(self, chosen: frozenset[str]) -> tuple[list[StorageSpec], frozenset[str]]:
        """The storages of some categories, each once; and all categories that have one of these."""
        owners: dict[int, set[str]] = {}
        storages: dict[int, torch.UntypedStorage] = {}
        kept: set[int] = set()
        for category in STATES:
            for tensor, keep in self._tensors_of(category):
                if tensor.layout is not torch.strided or tensor.device.type != self.device.type:
                    continue
                storage = tensor.untyped_storage()
                # What the program brought along (memory of numpy, of a file) is not ours to free.
                if storage.nbytes() and storage.resizable() and not self._in_arena(tensor):
                    storages.setdefault(storage._cdata, storage)
                    owners.setdefault(storage._cdata, set()).add(category)
                    kept |= {storage._cdata} if keep else set()
        found = [key for key, names in owners.items() if names & chosen]
        moved = frozenset().union(*(owners[key] for key in found))
        return [StorageSpec(storages[key], key in kept) for key in found], moved

    def _in_arena(self, tensor: torch.Tensor) -> bool:
        return self._zero.offload is not None and self._zero.offload.arena.holds(tensor)

    def _tensors_of(self, category: str) -> list[tuple[torch.Tensor, bool]]:
        """A category's tensors, and whether anybody needs what is in them."""
        zero, gradients = self._zero, self.stage.gradients
        if category == "optim_states":
            return [(t, True) for state in self.optimizer.state.values() for t in state.values() if _has_extent(t)]
        if category == "hp_params":
            separate = [group.master_store.on_device for group in zero.groups]
            own = [(master, True) for group in zero.groups for master in group.masters]
            return [*((t, True) for t in separate if t is not None), *own]
        if category == "lp_params":
            shares = [(t, True) for group in zero.stores for t in group.parameter_storage]
            if zero.partitioning is not None:
                shares += [(t, True) for t in zero.partitioning.secondaries()]
            return shares + [(t, True) for t in self._plain_parameters()]
        if category == "lp_grads":
            # Between two optimizer steps the sums are those of the last one, which nobody needs.
            return [(t, gradients.present) for t in gradients.held_gradients()]
        there = zero.offload.buffers_on_device() if zero.offload is not None else []
        return [*((t, True) for t in zero.reducer.kept()), *((t, False) for t in (*zero.reducer.buffers(), *there))]

    def _plain_parameters(self) -> list[torch.Tensor]:
        """Frozen ones outside of stage 3, where nobody but this model refers to their memory."""
        lying: dict[int, list[nn.Parameter]] = {}
        mine = {id(param) for group in self._zero.groups for param in group.params}
        for param in self.module.parameters():
            if id(param) not in mine and not isinstance(param, ZeroParameter):
                lying.setdefault(param.untyped_storage()._cdata, []).append(param)
        alone = references(torch.empty(1))
        return [some[0] for some in lying.values() if references(some[0]) <= alone + len(some) - 1]

    def _reachable(self) -> list[torch.Tensor]:
        """Tensors that a program comes upon."""
        found: list[torch.Tensor] = [p for p in self.module.parameters() if not isinstance(p, ZeroParameter)]
        found += [p.grad for p in self.module.parameters() if p.grad is not None]
        found += [master for group in self._zero.groups for master in group.masters]
        found += [t for state in self.optimizer.state.values() for t in state.values() if _has_extent(t)]
        return found + [part.grad for part in self._sharded_step.parts]

    # ---- 3: on every rank or on none ---------------------------------------------------------------------------------

    def _check_hosts(self, leaving: list[StorageSpec], moved: frozenset[str]) -> frozenset[str]:
        """Whether every host has room for its ranks' arenas. Returns what any rank moves.

        Raises:
            HostMemoryError: one has not.
        """
        here = socket.gethostname()
        everyone = process_group.all_gather_object((here, required_bytes(plan(leaving)), moved, available_host_bytes()))
        for host in sorted({entry[0] for entry in everyone}):
            needed = sum(entry[1] for entry in everyone if entry[0] == host)
            known = [entry[3] for entry in everyone if entry[0] == host and entry[3] is not None]
            if known and needed > (free := min(known)):
                raise HostMemoryError(
                    f"offload_states needs {needed / 2**30:.2f} GiB of memory on host {host}, and "
                    f"{free / 2**30:.2f} GiB are available; pass include= with less, or free memory"
                )
        return frozenset().union(*(entry[2] for entry in everyone))

    # ---- 4: whoever asks is told -------------------------------------------------------------------------------------

    def _post_notices(self) -> None:
        """Where states are used, it is known whether they are here."""
        if self._away_hook is not None:
            self._away_hook.remove()
            self._away_hook = None
        if "lp_params" in self._away:
            self._away_hook = self.module.register_forward_pre_hook(
                lambda *_: self._refuse_away("forward"), prepend=True
            )
        self._fragments.away = self._refuse_away if self._away else None
        notice = f"lp_params are away, {ADVICE}" if "lp_params" in self._away else None
        for group in self._zero.stores:
            if isinstance(group, PartitionedParamGroup):
                for bucket in group.buckets:
                    bucket.away = notice if not bucket.shard_on_host else None

    def _wire_of_states(self) -> HostDeviceCopier:
        if self._state_wire is None:
            ledger = self.comm.ledger
            self._state_wire = HostDeviceCopier(self.device, ledger, self.comm.chaos, OffloadStats())
            ledger.untracked_kinds |= {STATES_TO_HOST, STATES_TO_DEVICE}
            ledger.watch(HOST_STATES, lambda: [t for departure in self._departures for t in departure.tensors()])
        return self._state_wire

    # ---- activations -------------------------------------------------------------------------------------------------

    def _watch_activations(self) -> contextlib.AbstractContextManager[None]:
        """Around a forward pass: what autograd keeps goes to host memory, where the configuration says so."""
        settings = self.config.activation_checkpointing
        if not settings.cpu_checkpointing:
            return contextlib.nullcontext()
        if self._activations is None:
            ledger = self.comm.ledger
            wire = HostDeviceCopier(self.device, ledger, self.comm.chaos, OffloadStats())
            self._activations = HostActivations(
                wire, self._lasting, settings.cpu_checkpointing_min_bytes, settings.cpu_checkpointing_pin_memory
            )
            ledger.watch(HOST_ACTIVATIONS, self._activations.buffers.tensors)
        return self._activations.watching()

    def _lasting(self) -> list[torch.Tensor]:
        """Not activations: parameters and buffers. Partitioned parameters are known by their hooks."""
        whole = [param for param in self.module.parameters() if not isinstance(param, ZeroParameter)]
        return [*whole, *self.module.buffers()]


def _has_extent(value: Any) -> bool:
    """A tensor that is no counter."""
    return torch.is_tensor(value) and value.dim() > 0


def _chosen(include: Iterable[str | Enum] | str | None) -> frozenset[str]:
    if include is None:
        return frozenset(STATES)
    listed = [include] if isinstance(include, (str, Enum)) else list(include)
    names = [str(one.value if isinstance(one, Enum) else one) for one in listed]
    for name in names:
        if name not in STATES:
            raise ValueError(f"offload_states(include=[{name!r}]): there are {', '.join(STATES)}")
    return frozenset(names)
