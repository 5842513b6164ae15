"""qwZ, hpZ and qgZ together: what all of it sends, and that it goes with everything else that an engine does."""

import pytest
import torch
from torch import nn

import deepzero
from deepzero.runtime.zero.parameter_all_gather import BACKWARD, FORWARD
from tests.distributed.training import as_predicted, config, make_model, my_micro_batches, one_step

ALL = {
    "stage3_param_persistence_threshold": 0, "zero_quantized_weights": True, "zero_hpz_partition_size": 2,
    "zero_quantized_gradients": True,
}  # fmt: skip
SHORT = {"block_size": 64, "meter_every": 2}
CPU = {"device": "cpu"}


def settings(zero, **changes):
    return config(stage=3, zero=zero, comm={"ranks_per_node": 2}, **{"precision": "bf16", "bucket": 1500, **changes})


def course(rank, world, given, folder=None, steps=5):
    """Losses, an evaluation after each step, and the parameters; saved and loaded in the middle with a folder."""
    torch.manual_seed(0)
    engine, *_ = deepzero.initialize(model=make_model(), config=given)
    seen = []
    for step in range(steps):
        done = one_step(engine, rank, world, step)
        with torch.no_grad():
            seen.append((done.loss, done.grad_norm, float(engine(*my_micro_batches(step, rank, world, 2, 1)[0]))))
        if folder is not None and step == 2:
            engine.save_checkpoint(folder)
            engine.destroy()
            engine, *_ = deepzero.initialize(model=make_model(), config=given)
            engine.load_checkpoint(folder)
    return seen, engine.params_sha256(), engine.report()


def courses(rank, world, cases, folders, steps=5):
    return [course(rank, world, given, folder, steps) for given, folder in zip(cases, folders, strict=True)]


@pytest.mark.parametrize(
    "accumulation", [pytest.param(1, marks=pytest.mark.exhaustive), pytest.param(2, marks=pytest.mark.slow)]
)
def test_same_bits_however_it_is_run(ranks, tmp_path, accumulation):
    """Overlap, prefetch, chaos, offload of states and parameters, a resume in the middle, MiCS in place of hpZ."""
    zero = {**ALL, "quantization": SHORT}
    more = {"gradient_accumulation_steps": accumulation}
    mics = {**{k: v for k, v in zero.items() if k != "zero_hpz_partition_size"}, "mics_shard_size": 2}
    cases = [
        settings(zero, **more),
        settings(zero, overlap=True, chaos=1, **more),
        settings({**zero, "stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0}, **more),
        settings({**zero, "offload_optimizer": CPU}, overlap=True, chaos=2, **more),
        settings({**zero, "offload_optimizer": CPU, "offload_param": CPU}, chaos=3, **more),
        settings(zero, **more),
        settings(mics, overlap=True, **more),
    ]
    folders = [None] * 5 + [str(tmp_path), None]
    results = ranks.run(courses, cases, folders, world_size=4, timeout=110)
    for per_rank in results:
        for number, (seen, sha, report) in enumerate(per_rank):
            assert (seen, sha) == per_rank[0][:2], f"variant {number} differs"
            as_predicted(report["communication"])


def test_alone_and_together_it_trains_as_stage_3_does(ranks):
    zeros = [{**dict(list(ALL.items())[:1]), **dict(part)} for part in _subsets(list(ALL.items())[1:])]
    cases = [settings({**zero, **({"quantization": SHORT} if len(zero) > 2 or "zero_hpz_partition_size" not in zero
             else {})} if len(zero) > 1 else zero) for zero in zeros]  # fmt: skip
    results = ranks.run(courses, cases, [None] * len(cases), 3, world_size=4, timeout=110)
    plain = results[0][0][0]
    for seen, *_ in results[0]:
        assert [loss for loss, *_ in seen] == pytest.approx([loss for loss, *_ in plain], rel=0.03)
    assert len({sha for _, sha, _ in results[0]}) == 4  # hpZ changes no bit


def _subsets(items):
    return [[item for i, item in enumerate(items) if number >> i & 1] for number in range(1 << len(items))]


WIDTH = 512


def layers():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6)))


def account(rank, world, zero):
    given = settings({"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0, **zero}, bucket=WIDTH**2)
    engine, *_ = deepzero.initialize(model=layers(), config=given)
    for _ in range(3):
        engine.backward(engine(torch.ones(2, WIDTH).bfloat16()).float().square().mean())
        engine.step()
    return engine.report()["communication"]


def test_bytes_between_nodes_of_all_three(ranks):
    """The bar: at most 0.26 of stage 3's at 2 x 2, with blocks of 2048 and their scales. It is 0.21 or less."""
    found = {
        name: ranks.run(account, zero, world_size=4)[0]
        for name, zero in {"plain": {}, "all": {k: v for k, v in ALL.items() if k.startswith("zero")}}.items()
    }
    for kinds in found.values():
        as_predicted(kinds)

    def between(name, *kinds):
        return sum(found[name].get(kind, {"measured": {"between_node_bytes": 0}})["measured"]["between_node_bytes"]
                   for kind in kinds)  # fmt: skip

    reductions = ("gradients.reduce_scatter", "gradients.reduce_inside_node", "gradients.reduce_between_nodes")
    assert between("all", FORWARD) == pytest.approx(0.501 * between("plain", FORWARD), rel=1e-3)
    assert between("all", BACKWARD) == 0 < between("plain", BACKWARD)
    assert between("all", *reductions) <= 0.25 * 1.004 / 2 * between("plain", *reductions)
    whole = between("all", FORWARD, BACKWARD, *reductions) / between("plain", FORWARD, BACKWARD, *reductions)
    assert whole <= 0.26
