"""What this machine has room for: processes, model states and a checkpoint, asked before a run's ranks start."""

from __future__ import annotations

import logging
import math
import shutil
from pathlib import Path

from deepzero.comm.ledger import side_of
from deepzero.config.run import RunConfig
from deepzero.config.strict import ConfigError
from deepzero.offload.file_offload import in_files
from deepzero.offload.offload_plan import usable_cores
from deepzero.offload.pinned_arena import available_host_bytes
from deepzero.planning.clusters import H100_HDR
from deepzero.planning.dry_run import ClusterShape
from deepzero.planning.estimate import Estimator, MakeProgram
from deepzero.utils.formatting import short_bytes

log = logging.getLogger(__name__)
RANK_BYTES = 150_000_000
"""What a rank has to itself before it has a model: an interpreter with torch."""


def check_machine(run: RunConfig, make: MakeProgram, run_dir: Path, nproc: int, device: str) -> str:
    """Refuse what this machine surely cannot do; returns in words what is likely to fail, nothing where all is well.

    Raises:
        ConfigError: no memory for so many processes before they have a model, or no room for a checkpoint.
    """
    cores, free = len(usable_cores()), available_host_bytes() or math.inf
    if (least := nproc * RANK_BYTES) > free:
        sizes = f"{short_bytes(least)} before they have a model, and {short_bytes(free)} are free"
        raise ConfigError(f"launch.nproc={nproc}: so many processes take {sizes}, on {cores} cores; choose fewer")
    slow = f"launch.nproc={nproc}: this machine has {cores} cores, and each rank waits for all others"
    told = [slow] if device == "cpu" and nproc > 4 * cores else []
    if run.model.library == "hf":
        return "\n".join(told)  # its import takes seconds, and is the ranks'
    try:
        estimator = Estimator(run, make, H100_HDR, ClusterShape(nproc, nproc))  # for sizes, which no cluster changes
        states = estimator.states()
    except Exception:  # a model may train that cannot be made on the meta device
        log.debug("what the model and its optimizer take is not known before they are made", exc_info=True)
        return "\n".join(told)
    # Of the host alone: whoever asks CUDA for a GPU's memory may hold a context there for as long as the run lasts.
    here = states.keys() - in_files(run.engine.zero)
    of_host = sum(states[category] for category in here if device == "cpu" or side_of(category) == "host")
    for what, size in (
        ("the model in fp32, which every rank makes before it is cut,", 4 * estimator.numel * nproc),
        ("model states of all ranks", of_host * nproc),
    ):
        if size > free:
            there = f"this machine has {short_bytes(free)} for it; what would fit, python -m tools.advise says"
            told.append(f"{what} would take {short_bytes(size)}, and {there}")
    needed, left = round(estimator.numel * (4 + estimator.moments)), shutil.disk_usage(run_dir).free
    if run.train.save_every and needed > left:
        sizes = f"a checkpoint takes {short_bytes(needed)}, and the disk of {run_dir} has {short_bytes(left)} left"
        raise ConfigError(f"{sizes}; make room, choose another hydra.run.dir, or save nothing (train.save_every=0)")
    return "\n".join(told)
