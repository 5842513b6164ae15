"""From the events of a rehearsed step and a cluster's numbers to seconds: when each thing begins, ends, is waited for.

Four lanes run side by side: the device computes, the network carries one collective after the other in the order of
their launches, and each direction between host and device carries one copy after the other. The device goes on until it
comes to a *wait*; what it waits for there is *exposed*. A CPU's cores send, too, and compute more slowly meanwhile. The
CPU's step, where something is offloaded, is taken piece by piece as its results leave for the device, at the speed of
the host's memory. A delayed one began with the step, on the gradients of the step before, and nothing leaves before it
is over.

Not in it: the time in which Python launches things (none, where a GPU's queue is never empty), other traffic on the
links, ranks that are slower than others.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from deepzero.comm.ledger import Event, side_of
from deepzero.offload.copy_streams import FETCH, TO_DEVICE
from deepzero.planning import plan
from deepzero.planning.clusters import Cluster
from deepzero.planning.dry_run import DryRunResult
from deepzero.utils.formatting import short_bytes, short_number, short_seconds

STEP_PASSES = 2  # masters and moments are read and written


@dataclass
class SimulatedSpan:
    """One piece of work on one lane, in seconds from the beginning of the step."""

    lane: str  # compute, network, to_host, to_device, host
    what: str
    where: str
    start: float
    end: float
    exposed: float = 0.0  # how long the device stood still for it
    slows: float = 0.0  # by what share it slows what the device computes meanwhile (0 to 1)


@dataclass
class SimulatedTimeline:
    """One optimizer step of one rank."""

    spans: list[SimulatedSpan] = field(default_factory=list)
    seconds: float = 0.0

    def busy(self, lane: str) -> float:
        """Seconds during which something was on a lane: the device computed, or the network carried something."""
        return sum(span.end - span.start for span in self.spans if span.lane == lane)

    @property
    def exposed_seconds(self) -> float:
        """During which the device waited for anything."""
        return sum(span.exposed for span in self.spans)

    def exposed_by_kind(self) -> dict[str, float]:
        """The same by what was waited for, the longest first."""
        found: dict[str, float] = defaultdict(float)
        for span in self.spans:
            found[span.what] += span.exposed
        return dict(sorted(((k, v) for k, v in found.items() if v > 0), key=lambda item: -item[1]))


class _StreamClocks:
    """Plays the events in order."""

    def __init__(self, rehearsal: DryRunResult, cluster: Cluster) -> None:
        self.rehearsal, self.cluster, self.held = rehearsal, cluster, defaultdict(int, rehearsal.held)
        self.until = [0.0, *itertools.accumulate(map(cluster.op_seconds, rehearsal.work))]
        self.now, self.done_ops = 0.0, 0
        self.free: dict[str, float] = defaultdict(float)
        self.under_way: dict[tuple[str, str], deque[SimulatedSpan]] = defaultdict(deque)
        self.fetched: dict[str, float] = {}
        self.sending: list[SimulatedSpan] = []
        # What the CPU steps on; in fp32 parameters in host memory are their own masters. And on how much it has.
        self.host_elements = max(1, (self._kept("masters") or self._kept("parameters")) // 4)
        self.stepped, self.to_step = 0, 1.0
        self.line = SimulatedTimeline()

    def play(self) -> SimulatedTimeline:
        """The step; where it leaves something under way, the second of two, which finds what the first has left."""
        late, began = set(map(id, left_under_way(self.rehearsal.events))), 0.0
        if late:
            self._play_once(late)
            began, self.line.spans = self.now, [span for queue in self.under_way.values() for span in queue]
        self._play_once(late)
        next_steps = {id(span) for queue in self.under_way.values() for span in queue} if late else set()
        self.line.spans = [span for span in self.line.spans if id(span) not in next_steps]
        for span in self.line.spans:
            span.start, span.end = span.start - began, span.end - began
        self.line.seconds = self.now - began
        return self.line

    def _play_once(self, late: set[int]) -> None:
        """All events, from now on. What is ``late`` leaves bucket by bucket, each when it has been stepped on."""
        play = {"launch": self._launch, "wait": self._wait, "copy": self._copy, "publish": self._publish}
        self.done_ops, self.stepped, self.to_step = 0, 0, 1.0
        if self.rehearsal.delayed:
            self._step_on_host(self.host_elements, "")
        for event in self.rehearsal.events:
            self._compute(int(event.at))
            if id(event) in late and event.sent is not None and event.sent.ranks > 1:
                whole = event.sent.elements * event.sent.ranks / (event.sent.ranks - 1)
                self._step(whole / self.rehearsal.model_numel)
            elif event.what == "step":
                self._step(self.to_step)
            if event.what in play:
                play[event.what](event)
        self._compute(len(self.until) - 1)

    def _run(self, lane: str, what: str, where: str, seconds: float) -> SimulatedSpan:
        """Behind what is on the lane already; the device itself is busy as long as it computes."""
        start = max(self.now, self.free[lane])
        span = SimulatedSpan(lane, what, where, start, start + seconds)
        self.line.spans.append(span)
        self.free[lane] = span.end
        if lane == "compute":
            self.now = span.end
        return span

    def _compute(self, ops: int) -> None:
        if (seconds := self.until[ops] - self.until[self.done_ops]) > 0:
            self._run("compute", "compute", "", self._beside_the_network(seconds))
        self.done_ops = ops

    def _beside_the_network(self, seconds: float) -> float:
        """How long so much computing takes from now on, with what is on the network already."""
        now = self.now
        for span in (span for span in self.sending if span.end > now):
            alone = max(0.0, span.start - now)
            if seconds <= alone:
                break
            seconds, now = seconds - alone, now + alone
            beside = (span.end - now) * (1 - span.slows)
            if seconds <= beside:
                seconds /= 1 - span.slows
                break
            seconds, now = seconds - beside, span.end
        return now + seconds - self.now

    def _launch(self, event: Event) -> None:
        if event.sent is not None:
            seconds = self.cluster.collective_seconds(event.sent, self.rehearsal.nodes)
            # A part that is offloaded comes from the host first.
            self.free["network"] = max(self.free["network"], self.fetched.pop(event.where, 0.0))
            span = self._run("network", event.kind, event.where, seconds)
            if seconds and self.cluster.send_overhead:
                span.slows = min(1.0, event.sent.bytes * self.cluster.send_overhead / seconds)
                self.sending.append(span)
            self.under_way[event.kind, event.where].append(span)

    def _wait(self, event: Event) -> None:
        if queue := self.under_way[event.kind, event.where]:
            self._stand_still(queue.popleft())

    def _stand_still(self, span: SimulatedSpan) -> None:
        span.exposed += max(0.0, span.end - self.now)
        self.now = max(self.now, span.end)

    def _copy(self, event: Event) -> None:
        if event.sent is None:
            return
        lane = "to_device" if event.kind.endswith(("to_device", "fetch")) else "to_host"
        if event.kind == TO_DEVICE:
            # The CPU has stepped on what leaves now: its gradients came before, its masters and moments lie there.
            if not self.rehearsal.delayed:
                self._step_on_host(event.sent.elements, event.where)
            self.free[lane] = max(self.free[lane], self.free["host"])
        span = self._run(lane, event.kind, event.where, event.sent.bytes / self.cluster.host_bandwidth)
        if event.kind == FETCH:
            self.fetched[event.where] = span.end

    def _step_on_host(self, elements: int, where: str) -> None:
        """The CPU steps on so many elements, when their gradients have come and it is free."""
        # A delayed update reads one copy of the gradients while the other one is written.
        gradients = self._kept("gradients") // (2 if self.rehearsal.delayed else 1)
        moved = STEP_PASSES * (self._kept("masters") + self._kept("moments")) + gradients
        moved_here = moved * elements / self.host_elements * self.rehearsal.nodes.per_node
        self.free["host"] = max(self.free["host"], self.free["to_host"])
        self._run("host", "optimizer step", where, moved_here / self.cluster.host_memory_bandwidth)
        self.stepped += elements

    def _kept(self, states: str) -> int:
        """Bytes of what the CPU steps on, in memory or in files; how long a disk takes is not simulated."""
        return self.held[f"host_{states}"] + self.held[f"file_{states}"]

    def _step(self, part: float) -> None:
        """A part of the device's own optimizer step, or what is left of it: one pass over what it keeps."""
        part = min(part, self.to_step)
        self.to_step -= part
        if moved := STEP_PASSES * (self.held["masters"] + self.held["moments"]):
            moved += self.rehearsal.memory.get("gradients", 0)
        self._run("compute", "optimizer step", "", self._beside_the_network(part * moved / self.cluster.copy_bandwidth))

    def _publish(self, event: Event) -> None:
        """The step is over when the new parameters are there; those that stay in host memory, too."""
        if (left := self.host_elements - self.stepped) > 0 and self._kept("moments"):
            self._step_on_host(left, "")
        late = [span for span in self.line.spans if span.lane in ("to_device", "to_host", "host")]
        for span in sorted(late, key=lambda item: item.end):
            self._stand_still(span)


def left_under_way(events: Sequence[Event]) -> list[Event]:
    """The launches of a step that it does not wait for: the next step does (``overlap_param_gather``)."""
    waits: Counter[tuple[str, str]] = Counter()
    left: list[Event] = []
    for event in reversed(events):
        waits[event.kind, event.where] += {"wait": 1, "launch": -1}.get(event.what, 0)
        if waits[event.kind, event.where] < 0:
            waits[event.kind, event.where] = 0
            left.insert(0, event)
    return left


@dataclass(frozen=True)
class Simulated:
    """One rank's step on one cluster: how long, how much of it waiting for what, whether it fits."""

    rehearsal: DryRunResult
    cluster: Cluster
    timeline: SimulatedTimeline
    tokens: int | None  # of a global batch

    @property
    def device_bytes(self) -> int:
        """The most that a rank's device holds at any time, activations included."""
        found = plan.memory(self.rehearsal)
        return sum(size for name, size in found.items() if side_of(name) == "device")

    @property
    def host_bytes_per_node(self) -> int:
        """Host bytes of all ranks of a node together."""
        return self.rehearsal.host_bytes * self.rehearsal.nodes.per_node

    @property
    def fits(self) -> bool:
        """In the device's memory, and in the host's."""
        host = self.host_bytes_per_node <= self.cluster.host_bytes
        return host and self.device_bytes <= self.cluster.memory_bytes

    @property
    def exposed_share(self) -> float:
        """What part of the step the device waits (0 to 1)."""
        return self.timeline.exposed_seconds / self.timeline.seconds if self.timeline.seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Returns the figures as plain numbers, for a JSON file."""
        line = self.timeline
        return {
            "cluster": self.cluster.name,
            "world_size": self.rehearsal.nodes.world_size,
            "step_seconds": line.seconds,
            "compute_seconds": line.busy("compute"),
            "network_seconds": line.busy("network"),
            "exposed_seconds": line.exposed_seconds,
            "exposed_by_kind": line.exposed_by_kind(),
            "tokens_per_second": self.tokens / line.seconds if self.tokens else None,
            "device_bytes": self.device_bytes,
            "host_bytes_per_node": self.host_bytes_per_node,
            "fits": self.fits,
        }

    def lines(self) -> list[str]:
        """Returns the result as lines for a terminal."""
        line, nodes, cluster = self.timeline, self.rehearsal.nodes, self.cluster
        speed = f", {short_number(self.tokens / line.seconds)} tokens/s" if self.tokens else ""
        # Recomputation counts as work here.
        reached = sum(op.flops for op in self.rehearsal.work) / (line.seconds * cluster.flops)
        room = f"{short_bytes(cluster.memory_bytes)}: {'fits' if self.fits else 'DOES NOT FIT'}"
        if self.rehearsal.host_bytes:
            room += f"; host {short_bytes(self.host_bytes_per_node)} of {short_bytes(cluster.host_bytes)}"
        waits = line.exposed_by_kind().items()
        return [
            f"{cluster.name}: {nodes.world_size} ranks, {nodes.count} node{'s' if nodes.count > 1 else ''} of "
            f"{nodes.per_node}",
            f"  step {short_seconds(line.seconds)}{speed}, {reached:.0%} of the peak; compute "
            f"{short_seconds(line.busy('compute'))}, network busy {short_seconds(line.busy('network'))}, waited for "
            f"{short_seconds(line.exposed_seconds)} ({self.exposed_share:.0%} of the step)",
            *(f"    waits {short_seconds(waited):>10} for {kind}" for kind, waited in waits),
            f"  memory {short_bytes(self.device_bytes)} of {room}",
        ]


def simulate(rehearsal: DryRunResult, cluster: Cluster, tokens: int | None = None) -> Simulated:
    """The rehearsed step on such a cluster."""
    return Simulated(rehearsal, cluster, _StreamClocks(rehearsal, cluster).play(), tokens)
