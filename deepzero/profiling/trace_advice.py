"""Which setting would move a rank's gaps, and why: only where the trace shows it.

A rule looks at gaps of one origin. It speaks when they take at least :data:`OF_STEP` of the steps and
:data:`OF_EXPOSED` of what was exposed, and says how much that is; what it names is where to look, not a promise. **A
trace shows what a step waits for, not what it would do with another setting**: change one, and record again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from deepzero.profiling.trace_events import inside, length, times_of
from deepzero.profiling.trace_summary import GATHERS, REDUCTIONS, Gap, TraceSummary

OF_STEP = 0.03
OF_EXPOSED = 0.10
AT_ONCE = 0.1  # a wait that begins after this part of the time from launch to completion follows its launch directly
STOOD = 0.1  # milliseconds: a shorter wait does not tell whether the messages had arrived before it
FULL = 0.7  # gathers that are under way for this part of forward and backward leave no room to launch them earlier
PREFETCH, MICRO_BATCH = "zero.stage3_prefetch_bucket_size", "train_micro_batch_size_per_gpu"


class Advice(NamedTuple):
    """One setting to try."""

    key: str  # of the configuration; empty where no setting helps
    direction: str
    reason: str
    milliseconds: float  # of an average step, what it is about


def advise(summary: TraceSummary) -> list[Advice]:
    """What to try, what it is about most first; empty where little is exposed."""
    mean, steps, found = summary.mean, len(summary.steps), []
    whole = max(mean.length, 1e-9)
    for chosen, words in RULES:
        gaps = [gap for gap in summary.gaps if chosen(gap)]
        milliseconds = sum(gap.length for gap in gaps) / steps
        if milliseconds >= OF_STEP * whole and milliseconds >= OF_EXPOSED * mean.exposed:
            number = len({gap.collective for gap in gaps}) / steps
            key, direction, reason = words(summary, gaps) if callable(words) else words
            reason = reason.format(count=f"{number:.0f}" if number >= 1 else "less than one")
            found.append(Advice(key, direction, reason, milliseconds))
    if mean.host_steps >= OF_EXPOSED * whole:
        found.append(Advice(
            "zero.offload_optimizer.delayed_update", "true, or a smaller zero.offload_optimizer.ratio",
            f"the optimizer's step in host memory takes {mean.host_steps / whole:.0%} of the steps, while the model "
            "stands; delayed by one step it runs beside the next forward and backward pass (other bits), and with a "
            "smaller ratio less of it is done by the CPU",
            mean.host_steps,
        ))  # fmt: skip
    return sorted(found, key=lambda advice: -advice.milliseconds)


def _gather(gap: Gap, prefetched: bool) -> bool:
    """A wait for a gather that was, or was not, launched ahead of its use."""
    ahead = gap.cause.label.note.endswith(" prefetch")
    return gap.cause.kind in GATHERS and not gap.cause.launching and ahead == prefetched


def _reduction(gap: Gap) -> str:
    """Of a wait for a reduction: ``in line`` with its launch in the backward pass, at its ``tail``, or ``late``."""
    if not gap.cause.kind.startswith(REDUCTIONS) or gap.cause.launching:
        return ""
    waited = gap.cause.label.verb == "wait" and gap.lead is not None and gap.phase == "backward"
    if waited and (gap.lead or 0.0) <= AT_ONCE * ((gap.lead or 0.0) + gap.length):
        return "in line"
    return "tail" if gap.phase == "boundary" or gap.last else "late"


def _say_prefetched(summary: TraceSummary, gaps: Sequence[Gap]) -> tuple[str, str, str]:
    trace = summary.trace
    passes = times_of(phase for phase in trace.phases if phase.label.verb in ("forward", "backward"))
    gathers = [span for span in trace.communication if span.kind in GATHERS]
    if not trace.on_gpu:
        # A lane's end is the end of a wait. Only where somebody stood in it was that the moment of arrival.
        known = {gap.cause.flight for gap in gaps if gap.cause.label.verb == "wait" and gap.length >= STOOD}
        gathers = [span for span in gathers if span.begin in known]
    flown, room = times_of(gathers), length(passes)
    busy = sum(length(inside(flown, begin, end)) for begin, end in passes) / room if room else 0.0
    leads = [gap.lead for gap in gaps if gap.lead is not None]
    ahead = f", launched {sum(leads) / len(leads):.2g} ms ahead on average" if leads else ""
    found = f"gathers were prefetched{ahead}, and have not arrived when they are needed; "
    if busy < FULL:
        found += f"that is known of {busy:.0%} of forward and backward, so there may be room to launch them earlier"
        return PREFETCH, "larger", found
    found += f"they are under way for at least {busy:.0%} of forward and backward, so launching them earlier cannot "
    found += "help: fewer bytes can, or more computation for each gather"
    return "zero.zero_quantized_weights", f"true, or a larger {MICRO_BATCH}", found


Words = tuple[str, str, str] | Callable[[TraceSummary, Sequence[Gap]], tuple[str, str, str]]
RULES: tuple[tuple[Callable[[Gap], bool], Words], ...] = (
    (lambda gap: _gather(gap, False) and not gap.first, (
        PREFETCH, "larger",
        "{count} gathers a step were launched only when their module came to run; with more prefetch they are "
        "launched while the modules before them compute. What is gathered at once grows, up to "
        "zero.stage3_max_live_parameters, which may have to grow with it",
    )),
    (lambda gap: _gather(gap, True), _say_prefetched),
    (lambda gap: _reduction(gap) == "in line", (
        "zero.overlap_comm", "true",
        "{count} reductions a step were waited for right where they were launched, in the backward pass; with a "
        "second bucket the backward pass goes on while the first one travels",
    )),
    (lambda gap: _reduction(gap) == "tail", (
        "zero.reduce_bucket_size", "smaller",
        "the step waits at its boundary for the last reductions, beside which nothing is left to compute; with smaller "
        "buckets less is under way when the backward pass ends",
    )),
    (lambda gap: _reduction(gap) == "late", (
        MICRO_BATCH, "larger, or zero.zero_quantized_gradients=true",
        "reductions do not keep up with the backward pass: a bucket is full before one before it has arrived. More "
        "computation for each reduction helps, or fewer bytes",
    )),
    (lambda gap: gap.phase == "publish" and gap.cause.kind == "parameters.all_gather" and not gap.cause.launching, (
        "zero.overlap_param_gather", "true (stages 1 to 3), or a larger gradient_accumulation_steps",
        "new parameters are gathered at the end of each step, when there is nothing to compute; they can travel under "
        "the next forward pass, or, with more micro-batches in a step, less often for the same data",
    )),
    (lambda gap: gap.cause.launching and gap.cause.kind != "agreement.all_reduce", (
        MICRO_BATCH, "larger, or fewer bytes: zero.zero_quantized_weights=true, zero.zero_quantized_gradients=true",
        "the calls that start {count} collectives a step stand still themselves: gloo hands messages to the "
        "system in the calling thread, and no order of launches hides that",
    )),
    (lambda gap: gap.cause.kind == "agreement.all_reduce", (
        "", "",
        "this rank waits at the step's agreement, a few bytes, for the slowest rank: no setting of ZeRO changes that. "
        "Give traces of several ranks: the one that waits least here is the slowest",
    )),
    (lambda gap: gap.cause.kind == "offload.parameters_fetch", (
        "zero.offload_param.device", "none, if the parameters fit",
        "{count} copies a step bring parameters from host memory, and nothing is computed beside them",
    )),
    (lambda gap: gap.cause.kind.startswith("offload.activations"), (
        "activation_checkpointing.cpu_checkpointing_min_bytes", "larger",
        "{count} copies a step take activations to the host or back, and nothing is computed beside them; with "
        "a higher bound fewer of them leave the device",
    )),
    (lambda gap: gap.cause.kind.startswith(("offload.gradients", "offload.parameters_to_device")), (
        "zero.offload_optimizer.ratio", "smaller",
        "{count} copies a step take gradients to the host or parameters back, and nothing is computed beside "
        "them; with a smaller ratio a part of the states stays on the device",
    )),
)  # fmt: skip
"""Which gaps, and what to say of them: key, direction, reason."""
