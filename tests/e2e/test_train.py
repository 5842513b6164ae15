"""Real runs of `python train.py`: what they print, what they leave behind, and that the stages agree to the bit."""

import math
import re
import sys

import pytest

from deepzero.utils.compile import why_not_compiled
from deepzero.utils.formatting import short_bytes
from tests.e2e import runs
from tests.e2e.readers import as_fp32, compare, tensorboard_rows, wandb_rows
from tools import trace_report

STEP_KEYS = {
    "step", "loss", "lr", "grad_norm", "grad_norm_clipped", "loss_scale", "skipped", "tokens", "tokens_per_second",
    "step_seconds",
}  # fmt: skip


def test_a_sweep_gives_each_stage_its_folder_and_prints_plain_lines(sweep):
    folder, done = sweep
    assert done.err == ""
    names = {".hydra", ".lock", "checkpoints", "metrics.jsonl", "report.html", "summary.json", "timeline.json"}
    for stage in (0, 1, 2, 3):
        assert {path.name for path in (folder / str(stage)).iterdir()} == names
        assert runs.summary(folder / str(stage))["config"]["engine"]["zero"]["stage"] == stage
        assert f"ZeRO stage {stage}" in done.out
    assert sorted(path.name for path in folder.parent.iterdir()) == ["out"]
    assert "\r" not in done.out and "\x1b" not in done.out
    assert done.out.count("! stage 3 saves nothing here: ") == 1  # the model is tiny
    assert done.out.count("step 10/10  loss") == 4 and done.out.count("predicted      measured    ratio") == 8


def test_a_sweep_ends_with_a_table_of_its_runs(sweep):
    folder, done = sweep
    first, head, *rows = done.out[done.out.index("4 runs; held by one rank after a backward pass") :].splitlines()
    assert first.endswith("not at the peak (activations: what the peak was above the rest)")
    heads = re.split("  +", head)
    categories = ["parameters", "gathered", "gradients", "moments"]  # in fp32 parameters are their own masters
    assert heads[:2] + heads[-3:] == ["run", "stage", "sent a step", "step", "loss"] and set(categories) <= set(heads)
    for stage, row in enumerate(rows[:4]):
        cells, summary = dict(zip(heads, re.split("  +", row), strict=True)), runs.summary(folder / str(stage))
        assert (cells["run"], cells["stage"]) == (f"out/{stage}", str(stage))
        assert cells["loss"] == f"{summary['val_loss']:.4f}"
        for name in categories:
            assert cells[name] == short_bytes(summary["memory"].get(name, {"measured": 0})["measured"])
    assert rows[4].startswith("Stage 1 holds here what stage 2 would: with zero.overlap_comm=true and one micro-batch")
    assert len(rows) == 5


def test_metrics_of_every_step(sweep):
    steps, validations = runs.entries(sweep[0] / "1")
    assert [entry["step"] for entry in steps] == list(range(1, 11))
    for entry in steps:
        assert set(entry) >= STEP_KEYS
        assert (entry["tokens"], entry["loss_scale"], entry["skipped"]) == (12 * 16, 1.0, False)
        assert entry["tokens_per_second"] == pytest.approx(entry["tokens"] / entry["step_seconds"])
        assert entry["grad_norm_clipped"] <= min(entry["grad_norm"], 1.0 + 1e-6)
    assert [entry["step"] for entry in validations] == [0, 5, 10]
    for entry in validations:
        assert entry["val_bits_per_byte"] == pytest.approx(entry["val_loss"] / math.log(2))
    assert validations[-1]["val_loss"] < validations[0]["val_loss"] == pytest.approx(math.log(256), rel=0.05)


def test_the_stages_agree_to_the_bit(sweep):
    found = [runs.trajectory(sweep[0] / str(stage)) for stage in (0, 1, 2, 3)]
    assert found[0] == found[1] == found[2] == found[3]


def test_the_summary_says_what_zero_promises(sweep):
    for stage in (0, 1, 2, 3):
        summary, (steps, validations) = (read(sweep[0] / str(stage)) for read in (runs.summary, runs.entries))
        assert (summary["status"], summary["world_size"], summary["loss"]) == ("finished", 2, steps[-1]["loss"])
        seen = [validations[0]["val_loss"], validations[-1]["val_loss"]]
        assert [summary["val_loss_first"], summary["val_loss"]] == seen
        assert len(summary["params_sha256"]) == 64 and isinstance(summary["sample"], str)
        assert len(summary["peak_rss_bytes_per_rank"]) == 2
        assert 50e6 < summary["peak_rss_bytes"] == max(summary["peak_rss_bytes_per_rank"]) < 5e9
        # With two ranks each sends 2 (W-1)/W of the model's elements per reduction and gather; stage 3 gathers twice,
        # less what its plan saves.
        numel, traffic = summary["model_numel"], summary["communication"]
        sent = sum(values["measured"]["elements"] for kind, values in traffic.items() if "agreement" not in kind)
        assert sent == 2 * numel / 2 or (stage == 3 and sent <= 3 * numel / 2)
        for values in traffic.values():
            assert values["measured"] == values["predicted"]
        for category in ("parameters", "gradients", "masters", "moments"):
            held = summary["memory"][category]
            assert held["measured"] == pytest.approx(held["predicted"], rel=0.02), (stage, category)


def test_nan_stops_the_run_and_leaves_it_readable(broken):
    run_dir, done = broken
    assert (done.status, done.err.count("NonFiniteError: step 5")) == (1, 1)
    assert "Traceback" not in done.err and "elastic" not in done.err
    summary = runs.summary(run_dir)
    assert (summary["status"], summary["steps"], len(runs.entries(run_dir)[0])) == ("failed", 4, 4)
    assert "NonFiniteError: step 5" in summary["error"] and "(nor was the loss: inf on rank 0)" in summary["error"]
    assert "Traceback" in (run_dir / "error.txt").read_text(encoding="utf-8")
    report = (run_dir / "report.html").read_text(encoding="utf-8")
    # Of a run that fails the recorded step tells, as there is no summary of a last one.
    for said in ("The run did not finish: ", "NonFiniteError: step 5", "Each of the 3 ranks holds"):
        assert said in report
    # Loggers have what came before.
    compare(run_dir, wandb_rows(run_dir))
    compare(run_dir, tensorboard_rows(run_dir), as_fp32)


def test_two_and_three_ranks_validate_alike(sweep, broken):
    two, three = (runs.entries(run_dir)[1][0] for run_dir in (sweep[0] / "0", broken[0]))
    assert three["val_loss"] == pytest.approx(two["val_loss"], rel=1e-6)


@pytest.mark.exhaustive
def test_fp16_overflow_is_skipped_and_training_goes_on(tiny, tmp_path):
    done = runs.train(
        *tiny, "debug=overflow", "precision=fp16", "precision.hysteresis=1", "precision.initial_scale_power=8",
        "hydra.run.dir=run", cwd=tmp_path,
    )  # fmt: skip
    assert done.status == 0, done.err
    steps, _ = runs.entries(tmp_path / "run")
    assert [entry["skipped"] for entry in steps] == [entry["step"] == 5 for entry in steps]
    assert steps[4]["grad_norm"] is None  # infinite, which JSON cannot say
    assert [entry["loss_scale"] for entry in steps] == [256.0] * 5 + [128.0] * 5
    assert runs.summary(tmp_path / "run")["skipped_steps"] == 1


def numbers(tiny, cwd, name, *words):
    """The losses and validations of a short run in stage 3."""
    more = ["zero.stage=3", "train.steps=3", "train.sample_tokens=1", f"hydra.run.dir={name}", *words]
    # The compiler's own warnings are not ours, nor is what a run that was killed has left in its cache; no pool of its.
    compiles = {"TORCHINDUCTOR_CACHE_DIR": str(cwd / "code"), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    own = compiles if "train.compile=true" in words else {"PYTHONWARNINGS": "error"}
    done = runs.finished([sys.executable, runs.TRAIN, *tiny, *more], cwd, 200, **own)
    assert done.status == 0 and "no plan beside it" not in done.out, done.err + done.out
    steps, validations = runs.entries(cwd / name)
    return [entry["loss"] for entry in steps] + [entry["val_loss"] for entry in validations]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_simulated_streams_find_nothing_and_blocks_can_be_compiled(tiny, tmp_path):
    """Streams change nothing but the norm's last bit, by which gradients are clipped; the compiler only rounds."""
    # Validation, sampling and checkpointing of activations are among it.
    plain = numbers(tiny, tmp_path, "plain")
    assert numbers(tiny, tmp_path, "streams", "debug=streams") == pytest.approx(plain, rel=1e-6)
    if reason := why_not_compiled():
        pytest.skip(reason)
    compiled = numbers(tiny, tmp_path, "compiled", "train.compile=true")  # on as many ranks, by which numbers round
    assert compiled == pytest.approx(plain, rel=1e-4) and compiled != plain


@pytest.mark.exhaustive
def test_simulated_streams_find_nothing_in_stage_2(tiny, tmp_path):
    plain, streams = (numbers(tiny, tmp_path, n, f"debug={n}", "zero.stage=2") for n in ("none", "streams"))
    assert streams == pytest.approx(plain, rel=1e-6)


def test_a_terminal_gets_a_bar(watched):
    _, seen = watched
    assert "30/30 [" in seen and "\r" in seen and "sent by one rank in one step" in seen


def test_the_traces_of_a_run_are_summed_up(watched, capsys):
    run_dir, _ = watched
    assert trace_report.main([str(run_dir)]) == 0
    report = capsys.readouterr().out
    assert [line.partition(",")[0] for line in report.splitlines() if line.startswith("rank ")] == [
        "rank 0 of 2", "rank 1 of 2",
    ]  # fmt: skip
    assert "gradients." in report
    steps, _ = runs.entries(run_dir)
    for step in steps:
        assert 0 < step["comm/exposed_seconds"] <= step["comm/in_flight_seconds"] < step["step_seconds"]


def test_blocks_that_cannot_be_compiled(tiny, tmp_path):
    done = runs.refused(*tiny, "train.compile=true", cwd=tmp_path, CXX="no_such_compiler")
    assert done.status == 2 and "train.compile=true: no C++ compiler (no_such_compiler is not there" in done.err
