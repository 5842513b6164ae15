"""The code for a GPU, on one that is not there: what it would refuse, and what could be read too early, raises."""

import gc
import tempfile

import pytest
import torch
from torch import nn

import deepzero
from deepzero.comm import process_group
from deepzero.comm.ledger import Ledger
from deepzero.comm.streams import BufferEvent, Chaos, SideStream
from deepzero.config.engine import ChaosConfig
from deepzero.offload.activations import HostActivations
from deepzero.offload.copy_streams import HostDeviceCopier, OffloadStats
from deepzero.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_set_full_fp32_param,
    safe_set_full_grad,
)
from tests.distributed.null_gpu import CPU, GPU, MixedSides, Race, null_gpu
from tests.distributed.test_offload import settings
from tests.distributed.training import KINDS, built, my_micro_batches

HOST = {"cpu_checkpointing": True, "cpu_checkpointing_min_bytes": 1}


def train(engine, rank, world, first, last):
    for step in range(first, last):
        for ids, labels in my_micro_batches(step, rank, world, engine.batch.micro_batch, engine.batch.accumulation):
            engine.backward(engine(ids.to(GPU), labels.to(GPU)))
            engine.step()
    return engine.last_step.loss, engine.last_step.grad_norm


def tour(rank, world, given, kind):
    """Everything that an engine can do, one after the other; what it had locked is given back."""
    torch.manual_seed(0)
    model = KINDS[kind]()
    with null_gpu() as machine:
        seen = _tour(rank, world, model, given)
        gc.collect()
        assert not machine.locked
    return seen


def _tour(rank, world, model, given):
    engine, *_ = deepzero.initialize(model=model, config=given)
    seen = [train(engine, rank, world, 0, 2)]
    ids, labels = (t.to(GPU) for t in my_micro_batches(9, rank, world, 2, 1)[0])
    with torch.no_grad():  # evaluation
        seen.append(float(engine(ids, labels)))
    seen += [train(engine, rank, world, 2, 3), engine.params_sha256()]
    params = dict(model.named_parameters())
    weight, norm = (next(p for n, p in params.items() if n.endswith(end)) for end in ("1.weight", "norm.weight"))
    with deepzero.zero.GatheredParameters(list(params.values())):
        seen.append(float(weight.detach().float().sum()))
    with deepzero.zero.GatheredParameters([weight, norm], modifier_rank=0), torch.no_grad():
        weight.mul_(0.5)
        norm.add_(0.25)
    master = safe_get_full_fp32_param(weight)
    safe_set_full_fp32_param(weight, master.cpu() + 0.125)
    safe_get_local_fp32_param(weight)
    safe_get_full_optimizer_state(weight, "exp_avg")
    for ids, labels in my_micro_batches(4, rank, world, 2, engine.batch.accumulation):
        engine.backward(engine(ids.to(GPU), labels.to(GPU)))
        if engine.is_gradient_accumulation_boundary():
            safe_set_full_grad(weight, safe_get_full_grad(weight) * 0.5)
        engine.step()
    engine.offload_states(pin_memory=rank == 0)
    engine.reload_states()
    engine.offload_states(include=["optim_states", "lp_grads"], non_blocking=True)
    engine.reload_states(non_blocking=True)
    state = engine.module_state_dict()
    seen += [train(engine, rank, world, 5, 6), {k: v.sum().item() for k, v in state.items()}]
    engine.load_module_state_dict({k: v + 0.25 for k, v in state.items()})
    with tempfile.TemporaryDirectory() as own:
        folder = process_group.broadcast_object(own)
        engine.save_checkpoint(folder, asynchronous=True)
        ways = [train(engine, rank, world, 6, 8)]
        engine.load_checkpoint(folder)
        ways.append(train(engine, rank, world, 6, 8))
        engine.save_checkpoint(folder)
        process_group.barrier()
    assert ways[0] == ways[1]
    seen += [ways[0], engine.params_sha256()]
    engine.report(), engine.offload_report()
    engine.destroy()
    return seen


def tours(rank, world, cases):
    return [tour(rank, world, *case) for case in cases]


def places(stage):
    """None, optimizer, both, and a part of both."""
    yield {}
    yield {"ratio": 1.0}
    yield {"ratio": 0.5}
    if stage == 3:
        yield {"ratio": 1.0, "param": True}
        yield {"ratio": 0.5, "param": True}
        yield {"ratio": 1.0, "param": {"max_in_cpu": 900}}


def cases_of(stage):
    for place in places(stage):
        yield settings(stage, **place, precision="bf16", gradient_accumulation_steps=2), "checkpoint"
        yield settings(stage, **place, chaos=3, activation_checkpointing=HOST), "plain"


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_tours(ranks, stage):
    for case in cases_of(stage):
        ranks.run(tours, [case], world_size=2, timeout=110)


@pytest.mark.slow
def test_a_tour(ranks):
    """Everything on the host, in the dtype that masters are sent in and in another."""
    both = [settings(3, 1.0, True, precision="bf16", gradient_accumulation_steps=2), "checkpoint"]
    ranks.run(tours, [both, (settings(2, 1.0, chaos=3, activation_checkpointing=HOST), "plain")], timeout=110)


def activations(steps=4, pin=True, chaos=False, refuses_to_lock=False):
    """Forward and backward passes that nobody stands still for; what was locked meanwhile."""
    with null_gpu() as machine:
        machine.refuses_to_lock = refuses_to_lock
        made = nn.Linear(32, 32).to(GPU)
        wire = HostDeviceCopier(GPU, Ledger(), Chaos(ChaosConfig(enabled=chaos, max_delay_ms=0), 0), OffloadStats())
        host = HostActivations(wire, lambda: list(made.parameters()), 1, pin)
        for _ in range(steps):
            x = torch.randn(8, 32, device=GPU, requires_grad=True)
            expected = 2 * made(x).tanh().detach()
            with host.watching():
                y = made(x).tanh()
                loss = y.square().sum()
            (found,) = torch.autograd.grad(loss, y)
            assert torch.equal(found, expected)
            del y, loss
        locked = len(machine.locked)
        del host
        gc.collect()
        assert not machine.locked
    return locked


def test_poisoning_a_host_buffer_is_no_race():
    """The CPU writes it at once, and the last copy from it may be under way."""
    assert activations(chaos=True) > 0


def test_activations_without_page_locking(caplog):
    assert activations(pin=False) == 0 and not caplog.records
    assert activations(refuses_to_lock=True) == 0
    (said,) = caplog.records
    assert "refuses to lock pages" in said.message and "cpu_checkpointing_pin_memory=false" in said.message


@pytest.mark.parametrize("world", [1, 2])
def test_init_keeps_parts_on_the_host(world):
    with null_gpu(mirrors=world):
        torch.manual_seed(0)
        with deepzero.zero.Init(remote_device="cpu"):
            model = KINDS["plain"]()
        weight = model.blocks[0][1].weight
        with deepzero.zero.GatheredParameters(list(model.parameters()), modifier_rank=0), torch.no_grad():
            assert weight.device == GPU
            weight.mul_(2)
        with deepzero.zero.GatheredParameters(weight):
            doubled = float(weight.detach().sum())
        engine, *_ = deepzero.initialize(model=model, config=settings(3, 1.0, param=True, precision="bf16"))
        with deepzero.zero.GatheredParameters(weight):
            assert float(weight.detach().float().sum()) == pytest.approx(doubled, abs=0.1)
        ids, labels = (t.to(GPU) for t in my_micro_batches(0, 0, world, 2, 1)[0])
        engine.backward(engine(ids, labels))
        engine.step()
        engine.destroy()
        del engine
        gc.collect()


def wired():
    return HostDeviceCopier(GPU, Ledger(), Chaos(ChaosConfig(), 0), OffloadStats())


def test_planted_faults():
    with null_gpu() as machine:
        host, device = torch.zeros(4), torch.zeros(4, device=GPU)
        assert (host.device, device.device, (device + 1).device, device.cpu().device) == (CPU, GPU, GPU, CPU)
        for wrong in (lambda: host + device, lambda: torch.equal(device, host), lambda: torch.cat([host, device])):
            with pytest.raises(MixedSides, match=r"host \(4,\)"):
                wrong()
        with pytest.raises(TypeError, match="numpy"):
            device.numpy()
        assert (device * torch.tensor(2.0)).device == GPU  # a number may come from anywhere
        wire, other = wired(), torch.cuda.Stream(GPU)
        copy = wire.to_host("down", host, device)
        with pytest.raises(Race, match="the program reads"):
            host.sum()
        with pytest.raises(Race, match="the compute stream writes"):
            device.fill_(1)
        copy.wait()
        device.fill_(1)
        with pytest.raises(Race, match="the program reads"):
            host.sum()
        copy.finish()
        host.sum()
        wire.to_device("up", device, host)
        with pytest.raises(Race, match="the compute stream reads"):
            device.sum()
        with pytest.raises(Race, match="the program writes"):
            host.add_(1)
        wire.finish_reads()
        host.add_(1)
        device.add_(1)
        with torch.cuda.stream(other), pytest.raises(Race, match="a side stream reads"):
            device.sum()
        other.wait_event(_recorded(machine))
        with torch.cuda.stream(other):
            device.sum()


def test_a_gate_orders_streams():
    with null_gpu():
        gate, device = BufferEvent(GPU), torch.zeros(4, device=GPU)
        gate.record()
        with SideStream(GPU).running():
            gate.wait()
            device.add_(1)
            gate.record()
        with pytest.raises(Race, match="the compute stream reads"):
            device.sum()
        gate.wait()
        device.sum()


def _recorded(machine):
    event = torch.cuda.Event()
    event.record(machine.compute)
    return event


def test_a_load_waits_for_the_last_copies():
    """Masters are what is sent, in fp32: the device waits for their copies, the program does not."""
    with null_gpu(mirrors=2):
        engine = built(settings(2, 1.0), KINDS["plain"])
        ids, labels = (t.to(GPU) for t in my_micro_batches(0, 0, 2, 2, 1)[0])
        engine.backward(engine(ids, labels))
        engine.step()
        master = engine.zero.groups[0].masters[0]
        with torch.no_grad(), pytest.raises(Race, match="the program writes"):
            master.add_(1)
        engine.before_writes()
        with torch.no_grad():
            master.add_(1)
        engine.destroy()
        del engine, master
        gc.collect()
