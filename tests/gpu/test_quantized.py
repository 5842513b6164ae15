"""Quantisation on a GPU: the format of the CPU, plain and compiled; a run of one rank, where nothing is quantised."""

import pytest
import torch

from deepzero.comm.quantization import Format, Quantizer

pytestmark = pytest.mark.gpu

NUMEL = 64 * 1000


def message_of(form, values, kernel):
    """The message, and what it decodes to, both on the CPU."""
    quantizer = Quantizer(form, kernel)
    quantizer.prepare(2 * values.numel(), [values.dtype], values.device)
    message = torch.zeros(form.message_bytes(values.numel()), dtype=torch.uint8, device=values.device)
    packed, decoded = form.open(message, values.numel()), torch.empty_like(values)
    quantizer.pack(values, packed)
    quantizer.unpack(packed, decoded)
    return message.cpu(), decoded.cpu()


@pytest.mark.parametrize("kernel", ["plain", "compiled"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("block", [64, 2048])
def test_a_gpu_reads_and_writes_what_a_cpu_does(bits, block, dtype, kernel):
    form, generator = Format(bits, block), torch.Generator().manual_seed(0)
    values = torch.randn(NUMEL, generator=generator).mul_(torch.logspace(-6, 3, NUMEL)).to(dtype)
    expected, decoded = message_of(form, values, "plain")
    found, decoded_there = message_of(form, values.cuda(), kernel)
    assert torch.equal(found, expected) and torch.equal(decoded_there, decoded)


@pytest.mark.parametrize("bits", [8, 4])
def test_a_piece_of_a_message_and_a_message_at_any_place(bits):
    """Scales need not lie at a multiple of 16 bytes; a block may be as wide as no power of two."""
    form, values = Format(bits, 192), torch.randn(192 * 7, device="cuda").bfloat16()
    quantizer = Quantizer(form, "compiled")
    quantizer.prepare(1, [values.dtype], values.device)
    room = torch.zeros(form.message_bytes(values.numel()) + 4, dtype=torch.uint8, device="cuda")
    packed, piece = form.open(room[4:], values.numel()), values.new_empty(192 * 3)
    quantizer.pack(values, packed)
    quantizer.unpack(packed, piece, 192 * 2)
    expected = torch.empty_like(piece)
    Quantizer(form, "plain").unpack(packed, expected, 192 * 2)
    assert torch.equal(piece, expected)
    assert bool(((piece - values[192 * 2 : 192 * 5]).abs().float().view(3, -1) <= packed.scales[2:5, None]).all())
