"""An engine as one rank of many, of which the others are not there and say what this one says."""

import contextlib
from unittest import mock

import torch

from deepzero.comm import exact_sum, process_group
from deepzero.comm.collectives import Communicator, DryRunCommunicator
from deepzero.runtime import engine
from deepzero.runtime.zero import partition_parameters


class Mirrored(DryRunCommunicator):
    """Of tensors with memory."""

    data_ptr, alias = Communicator.data_ptr, Communicator.alias
    sum_in_rank_order = staticmethod(exact_sum.sum_in_rank_order)


@contextlib.contextmanager
def one_of_many(who, kind=DryRunCommunicator, device="meta"):
    """Inside, this process builds engines as ``who``, on ``device``."""
    world = who.world_size
    said = {
        "is_initialized": lambda: True,
        "rank": lambda: who.rank,
        "world_size": lambda: world,
        "default_device": lambda: torch.device(device),
        "ranks_of_host": lambda: who.ranks_of_host,
        "barrier": lambda: None,
        "broadcast_object": lambda value, src=0: value,
        "broadcast_tensor": lambda *_: None,
        "all_gather_object": lambda value: [value] * world,
        "gather_object": lambda value, dst=0: [value] * world if dst == who.rank else None,
        "gather_and_sum": lambda vector, device: vector * world,
    }
    with contextlib.ExitStack() as stack:
        for name, value in said.items():
            stack.enter_context(mock.patch.object(process_group, name, value))
        opened = lambda config, *_: kind.open(config, who, device=device)
        stack.enter_context(mock.patch.object(engine, "open_communicator", opened))
        made = lambda device, ledger, chaos: kind(who, ledger, chaos, device=device)
        stack.enter_context(mock.patch.object(partition_parameters, "Communicator", made))
        yield
