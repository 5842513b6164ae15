"""The arithmetic of the benchmark of loggers, and a few real steps of it. No time is asserted."""

import pytest

from deepzero.monitor.metrics_file import read_metrics
from tools.bench import monitoring


def rounds(*means):
    """Two equal steps a round."""
    return [[mean, mean] for mean in means]


@pytest.mark.parametrize(("cost", "verdict"), [(0.0005, "pass (+1.00%)"), (0.0006, "FAIL (+1.20%)")])
def test_the_bar_is_one_percent(cost, verdict):
    found = {way: rounds(0.05, 0.06, 0.04) for way in monitoring.WAYS}
    found["all"] = rounds(0.05 + cost, 0.06, 0.04)
    *_, last = lines = monitoring.table(found)
    assert last.endswith(verdict)
    assert lines[1].split() == ["none", "50.000", "40.000", "1.0000", "1.0000", "1.0000"]


def test_every_way_sees_the_same_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(monitoring, "WAYS", {"none": None, "jsonl": (), "tensorboard": ("tensorboard",)})
    step = monitoring.Step(0.0)
    found = monitoring.measure(step, 2, 3, {"extra/number": 0.5}, tmp_path)
    step.engine.destroy()
    assert {way: [len(part) for part in parts] for way, parts in found.items()} == {way: [3, 3] for way in found}
    for way in ("jsonl", "tensorboard"):
        entries = read_metrics(tmp_path / way)
        assert len(entries) == 9  # with the round that warms up
        assert all(entry["extra/number"] == 0.5 for entry in entries)
    assert not (tmp_path / "none").exists()
