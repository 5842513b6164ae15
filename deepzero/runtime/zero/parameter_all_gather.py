"""How a bucket is put together: one all-gather over all ranks, or one of ZeRO++'s cheaper ways.

A bucket's strategy is chosen when stage 3 is built (``zeropp.py:build_all_gather``). A pass calls ``launch`` and
``finish``; with MiCS a step ends with ``launch_to_replicas``, and qwZ's meter may replace the strategy between steps.

On the wire a bucket is W equal *messages*, one from each rank. Here a message is the rank's shard as it is, and the W
of them lie side by side in the bucket's own buffer, in place. ZeRO++'s strategies (``zeropp.py``) are subclasses:
messages may be quantised, or may come from a second partition inside a node. What they change is named below, and does
nothing in the plain one. Volume of one gather per rank, n bytes a message: ``(W-1) n``, of which ``(W-R) n`` leave a
node of R.

Sources: P_os+g+p in [ZeRO], section 7.2.2; ``all_gather`` in ``partition_parameters.py`` of [DeepSpeed].
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch

from deepzero.comm.collectives import Communicator, Pending
from deepzero.comm.ledger import Traffic
from deepzero.comm.quantization import Quantizer
from deepzero.comm.topology import RankGroup
from deepzero.layout import Bucket

if TYPE_CHECKING:
    from deepzero.runtime.zero.partitioned_bucket import PartitionedBucket

# The ledger's names for what is sent of parameters.
FORWARD = "parameters.all_gather_forward"
BACKWARD = "parameters.all_gather_backward"
EVALUATION = "parameters.all_gather_evaluation"
ON_REQUEST = "parameters.all_gather_on_request"
ON_REQUEST_BROADCAST = "parameters.broadcast_on_request"
TO_REPLICAS = "parameters.publish_to_replicas"

TRAINING = (FORWARD, BACKWARD)


class PlainAllGather:
    """One all-gather over all ranks, again and again, of each rank's shard of one bucket as it is.

    The shard is on the device; ``offload/`` has the subclass for shards in host memory. ``where`` is the bucket's name
    for traces.
    """

    # Whether the shard lies in host memory.
    on_host = False
    # The W messages of the gather under way.
    _messages = torch.empty(0)

    # qwZ: how many bytes the messages take, beside the bucket's own buffer, while they are on their way.
    quantizer: Quantizer | None = None
    scratch_bytes = 0
    # hpZ and MiCS: the ranks that keep a secondary partition among them. MiCS renews it in each step (``mics``), hpZ by
    # the first gather of each step, or once, where the parameters never change (``frozen``).
    group: RankGroup | None = None
    mics = frozen = False
    secondary_shard: torch.Tensor | None = None

    def __init__(self, in_layout: Bucket, dtype: torch.dtype, comm: Communicator, where: str) -> None:
        self.in_layout, self.dtype, self.comm, self.where = in_layout, dtype, comm, where
        # The strategy that brings this rank's shard to the device: itself, or the plain one on which it is built.
        self.source: PlainAllGather = self
        self.message_bytes = in_layout.shard_numel * dtype.itemsize
        # Counted apart in the ledger: elements of a message that belong to no parameter, times the ranks it goes to.
        self._padding = (comm.world_size - 1) * in_layout.padding_of(comm.rank)
        self._pending: Pending | None = None

    @property
    def quantizes(self) -> bool:
        """Whether values for computing travel quantised."""
        return self.quantizer is not None

    @property
    def unquantized(self) -> PlainAllGather:
        """The strategy that gathers the very values of the ranks' shards; this one, unless it quantises."""
        return self

    def launch(self, kind: str, into: PartitionedBucket) -> None:
        """Launch what fills ``into.gathered`` (1-D, ``[W * shard_numel]``), which belongs to it until :meth:`finish`.

        ``kind`` is the ledger's name for it.
        """
        # In place: this rank's message lies where the all-gather expects it, and the others' arrive beside it.
        gathered, rank, world = into.gathered, self.comm.rank, self.comm.world_size
        messages, place = self.receive_into(gathered), shard_of(gathered, rank, world)
        # A shard in host memory is copied to ``place``, on the device, first.
        with self.source.fetch_shard(kind, into.shard, place) as values:
            self.make_message(values, place if messages is gathered else shard_of(messages, rank, world))
            # Inside the context: on a GPU it is ordered behind the source's copy, on the copy's stream.
            self._pending = self.comm.all_gather(
                kind, messages, self._padding, self.where, numel=self.in_layout.shard_numel
            )

    def make_message(self, values: torch.Tensor, message: torch.Tensor) -> None:
        """Write this rank's message, made from its shard's values."""
        # Already there if the source has copied it from the host, or if with one rank the shard is the buffer.
        if values.data_ptr() != message.data_ptr():
            message.copy_(values)

    def receive_into(self, gathered: torch.Tensor) -> torch.Tensor:
        """Memory for the W messages of a gather that begins now, side by side; it is used until :meth:`finish`."""
        self._messages = gathered
        return gathered

    def arrive(self) -> None:
        """Wait until the messages are complete, for the current stream; hpZ keeps them before they are decoded."""
        if self._pending is not None:
            self._pending.wait()
            # With one rank nothing was sent, and there is only the source's copy to wait for.
            self.source.wait_shard()
            self._pending = None

    def finish(self) -> None:
        """Wait until the bucket is complete, for the current stream. Harmless when it was already."""
        self.arrive()
        self._messages = PlainAllGather._messages  # a view kept here would keep the pool from reusing the buffer

    def without_quantization(self) -> PlainAllGather:
        """The strategy that replaces this one, also under hpZ, when values are no longer quantised."""
        return self.unquantized

    # ---- this rank's shard, on its way into its message --------------------------------------------------------------

    def fetch_shard(self, kind: str, shard: torch.Tensor, target: torch.Tensor) -> AbstractContextManager[torch.Tensor]:
        """A context in which the shard's values are on the device, for the stream that is current inside it.

        ``kind`` is the ledger's name for the gather that needs them, ``shard`` 1-D, ``[shard_numel]``, and ``target``
        as large, on the device: where values may be copied to.
        """
        return nullcontext(shard)

    def wait_shard(self) -> None:
        """Let the current stream wait for the last fetch."""

    # ---- messages to the ranks that keep them: see zeropp.py:SecondaryAllGather --------------------------------------

    def message(self, shard: torch.Tensor) -> torch.Tensor:
        """The shard as it travels; until :meth:`release_message`."""
        return shard

    def release_message(self) -> None:
        """Take back what :meth:`message` gave: it has been sent."""

    def launch_to_replicas(self, bucket: PartitionedBucket) -> Pending | None:
        """Launch this rank's new message to the ranks that keep it. None: there are none."""
        return None

    # ---- what it will send -------------------------------------------------------------------------------------------

    @property
    def always_inside(self) -> bool:
        """Whether the secondary partition is never stale, so that every gather stays in the group."""
        return self.mics or self.frozen

    def forecast(self, inside: bool) -> Traffic:
        """What one gather sends, mean over ranks; with ``inside`` from the secondary partition."""
        world = self.comm.world_size
        return self._traffic(world - 1, world - self.comm.nodes.per_node, (world - 1) / world)

    def _traffic(self, sends: int, crossing: float, fraction: float) -> Traffic:
        """``sends`` messages a rank, ``crossing`` of them to other nodes; ``fraction`` of the bucket's elements."""
        true, size = self.in_layout.true_numel(), self.message_bytes
        return Traffic(1, true * fraction, (self.in_layout.numel - true) * fraction, size * sends, size * crossing)


def send_to_replicas(buckets: Iterable[PartitionedBucket]) -> None:
    """Send every rank's new shards to the ranks that keep them: MiCS, and frozen parameters. A collective.

    Two are under way at a time, so that quantised messages need two buffers.
    """
    under_way: deque[tuple[PlainAllGather, Pending]] = deque()

    def finish() -> None:
        strategy, pending = under_way.popleft()
        pending.wait()
        strategy.release_message()

    for bucket in buckets:
        if (pending := bucket.strategy.launch_to_replicas(bucket)) is not None:
            under_way.append((bucket.strategy, pending))
        if len(under_way) == 2:
            finish()
    while under_way:
        finish()


def shard_of(whole: torch.Tensor, index: int, count: int) -> torch.Tensor:
    """Shard ``index`` of ``count`` equal ones. By hand: ``chunk`` makes a view of each, with thousands of ranks too."""
    numel = whole.numel() // count
    return whole[index * numel : (index + 1) * numel] if count > 1 else whole
