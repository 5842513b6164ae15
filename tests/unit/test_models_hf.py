"""``model=hf``: other people's language models with our calls. Needs the extra ``hf``."""

import pytest
import torch

from deepzero.config.run import ModelConfig
from deepzero.config.strict import ConfigError
from deepzero.models.hf import HFModel, check_library

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")


def small(name, **changes):
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 12, "vocab_size": 50, "ffn_hidden": 24}
    return ModelConfig(name=name, library="hf", **{**shape, **changes})


@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral", "mixtral", "qwen2", "qwen2_moe"])
def test_a_loss_and_a_text(name):
    config = small(name)
    check_library(config)
    torch.manual_seed(0)
    model = HFModel(config)
    assert 4_000 < sum(p.numel() for p in model.parameters()) < 200_000
    ids = torch.randint(0, 50, (2, 12))
    logits, loss = model(ids), model(ids, labels=ids)
    assert logits.shape == (2, 12, 50)
    assert float(loss.detach()) == pytest.approx(
        float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten()).detach()), rel=1e-5
    )
    assert float(loss.detach()) == pytest.approx(float(model(ids, labels=ids).detach()))  # no dropout
    assert model.generate(ids[:, :3], 4).shape == (2, 7)
    assert bool(model.expert_blocks()) is name.endswith(("mixtral", "moe"))
    assert model.flops_per_token() > 0


def test_tied_and_untied():
    counts = [sum(p.numel() for p in HFModel(small("llama", tied=tied)).parameters()) for tied in (True, False)]
    assert counts[1] - counts[0] == 50 * 16


def test_checkpointing_gives_the_same_gradients():
    norms = []
    for kept in (False, True):
        torch.manual_seed(0)
        model = HFModel(small("llama", activation_checkpointing=kept)).train()
        ids = torch.arange(24).view(2, 12)
        model(ids, labels=ids).backward()
        norms.append(sum(float(p.grad.norm()) for p in model.parameters()))
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_what_is_not_there_is_refused():
    with pytest.raises(ConfigError, match="no causal language model of this type"):
        check_library(small("no_such_model"))
    with pytest.raises(ConfigError, match=r"model.n_kv_head=1: a model of the type gpt2 has none"):
        check_library(small("gpt2", n_kv_head=1))
    with pytest.raises(ConfigError, match=r"model.norm='rmsnorm'"):
        small("llama", norm="rmsnorm")
