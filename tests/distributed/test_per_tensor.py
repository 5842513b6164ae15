"""Optimizers that need whole tensors: one owner for each, the same bits in every stage, each orthogonalised once."""

import itertools
from unittest import mock

import pytest
import torch
from torch import nn

import deepzero
from deepzero.comm import process_group
from deepzero.comm.ledger import off_forms
from deepzero.ops import Muon, muon_groups
from deepzero.runtime.zero.optimizer_shard import clip_divisor
from deepzero.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state, safe_set_full_optimizer_state
from tests.distributed.checkpoints import fingerprints
from tests.distributed.pool import on_ranks, sampled
from tests.distributed.training import VOCAB, WHOLE, WIDTH, check_same_bits, config, go, my_micro_batches, one_step

MUON = {"type": "Muon", "params": {"lr": 1e-2, "weight_decay": 0.1, "adam_lr": 3e-3}}
BLOCKS = 3


class Matrices(nn.Module):
    """Three blocks with three matrices of two sizes each, which neither 2 nor 4 ranks can share evenly."""

    def __init__(self, frozen=False):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 37), nn.GELU(), nn.Linear(37, WIDTH)
            )
            for _ in range(BLOCKS)
        )  # fmt: skip
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        if frozen:
            self.blocks[1][2].weight.requires_grad_(False)

    def forward(self, ids, labels):
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.cross_entropy(self.lm_head(x).float().flatten(0, 1), labels.flatten())


MATRICES = 3 * BLOCKS


class PerTensor(torch.optim.Optimizer):
    """Steps on one tensor after another; declared by its class."""

    per_tensor = True

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in (p for p in group["params"] if p.grad is not None):
                self.step_on(param, self.state[param], group["lr"])

    def step_on(self, param, state, lr):
        raise NotImplementedError


class Lamb(PerTensor):
    """Momentum, scaled by the norms of the whole layer."""

    def step_on(self, param, state, lr):
        momentum = state.setdefault("momentum", torch.zeros_like(param)).lerp_(param.grad, 0.1)
        param.sub_(momentum, alpha=lr * float(param.norm() / (momentum.norm() + 1e-6)))


class Shampoo(PerTensor):
    """A preconditioner for each side of a matrix, whose shape is not the parameter's; AdaGrad for the rest."""

    def step_on(self, param, state, lr):
        grad = param.grad
        for dim in range(param.dim()):
            flat = grad.transpose(0, dim).reshape(grad.shape[dim], -1)
            side = state.setdefault(f"side_{dim}", 1e-3 * torch.eye(grad.shape[dim])).add_(flat @ flat.T)
            values, vectors = torch.linalg.eigh(side)
            root = vectors * values.clamp(min=1e-6).pow(-0.5 / param.dim()) @ vectors.T
            grad = torch.tensordot(root, grad, dims=([1], [dim])).movedim(0, dim)
        param.sub_(grad, alpha=lr)


OTHERS = {
    "lamb": {"type": f"{__name__}.Lamb", "params": {}},
    "shampoo": {"type": f"{__name__}.Shampoo", "params": {}},
    "adafactor": {"type": "Adafactor", "params": {"per_tensor": True}},
}


def settings(stage, world=1, optimizer=MUON, whole_batch=12, **changes):
    accumulation = changes.get("gradient_accumulation_steps", 1)
    size = {"train_micro_batch_size_per_gpu": whole_batch // world // accumulation}
    zero = {**(WHOLE), **changes.pop("zero", {})}
    return config(stage=stage, zero=zero, bucket=changes.pop("bucket", 900), optimizer=optimizer, **size, **changes)


def begin(given, model=Matrices):
    torch.manual_seed(0)
    return deepzero.initialize(model=model(), config=given)[0]


def check(ranks, world, cases):
    """All cases give the same bits, and hold what the closed forms of memory say. Returns the bits."""
    reference, reports = check_same_bits(ranks, [(given, Matrices) for given in cases], 2, world)
    for given, report in zip(cases, reports, strict=True):
        assert not off_forms({"memory": report["memory"]}), given
    return reference


@pytest.mark.parametrize(("world", "precision", "accumulation"), sampled(
    [(2, "bf16", 3), (3, "fp32", 1)], (1, 2, 3, 4), ("fp32", "bf16", "fp16"), (1, 3)
))  # fmt: skip
def test_stages_give_the_same_bits(ranks, world, precision, accumulation):
    """Whatever the buckets, too; and what is held is what the closed forms say, padding included."""
    more = {"precision": precision, "gradient_accumulation_steps": accumulation}
    for stages in ((0, 1), (2, 3)) if accumulation > 1 else ((0, 1, 2, 3),):  # sums in twins, as for other optimizers
        cases = [settings(s, world, bucket=b, overlap=b > 900, **more) for s in stages for b in (900, 10**6)]
        check(ranks, world, cases)


@pytest.mark.parametrize(("most", "micro_batches"), [(3, 6), pytest.param(4, 12, marks=pytest.mark.exhaustive)])
def test_number_of_ranks_gives_the_same_bits(ranks, most, micro_batches):
    invariant, found = {"comm": {"reduce": "exact", "world_size_invariant": True}}, []
    for world in range(1, most + 1):
        one = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": micro_batches // world}
        cases = [{**settings(stage, precision="bf16"), **one, **invariant} for stage in (1, 3)]
        found.append(check(ranks, world, cases))
    assert found == found[:1] * most


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_ranks(1)
def test_torch_alone_has_the_same_bits(rank, world, stage):
    """``torch.optim.Muon`` and ``torch.optim.AdamW`` in a plain loop; gradients are clipped by the same division."""
    engine = begin(settings(stage))
    torch.manual_seed(0)
    model = Matrices()
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and name.startswith("blocks")]
    rest = [p for p in model.parameters() if not any(p is m for m in matrices)]
    assert len(matrices) == MATRICES
    muon = torch.optim.Muon(matrices, lr=1e-2, weight_decay=0.1)
    adam = torch.optim.AdamW(rest, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    for step in range(5):
        said = one_step(engine, rank, world, step)
        ((ids, labels),) = my_micro_batches(step, 0, 1, 12, 1)
        loss = model(ids, labels)
        loss.backward()
        divisor = torch.tensor(clip_divisor(said.grad_norm, 0.5))
        assert divisor > 1
        for param in model.parameters():
            param.grad.div_(divisor)
        muon.step()
        adam.step()
        model.zero_grad()
        assert said.loss == loss.item()
        for name, param in model.named_parameters():
            assert torch.equal(safe_get_full_fp32_param(engine.module.get_parameter(name)), param), (step, name)


def count_calls(rank, world, given, model, steps):
    """How often this rank orthogonalises in so many steps, and of how many matrices it has momentum."""
    engine, calls = begin(given, model), 0
    real = torch.optim._muon._zeropower_via_newtonschulz

    def counted(*args):
        nonlocal calls
        calls += 1
        return real(*args)

    with mock.patch("torch.optim._muon._zeropower_via_newtonschulz", counted):
        go(engine, rank, world, 0, steps)
    kept = sum("momentum_buffer" in state for state in engine.optimizer.state.values())
    return calls, kept, engine.params_sha256()


def initialised_in_pieces():
    with deepzero.zero.Init():
        return Matrices()


@pytest.mark.parametrize(("world", "accumulation"), [(2, 3), pytest.param(3, 1, marks=pytest.mark.exhaustive)])
def test_each_matrix_is_orthogonalised_once_a_step(ranks, world, accumulation):
    """Not once a micro-batch, not on every rank; with ``zero.Init``, and with the optimizer in host memory."""
    hashes = set()
    cases = [(stage, {}, Matrices) for stage in (1, 2, 3)]
    cases += [(3, {}, initialised_in_pieces), (2, {"offload_optimizer": {"device": "cpu"}}, Matrices)]
    for stage, zero, model in cases:
        given = settings(stage, world, precision="bf16", gradient_accumulation_steps=accumulation, zero=zero)
        found = ranks.run(count_calls, given, model, 2, world_size=world)
        assert sum(calls for calls, *_ in found) == 2 * MATRICES, (stage, zero)
        assert sum(kept for _, kept, _ in found) == MATRICES
        assert [calls for calls, *_ in found] == [2 * kept for _, kept, _ in found]
        if stage > 1:
            hashes |= {sha for *_, sha in found}
    assert len(hashes) == 1


# ---- settings that have nothing to do with it, and everything together -----------------------------------------------

ZEROS = {
    "allreduce": (1, {"reduce_scatter": False}),
    "overlap_param_gather": (2, {"overlap_param_gather": True}),
    "overlap_param_gather 1": (1, {"overlap_param_gather": True, "overlap_comm": True}),
    "sub_group_size": (3, {"sub_group_size": 1000}),
    "persistent": (3, {"stage3_param_persistence_threshold": 600}),
    "prefetch": (3, {"stage3_prefetch_bucket_size": 10**6, "overlap_comm": True}),
    "offload": (2, {"offload_optimizer": {"device": "cpu"}}),
    "offload half": (1, {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}),
    "offload all": (3, {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}),
    "offload and overlap": (2, {"offload_optimizer": {"device": "cpu"}, "overlap_param_gather": True}),
    "hpz": (3, {"zero_hpz_partition_size": 2}),
    "mics": (3, {"mics_shard_size": 2}),
}
ROUNDED = {"qwz": (3, {"zero_quantized_weights": True}), "qgz": (2, {"zero_quantized_gradients": True})}
FEW_ZEROS = [("bf16", name) for name in ("overlap_param_gather", "sub_group_size", "offload all", "hpz")]


@pytest.mark.parametrize(("precision", "name"), sampled(FEW_ZEROS, ("bf16", "fp32"), ZEROS))
def test_other_settings_change_no_bit(ranks, precision, name):
    stage, zero = ZEROS[name]
    world = 4 if name in ("hpz", "mics") or precision == "fp32" else 2
    check(ranks, world, [settings(s, world, precision=precision, zero=z) for s, z in ((2, {}), (stage, zero))])


@pytest.mark.parametrize("name", ["qgz", pytest.param("qwz", marks=pytest.mark.exhaustive)])
def test_rounded_on_the_way(ranks, name):
    """ZeRO++ rounds what travels; ranks still agree, and the loss is close."""
    stage, zero = ROUNDED[name]
    losses = [check(ranks, 2, [settings(stage, 2, precision="bf16", zero=z)])[0] for z in ({}, zero)]
    assert losses[1][-1] == pytest.approx(losses[0][-1], rel=0.05)


# ---- other optimizers of the kind ------------------------------------------------------------------------------------


ANY = [("lamb", 3), ("shampoo", 2), ("adafactor", 2)]


@pytest.mark.parametrize(("name", "world"), sampled(ANY, OTHERS, (1, 2, 3)))
def test_any_declared_optimizer(ranks, name, world):
    cases = [settings(stage, world, optimizer=OTHERS[name]) for stage in (0, 1, 2, 3)]
    cases.append(settings(2, world, optimizer=OTHERS[name], zero={"offload_optimizer": {"device": "cpu"}}))
    check(ranks, world, cases)


@on_ranks(2)
def test_a_part_of_the_model(rank, world):
    """Frozen matrices and groups of one's own; state and masters can be looked at and set, whole."""
    for stage in (0, 2, 3):
        torch.manual_seed(0)
        model = Matrices(frozen=True)
        frozen = model.blocks[1][2].weight.detach().clone()
        optimizer = Muon(muon_groups(model), lr=1e-2)
        engine = deepzero.initialize(model=model, optimizer=optimizer, config=settings(stage, world))[0]
        one_step(engine, rank, world)
        weight = engine.module.blocks[0][2].weight
        momentum = safe_get_full_optimizer_state(weight, "momentum_buffer")
        assert momentum.shape == (37, WIDTH) and momentum.abs().sum() > 0
        safe_set_full_optimizer_state(weight, 2 * momentum, "momentum_buffer")
        assert torch.equal(safe_get_full_optimizer_state(weight, "momentum_buffer"), 2 * momentum)
        owners = process_group.all_gather_object(sum(m.shape == (37, WIDTH) for m in engine.zero.groups[0].masters))
        assert sum(owners) == (2 if stage else 4), "two of three are trained; in stage 0 by each rank"
        with deepzero.zero.GatheredParameters(engine.module.blocks[1][2].weight):
            assert torch.equal(engine.module.blocks[1][2].weight, frozen)


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def states(engine):
    """Whole masters and moments by hash, and what is of another shape, from whichever rank has it."""
    holdings, mine = engine.checkpointer.holdings(), {}
    for run in holdings.runs():
        for key, value in holdings.optimizer_state(run)[1].items():
            mine[run.name, key] = value.tolist() if torch.is_tensor(value) else value
    everyone = process_group.all_gather_object(mine)
    return fingerprints(engine), {key: value for theirs in everyone for key, value in theirs.items()}


def goes_on(rank, world, folder, given, save):
    """What is saved after two steps, or was loaded, and the losses of the next two."""
    engine = begin(given)
    if save:
        go(engine, rank, world, 0, 2)
        engine.save_checkpoint(str(folder))
    else:
        engine.load_checkpoint(str(folder))
    found = states(engine)
    return found, go(engine, rank, world, 2, 4)


PLACES = list(itertools.product((0, 1, 2, 3), (1, 2, 3, 4)))


FEW = {"muon": [(0, 2), (3, 2), (2, 3)], "adafactor": [(3, 3), (0, 2)], "shampoo": [(2, 2), (1, 3)]}
BY_HAND = [pytest.mark.exhaustive, pytest.mark.timeout(1500)]


@pytest.mark.parametrize(("name", "places", "everywhere"), [
    *((name, places, False) for name, places in FEW.items()),
    *(pytest.param(name, places, True, marks=BY_HAND) for name, places in FEW.items() if name != "muon"),
    *(pytest.param(name, PLACES, True, marks=BY_HAND) for name in ("muon", "adafactor")),
])  # fmt: skip
def test_checkpoints_cross_stages_and_ranks(ranks, tmp_path, name, places, everywhere):
    """What was saved is there again, bit by bit, and training goes on: from each place in one other, or everywhere."""
    optimizer = {"muon": MUON, **OTHERS}[name]
    for number, (stage, world) in enumerate(places):
        folder = tmp_path / str(number)
        given = settings(stage, world, optimizer, precision="bf16")
        saved, expected = ranks.run(goes_on, folder, given, True, world_size=world)[0]
        others = places if everywhere else [places[number - 1]]
        for other_stage, other_world in others:
            given = settings(other_stage, other_world, optimizer, precision="bf16")
            loaded, losses = ranks.run(goes_on, folder, given, False, world_size=other_world)[0]
            assert loaded == saved
            assert losses == (expected if other_world == world else pytest.approx(expected, rel=1e-3))


class Columns(torch.optim.SGD):
    """Keeps a state of the parameter's shape that lies column by column, and one of another shape."""

    per_tensor = True

    def step(self, closure=None):
        for param in self.param_groups[0]["params"]:
            if param.dim() == 2 and param.grad is not None:
                state = self.state[param]
                state["kept"] = state["kept"] + 1 if "kept" in state else torch.ones_like(param.t().contiguous()).t()
                state["sums"] = torch.zeros(3)
        return super().step(closure)


@on_ranks(2)
def test_a_state_that_lies_by_columns(rank, world, tmp_path):
    given = config(stage=1)
    del given["optimizer"]
    model = Matrices()
    engine, *_ = deepzero.initialize(model=model, config=given, optimizer=Columns(model.parameters(), lr=0.1))
    go(engine, rank, world, 0, 2)
    engine.save_checkpoint(tmp_path)
    one_step(engine, rank, world, 2)
    engine.load_checkpoint(tmp_path)
    weight = model.blocks[0][2].weight
    assert torch.equal(safe_get_full_optimizer_state(weight, "kept"), torch.full(weight.shape, 2.0))
    with pytest.raises(ValueError, match=r"it keeps kept, sums \(of another shape\)"):
        safe_get_full_optimizer_state(weight, "sums")
