"""The benchmarks' arithmetic, their launcher's bad days, and real runs with tiny models. No time is asserted."""

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

from deepzero.monitor.metrics_file import read_metrics
from deepzero.planning.clusters import find_cluster
from tools.bench import cpu_adam, files, gpu, links, monitoring, offload, report, zero
from tools.bench.contenders import CONTENDERS, FLOOR, OFFLOAD, ON_REQUEST, ZEROPP, Contender, Variant, by_name
from tools.bench.engines import settings_of
from tools.bench.launch import GIB, Outcome, Plan, _outcome, run_variant
from tools.bench.node_link import Link
from tools.bench.offload import INIT_BYTES, LADDER, host_bytes_needed, rungs, shaped, speed_work
from tools.bench.peers import MasterAdamW, clip_factor_of
from tools.bench.report import Floor, Measured, compute_bars, fastest, floor_of, summarize
from tools.bench.workload import TINY, Workload, batch, build_model, make_tokens

PARTS = {
    "forward_backward": 0.5, "adam_shard": 0.05, "adam_full": 0.1, "reduce_all_to_all": 0.1,
    "reduce_all_to_all_pieces": 0.2, "reduce_scatter": 0.3, "gather": 0.3, "gather_pieces": 0.1, "all_reduce": 0.15,
}  # fmt: skip


def outcome(*seconds, peak=100, losses=(5.0, 4.0), cpu=1.0, **more):
    peaks = {"build_peak_bytes": peak, "step_peak_bytes": peak // 2}
    return Outcome({"step": list(seconds)}, list(losses), {"step": cpu}, **{**peaks, **more})


def measured(name, seconds, peak=100, idle=50, variant=0):
    contender = by_name(name)
    return Measured(contender, contender.variants[variant], (outcome(seconds, peak=peak),), idle)


def plan(folder, timeout_seconds=200.0, **work):
    return Plan(replace(TINY, **work), 1, 1, 1, True, timeout_seconds, folder)


def test_a_step_lasts_as_long_as_the_slowest_rank():
    def rank(seconds, losses):
        return {"seconds": {"step": seconds}, "cpu_seconds": {"step": seconds[0]}, "losses": losses, "facts": {"a": 1}}

    both = _outcome([rank([1.0, 5.0, 2.0], [1.0, 5.0]), rank([3.0, 4.0, 2.5], [3.0, 4.0])], None, 1.0)
    assert both.seconds == {"step": [3.0, 5.0, 2.5]} and both.cpu_seconds == {"step": 3.0}
    assert both.losses == [2.0, 4.5] and both.facts == {"a": 1}
    with pytest.raises(ValueError, match="shorter"):
        _outcome([rank([1.0, 2.0, 3.0], []), rank([1.0, 2.0], [])], None, 1.0)


def test_rounds_are_pooled_and_failed_rounds_left_out():
    ddp, broken = by_name("ddp"), outcome(7.0, error="rank 1 ended with 1")
    rounds = [outcome(1.0, 3.0, peak=10), broken, outcome(2.0, 9.0, peak=8, cpu=2.0)]
    row = summarize(ddp, ddp.variants[0], rounds, idle=4)
    assert row is not None
    assert (row.seconds, min(row.samples), len(row.samples)) == (2.5, 1.0, 4)
    assert row.middle(lambda one: one.cpu_seconds["step"]) == 1.5
    assert (row.peak_bytes, row.model_bytes) == (9.0, 5.0)
    assert summarize(ddp, ddp.variants[0], [broken]) is None
    assert summarize(ddp, ddp.variants[0], [broken], ended=True).samples == [7.0], "of one that was cut off"


def test_the_floor_takes_the_fastest_way_to_communicate():
    floor = floor_of([Outcome(seconds={part: [s, s] for part, s in PARTS.items()})])
    assert floor is not None
    assert floor.seconds(1) == floor.seconds(2) == pytest.approx(0.5 + 0.05 + 0.1 + 0.1)
    assert floor.seconds(0) == pytest.approx(0.5 + 0.1 + 0.15)
    assert floor.seconds(3) == pytest.approx(0.5 + 0.05 + 0.1 + 0.1 + 0.1)


def test_bars_use_the_fastest_variant_for_time_and_the_leanest_for_memory():
    rows = [
        measured("deepzero1", 0.8, peak=120), measured("ddp", 1.0, peak=200), measured("ddp", 2.0, peak=100, variant=1),
        measured("zro", 0.9, peak=150), measured("deepspeed1", 1.5, peak=300, idle=290),
    ]  # fmt: skip
    bars = {(bar.name, bar.against): bar for bar in compute_bars(rows, Floor(PARTS, PARTS))}
    for (what, against), value, verdict in (
        (("step time", "ddp (bf16)"), 0.8, "pass"),
        (("step time", "zro (bf16)"), 0.8 / 0.9, "FAIL"),
        (("step time", "deepspeed1 (torch-adam)"), 0.8 / 1.5, "pass"),
        (("step time", "floor"), 0.8 / 0.75, "pass"),
        (("peak memory", "leanest: ddp (bf16-large)"), 1.2, "FAIL"),
        (("memory of the model", "leanest: deepspeed1 (torch-adam)"), 7.0, "FAIL"),
    ):
        bar = bars[f"stage 1 {what}", against]
        assert (bar.value, bar.verdict) == (pytest.approx(value), verdict)
    # Stage 2 was not run: its limits are shown, and none of them passes.
    assert {bar.verdict for (name, _), bar in bars.items() if name.startswith("stage 2")} == {"not measured"}
    assert fastest(rows, "fsdp2") is None


def test_slow_and_failing_variants_drop_out_after_the_first_round():
    entries = [(by_name("ddp"), v) for v in by_name("ddp").variants[:3]] + [(FLOOR, FLOOR.variants[0])]
    outcomes = [outcome(1.0), outcome(1.05), Outcome(error="no"), Outcome({part: [1.0] for part in PARTS})]
    results = {(c.name, v.name): [one] for (c, v), one in zip(entries, outcomes, strict=True)}
    assert zero.survivors(entries, results, keep=1.1) == [entries[0], entries[1], entries[3]]
    assert zero.survivors(entries, results, keep=1.0) == [entries[0], entries[3]]


def test_losses_that_differ_are_named():
    losses = {"ddp": [5.0, 4.0], "zro": [5.0, 4.0], "ours": [5.0, 4.4]}
    assert "**NOT the same work: ours.**" in report.loss_table(losses) and "10.000%" in report.loss_table(losses)
    assert "All do the same work" in report.loss_table({**losses, "ours": [5.0, 4.03]})
    assert "work: ddp, zro.**" in report.loss_table(losses, reference="ours"), "in place of the middle of all"
    assert "All do the same work" in report.loss_table(losses, late=["ours"])
    assert "All do the same work" in report.loss_table({"ddp": [5.0], "a": [6.0], "b": [6.0]}, late=["a", "b"])
    broken = report.loss_table({**losses, "ours": [5.0, float("nan")]}, late=["ours"])
    assert "work: ours.**" in broken, "who takes another course has to stay finite too"


def test_tokens_are_the_same_every_time_and_ranks_read_disjoint_ones():
    tokens = make_tokens(512, 20_000)
    assert np.array_equal(tokens, make_tokens(512, 20_000))
    assert tokens.min() >= 0 and tokens.max() == 511 and len(np.unique(tokens)) > 400
    work = Workload(block_size=4, micro_batch=2, ranks=3)
    tokens = np.arange(2 * work.tokens_per_step + 1)
    read = torch.cat([batch(work, tokens, step, rank)[0].flatten() for step in range(2) for rank in range(3)])
    assert torch.equal(read, torch.arange(48))
    inputs, targets = batch(work, tokens, 1, 2)
    assert inputs.shape == (2, 4) and torch.equal(targets, inputs + 1)


def test_peers_master_optimizer_is_adamw_on_fp32_masters():
    torch.manual_seed(0)
    low = torch.nn.Parameter(torch.randn(7, 5).bfloat16())
    reference, ours = low.detach().float().requires_grad_(), MasterAdamW([low], lr=0.1, weight_decay=0.1)
    theirs = torch.optim.AdamW([reference], lr=0.1, weight_decay=0.1, fused=True)
    for _ in range(3):
        low.grad = torch.randn_like(low)
        reference.grad = low.grad.float()
        torch.nn.utils.clip_grad_norm_([reference], 1.0)
        ours.step(clip_factor=clip_factor_of([low], 1.0))
        theirs.step()
        assert torch.allclose(ours.masters[0], reference, rtol=1e-6, atol=1e-7)
        assert torch.equal(low, ours.masters[0].bfloat16())


def test_every_contender_has_a_builder_and_distinct_variants():
    for known in ((*CONTENDERS, *ON_REQUEST), OFFLOAD):
        names = [contender.name for contender in known]
        assert len(set(names)) == len(names)
        for contender in known:
            module, function = contender.builder.split(":")
            source = Path(zero.__file__).with_name(f"{module}.py").read_text()
            assert f"def {function}(context: Context, options" in source, contender.name
            assert len({v.name for v in contender.variants}) == len(contender.variants)
            assert contender.peer is None or contender.peer in names
    for contender in OFFLOAD:
        zero_section = settings_of(TINY, contender.variants[0].options["zero"])["zero_optimization"]
        assert zero_section["stage"] == contender.stage and zero_section["overlap_comm"] is False
        assert zero_section.get("offload_param", {}).get("pin_memory", True)


@pytest.mark.parametrize(("command", "arguments", "message"), [
    (zero, ["--contenders", "dpp"], "unknown contender 'dpp'"),
    (zero, ["--contenders", "ddp:fp8"], "no variant 'fp8'; it has: bf16"),
    (zero, ["--rounds", "0"], "--rounds: '0' is not an integer of at least 1"),
    (zero, ["--micro-batch", "0"], "--micro-batch: '0'"),
    (zero, ["--warmup", "-1"], "--warmup: '-1' is not an integer of at least 0"),
    (zero, ["--width", "100"], "--width 100 does not divide by --heads 12"),
    (gpu, ["bytes"], "invalid choice: 'bytes'"),
    (offload, ["--parts", "bytes"], "--parts: unknown bytes; there are: speed, largest"),
    (offload, ["--contenders", "s2,s4"], "--contenders: unknown s4; there are: s2, ds2"),
    (offload, ["--blocks", "0"], "--blocks: '0' is not an integer of at least 1"),
    (offload, ["--width", "100"], "--width: '100' is not a positive multiple of 128"),
    (files, ["--buffers", "4", "."], "--buffers: '4' is not an integer of at least 12"),
    (links, ["--speeds", "1", "-1"], "--speeds: -1 is not a number of at least 0"),
    (links, ["--speeds", "nan"], "--speeds: nan is not a number of at least 0"),
])  # fmt: skip
def test_bad_options_are_named(command, arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_peer_that_is_not_installed_is_skipped_with_a_line(capsys):
    variant = Variant("plain", "")
    absent = Contender("absent", "Absent", "nowhere:build", (variant,), needs="no_such_package")
    assert zero.taking_part([(absent, variant), (FLOOR, FLOOR.variants[0])], 2) == [(FLOOR, FLOOR.variants[0])]
    assert capsys.readouterr().out == "skipped absent: no_such_package is not installed\n"


def test_a_page_never_replaces_another(tmp_path):
    text = report.page_text(["a machine"], [("Title", "body")], report.command_line("zero"))
    pages = [report.write_page("here", text, tmp_path) for _ in range(3)]
    assert len(set(pages)) == 3 and pages[2].name.endswith("-here-3.md")
    text = pages[0].read_text()
    assert "- a machine" in text and "- command: `python -m tools.bench.zero" in text and "## Title\n\nbody" in text


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_failing_rank_is_named_with_its_own_error(tmp_path):
    found = run_variant(by_name("ddp"), Variant("broken", "", {"modus": "bf16"}), plan(tmp_path, ranks=1), "test")
    assert found.error is not None
    assert "ended with 1" in found.error and "KeyError: 'mode'" in found.error
    s9 = Variant("s9", "", {"zero": {"stage": 9}})
    found = run_variant(OFFLOAD[0], s9, replace(plan(tmp_path, ranks=1), place="device"), "test")
    assert found.error is not None and "ended with 1" in found.error and "stage=9: stages are" in found.error
    assert str(found).startswith("no step timed")


def children():
    """Processes that this one has started, zombies included. Other tests' pools of ranks are among them."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == os.getpid():  # its parent
                found.add(int(stat.parent.name))
    return found


@pytest.mark.timeout(240)
def test_ranks_that_take_too_long_are_ended(tmp_path):
    started, before = time.monotonic(), children()
    found = run_variant(by_name("ddp"), by_name("ddp").variants[0], plan(tmp_path, timeout_seconds=0.3), "test")
    assert found.error is not None and "[0, 1] not done after 0 s" in found.error
    assert time.monotonic() - started < 60
    assert children() <= before, "every rank was reaped"


@pytest.mark.exhaustive
@pytest.mark.timeout(480)
def test_quick_run_of_deepzero_and_ddp(tmp_path, capsys):
    file = tmp_path / "samples.json"
    chosen = ["--contenders", "deepzero1:plain,ddp:bf16", "--steps", "4", "--json", str(file), "--timeout", "200"]
    status, printed = zero.main(["--quick", *chosen]), capsys.readouterr().out
    assert status == 0, printed
    assert "the same work within bf16 noise" in printed
    outcomes = json.loads(file.read_text())["outcomes"]
    for name in ("deepzero1:plain", "ddp:bf16"):
        (found,) = outcomes[name]
        assert len(found["seconds"]["step"]) == 4 and min(found["seconds"]["step"]) > 0
        assert len(found["losses"]) == 5
        assert found["parameters"] > 100_000
        assert found["build_peak_bytes"] > 2**20 and found["step_peak_bytes"] > 2**20


# ---- offload on one GPU, where there is none -------------------------------------------------------------------------


def results(folder):
    return json.loads((folder / "results.json").read_text())


@pytest.mark.parametrize(("main", "words"), [(gpu.main, ["all"]), (offload.main, [])])
def test_without_a_gpu_it_says_so(main, words, monkeypatch, capsys):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    assert main(words) == 2
    assert "torch sees no NVIDIA GPU here" in capsys.readouterr().err


def test_the_day_goes_on_where_it_ended(tmp_path, monkeypatch, capsys):
    """Each part is a program; one that fails is named and run again, one that is done is not."""
    ran = []

    def part(title, code):
        return gpu.Part(title, 60.0, lambda *given: ran.append((title, *given[:2])) or [["-c", code]])

    parts = {"good": part("A", "print('speed 3')"), "bad": part("B", "raise SystemExit('no')"),
             "late": part("C", "import time; time.sleep(60)")}  # fmt: skip
    monkeypatch.setattr(gpu, "PARTS", parts)
    monkeypatch.setattr(gpu, "installed", lambda: SimpleNamespace(kind="cpu"))
    monkeypatch.setattr(report, "commit", lambda: "abc")
    words = ["--quick", "--out", str(tmp_path)]
    assert gpu.main(["good", "bad", *words]) == 1
    page = (tmp_path / "page.md").read_text()
    assert "speed 3" in page and "**ended with status 1**" in page and "It has not run." in page
    assert report.WITHOUT_GPU in page and ran == [("A", True, "cpu"), ("B", True, "cpu")]
    parts["bad"], parts["late"] = part("B", ""), gpu.Part("C", 0.1, parts["late"].programs)
    assert gpu.main(["all", *words]) == 1
    assert [title for title, *_ in ran[2:]] == ["B", "C"]
    assert "**not done after 1 s**" in (tmp_path / "page.md").read_text()
    assert gpu.main(["late", *words, "--budget-seconds", "1"]) == 1 and "no time is left" in capsys.readouterr().out


def test_every_program_of_the_day_takes_its_words(tmp_path):
    for quick in (False, True):
        for name, module in (("stages", zero), ("offload", offload)):
            (program,) = gpu.PARTS[name].programs(quick, "cpu", tmp_path)
            assert program[1] == module.__name__ and module.parse(program[2:])
    assert sum(part.seconds for part in gpu.PARTS.values()) <= 600
    work = replace(speed_work("cuda", 1, quick=False), device="cuda")
    h100 = SimpleNamespace(device_name=lambda d: "NVIDIA H100 80GB HBM3", current_device=lambda: None)
    with mock.patch.object(report, "installed", lambda: h100):
        assert 0.35 < float(report._mfu(work, 0.1).rstrip("%")) / 100 < 0.45
    assert report._mfu(TINY, 0.1) == "-"


def test_the_day_runs_all_tests_that_need_a_gpu():
    tests = Path(__file__).parents[1]
    files = (path for path in tests.rglob("test_*.py") if re.search(r"mark\.gpu", path.read_text()))
    marked = {path.relative_to(tests.parent) for path in files}
    assert {path for path in marked if not any(map(path.is_relative_to, gpu.GPU_TESTS))} == set()


def test_the_day_has_time_for_all_who_offload():
    """And for one model that may be the largest."""
    (program,) = gpu._offload(False, "cuda", Path())
    options = offload.parse(program[2:])
    work = shaped(speed_work("cuda", 1, quick=False), options.layers, options.width)
    kept, needed = offload.KEPT_FREE * options.budget_seconds, offload.needs_seconds("speed", work)
    assert 5 * needed < options.budget_seconds - kept and [c.name for c in OFFLOAD[:2]] == ["s2", "ds2"]
    assert offload.needs_seconds("largest", shaped(work, *LADDER[0])) < kept


def test_parameters_are_the_models():
    for shape in ((1, 64), (3, 128)):
        work = shaped(TINY, *shape)
        assert work.parameters == sum(p.numel() for p in build_model(work).parameters())
    base = speed_work("cuda", 16, quick=False)
    sizes = [shaped(base, *shape).parameters for shape in LADDER]
    assert sizes == sorted(sizes) and round(sizes[0] / 1e9, 2) == 1.42 and base.parameters == sizes[0]


def test_the_ladder_begins_with_the_largest_that_fits():
    """18 bytes a parameter while zero.Init's shards wait on the host, 16 when the device has room for them."""
    base = speed_work("cuda", 16, quick=False)
    host = host_bytes_needed(shaped(base, 32, 4096), "cpu")
    without = rungs(LADDER, base, host, device_bytes=0)
    assert (without[0].work.n_layer, without[0].work.n_embd, without[0].init_on) == (32, 4096, "cpu")
    assert without[0].needed == host > 100 * GIB and without[0].work.checkpointing
    with_device = rungs(LADDER, base, host, device_bytes=80 * GIB)
    assert (with_device[0].work.n_layer, with_device[0].init_on) == (36, "device")
    assert [rung.work for rung in with_device[2:]] == [rung.work for rung in without]
    assert rungs(LADDER, base, host, device_bytes=20 * GIB) == without, "two bytes each, on at most half of it"
    assert not rungs(LADDER, base, 20 * GIB, 80 * GIB)


def test_who_does_not_fit_on_the_device_is_named(tmp_path):
    options = offload.parse(["--contenders", "plain,s2", "--out", str(tmp_path)])
    work = replace(speed_work("cuda", 1, quick=False), device="cpu")
    for device_bytes, names in ((80 * GIB, ["s2", "plain"]), (24 * GIB, ["s2"])):
        bench = offload.Bench(options, work, device_bytes, tmp_path)
        bench.work = replace(work, device="cuda")
        assert [contender.name for contender in bench.taking_part()] == names
    assert bench.found["skipped"] == ["deepzero 2, no offload: 26 GiB on the device without offload, which has 24"]


def test_nothing_is_begun_that_the_budget_does_not_hold(tmp_path, monkeypatch):
    monkeypatch.setattr(offload, "available_host_bytes", lambda: 100 * GIB)  # a full machine has no room for a model
    assert offload.main(["--quick", "--budget-seconds", "1", "--contenders", "s2", "--out", str(tmp_path)]) == 3
    skipped = results(tmp_path)["skipped"]
    assert [line.split(":")[0] for line in skipped][:1] == ["deepzero 2, round 1"]
    assert skipped[-1].startswith("the largest model, ") and "of 1 left" in skipped[-1]
    page = (tmp_path / "page.md").read_text()
    assert report.WITHOUT_GPU in page or torch.cuda.is_available()
    assert all(line in page for line in skipped)


def test_tables_compare_with_deepspeed_and_judge_losses():
    leg = {"bytes": 2e9, "seconds": 0.5, "gb_per_second": 4.0, "hidden": 0.75}
    facts = {"build_seconds": 1.0, "device_bytes": GIB}
    rows = {
        "s2": [outcome(0.5, facts=facts), outcome(1.0, 1.5, facts={**facts, "pipeline": {"optimizer_step": leg}})],
        "ds2": [outcome(2.0, 4.0, losses=(5.0, 4.1), facts=facts)],
        "s2-late": [outcome(1.0, losses=(5.0, 4.5), facts=facts)],
        "s3": [Outcome(error="killed")],
    }
    speed = {"work": TINY, "rows": rows, "warmup": 1, "blocks": 1, "steps": 1}
    found = dict(offload.sections({"speed": speed, "skipped": ["a thing"]}))
    line = next(row for row in found["Speed and memory"].splitlines() if row.startswith("| deepzero 2  "))
    assert [cell.strip() for cell in line.split("|")[2:9]] == ["1.000", "0.500", "3", "64", "0.33", "0.25", "1.00"]
    assert "deepzero 3" not in found["Speed and memory"]
    assert "**NOT the same work: DeepSpeed 2.**" in found["Losses"] and "not judged: deepzero 2, d" in found["Losses"]
    assert found["Left out and failed"] == "- a thing\n- s3: killed"
    assert "75%" in found["The pipeline of the last step"]
    rows["s2"].reverse()
    assert "75%" not in offload.pipeline_table(offload.measured(rows)), "it is the last round's"


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_a_quick_run_of_everything(tmp_path, capsys):
    """The largest model is built by zero.Init on the host, and all of it offloaded: its arena has the closed form."""
    wanted = ["plain", "s2", "s2-half", "s2-late", "s3"]
    status = offload.main(["--quick", "--contenders", ",".join(wanted), "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    assert status == 0 and "All do the same work" in printed, printed
    found = results(tmp_path)
    assert sorted(found["speed"]["rows"]) == sorted(wanted) and not found["skipped"]
    for name in wanted:
        (row,) = found["speed"]["rows"][name]
        assert row["error"] is None and len(row["seconds"]["step"]) == 2 and len(row["losses"]) == 5
    (attempt,) = found["largest"]["attempts"]
    rung, row = attempt["rung"], attempt["row"]
    assert attempt["trains"] and row["error"] is None and len(row["losses"]) == 3
    assert rung["init_on"] == "cpu" and row["parameters"] == Workload(**rung["work"]).parameters
    on_host = rung["needed"] - INIT_BYTES * row["parameters"]
    assert row["facts"]["arena_bytes"] == pytest.approx(on_host, rel=0.02)
    assert {"parameters_fetch", "gradients_to_host", "optimizer_step"} <= set(row["facts"]["pipeline"])
    assert "trains" in (tmp_path / "page.md").read_text()
    assert "\n=== largest-" in (tmp_path / "workers.log").read_text()


# ---- links of a given speed ------------------------------------------------------------------------------------------


def test_links_that_cannot_be_throttled(monkeypatch, capsys):
    monkeypatch.delenv(links.INSIDE, raising=False)
    monkeypatch.setattr(links, "refusal", lambda: "no tc")
    assert links.main(["--quick"]) == 2
    assert "this machine throttles no links (no tc); root, unshare and tc are needed" in capsys.readouterr().err
    assert "3gbit" in links.bucket(3) and "tbf" not in links.bucket(0)


def test_what_is_predicted_of_links():
    """Steps are longer on slower links, and less so when parameters are gathered under the next forward pass."""
    cluster, zero = find_cluster("h100"), {"stage": 2, "overlap_comm": True}
    work = replace(TINY, ranks=2)
    for gather in (False, True):
        options = {"zero": {**zero, "overlap_param_gather": gather}}
        (slow, in_sequence), (fast, _) = (links.predict(work, options, cluster, speed) for speed in (0.1, 10))
        assert in_sequence > slow > fast
    assert slow < links.predict(work, {"zero": zero}, cluster, 0.1)[0]


def test_links_between_nodes_are_held_to_the_closed_form():
    """A node's ranks share 0.8 Gb/s: 50 MB take a rank a second, behind a step of two or in front of it."""
    entries = [(ZEROPP, variant) for variant in ZEROPP.variants[:3]]
    times = {"stage3": (2.0, 2.9, 50e6), "qwz": (2.0, 1.0, 25e6), "hpz": (2.0, 4.0, 100e6)}
    found = {(f"zeropp {name}", speed): [outcome(s, facts={"between_node_bytes": sent})]
             for name, (free, slow, sent) in times.items() for speed, s in ((0, free), (0.8, slow))}  # fmt: skip
    lines = links.table_between_nodes(entries, found, [0, 0.8]).splitlines()[2:]
    cells = [[cell.strip() for cell in line.split("|")[2:-1]] for line in lines]
    assert cells[0] == ["not throttled", "2.000", "1.000", "50.00", "1.000", "", "", ""]
    assert [row[1:] for row in cells[3:]] == [
        ["2.900", "1.000", "50.00", "1.000", "2.000", "3.000", "yes"],
        ["1.000", "0.345", "25.00", "0.500", "2.000", "2.500", "no"],
        ["4.000", "1.379", "100.00", "2.000", "2.000", "4.000", "yes"],
    ]


def test_a_link_carries_one_launch_after_the_other(monkeypatch):
    link, now = Link(), [10.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    link.noted = 5.0
    assert link.arrival() == 0.0, "any number of bytes a second"
    link.bytes_per_second, link.noted = 10.0, 5.0
    assert link.arrival() == 10.5 and link.arrival() == 0.0, "the second had nothing for another node"
    link.noted = 20.0
    assert link.arrival() == 12.5, "behind the first"
    now[0], link.noted = 20.0, 10.0
    assert link.arrival() == 21.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "rows"),
    [
        (["--speeds", "1", "0", "--contenders", "deepzero2:gather"],
         ["deepzero2 gather 1 Gb/s", "deepzero2 gather memory"]),
        pytest.param(["--speeds", "0", "--contenders", "deepzero2-offload"], ["deepzero2-offload host memory"],
                     marks=pytest.mark.exhaustive),
        pytest.param(["--speeds", "1", "--contenders", "zeropp:all", "--between-nodes"],
                     ["all not throttled", "all 1 Gb/s"], marks=pytest.mark.exhaustive),
    ],
    ids=["throttled", "beside a simulation", "between nodes"],
)  # fmt: skip
def test_a_quick_run_over_links(words, rows, tmp_path):
    page, command = tmp_path / "page.md", [sys.executable, "-m", "tools.bench.links", "--quick", *words]
    if rows[0].startswith("deepzero2 gather"):
        if problem := links.refusal():
            pytest.skip(f"throttling a link takes root, unshare and tc: {problem}")
        command += ["--cluster", tmp_path / "here.json"]  # in place of a probe
        command[-1].write_text(json.dumps(asdict(find_cluster("azure_nc24r"))))
    command += ["--rounds", "1", "--steps", "2", "--page", page]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    lines = [line.split("|")[1:3] for line in page.read_text().splitlines() if line.startswith("| ")][1:]
    assert [" ".join(cell.strip() for cell in line) for line in lines] == rows


def test_links_without_a_cluster_probe_for_one(monkeypatch):
    started = []
    monkeypatch.setattr(links, "launch", lambda *program, **_: started.append(program))
    monkeypatch.setattr(links, "read_cluster", lambda path: path)
    assert started == [] and [(links.PROBE, "probe_to_file", (links.probe(2, "here"), "bfloat16"))] == started


# ---- benchmarks of one thing -----------------------------------------------------------------------------------------


def test_cpu_adam_measures_in_turn_and_says_which_bar_is_missed(capsys):
    assert cpu_adam.main(["--elements", "4096", "--rounds", "2", "--threads", "1", "--only", "torch", "chunked"]) == 0
    printed = capsys.readouterr().out
    assert "4,096 elements, 1 threads, 2 rounds" in printed
    names = {line.split("|")[1].strip() for line in printed.splitlines() if line.startswith("| ")}
    assert names >= {"torch", "chunked"}
    seconds = {"deepspeed": [2.0, 2.0], "torch": [2.0, 1.0], "compiled": [1.0, 9.0, 1.0], "copy": [0.5]}
    bars = cpu_adam.report(seconds, 1000).split("\n\n")[1]
    assert [line.split("|")[5].strip() for line in bars.splitlines()[2:]] == ["met", "MISSED", "MISSED"]


@pytest.mark.slow
def test_muon_beside_its_naive_form_and_adamw(capsys):
    """Its losses are others, and are not judged by AdamW's; the optimizer's part of a step is a part of it."""
    words = ["--quick", "--ranks", "1", "--steps", "2", "--contenders", "muon2,muon0,deepzero2:plain"]
    assert zero.main(words) == 0
    lines = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    head, *rows = ([cell.strip() for cell in line] for line in lines[:4])
    assert [row[0] for row in rows] == ["Muon, stage 2 *", "Muon, stage 0 *", "deepzero stage 2 *"]
    step, inside = head.index("median s"), head.index("optimizer s")
    assert all(float(row[step]) >= float(row[inside]) > 0 for row in rows[:2]) and float(rows[2][inside]) >= 0


@pytest.mark.parametrize(("cost", "verdict"), [(0.0005, "pass (+1.00%)"), (0.0006, "FAIL (+1.20%)")])
def test_loggers_may_cost_one_percent(cost, verdict):
    def rounds(*means):
        return [[mean, mean] for mean in means]

    found = {way: rounds(0.05, 0.06, 0.04) for way in monitoring.WAYS}
    found["all"] = rounds(0.05 + cost, 0.06, 0.04)
    *lines, last = monitoring.report(found).splitlines()
    assert last.endswith(verdict)
    assert lines[2].replace("|", "").split() == ["none", "50.000", "40.000", "1.0000", "1.0000", "1.0000"]


def test_every_way_of_watching_sees_the_same_steps(tmp_path, monkeypatch):
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
