"""Whole parameters for one rank each: the layout, the declaration and its trial, Muon's groups and settings."""

import random

import pytest
import torch
from torch import nn

from deepzero.config.deepspeed_json import load_engine_config
from deepzero.config.engine import OptimizerConfig
from deepzero.config.run import ModelConfig
from deepzero.config.strict import ConfigError
from deepzero.layout import ALIGN, round_up
from deepzero.models.gpt import GPT
from deepzero.ops import Muon, muon_groups
from deepzero.planning.dry_run import ClusterShape, TrainStep, dry_run
from deepzero.runtime.elementwise_check import check_elementwise
from deepzero.runtime.muon import log_choice
from deepzero.runtime.optimizer_state import allocate_state, moment_bytes
from deepzero.runtime.optimizers import build_optimizer
from deepzero.runtime.per_tensor import plan_whole_parameters
from tests.unit.test_optimizer_trial import GlobalClip, LayerNorm
from tests.unit.test_optimizer_trial import model_weights as weights

optim = torch.optim


class TestLayout:
    @pytest.mark.parametrize("seed", range(20))
    def test_no_part_cuts_a_parameter(self, seed):
        rng = random.Random(seed)
        sizes = [rng.choice([0, 1, 64, 100, 888, 3000]) for _ in range(rng.randint(1, 40))]
        world, limit = rng.randint(1, 9), rng.choice([1, 2000, 10**6])
        layout = plan_whole_parameters(sizes, world, limit)
        assert [slot.numel for slot in layout.slots] == sizes
        assert [slot.index for slot in layout.slots] == list(range(len(sizes)))
        owned = [fragment for rank in range(world) for fragment in layout.fragments(rank)]
        assert sorted(f.slot.index for f in owned) == [i for i, size in enumerate(sizes) if size], "each has one owner"
        assert all((f.start, f.numel) == (0, f.slot.numel) and f.shard_start % ALIGN == 0 for f in owned)
        for rank in range(world):
            starts = [f.shard_start for f in layout.fragments(rank)]
            assert starts == sorted(starts)
        end = 0
        for bucket in layout.buckets:
            assert bucket.offset == end and bucket.numel % (world * ALIGN) == 0
            assert [s.offset for s in bucket.slots] == sorted(s.offset for s in bucket.slots)
            assert bucket.true_numel() + sum(b - a for a, b in bucket.gaps()) == bucket.numel
            end += bucket.numel
            rows = [s for s in bucket.slots if s.numel == bucket.slots[0].numel]
            assert bucket.numel <= limit or len(bucket.slots) <= world or bucket is layout.buckets[-1], rows
        assert sorted(f.slot.index for f in layout.whole_fragments()) == sorted(f.slot.index for f in owned)

    @pytest.mark.parametrize("world", [1, 2, 4, 8])
    def test_where_ranks_divide_the_matrices_nothing_is_padded(self, world):
        layout = plan_whole_parameters([64 * 64, 256 * 64, 64 * 64] * 8, world, 10**9)
        assert layout.padded_numel == layout.numel

    def test_the_rest_is_dealt_out(self):
        """24 layers on 64 ranks: four sizes, none of which has a row, share one bucket."""
        unit = 1 << 12
        layout = plan_whole_parameters([3 * unit, unit, 4 * unit, 4 * unit] * 24, 64, 10**9)
        assert len(layout.buckets) == 1
        assert layout.padded_numel == 64 * 6 * unit, "of 288 units six for each rank, not the twelve of four rows"

    def test_ten_thousand_ranks(self):
        layout = plan_whole_parameters([100 * 100] * 25_000, 10_000, 10**9)
        assert layout.shard_numel == 3 * round_up(100 * 100, ALIGN)


class TestTrial:
    @pytest.mark.parametrize("make", [
        lambda: optim.Adafactor([{"params": weights(), "per_tensor": True}]),
        lambda: optim.Muon([{"params": weights()[:1], "per_tensor": True}]),
        lambda: optim.AdamW([{"params": weights(), "per_tensor": True}]),
        lambda: Muon([{"params": weights()[:1], "use_muon": True}, {"params": weights(), "use_muon": False}]),
    ])  # fmt: skip
    def test_declared_optimizers_pass(self, make):
        for in_turn in (False, True):
            check_elementwise(make(), in_turn)

    def test_one_that_mixes_tensors_is_refused(self):
        message = r"declared per tensor.*GlobalClip gave other results for tensors than for several at once"
        with pytest.raises(ConfigError, match=message):
            check_elementwise(GlobalClip([{"params": weights(), "per_tensor": True}]))

    def test_a_class_may_declare_itself_and_a_group_wins(self):
        class Declared(LayerNorm):
            per_tensor = True

        check_elementwise(Declared(weights()))
        with pytest.raises(ConfigError, match=r"has to say so: 'per_tensor': True in its param groups"):
            check_elementwise(Declared([{"params": weights(), "per_tensor": False}]))

    def test_muon_without_a_word_is_told_of_the_declaration(self):
        with pytest.raises(ConfigError, match=r"Muon failed in a trial on such slices.*'per_tensor': True"):
            check_elementwise(optim.Muon(weights()[:1]))


class TestGroups:
    @pytest.mark.parametrize("tied", [True, False])
    def test_of_a_language_model(self, tied):
        shape = {"n_layer": 2, "n_embd": 32, "n_head": 2, "block_size": 32, "vocab_size": 32, "position": "learned"}
        model = GPT(ModelConfig(**shape, tied=tied, bias=True))
        matrices, rest = muon_groups(model)
        names = {param: name for name, param in model.named_parameters()}
        found = sorted(names[p] for p in matrices["params"])
        kinds = ("attn.proj", "attn.qkv", "mlp.down", "mlp.up")
        assert found == [f"blocks.{layer}.{kind}.weight" for layer in (0, 1) for kind in kinds]
        assert {names[p] for p in rest["params"]} == {*names.values()} - {*found}

    def test_of_hugging_face(self):
        transformers = pytest.importorskip("transformers")
        config = transformers.GPTNeoXConfig(
            vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
        )
        model = transformers.GPTNeoXForCausalLM(config)
        matrices, rest = muon_groups(model)
        assert len(matrices["params"]) == 4
        assert any(p is model.get_output_embeddings().weight for p in rest["params"])

    @pytest.mark.parametrize("word", [None, False, True])
    def test_a_head_of_another_name_is_suspected(self, caplog, word):
        model = nn.ModuleDict({"embed": nn.Embedding(9, 4), "hidden": nn.Linear(4, 4), "out": nn.Linear(4, 9)})
        if word is not None:
            model["out"].weight.use_muon = word
        with caplog.at_level("WARNING", "deepzero"):
            matrices = (groups := muon_groups(model))[0]["params"]
            log_choice(model, groups)
        assert len(matrices) == (1 if word is False else 2)
        assert ("'out.weight', of the shape of an embedding" in caplog.text) is (word is None)

    def test_the_users_word_is_the_last(self):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 2))
        model[0].weight.use_muon = False
        mine = {"params": [model[0].weight, model[1].weight], "lr": 0.5}
        groups = muon_groups(model, [mine, {"params": model[2].parameters(), "use_muon": False}])
        found = [(g["use_muon"], len(g["params"]), g.get("lr")) for g in groups]
        assert found == [(True, 1, 0.5), (False, 1, 0.5), (False, 2, None)]

    def test_matrices_without_a_word(self):
        model = nn.Linear(4, 4)
        with pytest.raises(ValueError, match=r"muon_groups\(model\)"):
            Muon(model.parameters())
        assert [group["use_muon"] for group in Muon([model.bias]).param_groups] == [False]


def built(params, model=None):
    model = nn.Sequential(nn.Linear(4, 4)) if model is None else model
    return build_optimizer(OptimizerConfig("muon", params), list(model.parameters()), model=model)


class TestSettings:
    def test_deepspeeds_keys(self):
        given = {"lr": 1e-3, "muon_lr": "2e-2", "momentum": 0.9, "weight_decay": 0.05}
        given |= {"betas": [0.8, 0.9], "eps": 1e-10}
        matrices, rest = built(given).param_groups
        both = {"weight_decay": 0.05}
        assert matrices.items() >= ({"lr": 0.02, "momentum": 0.9, "eps": 1e-7, "per_tensor": True} | both).items()
        assert rest.items() >= ({"lr": 1e-3, "betas": (0.8, 0.9), "eps": 1e-10, "per_tensor": False} | both).items()

    def test_torchs_own(self):
        given = {"nesterov": False, "ns_steps": 3, "adjust_lr_fn": "match_rms_adamw"}
        weight = torch.zeros(2, 2, requires_grad=True)
        theirs = optim.Muon([weight], **given, ns_coefficients=(2.0, -1.5, 0.5)).param_groups[0]
        mine = built(given | {"ns_coefficients": [2, -1.5, 0.5]}).param_groups[0]
        assert {key: mine[key] for key in theirs.keys() - {"params"}} | {"params": [weight]} == theirs

    @pytest.mark.parametrize(("given", "message"), [
        ({"ns_method": "gram"}, r"optimizer.params.ns_method"), ({"adjust_lr_fn": "mine"}, r"mine is not supported"),
        ({"muon_lr": -1.0}, r"Learning rate should be >= 0"), ({"per_tensor": "perhaps"}, "per_tensor"),
    ])  # fmt: skip
    def test_refused_by_name(self, given, message):
        with pytest.raises(ConfigError, match=message):
            built(given)

    def test_rates_and_settings_of_groups(self):
        weight, bias = nn.Linear(2, 2).parameters()
        matrices, rest = Muon(
            [{"params": [weight], "use_muon": True, "momentum": 0.5}, {"params": [bias], "use_muon": False, "lr": 0.7}]
        ).param_groups
        assert (matrices["momentum"], rest["lr"], rest["betas"]) == (0.5, 0.7, (0.9, 0.95))

    def test_a_group_that_is_added(self):
        """It gets the settings of its class; a matrix has to say whose it is."""
        bias, other = nn.Linear(2, 2).bias, nn.Linear(2, 2).weight
        optimizer = Muon([bias], lr=0.1, momentum=0.5)
        with pytest.raises(ValueError, match=r"muon_groups\(model\)"):
            optimizer.add_param_group({"params": [other]})
        optimizer.add_param_group({"params": other, "use_muon": True})
        optimizer.add_param_group({"params": [nn.Linear(2, 2).bias]})
        _, matrices, rest = optimizer.param_groups
        assert (matrices["momentum"], matrices["per_tensor"], rest["use_muon"], rest["lr"]) == (0.5, True, False, 0.1)
        before = other.detach().clone()
        other.grad = torch.eye(2)
        optimizer.step()
        assert not torch.equal(other, before)


class TestState:
    @pytest.mark.parametrize("make", [
        lambda params: optim.Adafactor([{"params": params, "per_tensor": True}]),
        lambda params: Muon([{"params": params[:1], "use_muon": True}, {"params": params[1:], "use_muon": False}]),
        lambda params: optim.AdamW([{"params": params, "per_tensor": True}]),
    ])  # fmt: skip
    def test_bytes_are_known_before_the_first_step(self, make):
        params = [torch.zeros(30, 7, requires_grad=True), torch.zeros(9, requires_grad=True)]
        optimizer = make(params)
        expected = sum(
            moment_bytes(optimizer, torch.device("cpu"), number).of(param.shape)
            for number, group in enumerate(optimizer.param_groups)
            for param in group["params"]
        )
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
        kept = [t for state in optimizer.state.values() for t in state.values() if torch.is_tensor(t) and t.dim()]
        assert sum(t.nbytes for t in kept) == expected

    def test_allocated_in_advance_without_a_step(self):
        params = [torch.ones(3, 2, requires_grad=True), torch.ones(2, requires_grad=True)]
        optimizer = Muon([{"params": params[:1], "use_muon": True}, {"params": params[1:], "use_muon": False}])
        allocate_state(optimizer)
        assert [sorted(optimizer.state[p]) for p in params] == [["momentum_buffer"], ["exp_avg", "exp_avg_sq", "step"]]


def test_stage_3_sends_no_more_for_whole_matrices():
    """Buckets of equal matrices belong to several layers, and stay until all of these are through."""
    sent = {}
    for name in ("Muon", "AdamW"):
        config = {
            "train_micro_batch_size_per_gpu": 1, "optimizer": {"type": name, "params": {"lr": 1e-3}},
            "zero_optimization": {"stage": 3, "overlap_comm": True, "stage3_param_persistence_threshold": 1000},
        }  # fmt: skip
        shape = ModelConfig(n_layer=16, n_embd=256, n_head=4, block_size=8)
        batch = (torch.zeros(1, 8, dtype=torch.long, device="meta"),) * 2
        program = TrainStep(lambda shape=shape: GPT(shape), lambda batch=batch: batch, load_engine_config(config))
        found = dry_run(program, ClusterShape(8, 8, "cpu"))
        sent[name] = sum(traffic.elements for kind, traffic in found.traffic.items() if "all_gather" in kind)
    assert sent["Muon"] <= 1.02 * sent["AdamW"]


def test_more_dimensions_than_are_tried_are_refused():
    weights = [torch.zeros(2, 2, 2, 2, 2, 2, requires_grad=True)]
    optimizer = optim.AdamW([{"params": weights, "per_tensor": True}])
    with pytest.raises(ConfigError, match="a parameter of 6 dimensions in a group that is per tensor, where 5"):
        moment_bytes(optimizer, torch.device("cpu"), 0)


class Wrapped(nn.Module):
    """As a model of Hugging Face's inside of another module; some of their modules do not answer."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Module()
        self.inner.table, self.inner.hidden = nn.EmbeddingBag(8, 4), nn.Linear(4, 4)
        self.inner.to_words = nn.Linear(4, 8)
        self.inner.get_output_embeddings = lambda: self.inner.to_words
        self.inner.hidden.get_output_embeddings = self.silent

    def silent(self):
        raise NotImplementedError


def test_a_wrapped_models_head_and_named_groups():
    model = Wrapped()
    for params in (None, [{"params": list(model.named_parameters())}]):
        matrices = [p for group in muon_groups(model, params) if group["use_muon"] for p in group["params"]]
        assert [tuple(p.shape) for p in matrices] == [(4, 4)] and matrices[0] is model.inner.hidden.weight
