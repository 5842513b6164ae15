"""The report of runs made by hand: whole, broken, failed, short, hostile; and the page of several."""

import os
import re
import xml.etree.ElementTree as ElementTree
from html import unescape
from html.parser import HTMLParser
from unittest import mock

import pytest

from deepzero.monitor.report import svg
from deepzero.monitor.report.bottlenecks import limits_of
from deepzero.monitor.report.compare import text_table
from deepzero.monitor.report.run_data import Run
from deepzero.monitor.report.savings import headline, savings_of, textbook
from deepzero.monitor.report.sections import report, write_report, write_report_or_tell
from tests.unit import report_runs as made
from tools.report import main


def page(path):
    """The report of a folder, checked to be one well-formed file that asks nobody for anything."""
    html = report(Run(path))
    check_self_contained(html)
    return html


def check_self_contained(html):
    """No address in it that a browser would fetch, no script, and drawings that are XML with titles of their own."""
    names, attributes = set(), set()
    tags = HTMLParser()
    tags.handle_starttag = lambda tag, attrs: (names.add(tag), attributes.update(name for name, _ in attrs))
    tags.feed(html)
    assert names.isdisjoint({"script", "link", "iframe", "img", "object", "embed", "base", "form", "a"})
    assert attributes.isdisjoint({"src", "href", "srcset", "data", "action", "background", "poster", "xlink:href"})
    assert not re.search(r"url\(|@import|:\s*//", html.partition("<style>")[2].partition("</style>")[0])
    identities = re.findall(r' id="([^"]+)"', html)
    assert len(identities) == len(set(identities))
    for drawing in re.findall(r"<svg.*?</svg>", html, re.S):
        tree = ElementTree.fromstring(drawing)
        assert tree.attrib["role"] == "img"
        assert [child.tag for child in tree][:2] == ["title", "desc"]
        assert all(child.text for child in tree if child.tag in ("title", "desc"))
        assert "nan" not in drawing.lower().replace("title", "")


def plain(html):
    """What a reader sees, on one line."""
    words = re.sub(r"<(style|svg).*?</\1>|<[^>]+>", " ", html, flags=re.S)
    return re.sub(r"\s+", " ", unescape(words))


def drawings(html):
    """The charts by their names."""
    return re.findall(r'<svg class="chart"[^>]*aria-labelledby="(.*?)-t ', html)


def about(path):
    """What is said to limit a run, by what it is about."""
    return {limit.about: limit.finding for limit in limits_of(Run(path))}


PLAN = [{"parameters": 2000}, {"parameters": 2000, "gradients": 9000}, {"parameters": 2000, "gradients": 1000}]
PLANNED = [{"number": n, "seconds": 0.0, "held": held} for n, held in zip((0, 5, 9), PLAN, strict=True)]
ON_GPU = made.timeline(1)
for place, point in enumerate(ON_GPU["ranks"][0]["points"]):
    point["device_bytes"] = 20_000 + place
MEASURED = {
    "comm/exposed_seconds": 0.02, "comm/in_flight_seconds": 0.05, "comm/hidden_fraction": 0.6,
    "offload/optimizer_step/seconds": 0.08, "offload/optimizer_step/hidden": 0.25,
    "offload/gradients_to_host/seconds": 0.01, "offload/gradients_to_host/hidden": 1.0,
    "quantization/weights_snr_db_min": 41.5, "quantization/unquantized": 2.0,
}  # fmt: skip
COPIES = {"gradients.reduce_scatter": 1000.0, "offload.gradients_to_host": 9000.0}
RANK = made.timeline(1)["ranks"][0]
HIGH, LOW = (made.timeline(1, peak=peak)["ranks"][0] for peak in (13000, 8500))
ODD = {**RANK, "points": [*RANK["points"], {"seconds": 1, "held": {"parameters": "many"}}]}
BARE = {**RANK, "points": [], "events": 1_000_000}
MEMORY = ["memory-0-device", "memory-1-device"]
ALL = ["loss", "speed", "norm", "rate", *MEMORY, "sent"]

SITUATIONS = {
    "a whole run": ({"recorded": made.timeline()}, ALL, (
        "ZeRO stage 2 on 2 ranks, model nano (1k parameters)",
        "finished , 10 of 10 steps, 1.1 s run",
        "Each of the 2 ranks holds 9 kB of model state (9.00 bytes per parameter) where plain data parallelism holds "
        "16 kB (16.00): 44% less.",
        "Besides it holds up to 300 B of buckets",
        "2Ψ + 14Ψ/W = 9Ψ = 9 kB with Ψ = 1,000 and W = 2",
        "Median 1k, without the first step, nor step 3, which was recorded.",
        "1.00Ψ elements, where the all-reduce of plain data parallelism sends 2Ψ(W-1)/W = 1.00Ψ",
        "6 of 20 events are shown",
        "def f():",
        "commit 0123456789ab",
    )),
    "copies to the host are not sent to other ranks": (
        {"end": made.summary(**made.account(made.STAGE_2, COPIES))}, [*ALL[:4], "sent", "copied"],
        ("1 kB sent by one rank in one step",),
    ),
    "a failed run has the recorded step's account": (
        {"steps": [made.line(step) for step in range(1, 6)], "recorded": made.timeline(), "end": {
            "status": "failed", "error": "rank 1: <b>ValueError</b>", "wall_seconds": 3.0, "config": made.config(),
        }}, ALL, ("The run did not finish: rank 1: <b>ValueError</b>.", "5 of 10 steps", "44% less"),
    ),
    "one step": (
        {"steps": [made.line(1)], "end": made.summary(steps=1), "recorded": made.timeline(1, step=1)},
        [*ALL[:4], "memory-0-device", "sent"], ("Median 1k",),  # there is no other step to speak of
    ),
    "nothing left to train": (
        {"end": made.summary(memory=None, communication=None, resumed_from_step=10)}, ALL[:4],
        ("How much memory that saves is not known", "Nothing is known of what this run sent"),
    ),
    "no finite loss": (
        {"steps": [made.line(k, loss=None, grad_norm=None) for k in (1, 2)]},
        ["loss", "speed", "rate", "sent"], (),
    ),
    "what is measured of overlap, offload, quantisation": (
        {"steps": [made.line(k, **MEASURED) for k in range(1, 11)]}, [*ALL[:4], "sent", "overlap", "offload", "snr"], (
            "A step waited 20 ms for communication (median); 60% of the time in which some was under way was hidden.",
            "optimizer step 80 ms, 25% hidden", "lowest 41.5 dB", "waits longest for optimizer step: 60 ms of 100 ms",
            "Quantisation. 2 buckets fell below",
        ),
    ),
    "a plan": (
        {"recorded": made.timeline(predicted=[{"points": PLANNED}] * 2)}, ALL,
        ("predicted 11 kB", "what was predicted for each event"),
    ),
    "a GPU's allocator": (
        {"recorded": ON_GPU, "end": made.summary(world_size=1)}, [*ALL[:4], "memory-0-device", "sent"],
        ("allocated on the GPU 20 kB",),
    ),
    "a peak above the forms": ({"recorded": made.timeline(peak=12000)}, ALL, ("The peak is 2.7 kB above it",)),
    "of many ranks three": (
        {"recorded": made.timeline(entries=[*[RANK] * 11, HIGH, *[RANK] * 4]), "end": made.summary(world_size=16)},
        [*ALL[:4], "memory-0-device", "memory-11-device", "sent"],
        ("Of 16 ranks: the first, and those with the highest and the lowest peak.",),
    ),
    "ranks without points": (  # of many ranks the points of eight are written down
        {"recorded": made.timeline(entries=[RANK, RANK, *[BARE] * 13, LOW], predicted=[{"points": []}] * 16)},
        [*ALL[:4], "memory-0-device", "memory-15-device", "sent"], ("6 of 20 events are shown",),
    ),
    "a size that is no number": (
        {"recorded": made.timeline(entries=[ODD])},
        [*ALL[:4], "memory-0-device", "sent"], ("4 of 10 events are shown",),
    ),
    "no rank with points": (
        {"recorded": made.timeline(entries=[BARE] * 2)}, [*ALL[:4], "sent"], ("No step was recorded",)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SITUATIONS)
def test_what_a_report_says(tmp_path, name):
    files, charts, words = SITUATIONS[name]
    html = page(made.folder(tmp_path / "run", **{"end": made.summary(), **files}))
    assert drawings(html) == charts
    assert [expected for expected in words if expected not in plain(html)] == []


ADAM = {"parameters": 2000, "gradients": 2000, "masters": 4000, "moments": 8000}
SAVINGS = [
    # Stage, dtype, sums of gradients, held; plain data parallelism, on the device, on the host; form, headline.
    (0, "bf16", "bf16", ADAM, 16000, 16000, 0, "16Ψ = 16Ψ = 16 kB", "nothing is saved"),
    (1, "bf16", "bf16", {**ADAM, "masters": 2000, "moments": 4000}, 16000, 10000, 0, "4Ψ + 12Ψ/W = 10Ψ", "38% less"),
    (2, "bf16", "bf16", made.STAGE_2, 16000, 9000, 0, "2Ψ + 14Ψ/W = 9Ψ", "44% less"),
    (3, "bf16", "bf16", {"parameters": 1000, "gradients": 1000, "masters": 2000, "moments": 4000}, 16000, 8000, 0,
     "16Ψ/W = 8Ψ", "50% less"),
    # 4 bytes of parameter, 4 of gradient, no state: the sources' form is Adam's.
    (2, "fp32", "fp32", {"parameters": 4000, "gradients": 2000, "masters": 0, "moments": 0}, 8000, 6000, 0, "", ""),
    (2, "bf16", "bf16", {"parameters": 2000, "host_gradients": 1000, "host_masters": 2000, "host_moments": 4000},
     16000, 2000, 7000, "", "Another 7 kB of it lie in host memory"),
    (0, "bf16", "fp32", {**ADAM, "gradients": 6000}, 16000, 20000, 0, "16Ψ", "25% more. Gradients are summed in fp32"),
]  # fmt: skip


@pytest.mark.parametrize(("stage", "dtype", "accum", "held", "plainly", "here", "host", "form", "words"), SAVINGS)
def test_what_a_stage_saves(tmp_path, stage, dtype, accum, held, plainly, here, host, form, words):
    end = made.summary(config=made.config(stage, dtype, accum), **made.account(held))
    run = Run(made.folder(tmp_path / "run", end=end))
    saved = savings_of(run)
    assert saved is not None
    assert (saved.plain_bytes, saved.here_bytes, saved.host) == (plainly, here, host)
    assert saved.part == pytest.approx(1 - here / plainly)
    assert (textbook(run) or "").startswith(form) and (form != "") == (textbook(run) is not None)
    assert words in headline(run)
    assert ("Of the model state in host memory" in report(run)) == (host > 0)


def test_a_long_run_is_drawn_with_few_points_and_every_spike(tmp_path):
    steps = [made.line(k, loss=99.0 if k == 1234 else 3.0 + k % 7) for k in range(1, 20_001)]
    run = Run(made.folder(tmp_path / "run", steps, made.summary()))
    points = svg.thin(run.series("loss"))
    assert len(points) <= 400
    assert (1234.0, 99.0) in points
    html = report(run)
    assert "training from 4 to 4, largest 99" in html
    assert len(html) < 150_000


@pytest.mark.parametrize("missing", ["summary.json", "timeline.json", "metrics.jsonl", "all"])
def test_what_is_missing_is_said(tmp_path, missing):
    run_dir = made.folder(tmp_path / "run", end=made.summary(), recorded=made.timeline())
    for name in ("summary.json", "timeline.json", "metrics.jsonl"):
        if missing in (name, "all"):
            (run_dir / name).unlink()
    words = plain(page(run_dir))
    assert ("There is no summary" in words) == (missing in ("summary.json", "all"))
    assert ("No step was recorded" in words) == (missing in ("timeline.json", "all"))
    assert ("No optimizer step was taken" in words) == (missing in ("metrics.jsonl", "all"))
    assert ("Nothing is known of what this run held" in words) == (missing == "all")


def test_broken_files_are_named(tmp_path):
    run_dir = made.folder(tmp_path / "run", end=made.summary())
    (run_dir / "summary.json").write_text('{"status": ')
    (run_dir / "timeline.json").write_text("[1]")
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('no JSON\n[2]\n{"step": "x", "loss": 1}\n{"torn')
    words = plain(page(run_dir))
    assert "Not read: summary.json: Expecting value" in words
    assert "Not read: timeline.json: not a JSON object" in words
    assert "Not read: metrics.jsonl: 2 lines are no JSON objects" in words


def test_losses_that_are_no_numbers(tmp_path):
    steps = [made.line(1), made.line(2, loss=None, grad_norm=None), made.line(3, loss=float("nan")), made.line(4)]
    run_dir = made.folder(tmp_path / "run", steps, made.summary(model_numel=1e308, world_size=1e308))
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "loss": NaN, "step_seconds": Infinity}\n')
    loss = next(svg for svg in re.findall(r"<svg.*?</svg>", page(run_dir), re.S) if 'id="loss-t"' in svg)
    path = re.search(r'<path class="line" d="([^"]+)"', loss)
    assert path is not None and path[1].count("M") == 2, "a gap where there is no number"


def test_a_run_that_went_on(tmp_path):
    steps = [made.line(k, step_seconds=9.0 if k <= 5 else 0.1) for k in range(1, 11)]
    run_dir = made.folder(tmp_path / "run", steps, made.summary(resumed_from_step=5, wall_seconds=0.55))
    assert "going on after step 5" in plain(page(run_dir))
    assert Run(run_dir).typical("step_seconds") == 0.1, "of this start alone"
    assert "Between steps" not in about(run_dir)


def test_what_a_run_writes_stays_text(tmp_path):
    evil = "</pre><script src='http://x/y.js'></script>\x1b[2J<img src=x onerror=alert(1)>&amp;"
    end = made.summary(sample=evil, config={"model": {"name": evil}, "x": {evil: evil}}, environment={evil: evil})
    end["memory"] = {evil: {"predicted": 1, "measured": 1, "largest": 1}}
    end["communication"] = {evil: end["communication"]["gradients.reduce_scatter"]}
    run_dir = made.folder(tmp_path / "run<b>", [made.line(1, **{f"offload/{'<b>'}/seconds": 1.0})], end)
    (run_dir / ".hydra").mkdir()
    (run_dir / ".hydra" / "overrides.yaml").write_text(f"- {evil.replace(chr(27), '')}\n")
    html = report(Run(run_dir))
    assert not any(word in html for word in ("<script", "<img", "\x1b"))
    assert "<b>&" not in html.partition("<body>")[2]
    assert html.count("&lt;script src=") >= 5


def test_limits_rest_on_figures(tmp_path):
    said = about(made.folder(tmp_path / "a", end=made.summary()))
    unknown = "How much of it is waiting for other ranks was not measured in this run."
    assert said["Speed"] == f"A step takes 100 ms. {unknown}"
    assert said["Memory"].startswith("The largest part of what a rank's ledger names is moments: 4 kB, 43% of it.")
    assert set(said) == {"Speed", "Memory"}
    steps = [made.line(k, **{"comm/exposed_seconds": 0.04, "comm/hidden_fraction": 0.25}) for k in range(1, 11)]
    steps[4] = made.line(5, skipped=True, step_seconds=0.5)
    said = about(made.folder(tmp_path / "b", steps, made.summary(wall_seconds=4.0)))
    assert said["Speed"].startswith("Communication limits this run: 40% of a step (40 ms of 100 ms)")
    assert said["Skipped steps"].startswith("1 of 10 steps were skipped")
    assert said["Uneven steps"] == "Step 5 took 500 ms, 5.0 times the median."
    assert said["Between steps"].startswith("65% of the 4.0 s")
    quiet = [made.line(k, mfu=0.31, **{"comm/exposed_seconds": 0.01}) for k in range(1, 11)]
    assert about(made.folder(tmp_path / "c", quiet, made.summary()))["Speed"].startswith("Computing limits this run")


def test_a_report_that_cannot_be_written_is_one_line(tmp_path, monkeypatch):
    told = []
    write_report_or_tell(tmp_path / "no such folder", told.append)
    assert len(told) == 1 and told[0].startswith("report.html: FileNotFoundError")
    assert f"python -m tools.report {tmp_path / 'no such folder'}" in told[0]
    broken = mock.Mock(side_effect=KeyError("nobody thought of it"))
    monkeypatch.setattr("deepzero.monitor.report.sections.report", broken)
    write_report_or_tell(made.folder(tmp_path / "run"), told.append)
    assert "KeyError" in told[1] and not (tmp_path / "run" / "report.html").exists()


def test_the_tool_writes_one_report(tmp_path, capsys):
    run_dir = made.folder(tmp_path / "run", end=made.summary(), recorded=made.timeline())
    assert main([str(run_dir)]) == 0
    assert capsys.readouterr().out.startswith(f"{run_dir / 'report.html'}: 1 run, ")
    first = (run_dir / "report.html").read_text(encoding="utf-8")
    assert write_report(run_dir).read_text(encoding="utf-8") == first
    assert sorted(os.listdir(run_dir)) == ["metrics.jsonl", "report.html", "summary.json", "timeline.json"]


def test_the_tool_compares_a_sweep(tmp_path, capsys):
    sweep = tmp_path / "sweep"
    for number, stage in enumerate((2, 3, 2)):
        loss = 4.0 if number < 2 else 3.0
        steps = [made.line(k, loss=loss, tokens_per_second=1000.0 * (number + 1)) for k in range(1, 11)]
        made.folder(sweep / str(number), steps, made.summary(config=made.config(stage)))
    assert main([str(sweep)]) == 0
    said = capsys.readouterr().out
    assert f"{sweep / 'comparison.html'}: 3 runs" in said.splitlines()[-1]
    first, head, *rows = said.splitlines()[:-1]
    assert first.startswith("3 runs; held by one rank after a backward pass, not at the peak")
    assert text_table([sweep / "0"]).startswith("1 run; held")
    assert head.split()[:2] == ["run", "stage"]
    assert head.split()[-5:] == ["sent", "a", "step", "step", "loss"]
    assert [row.split()[1] for row in rows] == ["2", "3", "2"]
    html = (sweep / "comparison.html").read_text(encoding="utf-8")
    check_self_contained(html)
    assert drawings(html) == ["loss", "val", "speed"]
    words = plain(html)
    assert "zero.stage 2 3 2" in words
    assert "The training losses of 0 and 1 are the same, bit for bit, at every step" in words
    assert "2 4.1000 3k 100 ms – 9 kB 0 B 44% 2 kB" in words


def test_a_table_says_how_far_a_stopped_run_came(tmp_path):
    ends = [{"status": "stopped", "steps": 7}, {"status": "failed"}, {}, {"status": "finished"}]
    folders = [
        made.folder(tmp_path / str(k), end=end and {**end, "val_loss": 4.0048, "config": made.config()})
        for k, end in enumerate(ends)
    ]
    rows = text_table(folders).splitlines()[2:6]
    ways = ["4.0048 (stopped at 7/10)", "4.0048 (failed)", "– (no summary)", "4.0048"]
    assert [row.endswith(f" {way}") for row, way in zip(rows, ways, strict=True)] == [True] * 4


def test_a_table_names_every_setting_that_differs(tmp_path):
    configs = [made.config(dtype="bf16", accum="bf16"), made.config(stage=3, dtype="fp32", accum="fp32", steps=20)]
    folders = []
    for k, settings in enumerate(configs):
        settings["train"].update(seed=k, log_every=k + 1)
        folders.append(made.folder(tmp_path / f"few {k}", end=made.summary(config=settings)))
    names = {"precision.dtype", "grad_accum_dtype", "train.steps", "train.seed", "train.log_every"}
    lines = text_table(folders).splitlines()
    columns = names & set(lines[1].split())
    assert len(columns) == 4
    assert lines[-1] == f"they also differ in {', '.join(names - columns)}"
    assert "they also differ" not in text_table(folders[:1] * 2)


def test_the_tool_shows_the_runs_among_other_folders(tmp_path, capsys):
    runs = [made.folder(tmp_path / name, end=made.summary()) for name in ("a", "b")]
    (tmp_path / "empty").mkdir()
    assert main([str(runs[0]), str(tmp_path / "empty"), str(runs[1])]) == 0
    said = capsys.readouterr()
    assert said.err == f"report: {tmp_path / 'empty'}: no run, neither metrics.jsonl nor summary.json is there\n"
    assert f"{tmp_path / 'comparison.html'}: 2 runs" in said.out


def test_the_tool_refuses_what_is_no_run(tmp_path, capsys):
    assert main([str(tmp_path)]) == 1
    assert "no run, neither metrics.jsonl nor summary.json is there" in capsys.readouterr().err
    assert main([str(made.folder(tmp_path / "run")), "--out", str(tmp_path / "nowhere" / "x.html")]) == 1
    assert "choose another place with --out" in capsys.readouterr().err
