"""The report of runs made by hand: whole, broken, failed, short, hostile; and the page of several."""

import json
import os
import re
import xml.etree.ElementTree as ElementTree
from html import unescape
from html.parser import HTMLParser

import pytest

from deepzero.monitor.report import svg
from deepzero.monitor.report.bottlenecks import limits_of
from deepzero.monitor.report.compare import text_table
from deepzero.monitor.report.run_data import read_run
from deepzero.monitor.report.savings import headline, savings_of, textbook
from deepzero.monitor.report.sections import report, write_report, write_report_or_tell
from tests.unit import report_runs as made
from tools.report import main


def page(path):
    """The report of a folder, checked to be one well-formed file that asks nobody for anything."""
    html = report(read_run(path))
    check_self_contained(html)
    return html


class Tags(HTMLParser):
    """Which elements and attributes a page has."""

    def __init__(self):
        super().__init__()
        self.names = set()
        self.attributes = set()

    def handle_starttag(self, tag, attrs):
        self.names.add(tag)
        self.attributes |= {name for name, _ in attrs}


def check_self_contained(html):
    """No address in it that a browser would fetch, no script, and drawings that are XML with titles of their own."""
    tags = Tags()
    tags.feed(html)
    assert tags.names.isdisjoint({"script", "link", "iframe", "img", "object", "embed", "base", "form", "a"})
    assert tags.attributes.isdisjoint({"src", "href", "srcset", "data", "action", "background", "poster", "xlink:href"})
    style = html.partition("<style>")[2].partition("</style>")[0]
    assert not re.search(r"url\(|@import|:\s*//", style)
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
    return {limit.about: limit.finding for limit in limits_of(read_run(path))}


def test_a_long_run_is_drawn_with_few_points_and_every_spike(tmp_path):
    steps = [made.line(step, loss=99.0 if step == 1234 else 3.0 + step % 7) for step in range(1, 3001)]
    run = read_run(made.folder(tmp_path / "run", steps))
    points = svg.thin(run.series("loss"))
    assert len(points) <= 400
    assert (1234.0, 99.0) in points
    assert "training from 4 to 7, largest 99" in report(run)


def test_a_whole_run(tmp_path):
    html = page(made.folder(tmp_path / "run", end=made.summary(), recorded=made.timeline()))
    assert drawings(html) == ["loss", "speed", "norm", "rate", "memory-0-device", "memory-1-device", "sent"]
    words = plain(html)
    for expected in (
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
    ):
        assert expected in words


@pytest.mark.parametrize(
    ("stage", "held", "part", "form"),
    [
        (0, {"parameters": 2000, "gradients": 2000, "masters": 4000, "moments": 8000}, 0.0, "16Ψ = 16Ψ = 16 kB"),
        (1, {"parameters": 2000, "gradients": 2000, "masters": 2000, "moments": 4000}, 6 / 16, "4Ψ + 12Ψ/W = 10Ψ"),
        (2, made.STAGE_2, 7 / 16, "2Ψ + 14Ψ/W = 9Ψ"),
        (3, {"parameters": 1000, "gradients": 1000, "masters": 2000, "moments": 4000}, 8 / 16, "16Ψ/W = 8Ψ"),
    ],
)  # fmt: skip
def test_the_sources_forms(tmp_path, stage, held, part, form):
    end = made.summary(config=made.config(stage), **made.account(held))
    run = read_run(made.folder(tmp_path / "run", end=end))
    saved = savings_of(run)
    assert saved is not None
    assert saved.plain_bytes == 16 * made.NUMEL
    assert saved.part == pytest.approx(part)
    assert (textbook(run) or "").startswith(form)
    assert ("nothing is saved" in headline(run)) == (stage == 0)


def test_fp32_without_momentum_is_compared_with_its_own_like(tmp_path):
    held = {"parameters": 4000, "gradients": 2000, "masters": 0, "moments": 0}
    end = made.summary(config=made.config(2, "fp32", "fp32"), **made.account(held))
    run = read_run(made.folder(tmp_path / "run", end=end))
    saved = savings_of(run)
    assert saved is not None
    assert saved.plain_bytes == 8 * made.NUMEL, "4 bytes of parameter, 4 of gradient, no state"
    assert textbook(run) is None, "the sources' form is Adam's"


def test_offloaded_states_count_for_the_comparison_but_not_for_the_device(tmp_path):
    held = {"parameters": 2000, "gradients": 0, "host_gradients": 1000, "host_masters": 2000, "host_moments": 4000}
    run = read_run(made.folder(tmp_path / "run", end=made.summary(**made.account(held))))
    saved = savings_of(run)
    assert saved is not None
    assert (saved.plain_bytes, saved.here_bytes, saved.host) == (16000, 2000, 7000)
    assert "Another 7 kB of it lie in host memory" in headline(run)
    assert "Of the model state in host memory" in report(run)


def test_copies_to_the_host_are_not_sent_to_other_ranks(tmp_path):
    sent = {"gradients.reduce_scatter": 1000.0, "offload.gradients_to_host": 9000.0}
    html = page(made.folder(tmp_path / "run", end=made.summary(**made.account(made.STAGE_2, sent))))
    assert [name for name in drawings(html) if name in ("sent", "copied")] == ["sent", "copied"]
    assert "1 kB sent by one rank in one step" in plain(html)


def test_wider_gradients_are_more_than_the_textbook_and_said_to_be(tmp_path):
    held = {"parameters": 2000, "gradients": 6000, "masters": 4000, "moments": 8000}
    end = made.summary(config=made.config(0, accum="fp32"), **made.account(held))
    said = headline(read_run(made.folder(tmp_path / "run", end=end)))
    assert "25% more. Gradients are summed in fp32 here" in said


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


def test_a_failed_run_has_the_recorded_steps_account(tmp_path):
    end = {
        "status": "failed",
        "error": "rank 1 failed: <b>ValueError</b>",
        "wall_seconds": 3.0,
        "config": made.config(),
    }
    html = page(made.folder(tmp_path / "run", [made.line(step) for step in range(1, 6)], end, made.timeline()))
    assert "The run did not finish: rank 1 failed: &lt;b&gt;ValueError&lt;/b&gt;." in html
    words = plain(html)
    assert "5 of 10 steps" in words
    assert "44% less" in words
    assert "sent" in drawings(html)


def test_losses_that_are_no_numbers(tmp_path):
    steps = [made.line(1), made.line(2, loss=None, grad_norm=None), made.line(3, loss=float("nan")), made.line(4)]
    run_dir = made.folder(tmp_path / "run", steps, made.summary())
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "loss": NaN, "step_seconds": Infinity}\n')
    html = page(run_dir)
    loss = next(svg for svg in re.findall(r"<svg.*?</svg>", html, re.S) if 'id="loss-t"' in svg)
    path = re.search(r'<path class="line" d="([^"]+)"', loss)
    assert path is not None
    assert path[1].count("M") == 2, "a gap where there is no number"
    nothing = made.folder(
        tmp_path / "nothing", [made.line(k, loss=None, grad_norm=None) for k in (1, 2)], made.summary()
    )
    assert "norm" not in drawings(page(nothing))


def test_a_run_of_one_step(tmp_path):
    html = page(made.folder(tmp_path / "run", [made.line(1)], made.summary(steps=1), made.timeline(1, step=1)))
    assert "Median 1k" in html, "there is no other step to speak of"
    assert drawings(html)[:2] == ["loss", "speed"]


def test_a_run_that_went_on(tmp_path):
    steps = [made.line(k, step_seconds=9.0 if k <= 5 else 0.1) for k in range(1, 11)]
    run_dir = made.folder(tmp_path / "run", steps, made.summary(resumed_from_step=5, wall_seconds=0.55))
    assert "going on after step 5" in plain(page(run_dir))
    assert read_run(run_dir).typical("step_seconds") == 0.1, "of this start alone"
    assert "Between steps" not in about(run_dir)


def test_a_run_with_nothing_left_to_train(tmp_path):
    end = made.summary(memory=None, communication=None, resumed_from_step=10)
    words = plain(page(made.folder(tmp_path / "run", end=end)))
    assert "How much memory that saves is not known" in words
    assert "Nothing is known of what this run sent" in words


def test_what_a_run_writes_stays_text(tmp_path):
    evil = "</pre><script src='http://x/y.js'></script>\x1b[2J<img src=x onerror=alert(1)>&amp;"
    end = made.summary(sample=evil, config={"model": {"name": evil}, "x": {evil: evil}}, environment={evil: evil})
    end["memory"] = {evil: {"predicted": 1, "measured": 1, "largest": 1}}
    end["communication"] = {evil: end["communication"]["gradients.reduce_scatter"]}
    run_dir = made.folder(tmp_path / "run<b>", [made.line(1, **{f"offload/{'<b>'}/seconds": 1.0})], end)
    (run_dir / ".hydra").mkdir()
    (run_dir / ".hydra" / "overrides.yaml").write_text(f"- {evil.replace(chr(27), '')}\n")
    html = report(read_run(run_dir))
    body = html.partition("<body>")[2]
    assert "<script" not in html
    assert "<img" not in html
    assert "<b>&" not in body
    assert "\x1b" not in html
    assert html.count("&lt;script src=") >= 5


def test_limits_rest_on_figures(tmp_path):
    said = about(made.folder(tmp_path / "a", end=made.summary()))
    assert (
        said["Speed"] == "A step takes 100 ms. How much of it is waiting for other ranks was not measured in this run."
    )
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


def test_overlap_offload_and_quantisation_where_there_are_such(tmp_path):
    more = {
        "comm/exposed_seconds": 0.02, "comm/in_flight_seconds": 0.05, "comm/hidden_fraction": 0.6,
        "offload/optimizer_step/seconds": 0.08, "offload/optimizer_step/hidden": 0.25,
        "offload/gradients_to_host/seconds": 0.01, "offload/gradients_to_host/hidden": 1.0,
        "quantization/weights_snr_db_min": 41.5, "quantization/unquantized": 2.0,
    }  # fmt: skip
    run_dir = made.folder(tmp_path / "run", [made.line(k, **more) for k in range(1, 11)], made.summary())
    html = page(run_dir)
    assert {"overlap", "offload", "snr"} <= set(drawings(html))
    words = plain(html)
    assert (
        "A step waited 20 ms for communication (median); 60% of the time in which some was under way was hidden."
        in words
    )
    assert "optimizer step 80 ms, 25% hidden" in words
    assert "lowest 41.5 dB" in words
    assert "waits longest for optimizer step: 60 ms of 100 ms" in about(run_dir)["Offload"]
    assert about(run_dir)["Quantisation"].startswith("2 buckets fell below")


def test_a_plan_is_drawn_over_the_measured_step(tmp_path):
    held = [{"parameters": 2000}, {"parameters": 2000, "gradients": 9000}, {"parameters": 2000, "gradients": 1000}]
    plan = [{"points": [{"number": n, "seconds": 0.0, "held": h} for n, h in zip((0, 5, 9), held, strict=True)]}] * 2
    html = page(made.folder(tmp_path / "run", end=made.summary(), recorded=made.timeline(predicted=plan)))
    assert "predicted 11 kB" in plain(html)
    assert "what was predicted for each event" in plain(html)


def test_what_a_gpus_allocator_gave_out_is_a_line(tmp_path):
    recorded = made.timeline(1)
    for place, point in enumerate(recorded["ranks"][0]["points"]):
        point["device_bytes"] = 20_000 + place
    html = page(made.folder(tmp_path / "run", end=made.summary(world_size=1), recorded=recorded))
    assert html.count("<title>allocated on the GPU</title>") == 1
    assert "allocated on the GPU 20 kB" in plain(html)


def test_a_peak_above_the_forms_is_explained(tmp_path):
    html = page(made.folder(tmp_path / "run", end=made.summary(), recorded=made.timeline(peak=12000)))
    assert "The peak is 2.7 kB above it" in plain(html)


def test_of_many_ranks_three_are_drawn(tmp_path):
    recorded = made.timeline(16)
    high = json.loads(json.dumps(recorded["ranks"][0]))
    high["points"][1]["held"]["gradients"] = 5000
    recorded["ranks"][11] = high
    html = page(made.folder(tmp_path / "run", end=made.summary(world_size=16), recorded=recorded))
    assert [name for name in drawings(html) if "memory" in name] == ["memory-0-device", "memory-11-device"]
    assert "Of 16 ranks: the first, and those with the highest and the lowest peak." in plain(html)


def test_ranks_without_points_are_not_drawn(tmp_path):
    """Of many ranks the points of eight are written down."""
    recorded = made.timeline(16)
    bare = {**recorded["ranks"][0], "points": [], "events": 1_000_000}
    recorded["ranks"] = [entry if rank in (0, 1, 15) else bare for rank, entry in enumerate(recorded["ranks"])]
    recorded["ranks"][15] = made.timeline(1, peak=8500)["ranks"][0]
    recorded["predicted"] = [{"points": rank["points"]} for rank in recorded["ranks"]]
    html = page(made.folder(tmp_path / "run", end=made.summary(world_size=16), recorded=recorded))
    assert [name for name in drawings(html) if "memory" in name] == ["memory-0-device", "memory-15-device"]
    assert "6 of 20 events are shown" in plain(html)

    recorded["ranks"] = recorded["ranks"][2:4]
    html = page(made.folder(tmp_path / "other", end=made.summary(), recorded=recorded))
    assert "No step was recorded" in plain(html)


def test_a_long_run_stays_a_small_file(tmp_path):
    run_dir = made.folder(tmp_path / "run", [made.line(k, loss=float(k % 7)) for k in range(1, 20_001)], made.summary())
    assert len(page(run_dir)) < 150_000


def test_a_report_that_cannot_be_written_is_one_line(tmp_path, monkeypatch):
    told = []
    write_report_or_tell(tmp_path / "no such folder", told.append)
    assert len(told) == 1
    assert told[0].startswith("report.html: FileNotFoundError")
    assert f"python -m tools.report {tmp_path / 'no such folder'}" in told[0]

    def broken(run):
        raise KeyError("nobody thought of it")

    monkeypatch.setattr("deepzero.monitor.report.sections.report", broken)
    write_report_or_tell(made.folder(tmp_path / "run"), told.append)
    assert "KeyError" in told[1]
    assert not (tmp_path / "run" / "report.html").exists()


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
    run_dir = made.folder(tmp_path / "run")
    assert main([str(run_dir), "--out", str(tmp_path / "nowhere" / "x.html")]) == 1
    assert "choose another place with --out" in capsys.readouterr().err
