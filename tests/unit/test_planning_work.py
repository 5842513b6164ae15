"""What a rehearsal counts op by op: operations, traffic, memory in use; on the meta device and on the CPU alike."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from deepzero.config.run import ModelConfig
from deepzero.models.gpt import GPT
from deepzero.planning.op_cost import WorkMeter, fused_attention

SMALL = ModelConfig(n_layer=2, n_embd=64, n_head=2, block_size=32, vocab_size=128)


def one_step(model, device):
    ids = torch.zeros(4, SMALL.block_size, dtype=torch.long, device=device)
    model(ids, ids).backward()


def test_operations_are_those_that_torch_counts_itself():
    model = GPT(SMALL)
    with FlopCounterMode(display=False) as torchs:
        one_step(model, "cpu")
    with torch.device("meta"):
        rehearsed = GPT(SMALL)
    with WorkMeter() as meter:
        one_step(rehearsed, "meta")
    # torch does not count the CPU's fused attention; the meta device takes it apart into products that it counts.
    width, length, batch = SMALL.n_embd, SMALL.block_size, 4
    attention = SMALL.n_layer * batch * length * length * width
    products = sum(op.flops for op in meter.work)
    without = torchs.get_total_flops()
    assert without < products <= without + 14 * attention


def test_six_operations_for_a_parameter_and_token():
    with torch.device("meta"):
        model = GPT(SMALL)
    in_products = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and "wpe" not in name)
    with WorkMeter() as meter, fused_attention():
        one_step(model, "meta")
    ratio = sum(op.flops for op in meter.work) / (6 * in_products * 4 * SMALL.block_size)
    assert 1.0 < ratio < 1.3  # the rest is attention


def test_known_ops():
    with WorkMeter() as meter:
        a, b = torch.empty(8, 16, device="meta"), torch.empty(16, 4, device="meta")
        a @ b
        a.t()  # a view: neither work nor memory
        F.relu(a)
        torch._foreach_copy_([a], [a + 1])  # it returns nothing
        torch.empty(1, 64, device="meta").expand(1000, 64).sum(0)  # a stretched dimension is read once
        torch.zeros(10) + 1  # on another device
    product, two = 2 * 8 * 16 * 4, 4 * (128 + 128)
    assert [tuple(op) for op in meter.work] == [
        (0, 4 * 128, "function"), (0, 4 * 64, "function"), (product, 4 * (128 + 64 + 32), "product"),
        (0, two, "function"), (0, two, "copy"), (0, two, "copy"),
        (0, 4 * 64, "function"), (0, 4 * (64 + 64), "function"),
    ]  # fmt: skip


def test_asked_again_an_op_costs_and_makes_the_same():
    with WorkMeter() as meter:
        a = torch.empty(8, 16, device="meta")
        outputs = [F.layer_norm(a.t(), (8,)) for _ in range(2)]
        kinds = [a + 1, a + 1.0, a.to(torch.int64) + 1, a.to(torch.int64) + True]
    half = len(meter.work) // 2
    assert outputs[0].shape == outputs[1].shape and outputs[0].stride() == outputs[1].stride()
    assert outputs[0].untyped_storage()._cdata != outputs[1].untyped_storage()._cdata
    assert [t.dtype for t in kinds] == [torch.float32] * 2 + [torch.int64] * 2
    assert half > 2 and meter.work[1] == meter.work[2]


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_memory_in_use(device):
    """Bytes in use and their peak, as things come and go."""
    with WorkMeter(device) as meter:
        a = torch.zeros(1000, device=device)
        seen = [meter.alive_bytes]
        b = a.view(10, 100) + 1
        seen.append(meter.alive_bytes)
        c = b[:5]  # keeps all of b alive
        del b
        seen.append(meter.alive_bytes)
        del a, c
        seen += [meter.alive_bytes, meter.peak_bytes]
        meter.restart()
        seen.append(meter.peak_bytes)
    assert seen == [4000, 8000, 8000, 0, 8000, 0]


def test_attention_is_one_kernel_while_that_lasts():
    original = F.scaled_dot_product_attention
    with fused_attention(), WorkMeter() as meter:
        q, kv = torch.empty(1, 4, 512, 32, device="meta"), torch.empty(1, 2, 512, 32, device="meta")
        output = F.scaled_dot_product_attention(q, kv, kv, is_causal=True, enable_gqa=True)
        real = F.scaled_dot_product_attention(*[torch.ones(1, 1, 4, 8)] * 3)
    assert output.shape == q.shape and real.shape == (1, 1, 4, 8)
    assert [op.kind for op in meter.work if op.flops] == ["attention"]
    assert meter.peak_bytes < 4 * 4 * 512 * 512  # no matrix of 512 by 512 per head
    assert F.scaled_dot_product_attention is original
