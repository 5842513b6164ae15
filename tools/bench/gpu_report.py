"""The page of ``tools.bench.gpu``, from ``results.json`` as far as it has come."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import date
from typing import Any

from tools.bench.gpu_offload import ENTRIES, GIB, Entry
from tools.bench.report import LOSS_TOLERANCE, page_text, table
from tools.bench.stats import median
from tools.bench.workload import Workload

WITHOUT_GPU = (
    "**No GPU took part.** Tiny models on the CPU, to see that everything runs: no number here measures anything"
)

Rows = dict[str, list[dict[str, Any]]]
"""Entry's name to what its workers found, round by round."""


def page(found: dict[str, Any]) -> str:
    """The whole page."""
    return page_text(date.today().isoformat(), found["facts"], sections(found), found["command"])


def sections(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Title and body of every part that there is something of."""
    parts = []
    if "bits" in found:
        parts.append(("Bits: the GPU tests of offload", bits(found["bits"])))
    if "speed" in found:
        rows: Rows = found["speed"]["rows"]
        parts.append(("Setting", setting(found["speed"])))
        parts.append(("Speed and memory", speed_table(rows, Workload(**found["speed"]["work"]))))
        parts.append(("The pipeline of the last step", pipeline_table(rows)))
        parts.append(("Losses", loss_table(rows)))
        parts.append(("Host memory of deepzero", memory_lines(rows)))
    if "largest" in found:
        parts.append(("The largest model that trains", largest(found["largest"])))
    failed = [f"- {name}: {one['error']}" for name, one in _all(found) if "error" in one]
    left_out = [f"- {text}" for text in found["skipped"]]
    if failed or left_out:
        parts.append(("Left out and failed", "\n".join([*left_out, *failed])))
    return [(title, body) for title, body in parts if body]


def _all(found: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    speed: Rows = found.get("speed", {}).get("rows", {})
    return [(name, one) for name, several in speed.items() for one in several]


def bits(tests: dict[str, Any]) -> str:
    """Counts, and what failed."""
    if "error" in tests:
        return f"The tests did not come to an end ({tests['seconds']:.0f} s).\n\n{_block(tests['error'])}"
    counts = (
        f"{tests['passed']} passed, {tests['failed']} failed, {tests['skipped']} skipped, in {tests['seconds']:.0f} s."
    )
    return "\n\n".join([counts, *(f"`{one['name']}`\n\n{_block(one['text'])}" for one in tests["failures"])])


def _block(text: str) -> str:
    return f"```text\n{text.strip()}\n```"


def setting(speed: dict[str, Any]) -> str:
    """What the contenders did."""
    work = Workload(**speed["work"])
    size = next((f"{r['parameters'] / 1e9:.3g} billion parameters, " for r in _finished(speed["rows"])), "")
    return (
        f"GPT of {size}{work.n_layer} layers, width {work.n_embd}, vocabulary {work.vocab_size}; {work.micro_batch} x "
        f"{work.block_size} tokens a step; one rank on {work.device}, {work.threads} threads; bf16 with fp32 masters, "
        f"AdamW, clipping at {work.clip}. In each round every contender in a fresh process: {speed['warmup']} untimed "
        f"steps, then {speed['blocks']} blocks of {speed['steps']}; a sample is a block's time over its steps. *Host* "
        "is what the system has less while it runs, *arena* deepzero's one allocation in it. *Device*: the most that "
        "torch's allocator had given out during the steps."
    )


def _finished(rows: Rows) -> list[dict[str, Any]]:
    return [one for several in rows.values() for one in several if one.get("seconds")]


def _entries(rows: Rows) -> list[tuple[Entry, list[dict[str, Any]]]]:
    """Those with samples, also of workers that were ended in the middle."""
    found = [(entry, [one for one in rows.get(entry.name, []) if one.get("seconds")]) for entry in ENTRIES]
    return [(entry, several) for entry, several in found if several]


def _samples(several: Sequence[dict[str, Any]]) -> list[float]:
    return [seconds for one in several for seconds in one["seconds"]]


def speed_table(rows: Rows, work: Workload) -> str:
    """Medians and minima over all rounds, and the ratio to DeepSpeed's same stage."""
    alive = _entries(rows)
    middle = {entry.name: median(_samples(several)) for entry, several in alive}
    best = {entry.name: min(_samples(several)) for entry, several in alive}

    def over(entry: Entry, values: dict[str, float]) -> str:
        return f"{values[entry.name] / values[entry.peer]:.2f}" if entry.peer in values else "-"

    lines = [
        [
            entry.title,
            f"{middle[entry.name]:.3f}",
            f"{best[entry.name]:.3f}",
            str(len(_samples(several))),
            f"{work.tokens_per_step / middle[entry.name]:.0f}",
            over(entry, middle),
            over(entry, best),
            _gib(several, "device_bytes"),
            _gib(several, "host_bytes"),
            _gib(several, "arena_bytes"),
            f"{median([one['build_seconds'] for one in several]):.0f}",
        ]
        for entry, several in alive
    ]
    head = ["contender", "median s", "best s", "samples", "tokens/s", "/ DeepSpeed", "of best"]
    return table(head + ["device GiB", "host GiB", "arena GiB", "build s"], lines) if lines else ""


def _gib(several: Sequence[dict[str, Any]], key: str) -> str:
    most = max(one.get(key, 0) for one in several)
    return f"{most / GIB:.2f}" if most else "-"


def pipeline_table(rows: Rows) -> str:
    """``engine.offload_report()``: which part moved how much, how fast, and how much of that cost no time."""
    lines = []
    for entry, several in _entries(rows):
        for part, leg in several[-1].get("pipeline", {}).items():
            numbers = (f"{leg['bytes'] / 1e9:.3f}", f"{leg['seconds']:.3f}", f"{leg['gb_per_second']:.1f}")
            lines.append([entry.title, part, *numbers, f"{leg['hidden']:.0%}"])
    return table(["contender", "part", "GB", "seconds", "GB/s", "hidden"], lines) if lines else ""


def loss_distance(one: Sequence[float], other: Sequence[float]) -> float:
    """The largest relative distance over the steps that both have done; infinite where one is not finite.

    Example:
        >>> loss_distance([2.0, 1.0], [2.0, 1.1, 9.0])
        0.1
    """
    pairs = list(zip(one, other, strict=False))
    if not all(math.isfinite(a) and math.isfinite(b) for a, b in pairs):
        return math.inf
    return round(max((abs(a - b) / abs(a) for a, b in pairs), default=0.0), 12)


def loss_table(rows: Rows) -> str:
    """First and last losses, against the first contender that offloads."""
    alive = _entries(rows)
    if not alive:
        return ""
    base, several = next(((e, s) for e, s in alive if "offload_optimizer" in e.zero), alive[0])
    reference, lines, wrong = several[0]["losses"], [], []
    for entry, found in alive:
        losses = found[0]["losses"]
        distance = loss_distance(reference, losses)
        finite = all(math.isfinite(loss) for loss in losses)
        if not finite or (distance > LOSS_TOLERANCE and not entry.late):
            wrong.append(entry.title)
        same = "the same" if reference[: len(losses)] == losses[: len(reference)] else f"{distance:.3%}"
        lines.append([entry.title, f"{losses[0]:.4f}", f"{losses[-1]:.4f}", str(len(losses)), same])
    verdict = f"**Not the same work: {', '.join(wrong)}.**" if wrong else "All are finite, and do the same work."
    late = "A delayed update takes another course by definition, and is not judged."
    head = ["contender", "first", "last", "steps", f"furthest from {base.title}"]
    return f"{table(head, lines)}\n\n{verdict} The limit is {LOSS_TOLERANCE:.0%}, bf16 noise some 0.2 %. {late}"


def memory_lines(rows: Rows) -> str:
    """The engine's own words, and the ledger where it differs from its closed form."""
    lines = []
    for entry, several in _entries(rows):
        if several[-1].get("described"):
            lines.append(f"- {entry.title}: {several[-1]['described']}")
        for category, sizes in several[-1].get("memory", {}).items():
            known = category.startswith("host_") and sizes["predicted"] is not None
            if known and sizes["predicted"] != sizes["measured"]:
                lines.append(f"  - **{category}: predicted {sizes['predicted']:,}, measured {sizes['measured']:,}**")
    return "\n".join(lines)


def largest(found: dict[str, Any]) -> str:
    """Every attempt, the last of which may have trained."""
    lines = []
    for one in found["attempts"]:
        work, seconds = Workload(**one["work"]), one.get("seconds", [])
        rate = f"{work.tokens_per_step / median(seconds):.0f}" if seconds else "-"
        lines.append(
            [
                f"{one['elements'] / 1e9:.4g} billion",
                f"{work.n_layer} x {work.n_embd}",
                one["parts_on"],
                f"{one['needed'] / GIB:.2f}",
                _gib([one], "host_bytes"),
                _gib([one], "arena_bytes"),
                _gib([one], "device_bytes"),
                f"{one.get('build_seconds', math.nan):.0f}",
                f"{median(seconds):.2f}" if seconds else "-",
                rate,
                "trains" if one.get("trains") else "no",
            ]
        )
    head = ["parameters", "layers x width", "built on", "needed GiB", "host GiB", "arena GiB", "device GiB", "build s"]
    room = f"The host had {found['available'] / GIB:.1f} GiB, of which {found['usable'] / GIB:.1f} were to be used."
    how = (
        "Stage 3, optimizer and parameters in host memory, grad_accum_dtype=bf16, activation checkpointing, built in "
        "zero.Init(dtype=bfloat16), whose parts wait where *built on* says. *Needed* is the closed form's host memory."
    )
    errors = [
        f"{one['elements'] / 1e9:.4g} billion:\n\n{_block(one['error'])}" for one in found["attempts"] if "error" in one
    ]
    said = [
        f"Losses {[round(loss, 3) for loss in o['losses']]}. {o.get('described', '')}"
        for o in found["attempts"]
        if o.get("trains")
    ]
    rows = (
        [table([*head, "s a step", "tokens/s", "verdict"], lines)]
        if lines
        else ["None was tried: no shape fits, or there was no time."]
    )
    return "\n\n".join([how, room, *rows, *said, *errors])
