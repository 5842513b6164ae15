"""``tools.bench.gpu`` where there is no GPU: arithmetic, budget, bad days, and quick runs. No time is asserted."""

import dataclasses
import json
import time

import pytest
import torch

from tools.bench import gpu, gpu_offload, gpu_report, gpu_run
from tools.bench.gpu_offload import ENTRIES, GIB, LADDER, Shape, engine_config, host_bytes_needed, parameters, rungs
from tools.bench.workload import TINY, build_model


def results(folder):
    found = json.loads((folder / "results.json").read_text())
    return found


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        gpu.main(["offload"])
    assert ended.value.code == 2
    assert "torch sees no NVIDIA GPU here" in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "message"), [
    (["--parts", "bytes"], "--parts: unknown bytes; there are: bits, speed, largest"),
    (["--contenders", "s2,s4"], "--contenders: unknown s4; there are: plain, s2"),
    (["--blocks", "0"], "--blocks=0: must be at least 1"),
])  # fmt: skip
def test_bad_options_are_named(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        gpu.main(["offload", *arguments])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_parameters_are_the_models():
    for shape in (Shape(1, 64), Shape(3, 128)):
        work = shape.work(TINY)
        assert parameters(work) == sum(p.numel() for p in build_model(work).parameters())
    base = gpu_offload.speed_work("cuda", 16, quick=False)
    sizes = [parameters(shape.work(base)) for shape in LADDER]
    assert sizes == sorted(sizes) and round(sizes[0] / 1e9, 2) == 1.42


def test_the_ladder_begins_with_the_largest_that_fits():
    """18 bytes a parameter while zero.Init's parts wait on the host, 16 when the device has room for them."""
    base = gpu_offload.speed_work("cuda", 16, quick=False)
    host = host_bytes_needed(Shape(32, 4096).work(base), "cpu")
    without = rungs(LADDER, base, host, device_bytes=0)
    assert (without[0].work.n_layer, without[0].work.n_embd, without[0].parts_on) == (32, 4096, "cpu")
    assert without[0].needed == host and without[0].work.checkpointing
    with_device = rungs(LADDER, base, host, device_bytes=80 * GIB)
    assert (with_device[0].work.n_layer, with_device[0].parts_on) == (36, "device")
    assert [rung.work for rung in with_device[2:]] == [rung.work for rung in without]
    assert rungs(LADDER, base, host, device_bytes=20 * GIB) == without, "two bytes each, on at most half of it"
    assert not rungs(LADDER, base, 20 * GIB, 80 * GIB)


def test_configs_say_the_same_to_both_libraries():
    names = [entry.name for entry in ENTRIES]
    assert len(set(names)) == len(names)
    for entry in ENTRIES:
        assert entry.peer is None or entry.peer in names
        config = engine_config(TINY, entry.zero)
        assert config["zero_optimization"]["stage"] == entry.zero["stage"]
        assert all(config["zero_optimization"].get(key, {}).get("pin_memory", True) for key in ("offload_param",))
    assert engine_config(TINY, {}, bf16_sums=True)["data_types"] == {"grad_accum_dtype": "bf16"}


def test_a_worker_that_takes_too_long_is_ended_and_named(tmp_path):
    spec = {"name": "s2", "library": "deepzero", "zero": {"stage": 2}, "work": TINY.to_dict()}
    started = time.monotonic()
    found = gpu_run.run_worker(spec, 0.2, tmp_path / "scratch", tmp_path / "log")
    assert not found["done"] and found["error"].startswith("not done after 0 s")
    assert time.monotonic() - started < 60 and (tmp_path / "log").read_text().startswith("\n=== s2")


@pytest.mark.slow
def test_a_worker_that_dies_is_named_with_its_own_error(tmp_path):
    work = dataclasses.replace(TINY, ranks=1)
    spec = {"name": "s9", "library": "deepzero", "zero": {"stage": 9}, "work": work.to_dict(), "parts_on": None}
    found = gpu_run.run_worker(spec, 100, tmp_path / "scratch", tmp_path / "log")
    assert not found["done"] and "ended with 1" in found["error"] and "stage=9: stages are" in found["error"]
    assert gpu.outcome(found).startswith("no step timed")


def test_nothing_is_begun_that_the_budget_does_not_hold(tmp_path, capsys):
    assert gpu.main(["offload", "--quick", "--budget-seconds", "1", "--contenders", "s2", "--out", str(tmp_path)]) == 0
    skipped = results(tmp_path)["skipped"]
    assert [line.split(":")[0] for line in skipped][:2] == ["bits", "deepzero 2, round 1"]
    assert skipped[-1].startswith("the largest model, ") and "of 1 left" in skipped[-1]
    page = (tmp_path / "page.md").read_text()
    assert gpu_report.WITHOUT_GPU in page or torch.cuda.is_available()
    assert all(line in page for line in skipped)


def test_pytests_xml(tmp_path):
    file = tmp_path / "tests.xml"
    file.write_text(
        "<testsuites><testsuite><testcase name='a'/><testcase name='b'><failure>assert 1 == 2</failure></testcase>"
        "<testcase name='c'><skipped/></testcase></testsuite></testsuites>"
    )
    found = gpu_run.read_junit(file)
    assert (found["passed"], found["failed"], found["skipped"]) == (1, 1, 1)
    text = gpu_report.bits({**found, "seconds": 1.0})
    assert "1 passed, 1 failed, 1 skipped" in text and "`b`" in text and "assert 1 == 2" in text


def sample(seconds, losses, **more):
    return {"seconds": seconds, "losses": losses, "build_seconds": 1.0, "device_bytes": GIB, **more}


def test_tables_compare_with_deepspeed_and_judge_losses():
    leg = {"bytes": 2e9, "seconds": 0.5, "gb_per_second": 4.0, "hidden": 0.75}
    rows = {
        "s2": [sample([1.0, 1.5], [5.0, 4.0], pipeline={"optimizer_step": leg}), sample([0.5], [5.0, 4.0])],
        "ds2": [sample([2.0, 4.0], [5.0, 4.1])],
        "s2-late": [sample([1.0], [5.0, 4.5])],
        "s3": [{"done": False, "error": "killed", "wall_seconds": 1.0}],
    }
    line = next(row for row in gpu_report.speed_table(rows, TINY).splitlines() if row.startswith("| deepzero 2  "))
    assert [cell.strip() for cell in line.split("|")[2:9]] == ["1.000", "0.500", "3", "64", "0.33", "0.25", "1.00"]
    assert "deepzero 3" not in gpu_report.speed_table(rows, TINY)
    losses = gpu_report.loss_table(rows)
    assert "**Not the same work: DeepSpeed 2.**" in losses and "deepzero 2, delayed" in losses
    rows["s2"].reverse()
    assert "75%" not in gpu_report.pipeline_table({"s2": rows["s2"][:1]})
    assert "75%" in gpu_report.pipeline_table({"s2": rows["s2"][1:]})
    assert gpu_report.loss_distance([1.0, 2.0], [1.0, float("nan")]) == float("inf")


@pytest.mark.slow
def test_a_quick_run_of_the_largest_model(tmp_path, capsys):
    """Built by zero.Init on the host, stage 3, all of it offloaded: the arena has the size of the closed form."""
    assert gpu.main(["offload", "--quick", "--parts", "largest", "--out", str(tmp_path)]) == 0
    (attempt,) = results(tmp_path)["largest"]["attempts"]
    assert attempt["trains"] and attempt["done"] and len(attempt["losses"]) == 3
    assert attempt["elements"] == attempt["parameters"] and attempt["parts_on"] == "cpu"
    on_host = attempt["needed"] - gpu_offload.INIT_BYTES * attempt["elements"]
    assert attempt["arena_bytes"] == pytest.approx(on_host, rel=0.02)
    assert {"parameters_fetch", "gradients_to_host", "optimizer_step"} <= set(attempt["pipeline"])
    assert "trains" in (tmp_path / "page.md").read_text()


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_a_quick_run_of_everything(tmp_path, capsys):
    wanted = ["plain", "s2", "s2-half", "s2-late", "s3"]
    status = gpu.main(["offload", "--quick", "--contenders", ",".join(wanted), "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    assert status == 0, printed
    found = results(tmp_path)
    assert found["bits"]["failed"] == 0 and found["bits"]["passed"] + found["bits"]["skipped"] > 5
    assert sorted(found["speed"]["rows"]) == sorted(wanted) and not found["skipped"]
    for name in wanted:
        (row,) = found["speed"]["rows"][name]
        assert row["done"] and len(row["seconds"]) == 2 and len(row["losses"]) == 5
    assert "All are finite, and do the same work." in printed
