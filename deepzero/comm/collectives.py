"""The collectives of ZeRO. A call launches one and returns a :class:`Pending`, whose ``wait()`` ends it.

Prefetching is launching the next one; overlapping is not waiting yet. Every launch is written into the ledger.

All ranks call them in the same order with the same extents. Callers guarantee that; the reducer does by launching
buckets in one planned order (``reduce_order``), never in that of arrival. Where ranks run different modules all the
same, an observer (:class:`~deepzero.comm.flight_recorder.GroupObserver`) finds out and makes every rank raise.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

from deepzero.comm import exact_sum, flight_recorder, process_group
from deepzero.comm.chaos import Chaos
from deepzero.comm.exact_sum import Measure
from deepzero.comm.flight_recorder import CollectiveRecord, GroupObserver
from deepzero.comm.ledger import Ledger
from deepzero.comm.profiler_ranges import LaneSpan, OverlapMeter
from deepzero.comm.topology import Nodes, RankGroup, check_ranks, find_nodes, make_group, oddities, split_ranks
from deepzero.device import accelerator_of

if TYPE_CHECKING:
    from deepzero.config.engine import CommConfig, EngineConfig

log = logging.getLogger(__name__)

# torch 2.13 renamed the single-tensor collectives and warns about the old names; 2.11 has only those.
ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"


class Pending:
    """A collective under way. Its tensors belong to it until :meth:`wait` returns."""

    def __init__(self, comm: Communicator, entry: CollectiveRecord) -> None:
        self.works: Sequence[dist.Work | None] | None = None  # nothing was started, as with one rank
        self._comm, self.entry = comm, entry  # in the flight recorder
        self._span: LaneSpan | None = None  # in a trace, while somebody records
        self._metered = False  # counted by ``comm.overlap`` as under way
        self._done = False

    @contextlib.contextmanager
    def launching(self) -> Iterator[None]:
        """Around the calls of torch that start the collective, whose works are given to ``works`` inside."""
        comm, kind, self.works = self._comm, self.entry.kind, ()
        self._span, launch_span = comm.ranges.launching(kind, self.entry.where, lane=comm.overlap.measures)
        # The host exchange blocks in its launch, and so does gloo when its buffers are full.
        with comm.observer.blocked_in(self.entry, launch_span):
            self._metered, since = comm.overlap.began(kind), perf_counter()
            try:
                yield
            except BaseException:
                self._was_blocked(since, over=True)  # nobody will wait for it
                raise
            self._was_blocked(since, over=False)

    def wait(self) -> None:
        """Return when the result may be read; on a GPU, in stream order. Waiting twice is harmless."""
        comm = self._comm
        if self._done:
            return
        comm.chaos.delay()
        if self.works is not None:
            with comm.observer.blocked_in(self.entry, comm.ranges.waiting(self._span)):
                since = perf_counter()
                try:
                    for work in filter(None, self.works):
                        work.wait()
                finally:
                    self._was_blocked(since, over=True)
        self.works, self._done = None, True
        comm.ledger.note("wait", self.entry.kind, self.entry.where)

    def __del__(self) -> None:
        # An engine is let go of with fetches under way: without its buffer a message that comes blocks all behind it.
        if self.works:
            self._comm.observer.abandoned.append(self.works)

    def _was_blocked(self, since: float, over: bool) -> None:
        """This thread did nothing else since then. The collective is ``over`` when it is complete or has failed."""
        if self._metered:
            self._comm.overlap.exposed_seconds += perf_counter() - since
        if over and self._span is not None:
            self._span.end()
        if over and self._metered:
            self._metered = False
            self._comm.overlap.ended()


class Communicator:
    """The collectives over all ranks, or a group of them, for tensors of one device.

    gloo's all-gather first packs everything into fresh memory and then unpacks it. Sending each part straight from the
    tensor it lies in to the tensor where it belongs halves the time (98 M bf16 elements over 2 ranks in 16 calls:
    all-gather 116 ms, all-to-all 78 ms, pairwise exchange 54 ms). So on gloo both are pairwise exchanges. NCCL gathers
    in place by itself. Every call is counted in the ``ledger``; chaos delays launches and waits. Without ``nodes`` all
    ranks share one.
    """

    def __init__(self, device: torch.device, ledger: Ledger, chaos: Chaos, nodes: Nodes | None = None) -> None:
        self.device, self.ledger, self.chaos = device, ledger, chaos
        self.rank, self.world_size, self.device_type, backend, self.observer = self._place()
        """``device_type`` is ``cpu`` or ``cuda``: the device's, or in a dry run that of the device it stands for."""
        # Who starts collectives: torch, unless the device is simulated; a dry run has another one.
        self._torch, self.backend = accelerator_of(device).collectives(dist, backend)
        # gloo cannot send from GPU memory; with CUDA tensors it is asked for its (copying) collectives instead.
        self._pairwise = self.backend == "gloo" and self.device_type == "cpu"
        # NCCL needs a communicator for each group. gloo's pairs of ranks find each other in the one of all ranks.
        self._with_handles = not self._pairwise
        self.nodes = nodes or Nodes(self.world_size, self.world_size)
        self.everybody = RankGroup(tuple(range(self.world_size)), self.rank, None)
        self.flight_recorder, self.ranges = self.observer.flight_recorder, self.observer.ranges
        """``flight_recorder``: what was launched; for messages, where in the model and in which step this rank is."""
        self.overlap = OverlapMeter(device, ledger)  # how much of what is sent was hidden

    def _place(self) -> tuple[int, int, str, str, GroupObserver]:
        """Who this rank is, of how many; its device's kind and backend; who observes its group."""
        backend = process_group.backend_for(self.device)
        return process_group.rank(), process_group.world_size(), self.device.type, backend, flight_recorder.observer()

    def read(self, tensor: torch.Tensor) -> list[Any]:
        """The values of a 1-D tensor as Python numbers; waits for the device."""
        return list(tensor.tolist())

    # ---- what depends on whether tensors have memory: a dry run's have none ------------------------------------------

    def data_ptr(self, tensor: torch.Tensor) -> int:
        """Where the tensor's first element lies, in bytes; 0 for a tensor without elements."""
        return tensor.data_ptr()

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same memory under a storage of its own, so that views of the alias are told from views of the tensor."""
        return torch.from_dlpack(torch.utils.dlpack.to_dlpack(tensor))  # a tensor is asked in Python: 4 µs

    sum_in_rank_order = staticmethod(exact_sum.sum_in_rank_order)

    # ---- small talk: Python objects, blocking ------------------------------------------------------------------------

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank gets every rank's picklable ``value``, in rank order."""
        return process_group.all_gather_object(value)

    def raise_on_all_ranks(
        self, problem: str | Exception | None, error: Callable[[str], Exception] = RuntimeError
    ) -> None:
        """Raise on every rank when one has a ``problem``. See ``process_group.raise_on_all_ranks``."""
        process_group.raise_on_all_ranks(problem, error)

    @contextlib.contextmanager
    def together(self, error: Callable[[str], Exception], *foreseen: type[Exception]) -> Iterator[None]:
        """What is ``foreseen`` and one rank raises inside, all raise as an ``error`` of its words. A collective."""
        problem = None
        try:
            yield
        except foreseen as raised:
            problem = str(raised)
        self.raise_on_all_ranks(problem, error)

    def _broadcast(self, tensor: torch.Tensor, src: int, kind: str) -> None:
        process_group.broadcast_tensor(tensor, src, kind)

    # ---- collectives -------------------------------------------------------------------------------------------------

    def split(self, size: int) -> tuple[RankGroup, RankGroup]:
        """This rank's group *inside* its run of ``size`` ranks, and the one *across* the runs. A collective."""
        inside, across = (make_group(s, self.rank, self._with_handles) for s in split_ranks(self.world_size, size))
        return inside, across

    def exchange(
        self,
        kind: str,
        send: Sequence[torch.Tensor],
        recv: Sequence[torch.Tensor],
        padding: int = 0,
        where: str = "",
        group: RankGroup | None = None,
        numel: int | None = None,
    ) -> Pending:
        """All-to-all: ``send[q]`` goes to the q-th rank of the group, ``recv[q]`` is filled by it; own ones are unused.

        Args:
            kind: the ledger's name for it.
            send: a tensor for each rank; what is empty is not sent.
            recv: the same, extents and dtypes as the senders'.
            padding: how many of the elements sent are padding.
            where: which bucket, for messages and traces.
            group: who takes part; None: all ranks. All groups of a partition of the ranks do so at the same time.
            numel: elements that each tensor sent stands for, where that is not their extent: quantised ones.
        """
        if (among := group or self.everybody).size == 1:  # nothing travels
            return self._recorded(kind, where, 0, 0, padding, 0, ranks=1, ring=False)
        sent = [q for q in among.peers if send[q].numel()]
        elements = sum(send[q].numel() if numel is None else numel for q in sent)
        node = self.nodes.of(self.rank)
        between = sum(send[q].nbytes for q in sent if self.nodes.of(among.ranks[q]) != node)
        nbytes = sum(send[q].nbytes for q in sent)
        pending = self._recorded(kind, where, elements, nbytes, padding, between, among.size, ring=False)
        # torch is called right here, not by way of helpers (but for gloo with GPU tensors): here it leaves deepzero.
        with pending.launching():
            if self._pairwise:
                # All sends and receives are under way before any is waited for: nobody waits for a rank that waits.
                tag = pending.entry.tag
                works = [self._torch.isend(send[q], among.ranks[q], tag=tag) for q in sent]
                receives = [q for q in reversed(among.peers) if recv[q].numel()]
                pending.works = works + [self._torch.irecv(recv[q], among.ranks[q], tag=tag) for q in receives]
            else:
                # Our own part stays where it is: it is neither sent nor received.
                outputs = [t[:0] if q == among.index else t for q, t in enumerate(recv)]
                inputs = [t[:0] if q == among.index else t for q, t in enumerate(send)]
                if self.backend == "gloo":
                    self._exchange_through_host(inputs, outputs, among)
                else:
                    pending.works = [self._torch.all_to_all(outputs, inputs, group=among.handle, async_op=True)]
        return pending

    def all_gather(
        self,
        kind: str,
        whole: torch.Tensor,
        padding: int = 0,
        where: str = "",
        group: RankGroup | None = None,
        numel: int | None = None,
    ) -> Pending:
        """Every rank's part, in place: 1-D ``whole`` has one for each rank, of equal extents, and this rank's is there.

        ``padding``, ``group`` and ``numel`` are :meth:`exchange`'s.
        """
        if (among := group or self.everybody).size == 1:
            return self._recorded(kind, where, 0, 0, padding, 0, ranks=1, ring=False)
        part = whole.numel() // among.size
        mine = whole[among.index * part : (among.index + 1) * part]
        if self._pairwise:
            # Only here is a view of every part needed; thousands of them would cost more than the launch.
            return self.exchange(kind, [mine] * among.size, whole.chunk(among.size), padding, where, group, numel)
        others = among.size - 1
        elements = others * (mine.numel() if numel is None else numel)
        between = self.nodes.leaving(self.rank, among.ranks) * mine.nbytes
        pending = self._recorded(kind, where, elements, others * mine.nbytes, padding, between, among.size, ring=True)
        with pending.launching():
            pending.works = [getattr(self._torch, ALL_GATHER)(whole, mine, group=among.handle, async_op=True)]
        return pending

    def reduce_scatter(
        self, kind: str, output: torch.Tensor, whole: torch.Tensor, padding: int = 0, where: str = ""
    ) -> Pending:
        """The backend's own sum of every rank's ``whole``, of which ``output`` gets this rank's W-th part."""
        others, world_size = self.world_size - 1, self.world_size
        # A ring: each byte enters each node once, whichever rank it is for.
        between, elements = (world_size - self.nodes.per_node) * output.nbytes, others * output.numel()
        pending = self._recorded(kind, where, elements, others * output.nbytes, padding, between, world_size, ring=True)
        with pending.launching():
            pending.works = [getattr(self._torch, REDUCE_SCATTER)(output, whole, async_op=True)]
        return pending

    def all_reduce(self, kind: str, tensor: torch.Tensor, padding: int = 0, where: str = "") -> Pending:
        """The backend's own sum, in place, on every rank; counted as a ring's, ``2 (W-1)/W`` per element.

        Of that, what would go to other nodes if each rank sent its parts straight to their owners.
        """
        sent = 2 * (self.world_size - 1) * tensor.numel() // max(self.world_size, 1)
        nbytes = sent * tensor.element_size()
        between = nbytes * self.nodes.share_between
        pending = self._recorded(kind, where, sent, nbytes, padding, between, self.world_size, ring=True)
        if self.world_size > 1:
            with pending.launching():
                pending.works = [self._torch.all_reduce(tensor, async_op=True)]
        return pending

    def broadcast(self, kind: str, tensor: torch.Tensor, src: int = 0) -> None:
        """Every rank's contiguous ``tensor``, of any dtype, becomes rank ``src``'s. Blocking: for setup only."""
        if self.world_size == 1:
            return
        elements, nbytes = (tensor.numel(), tensor.nbytes) if self.rank == src else (0, 0)
        between = nbytes * (self.world_size - self.nodes.per_node) / self.world_size
        self.ledger.record(kind, elements, nbytes, 0, between, "", self.world_size)
        self._broadcast(tensor, src, kind)

    def _recorded(
        self, kind: str, where: str, elements: int, nbytes: int, padding: int, between: float, ranks: int, ring: bool
    ) -> Pending:
        """A collective that is about to be launched: it is in every account before torch is called."""
        self.chaos.delay()
        # In the flight recorder, too: its fingerprint is the tag of the messages, so that ranks which have taken
        # different paths never take one collective's message for another's.
        record = self.flight_recorder.launch(kind, where)
        self.ledger.record(kind, elements, nbytes, padding, between, where, ranks, ring)
        return Pending(self, record)

    def _exchange_through_host(
        self, send: Sequence[torch.Tensor], recv: Sequence[torch.Tensor], among: RankGroup
    ) -> None:
        """Gloo with GPU tensors: several ranks on one GPU, for tests. Copies, and does not overlap."""
        splits_out, splits_in = [t.numel() for t in recv], [t.numel() for t in send]
        inputs = torch.cat(list(send)).cpu()
        outputs = torch.empty(sum(splits_out), dtype=inputs.dtype)
        dist.all_to_all_single(outputs, inputs, splits_out, splits_in, among.handle)
        for target, source in zip(recv, outputs.split(splits_out), strict=True):
            target.copy_(source)


class _NothingTravels:
    """In place of ``torch.distributed``: every collective is called, and none is started."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


@dataclass(frozen=True)
class DryRunRank:
    """A rank of a world that is not there. A number that such a world does not have is a ValueError."""

    rank: int
    world_size: int
    device_type: Literal["cpu", "cuda"]  # what the meta device stands for
    ranks_of_host: int  # that share a machine, for ``comm.ranks_per_node=null``

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            ranks = f"{self.world_size} ranks: they are numbered 0 to {self.world_size - 1}"
            raise ValueError(f"rank {self.rank} of {ranks}")


class DryRunCommunicator(Communicator):
    """The collectives of ``who``, counted as any others, on tensors without memory; every rank says what this one says.

    torch's own fake group would have to be *the* process group of this process. This is injected into the engine of a
    dry run, whatever this process is a rank of.
    """

    def __init__(
        self, who: DryRunRank, ledger: Ledger, chaos: Chaos, nodes: Nodes | None = None, device: str = "meta"
    ) -> None:
        self._who = who
        super().__init__(torch.device(device), ledger, chaos, nodes)
        self._torch, self._with_handles = _NothingTravels(), False

    def _place(self) -> tuple[int, int, str, str, GroupObserver]:
        # An observer of its own: what a rank that is made up launches must not stand in the flight recorder of the
        # process that plays it.
        who, backend = self._who, "nccl" if self._who.device_type == "cuda" else "gloo"
        return who.rank, who.world_size, who.device_type, backend, GroupObserver()

    @classmethod
    def open(cls, config: EngineConfig, who: DryRunRank, **more: Any) -> DryRunCommunicator:
        """As :func:`open_communicator`, for one engine's dry run."""
        check_ranks(config, who.world_size)
        nodes = _nodes_of(config, who.rank, [who.ranks_of_host] * who.world_size)
        return cls(who, Ledger(), Chaos(config.comm.chaos, who.rank), nodes, **more)

    def read(self, tensor: torch.Tensor) -> list[Any]:
        """Zeros: nothing has a value here."""
        return [0] * tensor.numel()

    def data_ptr(self, tensor: torch.Tensor) -> int:
        """A number that bytes can be added to, as to an address: no two storages' numbers come near each other."""
        if not tensor.numel():
            return 0
        return (int(tensor.untyped_storage()._cdata) << 64) + int(tensor.storage_offset()) * tensor.itemsize

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """Another tensor: there is no memory to share."""
        return torch.empty_like(tensor)

    @staticmethod
    def sum_in_rank_order(output: torch.Tensor, *_: Any, on_chunk: Measure | None = None, **__: Any) -> None:
        """One pass over ``output``: there is no cache to keep chunks in."""
        output.copy_(output)
        if on_chunk is not None:
            on_chunk(output, 0)

    def all_gather_object(self, value: Any) -> list[Any]:
        """As often as there are ranks."""
        return [value] * self.world_size

    def raise_on_all_ranks(
        self, problem: str | Exception | None, error: Callable[[str], Exception] = RuntimeError
    ) -> None:
        """Raise this rank's problem, which is every rank's."""
        if problem is not None:
            raise problem if isinstance(problem, Exception) else error(problem)

    def _broadcast(self, tensor: torch.Tensor, src: int, kind: str) -> None:
        """Nothing travels."""


def open_communicator(config: EngineConfig, device: torch.device, ledger: Ledger) -> Communicator:
    """The collectives of one engine; rank 0 says what is odd about its groups. A collective."""
    rank, world_size = process_group.rank(), process_group.world_size()
    check_ranks(config, world_size)
    nodes = _nodes_of(config, rank, process_group.all_gather_object(process_group.ranks_of_host()))
    return Communicator(device, ledger, Chaos(config.comm.chaos, rank), nodes)


def process_communicator(config: CommConfig) -> Communicator:
    """The collectives of what is built before an engine, in no engine's account; joins the ranks. A collective."""
    process_group.init_distributed(timeout_seconds=config.timeout_seconds)
    return Communicator(process_group.default_device(), Ledger(), Chaos(config.chaos, process_group.rank()))


def _nodes_of(config: EngineConfig, rank: int, ranks_of_hosts: list[int | None]) -> Nodes:
    """The nodes of the run, by how many ranks each rank's launcher said that its machine has."""
    nodes = find_nodes(config.comm.ranks_per_node, len(ranks_of_hosts), ranks_of_hosts)
    for line in oddities(config, nodes, ranks_of_hosts) if rank == 0 else ():
        log.warning(line)
    return nodes
