"""The code for a GPU, on one that is not there: what it would refuse, and what could be read too early, raises."""

import concurrent.futures
import gc
import itertools
import random
import tempfile
import threading
from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn

import deepzero
from deepzero import utils
from deepzero.checkpoint.async_save import Saver
from deepzero.checkpoint.manifest import Entry
from deepzero.checkpoint.shard_file import plan_shard
from deepzero.comm import process_group
from deepzero.comm.chaos import Chaos
from deepzero.comm.ledger import Ledger
from deepzero.comm.simulated_streams import FreedInUse, MixedDevices, Race
from deepzero.config.engine import ChaosConfig
from deepzero.data.loader import batches_on
from deepzero.device import Accelerator, accelerator_of
from deepzero.offload.activations import HostActivations
from deepzero.offload.copy_streams import HostDeviceCopier, OffloadStats
from deepzero.offload.pinned_arena import ALIGN_BYTES
from deepzero.runtime import grad_norm
from deepzero.runtime.home_stream import HomeStream
from deepzero.utils.threads import start_thread
from tests.distributed.null_gpu import CPU, GPU, engine_in, null_gpu
from tests.distributed.test_offload import settings
from tests.distributed.training import KINDS, WHOLE, built, config, go, my_micro_batches, step_on

HOST = {"cpu_checkpointing": True, "cpu_checkpointing_min_bytes": 1}


def train(engine, rank, world, first, last):
    go(engine, rank, world, first, last)
    return engine.last_step.loss, engine.last_step.grad_norm


def tour(rank, world, given, kind):
    """Everything that an engine can do, one after the other; what it had locked is given back."""
    torch.manual_seed(0)
    model = KINDS[kind]()
    if not given["comm"].get("simulated_streams"):
        # A GPU adds up the squares of a block in another order than a CPU does.
        as_there = lambda grad, _, out=None, norms=grad_norm.block_norms: norms(grad, "cuda", out)
        with mock.patch.object(grad_norm, "block_norms", as_there):
            return tour_of(rank, world, model, given)
    with null_gpu() as machine:
        seen = tour_of(rank, world, model, given)
        gc.collect()
        assert not machine.locked and (rank or not machine.blocking)  # rank 1 offloads states to ordinary memory
    return seen


def tour_of(rank, world, model, given):
    engine, *_ = deepzero.initialize(model=model, config=given)
    seen = [train(engine, rank, world, 0, 2)]
    ids, labels = (t.to(engine.device) for t in my_micro_batches(9, rank, world, 2, 1)[0])
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
    utils.safe_set_full_fp32_param(weight, utils.safe_get_full_fp32_param(weight).cpu() + 0.125)
    utils.safe_get_local_fp32_param(weight)
    utils.safe_get_full_optimizer_state(weight, "exp_avg")
    for ids, labels in my_micro_batches(4, rank, world, 2, engine.batch.accumulation):
        engine.backward(engine(ids.to(engine.device), labels.to(engine.device)))
        if engine.is_gradient_accumulation_boundary():
            utils.safe_set_full_grad(weight, utils.safe_get_full_grad(weight) * 0.5)
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


# ---- everything, in every setting ------------------------------------------------------------------------------------

PLACES = {
    1: [{}, {"ratio": 1.0}, {"ratio": 0.5}],
    2: [{}, {"ratio": 1.0}, {"ratio": 0.5}],
    3: [{}, {"ratio": 1.0}, {"ratio": 0.5}, *({"ratio": r, "param": p} for r, p in (
        (1.0, True), (0.5, True), (1.0, {"max_in_cpu": 900})))],
}  # fmt: skip
"""None, optimizer, both, and a part of both."""
QGZ = {"zero_quantized_gradients": True, "quantization": {"block_size": 64}}
ZEROPP = {
    1: [{}, {"overlap_param_gather": True}],
    2: [{}, QGZ, {"overlap_param_gather": True}],
    3: [
        {},
        {**QGZ, "zero_quantized_weights": True},
        {**QGZ, "zero_hpz_partition_size": 2},
        {"mics_shard_size": 2},
        {"overlap_param_gather": True},
    ],
}


def everything():
    """Stage, place of the states, ZeRO++ or late gathers, micro-batches in a step, chaos, checkpointing."""
    for stage in (1, 2, 3):
        for place, more, accumulation, kind in itertools.product(
            PLACES[stage], ZEROPP[stage], (1, 2), ("plain", "checkpoint", "host")
        ):
            if "mics_shard_size" in more and "param" in place:
                continue  # is refused
            given = settings(
                stage, **place, precision="bf16", gradient_accumulation_steps=accumulation,
                chaos=3 if kind == "host" else None, **({"activation_checkpointing": HOST} if kind == "host" else {}),
            )  # fmt: skip
            given["zero_optimization"].update(more)
            if more.get("zero_hpz_partition_size") or "mics_shard_size" in more:
                given["comm"]["ranks_per_node"] = 2
            name = " ".join(map(str, (stage, *place.values(), *[k for k in more if k != "quantization"], accumulation)))
            yield pytest.param(given, KINDS_OF.get(kind, kind), id=f"{name} {kind}".replace("/", ""))


KINDS_OF = {"host": "plain"}
EVERYTHING = list(everything())
CHOSEN = random.Random(7).sample(EVERYTHING, 5)
"""The first one always, the others by CI, the rest by hand."""


def marked(case):
    marks = {0: [pytest.mark.slow, pytest.mark.timeout(400)]}
    place = CHOSEN.index(case) if case in CHOSEN else len(CHOSEN)
    return pytest.param(*case.values, id=case.id, marks=marks.get(place, [pytest.mark.exhaustive]))


@pytest.mark.parametrize(("given", "kind"), list(map(marked, EVERYTHING)))
def test_simulated_streams_find_nothing_and_change_no_bits(ranks, given, kind):
    plain = ranks.run(tour, given, kind, world_size=2, timeout=110)
    given = {**given, "comm": {**given["comm"], "simulated_streams": True}}
    assert ranks.run(tour, given, kind, world_size=2, timeout=110) == plain


def activations(steps=4, pin=True, chaos=False, refuses_to_lock=False):
    """Forward and backward passes that nobody stands still for; what was locked meanwhile."""
    with null_gpu(locks=not refuses_to_lock) as machine:
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


@pytest.mark.parametrize("locks", [True, False])
def test_a_snapshot_locks_no_more_than_it_needs(locks, caplog):
    """The bytes of the shard, in memory that is used again, one piece at a time; or none, where the system refuses."""
    needed = []
    with null_gpu(mirrors=1, locks=locks) as machine:
        saver = Saver(GPU, 1.0)
        for numel in (700, 300, 1100):
            values = torch.arange(numel, dtype=torch.float32)
            plan = plan_shard([Entry("master", "w", 0, values.to(GPU))], {})
            copied, ready = saver._snapshot(plan)
            ready()
            assert bytes(copied.image.numpy()) == plan.header + values.numpy().tobytes()
            needed.append(plan.bytes)
            sizes = list(machine.locked.values())
            assert len(sizes) == locks and all(max(needed) <= size < max(needed) + ALIGN_BYTES for size in sizes)
            assert [tensor.nbytes for tensor in saver.held()] == [max(needed)]
        saver.close()
        assert machine.locked == {} and saver.held() == []
    said = [line.message.split(":")[0] for line in caplog.records]
    assert said == ([] if locks else ["the system refuses to lock pages"])


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
        assert weight.device == GPU  # where its values will be, as in DeepSpeed
        with deepzero.zero.GatheredParameters(list(model.parameters()), modifier_rank=0), torch.no_grad():
            assert weight.device == GPU
            weight.mul_(2)
        with deepzero.zero.GatheredParameters(weight):
            doubled = float(weight.detach().sum())
        engine, *_ = deepzero.initialize(model=model, config=settings(3, 1.0, param=True, precision="bf16"))
        with deepzero.zero.GatheredParameters(weight):
            assert float(weight.detach().float().sum()) == pytest.approx(doubled, abs=0.1)
        ids, labels = (t.to(GPU) for t in my_micro_batches(0, 0, world, 2, 1)[0])
        step_on(engine, ids, labels)
        engine.destroy()
        del engine
        gc.collect()


@pytest.mark.parametrize("stage", [3, *(pytest.param(stage, marks=pytest.mark.exhaustive) for stage in (0, 1, 2))])
def test_a_step_waits_for_nothing_but_the_agreement(stage):
    """What the ranks agree on is read by ``Communicator.read``, which the imitation does not count."""
    zero = {"stage3_param_persistence_threshold": 100} if stage == 3 else {}
    given = config(stage=stage, bucket=1500, precision="fp16", zero=zero, gradient_accumulation_steps=2)
    with engine_in(null_gpu(mirrors=2), given) as (engine, machine):
        batches = [[t.to(GPU) for t in batch] for batch in my_micro_batches(0, 0, 2, 2, 2)]
        for _ in range(3):
            machine.waits.clear()
            for ids, labels in batches:
                step_on(engine, ids, labels)
        assert machine.waits == []
        del engine


def on_another_stream(param, hook):
    """``hook``, called as autograd calls it where the parameter was first used on a stream of its own."""
    stream = accelerator_of(GPU).stream(GPU)

    def called(_):
        before = accelerator_of(GPU).event(GPU)
        before.record()
        with stream.running():
            before.wait()
            with torch.no_grad():
                param.grad.mul_(1)
            hook(param)

    return called


def of_several_streams(stage):
    register, numbers = torch.Tensor.register_post_accumulate_grad_hook, itertools.count()

    def elsewhere(param, hook):
        with torch._C.DisableTorchFunction():
            return register(param, on_another_stream(param, hook) if next(numbers) % 2 else hook)

    given = config(stage=stage, bucket=1500, precision="bf16", zero=WHOLE)
    with (
        mock.patch.object(torch.Tensor, "register_post_accumulate_grad_hook", elsewhere),
        engine_in(null_gpu(mirrors=2), given) as (engine, _),
    ):
        train(engine, 0, 2, 0, 2)
        assert next(numbers) > 4
        del engine


@pytest.mark.parametrize("stage", [2, *(pytest.param(stage, marks=pytest.mark.exhaustive) for stage in (0, 1, 3))])
def test_gradients_of_several_streams(stage):
    """Those of one bucket may come on two: what is sent is complete. Without the home stream it would not be."""
    of_several_streams(stage)
    with mock.patch.object(HomeStream, "_entered", lambda *_: nullcontext()), pytest.raises(Race):
        of_several_streams(stage)


def test_a_gradient_of_another_stream_is_not_freed_too_early():
    with null_gpu():
        home, param = HomeStream(GPU), nn.Parameter(torch.zeros(4, device=GPU))
        with accelerator_of(GPU).stream(GPU).running():
            param.grad = torch.ones(4, device=GPU)
            home.hook(lambda _: None, of_param=True)(param)
        torch.zeros(1).add_(1)


def test_batches_come_one_ahead():
    """Their copies wait for what had the memory before, nothing stands still, and whoever computes waits for them."""
    with null_gpu() as machine:
        weight, seen, asked = torch.ones(4, device=GPU), [], []
        given = (asked.append(i) or (torch.full((4,), float(i)), torch.full((2,), i)) for i in range(4))
        for x, label in batches_on(GPU, given):
            assert x.device == label.device == GPU and len(asked) == min(len(seen) + 2, 4)
            seen.append(weight * x)
            del x, label
        assert not machine.crossings
        assert torch.stack(seen).cpu().sum(1).tolist() == [0.0, 4.0, 8.0, 12.0]


@pytest.mark.parametrize("stopped", [True, False])
def test_who_stops_early_frees_no_memory_under_a_copy(stopped, monkeypatch):
    """The current stream may take the memory of the batch ahead at once. Nothing says that its copy is over else."""
    made, empty_like = [], torch.empty_like
    with null_gpu():
        monkeypatch.setattr(torch, "empty_like", lambda *a, **k: made.append(empty_like(*a, **k)) or made[-1])
        there = torch.ones(2, device=GPU)
        batches = batches_on(GPU, ((torch.zeros(2), there) for _ in range(3)))
        x, same = next(batches)
        assert same is there and x is made[0] and len(made) == 2
        if stopped:
            batches.close()
        with nullcontext() if stopped else pytest.raises(Race, match="the compute stream writes"):
            made[1].fill_(0)
        batches.close()


def test_batches_come_on_one_stream():
    gpu = Accelerator("cuda")
    gpu.module = SimpleNamespace(Stream=lambda d: SimpleNamespace(stream_id=next(numbers)), stream=nullcontext)
    numbers, other = itertools.count(), torch.device("cuda", 1)
    assert [gpu.batch_stream(d).key for d in (GPU, other, GPU, torch.device("cuda", 1))] == [0, 1, 0, 1]


def wired():
    return HostDeviceCopier(GPU, Ledger(), Chaos(ChaosConfig(), 0), OffloadStats())


def test_planted_faults():
    with null_gpu():
        host, device = torch.zeros(4, pin_memory=True), torch.zeros(4, device=GPU)
        assert (host.device, device.device, (device + 1).device, device.cpu().device) == (CPU, GPU, GPU, CPU)
        for wrong in (lambda: host + device, lambda: torch.equal(device, host), lambda: torch.cat([host, device])):
            with pytest.raises(MixedDevices, match=r"host float32 \[4\]"):
                wrong()
        with pytest.raises(TypeError, match="numpy"):
            device.numpy()
        assert (device * torch.tensor(2.0)).device == GPU  # a number may come from anywhere
        wire, other = wired(), accelerator_of(GPU).stream(GPU)
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
        with other.running(), pytest.raises(Race, match=r"side stream . of .* reads"):
            device.sum()
        event, fresh = accelerator_of(GPU).event(GPU), device * 2
        with other.running(), pytest.raises(Race, match=r"side stream . of .* reads"):
            fresh.sum()
        event.record()
        with other.running():
            event.wait()
            device.sum(), fresh.sum()


def test_memory_that_another_stream_uses_is_not_given_back():
    with null_gpu():
        side, event = accelerator_of(GPU).stream(GPU), accelerator_of(GPU).event(GPU)

        def used(waits):
            device = torch.zeros(4, device=GPU)
            event.record()
            with side.running():
                event.wait()
                device.add_(1)
                event.record()
            if waits:
                event.wait()

        used(waits=True)
        torch.zeros(4).add_(1)
        used(waits=False)
        with pytest.raises(FreedInUse, match=r"(?s)memory of the device .* missing: wait\(\) of the event that side "):
            torch.zeros(4).add_(1)
        big = torch.ones(1000, device=GPU)
        event.record()
        with side.running():
            event.wait()
            big.add_(1)
        big.untyped_storage().resize_(0)
        with pytest.raises(FreedInUse, match=r"the device is given back while side stream . of .* writes"):
            torch.zeros(4).add_(1)


def test_a_pageable_copy_blocks_and_is_said_once(caplog):
    with null_gpu() as machine, caplog.at_level("INFO", "deepzero.comm"):
        for _ in range(2):
            torch.zeros(4).to(GPU, non_blocking=True)
            torch.zeros(4).pin_memory().to(GPU, non_blocking=True)
        landed = torch.zeros(4, device=GPU).to("cpu", non_blocking=True)
        with pytest.raises(Race, match="the program reads"):
            landed.tolist()
        assert sum(machine.blocking.values()) == 32
    assert [r.getMessage().split(":")[0] for r in caplog.records] == ["outside of the package"]


def test_threads_are_agents():
    """A thread's start, its end and a future order; time does not."""
    with null_gpu(), concurrent.futures.ThreadPoolExecutor(1, initializer=accelerator_of(GPU).thread_start()) as pool:
        shared, done = torch.zeros(4), threading.Event()

        def work():
            shared.add_(1)
            done.set()

        thread = start_thread(work, "deepzero-test")
        assert done.wait(10)
        with pytest.raises(Race, match=r"(?s)program reads .* what thread deepzero-test writes .*missing: .* a join"):
            shared.sum()
        thread.join()
        shared.sum()
        pool.submit(shared.add_, 1).result()
        shared.sum()


def test_an_alias_is_the_same_memory():
    with null_gpu():
        whole = torch.zeros(8, device=GPU)
        alias = torch.from_dlpack(whole[4:])
        with accelerator_of(GPU).stream(GPU).running(), pytest.raises(Race):
            alias.add_(1)


def test_a_fault_is_said_in_zeros_words():
    with null_gpu(mirrors=2):
        engine = built({**settings(2), "comm": {"reduce": "exact", "simulated_streams": True}}, KINDS["plain"])
        with accelerator_of(GPU).stream(GPU).running(), pytest.raises(Race) as caught:
            dict(engine.module.named_parameters())["blocks.0.1.weight"].data.add_(1)
        said = str(caught.value)
        assert "parameters, bucket " in said and "blocks.0.1.weight" in said
        assert "engine" in said or "stage_1_and_2.py" in said
        engine.destroy()


def test_a_gate_orders_streams():
    with null_gpu():
        gate, device = accelerator_of(GPU).event(GPU), torch.zeros(4, device=GPU)
        gate.record()
        with accelerator_of(GPU).stream(GPU).running():
            gate.wait()
            device.add_(1)
            gate.record()
        with pytest.raises(Race, match="the compute stream reads"):
            device.sum()
        gate.wait()
        device.sum()


def test_a_load_waits_for_the_last_copies():
    """Masters are what is sent, in fp32: the device waits for their copies, the program does not."""
    with engine_in(null_gpu(mirrors=2), settings(2, 1.0)) as (engine, _):
        step_on(engine, *(t.to(GPU) for t in my_micro_batches(0, 0, 2, 2, 1)[0]))
        master = engine.zero.groups[0].masters[0]
        with torch.no_grad(), pytest.raises(Race, match="the program writes"):
            master.add_(1)
        engine.prepare_writes()
        with torch.no_grad():
            master.add_(1)
        del engine, master
