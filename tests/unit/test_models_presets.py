"""The shapes of configs/model against the sizes that were published."""

import pytest
import torch

from deepzero.config.run import ModelConfig
from deepzero.models.gpt import GPT, ffn_width
from tests.configs.compose import run_config


@pytest.mark.parametrize(("name", "numel"), [
    ("nano", 885_888),
    ("gpt2_124m", 124_439_808),
    ("gpt2_350m", 354_823_168),
    ("gpt2_1_3b", 1_313_626_112),
    ("llama_7b", 6_738_415_616),
    ("gpt3_175b", 174_604_259_328),
    ("gpt_1t", 1_008_014_617_600),
])  # fmt: skip
def test_published_parameter_counts(name, numel):
    config = run_config(f"model={name}").model
    with torch.device("meta"):
        model = GPT(config)
    c, layers = config.n_embd, config.n_layer
    if config.bias:
        per_block = 12 * c * c + 13 * c
        by_hand = config.vocab_size * c + config.block_size * c + layers * per_block + 2 * c
    else:
        per_block = 4 * c * c + 3 * c * ffn_width(config) + 2 * c
        by_hand = (1 if config.tied else 2) * config.vocab_size * c + layers * per_block + c
    assert model.num_parameters() == by_hand
    assert by_hand == numel
    assert config.name == name


def test_ffn_width():
    assert ffn_width(ModelConfig(n_embd=768, n_head=12)) == 3072
    assert ffn_width(ModelConfig(n_embd=768, n_head=12, activation="swiglu")) == 2048
    assert ffn_width(ModelConfig(n_embd=4096, n_head=32, activation="swiglu")) == 10944  # 10922.67 rounded up to 64
    assert ffn_width(run_config("model=llama_7b").model) == 11008


def test_flops_of_gpt2_by_hand():
    with torch.device("meta"):
        model = GPT(run_config("model=gpt2_124m").model)
    weights = 12 * 12 * 768**2 + 50257 * 768
    assert model.flops_per_token() == 6 * weights + 12 * 12 * 768 * 1024
