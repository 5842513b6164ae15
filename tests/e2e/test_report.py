"""The reports of real runs: the figures are the run's own, and a real browser shows them at any width."""

import json
import re

import pytest

from deepzero.utils.formatting import short_bytes
from tests.e2e import browser, runs
from tests.e2e.test_fewer_ranks import BITS, PROMISED
from tests.unit.test_report import check_self_contained, drawings, plain
from tools.report import main

STATES = ("parameters", "gradients", "masters", "moments")
WHAT = ("plain data parallelism", "Stage 1 cuts the optimizer", "Stage 2 cuts the optimizer", "Stage 3 cuts")


def recorded(run_dir):
    value = json.loads((run_dir / "timeline.json").read_text(encoding="utf-8"))
    assert isinstance(value, dict)
    return value


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_each_run_has_a_report_with_its_own_figures(sweep, stage):
    run_dir = sweep[0] / str(stage)
    html = (run_dir / "report.html").read_text(encoding="utf-8")
    check_self_contained(html)
    names = ["loss", "speed", "norm", "rate", "memory-0-device", "memory-1-device", "sent", "overlap"]
    assert drawings(html) == names
    words, summary = plain(html), runs.summary(run_dir)
    assert f"ZeRO stage {stage} on 2 ranks, model tiny" in words
    assert WHAT[stage] in words
    held = sum(summary["memory"][name]["measured"] for name in STATES)
    numel = summary["model_numel"]
    assert f"Each of the 2 ranks holds {short_bytes(held)} of model state" in words
    assert f"plain data parallelism holds {short_bytes(16 * numel)} (16.00)" in words
    assert f"predicted {short_bytes(sum(v['predicted']['bytes'] for v in summary['communication'].values()))}" in words
    assert "The largest part of what a rank's ledger names is" in words
    assert f"zero.stage={stage}" in words
    assert summary["environment"]["torch"] in words


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_recorded_step(sweep, stage):
    run_dir = sweep[0] / str(stage)
    timeline, summary = recorded(run_dir), runs.summary(run_dir)
    assert (timeline["step"], timeline["world_size"]) == (3, 2)
    assert timeline["model_numel"] == summary["model_numel"]
    for category in ("masters", "moments", "padding"):
        held = [rank["points"][-1]["held"].get(category, 0) for rank in timeline["ranks"]]
        assert sum(held) / 2 == summary["memory"][category]["measured"]
    for rank in timeline["ranks"]:
        points = rank["points"]
        assert rank["problem"] is None
        assert rank["events"] == len(points), "a model this small is weighed at every event"
        words = [point["what"] for point in points]
        assert [w for w in words if w in ("begin", "boundary", "step", "publish", "end")] == [
            "begin", "boundary", "step", "publish", "end",
        ]  # fmt: skip
        assert words.count("launch") == words.count("wait") > 0
        assert ("fetch" in words) == (stage == 3)
        buckets = {point["held"]["buckets"] for point in points}
        assert buckets == {summary["memory"]["buckets"]["measured"]}, "one that is being sent is there, too"
        times = [point["seconds"] for point in points]
        assert times == sorted(times)
        assert times[-1] == pytest.approx(rank["seconds"], abs=1e-3)
        assert rank["weighing_seconds"] < 0.5


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_plan_of_the_recorded_step_is_what_was_held(sweep, stage):
    timeline = recorded(sweep[0] / str(stage))
    for rank, plan in zip(timeline["ranks"], timeline["predicted"], strict=True):
        measured, planned = (
            [(point["number"], point["what"], point["kind"], point["where"], point["held"]) for point in one["points"]]
            for one in (rank, plan)
        )
        assert planned == measured, "event by event, byte by byte"


def test_a_sweep_on_one_page(sweep, tmp_path):
    out = tmp_path / "comparison.html"
    assert main([str(sweep[0]), "--out", str(out)]) == 0
    html = out.read_text(encoding="utf-8")
    check_self_contained(html)
    words = plain(html)
    assert "zero.stage 0 1 2 3" in words
    assert "The training losses of 0, 1, 2 and 3 are the same, bit for bit, at every step" in words
    assert drawings(html) == ["loss", "val", "speed"]


@pytest.mark.parametrize("dark", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_a_browser_shows_it_wide_and_narrow(sweep, tmp_path, dark):
    page = sweep[0] / "3" / "report.html"
    said = browser.measure(page, (1280, 400), tmp_path, dark)
    for width, entry in said.items():
        assert entry["scroll"] <= width, "nothing to scroll sideways"
        assert entry["outside"] == entry["cut"] == [], "every column of every table is seen"
        assert entry["loaded"] == [], "it asks for nothing"
        assert [chart["name"] for chart in entry["charts"]] == drawings(page.read_text(encoding="utf-8"))
        for chart in entry["charts"]:
            assert chart["width"] > 300 and chart["height"] > 100, chart
            assert chart["letters"] >= 9, chart
        paper, ink = (sum(map(int, re.findall(r"\d+", entry[name])[:3])) for name in ("paper", "ink"))
        assert (paper < 200 and ink > 600) if dark else (paper > 700 and ink < 150)
    assert len({round(chart["x"]) for chart in said[400]["charts"]}) == 1, "one column"
    assert len({round(chart["x"]) for chart in said[1280]["charts"]}) > 2, "several"


def test_a_browser_shows_a_comparison(sweep, tmp_path):
    out = tmp_path / "comparison.html"
    assert main([str(sweep[0]), "--out", str(out)]) == 0
    for width, entry in browser.measure(out, (1280, 400), tmp_path).items():
        assert entry["scroll"] <= width
        assert entry["outside"] == entry["loaded"] == []
        assert width > 400 or entry["cut"] == [], "where a row is a list nothing is out of sight"
        assert len(entry["charts"]) == 3


@pytest.mark.slow
def test_a_run_without_a_recorded_step_and_a_disk_that_refuses(tiny, tmp_path):
    """And one rank keeps the promise of its bits, though the environment and the cores would give it more threads."""
    run_dir = tmp_path / "run"
    (run_dir / "report.html").mkdir(parents=True)  # nothing can be put there
    more = ["train.steps=2", "train.timeline_step=0", "train.save_every=0", "hydra.run.dir=run", "launch.nproc=1"]
    done = runs.train(*tiny, *more, *BITS, cwd=tmp_path, OMP_NUM_THREADS="2")
    assert (done.status, done.err) == (0, "") and PROMISED in done.out
    assert done.out.count("report.html: IsADirectoryError") == 1
    assert not (run_dir / "timeline.json").exists()
    assert runs.summary(run_dir)["status"] == "finished"
