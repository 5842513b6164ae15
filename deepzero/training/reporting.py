"""What a run says of itself: to whom it reports at every step, what its summary holds, and ``timeline.json``.

The timeline is the memory of every rank over one optimizer step of each start of a run (``train.timeline_step``);
``docs/report.md`` says what the file holds.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from deepzero.comm import process_group
from deepzero.comm.ledger import SECONDARY, off_forms
from deepzero.compat.deepspeed_engine import DeepSpeedEngine
from deepzero.config.run import RunConfig
from deepzero.data.corpus import Corpus
from deepzero.device import accelerator_of
from deepzero.models.gpt import GPT
from deepzero.models.hf import HFModel
from deepzero.monitor.environment import environment
from deepzero.monitor.metrics_file import TIMELINE, write_json
from deepzero.monitor.monitor import Monitor, Workload, make_monitor
from deepzero.monitor.report.sections import write_report_or_tell
from deepzero.monitor.throughput import peak_flops
from deepzero.planning.dry_run import ClusterShape, dry_run, quiet
from deepzero.profiling.step_recorder import StepRecorder, points_for
from deepzero.runtime.build import TORCH_DTYPES
from deepzero.training.build_model import program_of
from deepzero.training.run_folder import cannot_write
from deepzero.utils.formatting import short_bytes

REHEARSAL_SECONDS = 5.0
"""After so long no further rank is rehearsed: the others are drawn with the last one's plan, from which theirs differs
by padding."""
REHEARSED_MICRO_BATCHES = 8  # of a step: of longer ones nobody would wait for the rehearsal
RANKS_IN_FULL = 8  # of so many ranks the points are written down, and rehearsed; of the others their figures alone


def build_monitor(
    run: RunConfig, run_dir: Path, engine: DeepSpeedEngine, model: GPT | HFModel, corpus: Corpus
) -> Monitor:
    """Rank 0's reports to the terminal, to files and to loggers; the others' report to nobody."""
    batch, dtype, train = engine.batch, run.engine.precision.dtype, run.train
    device = accelerator_of(engine.device).device_name(engine.device)
    workload = Workload(
        total_steps=train.steps,
        tokens_per_step=batch.global_batch * run.model.block_size,
        flops_per_token=model.flops_per_token(),
        world_size=engine.world_size,
        peak_flops=peak_flops(device, dtype),
        bytes_per_token=corpus.bytes_per_token,
    )
    if engine.global_rank != 0:
        return Monitor(workload, run_dir)
    settings, done, seen = dataclasses.asdict(run), engine.global_steps, engine.global_samples * run.model.block_size
    again = train.eval_every > 0 and (done % train.eval_every == 0 or done == train.steps)
    try:
        monitor = make_monitor(workload, run.logger, run_dir, settings, done, seen, again, log_every=train.log_every)
    except OSError as error:
        raise cannot_write(run_dir, error) from None
    monitor.line(f"data   {corpus.description}")
    shape = f"{engine.model_numel:,} parameters, sequences of {run.model.block_size} tokens"
    monitor.line(f"model  {run.model.name}: {shape}")
    sizes = f"batch {batch.global_batch} = {batch.micro_batch} x {batch.accumulation} x {batch.world_size} ranks"
    monitor.line(f"run    ZeRO stage {run.engine.zero.stage}, {dtype}, {device}, {sizes}; {run_dir}")
    monitor.line(engine.describe_bits())
    if offload := engine.describe_offload():
        monitor.line(offload)
    if done:
        monitor.line(f"going on after step {done}, from the checkpoint that was saved there")
    return monitor


def final_facts(run: RunConfig, engine: DeepSpeedEngine, sample_text: str | None) -> dict[str, Any]:
    """What the summary says besides losses. Collective: every rank calls it."""
    host, accelerator, report = torch.device("cpu"), accelerator_of(engine.device), engine.report()
    rss = process_group.all_gather_object(accelerator_of(host).max_memory_allocated(host))
    on_gpu = accelerator.has_streams
    device_bytes = accelerator.max_memory_allocated(engine.device) if on_gpu else None
    device_name = accelerator.device_name(engine.device) if on_gpu else None
    return {
        "params_sha256": engine.params_sha256(),
        "model_numel": engine.model_numel,
        "world_size": engine.world_size,
        **report,
        "off_the_forms": off_forms(report),
        "remarks": stage_3_saves_nothing(run, engine, report["memory"]),
        "peak_rss_bytes": max(rss),
        "peak_rss_bytes_per_rank": rss,
        "peak_device_bytes_per_rank": process_group.all_gather_object(device_bytes),
        "skipped_steps": engine.skipped_steps,
        "sample": sample_text,
        # Rank 0 alone writes the summary: a thousand ranks need not ask git.
        "environment": environment(device_name) if engine.global_rank == 0 else None,
        "config": dataclasses.asdict(run),
    }


def stage_3_saves_nothing(run: RunConfig, engine: DeepSpeedEngine, memory: Mapping[str, Any]) -> list[str]:
    """A sentence where stage 3 has held no less of the parameters than stage 2 would have; else none."""
    stage, cut_kinds = run.engine.zero.stage, ("parameters", SECONDARY, "gathered")
    whole = engine.model_numel * TORCH_DTYPES[run.engine.precision.dtype].itemsize
    cut = sum(memory[category]["measured"] for category in cut_kinds if category in memory)
    if stage < 3 or engine.world_size == 1 or cut < whole:
        return []
    return [
        f"stage 3 saves nothing here: shards and what is gathered at once take {short_bytes(cut)}, all parameters, "
        f"which stage 2 keeps, {short_bytes(whole)}. {engine.model_numel:,} elements fit into few buckets; a larger "
        "model, and in its report gathered memory that rises and falls, has python train.py zero.stage=3"
    ]


def ranks_in_full(peaks: Sequence[int]) -> list[int]:
    """The ranks whose points are kept, of ranks that held ``peaks`` bytes: all of a few; of many the first ones, the
    last, and those that held the most and the least.

    Example:
        >>> ranks_in_full([7, 5, 7]), ranks_in_full([5] * 20 + [9, 5, 4] + [5] * 9)
        ([0, 1, 2], [0, 1, 2, 3, 4, 20, 22, 31])
    """
    chosen = {0, len(peaks) - 1, peaks.index(max(peaks)), peaks.index(min(peaks))}
    others = [rank for rank in range(len(peaks)) if rank not in chosen]
    return sorted([*chosen, *others[: RANKS_IN_FULL - len(chosen)]])


class StepTimeline:
    """Records the chosen step on every rank; rank 0 writes it down when the step is over.

    ``first_step`` steps were taken before this start of the run.
    """

    def __init__(self, run: RunConfig, run_dir: Path, engine: DeepSpeedEngine, first_step: int) -> None:
        wanted = run.train.timeline_step
        self.step = min(first_step + wanted, run.train.steps) if wanted else 0
        """Which optimizer step is recorded, counted from 1 over the whole run; 0: none."""
        self._run_dir, self._engine, self._written = run_dir, engine, False
        accelerator = accelerator_of(engine.device)
        weigh = partial(accelerator.memory_allocated, engine.device) if accelerator.has_streams else None
        self._recorder = StepRecorder(engine.ledger, points_for(engine.world_size), weigh)

    def begin(self, step: int) -> None:
        """Optimizer step number ``step`` begins."""
        if step == self.step:
            self._recorder.begin()

    def end(self, step: int, tell: Callable[[str], None]) -> None:
        """It is over. A collective at the recorded step; what follows it, the writing, cannot fail the run."""
        if step != self.step:
            return
        self._recorder.end()
        in_full = ranks_in_full(process_group.all_gather_object(self._recorder.peak_bytes))
        mine = self._recorder.as_dict()
        if self._engine.global_rank not in in_full:
            mine["points"] = []
        ranks = process_group.gather_object(mine)
        # The ledger's comparison, too: a run that fails later has no summary to find it in.
        facts = {**self._engine.report(), "model_numel": self._engine.model_numel}
        if ranks is None:
            return
        seconds = max(rank["seconds"] for rank in ranks)
        everything = {"step": step, "seconds": seconds, "world_size": len(ranks), **facts}
        try:
            write_json(self._run_dir / TIMELINE, {**everything, "ranks": ranks, "predicted": None})
            self._written = True
        except Exception as error:  # whatever the disk says
            tell(f"{TIMELINE}: {type(error).__name__}: {error}; training goes on without it")

    def complete(self, run: RunConfig, tell: Callable[[str], None]) -> None:
        """Put the plan beside what was measured: the same step, rehearsed; and write the report once more.

        Everything else is on the disk by now, the process group has ended, and nobody waits for this process but its
        launcher. The first rank's rehearsal may take its time; those of the others only while
        :data:`REHEARSAL_SECONDS` have not passed. A model that cannot be rehearsed (its path depends on values) leaves
        the file as it was, and so does a start that has recorded no step: an earlier one may have had other settings.
        """
        engine, path, plan = self._engine, self._run_dir / TIMELINE, list[dict[str, Any]]()
        if not self._written or engine.batch.accumulation > REHEARSED_MICRO_BATCHES:
            return
        began, nodes = time.perf_counter(), engine.comm.nodes
        try:
            timeline = json.loads(path.read_text(encoding="utf-8"))
            world = ClusterShape(nodes.world_size, nodes.per_node, "cuda" if engine.device.type == "cuda" else "cpu")
            program, limit = program_of(run, world.world_size), points_for(world.world_size)
            timeline["predicted"] = []
            for rank, entry in enumerate(timeline["ranks"]):
                if entry["points"] and (not plan or time.perf_counter() - began <= REHEARSAL_SECONDS):
                    with quiet(logging.ERROR):  # the run has given its warnings
                        plan = dry_run(program, world, rank, limit=limit).points
                timeline["predicted"].append({"points": plan if entry["points"] else []})
            write_json(path, timeline)
        except Exception as error:  # the run has done its work; a picture without an outline is no reason to fail it
            tell(f"{TIMELINE}: no plan beside it: {type(error).__name__}: {error}")
            return
        write_report_or_tell(self._run_dir, tell)
