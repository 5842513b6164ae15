"""What a run says of itself: to whom it reports at every step, and what its summary holds."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from deepzero.comm import process_group
from deepzero.comm.ledger import off_forms
from deepzero.compat.deepspeed_engine import DeepSpeedEngine
from deepzero.config.run import RunConfig
from deepzero.data.corpus import Corpus
from deepzero.models.gpt import GPT
from deepzero.models.hf import HFModel
from deepzero.monitor.environment import environment
from deepzero.monitor.monitor import Monitor, Workload, make_monitor, peak_rss_bytes
from deepzero.monitor.throughput import peak_flops
from deepzero.training.run_folder import cannot_write


def build_monitor(
    run: RunConfig, run_dir: Path, engine: DeepSpeedEngine, model: GPT | HFModel, corpus: Corpus
) -> Monitor:
    """Rank 0's reports to the terminal, to files and to loggers; the others' report to nobody."""
    batch, dtype = engine.batch, run.engine.precision.dtype
    device = torch.cuda.get_device_name(engine.device) if engine.device.type == "cuda" else "cpu"
    workload = Workload(
        total_steps=run.train.steps,
        tokens_per_step=batch.global_batch * run.model.block_size,
        flops_per_token=model.flops_per_token(),
        world_size=engine.world_size,
        peak_flops=peak_flops(device, dtype),
        bytes_per_token=corpus.bytes_per_token,
    )
    if engine.global_rank != 0:
        return Monitor(workload, run_dir)
    settings, done, seen = dataclasses.asdict(run), engine.global_steps, engine.global_samples * run.model.block_size
    try:
        monitor = make_monitor(workload, run.logger, run_dir, settings, done, seen, log_every=run.train.log_every)
    except OSError as error:
        raise cannot_write(run_dir, error) from None
    monitor.line(f"data   {corpus.description}")
    shape = f"{engine.model_numel:,} parameters, sequences of {run.model.block_size} tokens"
    monitor.line(f"model  {run.model.name}: {shape}")
    sizes = f"batch {batch.global_batch} = {batch.micro_batch} x {batch.accumulation} x {batch.world_size} ranks"
    monitor.line(f"run    ZeRO stage {run.engine.zero.stage}, {dtype}, {device}, {sizes}; {run_dir}")
    if offload := engine.describe_offload():
        monitor.line(offload)
    if done:
        monitor.line(f"going on after step {done}, from the checkpoint that was saved there")
    return monitor


def step_record(run: RunConfig, engine: DeepSpeedEngine) -> dict[str, Any]:
    """What the step that has just ended says of itself. Every rank calls it: layers' norms are a collective."""
    every = run.logger.gradient_norms_every
    norms = engine.gradient_norms() if every and engine.global_steps % every == 0 else {}
    return {**vars(engine.last_step), **engine.step_metrics(), **norms}


def final_facts(run: RunConfig, engine: DeepSpeedEngine, sample_text: str | None) -> dict[str, Any]:
    """What the summary says besides losses. Collective: every rank calls it."""
    rss = process_group.all_gather_object(peak_rss_bytes())
    on_gpu, here = engine.device.type == "cuda", engine.global_rank == 0
    report = engine.report()
    device_bytes = torch.cuda.max_memory_allocated(engine.device) if on_gpu else None
    return {
        "params_sha256": engine.params_sha256(),
        "model_numel": engine.model_numel,
        "world_size": engine.world_size,
        **report,
        "off_the_forms": off_forms(report),
        "peak_rss_bytes": max(rss),
        "peak_rss_bytes_per_rank": rss,
        "peak_device_bytes_per_rank": process_group.all_gather_object(device_bytes),
        "skipped_steps": engine.skipped_steps,
        "sample": sample_text,
        # Rank 0 alone writes the summary: a thousand ranks need not ask git.
        "environment": environment(torch.cuda.get_device_name(engine.device) if on_gpu else None) if here else None,
        "config": dataclasses.asdict(run),
    }
