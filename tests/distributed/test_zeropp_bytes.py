"""What qwZ, hpZ and MiCS send between nodes, and keep: closed forms, exactly."""

import math

import pytest
import torch
from torch import nn

import deepzero
from deepzero.comm.ledger import SECONDARY
from deepzero.runtime.zero.parameter_all_gather import BACKWARD, FORWARD, TO_REPLICAS
from tests.distributed.test_zeropp_weights import settings
from tests.distributed.training import WHOLE, as_predicted

SIZE = 128


def even_model():
    """Five square layers that 2, 3, 4 and 6 ranks cut without padding: 192 x 128 = 24,576 elements each."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(
            nn.Linear(SIZE, SIZE + SIZE // 2, bias=False)
            if i % 2 == 0
            else nn.Linear(SIZE + SIZE // 2, SIZE, bias=False)
            for i in range(4)
        )
    )


def traffic(rank, world, zero, per_node, accumulation):
    given = settings(
        {**zero, "stage3_max_reuse_distance": 0}, per_node, precision="bf16", bucket=25000,
        gradient_accumulation_steps=accumulation,
    )  # fmt: skip
    engine, *_ = deepzero.initialize(model=even_model(), config=given)
    for _ in range(3):
        for _ in range(accumulation):
            engine.backward(engine(torch.ones(2, SIZE).bfloat16()).float().square().mean())
            engine.step()
    return engine.report()


PSI = 4 * SIZE * (SIZE + SIZE // 2)
LAYER = PSI // 4


def between(entry, kind):
    return entry["communication"].get(kind, {"measured": {"between_node_bytes": 0}})["measured"]["between_node_bytes"]


SIX_RANKS = pytest.param(6, 3, 2, marks=pytest.mark.exhaustive)
THREE_NODES = pytest.param(6, 2, 1, marks=pytest.mark.exhaustive)


@pytest.mark.parametrize(("world", "per_node", "accumulation"), [(4, 2, 1), SIX_RANKS, THREE_NODES])
def test_bytes_between_nodes(ranks, world, per_node, accumulation):
    """Closed forms, exactly: qwZ halves both gathers, hpZ leaves one of all, MiCS none but the publication."""
    quantized = {"zero_quantized_weights": True, "quantization": {"meter_every": 0}}
    hpz, mics = {"zero_hpz_partition_size": per_node}, {"mics_shard_size": per_node}
    cases = {"plain": {}, "qwz": quantized, "hpz": hpz, "both": {**quantized, **hpz}, "mics": mics}
    found = {
        name: ranks.run(traffic, {**WHOLE, **zero}, per_node, accumulation, world_size=world)[0]
        for name, zero in cases.items()
    }
    for entry in found.values():
        as_predicted(entry["communication"])
    crossing = (world - per_node) / world
    # The first layer's weight is read by no backward formula; the last one is still there.
    forward, backward = 2 * PSI * crossing * accumulation, 2 * (PSI - 2 * LAYER) * crossing * accumulation
    assert between(found["plain"], FORWARD) == forward and between(found["plain"], BACKWARD) == backward
    part = LAYER // world
    packed = (math.ceil((part + 4 * math.ceil(part / 2048)) / 16) * 16) / (2 * part)
    assert between(found["qwz"], FORWARD) == pytest.approx(forward * packed)
    assert between(found["qwz"], BACKWARD) == pytest.approx(backward * packed)
    assert 0.5 < packed <= 0.505
    assert between(found["hpz"], FORWARD) == forward / accumulation and between(found["hpz"], BACKWARD) == 0
    assert between(found["both"], FORWARD) == pytest.approx(forward * packed / accumulation)
    assert between(found["mics"], FORWARD) == between(found["mics"], BACKWARD) == 0
    groups = world // per_node
    assert between(found["mics"], TO_REPLICAS) == pytest.approx(2 * PSI / world * (groups - 1))
    for name, size in (
        ("hpz", 2 * PSI / per_node),
        ("mics", 2 * PSI / per_node),
        ("both", 2 * PSI / per_node * packed),
    ):
        held = found[name]["memory"][SECONDARY]
        assert held["measured"] == held["predicted"] == pytest.approx(size)
    assert SECONDARY not in found["plain"]["memory"]
