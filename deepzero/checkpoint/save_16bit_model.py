"""One whole model from a running engine: gathered parameter by parameter, written by rank 0 as it comes. Collective.

The files are those of :mod:`deepzero.checkpoint.export`; there the values come from a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from deepzero.checkpoint.engine_state import EngineState
from deepzero.checkpoint.json_codec import DTYPES, TORCH_DTYPES
from deepzero.checkpoint.manifest import CheckpointError
from deepzero.checkpoint.model_file import ModelWriter, TensorPlan, convert, parse_size, wanted_dtype
from deepzero.comm import process_group
from deepzero.comm.process_group import raise_on_all_ranks
from deepzero.runtime.zero.partition_parameters import GatheredParameters


def save_gathered(
    holdings: EngineState, folder: Path, filename: str, with_frozen: bool, max_shard_size: str | int
) -> None:
    """Write the model in the compute dtype. A collective.

    Args:
        holdings: the model state.
        folder: where the files go.
        filename: of the only file; those of several are named after it.
        with_frozen: also parameters that are not trained.
        max_shard_size: of one file.

    Raises:
        CheckpointError: on every rank.
    """
    problem, writer, tensors = None, None, {}
    try:
        tensors = _tensors(holdings, with_frozen)
        plans = [_plan(name, *found, holdings.compute_dtype) for name, found in tensors.items()]
        writer = ModelWriter(folder, plans, parse_size(max_shard_size), filename, replace=True)
    except CheckpointError as error:
        problem = str(error)
    raise_on_all_ranks(problem, CheckpointError)
    mine = (str(folder), filename, max_shard_size, with_frozen)
    first = process_group.broadcast_object(mine)
    raise_on_all_ranks(
        None if mine == first else f"save_16bit_model{mine}, but rank 0 calls it with {first}; pass the same",
        CheckpointError,
    )
    if writer is None:
        raise CheckpointError("the model was not planned")
    values = _values(writer.order, {name: tensor for name, (tensor, _) in tensors.items()})
    problem = None
    if process_group.rank() == 0:
        try:
            with writer:
                writer.write(_converted(values))
        except Exception as error:  # a full disk, no memory: the others are told below
            problem = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
    # The other ranks gather and drop; so does rank 0 with what is left after an error. The ranks stay in step.
    for _ in values:
        pass
    raise_on_all_ranks(problem, CheckpointError)


def _tensors(holdings: EngineState, with_frozen: bool) -> dict[str, tuple[torch.Tensor, tuple[str, ...]]]:
    """Parameters, then buffers: by name, the tensor and its other names."""
    trained = holdings.trained()
    found: dict[str, tuple[torch.Tensor, tuple[str, ...]]] = {
        name: (param, tuple(aliases))
        for param, (name, *aliases) in holdings.names().items()
        if with_frozen or name in trained
    }
    return found | {name: (buffer, ()) for name, buffer in holdings.buffers().items()}


def _plan(name: str, tensor: torch.Tensor, aliases: tuple[str, ...], dtype: torch.dtype) -> TensorPlan:
    if tensor.dtype not in DTYPES:
        raise CheckpointError(f"{name!r} is {tensor.dtype}, which cannot be saved")
    return TensorPlan(name, wanted_dtype(DTYPES[tensor.dtype], dtype), tuple(tensor.shape), aliases)


def _values(
    plans: list[TensorPlan], tensors: dict[str, torch.Tensor]
) -> Iterator[tuple[TensorPlan, int, torch.Tensor]]:
    """Piece by piece, in the tensors' own dtypes and on their device."""
    for plan in plans:
        tensor = tensors[plan.name]
        with GatheredParameters(tensor if isinstance(tensor, torch.nn.Parameter) else []):
            flat = tensor.detach().reshape(-1)
            for start, stop in plan.fragments():
                yield plan, start, flat[start:stop]


def _converted(
    values: Iterator[tuple[TensorPlan, int, torch.Tensor]],
) -> Iterator[tuple[TensorPlan, int, torch.Tensor]]:
    """On rank 0 only: what it cannot convert must not stop the others' gathering."""
    for plan, start, fragment in values:
        dtype = TORCH_DTYPES[plan.dtype]
        yield plan, start, convert(fragment, dtype, plan.name).cpu() if dtype.is_floating_point else fragment.cpu()
