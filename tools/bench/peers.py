"""The peers that come with torch: DDP, DDP + ZeroRedundancyOptimizer, FSDP2, as their own experts set them up.

All three keep fp32 masters and fp32 Adam moments and compute in bf16. DDP offers two ways to that, and both run:

- ``bf16``: the model is bf16, gradients travel as bf16, and the optimizer keeps fp32 masters (``master_adamw.py``).
  Under ZeroRedundancyOptimizer each rank's optimizer holds masters for its own parameters only, and what is broadcast
  is bf16: the best that ZeroRedundancyOptimizer can do.
- ``autocast``: the parameters are fp32 and are cast for each operation. With the hook :func:`send_as_bf16`
  the gradients travel as bf16; ZeroRedundancyOptimizer still broadcasts fp32.

Common to all: gradients live in DDP's buckets (``gradient_as_bucket_view``), the graph is declared static, Adam is
torch's fused one, and clipping takes the norm in fp32.

Left out: ZeroRedundancyOptimizer's ``overlap_with_ddp``, which steps inside the backward pass, before a global norm
exists to clip by.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from tools.bench.group import join
from tools.bench.master_adamw import MasterAdamW, clip_factor_of
from tools.bench.rank import Context, Step
from tools.bench.workload import blocks_of


def _ddp(context: Context, options: dict[str, Any]) -> DistributedDataParallel:
    join(context.work)
    dtype = torch.bfloat16 if options["mode"] == "bf16" else torch.float32
    wrapped = DistributedDataParallel(
        context.model.to(context.device, dtype),
        device_ids=[context.device.index] if context.device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        static_graph=True,
        bucket_cap_mb=options.get("bucket_mib", 25),
    )
    if options.get("compress"):
        wrapped.register_comm_hook(None, send_as_bf16)
    return wrapped


def send_as_bf16(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are strings
    """DDP communication hook: average a bucket of fp32 gradients with half the bytes on the wire.

    What torch's own ``bf16_compress_hook`` does, which DDP refuses on gloo. Takes a ``dist.GradBucket``, returns a
    ``torch.futures.Future[torch.Tensor]``.
    """
    whole = bucket.buffer()
    sent = whole.to(torch.bfloat16).div_(dist.get_world_size())
    future = dist.all_reduce(sent, async_op=True).get_future()
    return future.then(lambda done: whole.copy_(done.value()[0]))


def _ddp_step(context: Context, options: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """The loop that all but FSDP2 share; they differ in the model's wrapper and in the optimizer."""
    params = list(model.parameters())
    clip = context.work.clip
    low = options["mode"] == "bf16"

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.autocast(context.device.type, torch.bfloat16, enabled=not low):
            loss = model(inputs, targets)
        loss.backward()
        if low:
            optimizer.step(clip_factor=clip_factor_of(params, clip))  # type: ignore[call-overload]
        else:
            nn.utils.clip_grad_norm_(params, clip)
            optimizer.step()
        # set_to_none is right with gradient_as_bucket_view too: DDP puts the view back in the next backward pass.
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def build_ddp(context: Context, options: dict[str, Any]) -> Step:
    """Plain DDP: every rank reduces all gradients and steps all parameters."""
    model = _ddp(context, options)
    if options["mode"] == "bf16":
        optimizer: torch.optim.Optimizer = MasterAdamW(model.parameters(), **context.work.adamw)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), fused=True, **context.work.adamw)
    return _ddp_step(context, options, model, optimizer)


def build_plain(context: Context, options: dict[str, Any]) -> Step:
    """One process, no wrapper: what a single rank of ZeRO is measured against."""
    model = context.model.to(context.device, torch.bfloat16)
    return _ddp_step(context, options, model, MasterAdamW(model.parameters(), **context.work.adamw))


def build_zro(context: Context, options: dict[str, Any]) -> Step:
    """DDP, with whole parameters dealt out to the ranks' optimizers and broadcast after the step."""
    model = _ddp(context, options)
    low = options["mode"] == "bf16"
    extra = {} if low else {"fused": True}
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(),
        optimizer_class=MasterAdamW if low else torch.optim.AdamW,
        # One broadcast per rank instead of one per parameter.
        parameters_as_bucket_view=True,
        **extra,
        **context.work.adamw,
    )
    return _ddp_step(context, options, model, optimizer)


def build_fsdp2(context: Context, options: dict[str, Any]) -> Step:
    """FSDP2: fp32 shards, bf16 gathered parameters, ``fully_shard`` on each block and on the rest."""
    join(context.work)
    model = context.model.to(context.device)
    mesh = init_device_mesh(context.device.type, (context.work.ranks,))
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16,
        reduce_dtype=torch.bfloat16 if options["reduce"] == "bf16" else torch.float32,
    )
    for block in blocks_of(model):
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=options["reshard"])
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=options["reshard"])
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **context.work.adamw)

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = model(inputs, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), context.work.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step
