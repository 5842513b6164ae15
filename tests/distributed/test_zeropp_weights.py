"""qwZ, hpZ and MiCS: how parameters are gathered changes neither bits (hpZ, MiCS) nor anything that is not stated."""

import os
from unittest import mock

import pytest
import torch
from torch import nn

import deepzero
from deepzero.runtime.zero import partition_plan
from deepzero.runtime.zero.zeropp import secondary_shards
from tests.distributed.pool import on_ranks
from tests.distributed.training import (
    WHOLE,
    TinyModel,
    as_predicted,
    built,
    check_alike,
    check_same_bits,
    config,
    go,
    is_gathered,
    make_model,
    my_micro_batches,
    one_step,
    start,
    step_on,
    train,
)

HPZ = {**WHOLE, "zero_hpz_partition_size": 2}
QWZ = {**WHOLE, "zero_quantized_weights": True}
MICS = {**WHOLE, "mics_shard_size": 2}
SHORT = {"block_size": 64, "meter_every": 0}
MICS_QWZ = {**MICS, **QWZ, "quantization": SHORT}
TOGETHER = {**HPZ, **QWZ, "zero_quantized_gradients": True, "quantization": SHORT}


def settings(zero, per_node=2, bucket=1500, **changes):
    comm = {"reduce": "exact", "ranks_per_node": per_node}
    return config(stage=3, zero=zero, bucket=bucket, comm=comm, **changes)


def frozen_embedding():
    model = make_model()
    model.embed.weight.requires_grad_(False)
    return model


def variants(size, per_node):
    """Everything that must not change a bit, the reference first."""
    zero = {**WHOLE, "zero_hpz_partition_size": size}
    mics = {**WHOLE, "mics_shard_size": size}
    yield settings(WHOLE, per_node), "plain"
    yield settings(zero, per_node), "plain"
    yield settings(zero, per_node, overlap=True, chaos=3), "plain"
    yield settings({**zero, "stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0}, per_node), "plain"
    yield settings({**zero, "stage3_param_persistence_threshold": 100}, per_node, bucket=400), "plain"
    yield settings(zero, per_node), "checkpoint"
    yield settings({**zero, "offload_optimizer": {"device": "cpu"}}, per_node, chaos=4), "plain"
    yield (
        settings({**zero, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}, per_node),
        "plain",
    )
    yield settings(mics, per_node), "plain"
    yield settings({**mics, "offload_optimizer": {"device": "cpu"}}, per_node, chaos=5), "plain"


ALL_RANKS = pytest.param(4, 4, 2, marks=pytest.mark.exhaustive)
SIX_RANKS = pytest.param(6, 3, 3, marks=pytest.mark.exhaustive)
FOUR_RANKS = pytest.param(4, 2, 2, marks=pytest.mark.slow)


@pytest.mark.parametrize(("world", "size", "per_node"), [FOUR_RANKS, SIX_RANKS, ALL_RANKS])
def test_hpz_and_mics_same_bits_every_step(ranks, world, size, per_node):
    cases = list(variants(size, per_node))
    # Six ranks on two cores are slow; what differs with their number is in the first three and in MiCS.
    check_same_bits(ranks, cases if world == 4 else [*cases[:3], cases[8]], 3, world)


@pytest.mark.parametrize("model", [make_model, pytest.param(frozen_embedding, marks=pytest.mark.exhaustive)])
def test_same_bits_with_accumulation_and_evaluation(ranks, model):
    more = {"precision": "bf16", "gradient_accumulation_steps": 2}
    check_same_bits(ranks, [(settings(zero, **more), model) for zero in (WHOLE, HPZ, MICS)], 4, 4, evaluated=True)


@pytest.mark.slow
def test_qwz_depends_on_nothing_but_the_values(ranks):
    """Prefetch, hpZ, MiCS, chaos, offload: the quantised values are the same, forward and backward."""
    qwz = {**QWZ, "quantization": SHORT}
    cases = [
        settings(qwz, precision="bf16"),
        settings({**qwz, "zero_hpz_partition_size": 2}, precision="bf16", chaos=1),
        settings({**qwz, "mics_shard_size": 2}, precision="bf16", overlap=True),
        settings({**qwz, "stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0}, precision="bf16", chaos=2),
        settings({**qwz, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}, precision="bf16"),
    ]
    quantised, _ = check_same_bits(ranks, cases, 3, 4)
    exact, _ = check_same_bits(ranks, [settings(WHOLE, precision="bf16")], 3, 4)
    assert quantised != exact and quantised[0] == pytest.approx(exact[0], rel=0.02)


@on_ranks()
def test_frozen_weights_alone(rank, world):
    """Frozen weights alone are quantised: the trained ones keep the bits they have without a frozen one's error."""
    zero = {**WHOLE, "zero_quantized_nontrainable_weights": True, "quantization": SHORT}
    engine = built(settings(zero, precision="bf16"), frozen_embedding)
    quantised = {
        param.requires_grad: param._record.placed()[0].strategy.quantizes for param in engine.module.parameters()
    }
    one_step(engine, rank, world)
    with deepzero.zero.GatheredParameters(engine.module.embed.weight):
        kept = engine.module.embed.weight.detach().clone()
    assert torch.equal(kept, make_model().embed.weight.detach().bfloat16())
    assert quantised == {True: False, False: True}


@pytest.mark.parametrize("how", [QWZ, {**QWZ, "zero_hpz_partition_size": 2}], ids=["qwZ", "hpZ"])
@on_ranks()
def test_a_shard_that_cannot_be_read_leaves_nothing_behind(rank, world, how):
    """As from a disk: no buffer stays taken, and when it can be read again all goes on."""
    engines = [start(make_model(), stage=3, bucket=700, zero=how) for _ in range(2)]
    coordinator = engines[0].stage.coordinator
    unreadable = coordinator.buckets[1].strategy.source
    for _ in range(2):
        with mock.patch.object(unreadable, "fetch_shard", side_effect=OSError("disk")):
            with pytest.raises(OSError, match="disk"):
                one_step(engines[0], rank, world)
            engines[0].discard_gradients()
            with pytest.raises(OSError, match="disk"), deepzero.zero.GatheredParameters(engines[0].module.parameters()):
                pass
        assert not any(bucket.gather_refs or is_gathered(bucket.params[0]) for bucket in coordinator.buckets)
        assert not any(pool.buffers(free=False) for pool in coordinator.pools)
    for engine in engines:
        one_step(engine, rank, world)
    assert engines[0].params_sha256() == engines[1].params_sha256()


@on_ranks()
def test_a_setting_without_anything_to_work_on_is_named(rank, world):
    with mock.patch.object(partition_plan.log, "warning") as said:
        nothing = {"zero_quantized_weights": True, "mics_shard_size": 2, "stage3_param_persistence_threshold": 10**6}
        start(make_model(), stage=3, zero=nothing)
        start(make_model(), stage=3, zero={**WHOLE, "zero_quantized_nontrainable_weights": True})
    names = ["zero_quantized_weights", "mics_shard_size", "zero_quantized_nontrainable_weights"]
    assert [call.args[1] for call in said.call_args_list] == (names if rank == 0 else [])


class Looks(TinyModel):
    def forward(self, ids, labels):
        self.before = self.head.weight.detach().float().clone()
        with deepzero.zero.GatheredParameters(self.head.weight):
            self.inside = self.head.weight.detach().float().clone()
        return super().forward(ids, labels)


@on_ranks()
def test_gathered_parameters_are_exact(rank, world):
    """Also inside a forward pass, which computes with quantised ones."""
    model = Looks()
    values = model.head.weight.detach().bfloat16().float()
    engine = start(model, stage=3, precision="bf16", zero={**QWZ, "quantization": SHORT})
    with torch.no_grad():
        model.head(torch.zeros(1, 24).bfloat16())
    ids, labels = my_micro_batches(0, rank, world, 2, 1)[0]
    engine.backward(engine(ids, labels))
    assert torch.equal(model.inside, values) and not torch.equal(model.before, values)
    engine.step()
    with deepzero.zero.GatheredParameters(model.head.weight, modifier_rank=0), torch.no_grad():
        model.head.weight.fill_(0.3)
    with torch.no_grad():
        engine(ids, labels)
    with deepzero.zero.GatheredParameters(model.head.weight):
        assert (model.head.weight.detach().float() == torch.tensor(0.3).bfloat16().float()).all()


@on_ranks()
def test_a_write_is_later_than_what_is_on_its_way(rank, world):
    """What is seen of a write that comes while quantised values are on their way."""
    engine = start(make_model(), stage=3, zero={**QWZ, "quantization": SHORT})
    bucket = engine.stage.coordinator.buckets[0]
    param = bucket.params[0]
    bucket.launch("parameters.all_gather_evaluation", may_quantize=True)
    bucket.write(param, torch.full((param.numel(),), 0.3))
    bucket.wait()
    bucket.show()
    assert (param == 0.3).all()


@on_ranks()
def test_two_ranks(rank, world):
    """Both are one group, and each is one: there is a secondary partition, and no bit differs."""
    found = []
    for zero in (WHOLE, HPZ, {**WHOLE, "mics_shard_size": 1}):
        engine = built(settings(zero))
        done = [one_step(engine, rank, world, step) for step in range(3)]
        found.append(([(step.loss, step.grad_norm) for step in done], engine.params_sha256()))
        assert (len(secondary_shards(engine.zero.stage3.coordinator.buckets)) > 0) == (zero is not WHOLE)
    assert found[0] == found[1] == found[2]


@on_ranks()
def test_a_write_to_quantised_values_is_refused(rank, world):
    engine = start(make_model(), stage=3, precision="bf16", zero={**QWZ, "quantization": SHORT})
    model = engine.module

    def write(*_):
        for param in model.parameters():  # one bucket, so that every rank's part is written
            param.data.mul_(2)

    model.norm.register_forward_hook(write)
    ids, labels = my_micro_batches(0, rank, world, 2, 1)[0]
    with pytest.raises(deepzero.zero.PartitionedUseError, match=r"written while it was gathered"):
        step_on(engine, ids, labels)


@pytest.mark.parametrize("zero", [
    pytest.param(HPZ, id="hpz"),
    pytest.param(MICS_QWZ, id="mics-qwz", marks=pytest.mark.slow),
    pytest.param(TOGETHER, id="all", marks=pytest.mark.slow),
])  # fmt: skip
@on_ranks(4)
def test_checkpoint_in_the_middle(rank, world, tmp_path, zero):
    """What hpZ keeps is not taken for the new values; of frozen parameters, and in MiCS, it is renewed by the load."""
    given = settings(zero, precision="bf16")
    (losses, _, sha), _ = train(rank, world, given, 6, frozen_embedding)
    engine = built(given, frozen_embedding)
    go(engine, rank, world, 0, 3)
    engine.save_checkpoint(tmp_path)
    go(engine, rank, world, 7, 9)
    engine.load_checkpoint(tmp_path)
    went_on = go(engine, rank, world, 3, 4)
    coordinator = engine.zero.stage3.coordinator
    assert secondary_shards(coordinator.buckets)
    assert not any(pool._taken for pool in coordinator.pools)  # given back
    as_predicted(engine.report()["communication"])
    went_on += go(engine, rank, world, 4, 6)
    assert (went_on, engine.params_sha256()) == (losses[3:], sha)
    engine.destroy()
    assert len(secondary_shards(coordinator.buckets)) == 0


@on_ranks(4)
def test_states_that_leave_between_phases(rank, world):
    engine = start(make_model(), stage=3, precision="bf16", zero={**MICS, **QWZ, "quantization": SHORT})
    twin = start(make_model(), stage=3, precision="bf16", zero={**MICS, **QWZ, "quantization": SHORT})
    for step in range(3):
        one_step(engine, rank, world, step)
        one_step(twin, rank, world, step)
        engine.offload_states()
        assert not any(t.untyped_storage().nbytes() for t in secondary_shards(engine.zero.stage3.coordinator.buckets))
        engine.reload_states()
    assert engine.params_sha256() == twin.params_sha256() and engine.last_step == twin.last_step


@on_ranks(4)
def test_bad_sizes(rank, world):
    """On every rank, and which sizes would do."""
    for what, given in (
        ("zero_optimization.zero_hpz_partition_size=3", settings({**WHOLE, "zero_hpz_partition_size": 3})),
        ("zero_optimization.mics_shard_size=3", settings({**WHOLE, "mics_shard_size": 3})),
        ("comm.ranks_per_node=3", settings(WHOLE, per_node=3)),
    ):
        with pytest.raises(deepzero.ConfigError, match=f"^{what}: does not divide the 4 ranks.*1, 2 or 4"):
            built(given)


class LooksInBetween(TinyModel):
    """Gathers a block's weight for itself after that block, and uses the block again."""

    def forward(self, ids, labels):
        x = self.embed(ids)
        x = x + self.blocks[0](x)
        with deepzero.zero.GatheredParameters(self.blocks[0][1].weight):
            pass
        x = x + self.blocks[1](x) + self.blocks[0](x)
        logits = self.head(self.norm(x))
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


@on_ranks()
def test_a_look_at_the_very_values_leaves_no_trace(rank, world):
    """Whether a bucket was released between the look and its next use depends on limits, and must not be seen."""
    found = []
    for given in (
        {},
        {"stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0},
        {"stage3_max_live_parameters": 1},
    ):
        engine = built(settings({**QWZ, "quantization": SHORT, **given}, precision="bf16"), LooksInBetween)
        found.append([(one_step(engine, rank, world, step).loss, engine.params_sha256()) for step in range(3)])
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("zero", [HPZ, MICS], ids=["hpz", "mics"])
@on_ranks(4)
def test_evaluations_stay_inside_the_node(rank, world, zero):
    """hpZ: but for the first after a step. The next step sends what it would have sent without them."""
    engine = built(settings(zero, precision="bf16"), frozen_embedding)
    go(engine, rank, world, 0, 3)
    ids, labels = my_micro_batches(0, rank, world, 2, 1)[0]
    sent, before = [], 0
    for _ in range(3):
        with torch.no_grad():
            engine(ids, labels)
        aside = engine.ledger.between_steps["parameters.all_gather_evaluation"].between_node_bytes
        sent.append(aside - before)
        before = aside
    one_step(engine, rank, world, 3)
    account = engine.report()["communication"]
    assert (sent[0] > 0) is ("zero_hpz_partition_size" in zero) and sent[1:] == [0, 0]
    as_predicted(account)


@pytest.mark.parametrize("local", [[1, 2, 2], [2, 1, 1]])
@on_ranks(3)
def test_machines_of_different_sizes_count_as_one_node(rank, world, local):
    zero = {**QWZ, "zero_quantized_gradients": True, "quantization": SHORT}
    os.environ["LOCAL_WORLD_SIZE"] = str(local[rank])
    seen, report = train(rank, world, config(stage=3, zero=zero, precision="bf16", comm={}), 2)
    assert not any(entry["measured"]["between_node_bytes"] for entry in report["communication"].values())
    check_alike(seen)


def test_one_rank_takes_any_sizes(ranks):
    zero = {**WHOLE, "zero_hpz_partition_size": 2, "zero_quantized_weights": True, "zero_quantized_gradients": True}
    check_same_bits(ranks, [settings(zero), settings(WHOLE, per_node=None)], 5, 1)
