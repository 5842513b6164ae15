"""Which setting would move a rank's gaps, and why: only where the trace shows it.

A rule looks at gaps of one origin. It speaks when they take at least :data:`OF_STEP` of the steps and
:data:`OF_EXPOSED` of what was exposed, and says how much that is; what it names is where to look, not a promise. **A
trace shows what a step waits for, not what it would do with another setting**: change one, and record again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from deepzero.profiling.trace_events import inside, length, times_of
from deepzero.profiling.trace_summary import GATHERS, REDUCTIONS, Gap, TraceSummary

OF_STEP = 0.03
OF_EXPOSED = 0.10
AT_ONCE = 0.1
"""A wait that begins after this part of the time from launch to completion follows its launch directly."""
STOOD = 0.1
"""Milliseconds: a shorter wait does not tell whether the messages had arrived before it."""
FULL = 0.7
"""Gathers that are under way for this part of forward and backward leave no room to launch them earlier."""

PREFETCH, BUCKET = "zero.stage3_prefetch_bucket_size", "zero.reduce_bucket_size"
MICRO_BATCH, ACCUMULATION = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


@dataclass(frozen=True)
class Advice:
    """One setting to try."""

    key: str
    """Of the configuration; empty where no setting helps."""
    direction: str
    reason: str
    milliseconds: float
    """Of an average step, what it is about."""


@dataclass(frozen=True)
class _Evidence:
    summary: TraceSummary
    gaps: Sequence[Gap]
    """What the rule is about."""

    @property
    def per_step(self) -> float:
        return sum(gap.length for gap in self.gaps) / max(1, len(self.summary.steps))

    @property
    def share(self) -> float:
        return self.per_step * len(self.summary.steps) / max(self.summary.total("length"), 1e-9)

    @property
    def count(self) -> str:
        number = len({gap.collective for gap in self.gaps}) / max(1, len(self.summary.steps))
        return f"{number:.0f}" if number >= 1 else "less than one"


def advise(summary: TraceSummary) -> list[Advice]:
    """What to try, what it is about most first; empty where little is exposed."""
    found = []
    exposed = summary.total("exposed")
    for chosen, words in RULES:
        evidence = _Evidence(summary, [gap for gap in summary.gaps if chosen(gap)])
        milliseconds = sum(gap.length for gap in evidence.gaps)
        if evidence.share >= OF_STEP and milliseconds >= OF_EXPOSED * exposed:
            key, direction, reason = words(evidence)
            found.append(Advice(key, direction, reason, evidence.per_step))
    host = summary.total("host_steps")
    if host >= OF_EXPOSED * summary.total("length"):
        found.append(_host_step(summary, host))
    return sorted(found, key=lambda advice: -advice.milliseconds)


Words = tuple[str, str, str]


def _late_gather(gap: Gap) -> bool:
    return gap.kind in GATHERS and not gap.launching and not gap.prefetched and not gap.first


def _say_late(found: _Evidence) -> Words:
    return (
        PREFETCH, "larger",
        f"{found.count} gathers a step were launched only when their module came to run; with more prefetch they are "
        "launched while the modules before them compute. What is gathered at once grows, up to "
        "zero.stage3_max_live_parameters, which may have to grow with it",
    )  # fmt: skip


def _prefetched(gap: Gap) -> bool:
    return gap.kind in GATHERS and not gap.launching and gap.prefetched


def _say_prefetched(found: _Evidence) -> Words:
    trace = found.summary.trace
    passes = times_of(phase for phase in trace.phases if phase.label and phase.label.verb in ("forward", "backward"))
    gathers = [s for s in trace.communication if s.label is not None and s.label.note.split(" ")[0] in GATHERS]
    if trace.device == "cpu":
        # A lane's end is the end of a wait. Only where somebody stood in it was that the moment of arrival.
        known = {gap.flight for gap in found.gaps if gap.label and gap.label.verb == "wait" and gap.length >= STOOD}
        gathers = [span for span in gathers if span.begin in known]
    flown = times_of(gathers)
    room = length(passes)
    busy = sum(length(inside(flown, begin, end)) for begin, end in passes) / room if room else 0.0
    leads = [gap.lead for gap in found.gaps if gap.lead is not None]
    ahead = f", launched {sum(leads) / len(leads):.2g} ms ahead on average" if leads else ""
    if busy >= FULL:
        return (
            "zero.zero_quantized_weights", "true, or a larger " + MICRO_BATCH,
            f"gathers were prefetched{ahead}, and have not arrived when they are needed; they are under way for at "
            f"least {busy:.0%} of forward and backward, so launching them earlier cannot help: fewer bytes can, or "
            "more computation for each gather",
        )  # fmt: skip
    return (
        PREFETCH, "larger",
        f"gathers were prefetched{ahead}, and have not arrived when they are needed; that is known of {busy:.0%} "
        "of forward and backward, so there may be room to launch them earlier",
    )  # fmt: skip


def _reduction(gap: Gap) -> bool:
    return gap.kind.startswith(REDUCTIONS) and not gap.launching


def _at_once(gap: Gap) -> bool:
    """The wait followed the launch directly."""
    waits = gap.label is not None and gap.label.verb == "wait" and gap.lead is not None
    return waits and (gap.lead or 0.0) <= AT_ONCE * ((gap.lead or 0.0) + gap.length)


def _in_line(gap: Gap) -> bool:
    return _reduction(gap) and gap.phase == "backward" and _at_once(gap)


def _say_in_line(found: _Evidence) -> Words:
    return (
        "zero.overlap_comm", "true",
        f"{found.count} reductions a step were waited for right where they were launched, in the backward pass; with a "
        "second bucket the backward pass goes on while the first one travels",
    )  # fmt: skip


def _tail(gap: Gap) -> bool:
    return _reduction(gap) and not _in_line(gap) and (gap.phase == "boundary" or gap.last)


def _say_tail(found: _Evidence) -> Words:
    return (
        BUCKET, "smaller",
        "the step waits at its boundary for the last reductions, beside which nothing is left to compute; with smaller "
        "buckets less is under way when the backward pass ends",
    )  # fmt: skip


def _behind(gap: Gap) -> bool:
    return _reduction(gap) and not _in_line(gap) and not _tail(gap)


def _say_behind(found: _Evidence) -> Words:
    return (
        MICRO_BATCH, "larger, or zero.zero_quantized_gradients=true",
        "reductions do not keep up with the backward pass: a bucket is full before one before it has arrived. More "
        "computation for each reduction helps, or fewer bytes",
    )  # fmt: skip


def _publication(gap: Gap) -> bool:
    return gap.phase == "publish" and gap.kind == "parameters.all_gather" and not gap.launching


def _say_publication(found: _Evidence) -> Words:
    return (
        ACCUMULATION, "larger",
        "new parameters are gathered at the end of each step, when there is nothing to compute; with more "
        "micro-batches in a step that happens less often for the same data",
    )  # fmt: skip


def _launching(gap: Gap) -> bool:
    return gap.launching and gap.kind != "agreement.all_reduce"


def _say_launching(found: _Evidence) -> Words:
    return (
        MICRO_BATCH, "larger, or fewer bytes: zero.zero_quantized_weights=true, zero.zero_quantized_gradients=true",
        f"the calls that start {found.count} collectives a step stand still themselves: gloo hands messages to the "
        "system in the calling thread, and no order of launches hides that",
    )  # fmt: skip


def _agreement(gap: Gap) -> bool:
    return gap.kind == "agreement.all_reduce"


def _say_agreement(found: _Evidence) -> Words:
    return (
        "", "",
        "this rank waits at the step's agreement, a few bytes, for the slowest rank: no setting of ZeRO changes that. "
        "Give traces of several ranks: the one that waits least here is the slowest",
    )  # fmt: skip


def _fetch_from_host(gap: Gap) -> bool:
    return gap.copy and gap.kind == "offload.parameters_fetch"


def _say_fetch_from_host(found: _Evidence) -> Words:
    return (
        "zero.offload_param.device", "none, if the parameters fit",
        f"{found.count} copies a step bring parameters from host memory, and nothing is computed beside them",
    )  # fmt: skip


def _activations(gap: Gap) -> bool:
    return gap.kind.startswith("offload.activations")


def _say_activations(found: _Evidence) -> Words:
    return (
        "activation_checkpointing.cpu_checkpointing_min_bytes", "larger",
        f"{found.count} copies a step take activations to the host or back, and nothing is computed beside them; with "
        "a higher bound fewer of them leave the device",
    )  # fmt: skip


def _optimizer_copy(gap: Gap) -> bool:
    return gap.kind in ("offload.gradients_to_host", "offload.parameters_to_device")


def _say_optimizer_copy(found: _Evidence) -> Words:
    return (
        "zero.offload_optimizer.ratio", "smaller",
        f"{found.count} copies a step take gradients to the host or parameters back, and nothing is computed beside "
        "them; with a smaller ratio a part of the states stays on the device",
    )  # fmt: skip


def _host_step(summary: TraceSummary, milliseconds: float) -> Advice:
    share = milliseconds / summary.total("length")
    return Advice(
        "zero.offload_optimizer.delayed_update", "true, or a smaller zero.offload_optimizer.ratio",
        f"the optimizer's step in host memory takes {share:.0%} of the steps, while the model stands; delayed by one "
        "step it runs beside the next forward and backward pass (other bits), and with a smaller ratio less of it is "
        "done by the CPU",
        milliseconds / len(summary.steps),
    )  # fmt: skip


RULES: tuple[tuple[Callable[[Gap], bool], Callable[[_Evidence], Words]], ...] = (
    (_late_gather, _say_late),
    (_prefetched, _say_prefetched),
    (_in_line, _say_in_line),
    (_tail, _say_tail),
    (_behind, _say_behind),
    (_publication, _say_publication),
    (_launching, _say_launching),
    (_agreement, _say_agreement),
    (_fetch_from_host, _say_fetch_from_host),
    (_activations, _say_activations),
    (_optimizer_copy, _say_optimizer_copy),
)
"""Which gaps, and what to say of them."""
