"""What an engine holds, parameter by parameter: the runs of elements that a checkpoint stores and that loading fills.

The one place that relates the layout of ZeRO's tensors to the rows of a manifest. Saving takes the runs as they are;
loading fills the same runs with what rows of any layout hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from deepzero.checkpoint.errors import CheckpointError
from deepzero.checkpoint.manifest import PARAMETER, Entry
from deepzero.comm.collectives import Communicator
from deepzero.runtime.zero.stage3 import PartitionedParamGroup
from deepzero.runtime.zero.stage_1_and_2 import ParamGroup


def plain_name(name: str) -> str:
    """A parameter's name without what ``torch.compile`` puts into the names of modules that it wraps."""
    return name.replace("_orig_mod.", "")


def class_name(thing: Any) -> str:
    """Module and name of an object's class."""
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, 1-D."""
    return tensor.detach().view(-1)


@dataclass(frozen=True)
class StateRun:
    """Elements of one trained parameter that this rank stores and reads: from ``start`` within the parameter.

    The optimizer's tensor is this run or, in stage 0, the whole parameter; in it the run begins at ``first``.
    """

    name: str
    start: int
    numel: int
    master: torch.Tensor
    first: int
    per_tensor: bool = False  # the whole parameter, in its shape

    def cut(self, tensor: torch.Tensor) -> torch.Tensor:
        """The run, 1-D, out of a tensor of the master's extent."""
        return flat(tensor)[self.first : self.first + self.numel]


@dataclass(frozen=True)
class EngineState:
    """An engine's model state, and who else has it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    groups: Sequence[ParamGroup]
    frozen: Sequence[PartitionedParamGroup]
    """Groups of partitioned parameters that are not trained."""
    comm: Communicator
    compute_dtype: torch.dtype

    def masters(self, group: ParamGroup) -> dict[int, torch.Tensor]:
        """The masters that this rank holds of one group, by the parameter's index in it."""
        return {fragment.slot.index: m for fragment, m in zip(group.fragments, group.masters, strict=True)}

    def runs(self) -> Iterator[StateRun]:
        """This rank's runs, in the order of its shares. In stage 0, too, each rank has its part."""
        for group in self.groups:
            masters = self.masters(group)
            for fragment in group.layout.fragments(self.comm.rank):
                first, master = fragment.start if group.whole else 0, masters[fragment.slot.index]
                name = plain_name(group.names[fragment.slot.index])
                yield StateRun(name, fragment.start, fragment.numel, master, first, group.per_tensor)

    def frozen_runs(self) -> Iterator[Entry]:
        """This rank's elements of partitioned parameters that are not trained."""
        for group in self.frozen:
            for fragment in group.fragments:
                name = plain_name(group.names[fragment.slot.index])
                yield Entry(PARAMETER, name, fragment.start, group.param_fragment(fragment))

    def optimizer_state(self, run: StateRun) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """What the optimizer keeps for each element, of the master's shape; and for a parameter as a whole.

        Raises:
            CheckpointError: it keeps a tensor that is neither, for a parameter of which others have parts.
        """
        moments: dict[str, torch.Tensor] = {}
        scalars: dict[str, Any] = {}
        state = self.optimizer.state.get(run.master, {})
        for key, value in state.items():
            if torch.is_tensor(value) and value.dim() > 0 and value.shape == run.master.shape:
                # What is read and written as one run has to lie so.
                moments[key] = state[key] = value.contiguous()
            elif torch.is_tensor(value) and value.numel() != 1 and not run.per_tensor:
                raise CheckpointError(
                    f"the optimizer keeps {key!r} of shape {tuple(value.shape)} for parameter {run.name!r}, which is "
                    "neither one value for each element nor a number; such state cannot be saved"
                )
            else:
                scalars[key] = value
        return moments, scalars

    # ---- what all ranks hold alike -----------------------------------------------------------------------------------

    def names(self) -> dict[nn.Parameter, list[str]]:
        """All names of each parameter, the one that ZeRO uses first."""
        names: dict[nn.Parameter, list[str]] = {}
        for name, param in self.model.named_parameters(remove_duplicate=False):
            names.setdefault(param, []).append(plain_name(name))
        return names

    def replicated(self) -> dict[str, torch.Tensor]:
        """Parameters that are whole and have no master: not trained, or in no group of the optimizer."""
        groups: list[ParamGroup] = [*self.groups, *self.frozen]
        elsewhere = {param for group in groups for param in group.params}
        return {names[0]: p.data for p, names in self.names().items() if p not in elsewhere}

    def buffers(self) -> dict[str, torch.Tensor]:
        """The buffers that belong into a state dict, by name; a shared one once.

        Raises:
            CheckpointError: a module has extra state, which may be any object.
        """
        found: dict[str, torch.Tensor] = {}
        for prefix, module in self.model.named_modules():
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                raise CheckpointError(
                    f"module {prefix!r} has extra state (get_extra_state), which deepzero's checkpoints do not hold; "
                    "keep it in buffers, or save it through client_state"
                )
            for key, buffer in module._buffers.items():
                if buffer is not None and key not in module._non_persistent_buffers_set:
                    found[plain_name(f"{prefix}.{key}" if prefix else key)] = buffer
        return found

    def trained(self) -> dict[str, ParamGroup]:
        """Every trained parameter's group."""
        return {plain_name(name): group for group in self.groups for name in group.names}

    def shares(self, sizes: dict[str, int]) -> dict[str, int]:
        """Who stores or reads what all hold alike: name → rank, so that ranks have about the same number of bytes."""
        load, owner = [0] * self.comm.world_size, {}
        for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
            owner[name] = load.index(min(load))
            load[owner[name]] += sizes[name]
        return owner
