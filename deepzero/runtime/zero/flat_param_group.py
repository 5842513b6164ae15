"""One group of parameters as ZeRO's tensors: ``flat_P``, its parts, and the fp32 masters over them.

A group holds the trainable parameters of one optimizer group and one dtype. Building it moves every parameter into one
flat buffer and leaves the parameter a *view* of it (step 0 of a training step: build). From then on, whatever is
written into the flat buffer, by the optimizer or by an all-gather, is in the model: publishing needs no copy out.

Masters are made from the values that the parameters have *before* they are cast to the compute dtype. DeepSpeed makes
them from the cast ones, and so throws the lower bits of a fresh initialisation away.

[Note: the peak of building]
    Building takes no more memory of the device than training, or than the model that it was given there, and one
    parameter: 13 billion fp32 parameters on each of 8 devices are 52 GB, and so is stage 2's training of them; flat
    buffer, masters and all of the model at once would be 84. So parameter by parameter rank 0's values arrive, this
    rank keeps its *piece* of them, in the dtype that they have, and lets the rest go. When nothing but pieces is left,
    the masters are allocated, then the flat buffer; each piece goes into both, and one all-gather for each bucket
    puts the parameters together again, in the compute dtype.

In fp32 the parameters are their own masters: the optimizer steps on views of the flat buffer, and nothing is held
twice.

The optimizer gets one tensor for each *piece*: a parameter's elements that this rank owns. One tensor for the whole
share would do for an elementwise optimizer but for the last bit: the vector loop and the scalar tail of torch's kernels
round differently, so the position of tails matters. Pieces end where the parameter ends or at multiples of ``ALIGN``
elements; so an element is in a tail here exactly if it is in a loop over the parameters themselves, in every stage, at
every W.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import nn

from deepzero.comm.collectives import Communicator
from deepzero.comm.streams import data_ptr_of
from deepzero.config.strict import ConfigError
from deepzero.layout import Bucket, FlatLayout, Fragment
from deepzero.offload.arena import HostArena
from deepzero.offload.offload_plan import OffloadPlan
from deepzero.runtime.zero.master_shard import MasterShard

log = logging.getLogger(__name__)

SETUP = "setup.gather"

_OWNED: weakref.WeakValueDictionary[int, nn.Parameter] = weakref.WeakValueDictionary()
"""Parameters, by id, that lie in a group's flat buffer. Two engines over one model would both reduce its gradients."""

_LOST: weakref.WeakValueDictionary[int, nn.Parameter] = weakref.WeakValueDictionary()
"""Parameters, by id, of models that were being moved when an exception came: there is no telling which have values."""


STAY = (
    "Device and dtype of a model's parameters are settled by deepzero.initialize (precision, the rank's device): move "
    "or cast the model before it, or after engine.destroy()"
)
_APPLY = nn.Module._apply


def _apply(module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
    """In place of ``nn.Module._apply``, which is ``to``, ``half``, ``cuda`` and their like, of every module.

    An engine's parameters stay where they are. What leaves them alone (``to`` the device where they are) goes on with
    everything else; what would move or cast one is refused, in every stage, before anything is changed.

    Raises:
        RuntimeError: names the first parameter.
    """
    staying: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter]] = []
    for prefix, part in module.named_modules() if recurse else [("", module)]:
        for key, param in part._parameters.items():
            if param is not None and id(param) in _OWNED:
                staying.append((part._parameters, key, param))
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
    """Raise a :class:`ConfigError` when any of these parameters belongs to an engine, or was lost on the way to one;
    before anything is changed.
    """
    for param, name in names.items():
        if id(param) in _OWNED:
            raise ConfigError(f"parameter {name!r} belongs to another engine; call engine.destroy() on that one first")
        if id(param) in _LOST:
            raise ConfigError(
                f"parameter {name!r} is of a model that an earlier deepzero.initialize left in pieces, as it broke off "
                f"while it moved the parameters. {ANEW}"
            )


ANEW = "Build model and optimizer anew"


@contextlib.contextmanager
def lost_on_error(model: nn.Module) -> Iterator[None]:
    """While the model is being moved: what an exception leaves of it belongs to nobody, and no engine takes it."""
    try:
        yield
    except BaseException as error:
        for param in model.parameters():
            disclaim(param)
            _LOST[id(param)] = param
        text = f"deepzero.initialize broke off while it moved the model's parameters, which it leaves in pieces. {ANEW}"
        getattr(error, "add_note", log.error)(text)  # Python 3.10 has no notes
        raise


def claim(param: nn.Parameter, name: str) -> None:
    """The parameter belongs to an engine from now on.

    Raises:
        ConfigError: it belongs to one already.
    """
    check_unclaimed({param: name})
    _OWNED[id(param)] = param
    nn.Module._apply = _apply  # type: ignore[method-assign]


@torch.no_grad()
def take_values(param: nn.Parameter, comm: Communicator) -> torch.Tensor:
    """Rank 0's values of one parameter, 1-D, on the device, in the dtype that they have; the parameter has none any
    more. A collective.
    """
    values = param.data.to(comm.device).contiguous().view(-1)
    param.data = values.new_empty(0)
    comm.broadcast("setup.broadcast", values)
    return values


def disclaim(param: nn.Parameter) -> None:
    """The parameter belongs to nobody again."""
    _OWNED.pop(id(param), None)


def get_data_parallel_partitions(flat: torch.Tensor, bucket: Bucket) -> tuple[torch.Tensor, ...]:
    """The W equal parts of one bucket of ``flat``, as views; part r belongs to rank r.

    DeepSpeed's function of this name cuts the whole flat buffer into W ranges; with one bucket the two agree, but for
    the padding that makes ours equal. Source: ``sources`` on stage 1, "Stage 1 Code".
    """
    return flat[bucket.offset : bucket.offset + bucket.numel].split(bucket.shard_numel)


@torch.no_grad()
def follow(master: torch.Tensor, values: torch.Tensor) -> None:
    """``values``, in the compute dtype, have been written from outside: their fp32 master follows.

    Where they are the master's own, rounded, nothing was written, and the master keeps the bits that rounding loses.
    """
    values = values.to(master.device)
    master.copy_(torch.where(master.to(values.dtype) == values, master, values.to(torch.float32)))


class FlatParamGroup:
    """The tensors of one group. See [Note: the tensors of ZeRO] in ``layout.py``. Building it is a collective.

    Args:
        names: the parameters' names, in the order of the layout.
        params: the parameters, in the order of the layout, on any device. They take rank 0's values and become views
            of :attr:`flat_P`.
        layout: where each lies.
        dtype: compute dtype of the flat buffer.
        comm: the ranks, and the device where everything lies.
        whole: hold masters of all parameters (stage 0) instead of this rank's part (stages 1 and 2).
        optimizer_group: index of the optimizer's param group that these parameters came from.
        placement: which masters live in host memory; None: none. Not with ``whole``.
        arena: where those are.
    """

    def __init__(
        self,
        names: Sequence[str],
        params: Sequence[nn.Parameter],
        layout: FlatLayout,
        dtype: torch.dtype,
        comm: Communicator,
        whole: bool,
        optimizer_group: int,
        placement: OffloadPlan | None = None,
        arena: HostArena | None = None,
    ) -> None:
        self.names, self.params, self.layout = list(names), list(params), layout
        self.dtype, self.device, self.rank, self.whole = dtype, comm.device, comm.rank, whole
        self.optimizer_group = optimizer_group
        self.before_write: Callable[[], None] | None = None
        own = dtype == torch.float32
        # A whole group is one rank's share of a layout over one rank.
        everything = dataclasses.replace(layout, world_size=1) if whole else layout
        self.placement = placement or OffloadPlan.on_device(everything, own)
        self.master_store = MasterShard(self.placement, arena)
        self.fragments = layout.whole_fragments() if whole else layout.fragments(self.rank)
        self.flat_P = self._move_in(comm)
        self.partitions = [get_data_parallel_partitions(self.flat_P, bucket) for bucket in layout.buckets]
        self.masters = [self._master_of(fragment) for fragment in self.fragments]
        self._mine: dict[int, tuple[Fragment, torch.Tensor]] = {
            fragment.slot.index: (fragment, master)
            for fragment, master in zip(self.fragments, self.masters, strict=True)
        }
        self._places = [data_ptr_of(param) for param in self.params]
        self._versions = [param._version for param in self.params]

    @property
    def parameter_storage(self) -> list[torch.Tensor]:
        """What this rank keeps of the parameters on its device: all of them."""
        return [self.flat_P]

    def param_shard(self, bucket: Bucket) -> torch.Tensor:
        """What this rank's optimizer step writes of ``bucket`` in the compute dtype: its part, or all of it."""
        if self.whole:
            return self.flat_P[bucket.offset : bucket.offset + bucket.numel]
        return self.partitions[bucket.index][self.rank]

    def wait_for_fetches(self, bucket: Bucket) -> None:
        """Nobody fetches from here."""

    def param_fragment(self, fragment: Fragment) -> torch.Tensor:
        """A piece of one parameter in the compute dtype."""
        return self.flat_P[fragment.slot.offset + fragment.start :][: fragment.numel]

    def master_of(self, bucket: Bucket) -> torch.Tensor:
        """The masters of what :meth:`param_shard` names, padding included, as one tensor to cast from."""
        start, numel = bucket.shard_offset, bucket.shard_numel
        if self.whole:
            start, numel = bucket.offset, bucket.numel
        found = self.master_store.at(start, numel)
        return self.param_shard(bucket) if found is None else found

    def _master_of(self, fragment: Fragment) -> torch.Tensor:
        """A leaf that the optimizer may update: fp32, one-dimensional."""
        view = self.master_store.at(fragment.shard_start, fragment.numel)
        if view is None:
            view = self.param_fragment(fragment)
        return view.detach().requires_grad_()

    def _separate(self, index: int) -> tuple[Fragment, torch.Tensor] | None:
        """This rank's piece of a parameter, and its master; None where it has none, or one that is the parameter."""
        fragment, master = self._mine.get(index, (None, None))
        if fragment is None or master is None or self.master_store.at(fragment.shard_start, fragment.numel) is None:
            return None
        return fragment, master

    def written(self) -> list[str]:
        """Names of parameters that were written since the last step."""
        pairs = zip(self.names, self.params, self._versions, strict=True)
        return [name for name, param, version in pairs if param._version != version]

    @torch.no_grad()
    def sync_masters_from_params(self) -> None:
        """Before a step: what was written into parameters since the last one (``load_state_dict``, an init) is kept.

        Without this the next publication would silently overwrite it from the masters. A write through ``param.data``
        leaves no trace in the parameter's version and cannot be seen.

        Raises:
            RuntimeError: a parameter no longer lies in the flat buffer.
        """
        for index, param in enumerate(self.params):
            if data_ptr_of(param) != self._places[index] or param.dtype != self.dtype:
                raise RuntimeError(
                    f"parameter {self.names[index]!r} has left ZeRO's flat buffer: it is now {param.dtype} on "
                    f"{param.device} (an assignment to param.data). {STAY}; write values with param.copy_"
                )
            if param._version != self._versions[index]:
                self._versions[index] = param._version
                separate = self._separate(index)
                if separate is not None:
                    fragment, master = separate
                    values = param.reshape(-1)[fragment.start : fragment.start + fragment.numel]
                    follow(master, values)

    def bump_param_versions(self) -> None:
        """They were written between two steps, by nobody outside: a graph that has saved the old ones must know."""
        torch.autograd.graph.increment_version(self.params)
        self._versions = [param._version for param in self.params]

    @torch.no_grad()
    def write(self, index: int, values: torch.Tensor) -> None:
        """New values for one parameter, and for this rank's piece of its master, which keeps all bits of them.

        Args:
            index: position in :attr:`params`.
            values: 1-D, whole, fp32, the same on every rank.
        """
        if self.before_write is not None:
            self.before_write()
        slot, param = self.layout.slots[index], self.params[index]
        self.flat_P[slot.offset : slot.end].copy_(values)
        separate = self._separate(index)
        if separate is not None:
            fragment, master = separate
            master.copy_(values[fragment.start : fragment.start + fragment.numel])
        # Autograd must know, should a backward pass still need the old values; the master has followed already.
        torch.autograd.graph.increment_version(param)
        self._versions[index] = param._version

    def refresh_data_ptrs(self) -> None:
        """The flat buffer's memory is another (``offload_states``), and the views of it have followed."""
        start = data_ptr_of(self.flat_P)
        for index, slot in enumerate(self.layout.slots):
            if slot.numel:  # what has no elements lies nowhere
                self._places[index] = start + slot.offset * self.flat_P.itemsize

    def release(self) -> None:
        """Let the parameters belong to nobody again."""
        for param in self.params:
            disclaim(param)

    @torch.no_grad()
    def _move_in(self, comm: Communicator) -> torch.Tensor:
        """The flat buffer, with the parameters in it. See [Note: the peak of building]."""
        shapes = [param.shape for param in self.params]
        mine = {fragment.slot.index: fragment for fragment in self.fragments}
        kept = {index: self._take(index, param, mine.get(index), comm) for index, param in enumerate(self.params)}
        self.master_store.allocate(comm.device)
        for fragment in self.fragments:
            master = self.master_store.at(fragment.shard_start, fragment.numel)
            if master is not None and not self.placement.host_masters.holds(fragment.shard_start):
                kept[fragment.slot.index] = master.copy_(kept[fragment.slot.index])
        flat_P = torch.zeros(self.layout.padded_numel, dtype=self.dtype, device=comm.device)
        for fragment in self.fragments:
            flat_P[fragment.slot.offset + fragment.start :][: fragment.numel].copy_(kept.pop(fragment.slot.index))
        for bucket in self.layout.buckets if not self.whole else ():
            comm.all_gather(SETUP, flat_P[bucket.offset : bucket.offset + bucket.numel]).wait()
        for param, slot, shape in zip(self.params, self.layout.slots, shapes, strict=True):
            param.data = flat_P[slot.offset : slot.end].view(shape)
        return flat_P

    def _take(self, index: int, param: nn.Parameter, fragment: Fragment | None, comm: Communicator) -> torch.Tensor:
        """This rank's piece of one parameter, in the dtype that it has, or as its master in host memory."""
        claim(param, self.names[index])
        values = take_values(param, comm)
        if fragment is None:
            return values.new_empty(0)  # not a view, which would keep the whole parameter's memory
        part = values[fragment.start : fragment.start + fragment.numel]
        on_host = self.master_store.at(fragment.shard_start, fragment.numel)
        return part.clone() if on_host is None else on_host.copy_(part)
