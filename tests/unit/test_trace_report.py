"""The trace report: figures of traces made by hand, the advice, the page, and what is refused."""

import gzip
import json
import re
from pathlib import Path

import pytest

from deepzero.config.run import RunConfig
from deepzero.profiling.trace_advice import advise
from deepzero.profiling.trace_events import Trace, TraceError
from deepzero.profiling.trace_report import between_ranks, page, render
from deepzero.profiling.trace_summary import TraceSummary
from tests.unit.handmade_traces import cpu_trace, event, flight, gpu_trace, ours, save, step
from tests.unit.test_docs import settings_of
from tools import trace_report


def read(path):
    return TraceSummary(Trace(path))


def test_a_cpu_rank(tmp_path):
    summary = read(cpu_trace(tmp_path / "a.json"))
    (found,) = summary.steps
    assert (found.step, summary.trace.rank, summary.trace.on_gpu) == (3, 0, False)
    assert (found.length, found.exposed, found.compute) == pytest.approx((100, 1 + 9 + 2 + 1 + 10 + 5, 100 - 28))
    assert (found.communication, found.copies, found.exposed_copies) == pytest.approx((20 + 40, 5, 5))
    # Operators: 8 to 40 without what lies in waits, 8 to 10 and 18 to 20.
    assert (found.overlap, found.operators) == pytest.approx((37 / 65, 28))
    gaps = [(round(gap.length, 3), gap.phase, gap.cause.what, gap.first, gap.last) for gap in summary.gaps[:3]]
    assert gaps == [
        (10, "boundary", "gradients.reduce_scatter of bucket 5 (wte.weight)", False, True),
        (9, "forward", "parameters.all_gather_forward of bucket 5 (wte)", True, False),
        (5, "step", "offload.parameters_to_device of bucket 5 (wte.weight)", False, False),
    ]
    assert summary.gaps[0].lead == pytest.approx(80 - 51)
    assert sum(gap.length for gap in summary.gaps) == pytest.approx(found.exposed)


def test_a_gpu(tmp_path):
    summary = read(gpu_trace(tmp_path / "a.json"))
    (found,) = summary.steps
    assert summary.trace.on_gpu
    assert (found.length, found.compute, found.operators) == pytest.approx((100, 65, 65))
    assert (found.communication, found.copies, found.exposed) == pytest.approx((39, 4, 24))
    assert found.overlap == pytest.approx(1 - 24 / 43)
    assert [(gap.begin, gap.length, gap.phase, gap.cause.what) for gap in summary.gaps] == [
        (80, 10, "backward", "gradients.reduce_scatter of bucket 3 (wte.weight)"),
        (5, 5, "forward", "parameters.all_gather_forward of bucket 3 (wte)"),
        (40, 5, "forward", "parameters.all_gather_forward of bucket 2 (blocks.0)"),
        (92, 4, "boundary", "offload.parameters_to_device of bucket 3 (wte.weight)"),
    ]


def test_what_overlaps_counts_once(tmp_path):
    kernels = [event(name, begin, end, "kernel", tid) for name, begin, end, tid in (
        ("nccl:a", 1, 5, 7), ("nccl:b", 3, 6, 8), ("gemm", 4, 9, 9),
    )]  # fmt: skip
    (found,) = read(save(tmp_path / "a.json", step(1, 0, 10), kernels)).steps
    assert (found.communication, found.compute, found.exposed) == pytest.approx((5, 5, 3))


def test_a_collective_across_two_steps(tmp_path):
    across = flight("bucket 0|gradients.reduce_scatter", (8, 8), (9, 12))
    a, b = read(save(tmp_path / "a.json", [step(0, 0, 10), step(1, 10, 20)], across)).steps
    assert (a.exposed, b.exposed, a.communication, b.communication) == pytest.approx((1, 2, 2, 2))


def test_nothing_was_sent(tmp_path):
    summary = read(save(tmp_path / "a.json", step(0, 0, 10), event("aten::mm", 1, 9, "cpu_op")))
    assert (summary.steps[0].overlap, summary.gaps, advise(summary)) == (None, [], [])
    assert "Nothing was sent" in page([summary])


PASSES = [ours("forward", 0, 40), ours("backward", 40, 80), ours("boundary", 80, 100)]
FIRST = flight("bucket 9|parameters.all_gather_forward", (0, 0.5), (0.5, 1))
GATHER, REDUCE = "parameters.all_gather_forward", "gradients.reduce_scatter"

CASES = [
    # The first gather of a step cannot be prefetched: it is no evidence.
    (flight(f"bucket 9|{GATHER}", (0, 0.5), (0.5, 20)), []),
    (FIRST + flight(f"bucket 8|{GATHER}", (10, 10.5), (10.5, 20)), ["zero.stage3_prefetch_bucket_size"]),
    (FIRST + flight(f"bucket 8|{GATHER} prefetch", (10, 10.5), (15, 25)), ["zero.stage3_prefetch_bucket_size"]),
    (FIRST + flight(f"bucket 8|{GATHER} prefetch", (1, 1.5), (65, 79)), ["zero.zero_quantized_weights"]),
    (flight(f"bucket 1|{REDUCE}", (50, 50.5), (50.5, 60)), ["zero.overlap_comm"]),
    (flight(f"bucket 1|{REDUCE}", (50, 50.5), (80, 90)), ["zero.reduce_bucket_size"]),
    (
        flight(f"bucket 1|{REDUCE}", (50, 50.5), (60, 70)) + flight(f"bucket 2|{REDUCE}", (70, 70.1), (80, 80.1)),
        ["train_micro_batch_size_per_gpu"],
    ),
    ([ours("publish", 90, 99), *flight("bucket 1|parameters.all_gather", (90, 90.5), (90.5, 98))],
     ["zero.overlap_param_gather"]),
    (flight(f"bucket 8|{GATHER} prefetch", (10, 20), (30, 30)), ["train_micro_batch_size_per_gpu"]),
    ([ours("wait agreement.all_reduce", 90, 99)], [""]),
    ([ours("H2D bucket 1 (x) offload.parameters_fetch", 5, 20)], ["zero.offload_param.device"]),
    ([ours("D2H bucket 1 (x) offload.gradients_to_host", 50, 60)], ["zero.offload_optimizer.ratio"]),
    ([ours("D2H offload.activations_to_host", 5, 20)], ["activation_checkpointing.cpu_checkpointing_min_bytes"]),
    ([ours("step bucket 1 (x)", 82, 98)], ["zero.offload_optimizer.delayed_update"]),
    ([ours("step bucket 1 (x) delayed", 82, 98) | {"tid": 5}], []),
    # A hundredth of the step is not worth a word.
    (FIRST + flight(f"bucket 8|{GATHER}", (10, 10.1), (10.1, 10.4)), []),
]  # fmt: skip


@pytest.mark.parametrize(("events", "expected"), CASES)
def test_advice_follows_from_the_evidence(tmp_path, events, expected):
    path = save(tmp_path / "a.json", step(0, 0, 100), *(e for e in PASSES if events[0]["name"] != e["name"]), events)
    assert [advice.key for advice in advise(read(path))] == expected


def test_advice_names_settings_that_exist():
    known = set(settings_of(RunConfig()))
    source = Path(trace_report.__file__).parents[1] / "deepzero" / "profiling" / "trace_advice.py"
    named = set(re.findall(r"\"((?:zero|activation_checkpointing)\.[a-z0-9_.]+)\"", source.read_text(encoding="utf-8")))
    named |= set(re.findall(r"zero\.(?:zero_|stage3_|offload_\w+\.)[a-z0-9_]+", source.read_text(encoding="utf-8")))
    named |= {"train_micro_batch_size_per_gpu", "gradient_accumulation_steps"}
    assert len(named) >= 11
    assert named - known == set()


def test_a_compressed_file(tmp_path):
    plain, packed = cpu_trace(tmp_path / "a.json"), tmp_path / "b.json.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    broken = tmp_path / "c.json.gz"
    broken.write_bytes(packed.read_bytes()[:10] + b"\7" * 20)
    with pytest.raises(TraceError, match=r"c\.json\.gz cannot be read: Error -3 while decompressing"):
        Trace(broken)
    assert read(packed).steps == read(plain).steps


@pytest.mark.parametrize(("content", "words"), [
    (b"", "is empty"),
    (b"\n", "is empty"),
    (b"step,loss\n", "is no trace"),
    (b'{"traceEvents": [{"ph": "X"', "is no trace, or a part of one"),
    (b'{"loss": 1}', "no list of traceEvents"),
    (b"[1, 2]", "no list of traceEvents"),
    (b'{"traceEvents": [1]}', "no list of traceEvents"),
    (b'{"traceEvents": [{"ph": "X", "name": "a", "ts": 1, "dur": 2}]}', "has no steps"),
    (b"\x1f\x8bnothing", "cannot be read"),
])  # fmt: skip
def test_what_is_no_trace(tmp_path, content, words):
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=words) as error:
        Trace(path)
    assert str(path) in str(error.value)


def test_damage_is_said_in_one_line_and_nothing_is_written(tmp_path, capsys):
    good, bad, out = cpu_trace(tmp_path / "a.json"), tmp_path / "none", tmp_path / "page.html"
    assert trace_report.main([str(good), str(bad), "--html", str(out)]) == 1
    assert capsys.readouterr() == ("", f"trace_report: {bad}: no such file or folder\n")
    assert not out.exists()
    bad.mkdir()
    assert trace_report.main([str(bad)]) == 1
    assert "record some with profiler=torch" in capsys.readouterr().err


def test_the_report_of_a_run_folder(tmp_path, capsys):
    folder, out = tmp_path / "run" / "traces", tmp_path / "page.html"
    folder.mkdir(parents=True)
    of_rank(cpu_trace(folder / "rank1.17.pt.trace.json"), 1, 2)
    cpu_trace(folder / "rank0.18.pt.trace.json")
    assert trace_report.main([str(tmp_path / "run"), "--html", str(out)]) == 0
    printed = capsys.readouterr().out
    assert re.findall(r"^rank (\d) of 2, CPU", printed, re.M) == ["0", "1"]
    assert printed.count("the rank stood still for 28.00 ms (28%); of what was under way 57% was hidden.") == 2
    assert printed.startswith("No rank holds up the others: at work for 77.00 to 77.00 ms a step.\n\n")
    assert "zero.reduce_bucket_size: smaller" in printed
    text = out.read_text(encoding="utf-8")
    # One file: nothing is loaded, no script runs, and what comes from the trace is no markup.
    assert not re.search(r"https?:|<script|<link|@import|url\(|src=", text)
    assert len(re.findall(r'<svg class="chart full".*?</svg>', text)) == 4 and text.count("<rect") > 20
    assert text.count("rank 0 of 2") == text.count("rank 1 of 2") == 1


def of_rank(path, rank, world):
    content = json.loads(path.read_text(encoding="utf-8"))
    content["distributedInfo"] = {"rank": rank, "world_size": world}
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def test_the_rank_that_the_others_wait_for(tmp_path):
    """Rank 0 computes for 40 of 100 ms while a collective is under way from 5 to 95; rank 1 for 80 of them."""
    summaries = []
    for rank, busy in ((0, 40), (1, 80)):
        nccl, gemm = event("nccl:a", 5, 95, "kernel", 7), event("gemm", 10, 10 + busy, "kernel", 9)
        summaries.append(read(of_rank(save(tmp_path / f"{rank}.json", step(1, 0, 100), nccl, gemm), rank, 2)))
    sentence = between_ranks(summaries)
    assert sentence == (
        "Rank 1 is at work the longest, for 90.00 ms of 100.00 ms a step, rank 0 the least, for 50.00 ms: "
        "for up to 40.00 ms of it the others wait for rank 1."
    )
    assert page(summaries).count(sentence) == render(summaries).count(sentence) == 1
    gemm, copy = event("gemm", 0, 10, "kernel", 9), event("Memcpy HtoD", 10, 95, "gpu_memcpy", 8)
    copies = of_rank(save(tmp_path / "2.json", step(1, 0, 100), gemm, copy), 2, 3)
    assert between_ranks([*summaries, read(copies)]).startswith("Rank 2 is at work the longest, for 100.00 ms")
    assert between_ranks(summaries[:1]) == "" and "at work the longest" not in render(summaries[:1])


def test_names_are_no_markup(tmp_path):
    path = save(tmp_path / "a.json", step(0, 0, 100), flight(f"bucket 1|{REDUCE}", (5, 6), (6, 50), "<b>x</b>"))
    text = page([read(path)])
    assert "<b>x</b>" not in text
    assert "&lt;b&gt;x&lt;/b&gt;" in text
