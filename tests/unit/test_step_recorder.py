"""One recorded step: what is weighed when, what it may cost, what stays when there is too much."""

import itertools

import torch

from deepzero.comm.ledger import Ledger
from deepzero.profiling.step_recorder import LANDMARKS, StepRecorder


class Bench:
    """A ledger over tensors that come and go, and a clock that is moved by hand."""

    def __init__(self, weighing=0.0, limit=2000):
        self.ledger, self.now, self.weighing = Ledger(), 100.0, weighing
        self.tensors = {"gradients": [torch.zeros(10)], "moments": [torch.zeros(100)], "masters": [torch.zeros(5)]}
        self.asked = dict.fromkeys(self.tensors, 0)
        for name in self.tensors:
            self.ledger.watch(name, lambda name=name: self.weigh(name), 4 if name == "moments" else 0)
        self.recorder = StepRecorder(self.ledger, limit, clock=lambda: self.now)

    def weigh(self, name):
        self.asked[name] += 1
        self.now += self.weighing if name == "gradients" else 0.0
        return iter(self.tensors[name])

    def event(self, what, after=0.01):
        self.now += after
        self.ledger.note(what, "kind", "where")


def test_each_event_with_what_is_held_after_it():
    bench = Bench()
    bench.recorder.begin()
    bench.event("gradient_ready")
    bench.tensors["gradients"].append(torch.zeros(20))
    bench.event("launch")
    bench.tensors["gradients"] = []
    bench.event("wait")
    bench.recorder.end()
    points = bench.recorder.points
    assert [point.what for point in points] == ["begin", "gradient_ready", "launch", "wait", "end"]
    assert [point.number for point in points] == [0, 1, 2, 3, 4]
    assert [round(point.seconds, 6) for point in points] == [0, 0.01, 0.02, 0.03, 0.03]
    assert [point.held.get("gradients", 0) for point in points] == [40, 40, 120, 0, 0]
    assert {(p.held["moments"], p.held["masters"], p.held["padding"]) for p in points} == {(396, 20, 4)}
    assert points[1].as_dict()["kind"] == "kind"
    assert "device_bytes" not in points[1].as_dict(), "there is no GPU here"


def test_what_a_gpus_allocator_gave_out_is_asked_at_every_point():
    bench = Bench()
    recorder = StepRecorder(bench.ledger, device_bytes=iter(range(100, 200)).__next__, clock=lambda: bench.now)
    recorder.begin()
    bench.event("launch")
    recorder.end()
    assert [point.as_dict()["device_bytes"] for point in recorder.points] == [100, 101, 102]


def test_nobody_listens_before_and_after():
    bench = Bench()
    bench.event("launch")
    bench.recorder.begin()
    bench.recorder.end()
    bench.event("launch")
    assert bench.recorder.events == 2
    assert bench.ledger.observer is None


def test_what_stays_is_weighed_at_landmarks_alone():
    bench = Bench()
    bench.recorder.begin()
    for _ in range(50):
        bench.event("gradient_ready")
    bench.event("boundary")
    bench.recorder.end()
    assert bench.asked["moments"] == 3, "begin, boundary, end"
    assert bench.asked["gradients"] == 50 + 3, "once at each, also at a landmark"


def test_moments_that_appear_in_the_step_are_seen_from_the_next_landmark_on():
    bench = Bench()
    bench.tensors["moments"] = []
    bench.recorder.begin()
    bench.tensors["moments"] = [torch.zeros(100)]
    bench.event("step")
    bench.recorder.end()
    assert [point.held.get("moments", 0) for point in bench.recorder.points] == [0, 396, 396]


def test_weighing_is_kept_out_of_the_times():
    bench = Bench(weighing=0.004)
    bench.recorder.begin()
    for _ in range(5):
        bench.event("launch")
    bench.recorder.end()
    assert [round(point.seconds, 6) for point in bench.recorder.points[1:6]] == [0.01, 0.02, 0.03, 0.04, 0.05]
    assert round(bench.recorder.seconds, 6) == 0.05
    assert round(bench.recorder.spent_seconds, 6) == 6 * 0.004, "five events and the end"


def test_weighing_that_takes_too_long_is_left_out_for_a_while():
    bench = Bench(weighing=0.02)
    bench.recorder.begin()
    for _ in range(100):
        bench.event("launch", after=0.001)
    bench.event("boundary", after=0.001)
    bench.recorder.end()
    recorder = bench.recorder
    assert recorder.events == 103
    assert len(recorder.points) < 10
    assert [p.what for p in recorder.points if p.what in LANDMARKS] == ["begin", "boundary", "end"]
    assert recorder.spent_seconds < 0.05 + 6 * 0.02


def test_thousands_of_events_are_thinned_and_the_peaks_stay():
    bench = Bench(limit=100)
    bench.recorder.begin()
    for number in range(5001):
        bench.tensors["gradients"] = [torch.zeros(777 if number == 1235 else number % 13)]
        bench.event("boundary" if number == 2501 else "launch")
    bench.recorder.end()
    points = bench.recorder.points
    assert 50 <= len(points) <= 100
    assert max(point.held.get("gradients", 0) for point in points) == 777 * 4
    assert [point.what for point in points].count("boundary") == 1
    assert [point.number for point in points] == sorted(point.number for point in points)
    gaps = [b.number - a.number for a, b in itertools.pairwise(points)]
    assert max(gaps) <= 5003 / 100 * 4, "evenly"


def test_micro_batches_do_not_lift_the_limit():
    bench = Bench(limit=40)
    thinned, thin = [], bench.recorder._thin
    bench.recorder._thin = lambda: (thinned.append(bench.recorder.events), thin())[1]
    bench.recorder.begin()
    for number in range(512):
        bench.tensors["gradients"] = [torch.zeros(number % 7)]
        for what in ("launch", "wait", "backward_end"):
            bench.event(what)
    for what in ("boundary", "step", "publish"):
        bench.event(what)
    bench.recorder.end()
    points = bench.recorder.points
    assert 20 <= len(points) <= 40
    assert [p.what for p in points if p.what in LANDMARKS] == list(LANDMARKS)
    assert len(thinned) <= 1541 / 40 + 1, "once for as many points as are kept"
    assert bench.recorder.peak_bytes == 10 * 4 + 100 * 4 + 5 * 4 == max(sum(p.held.values()) for p in points)


def test_a_limit_below_what_must_stay():
    bench = Bench(limit=2)
    bench.recorder.begin()
    for number in range(100):
        bench.tensors["gradients"] = [torch.zeros(20 if number == 50 else 0)]
        bench.event("launch")
    bench.event("boundary")
    bench.recorder.end()
    assert [p.number for p in bench.recorder.points if p.what in LANDMARKS or p.number == 51] == [0, 51, 101, 102]
    assert len(bench.recorder.points) <= 6


def test_the_end_of_a_micro_batch_passes_unweighed_like_any_other():
    bench = Bench(weighing=0.06)
    bench.recorder.begin()
    for what in ("launch", "backward_end", "boundary"):
        bench.event(what)
    bench.recorder.end()
    assert [point.what for point in bench.recorder.points] == ["begin", "launch", "boundary", "end"]


def test_padding_is_told_apart_at_a_landmark():
    bench = Bench()
    bench.ledger.watch("gathered", lambda: [torch.zeros(10)], padding_bytes=12)
    bench.recorder.begin()
    bench.event("launch")
    bench.recorder.end()
    assert [point.held for point in bench.recorder.points] == [bench.ledger.held_now()] * 3
    assert bench.ledger.held_now()["padding"] == 4 + 12


def test_a_tensor_that_cannot_be_weighed_costs_a_point_and_nothing_else():
    bench = Bench()
    bench.recorder.begin()
    bench.tensors["gradients"] = [None, object()]
    bench.event("launch")
    bench.tensors["gradients"] = []
    bench.event("wait")
    bench.recorder.end()
    assert [point.what for point in bench.recorder.points] == ["begin", "wait", "end"]
    assert (bench.recorder.problem or "").startswith("launch: AttributeError")
