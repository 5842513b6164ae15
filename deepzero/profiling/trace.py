"""``profiler=torch``: torch.profiler over a few steps, as traces in the run folder.

The files are Chrome traces, ``traces/rank0.<time>.pt.trace.json``; ``docs/traces.md`` says who shows them. Beside what
torch records they have ranges in ZeRO's words (``comm/profiler_ranges.py``), on a CPU lanes with each collective from
its launch until it is known to be complete, and counters of the ledger's bytes. With a GPU and ``profiler.memory``
there is also ``rank0.<time>.memory_snapshot.pickle``, the caching allocator's history, for
https://pytorch.org/memory_viz. What fails here is said in one line, and training goes on.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from deepzero.comm.profiler_ranges import Ranges, Recorder
from deepzero.config.run import ProfilerConfig
from deepzero.config.strict import ConfigError
from deepzero.device import Accelerator, MemoryHistory, accelerator_of

log = logging.getLogger(__name__)

FOLDER = "traces"
COMMUNICATION = "communication"  # category and lane of the events that say when a collective was under way
ASIDE = "delayed update"  # the same for what a thread does that torch's profiler does not see
HELD = "held"  # name of the counters of the memory timeline
_FIRST_LANE = 1_000_000_000  # number of the first lane: higher than any thread's
_HEAD = 1 << 16
_BEGIN = '"traceEvents": ['
_SNAPSHOT_EVENTS = 100_000

Held = Callable[[], dict[str, int]]


def check_profiler(cfg: ProfilerConfig, steps: int, world_size: int) -> None:
    """Raise a :class:`ConfigError` for a profiler that would record nothing, or less than was asked for."""
    if not cfg.enabled:
        return
    needed = (cfg.wait + cfg.warmup + cfg.active) * cfg.repeat
    if steps < needed:
        times = f", {cfg.repeat} times" if cfg.repeat > 1 else ""
        raise ConfigError(
            f"train.steps={steps}: the profiler needs profiler.wait {cfg.wait} + profiler.warmup {cfg.warmup} + "
            f"profiler.active {cfg.active}{times} = {needed} steps"
        )
    if not cfg.ranks or any(not 0 <= rank < world_size for rank in cfg.ranks):
        raise ConfigError(f"profiler.ranks={list(cfg.ranks)}: give some of the ranks 0 to {world_size - 1}")


@contextlib.contextmanager
def trace(
    cfg: ProfilerConfig,
    run_dir: Path,
    rank: int,
    held: Held | None = None,
    device: torch.device | None = None,
    ranges: Ranges | None = None,
) -> Iterator[Callable[[], None]]:
    """Profile the steps inside, when this rank is one of those that record.

    Args:
        cfg: which steps and which ranks.
        run_dir: gets a folder ``traces``.
        rank: this rank.
        held: gives the bytes held by category, for the memory timeline.
        device: where the run computes; None: on the CPU. A GPU that the run does not use is left alone.
        ranges: the engine's (``engine.comm.ranges``), recorded in ZeRO's words; None: the profiler's own alone.

    Yields:
        A function to be called at the end of every optimizer step.
    """
    if not cfg.enabled or rank not in cfg.ranks:
        yield lambda: None
        return
    accelerator = accelerator_of(device or torch.device("cpu"))
    recording = Recording(run_dir / FOLDER, f"rank{rank}", held, cfg, accelerator, ranges or Ranges())
    activity = torch.profiler.ProfilerActivity
    kinds = [activity.CPU, getattr(activity, accelerator.kind.upper(), activity.CPU)]
    profiler = torch.profiler.profile(
        activities=list(dict.fromkeys(kinds)),
        schedule=torch.profiler.schedule(wait=cfg.wait, warmup=cfg.warmup, active=cfg.active, repeat=cfg.repeat),
        on_trace_ready=recording.write,
        record_shapes=True,
        profile_memory=cfg.memory,
        with_stack=cfg.with_stack,
    )
    recording.drive(profiler, profiler.start)
    try:
        yield lambda: recording.drive(profiler, profiler.step)
    finally:
        recording.drive(profiler, profiler.stop)
        recording.end()
        if not recording.tried:  # a run that goes on from a checkpoint may have too few steps left
            log.warning("profiler: the run ended before the first step that was to be recorded; there is no trace")


class Recording:
    """What this module adds to one rank's traces in ``folder``, named ``name``: on while the profiler records.

    On a GPU the allocator's history too; one that the program records already is written as it is.
    """

    def __init__(
        self, folder: Path, name: str, held: Held | None, cfg: ProfilerConfig, accelerator: Accelerator, ranges: Ranges
    ) -> None:
        self.folder, self.name, self._cfg, self._ranges = folder, name, cfg, ranges
        self._held = held if cfg.memory else None
        self._history = MemoryHistory(accelerator) if cfg.memory and accelerator.has_streams else None
        self._recorder: Recorder | None = None
        self._started_history = self._broken = False
        self.tried = False  # a trace was written, or it was said why not

    def drive(self, profiler: torch.profiler.profile, verb: Callable[[], None]) -> None:
        """Start, step or stop the profiler, and record when it does. **One that has failed is not touched again**:
        torch ends the process when it is stopped twice.
        """
        if self._broken:
            return
        try:
            with warnings.catch_warnings():
                # Of a second cycle; the events of the first are in their file.
                warnings.filterwarnings("ignore", "Warning: Profiler clears events at the end of each cycle")
                verb()
            action = torch.profiler.ProfilerAction
            if self._recorder is None and profiler.current_action in (action.RECORD, action.RECORD_AND_SAVE):
                self._begin()  # the end is :meth:`write`
        except Exception as error:  # what watches a run does not stop it
            self._broken = self.tried = True
            self.end()
            log.warning("profiler: %s: %s; training goes on without", type(error).__name__, error)

    def _begin(self) -> None:
        if self._history is not None:
            self._started_history = self._history.start(self._cfg.with_stack, _SNAPSHOT_EVENTS)
        self._recorder = Recorder(self._held)
        self._ranges.start(self._recorder)

    def end(self) -> None:
        """Nothing is recorded any more. Never raises: the error that ends a run must stay the one that is seen."""
        if self._recorder is not None:
            self._ranges.stop()
            self._recorder = None
        if self._history is not None and self._started_history:
            self._started_history = False
            try:
                self._history.stop()
            except Exception as error:  # a GPU that has failed fails here again
                log.warning("profiler: the memory history stays on: %s: %s", type(error).__name__, error)

    def write(self, profiler: torch.profiler.profile) -> None:
        """The recorded steps are over: write the trace, whole or not at all."""
        self.tried = True
        stem = f"{self.name}.{time.time_ns()}"
        part, path = self.folder / f".{stem}.part.json", self.folder / f"{stem}.pt.trace.json"
        try:
            self._ranges.stop()
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                profiler.export_chrome_trace(str(part))
                if not part.exists():  # torch raises nothing
                    raise OSError("torch could not write it to its end: make room on the disk")
                try:
                    weave(part, self._recorder, os.getpid())
                except ValueError as error:
                    log.warning("profiler: the trace has no lanes and no memory timeline: %s", error)
                part.replace(path)
            finally:
                for left in (part, part.with_name(f"{part.name}.tmp")):  # torch's, which would keep a full disk full
                    left.unlink(missing_ok=True)
            if self._history is not None:
                self._history.dump(str(self.folder / f"{stem}.memory_snapshot.pickle"))
        except Exception as error:  # what watches a run does not stop it
            log.warning("profiler: no trace in %s: %s: %s; training goes on", self.folder, type(error).__name__, error)
        finally:
            self.end()


# ---- our events in torch's file --------------------------------------------------------------------------------------


def weave(path: Path, recorder: Recorder | None, pid: int) -> None:
    """Put what ``recorder`` has kept into a trace file, before torch's own events. The file is not parsed.

    Raises:
        ValueError: the file does not look like a trace of torch.
    """
    with path.open(encoding="utf-8", errors="surrogateescape") as file:
        head = file.read(_HEAD)
        base, place = re.search(r'"baseTimeNanoseconds": (\d+)', head), head.find(_BEGIN)
        if base is None or place < 0:
            raise ValueError(f"{path.name} has no baseTimeNanoseconds or traceEvents in its first {_HEAD} bytes")
        lines = [json.dumps(event) for event in our_events(recorder, pid, int(base[1]))] if recorder else []
        if not lines:
            return
        place += len(_BEGIN)
        woven = path.with_suffix(".woven")
        try:
            with woven.open("w", encoding="utf-8", errors="surrogateescape") as out:
                # A trace has torch's own metadata in any case, so a comma is always right.
                out.write(head[:place] + "\n" + ",\n".join(lines) + ",\n" + head[place:])
                shutil.copyfileobj(file, out)
            woven.replace(path)
        finally:
            woven.unlink(missing_ok=True)


def our_events(recorder: Recorder, pid: int, base_ns: int) -> list[dict[str, Any]]:
    """Lanes and counters of memory, as Chrome trace events. Times become microseconds after ``base_ns``."""
    events: list[dict[str, Any]] = []
    first = _FIRST_LANE
    for name, entries in ((COMMUNICATION, recorder.flights), (ASIDE, recorder.aside)):
        spans = [(entry.began_ns, entry.ended_ns or entry.began_ns) for entry in entries]
        numbers = lanes(spans)
        count = max(numbers, default=-1) + 1
        for lane in range(count):
            thread = {"pid": pid, "tid": first + lane, "ph": "M", "ts": 0}
            events.append({**thread, "name": "thread_name", "args": {"name": f"{name} {lane + 1}"}})
            events.append({**thread, "name": "thread_sort_index", "args": {"sort_index": first + lane}})
        for entry, (began, ended), lane in zip(entries, spans, numbers, strict=True):
            event = {"ph": "X", "cat": name, "name": entry.label.text(), "pid": pid, "tid": first + lane, "args": {}}
            events.append({**event, "ts": (began - base_ns) / 1000, "dur": (ended - began) / 1000})
        first += count
    counter = {"ph": "C", "cat": HELD, "name": HELD, "pid": pid, "tid": 0}
    return events + [{**counter, "ts": (at - base_ns) / 1000, "args": held} for at, held in recorder.samples]


def lanes(spans: Sequence[tuple[int, int]]) -> list[int]:
    """The lane of each span: the first in which nothing overlaps with it. ``spans`` are sorted by their begin."""
    ends, chosen = list[int](), []
    for began, ended in spans:
        free = next((lane for lane, end in enumerate(ends) if end <= began), len(ends))
        ends[free : free + 1] = [ended]
        chosen.append(free)
    return chosen
