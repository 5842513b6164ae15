"""The peers that come with torch: DDP, DDP + ZeroRedundancyOptimizer, FSDP2, as their own experts set them up.

All three keep fp32 masters and fp32 Adam moments and compute in bf16. DDP offers two ways to that, and both run:

- ``bf16``: the model is bf16, gradients travel as bf16, and :class:`MasterAdamW` keeps fp32 masters. Under
  ZeroRedundancyOptimizer each rank's optimizer holds masters for its own parameters only, and what is broadcast is
  bf16: the best that ZeroRedundancyOptimizer can do.
- ``autocast``: the parameters are fp32 and are cast for each operation. With the hook :func:`send_as_bf16` the
  gradients travel as bf16; ZeroRedundancyOptimizer still broadcasts fp32.

Gradients live in DDP's buckets (``gradient_as_bucket_view``), the graph is declared static, Adam is torch's fused one,
and clipping takes the norm in fp32. Left out: ZeroRedundancyOptimizer's ``overlap_with_ddp``, which steps inside the
backward pass, before a global norm exists to clip by.

``torch.distributed`` is used directly: peers must run without any of deepzero's code, or they would not be peers.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from tools.bench.rank import Built, Context


def join(context: Context) -> None:
    """Initialise the default process group from the environment: gloo on CPU, NCCL on CUDA."""
    cuda = context.device.type == "cuda"
    # NCCL asks for the device, or guesses it at the first barrier with a warning.
    device = context.device if cuda else None
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(seconds=300), device_id=device)


class MasterAdamW(torch.optim.Optimizer):
    """AdamW on fp32 masters of bf16 parameters: what a DDP user writes to train without losing small updates.

    The masters start from the bf16 parameters, as in DeepSpeed. One step: cast gradients up, scale them by
    ``clip_factor``, fused AdamW on the masters, cast the masters down. The fp32 gradients are kept between steps:
    memory that is touched for the first time costs several times the copy itself.
    """

    def __init__(self, params: Any, **adamw: Any) -> None:
        super().__init__(params, dict(adamw))
        self.low = [p for group in self.param_groups for p in group["params"]]
        self.masters = [p.detach().float() for p in self.low]
        self.grads = [torch.empty_like(master) for master in self.masters]
        for master, grad in zip(self.masters, self.grads, strict=True):
            master.grad = grad
        self.inner = torch.optim.AdamW(self.masters, fused=True, **adamw)

    @torch.no_grad()
    def step(self, closure: None = None, clip_factor: float = 1.0) -> None:
        """One optimizer step; every parameter of the benchmark's model has a gradient in every step."""
        torch._foreach_copy_(self.grads, [p.grad for p in self.low])
        if clip_factor < 1.0:
            torch._foreach_mul_(self.grads, clip_factor)
        self.inner.step(closure)
        torch._foreach_copy_(self.low, self.masters)


@torch.no_grad()
def clip_factor_of(params: list[nn.Parameter], limit: float) -> float:
    """``min(1, limit / norm)``, the norm over all gradients, accumulated in fp32 although they are bf16."""
    norms = torch._foreach_norm([p.grad for p in params], 2.0, dtype=torch.float32)
    return min(1.0, limit / (float(torch.linalg.vector_norm(torch.stack(norms))) + 1e-6))


def send_as_bf16(state, bucket):  # DDP refuses annotations that are strings
    """DDP communication hook: average a bucket of fp32 gradients with half the bytes on the wire.

    It does what torch's own ``bf16_compress_hook`` does, which DDP refuses on gloo.
    """
    whole = bucket.buffer()
    sent = whole.to(torch.bfloat16).div_(dist.get_world_size())
    return dist.all_reduce(sent, async_op=True).get_future().then(lambda done: whole.copy_(done.value()[0]))


def _ddp(context: Context, options: dict[str, Any]) -> DistributedDataParallel:
    join(context)
    wrapped = DistributedDataParallel(
        context.model.to(context.device, torch.bfloat16 if options["mode"] == "bf16" else torch.float32),
        device_ids=[context.device.index] if context.device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        static_graph=True,
        bucket_cap_mb=options.get("bucket_mib", 25),
    )
    if options.get("compress"):
        wrapped.register_comm_hook(None, send_as_bf16)
    return wrapped


def _loop(context: Context, model: nn.Module, optimizer: torch.optim.Optimizer, mode: str = "fsdp") -> Built:
    """The loop of all peers; in ``bf16`` the optimizer clips, under ``autocast`` the operations cast."""
    params, clip = list(model.parameters()), context.work.clip

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.autocast(context.device.type, torch.bfloat16, enabled=mode == "autocast"):
            loss = model(inputs, targets)
        loss.backward()
        if mode == "bf16":
            optimizer.step(clip_factor=clip_factor_of(params, clip))
        else:
            nn.utils.clip_grad_norm_(params, clip)
            optimizer.step()
        # set_to_none is right with gradient_as_bucket_view too: DDP puts the view back in the next backward pass.
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return Built({"step": step})


def _optimizer(mode: str) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    return (MasterAdamW, {}) if mode == "bf16" else (torch.optim.AdamW, {"fused": True})


def build_plain(context: Context, options: dict[str, Any]) -> Built:
    """One process, no wrapper: what a single rank of ZeRO is measured against."""
    model = context.model.to(context.device, torch.bfloat16)
    return _loop(context, model, MasterAdamW(model.parameters(), **context.work.adamw), options["mode"])


def build_ddp(context: Context, options: dict[str, Any]) -> Built:
    """Plain DDP: every rank reduces all gradients and steps all parameters."""
    model = _ddp(context, options)
    kind, extra = _optimizer(options["mode"])
    return _loop(context, model, kind(model.parameters(), **extra, **context.work.adamw), options["mode"])


def build_zro(context: Context, options: dict[str, Any]) -> Built:
    """DDP, with whole parameters dealt out to the ranks' optimizers and broadcast after the step."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns of what it imports; nobody else needs it

    model = _ddp(context, options)
    kind, extra = _optimizer(options["mode"])
    # As bucket views: one broadcast per rank instead of one per parameter.
    extra = {"parameters_as_bucket_view": True, **extra, **context.work.adamw}
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=kind, **extra)
    return _loop(context, model, optimizer, options["mode"])


def build_fsdp2(context: Context, options: dict[str, Any]) -> Built:
    """FSDP2: fp32 shards, bf16 gathered parameters, ``fully_shard`` on each block and on the rest."""
    join(context)
    model = context.model.to(context.device)
    mesh = init_device_mesh(context.device.type, (context.work.ranks,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=getattr(torch, options["reduce"]))
    blocks = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
    for part in (*blocks, model):
        fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=options["reshard"])
    return _loop(context, model, torch.optim.AdamW(model.parameters(), fused=True, **context.work.adamw))
