"""A linear layer in tiles, each of which stage 3 fetches by itself: so a huge matrix is never whole on a rank.

Source: ``TiledLinear`` and ``TiledLinearReturnBias`` in ``runtime/zero/tiling.py`` of [DeepSpeed].
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from deepzero.runtime.zero.partition_parameters import GatheredParameters


class TiledLinear(nn.Module):
    """``nn.Linear(in_features, out_features)`` in ``out_splits`` × ``in_splits`` layers, ``linears[row][column]``.

    They lie between ``out_parts[row]`` and the next, ``in_parts[column]`` and the next; sizes differ by at most one. A
    row's last tile has the bias.

    Args:
        input_is_already_split, combine_out_splits: ``forward`` takes the parts of its input, or returns a whole output.
        init_linear: a layer whose values are taken over, by :meth:`copy_params_from`.
        kwargs: what makes a tile: ``linear_cls``, which is ``nn.Linear``, and its own keywords.

    Raises:
        RuntimeError: more parts than features, or none.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        init_linear: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        linear_cls = kwargs.pop("linear_cls", nn.Linear)
        if not (1 <= in_splits <= in_features and 1 <= out_splits <= out_features):
            sizes = f"{in_features} inputs and {out_features} outputs"
            raise RuntimeError(f"TiledLinear: {sizes} cannot be cut into {in_splits} and {out_splits} parts")
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        self.in_splits, self.out_splits = in_splits, out_splits
        self.input_is_already_split, self.combine_out_splits = input_is_already_split, combine_out_splits
        self.in_parts, self.out_parts = _cuts(in_features, in_splits), _cuts(out_features, out_splits)
        self.linears: Any = nn.ModuleList()
        for top, bottom in pairwise(self.out_parts):
            across = [(left, right) for left, right in pairwise(self.in_parts)]
            tiles = [linear_cls(r - l, bottom - top, bias=bias and r == in_features, **kwargs) for l, r in across]
            self.linears.append(nn.ModuleList(tiles))
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def forward(self, input_: Any) -> Any:
        """``[…, in_features]``, or the list of its parts, to ``[…, out_features]``, or the list of those."""
        parts = input_ if self.in_splits > 1 else [input_]
        if self.in_splits > 1 and not self.input_is_already_split:
            parts = input_.tensor_split(self.in_parts[1:-1], dim=-1)
        # Row by row, so that one tile after the other is fetched; ``zip`` raises for another number of parts.
        rows = [[tile(part) for tile, part in zip(row, parts, strict=True)] for row in self.linears]
        outputs = [reduce(self._add, row) for row in rows]
        return self._join(outputs) if self.combine_out_splits else outputs

    def _add(self, one: Any, other: Any) -> Any:
        return one + other

    def _join(self, outputs: Sequence[Any]) -> Any:
        return torch.cat(list(outputs), dim=-1)

    @torch.no_grad()
    def copy_params_from(self, other: Any) -> None:
        """Take over the values of a layer of this size, rank 0's. A collective; a ValueError for other sizes."""
        with GatheredParameters([other.weight, other.bias]):
            if other.weight.shape != (self.out_features, self.in_features) or (other.bias is None) is self.use_bias:
                raise ValueError(f"TiledLinear: {other} differs in its size, or in having a bias")
            for row, (top, bottom) in zip(self.linears, pairwise(self.out_parts), strict=True):
                for tile, (left, right) in zip(row, pairwise(self.in_parts), strict=True):
                    with GatheredParameters(tile.parameters(), modifier_rank=0):
                        tile.weight.copy_(other.weight[top:bottom, left:right])
                        if tile.bias is not None:
                            tile.bias.copy_(other.bias[top:bottom])


class TiledLinearReturnBias(TiledLinear):
    """:class:`TiledLinear` of layers that return ``(output, bias or None)`` and leave the addition to the caller."""

    def _add(self, one: Any, other: Any) -> Any:
        return one[0] + other[0], one[1] if other[1] is None else other[1]

    def _join(self, outputs: Sequence[Any]) -> Any:
        biases = [bias for _, bias in outputs if bias is not None]
        return super()._join([output for output, _ in outputs]), super()._join(biases) if biases else None


def _cuts(features: int, parts: int) -> list[int]:
    """Where each part begins, and where the last one ends; what is left over goes to the first ones."""
    size, more = divmod(features, parts)
    return [part * size + min(part, more) for part in range(parts + 1)]
