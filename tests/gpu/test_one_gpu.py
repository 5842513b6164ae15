"""One GPU, one rank: the same bits as plain torch on the same device; buckets and lanes under accumulation."""

import pytest
import torch

import deepzero
from deepzero.comm import process_group
from deepzero.comm.collectives import Communicator
from deepzero.data.loader import batches_on
from deepzero.device import accelerator_of
from deepzero.layout import ALIGN
from deepzero.ops import CPUAdam
from deepzero.runtime.grad_norm import block_norms, exact_square_sum
from deepzero.zero import GatheredParameters
from tests.distributed.training import WHOLE, config, make_batch, make_model

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def on_the_gpu(monkeypatch):
    """A world of one rank on the GPU; the suite otherwise keeps ranks off it."""
    monkeypatch.delenv("DEEPZERO_DEVICE", raising=False)
    yield
    process_group.shutdown()


def take_steps(engine, until):
    """Optimizer steps up to this one; their losses."""
    losses = []
    for step in range(engine.global_steps, until):
        for k in range(engine.gradient_accumulation_steps()):
            ids, labels = (t.to(engine.device) for t in make_batch(step + 100 * k, 2))
            engine.backward(engine(ids, labels))
            engine.step()
        losses.append(engine.last_step.loss)
    return losses


def train(**changes):
    engine, *_ = deepzero.initialize(model=make_model(), config=config(gradient_clipping=0, **changes))
    take_steps(engine, 10)
    with GatheredParameters(engine.module.parameters()):
        values = [p.detach().clone() for p in engine.module.parameters()]
    return values, engine.params_sha256()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_same_bits_as_a_plain_loop(stage):
    parameters, _ = train(stage=stage, bucket=1500, overlap=True, zero=WHOLE)
    plain = make_model().cuda()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
    for step in range(10):
        ids, labels = (t.cuda() for t in make_batch(step, 2))
        optimizer.zero_grad()
        plain(ids, labels).backward()
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(parameters, plain.parameters(), strict=True))


@pytest.mark.parametrize("blocks", [1, 7, 1000, 70_001])
def test_the_norm_has_the_bits_that_a_cpu_finds_for_a_gpu(blocks):
    grad = torch.randn(blocks * ALIGN) * torch.logspace(-12, 12, blocks * ALIGN)
    norms = block_norms(grad.cuda())
    assert torch.equal(norms.cpu(), block_norms(grad, "cuda"))
    assert torch.equal(norms[:1], block_norms(grad[:ALIGN].cuda()))
    assert torch.equal(norms, block_norms(grad.cuda(), out=torch.zeros_like(norms)))
    assert exact_square_sum(norms).tolist() == exact_square_sum(norms.cpu()).tolist()
    grad[-1] = torch.inf
    assert exact_square_sum(block_norms(grad.cuda()))[-1] > 0


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_waits_for_nothing_but_the_agreement(stage, precision, monkeypatch):
    read = Communicator.read

    def agreement(self, tensor):
        torch.cuda.set_sync_debug_mode("default")
        try:
            return read(self, tensor)
        finally:
            torch.cuda.set_sync_debug_mode("error")

    zero = {"stage3_param_persistence_threshold": 30} if stage == 3 else {}
    settings = config(stage=stage, precision=precision, bucket=1500, overlap=True, zero=zero, gradient_clipping=1.0)
    engine, *_ = deepzero.initialize(model=make_model(), config={**settings, "gradient_accumulation_steps": 2})
    batches = batches_on(engine.device, (make_batch(step, 2) for step in range(8)))
    try:
        for number, (ids, labels) in enumerate(batches):
            if number == 2:  # the first step makes plans, kernels and memory
                monkeypatch.setattr(Communicator, "read", agreement)
                torch.cuda.set_sync_debug_mode("error")
            engine.backward(engine(ids, labels))
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert engine.global_steps == 4
    engine.destroy()


@pytest.mark.parametrize("stage", [1, 2])
def test_a_model_that_computes_on_several_streams(stage):
    assert sha_of_branches(stage, streams=1) == sha_of_branches(stage, streams=2)


def sha_of_branches(stage, streams):
    class Branches(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = torch.nn.Linear(512, 512), torch.nn.Linear(512, 512)

        def forward(self, x):
            here, other = torch.cuda.current_stream(), torch.cuda.Stream() if streams == 2 else None
            if other is None:
                return (self.first(x) * self.second(x)).float().square().mean()
            other.wait_stream(here)
            with torch.cuda.stream(other):
                second = self.second(x)
            first = self.first(x)
            here.wait_stream(other)
            second.record_stream(here)
            return (first * second).float().square().mean()

    torch.manual_seed(0)
    engine, *_ = deepzero.initialize(model=Branches(), config=config(stage=stage, precision="bf16", bucket=10**6))
    for step in range(20):
        x = torch.randn(64, 512, generator=torch.Generator().manual_seed(step)).to(engine.device, torch.bfloat16)
        engine.backward(engine(x))
        engine.step()
    found = engine.params_sha256()
    engine.destroy()
    return found


def test_pages_that_are_locked_already():
    """The refusal is the arena's to tell, and no later kernel's."""
    device, memory = torch.device("cuda", 0), torch.zeros(1 << 20, dtype=torch.uint8)
    accelerator = accelerator_of(device)
    accelerator.lock_pages(memory.data_ptr(), memory.nbytes, device)
    try:
        with pytest.raises(OSError, match="CUDA error"):
            accelerator.lock_pages(memory.data_ptr(), memory.nbytes, device)
        assert torch.ones(4, device=device).sum().item() == 4
    finally:
        accelerator.unlock_pages(memory.data_ptr(), device)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_buckets_and_chaos(precision):
    hashes = {
        # One rank needs buckets only to add a second micro-batch to the first, which stage 2 does.
        train(stage=2, precision=precision, bucket=bucket, overlap=overlap, gradient_accumulation_steps=2, **chaos)[1]
        for bucket, overlap, chaos in ((200, True, {"chaos": 3}), (1500, False, {}), (10**6, True, {}))
    }
    assert len(hashes) == 1


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_resume_to_the_bit(stage, asynchronous, tmp_path):
    """The snapshot is queued before the next step's kernels: what is saved is the state of the save."""
    settings = config(stage=stage, precision="bf16", bucket=1500)
    engine, *_ = deepzero.initialize(model=make_model(), config=settings)
    take_steps(engine, 5)
    engine.save_checkpoint(tmp_path, asynchronous=asynchronous)
    straight = take_steps(engine, 10), engine.params_sha256()
    generator = torch.cuda.get_rng_state(engine.device)
    engine.destroy()
    other, *_ = deepzero.initialize(model=make_model(seed=1), config=settings)
    other.load_checkpoint(tmp_path)
    assert (take_steps(other, 10), other.params_sha256()) == straight
    assert torch.equal(torch.cuda.get_rng_state(other.device), generator)
    other.destroy()


class OnTheCpu(torch.optim.Optimizer):
    """AdamW by the CPU's kernel for parameters that stay on the GPU: what offloading must equal, without pipeline."""

    def __init__(self, params):
        super().__init__(params, {"lr": 1e-2, "weight_decay": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in (p for p in group["params"] if p.grad is not None):
                state = self.state[param]
                if not state:
                    twin = param.detach().cpu()
                    # Elementwise state, which the engine may look at; the real one is inside the CPU's optimizer.
                    state["mirror"] = torch.zeros_like(param)
                    settings = {key: group[key] for key in ("lr", "weight_decay")}
                    state["inner"] = CPUAdam([twin], kernel="chunked", **settings)
                inner = state["inner"]
                twin = inner.param_groups[0]["params"][0]
                twin.copy_(param)
                inner.step([param.grad.cpu()])
                param.copy_(twin)


def bits_of(settings, optimizer=None):
    model = make_model()
    made = optimizer(model.parameters()) if optimizer is not None else None
    engine, *_ = deepzero.initialize(model=model, optimizer=made, config=settings)
    found = take_steps(engine, 8), engine.params_sha256(), engine.report()["memory"], engine.offload_report()
    engine.destroy()
    return found


def offloaded(stage, ratio=1.0, param=False, delayed=False, **more):
    zero = {"stage3_param_persistence_threshold": 30} if stage == 3 else {}
    late = {"delayed_update": True, "delay_after_steps": 2} if delayed else {}
    zero["offload_optimizer"] = {"device": "cpu", "ratio": ratio, **late}
    zero["offload_param"] = {"device": "cpu" if param else "none"}
    optimizer = {"type": "CPUAdam", "params": {"lr": 1e-2, "weight_decay": 0.1, "kernel": "chunked"}}
    return config(stage=stage, bucket=200, overlap=True, zero=zero, gradient_clipping=0, optimizer=optimizer, **more)


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_offload_has_the_bits_of_its_kernel_without_offload(stage, accumulation):
    more = {"precision": "bf16", "gradient_accumulation_steps": accumulation}
    plain = config(stage=stage, bucket=200, overlap=True, gradient_clipping=0, **more)
    del plain["optimizer"]
    losses, sha, *_ = bits_of(plain, OnTheCpu)
    for chaos in (None, 3):
        for param in (False, True) if stage == 3 else (False,):
            found = bits_of(offloaded(stage, param=param, chaos=chaos, **more))
            assert (losses, sha) == found[:2], (chaos, param)
            assert found[2]["masters"]["measured"] == found[2]["moments"]["measured"] == 0


@pytest.mark.parametrize("stage", [2, 3])
def test_offload_does_not_depend_on_timing(stage):
    """Half on each side, and late: the same bits with and without delays."""
    for changes in ({"ratio": 0.5}, {"delayed": True}):
        cases = [offloaded(stage, precision="bf16", chaos=seed, **changes) for seed in (None, 1, 2)]
        results = [bits_of(case)[:2] for case in cases]
        assert results[0] == results[1] == results[2], changes


def test_the_arena_is_locked_and_copies_are_counted():
    engine, *_ = deepzero.initialize(model=make_model(), config=offloaded(2, precision="bf16"))
    arena = engine.zero.offload.arena
    assert arena.pinned and all(grad.is_pinned() for grad in engine.zero.optimizer_shard.grads.values())
    take_steps(engine, 3)
    report = engine.offload_report()
    assert {"gradients_to_host", "optimizer_step", "parameters_to_device"} <= set(report)
    assert all(leg["bytes"] > 0 and leg["seconds"] > 0 and 0 <= leg["hidden"] <= 1 for leg in report.values())
    engine.destroy()
