"""Simulated streams for tests: any number of ranks, of which this process is the first one, alone."""

from __future__ import annotations

import contextlib

import torch

from deepzero.comm.collectives import DryRunRank
from deepzero.comm.simulated_streams import SimulatedAccelerator, Transport, simulated_streams
from tests.distributed.one_of_many import Mirrored, one_of_many

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


class Mirrors(Transport):
    """The other ranks have what this one has, and send what it would have sent them."""

    def exchange(self, outputs, inputs, group):
        for output, given in zip(outputs, inputs, strict=True):
            if output.numel() == given.numel():
                output.copy_(given)

    def gather(self, whole, mine, group):
        for part in whole.split(mine.numel()):
            part.copy_(mine)

    def scatter(self, output, whole):
        torch.mul(whole[: output.numel()], whole.numel() // output.numel(), out=output)

    def reduce(self, tensor):
        tensor.mul_(self.world)


@contextlib.contextmanager
def null_gpu(mirrors=0, locks=True):
    """Inside, this rank computes on ``cuda:0``; yields the machine that looks on."""
    accelerator = SimulatedAccelerator(locks)
    with contextlib.ExitStack() as stack:
        machine = stack.enter_context(simulated_streams(accelerator))
        if mirrors:
            accelerator.transport_class = type("", (Mirrors,), {"world": mirrors})
            stack.enter_context(one_of_many(DryRunRank(0, mirrors, "cuda", mirrors), Mirrored, str(GPU)))
        yield machine
