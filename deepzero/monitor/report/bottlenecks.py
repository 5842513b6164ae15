"""What limits a run: short statements, each with the figures that it rests on. A figure that is missing is said to be.

Nothing is estimated here. Time is divided as the run's own files divide it: steps and what was between them; within a
step what was waited for, where the run has measured that.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepzero.monitor.report.run_data import Run, number
from deepzero.utils.formatting import short_bytes, short_seconds

EXPOSED = "comm/exposed_seconds"
IN_FLIGHT = "comm/in_flight_seconds"
HIDDEN = "comm/hidden_fraction"
"""Keys of ``metrics.jsonl``: seconds in which a step stood still for communication, seconds in which some was under
way, and the part of the latter that was hidden."""
MANY_CALLS = 8
"""In a step: fewer are not many."""
MUCH = 0.2
"""From this part of a step on waiting is what limits it first."""
ON_DEVICE = (
    "parameters", "secondary", "gradients", "masters", "moments", "gathered", "buckets", "padding", "activations",
)  # fmt: skip
LEVERS = {
    "parameters": "zero.stage=3 cuts the parameters",
    "gradients": "zero.stage=2 cuts the gradients; grad_accum_dtype=bf16 halves them",
    "masters": "zero.stage=1 or higher cuts them, more ranks make the parts smaller, offload=optimizer moves them out",
    "moments": "zero.stage=1 or higher cuts them, more ranks make the parts smaller, offload=optimizer moves them out",
    "activations": "a smaller train_micro_batch_size_per_gpu or model.activation_checkpointing=true lowers them; a "
    "higher stage does not",
    "buckets": "a smaller zero.reduce_bucket_size lowers them",
    "gathered": "smaller zero.stage3_max_live_parameters and zero.stage3_prefetch_bucket_size lower it",
    "secondary": "it is what zero.zero_hpz_partition_size keeps for faster gathers; 1 switches it off",
    "padding": "a larger zero.reduce_bucket_size makes fewer ends that are filled up",
}
"""What moves a category; stages that a run has already are left out by :func:`memory_limit`."""


@dataclass(frozen=True)
class Limit:
    """One statement: what it is about, what was found, and what would move it."""

    about: str
    finding: str
    advice: str = ""


def limits_of(run: Run) -> list[Limit]:
    """All that can be said, the most important first."""
    found = [ended_early(run), speed_limit(run), memory_limit(run), skipped_steps(run)]
    found += [exposed_offload(run), noisy_quantization(run), time_between_steps(run), slow_steps(run)]
    return [limit for limit in found if limit is not None]


def ended_early(run: Run) -> Limit | None:
    """A run that is not finished: why."""
    status = run.summary.get("status")
    if status == "finished":
        return None
    if not run.summary:
        return Limit("End", "There is no summary: the run is still under way, or was ended without a chance to say so.")
    return Limit("End", f"The run did not finish: {run.summary.get('error') or 'no reason was noted'}.")


def speed_limit(run: Run) -> Limit | None:
    """Communication that was waited for, or computing; or that it was not measured."""
    step, exposed = run.typical("step_seconds"), run.typical(EXPOSED)
    if step is None:
        return None
    if exposed is None:
        return Limit(
            "Speed",
            f"A step takes {short_seconds(step)}. How much of it is waiting for other ranks was not measured in this "
            "run.",
        )
    share = min(1.0, exposed / step)
    text = f"{share:.0%} of a step ({short_seconds(exposed)} of {short_seconds(step)}) is waiting for communication"
    if (hidden := run.typical(HIDDEN)) is not None:
        text += f"; {hidden:.0%} of the time in which data was under way was hidden behind computing"
    if share >= MUCH:
        return Limit("Speed", f"Communication limits this run: {text}.", _faster(run))
    return Limit("Speed", f"Computing limits this run, not communication: {text}.", _by_mfu(run))


def _faster(run: Run) -> str:
    """What of the usual remedies is left to this run."""
    sent = run.sent().values()
    calls = sum(number((entry.get("measured") or {}).get("calls")) or 0 for entry in sent)
    between = sum(number((entry.get("measured") or {}).get("between_node_bytes")) or 0 for entry in sent)
    ways = ["a larger micro-batch, which computes longer for the same bytes"]
    if run.setting("zero.overlap_comm") is False:
        ways.append("zero.overlap_comm=true")
    if run.stage == 3:
        ways += ["zero.stage3_prefetch_bucket_size", "a lower stage, where it fits"]
    if calls > MANY_CALLS:
        ways.append("larger buckets, for fewer calls")
    if between:
        ways.append("ZeRO++ between nodes")
    return f"What may make it faster: {'; '.join(ways)}."


def _by_mfu(run: Run) -> str:
    mfu = run.typical("mfu")
    return "" if mfu is None else f"It reaches {mfu:.0%} of the devices' peak."


def memory_limit(run: Run) -> Limit | None:
    """The largest category of what a rank's device held."""
    held = {category: size for category in ON_DEVICE if (size := run.held(category))}
    if not held:
        return None
    beside = ""
    if "activations" in held and len(held) > 1 and not any(run.summary.get("peak_device_bytes_per_rank") or ()):
        # On a CPU the residual is the process's: the interpreter, libraries and the allocator are in it.
        beside = f" Beside that the process grew by {short_bytes(held.pop('activations'))} since the start of the run:"
        beside += " activations, temporaries, libraries."
    largest = max(held, key=held.__getitem__)
    share = held[largest] / sum(held.values())
    text = (
        f"The largest part of what a rank's ledger names is {largest}: {short_bytes(held[largest])}, {share:.0%} of it"
    )
    if largest == "activations":
        text += " (a residual: the peak of memory over what was in use before the first step)"
    return Limit("Memory", f"{text}.{beside}", sentence(_lever(largest, run.stage)))


def _lever(category: str, stage: int | None) -> str:
    """What moves a category, without a stage that the run has."""
    has = {"parameters": 3, "gradients": 2, "masters": 1, "moments": 1}.get(category)
    if has is None or stage is None or stage < has:
        return LEVERS[category]
    rest = {
        "parameters": "more ranks make the parts smaller, offload=optimizer_and_param moves them to host memory",
        "gradients": "more ranks make the parts smaller; grad_accum_dtype=bf16 halves them",
    }
    return rest.get(category, LEVERS[category].partition(", ")[2])


def skipped_steps(run: Run) -> Limit | None:
    """fp16: steps that overflowed."""
    skipped = [entry["step"] for entry in run.steps if entry.get("skipped") is True]
    if not skipped:
        return None
    text = f"{len(skipped)} of {len(run.steps)} steps were skipped, as gradients overflowed in fp16; the last was step "
    advice = "A few at the beginning are how the loss scale is found. precision=bf16 has none."
    return Limit("Skipped steps", f"{text}{max(skipped):g}.", advice)


def exposed_offload(run: Run) -> Limit | None:
    """The part of the offload pipeline that a step stood still for the longest."""
    step, waits = run.typical("step_seconds"), {}
    for part in offload_parts(run):
        took, hidden = run.typical(f"offload/{part}/seconds"), run.typical(f"offload/{part}/hidden")
        if took is not None and hidden is not None:
            waits[part] = took * (1 - hidden)
    if not waits or not step:
        return None
    worst = max(waits, key=waits.__getitem__)
    text = f"Of the offload pipeline a step waits longest for {worst.replace('_', ' ')}: "
    text += f"{short_seconds(waits[worst])} of "
    advice = "zero.offload_optimizer.ratio below 1 leaves a part on the device; delayed_update hides the CPU's step."
    return Limit("Offload", f"{text}{short_seconds(step)}.", advice if waits[worst] >= MUCH * step else "")


def offload_parts(run: Run) -> list[str]:
    """The names of the pipeline's parts, as far as this run has them."""
    return sorted({key.split("/")[1] for key in run.keys if key.startswith("offload/") and key.count("/") == 2})


def noisy_quantization(run: Run) -> Limit | None:
    """Buckets that were taken off quantisation."""
    counts = [count for count in run.column("quantization/unquantized") if count is not None]
    if not counts or not counts[-1]:
        return None
    return Limit("Quantisation", f"{counts[-1]:g} buckets fell below the bound on their noise and travel unquantised.")


def time_between_steps(run: Run) -> Limit | None:
    """Validation, checkpoints, start and sampling, where they take a large part."""
    wall = number(run.summary.get("wall_seconds"))
    first = number(run.summary.get("resumed_from_step")) or 0
    took = sum(number(entry.get("step_seconds")) or 0 for entry in run.steps if entry["step"] > first)
    if not wall or not took or took >= (1 - MUCH) * wall:
        return None
    parts = {
        "validation (train.eval_every, train.eval_batches)": run.setting("train.eval_every"),
        "checkpoints (train.save_every)": run.setting("train.save_every"),
        "the sample (train.sample_tokens)": run.setting("train.sample_tokens"),
        "loggers that start and end (logger.names)": run.setting("logger.names"),
        "the profiler (profiler.enabled)": run.setting("profiler.enabled"),
    }
    among = ", ".join(["the start", *(name for name, on in parts.items() if on)])
    return Limit("Between steps", f"{1 - took / wall:.0%} of the {wall:.1f} s were not training steps: {among}.")


def slow_steps(run: Run) -> Limit | None:
    """A step that took much longer than most."""
    usual = run.typical("step_seconds")
    timed = [(t, entry["step"]) for entry in run.steady if (t := number(entry.get("step_seconds"))) is not None]
    if not usual or len(timed) < 5 or max(timed)[0] < 3 * usual:
        return None
    slowest, step = max(timed)
    took = short_seconds(slowest)
    return Limit("Uneven steps", f"Step {step:g} took {took}, {slowest / usual:.1f} times the median.")


def sentence(text: str) -> str:
    """With a capital and a full stop, unless it begins with a setting's name."""
    return text if not text else (text if "." in text.split(" ")[0] else text[0].upper() + text[1:]) + "."
