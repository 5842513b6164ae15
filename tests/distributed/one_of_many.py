"""An engine as one rank of many, of which the others are not there and say what this one says."""

import contextlib
from unittest import mock

import torch

from deepzero.comm import exact_sum, process_group
from deepzero.comm.collectives import Communicator, DryRunCommunicator
from deepzero.config.engine import EngineConfig
from deepzero.device import accelerator_of
from deepzero.runtime import engine
from deepzero.runtime.zero.partition_parameters import Init


class Mirrored(DryRunCommunicator):
    """Of tensors with memory."""

    data_ptr, alias = Communicator.data_ptr, Communicator.alias
    sum_in_rank_order = staticmethod(exact_sum.sum_in_rank_order)

    def __init__(self, who, ledger, chaos, nodes=None, device="meta"):
        super().__init__(who, ledger, chaos, nodes, device)
        mine = accelerator_of(self.device)
        if mine.has_streams:  # simulated ones
            self._torch, _ = mine.collectives(None, "")


@contextlib.contextmanager
def one_of_many(who, kind=DryRunCommunicator, device="meta"):
    """Inside, this process builds engines as ``who``, on ``device``."""
    said = {
        "is_initialized": True,
        "rank": who.rank,
        "world_size": who.world_size,
        "default_device": torch.device(device),
    }
    replaced = [(process_group, name, lambda value=value: value) for name, value in said.items()]
    replaced += [
        (process_group, "all_gather_object", lambda value: [value] * who.world_size),
        (process_group, "broadcast_tensor", lambda *_: None),
        (engine, "open_communicator", lambda config, *_: kind.open(config, who, device=device)),
        (Init, "communicator", kind.open(EngineConfig(), who, device=torch.device(device))),
    ]
    with contextlib.ExitStack() as stack:
        for holder, name, value in replaced:
            stack.enter_context(mock.patch.object(holder, name, value))
        yield
