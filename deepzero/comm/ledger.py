"""The ledger: every byte sent and every byte of model state held, by category, predicted beside measured.

ZeRO is a claim about bytes. The ledger makes the claim checkable in every run: the closed forms of the sources are put
in before the first step (:meth:`Ledger.predict`), real calls and real tensors are counted during it, and
:meth:`Ledger.report` puts the two side by side.

What is counted for a collective are the elements that *this rank sends*, as the sources count volume: with W ranks and
a bucket of B elements, an all-gather sends ``(W-1) * B/W``, a reduce-scatter the same, an all-reduce twice that.
Padding travels too; it is listed apart so that the rest equals the closed form exactly.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from deepzero.utils.storage import storage_ptr_of

SNAPSHOT = "snapshot"  # of asynchronous saves
SECONDARY = "secondary"  # what hpZ and MiCS keep of the parameters for a rank's group
SPARE = "spare buffers"  # kept for the next gather: part of the most that "gathered" has held, but not of what it holds
MEMORY_CATEGORIES = ("parameters", "gathered", "gradients", "masters", "moments", "buckets", "padding")
HOST_CATEGORIES = ("host_parameters", "host_gradients", "host_masters", "host_moments", "host_buffers")
FILE_CATEGORIES = ("file_parameters", "file_gradients", "file_masters", "file_moments")
UNPREDICTED = (SNAPSHOT, "host_states", "host_activations")
"""Memory that a run may or may not use: measured, and reported where there is some."""
UNPREDICTED_TRAFFIC = ("offload.activations_to_host", "offload.activations_to_device")
"""Copies whose number depends on the model: reported without prediction."""
TOLERANCE = 1e-3  # of a closed form: what is further off is said
ROUNDING = 8  # bytes, which are no fault: each category is a whole number, and padding adds several up


@dataclass
class Traffic:
    """What one kind of collective cost, in calls, elements and bytes sent by one rank."""

    calls: int = 0
    elements: float = 0  # true ones, without padding
    padding_elements: float = 0
    bytes: float = 0  # of elements and padding together; of quantised ones, scales included
    between_node_bytes: float = 0  # of them, what goes to ranks on other nodes; the rest stays inside

    def add(self, other: Traffic, weight: float = 1) -> None:
        """Add ``weight`` times ``other``; numbers that stay whole stay integers."""
        for name in ("calls", "elements", "padding_elements", "bytes", "between_node_bytes"):
            total = getattr(self, name) + weight * getattr(other, name)
            setattr(self, name, int(total) if float(total).is_integer() else total)

    def as_dict(self) -> dict[str, float]:
        """For ``summary.json``."""
        return asdict(self)


@dataclass(frozen=True)
class Sent:
    """What one call sends from this rank; elements with their padding.

    ``ranks`` take part, 1 for a copy between host and device. In a ``ring`` the backend hands bytes from neighbour to
    neighbour, so that each enters a node once; else each rank sends straight to every other.
    """

    elements: int
    bytes: int
    between_node_bytes: float
    ranks: int
    ring: bool = False


@dataclass(frozen=True)
class Event:
    """One thing that happened, in order. ``what`` is a word of the book: launch, wait, gradient_ready, step …"""

    what: str
    kind: str
    where: str
    sent: Sent | None = None  # of a launch, and of a copy between host and device
    at: float = field(default=0.0, compare=False)  # when, by the ledger's clock


@dataclass
class Ledger:
    """One rank's account. Bytes are bytes; elements are elements."""

    # Traffic by kind, for example ``gradients.reduce_scatter``: of the step under way, of the last complete optimizer
    # step, of the step to come (what it has sent ahead), of everything before the first step, and (summed over the run)
    # of what is no part of a step: evaluation, ``GatheredParameters``. `untracked_kinds` are the kinds of the last.
    traffic: dict[str, Traffic] = field(default_factory=dict)
    last_step: dict[str, Traffic] = field(default_factory=dict)
    next_step: dict[str, Traffic] = field(default_factory=dict)
    setup: dict[str, Traffic] = field(default_factory=dict)
    between_steps: dict[str, Traffic] = field(default_factory=dict)
    untracked_kinds: set[str] = field(default_factory=set)
    steps: int = 0  # of this engine's that are closed, taken or not; a checkpoint's are others'
    held: dict[str, int] = field(default_factory=dict)  # the most bytes held, by category, over all samples
    predicted_memory: dict[str, int] = field(default_factory=dict)
    predicted_traffic: dict[str, Traffic] = field(default_factory=dict)
    # The order of events is kept only while `trace` is set: a list that grows is not for a long run.
    trace: bool = False
    events: list[Event] = field(default_factory=list)
    clock: Callable[[], float] = time.perf_counter  # seconds; in a dry run the work that was done so far
    # Called with every event's `what`, `kind` and `where` as it happens, while one step is being recorded.
    observer: Callable[[str, str, str], None] | None = None
    _watched: dict[str, tuple[Callable[[], Iterable[torch.Tensor | None]], int]] = field(default_factory=dict)
    _most: dict[str, Callable[[], int]] = field(default_factory=dict)
    _aside: bool = False  # what is sent now is no part of a step; of the next one
    _ahead: bool = False

    # ---- traffic -----------------------------------------------------------------------------------------------------

    def record(
        self,
        kind: str,
        elements: int,
        sent_bytes: int,
        padding: int = 0,
        between_bytes: float = 0,
        where: str = "",
        ranks: int = 1,
        ring: bool = False,
        what: str = "launch",
    ) -> None:
        """Count one call of a ``kind`` of collective, and keep it as an event while events are kept.

        This rank sends ``elements`` of bucket ``where``, ``padding`` of them padding, as ``sent_bytes`` on the wire, of
        which ``between_bytes`` leave its node. ``ranks`` and ``ring`` are :class:`Sent`'s, ``what`` is the event's.
        """
        self.note(what, kind, where, Sent(elements, sent_bytes, between_bytes, ranks, ring) if self.trace else None)
        of_step = self.next_step if self._ahead else self.traffic
        account = of_step if self.in_step(kind) else self.between_steps
        entry = account.get(kind) or account.setdefault(kind, Traffic())
        entry.calls += 1
        entry.elements += elements - padding
        entry.padding_elements += padding
        entry.bytes += sent_bytes
        between = entry.between_node_bytes + between_bytes
        entry.between_node_bytes = int(between) if float(between).is_integer() else between

    def in_step(self, kind: str) -> bool:
        """Whether what is sent now under this name is part of a step."""
        return not (self._aside or kind in self.untracked_kinds)

    def note(self, what: str, kind: str = "", where: str = "", sent: Sent | None = None) -> None:
        """Keep an event, while events are kept; tell it to the observer, when there is one."""
        if self.trace:
            self.events.append(Event(what, kind, where, sent, self.clock()))
        if self.observer is not None:
            self.observer(what, kind, where)

    @contextlib.contextmanager
    def outside_step(self, next_step: bool = False) -> Iterator[None]:
        """What is sent inside is counted in no step, whatever its kind is, or with ``next_step`` in the next one."""
        around = self._aside, self._ahead
        self._aside, self._ahead = not next_step, next_step
        try:
            yield
        finally:
            self._aside, self._ahead = around

    def close_setup(self) -> None:
        """What was counted so far belongs to the setup, not to the first step."""
        self.setup, self.traffic = self.traffic, {}

    def close_step(self) -> None:
        """An optimizer step is complete."""
        self.steps += 1
        self.last_step, self.traffic, self.next_step = self.traffic, self.next_step, {}

    # ---- memory ------------------------------------------------------------------------------------------------------

    def watch(
        self,
        category: str,
        tensors: Callable[[], Iterable[torch.Tensor | None]],
        padding_bytes: int = 0,
        most: Callable[[], int] | None = None,
    ) -> None:
        """Let :meth:`sample` ask ``tensors()`` for what is held under ``category`` at that moment.

        ``padding_bytes`` of it are the layout's padding, counted under ``padding`` instead. ``most()`` are the bytes
        held since the last sample, where that changes within a step.
        """
        if most is not None:
            self._most[category] = most
        self._watched[category] = (tensors, padding_bytes)

    def sample_step(self) -> None:
        """:meth:`sample` in the first steps of an engine, and in every sixteenth one then, all their micro-batches."""
        # It asks every tensor, a millisecond for a thousand of them, and one step is soon like the other.
        if self.steps < 16 or self.steps % 16 == 0:
            self.sample()

    def sample(self) -> None:
        """Measure what is held now, and keep the maximum by category."""
        for category, total in self.held_now().items():
            total = max(total, self._most[category]()) if category in self._most else total
            self.held[category] = total if category == "padding" else max(self.held.get(category, 0), total)

    def held_now(self, without: Collection[str] = ()) -> dict[str, int]:
        """Bytes held at this moment, by category, some left out. A storage that two tensors share counts once."""
        return _together(self._measure(without))

    def held_in_two(self, apart: Collection[str]) -> tuple[dict[str, int], dict[str, int]]:
        """:meth:`held_now` in two parts, each with its own padding: all but the categories ``apart``, and those."""
        parts = self._measure(())
        return (
            _together({name: part for name, part in parts.items() if name not in apart}),
            _together({name: part for name, part in parts.items() if name in apart}),
        )

    def categories_of(self, tensor: torch.Tensor) -> list[str]:
        """Under which categories the storage of ``tensor`` is held."""
        storage, found = storage_ptr_of(tensor), []
        with torch._C.DisableTorchFunctionSubclass():
            for category, (tensors, _) in self._watched.items():
                if any(t is not None and storage_ptr_of(t) == storage for t in tensors()):
                    found.append(category)
        return found

    def _measure(self, without: Collection[str]) -> dict[str, tuple[int, int]]:
        """Bytes by category: of what is no padding, and of its padding."""
        held: dict[str, tuple[int, int]] = {}
        seen: set[tuple[torch.device, int]] = set()
        # Tensors whose values are elsewhere answer like any others here.
        with torch._C.DisableTorchFunctionSubclass():
            for category, (tensors, padding_bytes) in self._watched.items():
                if category in without:
                    continue
                total = 0
                for tensor in tensors():
                    if tensor is None or tensor.numel() == 0:
                        continue
                    if tensor.is_sparse:
                        total += tensor._values().nbytes + tensor._indices().nbytes
                        continue
                    # Views share memory, and parameters of stages 0-2 are views of one flat tensor: count storages.
                    if (key := (tensor.device, storage_ptr_of(tensor))) not in seen:
                        seen.add(key)
                        total += tensor.untyped_storage().nbytes()
                inside = min(padding_bytes, total)  # a storage that is away has no padding either
                held[category] = (total - inside, inside)
        return held

    # ---- predicted beside measured -----------------------------------------------------------------------------------

    def predict(self, memory: dict[str, int], traffic: dict[str, Traffic]) -> None:
        """Put the closed forms in: bytes by category, and one step's traffic by kind."""
        self.predicted_memory, self.predicted_traffic = dict(memory), dict(traffic)

    def report(self) -> dict[str, dict[str, dict[str, Any]]]:
        """``{"memory": {category: {"predicted", "measured"}}, "communication": {kind: {"predicted", "measured"}}}``.

        In bytes, and in calls, elements, padding elements and bytes of the last optimizer step.
        """
        also = (SECONDARY, *HOST_CATEGORIES, *FILE_CATEGORIES)
        categories = [*MEMORY_CATEGORIES, *(name for name in also if name in self._watched)]
        forms, empty = self.predicted_traffic, Traffic()
        return {
            "memory": {
                name: {"predicted": self.predicted_memory.get(name, 0), "measured": self.held.get(name, 0)}
                for name in categories
            },
            "communication": {
                kind: {
                    "predicted": None if kind in UNPREDICTED_TRAFFIC else forms.get(kind, empty).as_dict(),
                    "measured": self.last_step.get(kind, empty).as_dict(),
                }
                for kind in sorted({*forms, *self.last_step})
            },
        }


def side_of(category: str) -> str:
    """Where memory of a category is: ``device``, ``host``, or ``file``, which is no memory.

    Example:
        >>> side_of("masters"), side_of("host_masters"), side_of("file_masters")
        ('device', 'host', 'file')
    """
    side = category.partition("_")[0]
    return side if side in ("host", "file") else "device"


def off_forms(report: Mapping[str, Any]) -> list[str]:
    """A sentence for each category of a report's memory of which other bytes were held than the closed form says."""
    return [
        f"{category}: {entry['measured']:,.0f} bytes were held, and the closed form says {entry['predicted']:,}. No "
        "result depends on it, but a plan made with these forms does not fit this run. Something outside of the steps "
        "holds memory, or the order of modules changes, or a form lacks a case, which is worth a report"
        for category, entry in report["memory"].items()
        if entry["predicted"] is not None
        and abs(entry["measured"] - entry["predicted"]) > max(TOLERANCE * entry["predicted"], ROUNDING)
    ]


def _together(parts: dict[str, tuple[int, int]]) -> dict[str, int]:
    """Bytes by category, and the padding of all of them."""
    held = {category: size for category, (size, _) in parts.items()}
    return {**held, "padding": sum(padding for _, padding in parts.values())}
