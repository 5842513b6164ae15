"""The error meter: what it reads, when it reads, and what happens to a bucket that loses too much."""

import math

import torch
from torch import nn

import deepzero
from deepzero.runtime.quantization_monitor import METER
from tests.distributed.pool import on_ranks
from tests.distributed.training import as_predicted, config, log_lines, step_from

SIZE = 128
LAYERS = 4


def model(outlier=0.0):
    """Square layers of normal numbers; ``outlier`` is one number in each 2,048 of the second."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(SIZE, SIZE, bias=False) for _ in range(LAYERS)))
    with torch.no_grad():
        for layer in layers:
            layer.weight.normal_()
        if outlier:
            layers[1].weight.view(-1)[::2048] = outlier
    return layers


def settings(zero=None, precision="bf16", fp16=None, **quantization):
    given = {
        "stage3_param_persistence_threshold": 0,
        "stage3_max_reuse_distance": 0,
        "zero_quantized_weights": True,
        "zero_quantized_gradients": True,
        "zero_hpz_partition_size": 2,
        "quantization": {"block_size": 64, "meter_every": 3, **quantization},
        **(zero or {}),
    }
    comm = {"ranks_per_node": 2}
    more = {"fp16": fp16} if fp16 is not None else {}
    return config(stage=3, zero=given, comm=comm, bucket=SIZE * SIZE, precision=precision, gradient_clipping=0, **more)


def run(rank, world, given, outlier, steps):
    """The readings and metrics of every step, and the account at the end."""
    with log_lines("deepzero.runtime.quantization_monitor") as messages:
        engine, *_ = deepzero.initialize(model=model(outlier), config=given)
        generator, seen = torch.Generator().manual_seed(rank), []
        for _ in range(steps):
            x = torch.randn(8, SIZE, generator=generator).bfloat16() / SIZE
            step_from(engine, engine(x).float().square().mean())
            same = {name: value for name, value in engine.step_metrics().items() if not name.startswith("comm/")}
            seen.append((same, engine.quantization_report()))
    return seen, messages, engine.report(), engine.params_sha256()


def test_readings(ranks):
    """The first step and every third; the same numbers on all ranks; what theory says for normal numbers."""
    results = ranks.run(run, settings(block_size=2048), 0.0, 5, world_size=4)
    assert all(seen == results[0][0] and not messages for seen, messages, *_ in results)
    metrics = [entry for entry, _ in results[0][0]]
    assert [bool(entry) for entry in metrics] == [True, False, False, True, False]
    report = results[0][0][0][1]
    assert len(report["weights"]) == len(report["gradients"]) == LAYERS and report["unquantized"] == []
    # The largest of 2048 normal numbers is about 3.5: steps of 3.5/127, whose error is uniform.
    expected = 10 * math.log10(12 / (3.5 / 127) ** 2)
    assert all(abs(ratio - expected) < 1.5 for ratio in report["weights"].values())
    assert all(5 < ratio < 25 for ratio in report["gradients"].values())
    worst = min(report["gradients"].values())
    assert metrics[0]["quantization/gradients_snr_db_min"] == worst and metrics[0]["quantization/unquantized"] == 0
    name = "0.weight"
    assert metrics[0][f"quantization/weights_snr_db/{name}"] == report["weights"][name]


def test_a_bucket_that_loses_too_much_goes_unquantised(ranks):
    """Said once, by rank 0; the account follows; the others stay quantised."""
    results = ranks.run(run, settings(block_size=2048), 100.0, 5, world_size=4)
    assert len({sha for *_, sha in results}) == 1
    for rank, (seen, messages, report, _) in enumerate(results):
        last = seen[-1][1]
        assert last["unquantized"] == ["weights of 1.weight"]
        assert set(last["weights"]) == {"0.weight", "2.weight", "3.weight"}
        assert len(messages) == (1 if rank == 0 else 0)
        as_predicted(report["communication"])
        assert METER not in report["communication"]
    assert "weights of 1.weight" in results[0][1][0] and "min_weight_snr_db, which is 25" in results[0][1][0]


def test_gradients_that_lose_too_much(ranks):
    results = ranks.run(run, settings(min_gradient_snr_db=100.0, min_weight_snr_db="never"), 0.0, 4, world_size=4)
    for seen, _, report, _ in results:
        assert len(seen[-1][1]["unquantized"]) == LAYERS
        sent = report["communication"]
        assert sent["gradients.reduce_scatter"]["measured"]["calls"] == LAYERS
        assert not sent.get("gradients.reduce_inside_node", {"measured": {"calls": 0}})["measured"]["calls"]


def test_without_a_meter(ranks):
    """Nothing is measured, and nothing decided."""
    results = ranks.run(run, settings(meter_every=0, block_size=2048), 100.0, 2, world_size=2)
    assert all(entry == {} for seen, *_ in results for entry, _ in seen)


def test_the_meter_changes_no_bit(ranks):
    with_it, without = (ranks.run(run, settings(meter_every=every), 0.0, 2, world_size=4) for every in (1, 0))
    assert [result[3] for result in with_it] == [result[3] for result in without]


@on_ranks()
def test_a_skipped_step_is_measured_later(rank, world):
    """fp16 begins with overflows: the first step that is applied is the first that is measured."""
    given = settings(
        {"zero_quantized_weights": False}, "fp16", meter_every=50, min_gradient_snr_db=200.0,
        fp16={"initial_scale_power": 32, "hysteresis": 1},
    )  # fmt: skip
    engine, *_ = deepzero.initialize(model=model(), config=given)
    skipped, decided = [], []
    for _ in range(32):
        step_from(engine, engine(torch.ones(4, SIZE).half() / SIZE).float().square().mean())
        skipped.append(engine.last_step.skipped)
        decided.append(len(engine.quantization_report()["unquantized"]))
    first = skipped.index(False)
    assert first > 0 and decided == [0] * first + [LAYERS] * (len(decided) - first)


@on_ranks(4)
def test_the_account_of_the_steps_after_a_stop(rank, world):
    """MiCS: what has stopped is kept anew at once, and nothing leaves the group that was not said."""
    zero = {"zero_hpz_partition_size": 1, "mics_shard_size": 2}
    given = settings(zero, block_size=2048, meter_every=2, min_gradient_snr_db=1000.0)
    engine, *_ = deepzero.initialize(model=model(100.0), config=given)
    for step in range(4):
        step_from(engine, engine(torch.ones(4, SIZE).bfloat16() / SIZE).float().square().mean())
        if step:  # that in which buckets have just been stopped, and the next ones
            as_predicted(engine.report()["communication"])
    unquantized = engine.quantization_report()["unquantized"]
    assert "weights of 1.weight" in unquantized and len(unquantized) == 1 + LAYERS
