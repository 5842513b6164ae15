"""Stage 3's order of events, counted volume and held memory, read from the ledger."""

import pytest
import torch
from torch import nn

from tests.distributed.pool import on_ranks, sampled
from tests.distributed.training import WHOLE, as_predicted, go, log_lines, one_step, start

FORWARD, BACKWARD = "parameters.all_gather_forward", "parameters.all_gather_backward"
REDUCE, GATHER, AGREE = "gradients.reduce_scatter", "parameters.all_gather", "agreement.all_reduce"
VOCAB, WIDTH = 40, 24


class Untied(nn.Module):
    """An embedding, four layers, a head: every weight but the embedding is read by the backward pass."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids, labels):
        x = self.embed(ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return nn.functional.cross_entropy(self.head(x).float().flatten(0, 1), labels.flatten())


LAYER, TABLE = WIDTH * WIDTH, VOCAB * WIDTH
PSI = 4 * LAYER + 2 * TABLE


def model():
    torch.manual_seed(0)
    return Untied()


def events(rank, world, zero):
    engine = start(model(), stage=3, precision="bf16", bucket=600, overlap=True, zero={**WHOLE, **zero})
    one_step(engine, rank, world)  # recorded
    engine.ledger.trace = True
    one_step(engine, rank, world, step=1)
    return [(e.what, e.kind, e.where) for e in engine.ledger.events]


def names(log):
    """Fetches, launches, waits of parameters, and releases, in short."""
    short, out = {FORWARD: "f", BACKWARD: "b"}, []
    for what, kind, where in log:
        number = where.rpartition(" ")[2]
        if what in ("launch", "wait") and kind in short:
            out.append(f"{what} {short[kind]}{number}")
        elif what == "release":
            out.append(f"release {number}")
    return out


def test_launch_mine_then_the_prefetch_then_wait_for_mine(ranks):
    """Buckets are numbered backwards: 0 is the head, 5 the embedding."""
    log = ranks.run(events, {"stage3_max_reuse_distance": 0}, world_size=2)[0]
    assert names(log) == [
        *("launch f5", "launch f4", "wait f5"),
        *("release 5", "launch f3", "wait f4"),
        *("release 4", "launch f2", "wait f3"),
        *("release 3", "launch f1", "wait f2"),
        *("release 2", "launch f0", "wait f1"),
        # The head is the last in the forward pass and the first in the backward pass: it stays.
        *("release 1", "launch b1", "wait f0"),
        *("release 0", "launch b2", "wait b1"),
        *("release 1", "launch b3", "wait b2"),
        *("release 2", "launch b4", "wait b3"),
        # The embedding's backward pass reads no weight.
        *("release 3", "wait b4"),
        "release 4",
    ]
    # 4: gradients leave while the backward pass goes on; 5, 6, 7 in order, and nothing is gathered afterwards.
    place = {name: [i for i, e in enumerate(log) if e[0] == name or e[:2] == ("launch", name)] for name in
             (REDUCE, AGREE, "boundary", "step", "publish", "backward_end")}  # fmt: skip
    assert place[REDUCE][0] < place["backward_end"][0] < place["boundary"][0] < place[AGREE][0]
    assert place[AGREE][0] < place["step"][0] < place["publish"][0]
    assert not [e for e in log if e[1] == GATHER]


def test_first_fetches_under_the_step(ranks):
    """What the next step uses first leaves when it is stepped on, is waited for there, and is counted there."""
    zero = {"stage3_max_reuse_distance": 0, "sub_group_size": 100}
    plain, log = (ranks.run(events, {**zero, "overlap_param_gather": on}, world_size=2)[0] for on in (False, True))
    usual, fetches = names(plain), names(log)
    assert fetches == [*usual[2:], *usual[:2]] and usual[:2] == ["launch f5", "launch f4"]
    place = [i for i, event in enumerate(log) if event[:2] == ("launch", FORWARD)][-2:]
    agreed, stepped = (next(i for i, e in enumerate(log) if e[:2] == what) for what in (("wait", AGREE), ("step", "")))
    assert agreed < place[0] < place[1] < stepped


def test_without_prefetch(ranks):
    log = names(ranks.run(events, {"stage3_prefetch_bucket_size": 0}, world_size=2)[0])
    launches = [i for i, name in enumerate(log) if name.startswith("launch")]
    assert all(log[i + 1] == log[i].replace("launch", "wait") for i in launches)


def report(rank, world, zero, precision, accumulation=1):
    given = {"precision": precision, "zero": {**WHOLE, **zero}, "gradient_accumulation_steps": accumulation}
    engine = start(model(), stage=3, bucket=600, **given)
    go(engine, rank, world, 0, 3)
    return engine.report(), engine.stage.coordinator.max_live_numel


@pytest.mark.parametrize(("world", "accumulation", "ahead"), sampled(
    [(2, 1, False), (3, 3, True), (4, 1, True), (4, 3, False)], (2, 3, 4), (1, 3), (False, True)
))  # fmt: skip
def test_three_psi(ranks, world, accumulation, ahead):
    """Gathered twice, reduced once, less what is said: the last bucket is kept, the embedding is not needed twice."""
    share = accumulation * (world - 1) / world
    zero = {"stage3_max_reuse_distance": 0, "overlap_param_gather": ahead}
    entry, _ = ranks.run(report, zero, "bf16", accumulation, world_size=world)[0]
    sent = {kind: counts["measured"]["elements"] for kind, counts in entry["communication"].items()}
    assert sent[FORWARD] == pytest.approx(PSI * share)
    assert sent[BACKWARD] == pytest.approx((PSI - TABLE - TABLE) * share)
    assert sent[REDUCE] == pytest.approx(PSI * share)
    as_predicted(entry["communication"])


def test_persistent_parameters_travel_once(ranks):
    entry, _ = ranks.run(report, {"stage3_param_persistence_threshold": LAYER}, "bf16", world_size=2)[0]
    sent = {kind: counts["measured"]["elements"] for kind, counts in entry["communication"].items()}
    assert sent[GATHER] * 2 == pytest.approx(4 * LAYER)
    assert sent[FORWARD] * 2 == pytest.approx(2 * TABLE)
    as_predicted(entry["communication"])


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("world", [2, 3])
def test_memory(ranks, world, precision):
    """(c + a + K)/W per element, gradients in fp32; gathered buffers apart, and never above the limit."""
    limit = 2 * TABLE + 4 * 64 * world
    zero = {"stage3_max_live_parameters": limit, "stage3_prefetch_bucket_size": 10**9}
    for entry, live in ranks.run(report, zero, precision, world_size=world):
        size = 2 if precision == "bf16" else 4
        forms = {"parameters": size, "gradients": 4, "masters": 4 if size == 2 else 0, "moments": 8}
        for category, per_element in forms.items():
            held = entry["memory"][category]
            assert held["predicted"] == per_element * PSI // world
            assert held["measured"] == pytest.approx(held["predicted"], rel=0.01)
        assert 0 < live <= limit
        assert entry["memory"]["gathered"]["largest"] <= limit * size


@on_ranks()
def test_a_limit_below_one_bucket(rank, world):
    """A module that needs more than the limit gets it, and the user a line."""
    with log_lines() as records:
        go(start(model(), stage=3, bucket=600, zero={**WHOLE, "stage3_max_live_parameters": 100}), rank, world, 0, 2)
    assert ["stage3_max_live_parameters=100" in text for text in records].count(True) == (rank == 0)


@on_ranks()
def test_frozen_parameters(rank, world):
    """Frozen weights are partitioned too: a W-th of them is held."""
    net = model()
    for layer in net.layers:
        layer.weight.requires_grad_(False)
    engine = start(net, stage=3, precision="bf16", bucket=600, zero=WHOLE)
    go(engine, rank, world, 0, 2)
    entry = engine.report()
    held = entry["memory"]["parameters"]
    assert held["predicted"] == held["measured"] == PSI
    as_predicted(entry["communication"])
