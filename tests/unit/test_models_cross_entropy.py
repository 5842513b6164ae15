"""The chunked loss against the one-line one, in values, gradients, precision and memory."""

import pytest
import torch
import torch.nn.functional as F

from deepzero.models import cross_entropy as module
from deepzero.models.cross_entropy import cross_entropy, naive_cross_entropy


def both(logits, targets, scale=1.0):
    results = []
    for loss_of in (cross_entropy, naive_cross_entropy):
        leaf = logits.clone().requires_grad_()
        loss = loss_of(leaf, targets)
        (loss * scale).backward()
        assert leaf.grad is not None
        results.append((loss.detach(), leaf.grad))
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("chunk_numel", [1, 7 * 11, 3 * 11 + 5, 10**6])
def test_equal_to_naive_for_any_chunk(dtype, chunk_numel, monkeypatch):
    monkeypatch.setattr(module, "CPU_CHUNK_NUMEL", chunk_numel)
    torch.manual_seed(0)
    logits, targets = (torch.randn(13, 11) * 4).to(dtype), torch.randint(0, 11, (13,))
    (loss, grad), (naive_loss, naive_grad) = both(logits, targets)
    assert loss.dtype == naive_loss.dtype and grad.dtype == dtype
    torch.testing.assert_close(loss, naive_loss, rtol=1e-6, atol=1e-6)
    # fp32 arithmetic in both; a 16-bit gradient may round to the neighbour.
    torch.testing.assert_close(grad, naive_grad, rtol=max(torch.finfo(dtype).eps, 1e-6), atol=1e-7)


def test_large_logits_do_not_overflow():
    logits = torch.tensor([[1e4, -1e4, 0.0], [-3e38, 3e38, 0.0]])
    loss, grad = both(logits, torch.tensor([0, 1]))[0]
    assert loss.item() == 0.0 and torch.equal(grad, torch.zeros(2, 3))


def test_fp16_gradients_survive_with_a_loss_scale():
    """softmax/rows is 1e-8 here: below fp16's smallest number, unless the scale is multiplied in before rounding."""
    logits, targets = torch.zeros(1000, 1000, dtype=torch.float16), torch.zeros(1000, dtype=torch.int64)
    logits[:, 0] = 4.6  # one likely class among 1000
    scaled = both(logits, targets, scale=65536.0)[0][1]
    exact = both(logits.double(), targets, scale=65536.0)[1][1]
    assert (scaled[:, 1:] > 0).all()
    torch.testing.assert_close(scaled.double(), exact, rtol=2e-3, atol=0)


def test_nan_is_not_hidden():
    logits = torch.zeros(4, 5)
    logits[2, 3] = float("nan")
    assert cross_entropy(logits, torch.zeros(4, dtype=torch.int64)).isnan()


def test_no_fp32_tensor_as_large_as_the_logits():
    logits = torch.zeros(2048, 1024, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.zeros(2048, dtype=torch.int64)
    with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
        cross_entropy(logits, targets).backward()
    largest = max(event.cpu_memory_usage for event in profile.events())
    assert largest <= logits.nbytes  # the gradient itself, in bf16


def test_wrong_shapes_are_named():
    with pytest.raises(ValueError, match=r"\(2, 3, 4\)"):
        cross_entropy(torch.zeros(2, 3, 4), torch.zeros(2, 3, dtype=torch.int64))
    with pytest.raises((IndexError, RuntimeError), match="index"):
        cross_entropy(torch.zeros(2, 3), torch.tensor([0, -100]))


def test_gradcheck():
    logits = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda z: cross_entropy(z, torch.tensor([0, 5, 2, 2])), (logits,))
    assert F.cross_entropy(logits, torch.tensor([0, 5, 2, 2])).item() == pytest.approx(
        cross_entropy(logits, torch.tensor([0, 5, 2, 2])).item()
    )
