"""Step 0 of stage 3, before a tensor moves: what is partitioned, over which buckets, and how these will travel.

In the order of the build: :func:`plan_partitioning` groups the parameters and cuts the groups into buckets ·
:func:`limit_lookahead` says how much of them may be gathered · :func:`gather_builders` chooses between the strategies
of ``zeropp.py``, for trained and for frozen parameters. ``stage3.py:partition_model`` does what is planned.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial

import torch
from torch import nn

from deepzero.comm.collectives import Communicator
from deepzero.config.zero import ZeroConfig
from deepzero.layout import FlatLayout, choose_bucket_limit
from deepzero.placement import GroupPlan
from deepzero.runtime.per_tensor import plan_group
from deepzero.runtime.zero.buffer_pool import BufferPool
from deepzero.runtime.zero.parameter_all_gather import PlainAllGather
from deepzero.runtime.zero.zeropp import build_all_gather, build_quantizer

log = logging.getLogger(__name__)

GatherBuilder = Callable[[PlainAllGather], PlainAllGather]


def is_real(param: nn.Parameter) -> bool:
    """Whether its elements are numbers that can be cast; two to a byte are not."""
    return param.is_floating_point() and param.dtype is not getattr(torch, "float4_e2m1fn_x2", None)


def plan_partitioning(
    names: Mapping[nn.Parameter, str],
    chosen: Sequence[Sequence[nn.Parameter]],
    config: ZeroConfig,
    world_size: int,
    per_tensor: Container[int] = (),
) -> tuple[list[GroupPlan], int]:
    """The groups, trained ones first, and to how many elements :func:`limit_lookahead` limits. Pure numbers.

    ``names`` has all parameters, ``chosen`` the trainable ones of each optimizer group, as their gradients arrive;
    ``per_tensor`` are the numbers of the optimizer groups of which each parameter is some rank's as a whole.
    """
    threshold = config.stage3_param_persistence_threshold
    trained = {param for params in chosen for param in params}
    # Backwards, as trained ones come: neighbours in the model are neighbours in a bucket.
    frozen = [p for p in reversed(list(names)) if p not in trained and is_real(p) and p.numel() > threshold]
    total = sum(param.numel() for params in (*chosen, frozen) for param in params)
    limit = choose_bucket_limit(total, config.reduce_bucket_size, config.allgather_bucket_size)
    # Two buckets are needed at a time: the one that is computed with and the next one.
    limit = min(limit, max(config.stage3_max_live_parameters // 2, 1))
    wanted: list[tuple[Sequence[nn.Parameter], int | None, bool]] = []
    for index, params in enumerate(chosen):
        # Biases and norms are most of the parameters and few of the elements. Partitioned, each would be in some bucket
        # twice per micro-batch; whole, they cost little memory and one all-gather per step.
        wanted.append(([p for p in params if p.numel() > threshold], index, True))
        wanted.append(([p for p in params if p.numel() <= threshold], index, False))
    wanted.append((frozen, None, True))
    plan = lambda params, index: plan_group(params, world_size, limit, index in per_tensor, config.shard_align)
    groups = [
        GroupPlan(params, plan(params, index), index, partitioned, index in per_tensor)
        for params, index, partitioned in wanted
        if params
    ]
    # A layer's matrices that are laid out per tensor lie in a bucket for each size, with those of the next layers: what
    # is fetched ahead, and what is kept until it is used again, has room for a row of every size.
    sizes = [numel for g in groups if g.per_tensor and g.partitioned for numel in {p.numel() for p in g.params}]
    return groups, max(limit, world_size * sum(sizes))


def limit_lookahead(config: ZeroConfig, limit: int) -> ZeroConfig:
    """DeepSpeed's three numbers, for buckets of at most ``limit`` elements, or of one larger parameter.

    They are upper limits, with defaults (5e7, 1e9, 1e9) that are made for models of many billions: taken literally, a
    model below 1e9 elements would be gathered once and never released between forward and backward. So looking ahead
    and keeping are limited to ``limit``: a bucket's largest size (``layout.py:choose_bucket_limit``), or for groups
    that are laid out per tensor a row of buckets.
    """
    return dataclasses.replace(
        config,
        stage3_prefetch_bucket_size=min(config.stage3_prefetch_bucket_size, limit),
        stage3_max_reuse_distance=min(config.stage3_max_reuse_distance, limit),
    )


def gather_builders(
    planned: Sequence[GroupPlan], config: ZeroConfig, comm: Communicator, dtype: torch.dtype
) -> tuple[GatherBuilder, GatherBuilder, list[BufferPool]]:
    """What makes a bucket's all-gather into the configured one: for trained parameters, and for frozen ones.

    Also returns the pool of quantised messages, if there are any. ``dtype`` is the compute dtype. A collective.
    """
    if comm.world_size == 1:
        return build_all_gather, build_all_gather, []
    layouts = {
        frozen: [g.layout for g in planned if g.partitioned and g.trained is not frozen] for frozen in (False, True)
    }
    if comm.rank == 0:
        _name_idle_switches(config, layouts)
    # In a group of one rank hpZ would keep what is there anyway; MiCS keeps the whole model on every rank then.
    size, mics = config.secondary_size, config.mics_shard_size > 0
    group = comm.split(size)[0] if size > 1 or mics else None
    weights = config.zero_quantized_weights
    quantized = {False: weights, True: weights or config.zero_quantized_nontrainable_weights}
    settings, quantization, pools = config.quantization, None, list[BufferPool]()
    if quantized[True]:
        # Every rank decodes everything twice, and encodes its own shard: whether compiling a kernel pays depends on it.
        chosen = [layout for frozen in (False, True) if quantized[frozen] for layout in layouts[frozen]]
        numel = 2 * sum(layout.padded_numel for layout in chosen)
        quantizer = build_quantizer("weights", settings.weight_bits, settings, numel, [dtype], comm)
        # One size for all: a buffer of the pool fits whatever bucket comes next.
        shard_numel = max((layout.largest_bucket for layout in chosen), default=0) // comm.world_size
        pools = [build_pool(torch.uint8, config, comm)]
        quantization = (quantizer, pools[0], comm.world_size * quantizer.format.message_bytes(shard_numel))
    build = partial(build_all_gather, group=group, mics=mics)
    for_trained = partial(build, frozen=False, quantization=quantization if quantized[False] else None)
    return for_trained, partial(build, frozen=True, quantization=quantization), pools


def build_pool(dtype: torch.dtype, config: ZeroConfig, comm: Communicator) -> BufferPool:
    """Buffers for gathered buckets, or for their messages."""
    reuses = comm.device_type == "cpu"
    return BufferPool(dtype, comm.device, config.stage3_max_live_parameters, comm.chaos, reuses, comm.alias)


def _name_idle_switches(config: ZeroConfig, layouts: Mapping[bool, Sequence[FlatLayout]]) -> None:
    """Log which of ZeRO++'s settings have nothing to work on in this model."""
    names = [] if any(layouts.values()) else ["zero_quantized_weights", "zero_hpz_partition_size", "mics_shard_size"]
    names += [] if layouts[True] else ["zero_quantized_nontrainable_weights"]
    off = {"zero_hpz_partition_size": 1, "mics_shard_size": -1}
    for name in names:
        if getattr(config, name) != off.get(name, False):
            log.warning(
                "zero.%s does nothing here: no %sparameter has more than stage3_param_persistence_threshold=%d "
                "elements, so none is partitioned",
                name, "frozen " if "nontrainable" in name else "", config.stage3_param_persistence_threshold,
            )  # fmt: skip
