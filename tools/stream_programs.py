"""Programs on simulated streams: what notices that a wait is gone.

Each shows what can be seen of it, as a value that is the same in every run. :data:`ALL` is what :mod:`tools.waits`
looks at; the settings of :data:`PROGRAMS` are those of ``tests/distributed/test_removals.py`` too.
"""

from __future__ import annotations

import contextlib
import functools
import tempfile

import pytest
import torch

import deepzero
from deepzero.device import accelerator_of
from deepzero.runtime.zero import overlap_param_gather
from deepzero.utils import safe_get_full_fp32_param, safe_get_full_grad, safe_set_full_fp32_param
from tests.distributed import test_null_gpu as parts
from tests.distributed.null_gpu import GPU, engine_in, null_gpu
from tests.distributed.test_offload import settings
from tests.distributed.training import make_batch, step_on

BUCKET = 1000
OFFLOADED = {"precision": "bf16", "gradient_accumulation_steps": 2, "chaos": 3, "bucket": BUCKET}
HOST = {"cpu_checkpointing": True, "cpu_checkpointing_min_bytes": 1}
QUANTIZED = {"zero_quantized_weights": True, "zero_quantized_gradients": True, "quantization": {"block_size": 64}}


def zeropp(world, comm=None, **more):
    made = settings(3, precision="bf16", chaos=3, bucket=BUCKET)
    made["zero_optimization"].update(more)
    made["comm"].update(comm or {})
    return world, made, "plain"


PROGRAMS = {
    "stage 0": (2, settings(0, precision="bf16", chaos=3, bucket=BUCKET), "plain"),
    "stage 2": (2, settings(2, **OFFLOADED), "plain"),
    "offload": (2, settings(2, 1.0, **OFFLOADED), "plain"),
    "offload in fp32": (2, settings(2, 0.5, chaos=3, bucket=BUCKET), "plain"),
    "delayed": (2, settings(2, 1.0, offload={"delayed_update": True, "delay_after_steps": 0}, **OFFLOADED), "plain"),
    "stage 3": (2, settings(3, 1.0, **OFFLOADED), "plain"),
    "stage 3 on the host": (2, settings(3, 0.5, param=True, chaos=3, bucket=BUCKET), "plain"),
    "alone": (1, settings(2, 1.0, activation_checkpointing=HOST, **OFFLOADED), "plain"),
    "alone in stage 3": (1, settings(3, 1.0, param=True, **OFFLOADED), "plain"),
    "quantized": zeropp(4, {"ranks_per_node": 2}, zero_hpz_partition_size=2, **QUANTIZED),
    "hybrid": zeropp(4, mics_shard_size=2),
    "qwZ": zeropp(2, zero_quantized_weights=True, quantization={"block_size": 64}),
}
"""Ranks, settings, model."""


def simulated(world, given, kind="plain", init=False):
    return engine_in(null_gpu(world if world > 1 else 0), given, kind, init)


def batch_of(number):
    return [t.to(GPU) for t in make_batch(number, 2)]


def engine_of(world, given, kind, init=False):
    """Some steps, and what can be done between them."""
    seen = []
    with tempfile.TemporaryDirectory() as folder, simulated(world, given, kind, init) as (engine, _):
        weight = dict(engine.module.named_parameters())["blocks.0.1.weight"]

        def look(module, *_):
            with deepzero.zero.GatheredParameters(module.weight):
                seen.append(float(module.weight.detach().float().sum()))

        for step in range(4):
            looking = engine.module.blocks[0][1].register_forward_hook(look) if step == 1 else None
            for k in range(engine.batch.accumulation):
                engine.backward(engine(*batch_of(10 * step + k)))
                if step == 2 and k == 0:  # a micro-batch that does not count
                    engine.zero_grad()
                    engine.backward(engine(*batch_of(3)))
                if engine.is_gradient_accumulation_boundary():
                    grad = safe_get_full_grad(weight)
                    seen.append(None if grad is None else float(grad.sum()))
                engine.step()
            if looking is not None:
                looking.remove()
            if step == 0:
                with torch.no_grad():
                    engine(*batch_of(5))
                engine.finish_delayed_update()
                with deepzero.zero.GatheredParameters(weight, modifier_rank=0), torch.no_grad():
                    weight.mul_(0.5)
                engine.offload_states(non_blocking=True)
                engine.reload_states(non_blocking=True)
            if step == 1:
                engine.finish_delayed_update()
                safe_set_full_fp32_param(weight, safe_get_full_fp32_param(weight).cpu() + 0.125)
                engine.offload_states()
                engine.reload_states()
                engine.load_module_state_dict({k: v + 0.25 for k, v in engine.module_state_dict().items()})
                for tag in ("one", "two") if world == 1 else ():
                    engine.save_checkpoint(folder, tag, asynchronous=True)
            seen.append((engine.last_step.loss, engine.last_step.grad_norm))
        if world == 1:
            engine.load_checkpoint(folder)
            engine.backward(engine(*batch_of(7)))
        seen.append(engine.params_sha256())
        del engine, weight
    return seen


def stopped_early():
    """Who takes a batch and no more frees the next one, which is on its way."""
    with pytest.MonkeyPatch.context() as patch:
        parts.test_who_stops_early_frees_no_memory_under_a_copy(True, patch)


def broken_off():
    """A parameter is written that a forward pass has prefetched, and has not come to."""

    def stop(*_):
        raise KeyboardInterrupt

    with simulated(2, settings(3, precision="bf16")) as (engine, _):
        batch = batch_of(0)
        for _ in range(2):
            step_on(engine, *batch)
        breaking = engine.module.blocks[0][0].register_forward_hook(stop)
        with contextlib.suppress(KeyboardInterrupt):
            engine(*batch)
        breaking.remove()
        bucket = next(b for b in engine.zero.stage3.coordinator.buckets if b.status.name == "INFLIGHT")
        safe_set_full_fp32_param(bucket.params[0], torch.zeros(bucket.params[0].ds_shape))
        step_on(engine, *batch)
        seen = engine.last_step.loss, engine.params_sha256()
        del engine, bucket
    return seen


def read_between_steps(given):
    """Parameters are on their way, and are read: by a model in eval mode, by a view, when the program ends."""
    seen, held = [], None
    with simulated(2, given) as (engine, _):
        batch = batch_of(0)
        (group,) = engine.zero.groups
        for step in range(6):
            step_on(engine, *batch)
            if step == 1:  # what is sent first is waited for alone, unless a module in eval mode reads for others
                engine.module.embed.eval()(batch[0])
                seen.append(group.flat_P.float().sum())
                engine.module.embed.train()
            if step == 2:  # first used on a stream of the program's own; and by two threads at once, on two streams
                bias = engine.module.blocks[0][1].bias
                bucket = vars(bias)["_under_way"]
                for _ in range(2):
                    with accelerator_of(group.device).stream(group.device).running():
                        bucket.wait()
                        seen.append(bias.detach().float().sum())
                accelerator_of(group.device).synchronize(group.device)
            if step == 3:
                held = group.flat_P[1:]
            if step == 5:
                seen.append(held.float().sum())
                held = None
        # Of most modules nobody asks anything in this step; it writes over what is on its way to them.
        engine.backward(engine.module.embed(batch[0]).float().mean())
        engine.step()
        under_way = len(overlap_param_gather.all_under_way())
        overlap_param_gather.end_all()
        seen.append(group.flat_P.float().sum())
        shown = [under_way, *map(float, seen)]
        del engine, group, bias, bucket
    return shown


def loaded_by_two():
    """What one rank has saved in stage 0 is read by the first of two, who each read a part and send it."""
    seen = []
    with tempfile.TemporaryDirectory() as folder:
        for world in (1, 2):
            with simulated(world, settings(0, precision="bf16")) as (engine, _):
                batch = batch_of(0)
                if world == 2:
                    engine.load_checkpoint(folder)
                step_on(engine, *batch)
                seen.append(engine.params_sha256())
                if world == 1:
                    engine.save_checkpoint(folder)
                del engine
    return seen


def overlapped(ratio, **more):
    given = settings(2, ratio, precision="bf16", gradient_accumulation_steps=2)
    given["zero_optimization"]["overlap_param_gather"] = True
    return {**given, **more}


DELAYED = settings(3, 1.0, precision="bf16", offload={"delayed_update": True, "delay_after_steps": 0})
ALL = {name: functools.partial(engine_of, *given) for name, given in PROGRAMS.items()} | {
    "alone on the device": functools.partial(engine_of, 1, settings(2, precision="bf16"), "plain"),
    "built by zero.Init": functools.partial(engine_of, *PROGRAMS["stage 3 on the host"], init=True),
    "activations": parts.activations,
    "activations, poisoned": functools.partial(parts.activations, chaos=True),
    "publishing under the forward pass": functools.partial(engine_of, 2, overlapped(0.5), "plain"),
    "the same, from the device": functools.partial(engine_of, 2, overlapped(None), "plain"),
    "the delayed update of stage 3": functools.partial(engine_of, 2, DELAYED, "plain"),
    "a load": parts.test_a_load_waits_for_the_last_copies,
    "a pass that breaks off": broken_off,
    "readers between steps": functools.partial(read_between_steps, overlapped(None, gradient_accumulation_steps=1)),
    "a load by one of two ranks": loaded_by_two,
    "a gradient of another stream": parts.test_a_gradient_of_another_stream_is_not_freed_too_early,
    "several streams": functools.partial(parts.of_several_streams, 2),
    "batches": parts.test_batches_come_one_ahead,
    "batches, not all of them": stopped_early,
}
"""What :mod:`tools.waits` looks at."""
