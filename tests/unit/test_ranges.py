"""Names of ranges, the recorder, the account of hidden communication, and our events in torch's file."""

import json
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from deepzero.comm import collectives, profiler_ranges
from deepzero.comm.chaos import Chaos
from deepzero.comm.collectives import Communicator, Pending
from deepzero.comm.flight_recorder import CollectiveRecord
from deepzero.comm.ledger import Ledger
from deepzero.comm.profiler_ranges import VERBS, Label, LaneSpan, OverlapMeter, Recorder
from deepzero.comm.topology import RankGroup
from deepzero.config.engine import ChaosConfig
from deepzero.profiling.trace import our_events, weave


@pytest.mark.parametrize("bucket", [None, 0, 12])
@pytest.mark.parametrize("place", ["", "blocks.3.mlp.fc", "a weight, tied"])
@pytest.mark.parametrize("note", ["", "prefetch", "parameters.all_gather_forward prefetch"])
def test_a_name_is_read_back(bucket, place, note):
    for verb in VERBS:
        label = Label(verb, bucket, place, note)
        assert Label.parse(label.text()) == label


def test_odd_names():
    assert Label.parse(Label("fetch", 1, "head (tied weight)").text()) == Label("fetch", 1, "head [tied weight]")
    for name in ("", "aten::mm", "zero.", "zero.unknown bucket 1", "azero.fetch", "zero.fetch(x)"):
        assert Label.parse(name) is None  # not ours


@pytest.fixture
def clock(monkeypatch):
    """Time as the test says."""
    made = SimpleNamespace(now=0.0)
    for module in (collectives, profiler_ranges):
        monkeypatch.setattr(module, "perf_counter", lambda: made.now)
    return made


TWO = [  # that overlap: launched at 0 and 2, waited for from 5 to 6 and from 6 to 9; a launch takes 1
    ("launch", 0, 1, 0), ("launch", 2, 3, 1), ("wait", 5, 6, 0), ("wait", 6, 9, 1), ("step", 9, 9, None),
]  # fmt: skip
IN_TWO_STEPS = [  # what is under way at a step's end counts in both
    ("launch", 0, 0, 0), ("step", 4, 4, None), ("wait", 6, 7, 0), ("step", 7, 7, None),
]  # fmt: skip
FAILS_TWICE = [  # a wait that has raised, and is tried again, lands once: the other one still is under way
    ("launch", 0, 0, 0), ("launch", 0, 0, 1), ("fails", 0, 0, 0), ("fails", 0, 0, 0), ("step", 4, 4, None),
]  # fmt: skip
ONE = [("launch", 0, 4, 0), ("wait", 4, 4, 0), ("step", 4, 4, None)]


@pytest.mark.parametrize(("device", "kind", "story", "expected"), [
    ("cpu", "gather", TWO, [(9, 6)]),
    ("cpu", "gather", IN_TWO_STEPS, [(4, 0), (3, 1)]),
    ("cpu", "gather", FAILS_TWICE, [(4, 0)]),
    ("cpu", "evaluation", ONE, [None]),  # no part of a step
    ("cuda", "gather", ONE, [None]),  # a GPU says nothing
])  # fmt: skip
def test_hidden_communication(device, kind, story, expected, clock):
    comm = Communicator(torch.device("cpu"), Ledger(untracked_kinds={"evaluation"}), Chaos(ChaosConfig(), 0))
    comm.overlap, pending, found = OverlapMeter(torch.device(device), comm.ledger), {}, []

    def stands(fails, until):
        clock.now = until
        if fails:
            raise RuntimeError("lost")

    for what, clock.now, until, number in story:
        if what == "launch":
            pending[number] = Pending(comm, CollectiveRecord(number, 0, kind, "bucket 0"))
            with pending[number].launching():
                stands(False, until)
        elif what == "step":
            comm.overlap.close_step()
            found.append(comm.overlap.metrics())
        else:
            pending[number].works = [SimpleNamespace(wait=partial(stands, what == "fails", until))]
            with pytest.raises(RuntimeError, match="lost") if what == "fails" else nullcontext():
                pending[number].wait()
    names = ("comm/in_flight_seconds", "comm/exposed_seconds", "comm/hidden_fraction")
    for metrics, seconds in zip(found, expected, strict=True):
        hidden = seconds and pytest.approx(1 - seconds[1] / seconds[0])
        assert metrics == (dict(zip(names, (*seconds, hidden), strict=True)) if seconds else {})


def test_a_launch_that_fails_is_not_under_way(clock, monkeypatch):
    """The connection to a rank that died is refused at once; the next step is not counted as wholly in flight."""
    refuse = mock.Mock(side_effect=RuntimeError("Connection closed by peer"))
    for name in ("isend", "all_to_all"):  # by pairs with gloo; whether another test's group stands does not matter
        monkeypatch.setattr(torch.distributed, name, refuse)
    comm = Communicator(torch.device("cpu"), Ledger(), Chaos(ChaosConfig(), 0))
    pair, parts = RankGroup((0, 1), 0, None), [torch.zeros(3), torch.zeros(3)]
    with pytest.raises(RuntimeError, match="closed by peer"):
        comm.exchange("gradients.all_to_all", parts, parts, group=pair)
    for clock.now in (4, 9):
        comm.overlap.close_step()
    assert comm.overlap.metrics() == {}


def test_what_is_inside_ends_before_what_is_around():
    ledger, recorder = Ledger(), Recorder()
    with ledger.outside_step(), recorder.waiting_for_module("a"):
        with ledger.outside_step(next_step=True), recorder.waiting_for_module("b"):
            assert ledger.in_step("x") and recorder.waiting_place() == "b"
        assert not ledger.in_step("x") and recorder.waiting_place() == "a"
    assert ledger.in_step("x") and recorder.waiting_place() == ""


def test_memory_that_cannot_be_read_stops_nothing(caplog):
    recorder = Recorder(lambda: [][0])
    for _ in range(2):
        with recorder.span(Label("step")):
            pass
    assert recorder.samples == []
    (record,) = caplog.records
    assert record.getMessage() == "the trace has no memory timeline: IndexError('list index out of range')"


def test_samples_take_a_twentieth_of_the_time(monkeypatch):
    now = [0]
    monkeypatch.setattr(profiler_ranges.time, "time_ns", lambda: now[0])

    def held():
        now[0] += 1000
        return {"parameters": now[0]}

    recorder = Recorder(held)
    for moment in (0, 5_000, 20_999, 21_000, 30_000):
        now[0] = max(now[0], moment)
        with recorder.span(Label("step")):
            pass
    assert [when for when, _ in recorder.samples] == [0, 21_000]


def recorded():
    recorder, base = Recorder(), 1_000_000_000
    spans = [(Label("in_flight", 1), 5_000, 9_000), (Label("in_flight", 2), 6_000, None)]
    recorder.flights = [LaneSpan(label, base + began, ended and base + ended) for label, began, ended in spans]
    recorder.aside = [LaneSpan(Label("step", 0, note="delayed"), base + 7_000, base + 8_000)]
    recorder.samples = [(base + 6_500, {"parameters": 7})]
    return recorder


def test_our_events():
    events = our_events(recorded(), pid=9, base_ns=1_000_000_000)
    assert [(e["name"], e["tid"] % 10, e["ts"], e["dur"]) for e in events if e["ph"] == "X"] == [
        ("zero.in_flight bucket 1", 0, 5.0, 4.0),
        ("zero.in_flight bucket 2", 1, 6.0, 0.0),
        ("zero.step bucket 0 delayed", 2, 7.0, 1.0),
    ]
    names = [e["args"]["name"] for e in events if e["name"] == "thread_name"]
    assert names == ["communication 1", "communication 2", "delayed update 1"]
    assert [(e["ts"], e["args"]) for e in events if e["ph"] == "C"] == [(6.5, {"parameters": 7})]


def test_our_events_in_a_file_of_torch(tmp_path):
    path = tmp_path / "a.json"
    with torch.profiler.profile(acc_events=True) as profiler:  # torch 2.11 warns without
        torch.ones(3).sum()
    profiler.export_chrome_trace(str(path))
    before = json.loads(path.read_text(encoding="utf-8"))
    weave(path, recorded(), pid=9)
    after = json.loads(path.read_text(encoding="utf-8"))
    added = our_events(recorded(), 9, before["baseTimeNanoseconds"])
    assert after == {**before, "traceEvents": added + before["traceEvents"]}
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]
    path.write_text('{"loss": 1}', encoding="utf-8")  # another file is left alone
    with pytest.raises(ValueError, match=r"a\.json has no baseTimeNanoseconds"):
        weave(path, recorded(), pid=9)
    assert path.read_text(encoding="utf-8") == '{"loss": 1}'
