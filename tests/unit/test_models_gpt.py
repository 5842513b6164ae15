"""The model against formulas written out, and against itself in another mode."""

import copy
import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from deepzero.config.run import ModelConfig
from deepzero.models.gpt import GPT, INIT_STD, MLP, NORM_EPS, Attention, apply_rope, make_norm, rope_table

GPT2 = ModelConfig(name="tiny-gpt2", vocab_size=31, block_size=12, n_layer=2, n_head=4, n_embd=16)
LLAMA = ModelConfig(
    name="tiny-llama", vocab_size=31, block_size=12, n_layer=2, n_head=4, n_kv_head=2, n_embd=16, norm="rmsnorm",
    position="rope", activation="swiglu", bias=False, tied=False,
)  # fmt: skip
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
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        found[name] = parameter.grad.clone()
    return found


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
def test_same_seed_same_values(config):
    first, again, other = seeded(config, 5), seeded(config, 5), seeded(config, 6)
    for (name, a), b, c in zip(first.named_parameters(), again.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name
        if a.dim() == 2:
            assert not torch.equal(a, c), name


def test_initial_spread():
    config = ModelConfig(vocab_size=512, block_size=128, n_layer=8, n_head=4, n_embd=128)
    for name, parameter in seeded(config).named_parameters():
        if parameter.dim() == 2:
            residual = name.endswith(("attn.proj.weight", "mlp.down.weight"))
            expected = INIT_STD / math.sqrt(2 * 8) if residual else INIT_STD
            assert abs(parameter.std().item() / expected - 1) < 0.05, name
        elif "norm" in name and name.endswith("weight"):
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        else:
            assert torch.equal(parameter, torch.zeros_like(parameter)), name


@STYLES
def test_first_loss_is_that_of_a_uniform_guess(config):
    loss = seeded(config)(*some_batch(config)).item()
    assert abs(loss - math.log(config.vocab_size)) < 0.05


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
    config = ModelConfig(n_embd=4096, norm=norm)
    x = (torch.randn(4, 4096) * 1000 + 300).to(dtype)
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


def test_rope_products_depend_on_distance_alone():
    q, k = torch.randn(16), torch.randn(16)
    turned = apply_rope(torch.stack((q, k)).repeat(20, 1, 1).unsqueeze(0), rope_table(20, 16, q.device))[0]
    products = [torch.dot(turned[t + 3, 0], turned[t, 1]).item() for t in range(17)]
    assert max(products) - min(products) < 1e-4
    assert abs(torch.dot(turned[9, 0], turned[0, 1]).item() - products[0]) > 1e-3


def test_rope_keeps_positions_apart_in_bf16():
    """bf16 cannot tell position 1000 from 1001; the table must not have gone through it."""
    table = rope_table(2048, 64, torch.device("cpu"))
    assert table.dtype == torch.float32
    model = GPT(LLAMA).bfloat16()
    assert not list(model.buffers())
    x = torch.ones(1, 2048, 1, 64, dtype=torch.bfloat16)
    turned = apply_rope(x, table)
    exact = apply_rope(x.float(), rope_table(2048, 64, torch.device("cpu")))
    assert turned.dtype == torch.bfloat16
    torch.testing.assert_close(turned.float(), exact, rtol=2**-8, atol=1e-6)


def naive_attention(module, x, rope):
    """Head by head, query by query, with a mask that exists."""
    batch, tokens = x.shape[:2]
    d, group = module.head_width, module.n_head // module.n_kv_head
    heads = module.qkv(x).view(batch, tokens, -1, d)
    if rope:
        table = rope_table(tokens, d, x.device).to(x.dtype)
        first, second = heads.chunk(2, -1)
        turned = torch.cat((first * table[0] - second * table[1], second * table[0] + first * table[1]), -1)
        n = module.n_head + module.n_kv_head
        heads = torch.cat((turned[:, :, :n], heads[:, :, n:]), 2)
    mask = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    out = []
    for h in range(module.n_head):
        q = heads[:, :, h]
        k = heads[:, :, module.n_head + h // group]
        v = heads[:, :, module.n_head + module.n_kv_head + h // group]
        scores = (q @ k.transpose(1, 2) / math.sqrt(d)).masked_fill(~mask, float("-inf"))
        out.append(F.softmax(scores, -1) @ v)
    return F.linear(torch.cat(out, -1), module.proj.weight, module.proj.bias)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@STYLES
def test_attention_formula(config, kv_heads):
    config = dataclasses.replace(config, n_kv_head=kv_heads)
    module = Attention(config)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    x = torch.randn(2, 9, 16)
    rope = rope_table(9, 4, x.device) if config.position == "rope" else None
    expected = naive_attention(module, x, rope is not None)
    torch.testing.assert_close(module(x, rope), expected, rtol=1e-4, atol=1e-5)


def test_mlp_formulas():
    x = torch.randn(5, 16)
    gelu = MLP(GPT2)
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
    expected = F.cross_entropy(logits.view(-1, 31), labels.view(-1))
    torch.testing.assert_close(model(ids, labels), expected)
    torch.testing.assert_close(model(ids, last_only=True), logits[:, -1:])


@STYLES
def test_no_token_sees_the_future(config):
    model, (ids, _) = GPT(config).eval(), some_batch(config)
    changed = ids.clone()
    changed[:, 7] = (changed[:, 7] + 1) % config.vocab_size
    before, after = model(ids), model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(before[:, 7:], after[:, 7:], rtol=1e-3, atol=1e-4)


@STYLES
def test_position_matters(config):
    model = GPT(config).eval()
    if model.wpe is not None:
        torch.nn.init.normal_(model.wpe.weight)
    for block in model.blocks:  # so that attention is not the mean of all values
        torch.nn.init.normal_(block.attn.qkv.weight)
        torch.nn.init.normal_(block.attn.proj.weight)
    one = model(torch.tensor([[1, 2, 3]]))[0, -1]
    other = model(torch.tensor([[2, 1, 3]]))[0, -1]
    assert not torch.allclose(one, other, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@STYLES
def test_the_whole_model_in_16_bits(config, dtype):
    exact, ids_labels = seeded(config), some_batch(config)
    reference = exact(*ids_labels).item()
    model = copy.deepcopy(exact).to(dtype)
    loss = model(*ids_labels)
    assert loss.dtype == torch.float32
    assert abs(loss.item() - reference) < 0.02
    wide, narrow = gradients(exact, *ids_labels), gradients(model, *ids_labels)
    for name, gradient in narrow.items():
        assert gradient.dtype == dtype, name
        error = (gradient.float() - wide[name]).norm() / wide[name].norm()
        assert error < 0.1, (name, error)


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
    tied = seeded(GPT2)
    untied = GPT(dataclasses.replace(GPT2, tied=False))
    untied.load_state_dict(tied.state_dict())
    assert untied.num_parameters() == tied.num_parameters() + 31 * 16
    one, two = gradients(tied, *some_batch(GPT2)), gradients(untied, *some_batch(GPT2))
    torch.testing.assert_close(one["wte.weight"], two["wte.weight"] + two["lm_head.weight"])


def test_state_dict_goes_round():
    one, two = seeded(LLAMA, 1), seeded(LLAMA, 2)
    two.load_state_dict(one.state_dict())
    ids, labels = some_batch(LLAMA)
    assert torch.equal(one(ids, labels), two(ids, labels))


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@STYLES
def test_activation_checkpointing_same_bits(config, dtype, dropout):
    config = dataclasses.replace(config, dropout=dropout)
    plain = seeded(config).to(dtype)
    kept = GPT(dataclasses.replace(config, activation_checkpointing=True)).to(dtype)
    kept.load_state_dict(plain.state_dict())
    batch = some_batch(config)
    found = []
    for model in (plain, kept):
        torch.manual_seed(7)
        found.append(gradients(model, *batch))
    for name in found[0]:
        assert torch.equal(found[0][name], found[1][name]), name


def test_activation_checkpointing_runs_each_block_twice_and_keeps_less():
    config = dataclasses.replace(GPT2, n_layer=3)
    ids, labels = some_batch(config)
    calls, kept_bytes = {}, {}
    for on in (False, True):
        model = seeded(dataclasses.replace(config, activation_checkpointing=on))
        count = [0]
        for block in model.blocks:
            block.register_forward_pre_hook(lambda *_, count=count: count.__setitem__(0, count[0] + 1))
        kept = [0]

        def pack(tensor, kept=kept):
            kept[0] += tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(ids, labels)
        kept_bytes[on] = kept[0]
        loss.backward()
        calls[on] = count[0]
        count[0] = 0
        model.eval()(ids)  # without the backward pass there is nothing to save
        assert count[0] == 3
    assert calls == {False: 3, True: 6}
    assert kept_bytes[True] < kept_bytes[False] / 2


def test_dropout_only_in_training():
    model = GPT(dataclasses.replace(GPT2, dropout=0.5))
    ids, labels = some_batch(GPT2)
    assert not torch.equal(model(ids, labels), model(ids, labels))
    model.eval()
    assert torch.equal(model(ids, labels), model(ids, labels))


@pytest.mark.parametrize(("shapes", "message"), [
    ([(1, 13)], r"13 tokens is longer than model.block_size=12"),
    ([(5,)], r"\[batch, tokens\].*\(5,\)"),
    ([(1, 0)], "at least one token"),
    ([(1, 5), (1, 4)], r"labels \(1, 4\)"),
])  # fmt: skip
def test_wrong_shapes_are_named(shapes, message):
    with pytest.raises(ValueError, match=message):
        GPT(GPT2)(*(torch.zeros(shape, dtype=torch.int64) for shape in shapes))
