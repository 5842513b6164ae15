"""``docs/sources.md``: every pointer resolves, and every number of its errata that can be computed is computed."""

import dataclasses
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from deepzero.comm.quantization import Format
from deepzero.comm.reduce_scatter import ALL_REDUCE
from deepzero.comm.ring import Phase, elements_sent, simulate
from deepzero.comm.topology import Nodes
from deepzero.config.deepspeed_json import load_engine_config
from deepzero.config.engine import PrecisionConfig
from deepzero.config.zero import ZeroConfig
from deepzero.layout import plan_layout
from deepzero.planning.clusters import AZURE_NC24R, DGX_2H, H100_HDR, RANKS
from deepzero.runtime.consistency import AGREEMENT
from deepzero.runtime.loss_scaler import build_loss_scaler
from deepzero.runtime.memory_model import Elements, StateSizes, predicted_memory, predicted_traffic, reduction_traffic
from deepzero.runtime.zero.fetch_plan import ModuleUse, compile_plan
from deepzero.runtime.zero.parameter_all_gather import FORWARD
from deepzero.runtime.zero.stage_1_and_2 import ALL_GATHER, get_data_parallel_partitions
from tests.unit import test_docs
from tests.unit.test_docs import ROOT, names_in, text

PAGE = ROOT / "docs" / "sources.md"
GB = 1e9

# ---- the page --------------------------------------------------------------------------------------------------------


def table(pattern):
    """The cells of the rows whose first cell matches ``pattern``."""
    return [row for row in test_docs.rows(PAGE) if re.fullmatch(pattern, row[0])]


ROWS = table(r"S[1-5]-\d\d\d?")
ERRATA = table(r"E-\d\d")


def resolve(cell):
    """Raise where a pointer or link of a cell leads nowhere. Returns how many there are, with commands."""
    return len(re.findall("`python ", cell)) + test_docs.resolve(cell, PAGE)  # which test_commands.py runs or reads


@pytest.mark.parametrize("document", ["S1", "S2", "S3", "S4", "S5"])
def test_every_row_resolves(document):
    rows = [row for row in ROWS if row[0].startswith(document)]
    assert [int(row[0].partition("-")[2]) for row in rows] == list(range(1, len(rows) + 1))
    for number, what, where, chapter, shown, status in rows:
        assert 8 <= len(what) <= 120, f"{number}: {what}"
        assert re.fullmatch(r"full|(partly|not): .+", status), f"{number}: {status}"
        assert re.search(r"\]\([\w/]*\.md|\]\(#", chapter), number
        counts = [resolve(cell) for cell in (what, where, chapter, shown)]
        assert status != "full" or all(counts[1:]), number


def test_there_are_enough_rows():
    assert len(ROWS) >= 150
    assert sum(row[-1] == "full" for row in ROWS) >= 140


def test_errata():
    assert [row[0] for row in ERRATA] == [f"E-{number:02}" for number in range(1, len(ERRATA) + 1)]
    for number, source, says, holds, shown in ERRATA:
        assert set(re.findall(r"\[([^\]]+)\]", source)) <= BIBLIOGRAPHY and source[0] == "[", number
        assert says and holds and resolve(shown) + len(re.findall(r"\bDS `", shown)), number
        resolve(holds)


def test_rows_name_errata_that_exist():
    assert {name for row in ROWS for name in re.findall(r"E-\d\d", " ".join(row))} <= {row[0] for row in ERRATA}


def test_every_test_of_an_erratum_is_on_the_page():
    mine = {name for name in names_in(Path(__file__)) if re.fullmatch(r"test_\w+", name)}
    about_the_page = r"test_(every|there_are|errata$|rows_|bibliography|docstrings)"
    shown = set(re.findall(r"test_sources\.py:(test_\w+)`", text(PAGE)))
    assert {name for name in mine if not re.match(about_the_page, name)} <= shown <= mine


# ---- the bibliography ------------------------------------------------------------------------------------------------

BIBLIOGRAPHY = {row[0].strip("[]") for row in table(r"\[.+\]")}


def source_paragraphs():
    """What follows ``Source:`` or ``Sources:`` in a docstring of the package, to the end of its paragraph."""
    for file in sorted((ROOT / "deepzero").rglob("*.py")):
        for found in re.finditer(r"\bSources?: (.*?)(?:\n\s*\n|\"\"\")", file.read_text(encoding="utf-8"), re.S):
            yield str(file.relative_to(ROOT)), " ".join(found[1].split())


def test_bibliography_has_what_is_needed():
    assert {"ZeRO", "ZeRO-Offload", "ZeRO-Infinity", "ZeRO++", "mixed precision", "MiCS", "ring", "Adam", "AdamW",
            "DeepSpeed", "stage-1 notes", "stage-3 guide", "stage-2 notes", "stage-1 post",
            "single number"} <= BIBLIOGRAPHY  # fmt: skip
    for number in ("1910.02054", "2101.06840", "2104.07857", "2306.10209", "1710.03740", "2205.00119"):
        assert f"https://arxiv.org/abs/{number}" in text(PAGE)


def test_docstrings_use_names_of_the_bibliography():
    paragraphs = list(source_paragraphs())
    assert len(paragraphs) > 30
    for file, paragraph in paragraphs:
        used = {name for name in re.findall(r"\[([^\]]+)\]", paragraph) if not name.startswith("Note:")}
        assert used and used <= BIBLIOGRAPHY, f"{file}: {used - BIBLIOGRAPHY} in {paragraph}"


# ---- errata: the model states ----------------------------------------------------------------------------------------


def sizes(stage, **changes):
    """The paper's setting: 2-byte parameters and gradients, fp32 masters and moments, one micro-batch."""
    # Whole gradients are there once, as the paper counts them: stages 0 and 1 have no reduced share beside them.
    given = StateSizes(
        compute=2, accumulation=2 if stage >= 2 else 0, moments=8, wire=2, stage=stage, overlap=False, micro_batches=1,
        whole_reduce=stage == 0, exact=True,
    )  # fmt: skip
    return dataclasses.replace(given, **changes)


def held(stage, world, numel=1, **changes):
    return sum(predicted_memory(Elements(numel), world, sizes(stage, **changes)).values())


def test_four_weights_are_64_bytes_and_not_48():
    """The count of 48 leaves the fp32 masters out, which the same source has in its 16 bytes a weight."""
    states = predicted_memory(Elements(4), 4, sizes(0))
    assert states == {"parameters": 8, "gradients": 8, "masters": 16, "moments": 32}
    assert sum(states.values()) == 4 * 16 == 64
    assert 64 - states["masters"] == 48
    assert 4 * 64 == 256 and 3 * 64 == 192  # of them, repeated


def test_stage_1_of_four_weights_is_28_bytes_and_not_24():
    states = predicted_memory(Elements(4), 4, sizes(1))
    assert sum(states.values()) == 28 and sum(states.values()) - states["masters"] == 24
    assert 28 / 64 == 0.4375  # not half; the optimizer states alone fall from 48 to 12, not from 32 to 8
    assert (states["masters"] + states["moments"], 48 // 4) == (12, 12)
    assert [held(stage, 4, 4) for stage in (0, 1, 2, 3)] == [64, 28, 22, 16]


def test_25_to_50_percent_is_fp32_and_4_times_is_mixed_precision():
    fp32 = {"compute": 4, "wire": 4}
    saved = {name: [1 - held(1, world, 1 << 20, **changes) / held(0, world, 1 << 20, **changes) for world in
             (2, 4, 1 << 20)] for name, changes in (("fp32", fp32), ("mixed", {}))}  # fmt: skip
    assert saved["fp32"] == pytest.approx([0.25, 0.375, 0.5], abs=1e-5)
    assert saved["mixed"] == pytest.approx([0.375, 0.5625, 0.75], abs=1e-5)  # 0.75 saved is a quarter left: 4 times


def test_160_gigabytes_count_the_gradients_too():
    fp32 = predicted_memory(Elements(10_000_000_000), 1, sizes(0, compute=4, wire=4))
    assert sum(fp32.values()) == 160 * GB
    assert fp32["parameters"] + fp32["masters"] + fp32["moments"] == 120 * GB


def test_4_and_8_times_are_limits():
    """What is left of 16 bytes on few ranks is more than a quarter, or an eighth."""
    factor = lambda stage, world: 16 * 64 / held(stage, world, 64)
    assert [round(factor(1, world), 2) for world in (4, 8, 64)] == [2.29, 2.91, 3.82]
    assert [round(factor(2, world), 2) for world in (4, 8, 64)] == [2.91, 4.27, 7.21]
    assert [factor(3, world) for world in (4, 8, 64)] == [4, 8, 64]
    assert factor(1, 1 << 12) == pytest.approx(4, rel=2e-3) and factor(2, 1 << 12) == pytest.approx(8, rel=2e-3)


def test_of_four_values_stages_save_2_and_4_times():
    fp32, most = {"compute": 4, "wire": 4}, 1 << 20
    share = {stage: sizes(stage, **fp32, accumulation=4 if stage == 2 else 0) for stage in (0, 1, 2)}
    left = [sum(predicted_memory(Elements(most), most, given).values()) / most for given in share.values()]
    assert [round(left[0] / each) for each in left] == [1, 2, 4]


def test_read_without_its_fraction_the_formula_grows():
    numel, world, k = 7.5e9, 64, 12
    assert 4 * numel + k * numel / world == held(1, world, 7_500_000_000) == pytest.approx(31.4 * GB, rel=2e-3)
    assert 4 * numel + world * k * numel > 180 * 31.4 * GB
    assert held(2, 64, 7_500_000_000) == pytest.approx(16.6 * GB, rel=3e-3)
    assert held(3, 64, 7_500_000_000) == pytest.approx(1.88 * GB, rel=3e-3)


def test_gradients_in_fp32_make_18_bytes():
    """A gradient in four bytes, as one sentence has it, does not go with 16 bytes; it is what is held by default."""
    assert held(2, 1, accumulation=4) == 2 + 4 + 4 + 8 == 18
    assert held(2, 1) == 16


def test_activations_and_the_gathered_bucket_do_not_shrink():
    """With ever more ranks the states of stage 3 go to nothing; a bucket, gathered whole, stays what it is."""
    few, many = (plan_layout([1 << 20] * 4, world, bucket_limit=1 << 20) for world in (2, 1024))
    assert few.shard_numel == 512 * many.shard_numel
    assert few.largest_bucket == many.largest_bucket == 1 << 20


# ---- errata: layouts -------------------------------------------------------------------------------------------------


def test_the_listing_of_825_does_not_add_up():
    weights, listed = {"W1": 1000, "b1": 100, "W2": 2000, "b2": 200}, [250, 250, 250 + 100 + 150, 250]
    assert sum(weights.values()) / 4 == 825 and set(listed) != {825} and sum(listed) == 1250
    layout = plan_layout(list(weights.values()), 4, bucket_limit=1 << 20, align=1)
    cut = [[(list(weights)[f.slot.index], f.start, f.start + f.numel) for f in layout.fragments(r)] for r in range(4)]
    assert cut == [
        [("W1", 0, 825)],
        [("W1", 825, 1000), ("b1", 0, 100), ("W2", 0, 550)],
        [("W2", 550, 1375)],
        [("W2", 1375, 2000), ("b2", 0, 200)],
    ]
    assert all(sum(stop - start for _, start, stop in part) == 825 for part in cut)


def test_a_flat_buffer_has_no_leftover_elements():
    """100 elements on 8 ranks: DeepSpeed pads to a multiple of 2 W before it cuts, and so does the layout here."""
    assert -(-100 // 16) * 16 == 112 and 112 % 8 == 0
    layout = plan_layout([100], 8, bucket_limit=100, align=2)
    (bucket,) = layout.buckets
    parts = get_data_parallel_partitions(torch.arange(layout.padded_numel), bucket)
    assert [len(part) for part in parts] == [14] * 8 and layout.padded_numel == 112
    plain = [100 // 8 + (rank < 100 % 8) for rank in range(8)]
    assert plain == [13] * 4 + [12] * 4 and sum(plain) == 100  # what the function would do with what is never given it


def test_an_output_of_ds_numel_elements_is_too_short():
    """W equal parts of a parameter of 10 elements on 4 ranks take 12."""
    layout = plan_layout([10], 4, bucket_limit=10, align=1)
    assert (layout.numel, layout.shard_numel, layout.padded_numel) == (10, 3, 12)


def test_6_gigabytes_in_buckets_of_2_may_need_more_than_3():
    """Ten parameters of 0.6 GB, never cut: three to a bucket, so four buckets."""
    assert len(plan_layout([600] * 10, 4, bucket_limit=2000, align=1).buckets) == 4
    assert len(plan_layout([500] * 12, 4, bucket_limit=2000, align=1).buckets) == 3


def test_own_parameters_and_not_those_below():
    """``parameters()`` of the root is the whole model; a fetch of it before the root runs would gather everything."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    assert sum(p.numel() for p in model.parameters()) == 144
    assert list(model.parameters(recurse=False)) == []


# ---- errata: volumes -------------------------------------------------------------------------------------------------

PSI = 1 << 20


def traffic(stage, world=4, per_node=None, **changes):
    """Elements of one step by kind, in units of Ψ (W-1)/W."""
    layout = plan_layout([PSI // 4] * 4, world, bucket_limit=PSI // 4)
    forms = predicted_traffic([layout], Nodes(world, per_node or world), sizes(stage, **changes))
    return {kind: form.elements / (PSI * (world - 1) / world) for kind, form in forms.items() if kind != AGREEMENT}


def test_stage_2_sends_what_plain_data_parallelism_sends():
    assert [sum(traffic(stage).values()) for stage in (0, 1, 2)] == [2, 2, 2]


def test_accumulation_amortises_in_stage_1_alone():
    assert {stage: sum(traffic(stage, micro_batches=4).values()) for stage in (0, 1, 2)} == {0: 2, 1: 2, 2: 4 + 1}
    assert sizes(3, micro_batches=4).reductions == 4  # and 2 x 4 gathers: each micro-batch, as without accumulation


def test_one_and_a_half_times_twice():
    """Stage 1 by all-reduce and stage 3 both move three halves where two would do; only the first gets nothing."""
    by_all_reduce = traffic(1, whole_reduce=True, exact=False)
    assert by_all_reduce == {ALL_REDUCE: 2, ALL_GATHER: 1}
    assert sum(by_all_reduce.values()) / sum(traffic(1).values()) == 1.5
    (bucket,) = plan_layout([PSI], 4, PSI).buckets
    assert bucket.shard_numel / bucket.numel == 1 / 4  # what a rank uses of the averages that it receives


def test_a_root_carries_what_a_ring_shares_out():
    world, numel = 8, 800
    on_the_roots_link = 2 * (world - 1) * numel
    assert [elements_sent(numel, world, rank) for rank in range(world)] == [1400] * world
    assert on_the_roots_link == 11_200 == 8 * 1400


def test_a_rank_of_the_ring_passes_on_what_it_received():
    """N-1 different shards, each once; its own goes out once only."""
    hops = simulate([torch.ones(4) for _ in range(4)])
    assert [hop.sent_chunk for hop in hops if hop.phase is Phase.ALL_GATHER and hop.rank == 0] == [1, 0, 3]
    assert 4 / 4 * (4 - 1) == 3 == elements_sent(4, 4, 0) / 2  # the volume is right: M (N-1)/N


def test_36_8_gigabytes_are_36_75_of_each_micro_batch():
    assert elements_sent(1_000_000_000, 8, 0) / 2 * 2 == 1.75 * GB
    gathered = elements_sent(7_000_000_000, 8, 0) / 2 * 2
    assert gathered / 32 == pytest.approx(383e6, rel=1e-3)
    assert 3 * gathered == 36.75 * GB and 3 * gathered / 32 == pytest.approx(1.15 * GB, rel=2e-3)


def test_the_step_needs_a_message_and_persistent_parameters_a_gather():
    layout, small = plan_layout([PSI], 4, PSI), plan_layout([64], 4, 64)
    forms = predicted_traffic([layout, small], Nodes(4, 4), sizes(3), persistent=[small])
    assert forms[AGREEMENT].bytes > 0
    assert forms[ALL_GATHER].elements == 64 * 3 / 4


def test_zeropp_is_4_times_less_between_nodes_alone():
    """3 M becomes M/2 + 0 + M/4 of what leaves a node. Scales come on top, and inside a node more may be sent."""
    forward, backward, gradients = 0.5, 0.0, 0.25
    assert 3 / (forward + backward + gradients) == 4
    nodes = Nodes(128, 8)
    layout = plan_layout([PSI], nodes.world_size, bucket_limit=PSI)
    quantized = reduction_traffic([layout], nodes, Format(4, 2048), 2, lambda group, index: False)
    exact = reduction_traffic([layout], nodes, Format(4, 2048), 2, lambda group, index: True)
    inside, between = (quantized[f"gradients.reduce_{where}"] for where in ("inside_node", "between_nodes"))
    (plain,) = exact.values()
    assert between.between_node_bytes < plain.between_node_bytes / 4
    assert inside.bytes > 4 * (plain.bytes - plain.between_node_bytes)
    assert 0.5 < Format(8, 2048).message_bytes(PSI) / (2 * PSI) < 0.502  # qwZ's half, with its scales


def test_hpz_keeps_optimizer_states_over_all_ranks():
    """Two nodes of 8: hybrid sharding in the sense of FSDP holds 16/8 bytes; hpZ 16/16, and a copy of 2/8."""
    assert held(3, 8, 16) / 16 == 2
    assert held(3, 16, 16) / 16 + 2 / 8 == 1.25


# ---- errata: bandwidths, settings ------------------------------------------------------------------------------------


def test_nvlink_is_18_times_one_port_and_takes_31_milliseconds():
    port = H100_HDR.node_bandwidth / H100_HDR.ranks_per_node
    assert port == 200e9 / 8 == 25 * GB
    assert 2 * H100_HDR.inside_bandwidth == 900 * GB
    assert (900 * GB / port, H100_HDR.inside_bandwidth / port) == (36, 18)
    seconds = [2 * 7e9 / bandwidth for bandwidth in (900 * GB, H100_HDR.inside_bandwidth)]
    assert [round(1000 * each, 1) for each in seconds] == [15.6, 31.1]


def test_the_posts_clusters():
    assert (RANKS["azure_nc24r"], RANKS["dgx_2h"]) == (8 * 4, 8 * 16) == (32, 128)
    assert (AZURE_NC24R.node_bandwidth, DGX_2H.node_bandwidth) == (40e9 / 8, 800e9 / 8)
    assert (AZURE_NC24R.memory_bytes, DGX_2H.memory_bytes) == (16 * GB, 32 * GB)


def test_settings_count_elements_and_not_bytes():
    zero = ZeroConfig()
    for width, prefetch, persistent, bucket in ((2, 100e6, 200e3, 1 * GB), (4, 200e6, 400e3, 2 * GB)):
        assert zero.stage3_prefetch_bucket_size * width == prefetch  # 5e7
        assert zero.stage3_param_persistence_threshold * width == persistent  # 1e5
        assert zero.reduce_bucket_size * width == bucket  # 5e8


def test_defaults_are_numbers():
    zero = ZeroConfig()
    found = (zero.stage3_prefetch_bucket_size, zero.stage3_param_persistence_threshold, zero.stage3_max_live_parameters)
    assert found == (50_000_000, 100_000, 1_000_000_000)


def test_json_has_no_comments(tmp_path, monkeypatch):
    """DeepSpeed reads its config as Hjson, which has them; a reader of JSON refuses the guide's block as it stands."""
    monkeypatch.setitem(sys.modules, "hjson", None)
    plain = {"train_batch_size": 4, "zero_optimization": {"stage": 3}}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(plain).replace('"zero', '// stages\n"zero'))
    with pytest.raises(ValueError, match="JSON"):
        load_engine_config(str(path))


def test_bf16_has_no_loss_scale():
    assert build_loss_scaler(PrecisionConfig("bf16")).scale == 1.0
    assert build_loss_scaler(PrecisionConfig("fp16")).scale == 2.0**16


# ---- errata: arithmetic ----------------------------------------------------------------------------------------------


def test_adam_without_its_bias_correction_takes_another_step():
    """A weight of 0.347 with g = 0.021: the formula of the sources moves it by 3.16 lr at first, Adam by lr."""
    weight, grad, lr = 0.347, 0.021, 1e-3
    param = torch.tensor([weight], dtype=torch.float64, requires_grad=True)
    param.grad = torch.tensor([grad], dtype=torch.float64)
    torch.optim.Adam([param], lr=lr).step()
    assert weight - param.item() == pytest.approx(lr, rel=1e-5)
    m, v = 0.1 * grad, 0.001 * grad**2
    assert lr * m / (v**0.5 + 1e-8) == pytest.approx(3.16 * lr, rel=1e-3)


def test_whether_bf16_loses_an_update_depends_on_its_size():
    """Near 0.347 neighbours are 2^-9 apart: what is below half of that is lost, and lr = 1e-3 is not."""
    weight = torch.tensor(0.347, dtype=torch.bfloat16)
    assert weight.item() == 0.34765625
    assert (weight - 3e-4).item() == weight.item()
    assert weight.item() - (weight - 1e-3).item() == 2**-9
    assert torch.tensor(0.347) - 3e-4 != torch.tensor(0.347)


def test_a_sum_is_not_an_average():
    """Four equal ranks: the step would be four times too long, where the optimizer is not Adam."""
    grads = [torch.full((4,), 2.0) for _ in range(4)]
    assert torch.stack(grads).sum(0).tolist() == [8.0] * 4 and torch.stack(grads).mean(0).tolist() == [2.0] * 4


def test_a_gradient_that_is_assigned_forgets_the_micro_batch_before():
    param = nn.Parameter(torch.zeros(2))
    for value in (1.0, 2.0):
        (param * value).sum().backward()
    assert param.grad.tolist() == [3.0, 3.0]


# ---- errata: stage 3 in time -----------------------------------------------------------------------------------------


def test_more_than_one_layer_is_there_at_a_time():
    """Three layers of 8 elements: with a prefetch two are gathered, beside the rank's share of all."""
    uses, most = [ModuleUse((layer,), backward=False, where="") for layer in range(3)], {}
    for name, prefetch in (("without", 0), ("with", 8)):
        live, most[name] = set(), 0
        for use in compile_plan(uses, dict.fromkeys(range(3), 8), prefetch, 0, max_live_numel=24):
            live = (live - set(use.release)) | set(use.fetch) | {key for key, _ in use.prefetch}
            most[name] = max(most[name], 8 * len(live))
    assert most == {"without": 8, "with": 16}


def test_gathers_overlap_by_prefetching():
    """``overlap_comm`` is no argument of the plan that says which gather travels behind which module."""
    assert [*compile_plan.__annotations__][2:-1] == ["prefetch_numel", "reuse_numel", "max_live_numel"]
    assert "all_gather" in FORWARD
