"""qgZ: a bucket's way to its owners in few bits, inside nodes first. ZeRO++, section 3.3.

A reduction that quantises in every hop of a ring rounds W - 1 times. Here an element is rounded **at most twice**, and
every sum is made in fp32. Rank (i, l) is local rank l of node i, R ranks to a node, N nodes; part q of a bucket
belongs to rank q = (j, l) = j * R + l. One bucket::

    1  (i, l) -> (i, l')    one message: the parts of owners (0, l') (1, l') … (N-1, l'), quantised one by one
    2  (i, l) adds          what the R ranks of its node have for (j, l), in rank order, for every node j
    3  (i, l) -> (j, l)     the sum for (j, l), quantised
    4  (j, l) adds          the sums of the N nodes, in node order, into the output

With one node 3 and 4 are left out, with one rank to a node 1 and 2.

*The reordering.* Parts lie in the bucket by rank: (0,0) (0,1) (1,0) (1,1) for 2 x 2; cut into R runs, sums would lie
with the wrong owner after step 3. DeepSpeed swaps the parts in a pass of its own. Here each part is quantised from
where it lies to its place in a message, a message of its own within that. What a rank has for itself, or sums for
itself, is never quantised: it does not travel, and one error less is made.

*Volume* per rank, Ψ elements: inside the node ``(R-1)/R Ψ`` and between nodes ``(N-1)/W Ψ`` elements, of
``bits/8 + 4/block`` bytes each; the exact way sends ``(W-R)/W Ψ`` elements of 2 bytes between nodes.

*Error feedback* (``zero.quantization.error_feedback``). What an element has lost, ``x - decoded``, is kept in the wire
dtype where it arose, in 1 and in 3, ``(R-1)/R + (N-1)/W`` elements for each of the layout, and added to the next
gradient of the same element before that is quantised: nothing is lost in the long run. Residuals that are not finite
become 0, so that an overflow does not linger. **Checkpoints do not hold them**: after a resume they start at 0, and the
next few steps differ from those of a run that was not stopped by at most one rounding of a gradient.

Sources: [ZeRO++], section 3.3; ``runtime/comm/coalesced_collectives.py`` in [DeepSpeed]; error feedback: [1-bit SGD].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from deepzero.comm.collectives import Communicator
from deepzero.comm.exact_sum import Term, chunk_for, sum_chunk
from deepzero.comm.quantization import Packed, Quantizer
from deepzero.comm.reduce_scatter import BucketKey, InflightReduce
from deepzero.comm.topology import RankGroup
from deepzero.layout import Bucket, FlatLayout

INSIDE = "gradients.reduce_inside_node"
BETWEEN = "gradients.reduce_between_nodes"


@dataclass(frozen=True)
class QuantizedMessages:
    """The messages of one bucket, views of its receive buffer; ``uint8`` but for the sum. Own entries are empty."""

    inside_send: list[torch.Tensor]  # for each local rank: N parts
    inside_recv: list[torch.Tensor]
    partial: torch.Tensor  # fp32, one part: step 2's sum for this rank itself
    between_send: list[torch.Tensor]  # for each node: one part
    between_recv: list[torch.Tensor]


class QuantizedReduce:
    """Steps 1 to 3, for a :class:`~deepzero.comm.reduce_scatter.BucketReducer`, whose own sum is step 4.

    The constructor is a collective of the ranks, at least 2. ``layouts`` are those of all groups, of which
    ``exact_groups`` go the exact way; with ``error_feedback`` residuals are kept, in the bucket's ``wire_dtype``.
    """

    def __init__(
        self,
        comm: Communicator,
        layouts: Sequence[FlatLayout],
        wire_dtype: torch.dtype,
        quantizer: Quantizer,
        exact_groups: frozenset[int] = frozenset(),
        error_feedback: bool = False,
    ) -> None:
        self.comm, self.quantizer, self.format, self.exact_groups = comm, quantizer, quantizer.format, exact_groups
        self.inside, self.across = comm.split(comm.nodes.per_node)
        longest = max((layout.largest_bucket for layout in layouts), default=0) // comm.world_size
        # Elements to decode at a time: whole blocks.
        self.chunk = max(chunk_for(comm.device_type, longest) // self.format.block, 1) * self.format.block
        self.exact_buckets: set[BucketKey] = set()
        """These go the exact way. The same on all ranks; change it between two steps only. What error feedback keeps of
        a bucket that is sent the exact way waits, unused."""
        # Parts of a bucket that a rank sends in step 1 and in step 3.
        self._parts_sent = (self.across.size * (self.inside.size - 1), self.across.size - 1)
        self.metering, self._tallies = False, dict[BucketKey, torch.Tensor]()
        # For each group: what was lost in steps 1 and 3, in the order in which it is sent.
        self._residuals = {
            group: [torch.zeros(n * layout.shard_numel, dtype=wire_dtype, device=comm.device) for n in self._parts_sent]
            for group, layout in enumerate(layouts)
            if error_feedback and group not in exact_groups
        }

    def takes(self, key: BucketKey) -> bool:
        """Whether this bucket is quantised; the same answer on all ranks."""
        return key[0] not in self.exact_groups and key not in self.exact_buckets

    def messages_bytes(self, capacity: int) -> int:
        """Bytes of the messages of a bucket of ``capacity`` elements, both ways, and of step 2's sum."""
        part = capacity // self.comm.world_size
        return 2 * sum(self._parts_sent) * self.format.message_bytes(part) + 4 * self._partial_numel(part)

    def _partial_numel(self, part: int) -> int:
        # With one node step 2's sum goes straight into the output; with one rank to a node there is nothing to add.
        return part if self.inside.size > 1 and self.across.size > 1 else 0

    def residuals(self) -> list[torch.Tensor]:
        """Error feedback's residuals."""
        return [residual for pair in self._residuals.values() for residual in pair]

    # ---- the meter ---------------------------------------------------------------------------------------------------

    def meter(self, on: bool) -> None:
        """From here on add up, from 0, what is quantised and what is lost of it, which costs a second pass; or stop.

        Between two steps only.
        """
        self.metering, self._tallies = on, {} if on else self._tallies

    @property
    def measured(self) -> dict[BucketKey, tuple[float, float]]:
        """For each bucket the signal ``sum(x ** 2)`` and the noise ``sum((x - decoded) ** 2)`` of what *this* rank
        has quantised in steps 1 and 3 since :meth:`meter` was called. Nothing may be under way.
        """
        return {key: (float(tally[0]), float(tally[1])) for key, tally in self._tallies.items()}

    # ---- steps 1 to 3 ------------------------------------------------------------------------------------------------

    def launch(self, inflight: InflightReduce, scratch: torch.Tensor) -> None:
        """Step 1, and where there is nothing to send inside the node, step 3; never waits.

        Sets ``terms``, ``pending`` and ``second_hop`` of ``inflight``; ``scratch`` is fp32, two chunks.
        """
        bucket, messages, sent = inflight.bucket, self._cut_messages(inflight), inflight.sent()
        per_node, me, nodes = self.inside.size, self.inside.index, range(self.across.size)
        own = [sent[node * per_node + me] for node in nodes]
        if per_node == 1:
            self._reduce_between(inflight, messages, [[part] for part in own], scratch)
            return
        residuals, padding = self._residuals_of(inflight, 0), 0
        for peer in range(per_node):
            if peer == self.inside.index:
                continue  # what stays here is not packed
            for node, packed in zip(nodes, self._parts_in(messages.inside_send[peer], bucket), strict=True):
                owner = node * per_node + peer
                self._pack(inflight, [sent[owner]], packed, next(residuals), scratch)
                padding += bucket.padding_of(owner)
        where, numel = f"bucket {bucket.index}", len(nodes) * bucket.shard_numel
        exchanged = (messages.inside_send, messages.inside_recv, padding, where, self.inside, numel)
        inflight.pending = self.comm.exchange(INSIDE, *exchanged)
        received = [[self._reader(p) for p in self._parts_in(m, bucket)] for m in messages.inside_recv]
        # For every node, what this node's ranks have for its l-th rank.
        terms_for: list[list[Term]] = [[own[j] if l == me else received[l][j] for l in range(per_node)] for j in nodes]
        if len(nodes) == 1:
            inflight.terms = terms_for[0]
        else:
            inflight.second_hop = partial(self._reduce_between, inflight, messages, terms_for, scratch)

    def _reduce_between(
        self, inflight: InflightReduce, messages: QuantizedMessages, terms_for: list[list[Term]], scratch: torch.Tensor
    ) -> None:
        """2 and 3. ``terms_for[j]`` is what this node has for rank (j, l), to be added up in this order."""
        bucket, me, padding = inflight.bucket, self.across.index, 0
        inflight.second_hop = None
        if inflight.pending is not None:
            inflight.pending.wait()
        residuals = self._residuals_of(inflight, 1)
        for node, message in enumerate(messages.between_send):
            for packed in self._parts_in(message, bucket):
                self._pack(inflight, terms_for[node], packed, next(residuals), scratch)
                padding += bucket.padding_of(self.across.ranks[node])
        exchanged = (messages.between_send, messages.between_recv, padding, f"bucket {bucket.index}", self.across)
        inflight.pending = self.comm.exchange(BETWEEN, *exchanged, bucket.shard_numel)
        mine: Term = terms_for[me][0]
        if len(terms_for[me]) > 1:
            # While the others' sums travel.
            self.comm.sum_in_rank_order(messages.partial, terms_for[me], False, scratch)
            mine = messages.partial
        inflight.terms = [
            mine if node == me else self._reader(*self._parts_in(message, bucket))
            for node, message in enumerate(messages.between_recv)
        ]

    def _reader(self, packed: Packed) -> Term:
        """A contribution that is decoded chunk by chunk, whole blocks each, as it is added."""
        return lambda start, values: self.quantizer.unpack(packed, values, start)

    def _pack(
        self,
        inflight: InflightReduce,
        terms: Sequence[Term],
        packed: Packed,
        residual: torch.Tensor | None,
        scratch: torch.Tensor,
    ) -> None:
        """Quantise the sum of ``terms``, and what was lost last time; keep what is lost now."""
        if residual is None and not self.metering and len(terms) == 1 and isinstance(terms[0], torch.Tensor):
            self.quantizer.pack(terms[0], packed)
            return
        size = scratch.numel() // 2
        for lo in range(0, packed.numel, size):
            hi = min(lo + size, packed.numel)
            x, other = scratch[: hi - lo], scratch[size : size + hi - lo]
            sum_chunk(x, terms, lo, other)
            if residual is not None:
                x.add_(other.copy_(residual[lo:hi]))
            chunk = packed.cut(lo, hi)
            self.quantizer.pack(x, chunk)
            if residual is not None or self.metering:
                self.quantizer.unpack(chunk, other)
                noise = torch.sub(x, other, out=other)
                if self.metering:
                    zeros = torch.zeros(2, dtype=torch.float64, device=x.device)
                    tally = self._tallies.setdefault(inflight.key, zeros)
                    for place, values in enumerate((x, noise)):
                        tally[place] += torch.linalg.vector_norm(values, dtype=torch.float64).square()
                if residual is not None:
                    residual[lo:hi].copy_(torch.nan_to_num_(noise, nan=0.0, posinf=0.0, neginf=0.0))

    # ---- where things lie --------------------------------------------------------------------------------------------

    def _cut_messages(self, inflight: InflightReduce) -> QuantizedMessages:
        """Cut the bucket's receive buffer into messages."""
        part, left = inflight.bucket.shard_numel, inflight.buffers.recv_buffer
        single = self.format.message_bytes(part)

        def take(nbytes: int) -> torch.Tensor:
            nonlocal left
            taken, left = left[:nbytes], left[nbytes:]
            return taken

        def take_each(group: RankGroup, nbytes: int) -> list[torch.Tensor]:
            return [take(0 if place == group.index else nbytes) for place in range(group.size)]

        total = take(4 * self._partial_numel(part)).view(torch.float32)
        inside = [take_each(self.inside, self.across.size * single) for _ in range(2)]
        between = [take_each(self.across, single) for _ in range(2)]
        return QuantizedMessages(inside[0], inside[1], total, between[0], between[1])

    def _parts_in(self, message: torch.Tensor, bucket: Bucket) -> list[Packed]:
        """The parts in a message, opened; none in an empty one."""
        parts = message.split(self.format.message_bytes(bucket.shard_numel)) if message.numel() else ()
        return [self.format.open(part, bucket.shard_numel) for part in parts]

    def _residuals_of(self, inflight: InflightReduce, which: int) -> Iterator[torch.Tensor | None]:
        """Residuals of the parts that step 1 (``which=0``) or 3 (1) sends, in the order in which it packs them."""
        parts, part = self._parts_sent[which], inflight.bucket.shard_numel
        if (pair := self._residuals.get(inflight.key[0])) is None:
            return iter([None] * parts)
        return iter(pair[which][parts * inflight.bucket.shard_offset :][: parts * part].split(part))
