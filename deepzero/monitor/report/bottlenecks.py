"""What limits a run: short statements, each with the figures that it rests on. A figure that is missing is said to be.

Nothing is estimated here. Time is divided as the run's own files divide it: steps and what was between them; within a
step what was waited for, where the run has measured that.
"""

from __future__ import annotations

from typing import NamedTuple

from deepzero.monitor.report.run_data import EXPOSED, HIDDEN, Run, number
from deepzero.utils.formatting import short_bytes, short_seconds

MANY_CALLS = 8  # in a step: fewer are not many
MUCH = 0.2  # from this part of a step on waiting is what limits it first
_SMALLER = "more ranks make the parts smaller"
_STATES = ("zero.stage=1 or higher cuts them", f"{_SMALLER}, offload=optimizer moves them out")
LEVERS = {
    "parameters": (
        "zero.stage=3 cuts the parameters", f"{_SMALLER}, offload=optimizer_and_param moves them to host memory"
    ),
    "gradients": ("zero.stage=2 cuts the gradients", f"{_SMALLER}; grad_accum_dtype=bf16 halves them"),
    "masters": _STATES,
    "moments": _STATES,
    "activations": ("a smaller train_micro_batch_size_per_gpu or model.activation_checkpointing=true lowers them; a "
                    "higher stage does not", ""),
    "buckets": ("a smaller zero.reduce_bucket_size lowers them", ""),
    "gathered": ("smaller zero.stage3_max_live_parameters and zero.stage3_prefetch_bucket_size lower it", ""),
    "secondary": ("it is what zero.zero_hpz_partition_size keeps for faster gathers; 1 switches it off", ""),
    "padding": ("a larger zero.reduce_bucket_size makes fewer ends that are filled up", ""),
}  # fmt: skip
"""What moves a category of a rank's device: the stage that cuts it, then what is left to a run of that stage."""
_CUT_BY = {"parameters": 3, "gradients": 2, "masters": 1, "moments": 1}
PARTS_BETWEEN = {
    "validation (train.eval_every, train.eval_batches)": "train.eval_every",
    "checkpoints (train.save_every)": "train.save_every",
    "the sample (train.sample_tokens)": "train.sample_tokens",
    "loggers that start and end (logger.names)": "logger.names",
    "the profiler (profiler.enabled)": "profiler.enabled",
}


class Limit(NamedTuple):
    """One statement: what it is about, what was found, and what would move it."""

    about: str
    finding: str
    advice: str = ""


def limits_of(run: Run) -> list[Limit]:
    """All that can be said, the most important first."""
    rules = (_end, _speed, _memory, _skipped_steps, _offload, _quantization, _between_steps, _uneven_steps)
    return [limit for rule in rules if (limit := rule(run)) is not None]


def _end(run: Run) -> Limit | None:
    if run.summary.get("status") == "finished":
        return None
    if not run.summary:
        return Limit("End", "There is no summary: the run is still under way, or was ended without a chance to say so.")
    return Limit("End", f"The run did not finish: {run.summary.get('error') or 'no reason was noted'}.")


def _speed(run: Run) -> Limit | None:
    """Communication that was waited for, or computing; or that it was not measured."""
    step, exposed = run.typical("step_seconds"), run.typical(EXPOSED)
    if step is None:
        return None
    if exposed is None:
        unknown = "How much of it is waiting for other ranks was not measured in this run."
        return Limit("Speed", f"A step takes {short_seconds(step)}. {unknown}")
    share = min(1.0, exposed / step)
    text = f"{share:.0%} of a step ({short_seconds(exposed)} of {short_seconds(step)}) is waiting for communication"
    if (hidden := run.typical(HIDDEN)) is not None:
        text += f"; {hidden:.0%} of the time in which data was under way was hidden behind computing"
    if share < MUCH:
        mfu = run.typical("mfu")
        reached = "" if mfu is None else f"It reaches {mfu:.0%} of the devices' peak."
        return Limit("Speed", f"Computing limits this run, not communication: {text}.", reached)
    ways = ["a larger micro-batch, which computes longer for the same bytes"]
    ways += ["zero.overlap_comm=true"] * (run.settings.get("zero.overlap_comm") is False)
    ways += ["zero.stage3_prefetch_bucket_size", "a lower stage, where it fits"] * (run.stage == 3)
    ways += ["larger buckets, for fewer calls"] * (run.total_sent("calls") > MANY_CALLS)
    ways += ["ZeRO++ between nodes"] * (run.total_sent("between_node_bytes") > 0)
    return Limit("Speed", f"Communication limits this run: {text}.", f"What may make it faster: {'; '.join(ways)}.")


def _memory(run: Run) -> Limit | None:
    """The largest category of what a rank's device held."""
    held = {category: size for category in LEVERS if (size := run.held(category))}
    if not held:
        return None
    beside = ""
    if "activations" in held and len(held) > 1 and not any(run.summary.get("peak_device_bytes_per_rank") or ()):
        # On a CPU the residual is the process's: the interpreter, libraries and the allocator are in it.
        beside = f" Beside that the process grew by {short_bytes(held.pop('activations'))} since the start of the run:"
        beside += " activations, temporaries, libraries."
    largest = max(held, key=held.__getitem__)
    text = f"The largest part of what a rank's ledger names is {largest}: {short_bytes(held[largest])}, "
    text += f"{held[largest] / sum(held.values()):.0%} of it"
    if largest == "activations":
        text += " (a residual: the peak of memory over what was in use before the first step)"
    stage, more = LEVERS[largest]
    advice = ", ".join(filter(None, (stage, more)))
    if run.stage is not None and run.stage >= _CUT_BY.get(largest, 4):
        advice = more
    # A setting's name keeps its small letter.
    advice = advice if "." in advice.split(" ")[0] else advice[0].upper() + advice[1:]
    return Limit("Memory", f"{text}.{beside}", f"{advice}.")


def _skipped_steps(run: Run) -> Limit | None:
    if not (skipped := [entry["step"] for entry in run.steps if entry.get("skipped") is True]):
        return None
    text = f"{len(skipped)} of {len(run.steps)} steps were skipped, as gradients overflowed in fp16; the last was step "
    advice = "A few at the beginning are how the loss scale is found. precision=bf16 has none."
    return Limit("Skipped steps", f"{text}{max(skipped):g}.", advice)


def _offload(run: Run) -> Limit | None:
    """The part of the offload pipeline that a step stood still for the longest."""
    step, waits = run.typical("step_seconds"), {}
    for part in run.offload_parts:
        took, hidden = run.typical(f"offload/{part}/seconds"), run.typical(f"offload/{part}/hidden")
        if took is not None and hidden is not None:
            waits[part] = took * (1 - hidden)
    if not waits or not step:
        return None
    worst = max(waits, key=waits.__getitem__)
    text = f"Of the offload pipeline a step waits longest for {worst.replace('_', ' ')}: "
    text += f"{short_seconds(waits[worst])} of {short_seconds(step)}."
    advice = "zero.offload_optimizer.ratio below 1 leaves a part on the device; delayed_update hides the CPU's step."
    return Limit("Offload", text, advice if waits[worst] >= MUCH * step else "")


def _quantization(run: Run) -> Limit | None:
    counts = [count for _, count in run.series("quantization/unquantized") if count is not None]
    if not counts or not counts[-1]:
        return None
    return Limit("Quantisation", f"{counts[-1]:g} buckets fell below the bound on their noise and travel unquantised.")


def _between_steps(run: Run) -> Limit | None:
    """Validation, checkpoints, start and sampling, where they take a large part."""
    wall = number(run.summary.get("wall_seconds"))
    first = number(run.summary.get("resumed_from_step")) or 0
    took = sum(number(entry.get("step_seconds")) or 0 for entry in run.steps if entry["step"] > first)
    if not wall or not took or took >= (1 - MUCH) * wall:
        return None
    among = ", ".join(["the start", *(name for name, key in PARTS_BETWEEN.items() if run.settings.get(key))])
    return Limit("Between steps", f"{1 - took / wall:.0%} of the {wall:.1f} s were not training steps: {among}.")


def _uneven_steps(run: Run) -> Limit | None:
    """A step that took much longer than most."""
    usual = run.typical("step_seconds")
    timed = [(t, entry["step"]) for entry in run.steady if (t := number(entry.get("step_seconds"))) is not None]
    if not usual or len(timed) < 5 or max(timed)[0] < 3 * usual:
        return None
    slowest, step = max(timed)
    took = short_seconds(slowest)
    return Limit("Uneven steps", f"Step {step:g} took {took}, {slowest / usual:.1f} times the median.")
