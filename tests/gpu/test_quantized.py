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
    """Scales alike to the bit; a code may differ by one where a division rounds otherwise."""
    form, generator = Format(bits, block), torch.Generator().manual_seed(0)
    values = torch.randn(NUMEL, generator=generator).mul_(torch.logspace(-6, 3, NUMEL)).to(dtype)
    expected, decoded = message_of(form, values, "plain")
    found, decoded_there = message_of(form, values.cuda(), kernel)
    steps = form.open(expected, NUMEL).scales.repeat_interleave(block)[:NUMEL]
    assert torch.equal(form.open(found, NUMEL).scales, form.open(expected, NUMEL).scales)
    differs = decoded_there.float() != decoded.float()
    assert differs.float().mean() < 1e-3
    rounding = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-11
    apart = (decoded_there.float() - decoded.float()).abs()
    size = decoded.float().abs().clamp(min=torch.finfo(dtype).smallest_normal)  # rounding is no finer below
    assert bool((apart <= steps * 1.001 + size * 2 * rounding).all())
    # The same message decodes to the same bits on both sides.
    back = torch.empty(NUMEL, dtype=dtype)
    Quantizer(form, "plain").unpack(form.open(found, NUMEL), back)
    assert torch.equal(back, decoded_there)
