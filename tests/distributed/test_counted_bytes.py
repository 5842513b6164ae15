"""Promise 2: counted bytes equal the closed forms, for communication exactly and for memory within a percent."""

import pytest

from tests.distributed.pool import sampled
from tests.distributed.training import as_predicted, config, make_model, train, train_each

PSI = sum(p.numel() for p in make_model().parameters())


def report(rank, world, settings):
    return train(rank, world, settings, 2)[1]


def elements(communication, prefix):
    return sum(entry["measured"]["elements"] for kind, entry in communication.items() if kind.startswith(prefix))


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_two_psi(ranks, stage, world):
    (entry, *_) = ranks.run(report, config(stage=stage, precision="bf16", bucket=1500), world_size=world)
    communication = entry["communication"]
    sent = elements(communication, "gradients.") + elements(communication, "parameters.")
    assert sent * world == pytest.approx(2 * PSI * (world - 1), abs=1e-6)
    as_predicted(communication)


def test_one_rank_counts_calls_that_send_nothing(ranks):
    cases = [
        config(stage=stage, bucket=1500, reduce=reduce, precision="bf16")
        for stage in (0, 1, 2, 3)
        for reduce in ("exact", "native")
    ]
    (found,) = ranks.run(train_each, cases, 2, world_size=1)
    for communication in (report["communication"] for _, report in found):
        assert elements(communication, "") == 0
        assert any(counts["measured"]["calls"] for kind, counts in communication.items() if "gradients." in kind)
        for kind, counts in communication.items():
            assert counts["measured"] == counts["predicted"], kind


@pytest.mark.parametrize("reduce", ["exact", "native"])
def test_stage_1_by_all_reduce_costs_three_psi(ranks, reduce):
    settings = config(stage=1, precision="bf16", bucket=1500, reduce=reduce, zero={"reduce_scatter": False})
    (entry, *_) = ranks.run(report, settings, world_size=2)
    communication = entry["communication"]
    assert elements(communication, "gradients.") * 2 == pytest.approx(2 * PSI)
    assert elements(communication, "parameters.") * 2 == pytest.approx(PSI)
    as_predicted(communication)


def test_accumulation(ranks):
    """Stage 1 reduces once however many micro-batches there are; stage 2 each time."""
    for stage, times in ((0, 1), (1, 1), (2, 4)):
        settings = config(stage=stage, precision="bf16", bucket=1500, gradient_accumulation_steps=4)
        (entry, *_) = ranks.run(report, settings, world_size=2)
        counts = entry["communication"]["gradients.reduce_scatter"]
        assert counts["measured"] == pytest.approx(counts["predicted"])
        assert counts["measured"]["elements"] * 2 == pytest.approx(times * PSI)
        assert elements(entry["communication"], "parameters.") * 2 == pytest.approx(PSI if stage else 0)


def test_wire_dtype(ranks):
    """A wider wire doubles the bytes and leaves the elements."""
    narrow, wide = (
        ranks.run(report, config(stage=2, precision="bf16", **wire), world_size=2)[0]["communication"]
        for wire in ({}, {"communication_data_type": "fp32"})
    )
    kind = "gradients.reduce_scatter"
    assert wide[kind]["measured"]["elements"] == narrow[kind]["measured"]["elements"]
    assert wide[kind]["measured"]["bytes"] == 2 * narrow[kind]["measured"]["bytes"]
    assert wide[kind]["measured"] == pytest.approx(wide[kind]["predicted"])


@pytest.mark.parametrize(("stage", "overlap", "precision", "accumulation"), sampled(
    [(0, False, "fp32", 3), (0, True, "bf16", 1), (1, False, "bf16", 3), (1, True, "fp32", 3), (1, True, "bf16", 1),
     (2, True, "bf16", 3), (2, False, "fp32", 1)],
    (0, 1, 2), (False, True), ("fp32", "bf16"), (1, 3),
))  # fmt: skip
def test_memory(ranks, stage, overlap, precision, accumulation):
    settings = config(stage=stage, precision=precision, overlap=overlap, gradient_accumulation_steps=accumulation)
    for entry in ranks.run(report, settings, world_size=2):
        assert entry["memory"].pop("activations")["predicted"] is None  # a residual: measured, not predicted
        for category, counts in entry["memory"].items():
            assert counts["measured"] == pytest.approx(counts["predicted"], rel=0.01), category
    memory = {category: counts["measured"] for category, counts in entry["memory"].items()}
    width, share = (2 if precision == "bf16" else 4), (1 if stage == 0 else 2)
    assert memory["parameters"] == width * PSI
    assert memory["masters"] == (4 * PSI // share if precision == "bf16" else 0)
    assert memory["moments"] == pytest.approx(8 * PSI / share, rel=0.01)


def test_the_papers_formula(ranks):
    """With 2-byte gradients kept until the step, stage 2 holds 2Ψ + (2 + K)Ψ/W, K = 12."""
    settings = config(stage=2, precision="bf16", data_types={"grad_accum_dtype": "bf16"})
    for world in (2, 4):
        (entry, *_) = ranks.run(report, settings, world_size=world)
        held = sum(entry["memory"][c]["measured"] for c in ("parameters", "gradients", "masters", "moments"))
        assert held == pytest.approx(2 * PSI + 14 * PSI / world, rel=0.01)


def test_model_is_not_a_toy_for_padding():
    """The forms above are only interesting because padding exists: nothing here divides evenly."""
    assert PSI % 64 and PSI % 3
