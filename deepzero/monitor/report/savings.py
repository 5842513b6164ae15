"""What a run's stage has saved: its model state per rank against plain data parallelism, by the closed forms.

Plain mixed-precision data parallelism holds, on every rank, ``cΨ`` of parameters, ``cΨ`` of gradients, fp32 masters and
the optimizer's moments: with Adam in bf16 or fp16 ``2Ψ + 2Ψ + 4Ψ + 8Ψ = 16Ψ``, in fp32, whose parameters are their own
masters, ``4Ψ + 4Ψ + 8Ψ = 16Ψ`` as well. With W ranks the sources' forms are ``4Ψ + 12Ψ/W`` for stage 1, ``2Ψ + 14Ψ/W``
for stage 2 and ``16Ψ/W`` for stage 3. A run that sums gradients in fp32 has wider ones, and says so.

Sources: [stage-2 notes], "Partitioning"; [ZeRO], sections 3 and 5.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepzero.monitor.report.run_data import DEVICE_STATES, HOST_STATES, Run
from deepzero.utils.formatting import short_bytes

WHAT_STAGES_DO = (
    "Stage 0 is plain data parallelism: each rank keeps parameters, gradients and optimizer states whole.",
    "Stage 1 cuts the optimizer states (fp32 masters and moments) into one part for each rank; parameters and gradients"
    " stay whole.",
    "Stage 2 cuts the optimizer states and the gradients into one part for each rank; parameters stay whole.",
    "Stage 3 cuts the optimizer states, the gradients and the parameters into one part for each rank; a layer's"
    " parameters are gathered just before it runs.",
)
PAPER_FORMS = ("16Ψ", "4Ψ + 12Ψ/W", "2Ψ + 14Ψ/W", "16Ψ/W")
"""Of the stages, with Adam in mixed precision: 2 bytes of parameter, 2 of gradient, 12 of optimizer state."""
WORKING = ("gathered", "buckets", "padding")  # what ZeRO needs besides the states: memory categories of a rank's device
MOMENT = "held by one rank after a backward pass, not at the peak (activations: what the peak was above the rest)"
ALIKE = (
    "Stage 1 holds here what stage 2 would: with zero.overlap_comm=true and one micro-batch gradients leave as they"
    " come. With gradient_accumulation_steps above 1, or without overlap, stage 1 keeps them whole until the step."
)
_COMPUTE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


@dataclass(frozen=True)
class Savings:
    """Bytes of model state on one rank, mean over ranks, by category."""

    numel: int  # Ψ
    plain: dict[str, float]  # what plain data parallelism would hold
    here: dict[str, float]  # what was measured on the device
    predicted: dict[str, float]  # what the closed forms of this run said of that
    host: float  # of the same states, what was measured in host memory

    @property
    def plain_bytes(self) -> float:
        """On every rank of plain data parallelism."""
        return sum(self.plain.values())

    @property
    def here_bytes(self) -> float:
        """On the device of one rank of this run."""
        return sum(self.here.values())

    @property
    def part(self) -> float:
        """How much less, 0 to 1; negative where it is more."""
        return 1 - self.here_bytes / self.plain_bytes


def savings_of(run: Run) -> Savings | None:
    """The comparison; None where the files do not hold what it needs."""
    numel, ranks, size = run.model_numel, run.world_size, _COMPUTE_BYTES.get(str(run.settings.get("precision.dtype")))
    if numel is None or ranks is None or run.stage is None or size is None:
        return None
    here = {category: run.held(category) for category in DEVICE_STATES}
    if here["parameters"] + run.held("host_parameters") == 0:
        return None
    cut = 1 if run.stage == 0 else ranks  # hybrid sharding (MiCS) cuts optimizer states over all ranks, too
    # How wide an optimizer's moments are, and how much is trained, is known by what is held.
    masters, moments = (
        cut * (run.held(name, "predicted") + run.held(f"host_{name}", "predicted")) for name in ("masters", "moments")
    )
    trained = masters / 4 if size < 4 else float(numel)
    plain = {"parameters": float(size * numel), "gradients": size * trained, "masters": masters, "moments": moments}
    predicted = {category: run.held(category, "predicted") for category in DEVICE_STATES}
    return Savings(numel, plain, here, predicted, sum(map(run.held, HOST_STATES)))


def _sums_wider(run: Run) -> bool:
    """Whether gradients are summed in fp32 though the model computes in fewer bytes."""
    return run.settings.get("grad_accum_dtype") == "fp32" and run.settings.get("precision.dtype") != "fp32"


def headline(run: Run) -> str:
    """What was saved, as one or two sentences of plain text."""
    if (found := savings_of(run)) is None:
        return "How much memory that saves is not known: the run ended before a step was counted."
    of_each = "The one rank" if run.world_size == 1 else f"Each of the {run.world_size} ranks"
    compared = f"{abs(found.part):.0%} {'less' if found.part > 0 else 'more'}"
    text = (
        f"{of_each} holds {short_bytes(found.here_bytes)} of model state{' on its device' if found.host else ''} "
        f"({found.here_bytes / found.numel:.2f} bytes per parameter) where plain data parallelism holds "
        f"{short_bytes(found.plain_bytes)} ({found.plain_bytes / found.numel:.2f}): "
        f"{compared if abs(found.part) > 0.005 else 'nothing is saved'}."
    )
    if _sums_wider(run):
        text += " Gradients are summed in fp32 here, which the 16 bytes of the textbook do not count."
    if working := sum(map(run.held, WORKING)):
        text += f" Besides it holds up to {short_bytes(working)} of buckets and gathered parameters."
    if found.host:
        text += f" Another {short_bytes(found.host)} of it lie in host memory."
    return text


def like_stage_2(run: Run) -> bool:
    """Whether this is a run of stage 1 that holds no more than one of stage 2 would: :data:`ALIKE` says why."""
    found, ranks = savings_of(run), run.world_size
    if found is None or ranks is None or ranks == 1 or run.stage != 1:
        return False
    width = 4 if _sums_wider(run) else _COMPUTE_BYTES[str(run.settings.get("precision.dtype"))]
    return found.predicted["gradients"] <= width * found.numel / ranks * 1.01


def textbook(run: Run) -> str | None:
    """The sources' formula for this stage with this run's numbers; None where it does not apply."""
    found, stage, ranks = savings_of(run), run.stage, run.world_size
    if found is None or stage is None or ranks is None:
        return None
    if abs(found.plain_bytes / found.numel - 16) > 0.01 or found.host or found.here["secondary"]:
        return None
    factor = (16.0, 4 + 12 / ranks, 2 + 14 / ranks, 16 / ranks)[stage]
    size = short_bytes(factor * found.numel)
    return f"{PAPER_FORMS[stage]} = {factor:.4g}Ψ = {size} with Ψ = {found.numel:,} and W = {ranks}"
