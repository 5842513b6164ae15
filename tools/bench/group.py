"""Joining and leaving the process group, for the contenders that do not do it themselves.

The benchmark uses ``torch.distributed`` directly, outside ``deepzero/comm``: peers must run without any of deepzero's
code, or they would not be peers.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from tools.bench.workload import Workload


def join(work: Workload) -> None:
    """Initialise the default process group from the environment: gloo on CPU, NCCL on CUDA."""
    cuda = work.device == "cuda"
    # NCCL asks for the device, or guesses it at the first barrier with a warning.
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else None
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(seconds=300), device_id=device)


def barrier() -> None:
    """Wait for all ranks, where a process group exists."""
    if dist.is_initialized():
        dist.barrier()


def leave() -> None:
    """Destroy the default process group, whoever made it."""
    if dist.is_initialized():
        dist.destroy_process_group()


def gather_into(out: torch.Tensor, part: torch.Tensor, async_op: bool = False) -> dist.Work | None:
    """All-gather equal parts into one tensor, under the name that the installed torch uses without a warning."""
    return _named("all_gather_single", "all_gather_into_tensor")(out, part, async_op=async_op)


def reduce_scatter_into(part: torch.Tensor, whole: torch.Tensor, async_op: bool = False) -> dist.Work | None:
    """Reduce-scatter one tensor into equal parts, as :func:`gather_into`."""
    return _named("reduce_scatter_single", "reduce_scatter_tensor")(part, whole, async_op=async_op)


def _named(current: str, older: str):  # type: ignore[no-untyped-def]
    # torch 2.13 renamed both; releases before it have the older name alone.
    return getattr(dist, current, None) or getattr(dist, older)
