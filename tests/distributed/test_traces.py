"""Traces of real runs: what is in them, in ZeRO's words; exposed communication counted twice; nothing when off."""

import contextlib
import itertools
import json
import re
import resource
import warnings
from pathlib import Path
from unittest import mock

import numpy
import pytest
import torch
from torch import nn

from deepzero.comm.profiler_ranges import Label
from deepzero.config.run import ProfilerConfig
from deepzero.profiling.trace import Recording, trace
from deepzero.profiling.trace_events import Trace
from deepzero.profiling.trace_summary import TraceSummary
from tests.distributed.pool import on_ranks
from tests.distributed.training import WHOLE, log_lines, one_step, start

WIDTH, ACTIVE = 256, 3


class Layers(nn.Module):
    """Large enough that a step takes some milliseconds and its buckets are several."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(40, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, 40)

    def forward(self, ids, labels):
        x = self.embed(ids)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return nn.functional.cross_entropy(self.head(x).float().flatten(0, 1), labels.flatten())


def recorded(rank, world, folder, changes, steps=3 + ACTIVE, profiler=None):
    """Steps under the profiler; the metrics of those that it records by default."""
    torch.manual_seed(0)
    engine = start(Layers(), **changes)
    cfg = {"wait": 1, "warmup": 1, "active": ACTIVE, "ranks": tuple(range(world)), **(profiler or {})}
    metrics = []
    watched = (engine.ledger.held_now, engine.device, engine.comm.ranges)
    with trace(ProfilerConfig(enabled=True, **cfg), Path(folder), rank, *watched) as end_of_step:
        for step in range(steps):
            one_step(engine, rank, world, step)
            metrics.append(engine.step_metrics())
            end_of_step()
    on = engine.comm.ranges.recorder is not None
    engine.destroy()
    return [{**entry, "still_on": on} for entry in metrics[2 : 2 + ACTIVE]]


def traced(ranks, folder, changes, steps, active):
    ranks.run(recorded, str(folder), changes, steps, {"wait": 0, "ranks": (0,), "active": active}, world_size=2)
    (path,) = (folder / "traces").iterdir()
    return path


SEVERAL = {"bucket": WIDTH * WIDTH + WIDTH, "overlap": True}  # buckets, and reductions beside the backward pass
ON_HOST = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
RUNS = {
    "stage 2": {"stage": 2, **SEVERAL},
    "stage 3": {"stage": 3, "zero": WHOLE, **SEVERAL},
    "offload": {"stage": 3, "zero": {**WHOLE, **ON_HOST}, **SEVERAL},
}


@pytest.fixture(scope="module", params=RUNS)
def run(request, ranks, tmp_path_factory):
    """(name, trace files of both ranks, metrics of both ranks)"""
    folder = tmp_path_factory.mktemp("traces")
    metrics = ranks.run(recorded, str(folder), RUNS[request.param], world_size=2)
    paths = sorted((folder / "traces").iterdir())
    assert [re.sub(r"\d{10,}", "N", path.name) for path in paths] == [f"rank{r}.N.pt.trace.json" for r in (0, 1)]
    return request.param, paths, metrics


def events_of(path):
    return json.loads(path.read_text(encoding="utf-8"))["traceEvents"]


def raw_exposed_milliseconds(path):
    """Exposed communication of each step, from nothing but the raw events: a timeline of ticks, coloured in.

    The training thread's launches, waits and copies are where it stands still; the lanes, gloo's own events and the
    same ranges are what is under way.
    """
    events = [event for event in events_of(path) if event["ph"] == "X"]
    steps = [event for event in events if event["name"].startswith("ProfilerStep#")]
    zero, tick = min(step["ts"] for step in steps), 2.0
    size = int(max(step["ts"] + step["dur"] - zero for step in steps) / tick) + 2
    stands, under_way = numpy.zeros(size, bool), numpy.zeros(size, bool)
    for event in events:
        first = round((event["ts"] - zero) / tick)
        cells = slice(max(first, 0), max(round((event["ts"] + event["dur"] - zero) / tick), 0))
        blocking = re.match(r"zero\.(launch|wait|D2H|H2D)\b", event["name"]) and event["tid"] == steps[0]["tid"]
        if blocking:
            stands[cells] = True
        if blocking or event.get("cat") == "communication" or event["name"].startswith("gloo:"):
            under_way[cells] = True
    found = []
    for step in sorted(steps, key=lambda step: step["ts"]):
        cells = slice(round((step["ts"] - zero) / tick), round((step["ts"] + step["dur"] - zero) / tick))
        found.append(float((stands & under_way)[cells].sum()) * tick / 1000)
    return found


def test_exposed_communication_agrees_with_the_raw_events(run):
    _, paths, _ = run
    for path in paths:
        ours = [step.exposed for step in TraceSummary(Trace(path)).steps]
        assert len(ours) == ACTIVE
        assert all(value > 0 for value in ours)
        assert ours == pytest.approx(raw_exposed_milliseconds(path), rel=0.05)


def test_exposed_communication_agrees_with_the_clock_of_the_run(run):
    """The engine's own metric is taken without any trace. What opens and closes a range lies between the two.

    On a busy machine another process may come in between as well: of all steps, the least disturbed one counts.
    """
    _, paths, metrics = run
    ratios = []
    for path, entries in zip(paths, metrics, strict=True):
        summary = TraceSummary(Trace(path))
        for times, entry in zip(summary.steps, entries, strict=True):
            stood = sum(gap.length for gap in summary.gaps if gap.step == times.step and not gap.cause.copy)
            exposed, in_flight = entry["comm/exposed_seconds"], entry["comm/in_flight_seconds"]
            ratios.append(stood / (exposed * 1000))
            assert 0 < exposed <= in_flight < times.length / 1000
            assert entry["comm/hidden_fraction"] == pytest.approx(1 - exposed / in_flight)
    assert 0.99 < min(ratios) < 1.2


def test_tensorboards_plugin_reads_it(run, tmp_path):
    _, paths, _ = run
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the plugin's own, of pandas and the like
        from torch_tb_profiler.profiler.data import RunProfileData

        read = RunProfileData.parse("rank0", "1", str(paths[0]), str(tmp_path))
    assert read.steps_names == [str(2 + k) for k in range(ACTIVE)]
    assert read.has_communication
    assert read.distributed_info["world_size"] == 2
    assert not any(event.name.startswith("zero.in_flight") for event in read.events)


def labels_of(path):
    found = [event["name"] for event in events_of(path) if event["ph"] == "X" and event["name"].startswith("zero.")]
    labels = [Label.parse(name) for name in found]
    assert None not in labels
    assert [label.text() for label in labels] == found
    return labels


def test_ranges_name_what_bucket_and_where(run):
    name, paths, _ = run
    labels = labels_of(paths[0])
    verbs = {label.verb for label in labels}
    always = {"forward", "backward", "boundary", "agree", "step", "publish", "reduce", "launch", "wait", "in_flight"}
    more = {"stage 2": set(), "stage 3": {"fetch", "release"}, "offload": {"fetch", "release", "D2H", "H2D"}}[name]
    assert verbs == always | more
    for label in labels:
        if label.verb in ("fetch", "release", "reduce", "D2H", "H2D") or label.note.startswith("gradients."):
            assert label.bucket is not None, label
            assert label.place, label
    reduced = {(label.bucket, label.place) for label in labels if label.verb == "reduce"}
    assert reduced >= {(0, "head.bias"), (1, "blocks.3.weight"), (5, "embed.weight")}
    if name != "stage 2":
        gathered = [label for label in labels if label.verb == "fetch"]
        assert {label.place for label in gathered} >= {"embed", "blocks.0"}
        assert {label.note for label in gathered} == {"", "prefetch"}
        waits = {label.place for label in labels if label.verb == "wait" and "all_gather_forward" in label.note}
        assert waits >= {"embed", "blocks.1", "blocks.3"}


def test_a_lane_holds_each_collective_from_launch_to_completion(run):
    _, paths, _ = run
    events = [event for event in events_of(paths[0]) if event["ph"] == "X" and event["name"].startswith("zero.")]
    flights = [event for event in events if event["cat"] == "communication"]
    launches = [event for event in events if event["name"].startswith("zero.launch")]
    assert len(flights) == len(launches)
    for lane in {flight["tid"] for flight in flights}:
        mine = sorted((f["ts"], f["ts"] + f["dur"]) for f in flights if f["tid"] == lane)
        assert all(a[1] <= b[0] + 1e-3 for a, b in itertools.pairwise(mine))
    # The clock of these lanes is the profiler's: a launch lies in its flight, and a wait ends with it.
    flights, launches = (sorted(several, key=lambda event: event["ts"]) for several in (flights, launches))
    for flight, launch in zip(flights, launches, strict=True):
        assert launch["name"] == flight["name"].replace("in_flight", "launch")
        assert flight["ts"] <= launch["ts"] + 20
        assert launch["ts"] + launch["dur"] <= flight["ts"] + flight["dur"] + 20
    ends = [flight["ts"] + flight["dur"] for flight in flights]
    waits = [event for event in events if event["name"].startswith("zero.wait bucket")]
    late = sorted(min(abs(wait["ts"] + wait["dur"] - end) for end in ends) for wait in waits)
    assert late[len(late) // 2] < 200


def test_memory_over_time(run):
    name, paths, _ = run
    samples = [event["args"] for event in events_of(paths[0]) if event["ph"] == "C"]
    assert len(samples) >= 3
    assert {"parameters", "masters", "moments", "gradients", "buckets", "padding"} <= set(samples[0])
    if name == "stage 3":
        assert max(sample["gathered"] for sample in samples) > 0
    if name == "offload":
        assert max(sample["host_moments"] for sample in samples) > 0


def test_it_ends_with_the_recorded_steps(run):
    _, paths, metrics = run
    assert not any(entry["still_on"] for entries in metrics for entry in entries)
    steps = [event["name"] for event in events_of(paths[0]) if event["name"].startswith("ProfilerStep#")]
    assert steps == [f"ProfilerStep#{2 + k}" for k in range(ACTIVE)]


def test_a_delayed_update_has_a_lane_of_its_own(ranks, tmp_path):
    """Torch's profiler does not see the thread that makes it."""
    zero = {"offload_optimizer": {"device": "cpu", "delayed_update": True, "delay_after_steps": 0}}
    path = traced(ranks, tmp_path, {"stage": 2, "zero": zero}, steps=4, active=2)
    updates = [event for event in events_of(path) if event.get("cat") == "delayed update"]
    found = [Label.parse(event["name"]) for event in updates]
    assert set(found) == {Label("step", 0, "head.bias", "delayed"), Label("step", 1, "blocks.0.weight", "delayed")}
    summary = TraceSummary(Trace(path))
    assert len(summary.steps) == 2
    assert len(found) >= 3  # the last one may begin after the recorded steps
    assert summary.mean.host_steps == 0


@on_ranks()
def test_a_run_that_ends_before_the_first_recorded_step_says_so(rank, world, tmp_path):
    with log_lines() as said:
        engine = start(Layers(), stage=2)
        with trace(ProfilerConfig(enabled=True, wait=5, ranks=(0, 1)), tmp_path, rank) as end_of_step:
            one_step(engine, rank, world)
            end_of_step()
    engine.destroy()
    assert said == ["profiler: the run ended before the first step that was to be recorded; there is no trace"]
    assert list(tmp_path.iterdir()) == []


@on_ranks()
def test_off_nothing_is_made(rank, world):
    """A step with the profiler off, in which a range would raise."""
    engine = start(Layers(), stage=3, zero=WHOLE, bucket=WIDTH * WIDTH)
    with mock.patch.object(torch.profiler, "record_function", None):
        one_step(engine, rank, world)
    ranges = engine.comm.ranges
    assert ranges.span("fetch", 1, "a") is ranges.span("wait") is ranges.waiting_for_module("b")
    assert ranges.recorder is None


@on_ranks(1)
def test_one_rank_sends_nothing(rank, world):
    engine = start(Layers(), stage=2)
    one_step(engine, rank, world)
    assert engine.step_metrics() == {}


@on_ranks()
def test_a_profiler_or_a_folder_that_fails_stops_nothing(rank, world, tmp_path):
    (tmp_path / "traces").write_text("a file in the folder's place", encoding="utf-8")
    today = mock.patch.object(torch.profiler.profile, "step", side_effect=RuntimeError("no profiler today"))
    for failing, line in (
        (contextlib.nullcontext(), f"profiler: no trace in {tmp_path / 'traces'}: FileExistsError"),
        (today, "profiler: RuntimeError: no profiler today; training goes on without"),
    ):
        with log_lines() as said, failing:
            metrics = recorded(rank, world, tmp_path, RUNS["stage 2"])
        assert [entry["still_on"] for entry in metrics] == [False] * ACTIVE
        assert len(said) == 1 and said[0].startswith(line)
    assert [path.name for path in tmp_path.iterdir()] == ["traces"] and (tmp_path / "traces").is_file()


@on_ranks(1)
def test_a_trace_that_the_disk_does_not_take(rank, world, tmp_path):
    """What torch has written of it goes again, or nothing else would find room."""
    write, limits = Recording.write, resource.getrlimit(resource.RLIMIT_FSIZE)

    def on_a_full_disk(recording, profiler):
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 15, limits[1]))
        try:
            write(recording, profiler)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    with mock.patch.object(Recording, "write", on_a_full_disk), log_lines() as said:
        recorded(rank, world, tmp_path, RUNS["stage 2"])
    assert list((tmp_path / "traces").iterdir()) == []
    assert len(said) == 1 and "make room on the disk; training goes on" in said[0]


def test_several_cycles_give_a_trace_each(ranks, tmp_path):
    cycles = {"wait": 0, "active": 1, "repeat": 2, "ranks": (1,), "memory": False, "with_stack": True}
    ranks.run(recorded, str(tmp_path), {"stage": 2}, 5, cycles, world_size=2)
    paths = sorted((tmp_path / "traces").glob("rank1.*.pt.trace.json"))
    assert [[step.number for step in Trace(path).steps] for path in paths] == [[1], [3]]
    assert all(label.verb != "in_flight" or label.note for path in paths for label in labels_of(path))


def test_stage_0_names_its_reductions(ranks, tmp_path):
    labels = labels_of(traced(ranks, tmp_path, {"stage": 0}, steps=2, active=1))
    assert {label.verb for label in labels} >= {"reduce", "launch", "wait", "in_flight", "agree"}
    assert all(label.place for label in labels if label.note.startswith("gradients.")), labels
