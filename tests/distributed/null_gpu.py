"""Simulated streams for tests: any number of ranks, of which this process is the first one, alone."""

import contextlib
import gc

import torch

import deepzero
from deepzero.comm.collectives import ALL_GATHER, REDUCE_SCATTER, DryRunRank
from deepzero.comm.simulated_streams import SimulatedAccelerator, Transport, simulated_streams
from tests.distributed.one_of_many import Mirrored, one_of_many
from tests.distributed.training import KINDS

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


class Mirrors(Transport):
    """The other ranks have what this one has, and send what it would have sent them."""

    def carry(self, name, *tensors, group):
        target, source = tensors if len(tensors) > 1 else (*tensors, None)
        if name == "all_to_all":
            for output, given in zip(target, source, strict=True):
                if output.numel() == given.numel():
                    output.copy_(given)
        elif name == ALL_GATHER:
            for part in target.split(source.numel()):
                part.copy_(source)
        elif name == REDUCE_SCATTER:
            torch.mul(source[: target.numel()], self.world, out=target)
        else:
            target.mul_(self.world)


class LocksNoPages(SimulatedAccelerator):
    """A system that refuses."""

    def lock_pages(self, address, nbytes, d):
        raise OSError("CUDA error 2")


@contextlib.contextmanager
def null_gpu(mirrors=0, locks=True):
    """Inside, this rank computes on ``cuda:0``; yields the machine that looks on."""
    accelerator = SimulatedAccelerator() if locks else LocksNoPages()
    with contextlib.ExitStack() as stack:
        machine = stack.enter_context(simulated_streams(accelerator))
        if mirrors:
            accelerator.transport_class = type("", (Mirrors,), {"world": mirrors})
            stack.enter_context(one_of_many(DryRunRank(0, mirrors, "cuda", mirrors), Mirrored, str(GPU)))
        yield machine


@contextlib.contextmanager
def engine_in(place, given, kind="plain", init=False):
    """An engine over a model of ``KINDS``, and the machine of ``place``; afterwards nothing of the engine is left."""
    torch.manual_seed(0)
    with place as machine:
        with deepzero.zero.Init(enabled=init, remote_device="cpu"):
            model = KINDS[kind]()
        engine = deepzero.initialize(model=model, config=given)[0]
        yield engine, machine
        engine.destroy()
        del engine, model
        gc.collect()
