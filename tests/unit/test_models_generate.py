"""Generating against forward: the same model, one token at a time."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from deepzero.config.run import ModelConfig
from deepzero.evaluation import sample
from deepzero.models.gpt import GPT

GPT2 = ModelConfig(name="tiny-gpt2", vocab_size=31, block_size=12, n_layer=2, n_head=4, n_embd=16)
LLAMA = dataclasses.replace(GPT2, name="tiny-llama", norm="rmsnorm", position="rope", activation="swiglu", tied=False)
STYLES = pytest.mark.parametrize("config", [GPT2, LLAMA], ids=lambda c: c.name)


@pytest.fixture(autouse=True)
def one_thread_and_a_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)


@STYLES
def test_generate_greedy_is_the_argmax_of_forward(config):
    model = GPT(config)
    for parameter in model.parameters():  # a model that has opinions
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.5)
    prompt = torch.tensor([[3, 1, 4], [1, 5, 9]])
    out = model.generate(prompt, max_new_tokens=14, temperature=0)
    assert out.shape == (2, 17) and torch.equal(out[:, :3], prompt)
    expected = prompt
    for _ in range(14):  # beyond block_size=12, the window slides
        logits = model(expected[:, -12:])
        expected = torch.cat((expected, logits[:, -1].argmax(-1, keepdim=True)), 1)
    assert torch.equal(out, expected)


def test_generate_follows_its_generator_alone():
    model, prompt = GPT(GPT2), torch.tensor([[0]])
    model.train()
    state = torch.get_rng_state()
    runs = [model.generate(prompt, 20, 1.0, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])
    assert torch.equal(state, torch.get_rng_state())
    assert model.training and runs[0].min() >= 0 and runs[0].max() < 31


def test_generate_samples_the_softmax_at_its_temperature():
    model = GPT(GPT2).eval()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.3)
    prompt = torch.tensor([[5, 6]])
    many = model.generate(prompt.repeat(20_000, 1), 1, 0.7, torch.Generator().manual_seed(0))[:, -1]
    seen = torch.bincount(many, minlength=31) / len(many)
    expected = F.softmax(model(prompt)[0, -1] / 0.7, -1)
    assert (seen - expected).abs().max() < 0.02


def test_generate_goes_through_the_modules_hooks():
    model, calls = GPT(GPT2), []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    model.generate(torch.tensor([[0]]), 3)
    assert len(calls) == 3


def test_negative_numbers_are_refused():
    model, prompt = GPT(GPT2), torch.zeros(1, 1, dtype=torch.int64)
    with pytest.raises(ValueError, match="temperature=-1"):
        model.generate(prompt, 1, -1)
    with pytest.raises(ValueError, match="max_new_tokens=-3"):
        model.generate(prompt, -3)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_that_is_broken_gives_one_line_and_no_sample(temperature, caplog):
    model = GPT(GPT2)
    torch.nn.init.constant_(next(model.parameters()), torch.nan)
    with pytest.raises(FloatingPointError, match="logits are not finite"):
        model.generate(torch.tensor([[3, 1, 4]]), 2, temperature)
    engine = SimpleNamespace(
        global_rank=0, global_steps=7, zero_optimization_stage=lambda: 1, device=torch.device("cpu"),
        barrier=lambda: None,
    )  # fmt: skip
    corpus = SimpleNamespace(separator=None, val=torch.arange(16), train=torch.arange(16), decode=str)
    settings = SimpleNamespace(seed=0, sample_tokens=3, sample_temperature=temperature)
    assert sample(engine, model, corpus, settings) is None
    said = "no sample after step 7: the model's logits are not finite, and no token can be chosen from them"
    assert [record.getMessage() for record in caplog.records] == [said]
