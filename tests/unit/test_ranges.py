"""Names of ranges, the recorder, the account of hidden communication, and our events in torch's file."""

import json

import pytest
import torch

from deepzero.comm import profiler_ranges
from deepzero.comm.collectives import Communicator
from deepzero.comm.ledger import Ledger
from deepzero.comm.profiler_ranges import VERBS, Label, LaneSpan, OverlapMeter, Recorder
from deepzero.comm.streams import Chaos
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


def test_parentheses_become_brackets():
    label = Label.parse(Label("fetch", 1, "head (tied weight)").text())
    assert label == Label("fetch", 1, "head [tied weight]")


@pytest.mark.parametrize("name", ["", "aten::mm", "zero.", "zero.unknown bucket 1", "azero.fetch", "zero.fetch(x)"])
def test_other_names_are_not_ours(name):
    assert Label.parse(name) is None


class Clock:
    """Time as the test says."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(profiler_ranges, "perf_counter", made)
    return made


def meter():
    return OverlapMeter(torch.device("cpu"), Ledger(untracked_kinds={"evaluation"}))


def test_hidden_communication_of_two_that_overlap(clock):
    """Launched at 0 and 2, waited for from 5 to 6 and from 6 to 9; a launch takes 1."""
    account = meter()
    flights = []
    for moment in (0, 2):
        clock.now = moment
        flights.append(account.launch("gather", "bucket 0"))
        clock.now = moment + 1
        flights[-1].launched()
    for flight, begin, end in zip(flights, (5, 6), (6, 9), strict=True):
        clock.now = begin
        flight.standing()
        clock.now = end
        flight.landed()
    account.close_step()
    assert account.metrics() == {
        "comm/in_flight_seconds": 9.0, "comm/exposed_seconds": 6.0, "comm/hidden_fraction": pytest.approx(1 / 3),
    }  # fmt: skip


def test_what_is_under_way_at_a_steps_end_counts_in_both(clock):
    account = meter()
    flight = account.launch("gather", "")
    flight.launched()
    clock.now = 4
    account.close_step()
    assert account.metrics()["comm/in_flight_seconds"] == 4
    clock.now = 6
    flight.standing()
    clock.now = 7
    flight.landed()
    account.close_step()
    assert account.metrics() == {
        "comm/in_flight_seconds": 3.0, "comm/exposed_seconds": 1.0, "comm/hidden_fraction": pytest.approx(2 / 3),
    }  # fmt: skip


def test_a_launch_that_fails_is_not_under_way(clock, monkeypatch):
    """The connection to a rank that died is refused at once; the next step is not counted as wholly in flight."""

    def refuse(*_args, **_options):
        raise RuntimeError("Connection closed by peer")

    for name in ("isend", "all_to_all"):  # by pairs with gloo; whether another test's group stands does not matter
        monkeypatch.setattr(torch.distributed, name, refuse)
    comm = Communicator(torch.device("cpu"), Ledger(), Chaos(ChaosConfig(), 0))
    pair, parts = RankGroup((0, 1), 0, None), [torch.zeros(3), torch.zeros(3)]
    with pytest.raises(RuntimeError, match="closed by peer"):
        comm.exchange("gradients.all_to_all", parts, parts, group=pair)
    clock.now = 4
    comm.overlap.close_step()
    clock.now = 9
    comm.overlap.close_step()
    assert comm.overlap.metrics() == {}


def test_one_that_fails_twice_lands_once(clock):
    account = meter()
    failed, other = account.launch("gather", ""), account.launch("gather", "")
    failed.launched()
    other.launched()
    for _ in range(2):  # a wait that has raised, and is tried again
        failed.standing()
        failed.landed()
    clock.now = 4
    account.close_step()
    assert account.metrics()["comm/in_flight_seconds"] == 4, "the other one still is"


def test_evaluation_is_no_part_of_a_step(clock):
    account = meter()
    flight = account.launch("evaluation", "")
    clock.now = 4
    flight.launched()
    flight.standing()
    flight.landed()
    account.close_step()
    assert account.metrics() == {}


def test_a_gpu_says_nothing(clock):
    account = OverlapMeter(torch.device("cuda"), Ledger())
    flight = account.launch("gather", "")
    clock.now = 4
    flight.launched()
    account.close_step()
    assert account.metrics() == {}


def test_memory_that_cannot_be_read_stops_nothing(caplog):
    def held():
        raise RuntimeError("no ledger")

    recorder = Recorder(held)
    for _ in range(2):
        with recorder.span(Label("step")):
            pass
    assert recorder.samples == []
    assert [record.getMessage() for record in caplog.records] == [
        "the trace has no memory timeline: RuntimeError('no ledger')"
    ]


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
    recorder = Recorder()
    recorder.flights = [
        LaneSpan(Label("in_flight", 1), 1_000_005_000, 1_000_009_000),
        LaneSpan(Label("in_flight", 2), 1_000_006_000, None),
    ]
    recorder.aside = [LaneSpan(Label("step", 0, note="delayed"), 1_000_007_000, 1_000_008_000)]
    recorder.samples = [(1_000_006_500, {"parameters": 7})]
    return recorder


def test_our_events():
    events = our_events(recorded(), pid=9, base_ns=1_000_000_000)
    shown = [(e["name"], e["tid"] % 10, e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert shown == [
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
    assert after["traceEvents"] == added + before["traceEvents"]
    assert {**after, "traceEvents": []} == {**before, "traceEvents": []}
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]


def test_another_file_is_left_alone(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{"loss": 1}', encoding="utf-8")
    with pytest.raises(ValueError, match=r"a\.json has no baseTimeNanoseconds"):
        weave(path, recorded(), pid=9)
    assert path.read_text(encoding="utf-8") == '{"loss": 1}'
