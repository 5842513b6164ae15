"""The gradient norm: exact integers, no order, and close to the truth."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from deepzero.layout import ALIGN
from deepzero.runtime.grad_norm import BlockNorms, block_norms, exact_square_sum, norm_from_bins

CPU = torch.device("cpu")


def words(*grads):
    """The integers of gradients that lie one behind the other."""
    norms = BlockNorms(sum(grad.numel() for grad in grads), CPU)
    for place, grad in enumerate(grads):
        norms.measure(sum(before.numel() for before in grads[:place]), grad, 0)
    return norms.norm_sq_partials()


def norm(*grads):
    return norm_from_bins(words(*grads).tolist())


@pytest.mark.parametrize("scale", [1.0, 1e-12, 1e12, 65504.0])
def test_close_to_double(scale):
    grad = torch.randn(ALIGN * 1000, generator=torch.Generator().manual_seed(1)) * scale
    assert norm(grad) == pytest.approx(grad.double().norm().item(), rel=1e-7)


def test_no_order():
    """Any cut at block boundaries, in any order of pieces, gives the same integers."""
    generator = torch.Generator().manual_seed(2)
    grad = torch.randn(ALIGN * 64, generator=generator) * torch.logspace(-18, 18, ALIGN * 64)
    expected = norm(grad)
    for pieces in (2, 4, 16, 64):
        parts = list(grad.split(grad.numel() // pieces))
        assert norm(*(parts[i] for i in torch.randperm(pieces, generator=generator).tolist())) == expected
    assert norm_from_bins(sum(words(part) for part in grad.split(ALIGN * 8)).tolist()) == expected


def test_integers_are_exact():
    """The sum over blocks is the exact sum of the squares of the fp32 block norms, each rounded to fp32 once."""
    norms = block_norms(torch.randn(ALIGN * 300, generator=torch.Generator().manual_seed(3)) * 1e-3)
    exact = sum(Fraction(x) for x in (norms * norms).tolist())
    root = Fraction(norm_from_bins(exact_square_sum(norms).tolist()))
    assert abs(root * root / exact - 1) < Fraction(1, 2**51)


def test_a_gpus_norms_on_a_cpu():
    """Each operation rounds once, as it does on the GPU, roots too."""
    grad = torch.randn(ALIGN * 300, generator=torch.Generator().manual_seed(6)) * torch.logspace(-9, 9, ALIGN * 300)
    sums = np.square(grad.numpy().reshape(300, ALIGN))
    while sums.shape[1] > 1:
        sums = sums[:, : sums.shape[1] // 2] + sums[:, sums.shape[1] // 2 :]
    out = torch.zeros(300)
    assert block_norms(grad, "cuda").tolist() == np.sqrt(sums[:, 0]).tolist()
    assert block_norms(grad, "cuda", out).data_ptr() == out.data_ptr() and out.tolist() == np.sqrt(sums[:, 0]).tolist()


def test_denormal_blocks_and_zeros():
    tiny = torch.full((ALIGN,), 1e-41)
    assert norm(torch.zeros(ALIGN)) == 0.0
    assert norm(tiny) == pytest.approx(0.0, abs=1e-39)
    assert math.isfinite(norm(tiny, torch.ones(ALIGN))) and norm(tiny, torch.ones(ALIGN)) == 8.0


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan"), 1e30])
def test_not_finite(bad):
    grad = torch.ones(ALIGN * 3)
    grad[70] = bad
    assert norm(grad) == math.inf


def test_narrow_gradients_are_widened():
    grad = torch.randn(ALIGN * 4, generator=torch.Generator().manual_seed(4)).bfloat16()
    assert norm(grad) == norm(grad.float())


@pytest.mark.parametrize("chunk", [ALIGN, 5 * ALIGN, 40 * ALIGN])
def test_measured_in_chunks(chunk):
    """Norms taken chunk by chunk, at an offset of the share, are those of the whole."""
    grad = torch.randn(ALIGN * 40, generator=torch.Generator().manual_seed(5))
    norms = BlockNorms(ALIGN * 50, CPU)
    for lo in range(0, grad.numel(), chunk):
        norms.measure(ALIGN * 10, grad[lo : lo + chunk], lo)
    assert norm_from_bins(norms.norm_sq_partials().tolist()) == norm(grad)


@pytest.mark.parametrize("bits", [-0x400000, 0x7FC00000])
def test_a_nan_of_either_sign(bits):
    grad = torch.ones(ALIGN)
    grad.view(torch.int32)[3] = bits
    assert norm(grad) == math.inf


def test_nothing():
    assert norm() == 0.0
