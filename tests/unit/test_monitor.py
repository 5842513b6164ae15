"""Files that are always JSON and always whole, a terminal that is or is not one."""

import errno
import io
import json
import math
import os
import re
import struct
import sys
from datetime import datetime
from functools import partial
from unittest import mock

import pytest
import torch

from deepzero.config.run import LoggerConfig
from deepzero.device import accelerator_of
from deepzero.monitor.metrics_file import (
    MetricsFile,
    clear,
    read_metrics,
    to_json,
    write_error,
    write_failed_summary,
    write_summary,
)
from deepzero.monitor.monitor import Monitor, Workload, make_monitor
from deepzero.monitor.terminal import Terminal, ledger_table
from deepzero.monitor.throughput import peak_flops, rates
from deepzero.utils.formatting import short_bytes, short_number


def step(number, **changes):
    record = {
        "step": number, "loss": 2.5, "lr": 1e-3, "grad_norm": 0.5, "grad_norm_clipped": 0.5, "loss_scale": 1.0,
        "skipped": False,
    }  # fmt: skip
    return {**record, **changes}


WORK = Workload(
    total_steps=2, tokens_per_step=100, flops_per_token=1e6, world_size=2, peak_flops=None, bytes_per_token=1.0
)
TRAFFIC = {"calls": 1, "elements": 10, "padding_elements": 2, "bytes": 24}
FACTS = {
    "params_sha256": "00", "model_numel": 20, "world_size": 2, "peak_rss_bytes": 1000, "sample": "\x1b[2Jhello",
    "memory": {"parameters": {"predicted": 40, "measured": 40}},
    "communication": {"gradients.reduce_scatter": {"predicted": TRAFFIC, "measured": TRAFFIC}},
}  # fmt: skip


class Terminus(io.StringIO):
    def isatty(self):
        return True


def written(run_dir, *entries, **options):
    file = MetricsFile(run_dir, **options)
    for entry in entries:
        file.write("validation" if "val_loss" in entry else "train", entry)


def summary_of(run_dir):
    return json.loads((run_dir / "summary.json").read_text())


def test_floats_come_back_with_the_same_bits(tmp_path):
    values = [struct.unpack("<d", (0x3FB999999999999A + 7919 * i).to_bytes(8, "little"))[0] for i in range(500)]
    written(tmp_path, *(step(i, loss=value) for i, value in enumerate(values)))
    assert [entry["loss"] for entry in read_metrics(tmp_path)] == values


def test_not_a_number_is_null_and_what_json_cannot_say_is_refused():
    text = to_json({"a": math.nan, "b": [math.inf, -math.inf, 1.0], "c": {"d": True, "e": None}})
    assert json.loads(text) == {"a": None, "b": [None, None, 1.0], "c": {"d": True, "e": None}}
    with pytest.raises(TypeError, match="no place in a JSON file"):
        to_json({"a": {1, 2}})


def test_metrics_are_on_disk_at_once_and_a_torn_line_is_left_out(tmp_path):
    assert read_metrics(tmp_path) == []
    written(tmp_path, step(1))
    assert [entry["step"] for entry in read_metrics(tmp_path)] == [1]
    with (tmp_path / "metrics.jsonl").open("a") as torn:
        torn.write('{"step": 2, "lo')
    assert [entry["step"] for entry in read_metrics(tmp_path)] == [1]


def test_a_failed_run_says_how_far_it_came(tmp_path):
    written(tmp_path, {"step": 0, "val_loss": 5.0}, step(1, loss=4.0), step(2, loss=3.0))
    for status, reason in (
        ("failed", "rank 1 failed"),
        ("stopped", "stopped by SIGINT"),
        ("stopped", "stopped by SIGTERM; it had not left 20 s later"),
    ):
        write_failed_summary(tmp_path, reason, {"x": 1}, 12.0)
        summary = summary_of(tmp_path)
        assert (summary["status"], summary["error"]) == (status, reason)
        assert (summary["steps"], summary["loss"], summary["val_loss"]) == (2, 3.0, 5.0)
    finished = {"status": "finished", "path": os.fsdecode(b"caf\xe9.txt")}
    write_summary(tmp_path, finished)
    write_failed_summary(tmp_path, "late", {}, 1.0)
    assert summary_of(tmp_path) == finished
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "summary.json"]


@pytest.mark.parametrize(
    "left", [b"", b'{"status": "fin', b"\0\0", b"\xff\xfe", b"[1]"], ids=["empty", "torn", "zeros", "no text", "a list"]
)
def test_a_damaged_summary_does_not_hide_why_a_run_failed(left, tmp_path):
    (tmp_path / "summary.json").write_bytes(left)
    write_failed_summary(tmp_path, "rank 1 failed", {}, 1.0)
    assert summary_of(tmp_path)["error"] == "rank 1 failed"


def test_an_earlier_run_in_the_same_folder_is_forgotten(tmp_path):
    write_summary(tmp_path, {"status": "finished"})
    written(tmp_path, step(1))
    os.utime(tmp_path / "summary.json", (1e9, 1e9))
    os.utime(tmp_path / "metrics.jsonl", (2e9, 2e9))
    assert clear(tmp_path) == datetime.fromtimestamp(2e9), "the last sign of the earlier run"
    assert clear(tmp_path) is None
    write_failed_summary(tmp_path, "at once", {}, 1.0)
    assert summary_of(tmp_path)["steps"] == 0


def test_an_encoding_that_lacks_characters():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    Terminal(1, stream=stream).line("é\ufffd")
    assert raw.getvalue() == b"??\n"


def test_plain_lines_where_there_is_no_terminal():
    stream = io.StringIO()
    terminal = Terminal(total_steps=5, log_every=2, stream=stream)
    for number in range(1, 6):
        speed = {"step_seconds": 0.5, **rates(100, 0.5, 1e6, 2, peak=None)}
        terminal.write("train", {**step(number, skipped=number == 3, grad_norm=2.0), **speed})
    lines = stream.getvalue().splitlines()
    assert [line[:8] for line in lines] == ["step 2/5", "step 3/5", "step 4/5", "step 5/5"]
    assert "overflow: step skipped" in lines[1]
    assert "grad norm 2.000 -> 0.500" in lines[0] and "200 tokens/s" in lines[0] and "MFU" not in lines[0]


def test_a_bar_on_a_terminal():
    stream = Terminus()
    terminal = Terminal(total_steps=2, stream=stream)
    for number in (1, 2):
        speed = {"step_seconds": 0.5, **rates(100, 0.5, 1e6, 2, peak=1e9)}
        terminal.write("train", {**step(number, skipped=number == 2), **speed})
    terminal.write("validation", {"step": 2, "val_loss": 2.0, "val_bits_per_byte": None})
    terminal.finish({})
    for words in ("2/2 [", "MFU 10.0%", "step 2: overflow, skipped", "validation loss 2.0000\n"):
        assert words in stream.getvalue()


def test_the_table_shows_both_numbers_and_the_padding():
    table = ledger_table(FACTS)
    assert "gradients.reduce_scatter" in table and "1 call, 10 elements + 2 padding" in table
    assert table.count("1.0000") == 3
    for predicted, measured, ratio in ((0, 0, "-"), (0, 5, "inf"), (4, 5, "1.2500")):
        report = {"memory": {"masters": {"predicted": predicted, "measured": measured}}, "communication": {}}
        assert ledger_table(report).splitlines()[1].split()[-1] == ratio
    for held, told in ((0, False), (5, True)):  # of what is gathered the row has the most, not what is held at the end
        report = {"memory": {"gathered": {"predicted": 5, "measured": held}}, "communication": {}}
        assert ("at any time of a step" in ledger_table(report)) == told
    assert (short_number(1234567), short_number(0.5), short_bytes(2.5e9)) == ("1.23M", "0.5", "2.5 GB")


def test_peaks():
    assert peak_flops("NVIDIA H100 PCIe", "bf16") == 756e12
    assert peak_flops("Tesla V100-SXM2-16GB", "bf16") is None
    assert peak_flops("Tesla V100-SXM2-16GB", "fp16") == 125e12
    assert peak_flops("NVIDIA A100-SXM4-80GB", "fp32") == 19.5e12
    others = ("cpu", "NVIDIA RTX A1000", "NVIDIA L40", "NVIDIA T400 4GB", "NVIDIA H100 80GB HBM3 MIG 1g.10gb")
    assert [peak_flops(name, "fp32") for name in others] == [None] * 5
    assert peak_flops("NVIDIA H100 80GB HBM3", "bf16") == peak_flops("NVIDIA GH200 480GB", "bf16") == 989.4e12


def watched(run_dir, **options):
    stream = io.StringIO()
    return make_monitor(WORK, LoggerConfig(), run_dir, {}, stream=stream, **options), stream


def test_a_run_from_first_step_to_summary(tmp_path):
    monitor, stream = watched(tmp_path)
    monitor.validation(0, 5.0)
    monitor.step(step(1), 0.5)
    monitor.step(step(2, loss=2.0), 0.25)
    monitor.validation(2, 4.0)
    monitor.finish(FACTS)
    entries = read_metrics(tmp_path)
    assert [entry.get("tokens_seen") for entry in entries] == [0, 100, 200, 200]
    assert entries[2]["tokens_per_second"] == 400.0
    assert entries[3]["val_bits_per_byte"] == pytest.approx(4.0 / math.log(2))
    summary = summary_of(tmp_path)
    assert (summary["status"], summary["loss"], summary["val_loss_first"], summary["val_loss"]) == ("finished", 2, 5, 4)
    assert summary["sample"] == "\x1b[2Jhello"
    assert "?[2Jhello" in stream.getvalue() and "\x1b" not in stream.getvalue()
    assert re.search(r"^2 steps in \d+\.\d s; ", stream.getvalue(), re.M)


def test_the_last_line_counts_the_steps_of_this_start(tmp_path):
    monitor, said = watched(tmp_path, first_step=40)
    for number in (41, 42):
        monitor.step(step(number), 0.5)
    monitor.finish(FACTS)
    assert re.search(r"^2 steps in \d+\.\d s, 42 in all; ", said.getvalue(), re.M)


def test_a_run_that_goes_on_keeps_the_validations_that_it_does_not_repeat(tmp_path):
    first, _ = watched(tmp_path)
    first.validation(0, math.nan)
    first.step(step(1), 0.5)
    first.validation(1, 4.0)
    for again, kept in ((False, [None, 4.0]), (True, [None])):
        monitor, said = watched(tmp_path, first_step=1, validated_again=again)
        assert [entry["val_loss"] for entry in read_metrics(tmp_path) if "val_loss" in entry] == kept
    monitor.step(step(2), 0.5)
    monitor.validation(2, 3.0)
    monitor.finish(FACTS)
    assert "\nvalidation loss - -> 3.0000\n" in said.getvalue()


def test_other_ranks_write_nothing(tmp_path, capsys):
    monitor = Monitor(WORK, tmp_path / "run")
    monitor.line("hello")
    monitor.step(step(1), 0.5)
    monitor.validation(1, 4.0)
    monitor.finish(FACTS)
    assert capsys.readouterr().out == ""
    assert list(tmp_path.iterdir()) == []


def test_peak_memory_is_at_least_what_was_touched(monkeypatch):
    cpu = torch.device("cpu")
    peak = partial(accelerator_of(cpu).max_memory_allocated, cpu)
    if sys.platform == "linux":  # where it would count what the launcher had when it started this process
        monkeypatch.setattr("deepzero.device.resource.getrusage", None)
    before, block = peak(), bytearray(b"\1") * 30_000_000
    assert peak() >= len(block)
    assert peak() >= before


def test_a_disk_that_is_full_for_a_while(tmp_path, monkeypatch):
    monitor, said = watched(tmp_path)
    write, room = os.write, {"bytes": 10**9}

    def short(file, data):
        if not room["bytes"]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = write(file, data[: room["bytes"]])
        room["bytes"] -= taken
        return taken

    monkeypatch.setattr("deepzero.monitor.metrics_file.os.write", short)
    for number, left in ((1, 10**9), (2, 20), (3, 0), (4, 10**9)):
        room["bytes"] = left
        monitor.step(step(number), 0.1)
    assert [entry["step"] for entry in read_metrics(tmp_path)] == [1, 4]
    assert said.getvalue().count("training goes on, and what cannot be written is left out") == 1
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr("deepzero.monitor.monitor.write_summary", mock.Mock(side_effect=full))
    monitor.finish(FACTS)
    assert "summary.json: [Errno 28] No space left on device" in said.getvalue()
    assert said.getvalue().count("metrics.jsonl: 2 entries could not be written") == 1


def test_metrics_that_are_removed_under_a_run(tmp_path):
    monitor, said = watched(tmp_path)
    (tmp_path / "metrics.jsonl").unlink()
    monitor.step(step(1), 0.1)
    assert f"[Errno 2] it was removed: '{tmp_path / 'metrics.jsonl'}'; training goes on" in said.getvalue()


@pytest.mark.parametrize("what", ["summary.json", "error.txt"])
def test_the_end_on_a_full_disk(what, tmp_path, capsys):
    (tmp_path / what).mkdir()  # nothing can be put there, whoever asks
    (tmp_path / what / "file").touch()
    if what == "error.txt":
        assert write_error(tmp_path / what, "caf\udce9.txt").endswith("error.txt/error.txt")
        said = write_error(tmp_path, "Traceback: all of it")
        assert "error.txt" in said and said.endswith("so the whole traceback stands here:\nTraceback: all of it")
        return
    write_failed_summary(tmp_path, "a reason", {}, 1.0)
    assert capsys.readouterr().err.startswith("summary.json: ")
    assert [path.name for path in tmp_path.iterdir()] == [what]
