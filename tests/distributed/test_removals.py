"""Gates, drains and poisons are needed: without one of them (a list says where not) something raises or differs."""

import contextlib
from unittest import mock

import pytest
import torch

import deepzero
from deepzero.comm.collectives import Communicator, DryRunRank
from tests.distributed.null_gpu import CPU, GPU, engine_in, null_gpu
from tests.distributed.one_of_many import Mirrored, one_of_many
from tests.distributed.test_offload import settings
from tests.distributed.training import make_batch, step_on
from tools import waits
from tools.stream_programs import OFFLOADED, PROGRAMS

VERBS = {
    "poison", "settle", "_settle", "drain", "wait_all", "wait_event", "finish_reads", "before_write", "prepare_writes",
    "_catch_up", "arrive", "_wait_for_update", "wait_shard",
}  # fmt: skip
"""The waits of an event, a copy or a collective themselves are in ``test_waits.py``."""

ON_GPU = {
    "deepzero.comm.reduce_scatter": ("stage 2", "alone", "stage 0", "quantized"),
    "deepzero.runtime.zero.parameter_all_gather": ("stage 3", "quantized", "qwZ", "hybrid", "alone in stage 3"),
    "deepzero.runtime.zero.zeropp": ("quantized", "qwZ", "hybrid"),
    "deepzero.runtime.zero.partitioned_bucket": ("stage 3", "stage 3 on the host", "quantized", "hybrid"),
    "deepzero.runtime.zero.stage3": ("stage 3",),
    "deepzero.runtime.zero.buffer_pool": ("stage 3", "quantized"),
    "deepzero.offload.optimizer_offload": ("offload", "offload in fp32", "stage 3 on the host", "alone in stage 3"),
    "deepzero.runtime.zero.gradient_reduction": ("offload",),
    "deepzero.runtime.zero.stage_1_and_2": ("stage 0", "stage 2", "offload", "alone"),
    "deepzero.offload.copy_streams": ("offload", "stage 3", "alone"),
    "deepzero.offload.activations": ("alone",),
    "deepzero.offload.offload_states": ("offload",),
}
"""Where each module's statements are looked for, there and then on the CPU under chaos."""

FILES = {f"{module.partition('.')[2].replace('.', '/')}.py": module for module in ON_GPU}
REMOVALS = {}
"""The calls that are statements, as ``UNNOTICED`` names them."""
for site in waits.sites(FILES, VERBS):
    if site.statement:
        named = f"{FILES[site.file].rpartition('.')[2]}.{site.function}: {site.words}"
        again = sum(other.partition(" #")[0] == named for other in REMOVALS)
        REMOVALS[named + f" #{again}" * (again > 0)] = site


EARLIER = "the backward pass settles too; this gives memory back before it"
KNOWN = "whoever writes here has stood still for the device; a load has not, see test_null_gpu.py"
UNNOTICED = {
    "offload_states.StateOffloader._come_to_rest: engine.zero.bucket_reducer.drain()": "nothing is left on its way",
    "gradient_reduction.GradientReducer.reduce_now: self.drain() #1": "test_world_size.py does",
    "offload_states.StateOffloader._come_to_rest: engine.prepare_writes()":
        "no program here publishes under the forward pass: test_overlap_param_gather.py does",
    "stage3.PartitionedParamGroup.writing: self.before_write()": KNOWN,
    "stage_1_and_2.ParamGroup._write_param: self.before_write()": KNOWN,
    "gradient_reduction.GradientReducer.discard_gradients: self.bucket_reducer.drain()":
        "no program here discards gradients: tests of that compare bits",
    "activations.HostActivations.watching: self._settle(0)": EARLIER,
    "activations.HostActivations._pack: self._settle(LEAVING)": EARLIER,
    "activations.HostActivations._fetch: self._settle(0)": EARLIER,
}  # fmt: skip
"""Statements that nothing here misses, and why they stay."""


def _mirror_exchange(comm, send, recv, padding=0, where="", group=None, numel=None):
    for q in (group or comm.everybody).peers:
        if recv[q].numel() == send[q].numel():
            recv[q].copy_(send[q])


def _mirror_reduce_scatter(comm, output, whole, *_, **__):
    torch.mul(whole[: output.numel()], comm.world_size, out=output)


def _mirror_all_reduce(comm, tensor, *_, **__):
    tensor.mul_(comm.world_size)


MIRRORS = {"exchange": _mirror_exchange, "reduce_scatter": _mirror_reduce_scatter, "all_reduce": _mirror_all_reduce}
"""What a collective of the communicator does among ranks that all have what this one has."""


@contextlib.contextmanager
def mirrored_cpu(world):
    """Rank 0 of ``world`` on the CPU, alone: the others send what it would have sent them."""

    def mirrored(method, mirror):
        def collective(self, kind, *args, **kwargs):
            pending = method(self, kind, *args, **kwargs)
            with torch.no_grad():
                mirror(self, *args, **kwargs)
            return pending

        return collective

    with contextlib.ExitStack() as stack:
        stack.enter_context(one_of_many(DryRunRank(0, world, "cpu", world), Mirrored, "cpu"))
        for name, mirror in MIRRORS.items():
            made = mirrored(getattr(Communicator, name), mirror)
            stack.enter_context(mock.patch.object(Communicator, name, made))
        yield


def poisoned(engine):
    """Of every buffer that nobody may read now, whether it says so."""
    pools = []
    if engine.zero.stage3 is not None:
        pools = engine.zero.stage3.coordinator.pools
    reduced = [(b.send, b.recv_buffer) for b in engine.zero.bucket_reducer._all_buffers]
    free = [*(t for pair in reduced for t in pair), *(b for pool in pools for b in pool._free)]
    return [bool((t == 255).all() if t.dtype == torch.uint8 else t.isnan().all()) for t in free]


def run(program, device):
    """Some steps, and what is between them; everything that can be seen of them."""
    world, given, kind = PROGRAMS[program]
    seen = []
    with engine_in(null_gpu(world) if device == GPU else mirrored_cpu(world), given, kind) as (engine, _):
        weight = dict(engine.module.named_parameters())["blocks.0.1.weight"]
        for step in range(3):
            for k in range(engine.batch.accumulation):
                batch = [t.to(device) for t in make_batch(10 * step + k, 2)]
                step_on(engine, *batch)
            seen.append((engine.last_step.loss, engine.last_step.grad_norm, poisoned(engine)))
            if step == 1:
                with torch.no_grad():
                    engine(*batch)
                with deepzero.zero.GatheredParameters(weight, modifier_rank=0), torch.no_grad():
                    weight.mul_(0.5)
                engine.offload_states(non_blocking=True)
                engine.reload_states(non_blocking=True)
        seen.append(engine.params_sha256())
        del engine, weight
    return seen


@pytest.fixture(scope="module")
def calm():
    """What the programs show when nothing is left out."""
    return {}


def notices(removal, calm):
    """Who notices that a statement is gone, and how; None: nobody does."""
    for place in [(program, device) for device in (GPU, CPU) for program in ON_GPU[FILES[removal.file]]]:
        if place not in calm:
            calm[place] = str(run(*place))
        with waits.changed(removal.file, removal.number, VERBS):
            try:
                found = str(run(*place))
            except Exception as error:
                return place, error
        if found != calm[place]:
            return place, "other results"
    return None


DEFAULT = (
    "reduce_scatter.BucketReducer._finish: comm.chaos.poison(buffers.send, buffers.recv_buffer)",
    "optimizer_offload.HostOptimizerShard.drain_grads: self.gradients.drain()",
)


def _marked(removal):
    return removal if removal in DEFAULT else pytest.param(removal, marks=pytest.mark.exhaustive)


@pytest.mark.parametrize("removal", [_marked(removal) for removal in REMOVALS])
def test_noticed(removal, calm):
    assert (notices(REMOVALS[removal], calm) is None) == (removal in UNNOTICED), UNNOTICED.get(removal)


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.exhaustive), 3])
def test_offload_has_the_bits_of_a_run_without_on_a_gpu(stage):
    """Norms of sums that the CPU has added up are those that the device would have taken; nothing waits for it."""
    results = []
    for ratio in (None, 1.0):
        with engine_in(null_gpu(2), settings(stage, ratio, **OFFLOADED)) as (engine, machine):
            seen = []
            for step in range(3):
                for k in range(engine.batch.accumulation):
                    ids, labels = (t.to(GPU) for t in make_batch(10 * step + k, 2))
                    del machine.crossings[:]
                    engine.backward(engine(ids, labels))
                    assert not machine.crossings
                    engine.step()
                seen.append((engine.last_step.loss, engine.last_step.grad_norm))
            results.append((seen, engine.params_sha256()))
            del engine
    assert results[0] == results[1]
