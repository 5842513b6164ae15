"""One recorded step: what is weighed when, what it may cost, what stays when there is too much."""

import itertools

import pytest
import torch

from deepzero.comm.ledger import Ledger
from deepzero.profiling.step_recorder import LANDMARKS, StepRecorder


class Bench:
    """A ledger over tensors that come and go, and a clock that is moved by hand."""

    def __init__(self, weighing=0.0, limit=2000, **options):
        self.ledger, self.now, self.weighing = Ledger(), 100.0, weighing
        self.tensors = {"gradients": [torch.zeros(10)], "moments": [torch.zeros(100)], "masters": [torch.zeros(5)]}
        self.asked = dict.fromkeys(self.tensors, 0)
        for name in self.tensors:
            self.ledger.watch(name, lambda name=name: self.weigh(name), 4 if name == "moments" else 0)
        self.recorder = StepRecorder(self.ledger, limit, clock=lambda: self.now, **options)

    def weigh(self, name):
        self.asked[name] += 1
        self.now += self.weighing if name == "gradients" else 0.0
        return iter(self.tensors[name])

    def record(self, *events, after=0.01):
        """A step with these events: a name, or a name and how many numbers the gradients (or a category) hold then."""
        self.recorder.begin()
        for event in events:
            given = [event] if isinstance(event, str) else event
            what, size, category = (*given, *(None, "gradients")[len(given) - 1 :])
            if size is not None:
                self.tensors[category] = [torch.zeros(size)]
            self.now += after
            self.ledger.note(what, "kind", "where")
        self.recorder.end()
        return self.recorder.points


def words(points):
    return [point.what for point in points]


def test_each_event_with_what_is_held_after_it():
    points = Bench().record("gradient_ready", ("launch", 30), ("wait", 0))
    assert words(points) == ["begin", "gradient_ready", "launch", "wait", "end"]
    assert [point.number for point in points] == [0, 1, 2, 3, 4]
    assert [round(point.seconds, 6) for point in points] == [0, 0.01, 0.02, 0.03, 0.03]
    assert [point.held.get("gradients", 0) for point in points] == [40, 40, 120, 0, 0]
    assert {(p.held["moments"], p.held["masters"], p.held["padding"]) for p in points} == {(396, 20, 4)}
    assert points[1].as_dict()["kind"] == "kind"
    assert "device_bytes" not in points[1].as_dict(), "there is no GPU here"


def test_what_a_gpus_allocator_gave_out_is_asked_at_every_point():
    points = Bench(device_bytes=iter(range(100, 200)).__next__).record("launch")
    assert [point.as_dict()["device_bytes"] for point in points] == [100, 101, 102]


def test_nobody_listens_before_and_after():
    bench = Bench()
    bench.ledger.note("launch", "kind", "where")
    bench.record()
    bench.ledger.note("launch", "kind", "where")
    assert bench.recorder.events == 2
    assert bench.ledger.observer is None


def test_what_stays_is_weighed_at_landmarks_alone():
    bench = Bench()
    bench.record(*["gradient_ready"] * 50, "boundary")
    assert bench.asked["moments"] == 3, "begin, boundary, end"
    assert bench.asked["gradients"] == 50 + 3, "once at each, also at a landmark"
    bench = Bench()
    bench.tensors["moments"] = []
    points = bench.record(("launch", 100, "moments"), "step")
    assert [point.held.get("moments", 0) for point in points] == [0, 0, 396, 396], "seen from the next landmark on"


def test_weighing_is_kept_out_of_the_times():
    bench = Bench(weighing=0.004)
    points = bench.record(*["launch"] * 5)
    assert [round(point.seconds, 6) for point in points[1:6]] == [0.01, 0.02, 0.03, 0.04, 0.05]
    assert round(bench.recorder.seconds, 6) == 0.05
    assert round(bench.recorder.spent_seconds, 6) == 6 * 0.004, "five events and the end"


def test_weighing_that_takes_too_long_is_left_out_for_a_while():
    bench = Bench(weighing=0.02)
    points = bench.record(*["launch"] * 100, "boundary", after=0.001)
    assert bench.recorder.events == 103
    assert len(points) < 10
    assert [what for what in words(points) if what in LANDMARKS] == ["begin", "boundary", "end"]
    assert bench.recorder.spent_seconds < 0.05 + 6 * 0.02
    # The end of a micro-batch passes unweighed like any other.
    points = Bench(weighing=0.06).record("launch", "backward_end", "boundary")
    assert words(points) == ["begin", "launch", "boundary", "end"]


def test_thousands_of_events_are_thinned_and_the_peaks_stay():
    points = Bench(limit=100).record(*(
        ("boundary" if number == 2501 else "launch", 777 if number == 1235 else number % 13) for number in range(5001)
    ))  # fmt: skip
    assert 50 <= len(points) <= 100
    assert max(point.held.get("gradients", 0) for point in points) == 777 * 4
    assert words(points).count("boundary") == 1
    gaps = [b.number - a.number for a, b in itertools.pairwise(points)]
    assert 0 < min(gaps) <= max(gaps) <= 5003 / 100 * 4, "in order, and evenly"


def test_micro_batches_do_not_lift_the_limit():
    bench = Bench(limit=40)
    thinned, thin = [], bench.recorder._thin
    bench.recorder._thin = lambda: (thinned.append(bench.recorder.events), thin())[1]
    batches = [[("launch", number % 7), "wait", "backward_end"] for number in range(512)]
    points = bench.record(*itertools.chain(*batches), "boundary", "step", "publish")
    assert 20 <= len(points) <= 40
    assert [what for what in words(points) if what in LANDMARKS] == list(LANDMARKS)
    assert len(thinned) <= 1541 / 40 + 1, "once for as many points as are kept"
    assert bench.recorder.peak_bytes == 10 * 4 + 100 * 4 + 5 * 4 == max(sum(p.held.values()) for p in points)


def test_a_limit_below_what_must_stay():
    events = [("launch", 20 if number == 50 else 0) for number in range(100)]
    points = Bench(limit=2).record(*events, "boundary")
    assert [p.number for p in points if p.what in LANDMARKS or p.number == 51] == [0, 51, 101, 102]
    assert len(points) <= 6


def test_padding_is_told_apart_at_a_landmark():
    bench = Bench()
    bench.ledger.watch("gathered", lambda: [torch.zeros(10)], padding_bytes=12)
    assert [point.held for point in bench.record("launch")] == [bench.ledger.held_now()] * 3
    assert bench.ledger.held_now()["padding"] == 4 + 12


@pytest.mark.parametrize("at", [0, 1])
def test_a_tensor_that_cannot_be_weighed_costs_a_point_and_nothing_else(at):
    bench, sizes = Bench(), iter([[None, object()] if place == at else [] for place in range(9)])
    bench.weigh = lambda name: next(sizes) if name == "gradients" else []
    points = bench.record("launch", "wait")
    assert words(points) == [what for place, what in enumerate(["begin", "launch", "wait", "end"]) if place != at]
    assert (bench.recorder.problem or "").startswith(f"{('begin', 'launch')[at]}: AttributeError")
