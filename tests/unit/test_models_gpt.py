"""The model against formulas written out, against itself in another mode, and against the sizes that were published."""

import copy
import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from deepzero.config.run import ModelConfig
from deepzero.evaluation import sample
from deepzero.models.gpt import GPT, INIT_STD, MLP, NORM_EPS, Attention, apply_rope, ffn_width, make_norm, rope_table
from tests.configs.compose import run_config

GPT2 = ModelConfig(name="tiny-gpt2", vocab_size=31, block_size=12, n_layer=2, n_head=4, n_embd=16)
LLAMA = dataclasses.replace(
    GPT2, name="tiny-llama", n_kv_head=2, norm="rmsnorm", position="rope", activation="swiglu", bias=False, tied=False
)
STYLES = pytest.mark.parametrize("config", [GPT2, LLAMA], ids=lambda c: c.name)


@pytest.fixture(autouse=True)
def one_thread_and_a_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)


def seeded(config, seed=0):
    torch.manual_seed(seed)
    return GPT(config)


def some_batch(config, batch=3):
    generator = torch.Generator().manual_seed(1)
    window = torch.randint(0, config.vocab_size, (batch, config.block_size + 1), generator=generator)
    return window[:, :-1].contiguous(), window[:, 1:].contiguous()


def gradients(model, ids, labels):
    model.zero_grad(set_to_none=True)
    model(ids, labels).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def opinionated(model, std=0.5):
    """A model whose logits differ."""
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=std)
    return model


# ---- shapes and first values -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "numel"), [
    ("nano", 885_888), ("gpt2_124m", 124_439_808), ("gpt2_350m", 354_823_168), ("gpt2_1_3b", 1_313_626_112),
    ("llama_7b", 6_738_415_616), ("gpt3_175b", 174_604_259_328), ("gpt_1t", 1_008_014_617_600),
])  # fmt: skip
def test_published_parameter_counts(name, numel):
    config = run_config(f"model={name}").model
    with torch.device("meta"):
        model = GPT(config)
    c, layers, tables = config.n_embd, config.n_layer, config.vocab_size * config.n_embd
    if config.bias:
        by_hand = tables + config.block_size * c + layers * (12 * c * c + 13 * c) + 2 * c
    else:
        by_hand = (1 if config.tied else 2) * tables + layers * (4 * c * c + 3 * c * ffn_width(config) + 2 * c) + c
    assert model.num_parameters() == by_hand == numel
    assert config.name == name
    if name == "gpt2_124m":
        weights = 12 * 12 * 768**2 + 50257 * 768
        assert model.flops_per_token() == 6 * weights + 12 * 12 * 768 * 1024


def test_ffn_width():
    # 10944 is 10922.67 rounded up to 64.
    for width, activation, expected in ((768, "gelu", 3072), (768, "swiglu", 2048), (4096, "swiglu", 10944)):
        assert ffn_width(ModelConfig(n_embd=width, activation=activation)) == expected
    assert ffn_width(run_config("model=llama_7b").model) == 11008


@pytest.mark.parametrize("kv_heads", [None, 2])
@STYLES
def test_flops_formula_equals_counted_products(config, kv_heads):
    config = dataclasses.replace(config, n_kv_head=kv_heads)
    model, (ids, labels) = GPT(config), some_batch(config)
    # The math backend is made of matrix products that the counter sees.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(ids, labels).backward()
    assert counter.get_total_flops() == model.flops_per_token() * ids.numel()


@STYLES
def test_same_seed_same_values_and_a_uniform_first_guess(config):
    first, again, other = seeded(config, 5), seeded(config, 5), seeded(config, 6)
    for (name, a), b, c in zip(first.named_parameters(), again.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name
        assert a.dim() != 2 or not torch.equal(a, c), name
    assert abs(seeded(config)(*some_batch(config)).item() - math.log(config.vocab_size)) < 0.05


def test_initial_spread():
    config = ModelConfig(vocab_size=512, block_size=128, n_layer=8, n_head=4, n_embd=128)
    for name, parameter in seeded(config).named_parameters():
        if parameter.dim() == 2:
            residual = name.endswith(("attn.proj.weight", "mlp.down.weight"))
            expected = INIT_STD / math.sqrt(2 * 8) if residual else INIT_STD
            assert abs(parameter.std().item() / expected - 1) < 0.05, name
        else:
            one = "norm" in name and name.endswith("weight")
            assert torch.equal(parameter, torch.full_like(parameter, float(one))), name


# ---- formulas --------------------------------------------------------------------------------------------------------


@STYLES
def test_norm_formula(config):
    norm = make_norm(config).double()
    with torch.no_grad():
        norm.weight.copy_(torch.randn(16))
    x = torch.randn(5, 16, dtype=torch.float64) * 3 + 1
    if config is GPT2:
        expected = (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + NORM_EPS).sqrt()
    else:
        expected = x / (x.square().mean(-1, keepdim=True) + NORM_EPS).sqrt()
    torch.testing.assert_close(norm(x), expected * norm.weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_norm_statistics_are_taken_in_fp32(norm, dtype):
    """1000² is beyond fp16's range, and a sum of 4096 numbers beyond bf16's 8 bits: only the output may be rounded."""
    config, x = ModelConfig(n_embd=4096, norm=norm), (torch.randn(4, 4096) * 1000 + 300).to(dtype)
    exact = make_norm(config).double()(x.double())
    ours = make_norm(config).to(dtype)(x)
    assert ours.dtype == dtype
    torch.testing.assert_close(ours.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-4)


def test_rope_is_a_rotation_by_position():
    tokens, width = 7, 6
    x = torch.randn(2, tokens, 3, width)
    turned = apply_rope(x, rope_table(tokens, width, x.device))
    for t in range(tokens):
        for i in range(width // 2):
            angle = t * 10_000.0 ** (-2 * i / width)
            pair = torch.complex(x[:, t, :, i], x[:, t, :, i + width // 2]) * complex(math.cos(angle), math.sin(angle))
            torch.testing.assert_close(turned[:, t, :, i], pair.real, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(turned[:, t, :, i + width // 2], pair.imag, rtol=1e-5, atol=1e-6)
    # Products depend on distance alone.
    q, k = torch.randn(16), torch.randn(16)
    turned = apply_rope(torch.stack((q, k)).repeat(20, 1, 1).unsqueeze(0), rope_table(20, 16, q.device))[0]
    products = [torch.dot(turned[t + 3, 0], turned[t, 1]).item() for t in range(17)]
    assert max(products) - min(products) < 1e-4
    assert abs(torch.dot(turned[9, 0], turned[0, 1]).item() - products[0]) > 1e-3


def test_rope_keeps_positions_apart_in_bf16():
    """bf16 cannot tell position 1000 from 1001; the table must not have gone through it."""
    table = rope_table(2048, 64, torch.device("cpu"))
    assert table.dtype == torch.float32
    assert not list(GPT(LLAMA).bfloat16().buffers())
    x = torch.ones(1, 2048, 1, 64, dtype=torch.bfloat16)
    turned, exact = apply_rope(x, table), apply_rope(x.float(), table.clone())
    assert turned.dtype == torch.bfloat16
    torch.testing.assert_close(turned.float(), exact, rtol=2**-8, atol=1e-6)


def naive_attention(module, x, rope):
    """Head by head, query by query, with a mask that exists."""
    batch, tokens = x.shape[:2]
    d, group, n = module.head_width, module.n_head // module.n_kv_head, module.n_head + module.n_kv_head
    heads = module.qkv(x).view(batch, tokens, -1, d)
    if rope:
        table = rope_table(tokens, d, x.device).to(x.dtype)
        first, second = heads.chunk(2, -1)
        turned = torch.cat((first * table[0] - second * table[1], second * table[0] + first * table[1]), -1)
        heads = torch.cat((turned[:, :, :n], heads[:, :, n:]), 2)
    mask, out = torch.ones(tokens, tokens, dtype=torch.bool).tril(), []
    for h in range(module.n_head):
        q, k, v = (heads[:, :, at] for at in (h, module.n_head + h // group, n + h // group))
        scores = (q @ k.transpose(1, 2) / math.sqrt(d)).masked_fill(~mask, float("-inf"))
        out.append(F.softmax(scores, -1) @ v)
    return F.linear(torch.cat(out, -1), module.proj.weight, module.proj.bias)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@STYLES
def test_attention_formula(config, kv_heads):
    module = Attention(dataclasses.replace(config, n_kv_head=kv_heads))
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    x = torch.randn(2, 9, 16)
    rope = rope_table(9, 4, x.device) if config.position == "rope" else None
    torch.testing.assert_close(module(x, rope), naive_attention(module, x, rope is not None), rtol=1e-4, atol=1e-5)


def test_mlp_formulas():
    x, gelu = torch.randn(5, 16), MLP(GPT2)
    hidden = F.linear(x, gelu.up.weight, gelu.up.bias)
    hidden = hidden * 0.5 * (1 + torch.erf(hidden / math.sqrt(2)))
    torch.testing.assert_close(gelu(x), F.linear(hidden, gelu.down.weight, gelu.down.bias))
    swiglu = MLP(LLAMA)
    gate, up = (x @ w.t() for w in swiglu.up.weight.chunk(2))
    torch.testing.assert_close(swiglu(x), (gate * torch.sigmoid(gate) * up) @ swiglu.down.weight.t())


@STYLES
def test_loss_is_the_cross_entropy_of_the_logits(config):
    model, (ids, labels) = GPT(config), some_batch(config)
    logits = model(ids)
    assert logits.shape == (3, 12, 31)
    torch.testing.assert_close(model(ids, labels), F.cross_entropy(logits.view(-1, 31), labels.view(-1)))
    torch.testing.assert_close(model(ids, last_only=True), logits[:, -1:])


@STYLES
def test_no_token_sees_the_future_and_position_matters(config):
    model, (ids, _) = GPT(config).eval(), some_batch(config)
    changed = ids.clone()
    changed[:, 7] = (changed[:, 7] + 1) % config.vocab_size
    before, after = model(ids), model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(before[:, 7:], after[:, 7:], rtol=1e-3, atol=1e-4)
    if model.wpe is not None:
        torch.nn.init.normal_(model.wpe.weight)
    for block in model.blocks:  # so that attention is not the mean of all values
        torch.nn.init.normal_(block.attn.qkv.weight)
        torch.nn.init.normal_(block.attn.proj.weight)
    one, other = (model(torch.tensor([ids]))[0, -1] for ids in ([1, 2, 3], [2, 1, 3]))
    assert not torch.allclose(one, other, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@STYLES
def test_the_whole_model_in_16_bits(config, dtype):
    exact, batch = seeded(config), some_batch(config)
    model = copy.deepcopy(exact).to(dtype)
    loss = model(*batch)
    assert loss.dtype == torch.float32
    assert abs(loss.item() - exact(*batch).item()) < 0.02
    wide, narrow = gradients(exact, *batch), gradients(model, *batch)
    for name, gradient in narrow.items():
        assert gradient.dtype == dtype, name
        error = (gradient.float() - wide[name]).norm() / wide[name].norm()
        assert error < 0.1, (name, error)


# ---- tied weights, state, checkpointing, dropout ---------------------------------------------------------------------


def test_tied_weights():
    model = GPT(GPT2)
    assert model.lm_head.weight is model.wte.weight
    assert len(list(model.parameters())) == len({id(p) for p in model.parameters()})
    names = [name for name, _ in model.named_parameters()]
    assert "wte.weight" in names and "lm_head.weight" not in names
    model.bfloat16()
    assert model.lm_head.weight is model.wte.weight
    copied = copy.deepcopy(model)
    assert copied.lm_head.weight is copied.wte.weight and copied.wte.weight is not model.wte.weight


def test_tied_gradient_is_the_sum_of_both_uses():
    tied, untied = seeded(GPT2), GPT(dataclasses.replace(GPT2, tied=False))
    untied.load_state_dict(tied.state_dict())
    assert untied.num_parameters() == tied.num_parameters() + 31 * 16
    one, two = gradients(tied, *some_batch(GPT2)), gradients(untied, *some_batch(GPT2))
    torch.testing.assert_close(one["wte.weight"], two["wte.weight"] + two["lm_head.weight"])


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@STYLES
def test_activation_checkpointing_same_bits(config, dtype, dropout):
    config = dataclasses.replace(config, dropout=dropout)
    plain = seeded(config).to(dtype)
    kept = GPT(dataclasses.replace(config, activation_checkpointing=True)).to(dtype)
    kept.load_state_dict(plain.state_dict())
    torch.manual_seed(7)
    found = gradients(plain, *some_batch(config))
    torch.manual_seed(7)
    again = gradients(kept, *some_batch(config))  # whose values came by a state dict
    assert [name for name in found if not torch.equal(found[name], again[name])] == []


def test_activation_checkpointing_runs_each_block_twice_and_keeps_less():
    ids, labels = some_batch(GPT2)
    calls, kept_bytes = {}, {}
    for on in (False, True):
        model = seeded(dataclasses.replace(GPT2, n_layer=3, activation_checkpointing=on))
        ran, kept = [], []
        for block in model.blocks:
            block.register_forward_pre_hook(lambda *_, ran=ran: ran.append(1))

        def pack(tensor, kept=kept):
            kept.append(tensor.nbytes)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(ids, labels)
        kept_bytes[on] = sum(kept)
        loss.backward()
        calls[on] = len(ran)
        model.eval()(ids)  # without the backward pass there is nothing to save
        assert len(ran) == calls[on] + 3
    assert calls == {False: 3, True: 6}
    assert kept_bytes[True] < kept_bytes[False] / 2


def test_dropout_only_in_training():
    model, batch = GPT(dataclasses.replace(GPT2, dropout=0.5)), some_batch(GPT2)
    assert not torch.equal(model(*batch), model(*batch))
    model.eval()
    assert torch.equal(model(*batch), model(*batch))


def zeros(*shape):
    return torch.zeros(shape, dtype=torch.int64)


@pytest.mark.parametrize(("act", "message"), [
    (lambda model: model(zeros(1, 13)), r"13 tokens is longer than model.block_size=12"),
    (lambda model: model(zeros(5)), r"\[batch, tokens\].*\(5,\)"),
    (lambda model: model(zeros(1, 0)), "at least one token"),
    (lambda model: model(zeros(1, 5), zeros(1, 4)), r"labels \(1, 4\)"),
    (lambda model: model.generate(zeros(1, 1), 1, -1), "temperature=-1"),
    (lambda model: model.generate(zeros(1, 1), -3), "max_new_tokens=-3"),
])  # fmt: skip
def test_wrong_shapes_and_numbers_are_named(act, message):
    with pytest.raises(ValueError, match=message):
        act(GPT(GPT2))


# ---- generating against forward: the same model, one token at a time -------------------------------------------------


@STYLES
def test_generate_greedy_is_the_argmax_of_forward(config):
    model, calls = opinionated(GPT(config)), []
    prompt = torch.tensor([[3, 1, 4], [1, 5, 9]])
    hook = model.register_forward_pre_hook(lambda *_: calls.append(1))
    out = model.generate(prompt, max_new_tokens=14, temperature=0)
    hook.remove()
    assert len(calls) == 14, "it goes through the module's hooks"
    assert out.shape == (2, 17) and torch.equal(out[:, :3], prompt)
    expected = prompt
    for _ in range(14):  # beyond block_size=12, the window slides
        expected = torch.cat((expected, model(expected[:, -12:])[:, -1].argmax(-1, keepdim=True)), 1)
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
    model, prompt = opinionated(GPT(GPT2).eval(), 0.3), torch.tensor([[5, 6]])
    many = model.generate(prompt.repeat(20_000, 1), 1, 0.7, torch.Generator().manual_seed(0))[:, -1]
    seen = torch.bincount(many, minlength=31) / len(many)
    assert (seen - F.softmax(model(prompt)[0, -1] / 0.7, -1)).abs().max() < 0.02


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
