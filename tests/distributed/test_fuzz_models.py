"""Random models, each trained in two ways that must agree bit by bit. See ``random_models.py``.

A failure names its kind and its seed. To run one again, alone::

    DEEPZERO_FUZZ=stage3:17 pytest tests/distributed/test_fuzz_models.py -k again
"""

import os

import pytest

from tests.distributed.random_models import lower_settings, plain_settings, recipe_of, third_settings, trained

IN_ONE_CALL = 20


def stage3(recipe, rank):
    """Stage 3 in some way against stage 2."""
    found = trained(recipe, third_settings(recipe), rank, init=recipe.choose.random() < 0.5)
    return [[trained(recipe, plain_settings(recipe, 2), rank), found]]


def stages(recipe, rank):
    """Stages 0, 1 and 2; where a step adds up several gradients of a weight, in two families (``docs/step.md``)."""
    recipe.optimizer = recipe.choose.choice([recipe.optimizer, "CPUAdam"])
    again = any(part.how == "reentrant" for part in recipe.parts)
    lower = [plain_settings(recipe, 0), lower_settings(recipe, 0), lower_settings(recipe, 1)]
    if again:
        lower[2]["zero_optimization"]["overlap_comm"] = False
    upper = [plain_settings(recipe, 2), lower_settings(recipe, 2)]
    families = [lower, upper] if again or recipe.accumulation > 1 else [[*lower, *upper]]
    return [[trained(recipe, settings, rank) for settings in family] for family in families]


def offload(recipe, rank):
    """Offloaded stage 3 against stage 3."""
    found = trained(recipe, third_settings(recipe, offload=True), rank, init=recipe.choose.random() < 0.5)
    return [[trained(recipe, plain_settings(recipe, 3), rank), found]]


def hpz(recipe, rank):
    """Secondary partitions, on two pretended nodes, against stage 3."""
    kind = recipe.choose.choice(["zero_hpz_partition_size", "mics_shard_size"])
    # Of what MiCS publishes every step, nothing is in host memory.
    settings = third_settings(recipe, offload=None if kind.startswith("zero") else False, **{kind: 2})
    settings["comm"]["ranks_per_node"] = 2
    found = trained(recipe, settings, rank, init=recipe.choose.random() < 0.5)
    return [[trained(recipe, plain_settings(recipe, 3), rank), found]]


KINDS = {"stage3": stage3, "stages": stages, "offload": offload, "hpz": hpz}


def compared(rank, world, kind, seeds):
    different = []
    for seed in seeds:
        recipe = recipe_of(seed)
        try:
            families = KINDS[kind](recipe, rank)
        except Exception as error:
            raise RuntimeError(f"DEEPZERO_FUZZ={kind}:{seed} raises {error!r}: {recipe}") from error
        pairs = ((first, other) for first, *others in families for other in others if other != first)
        different += [f"DEEPZERO_FUZZ={kind}:{seed} {other} is not {first}: {recipe}" for first, other in pairs]
    return different


def fuzz(ranks, kind, seeds, world=2):
    different = []
    for first in range(0, len(seeds), IN_ONE_CALL):
        some = list(seeds[first : first + IN_ONE_CALL])
        for per_rank in ranks.run(compared, kind, some, world_size=world, timeout=400):
            different += per_rank
    assert not different, "\n".join(different)


@pytest.mark.parametrize(
    ("kind", "seeds"), [("stage3", (8, 13, 19, 32)), ("stages", (13, 32)), ("offload", (8, 15, 25, 28))]
)
def test_some_random_models(ranks, kind, seeds):
    """Small ones that between them have everything that a recipe may say."""
    fuzz(ranks, kind, seeds)


@pytest.mark.slow
def test_some_random_models_on_two_nodes(ranks):
    fuzz(ranks, "hpz", (8, 32), world=4)


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@pytest.mark.parametrize("hundred", range(10))
def test_a_thousand_random_models(ranks, hundred):
    fuzz(ranks, "stage3", range(100 * hundred, 100 * hundred + 100), world={4: 1, 8: 3}.get(hundred, 2))


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("kind", "count", "world"), [("stages", 200, 2), ("offload", 200, 2), ("hpz", 100, 4)])
def test_more_random_models(ranks, kind, count, world):
    fuzz(ranks, kind, range(count), world=world)


@pytest.mark.skipif("DEEPZERO_FUZZ" not in os.environ, reason="runs one model again: DEEPZERO_FUZZ=kind:seed")
def test_one_again(ranks):
    kind, _, seed = os.environ["DEEPZERO_FUZZ"].partition(":")
    fuzz(ranks, kind, range(int(seed), int(seed) + 1), world=4 if kind == "hpz" else 2)
