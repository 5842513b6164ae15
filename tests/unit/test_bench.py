"""The benchmark's arithmetic, its launcher's bad days, and one real run with a tiny model. No time is asserted."""

import contextlib
import json
import os
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tools.bench import cpu_adam, report, zero
from tools.bench.bars import Floor, Measured, compute_bars, fastest, floor_of, loss_disagreement, summarize
from tools.bench.contenders import CONTENDERS, FLOOR, Contender, Variant, by_name
from tools.bench.launch import Outcome, Plan, run_variant
from tools.bench.master_adamw import MasterAdamW, clip_factor_of
from tools.bench.stats import mean_over_ranks, median, slowest_rank
from tools.bench.workload import TINY, Workload, batch, make_tokens, tokens_needed

PARTS = {
    "forward_backward": 0.5, "adam_shard": 0.05, "adam_full": 0.1, "reduce_all_to_all": 0.1,
    "reduce_all_to_all_pieces": 0.2, "reduce_scatter": 0.3, "gather": 0.3, "gather_pieces": 0.1, "all_reduce": 0.15,
}  # fmt: skip


def measured(name, seconds, peak=100.0, idle=50.0, variant=0):
    contender = by_name(name)
    return Measured(
        contender, contender.variants[variant], seconds, seconds, seconds, 4, peak, peak, peak, (5.0, 4.0), idle
    )


def plan(folder, timeout_seconds=200.0):
    tokens = folder / "tokens.npy"
    np.save(tokens, make_tokens(TINY.vocab_size, tokens_needed(TINY, 2)))
    return Plan(TINY, 1, 1, timeout_seconds, tokens, folder)


def test_medians_and_the_slowest_rank():
    assert (median([4.0, 1.0, 2.0, 100.0]), median([7.0])) == (3.0, 7.0)
    with pytest.raises(ValueError, match="no samples"):
        median([])
    assert slowest_rank([[1.0, 5.0, 2.0], [3.0, 4.0, 2.5]]) == [3.0, 5.0, 2.5], "a step lasts as long as that"
    assert mean_over_ranks([[1.0, 5.0], [3.0, 4.0]]) == [2.0, 4.5]
    with pytest.raises(ValueError, match=r"\[2, 3\]"):
        slowest_rank([[1.0, 2.0], [1.0, 2.0, 3.0]])


def test_rounds_are_pooled_and_failed_rounds_left_out():
    ddp = by_name("ddp")
    first = Outcome({"step": [1.0, 3.0]}, [5.0], {"step": 1.0}, build_peak_bytes=10, step_peak_bytes=7)
    last = Outcome({"step": [2.0, 9.0]}, [5.0], {"step": 2.0}, build_peak_bytes=6, step_peak_bytes=8)
    rounds = [first, Outcome(error="rank 1 ended with 1"), last]
    row = summarize(ddp, ddp.variants[0], rounds, idle=4)
    assert row is not None
    assert (row.median_seconds, row.best_seconds, row.samples) == (2.5, 1.0, 4)
    assert row.cpu_seconds == 1.5
    assert (row.peak_bytes, row.model_bytes) == (9.0, 5.0)
    assert summarize(ddp, ddp.variants[0], [rounds[1]], idle=None) is None


def test_the_floor_takes_the_fastest_way_to_communicate():
    floor = floor_of([Outcome(seconds={part: [s, s] for part, s in PARTS.items()})])
    assert floor is not None
    assert floor.seconds(1) == floor.seconds(2) == pytest.approx(0.5 + 0.05 + 0.1 + 0.1)
    assert floor.seconds(0) == pytest.approx(0.5 + 0.1 + 0.15)


def test_bars_use_the_fastest_variant_for_time_and_the_leanest_for_memory():
    rows = [
        measured("deepzero1", 0.8, peak=120.0),
        measured("ddp", 1.0, peak=200.0, variant=0),
        measured("ddp", 2.0, peak=100.0, variant=1),
        measured("zro", 0.9, peak=150.0),
        measured("deepspeed1", 1.5, peak=300.0, idle=290.0),
    ]
    bars = {(bar.name, bar.against): bar for bar in compute_bars(rows, Floor(PARTS, PARTS))}
    assert bars["stage 1 step time", "ddp (bf16)"].value == pytest.approx(0.8)
    assert bars["stage 1 step time", "ddp (bf16)"].verdict == "pass"
    assert bars["stage 1 step time", "zro (bf16)"].verdict == "FAIL"
    assert bars["stage 1 step time", "deepspeed1 (torch-adam)"].verdict == "pass"
    assert bars["stage 1 step time", "floor"].value == pytest.approx(0.8 / 0.75)
    assert bars["stage 1 peak memory", "leanest: ddp (bf16-large)"].verdict == "FAIL"
    assert bars["stage 1 memory of the model", "leanest: deepspeed1 (torch-adam)"].value == pytest.approx(7.0)
    # Stage 2 was not run: its limits are shown, and none of them passes.
    assert {bar.verdict for (name, _), bar in bars.items() if name.startswith("stage 2")} == {"not measured"}


def test_slow_and_failing_variants_drop_out_after_the_first_round():
    entries = [(by_name("ddp"), v) for v in by_name("ddp").variants[:3]] + [(FLOOR, FLOOR.variants[0])]
    outcomes = [Outcome(seconds={"step": [s]}, cpu_seconds={"step": s}) for s in (1.0, 1.05)] + [
        Outcome(error="no"),
        Outcome(seconds={part: [1.0] for part in PARTS}),
    ]
    results = {(c.name, v.name): [outcome] for (c, v), outcome in zip(entries, outcomes, strict=True)}
    assert zero.survivors(entries, results, keep=1.1) == [entries[0], entries[1], entries[3]]
    assert zero.survivors(entries, results, keep=1.0) == [entries[0], entries[3]]


def test_losses_that_differ_are_named():
    rows = [measured("ddp", 1.0), measured("zro", 1.0), replace(measured("deepzero1", 1.0), losses=(5.0, 4.4))]
    distance, step, who = loss_disagreement(rows, 10)
    assert (distance, step, who) == (pytest.approx(0.1), 1, "deepzero1 (plain)")
    assert "NOT the same work" in report.loss_table(rows)
    assert "same work within" in report.loss_table(rows[:2])
    assert fastest(rows, "fsdp2") is None


def test_tokens_are_the_same_every_time_and_ranks_read_disjoint_ones():
    tokens = make_tokens(512, 20_000)
    assert np.array_equal(tokens, make_tokens(512, 20_000))
    assert tokens.min() >= 0 and tokens.max() == 511 and len(np.unique(tokens)) > 400
    work = Workload(block_size=4, micro_batch=2, ranks=3)
    tokens = np.arange(tokens_needed(work, 2))
    read = torch.cat([batch(work, tokens, step, rank)[0].flatten() for step in range(2) for rank in range(3)])
    assert torch.equal(read, torch.arange(48))
    inputs, targets = batch(work, tokens, 1, 2)
    assert inputs.shape == (2, 4) and torch.equal(targets, inputs + 1)


def test_peers_master_optimizer_is_adamw_on_fp32_masters():
    torch.manual_seed(0)
    low = torch.nn.Parameter(torch.randn(7, 5).bfloat16())
    reference = low.detach().float().requires_grad_()
    ours = MasterAdamW([low], lr=0.1, weight_decay=0.1)
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
    for contender in CONTENDERS:
        module, function = contender.builder.split(":")
        source = Path(zero.__file__).with_name(f"{module}.py").read_text()
        assert f"def {function}(context: Context, options" in source, contender.name
        assert len({v.name for v in contender.variants}) == len(contender.variants)


@pytest.mark.parametrize(("arguments", "message"), [
    (["--contenders", "dpp"], "unknown contender 'dpp'"),
    (["--contenders", "ddp:fp8"], "no variant 'fp8'; it has: bf16"),
    (["--rounds", "0"], "--rounds=0: must be at least 1"),
    (["--micro-batch", "0"], "--micro-batch=0"),
    (["--width", "100"], "--width 100 does not divide by --heads 12"),
])  # fmt: skip
def test_bad_options_are_named(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        zero.main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_peer_that_is_not_installed_is_skipped_with_a_line(capsys):
    variant = Variant("plain", "")
    absent = Contender("absent", "Absent", "nowhere:build", (variant,), needs=("no_such_package.inner",))
    assert zero.installed([(absent, variant), (FLOOR, FLOOR.variants[0])], 2) == [(FLOOR, FLOOR.variants[0])]
    assert capsys.readouterr().out == "skipped absent: no_such_package.inner is not installed\n"


def test_a_page_never_replaces_another(tmp_path):
    pages = [report.write_page(tmp_path, "here", ["a machine"], [("Title", "body")]) for _ in range(3)]
    assert len(set(pages)) == 3 and pages[2].name.endswith("-here-3.md")
    text = pages[0].read_text()
    assert "- a machine" in text and "- command: `python -m tools.bench.zero" in text and "## Title\n\nbody" in text


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_failing_rank_is_named_with_its_own_error(tmp_path):
    broken = Variant("broken", "", {"modus": "bf16"})
    outcome = run_variant(by_name("ddp"), broken, plan(tmp_path), "test")
    assert outcome.error is not None
    assert "ended with 1" in outcome.error and "KeyError: 'mode'" in outcome.error


def children():
    """Processes that this one has started, zombies included. Other tests' pools of ranks are among them."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid():
                found.add(int(stat.parent.name))
    return found


@pytest.mark.timeout(240)
def test_ranks_that_take_too_long_are_ended(tmp_path):
    started, before = time.monotonic(), children()
    outcome = run_variant(by_name("ddp"), by_name("ddp").variants[0], plan(tmp_path, timeout_seconds=0.3), "test")
    assert outcome.error is not None and "not done after 0 s" in outcome.error
    assert time.monotonic() - started < 60
    assert children() <= before, "every rank was reaped"


@pytest.mark.exhaustive
@pytest.mark.timeout(480)
def test_quick_run_of_deepzero_and_ddp(tmp_path, capsys):
    file = tmp_path / "samples.json"
    status = zero.main(
        ["--quick", "--contenders", "deepzero1:plain,ddp:bf16", "--steps", "4", "--json", str(file), "--timeout", "200"]
    )
    printed = capsys.readouterr().out
    assert status == 0, printed
    assert "the same work within bf16 noise" in printed
    outcomes = json.loads(file.read_text())["outcomes"]
    for name in ("deepzero1:plain", "ddp:bf16"):
        (outcome,) = outcomes[name]
        assert len(outcome["seconds"]["step"]) == 4 and min(outcome["seconds"]["step"]) > 0
        assert len(outcome["losses"]) == 5
        assert outcome["parameters"] > 100_000
        assert outcome["build_peak_bytes"] > 2**20 and outcome["step_peak_bytes"] > 2**20


def test_cpu_adam_measures_in_turn_and_says_which_bar_is_missed(capsys):
    assert cpu_adam.main(["--elements", "4096", "--rounds", "2", "--threads", "1", "--only", "torch", "chunked"]) == 0
    printed = capsys.readouterr().out
    assert "4,096 elements, 1 threads, 2 rounds" in printed
    assert {line.split("|")[1].strip() for line in printed.splitlines() if line.startswith("| ")} >= {
        "torch",
        "chunked",
    }
    seconds = {"deepspeed": [2.0, 2.0], "torch": [2.0, 1.0], "compiled": [1.0, 9.0, 1.0], "copy": [0.5]}
    bars = cpu_adam.report(seconds, 1000).split("\n\n")[1]
    assert [line.split("|")[5].strip() for line in bars.splitlines()[2:]] == ["met", "MISSED", "MISSED"]
