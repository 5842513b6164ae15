"""Optimizers that need whole tensors, Muon above all: one owner for each parameter, by the layout alone.

Muon orthogonalises a matrix, LAMB takes a layer's norm, Adafactor keeps rows and columns, Shampoo and SOAP multiply by
them: a new value depends on all of its own tensor, and on no other. Such an optimizer, or a group of it, is *per
tensor*, and says so: the optimizer by an attribute ``per_tensor = True``, a param group by a key of that name, which
wins. (Nothing is guessed by class; :mod:`deepzero.runtime.elementwise_check` tries what was declared.)

ZeRO needs no second mechanism for it. :func:`plan_whole_parameters` lays such a group out so that each parameter lies
whole in one rank's part of its bucket. Reduction, norm, publication, fetches and checkpoints see a layout like any
other. The optimizer's tensors alone are shown in the parameter's shape, so that the owner's ``step()`` is the one that
the class was written for, and runs once, on one rank, in the optimizer step and nowhere else::

    W = 3, matrices a … e of one size,      bucket 0          bucket 1: what is left
    f and g of another                     | a | b | c |     | d | e | f g |

The price is padding where W does not divide the number of matrices of a size, and a bucket's least size: W parameters,
whatever ``reduce_bucket_size`` says. DeepSpeed cuts Muon's momentum flat and gathers it for every update.

Source: [PyTorch], ``torch/optim/_muon.py``, for what an owner computes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from deepzero.layout import ALIGN, Bucket, FlatLayout, ParamSlot, plan_layout, round_up

PER_TENSOR = "per_tensor"


def is_per_tensor(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> bool:
    """Whether a param group is declared per tensor, by itself or by its optimizer.

    Example:
        >>> weights = [{"params": [torch.zeros(2, 2, requires_grad=True)], "per_tensor": True}]
        >>> optimizer = torch.optim.Adafactor(weights)
        >>> is_per_tensor(optimizer, optimizer.param_groups[0])
        True
    """
    return bool(group.get(PER_TENSOR, getattr(optimizer, PER_TENSOR, False)))


def plan_group(
    params: Sequence[torch.Tensor], world_size: int, limit: int, per_tensor: bool, shard_align: int = ALIGN
) -> FlatLayout:
    """The layout of one group: parameters end to end, or each whole on one rank."""
    plan = plan_whole_parameters if per_tensor else plan_layout
    return plan([p.numel() for p in params], world_size, limit, shard_align=shard_align)


def plan_whole_parameters(
    numels: Sequence[int], world_size: int, bucket_limit: int, align: int = ALIGN, shard_align: int | None = None
) -> FlatLayout:
    """Lay parameters out so that no rank's part cuts one. Arguments are those of :func:`~deepzero.layout.plan_layout`.

    W parameters of one size make a row, one for each rank; consecutive rows make a bucket, as long as it is not larger
    than ``bucket_limit``. Of each size fewer than W are left. These share the last bucket: the largest first, each goes
    to the rank whose part is the smallest so far.

    Example:
        >>> layout = plan_whole_parameters([1000, 64, 1000, 64, 1000], world_size=2, bucket_limit=2048)
        >>> [[[f.slot.index for f in layout.fragments(rank)] for rank in (0, 1)], layout.padded_numel]
        [[[0, 1, 4], [2, 3]], 4224]
    """
    rows: list[list[int]] = []
    waiting: dict[int, list[int]] = {}  # by size, in the order in which gradients arrive
    for index, numel in enumerate(numels):
        waiting.setdefault(numel, []).append(index)
        if len(waiting[numel]) == world_size:
            rows.append(waiting.pop(numel))
    dealt: list[list[list[int]]] = []  # of each bucket, of each rank: its parameters
    filled = 0
    for row in rows:
        extent = world_size * round_up(numels[row[0]], align)
        if not dealt or filled + extent > bucket_limit:
            dealt.append([[] for _ in range(world_size)])
            filled = 0
        filled += extent
        for part, index in zip(dealt[-1], row, strict=True):
            part.append(index)
    if waiting:
        dealt.append([[] for _ in range(world_size)])
        loads = [0] * world_size
        for index in sorted(itertools.chain(*waiting.values()), key=lambda index: -numels[index]):
            rank = loads.index(min(loads))
            dealt[-1][rank].append(index)
            loads[rank] += round_up(numels[index], align)
    buckets: list[Bucket] = []
    start = 0
    for parts in dealt:
        # At least one aligned block for each rank, as every rank takes part in every collective.
        longest = max(1, *(sum(round_up(numels[index], align) for index in part) for part in parts))
        extent = round_up(longest, shard_align or align)
        slots = list[ParamSlot]()
        for rank, part in enumerate(parts):
            cursor = start + rank * extent
            for index in part:
                slots.append(ParamSlot(index, cursor, numels[index]))
                cursor += round_up(numels[index], align)
        buckets.append(Bucket(len(buckets), start, world_size * extent, start // world_size, tuple(slots), world_size))
        start += world_size * extent
    by_index = sorted((slot for bucket in buckets for slot in bucket.slots), key=lambda slot: slot.index)
    return FlatLayout(world_size, tuple(by_index), tuple(buckets))


# ---- what the optimizer keeps ----------------------------------------------------------------------------------------

EXTENTS = (64, 48, 17, 19, 23)
"""Of a tensor on which a step is tried: by these, one for each dimension, the extents of its state are recognised."""


@dataclass(frozen=True)
class StateBytes:
    """What an optimizer keeps for the parameters of one group, in bytes.

    ``kinds``: for parameters of so many dimensions, the extents of each state tensor, those of :data:`EXTENTS` standing
    for the parameter's, and the bytes of an element. A number of dimensions that is not there is that of a parameter
    that is cut: it counts as 1-D.
    """

    kinds: Mapping[int, Sequence[tuple[Sequence[int], int]]]

    @classmethod
    def of_trial(cls, states: Mapping[int, Sequence[torch.Tensor]]) -> StateBytes:
        """Read it off the state tensors that one step has made for a tensor of so many :data:`EXTENTS`."""
        like = lambda dims, t: EXTENTS[:dims] if t.numel() == math.prod(EXTENTS[:dims]) else t.shape
        return cls({d: [(like(d, t), t.element_size()) for t in made if t.dim()] for d, made in states.items()})

    @property
    def per_element(self) -> int:
        """Bytes per element of what has the parameter's extent; the most, where it depends on the dimensions."""
        sums = [sum(size for extents, size in made if extents == EXTENTS[:dims]) for dims, made in self.kinds.items()]
        return max(sums, default=0)

    def of(self, shape: Sequence[int]) -> int:
        """Bytes for a parameter of this shape."""
        shape = shape if len(shape) in self.kinds else [math.prod(shape)]
        known = dict(zip(EXTENTS, shape, strict=False))
        made = self.kinds.get(len(shape), ())
        return sum(size * math.prod(known.get(extent, extent) for extent in extents) for extents, size in made)
