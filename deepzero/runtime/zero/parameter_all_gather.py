"""How a bucket is put together: by one all-gather over all ranks, or ZeRO++'s cheaper ways.

[Note: messages and partitions]
    On the wire a bucket is W equal *messages*, one from each rank: its part as it is, or quantised (**qwZ**). The
    W messages lie side by side in the *target*: the bucket's own buffer, or, quantised, a buffer of bytes from which
    the values are decoded when all have arrived. Every rank decodes every message, its own too: all compute with the
    same values, which are those of no rank's part exactly.

    The *primary* partition is a rank's part, one message of W. The *secondary* one (**hpZ**) are the W/H messages that
    a rank keeps of a gathered bucket for its group of H consecutive ranks, a node: rank r those with numbers
    ``[r % H * W/H, (r % H + 1) * W/H)``. Together the group has all of them, so as long as the values do not change,
    the bucket can be gathered again inside the node, message by message as it was: with the same bits. That is so
    from the forward pass's gather on until the next optimizer step; for frozen parameters, for the whole run::

        W = 4, H = 2    target   | m0 | m1 | m2 | m3 |
                        primary     0    1    2    3         one message each
                        secondary  0, 2      1, 3            ranks 0 and 2 keep m0 m1; 1 and 3 keep m2 m3

    Hybrid sharding (**MiCS**) is the same picture, with a secondary partition that is never stale: each step ends with
    every rank sending its new message to those that keep it, and then no gather leaves the group.

Volume of one gather per rank, n bytes a message: over all ranks ``(W-1) n``, of which ``(W-R) n`` leave a node of R;
inside ``(H-1) W/H n``. Memory of the secondary partition: ``W/H n``, for a bucket of Ψ elements ``cΨ/H`` (c bytes an
element, 1.002 with qwZ).

Sources: ZeRO++ (Wang et al. 2023), sections 3.1 and 3.2; MiCS (Zhang et al. 2022); DeepSpeed's ``ds_secondary_tensor``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from deepzero.comm.collectives import Communicator, Pending
from deepzero.comm.ledger import Traffic
from deepzero.comm.quantization import Quantizer
from deepzero.comm.topology import RankGroup
from deepzero.layout import Bucket
from deepzero.offload.copy_streams import FETCH, FETCH_BETWEEN_STEPS, HostDeviceCopier, PendingCopy
from deepzero.runtime.zero.buffer_pool import BufferPool

TO_REPLICAS = "parameters.publish_to_replicas"


@dataclass(frozen=True)
class GatherConfig:
    """How the buckets of one group travel."""

    inside: RankGroup | None = None
    """hpZ and MiCS: the ranks that keep a secondary partition among them."""
    replicated: bool = False
    """MiCS: it is renewed at the end of each step."""
    quantizer: Quantizer | None = None
    """qwZ."""
    messages: BufferPool | None = None
    """qwZ: where buffers for quantised messages come from."""
    room: int = 0
    """qwZ: bytes of each of them, which any bucket's messages fit into, so that all serve all."""
    fixed: bool = False
    """Frozen parameters, whose values do not change from step to step."""


class ParameterAllGather:
    """Puts one bucket together, again and again.

    Args:
        bucket: which.
        dtype: of its elements.
        comm: the ranks.
        rules: how.
        wire: between host and device, where something is offloaded.
        where: the bucket's name, for traces.
    """

    def __init__(
        self,
        bucket: Bucket,
        dtype: torch.dtype,
        comm: Communicator,
        rules: GatherConfig,
        wire: HostDeviceCopier | None,
        where: str,
    ) -> None:
        self.bucket, self.dtype, self.comm, self.rules, self.where = bucket, dtype, comm, rules, where
        self._wire = wire
        self.quantizes = rules.quantizer is not None and comm.world_size > 1
        """False also once the error meter has found quantised values too far off."""
        self.lossy = False
        """Whether the values that have arrived last were quantised."""
        self.last_fetch: PendingCopy | None = None
        """From host memory: before the host is written, it has to end."""
        self._pending: Pending | None = None
        self._fetch: PendingCopy | None = None
        self._target, self._whole, self._buffer = torch.empty(0), torch.empty(0), torch.empty(0)
        self._keeps: int | None = None
        self.secondary: torch.Tensor | None = None
        """What this rank keeps for its group; its values are those of generation …"""
        self._secondary_of = -1
        self._kept_in_training = False
        self._make_secondary()

    @property
    def message_bytes(self) -> int:
        """Of one rank's part on the wire."""
        if self.quantizes and self.rules.quantizer is not None:
            return self.rules.quantizer.format.message_bytes(self.bucket.shard_numel)
        return self.bucket.shard_numel * self.dtype.itemsize

    @property
    def message_room(self) -> int:
        """Bytes that quantised messages take beside the bucket's own buffer, while they are on their way."""
        return self.comm.world_size * self.message_bytes if self.quantizes else 0

    @property
    def kept_messages(self) -> int:
        """W/H: how many messages a rank keeps for its group."""
        inside = self.rules.inside
        return self.comm.world_size // inside.size if inside is not None else 0

    def _make_secondary(self) -> None:
        if self.rules.inside is not None and self.comm.world_size > 1:
            dtype = torch.uint8 if self.quantizes else self.dtype
            numel = self.kept_messages * self.message_bytes // dtype.itemsize
            self.secondary = torch.zeros(numel, dtype=dtype, device=self.comm.device)
            self._secondary_of = -1

    def drop_secondary(self) -> None:
        """Its memory goes; nothing is gathered here any more."""
        self.secondary, self._secondary_of = None, -1

    def stop_quantizing(self) -> None:
        """From the next gather on the values travel as they are."""
        if self.quantizes:
            self.quantizes = False
            self._make_secondary()

    # ---- launch → finish ---------------------------------------------------------------------------------------------

    def launch(
        self,
        kind: str,
        whole: torch.Tensor,
        shard: Callable[[], torch.Tensor],
        on_host: bool,
        generation: int,
        exact: bool,
        keep: bool,
    ) -> None:
        """Launch what fills ``whole``; it belongs to the gather until :meth:`finish`.

        Args:
            kind: the ledger's name for it.
            whole: 1-D on the device, the bucket's extent.
            shard: gives this rank's part, 1-D; not asked when nothing of it is needed.
            on_host: the part is in host memory.
            generation: of the values.
            exact: the very values, as they are in the ranks' parts.
            keep: for training. What an evaluation has kept serves evaluations alone: else what a step sends would
                depend on whether one came before it, and could not be said in advance.
        """
        self._whole, self.lossy = whole, self.quantizes and not exact
        self._target = self._take(self.message_room) if self.lossy else whole
        # Quantised messages are not the very values.
        inside = self.rules.inside if self.secondary is not None and (not exact or not self.quantizes) else None
        if inside is not None and self._secondary_of == generation and (self._kept_in_training or not keep):
            self._launch_inside(kind, inside)
            return
        self._keeps = generation if inside is not None else None
        self._kept_in_training = keep or self.rules.fixed
        if on_host and self._wire is not None:
            mine = _part_of(whole, self.comm.rank, self.comm.world_size)
            padding = self._padding_of(self.comm.rank)
            aside = kind in self.comm.ledger.untracked_kinds
            fetch = FETCH_BETWEEN_STEPS if aside else FETCH
            self._fetch = self.last_fetch = self._wire.to_device(fetch, mine, shard(), padding, self.where)
            # Behind the copy on its own stream: the model goes on computing, as it does while others send.
            with self._fetch.afterwards(alone=self.comm.world_size == 1):
                self._launch_over_all(kind, mine)
        else:
            self._launch_over_all(kind, shard())

    def _launch_over_all(self, kind: str, mine: torch.Tensor) -> None:
        rank, world = self.comm.rank, self.comm.world_size
        place = _part_of(self._target, rank, world)
        if self.lossy:
            self._pack(mine, place)
        elif place.data_ptr() != mine.data_ptr():
            place.copy_(mine)
        padding = (world - 1) * self._padding_of(rank)
        numel = self.bucket.shard_numel
        self._pending = self.comm.all_gather(kind, self._target, padding, self.where, numel=numel)

    def _launch_inside(self, kind: str, inside: RankGroup) -> None:
        if self.secondary is None:
            raise RuntimeError(f"{self.where} has no secondary partition")
        kept = self.kept_messages
        _part_of(self._target, inside.index, inside.size).copy_(self.secondary)
        padding = (inside.size - 1) * sum(self._padding_of(inside.index * kept + i) for i in range(kept))
        numel = kept * self.bucket.shard_numel
        self._pending = self.comm.all_gather(kind, self._target, padding, self.where, inside, numel)

    def finish(self) -> None:
        """``whole`` is complete, for the current stream. Harmless when it was already."""
        if self._pending is None:
            return
        self._pending.wait()
        if self._fetch is not None:
            self._fetch.wait()
        if self._keeps is not None and self.secondary is not None and self.rules.inside is not None:
            inside = self.rules.inside
            self.secondary.copy_(_part_of(self._target, inside.index, inside.size))
            self._secondary_of = self._keeps
        if self.lossy:
            self._decode()
        self._pending = self._fetch = self._keeps = None
        self._target = self._whole = torch.empty(0)

    def _decode(self) -> None:
        rules, part = self.rules, self.bucket.shard_numel
        if rules.quantizer is None or rules.messages is None:
            raise RuntimeError(f"{self.where} is not quantised")
        values = self._whole.split(part)
        messages = self._target.split(self.message_bytes)
        for message, place in zip(messages, values, strict=True):
            rules.quantizer.unpack(rules.quantizer.format.open(message, part), place)
        self._give()

    def _pack(self, values: torch.Tensor, message: torch.Tensor) -> None:
        if self.rules.quantizer is not None:
            self.rules.quantizer.pack(values, self.rules.quantizer.format.open(message, values.numel()))

    def _take(self, size: int) -> torch.Tensor:
        """Room for quantised messages, in bytes."""
        if self.rules.messages is None:
            raise RuntimeError(f"{self.where} is not quantised")
        self._buffer = self.rules.messages.take(max(size, self.rules.room))
        return self._buffer[:size]

    def _give(self) -> None:
        """The buffer goes back; views of it have to be gone by the time that it is taken again."""
        buffer, self._buffer = self._buffer, torch.empty(0)
        self.comm.chaos.poison(buffer)
        if self.rules.messages is not None:
            self.rules.messages.give(buffer)

    def _padding_of(self, rank: int) -> int:
        return self.bucket.shard_numel - self.bucket.true_numel_of(rank)

    # ---- the new part goes to those that keep it: MiCS, and frozen parameters ----------------------------------------

    def share(self, shard: torch.Tensor, generation: int) -> Pending | None:
        """Launch this rank's new message to all ranks that keep it; :meth:`shared` ends it. None: nobody does."""
        inside, kept = self.rules.inside, self.kept_messages
        if inside is None or self.secondary is None or not (self.rules.replicated or self.rules.fixed):
            return None
        self._kept_in_training = True
        rank, world = self.comm.rank, self.comm.world_size
        # Offloaded parts are in host memory, from which nothing is sent.
        message = shard = shard.to(self.comm.device)
        if self.quantizes:
            message = self._take(self.message_bytes)
            self._pack(shard, message)
        rooms = self.secondary.split(self.secondary.numel() // kept)
        recv = [self.secondary[:0]] * world
        for place, room in enumerate(rooms):
            recv[inside.index * kept + place] = room
        keepers = self.keepers_of(rank)
        send = [message if q in keepers else message[:0] for q in range(world)]
        if rank in keepers:
            recv[rank].copy_(message)
        self._target = message  # it belongs to the exchange until it is over
        sends = len(keepers - {rank})
        self._secondary_of = generation
        padding = sends * self._padding_of(rank)
        return self.comm.exchange(TO_REPLICAS, send, recv, padding, self.where, numel=self.bucket.shard_numel)

    def shared(self) -> None:
        """What :meth:`share` has launched is over."""
        self._target = torch.empty(0)
        if self.quantizes:
            self._give()

    def keepers_of(self, rank: int) -> set[int]:
        """The ranks, one in each group, that keep ``rank``'s message."""
        inside = self.rules.inside
        if inside is None:
            return set()
        return {first + rank // self.kept_messages for first in range(0, self.comm.world_size, inside.size)}

    # ---- what it will send -------------------------------------------------------------------------------------------

    def forecast(self, inside: bool) -> Traffic:
        """What one gather sends, mean over ranks.

        Args:
            inside: from the secondary partition.
        """
        nodes, group, kept = self.comm.nodes, self.rules.inside, self.kept_messages
        world, true, size = nodes.world_size, self.bucket.true_numel(), self.message_bytes
        sends, crossing, share = world - 1, float(world - nodes.per_node), (world - 1) / world
        if inside and group is not None:
            sends, share = (group.size - 1) * kept, (group.size - 1) / group.size
            crossing = kept * nodes.crossing_inside(group.size)
        padding = (self.bucket.numel - true) * share
        return Traffic(1, true * share, padding, size * sends, size * crossing)

    def forecast_share(self) -> Traffic:
        """What :meth:`share` sends, mean over ranks: some keep their own message, and send one less."""
        nodes, world, part, size = self.comm.nodes, self.comm.world_size, self.bucket.shard_numel, self.message_bytes
        true, sends, crossing = 0, 0, 0
        for rank in range(world):
            others = self.keepers_of(rank) - {rank}
            true += len(others) * self.bucket.true_numel_of(rank)
            sends += len(others)
            crossing += len(nodes.crossing(rank, list(others)))
        return Traffic(1, true / world, (sends * part - true) / world, size * sends / world, size * crossing / world)


def _part_of(whole: torch.Tensor, index: int, count: int) -> torch.Tensor:
    """One of ``count`` equal parts. Of thousands one is wanted, and a view of each would cost more than the gather."""
    part = whole.numel() // count
    return whole[index * part : (index + 1) * part]
