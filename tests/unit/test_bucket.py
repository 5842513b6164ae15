"""The exact sum: fp32, left to right, for any dtype on the wire and any chunk boundary."""

import pytest
import torch

from deepzero.comm.exact_sum import SUM_CHUNK, sum_in_rank_order
from deepzero.comm.ledger import Ledger, Traffic

SCRATCH = torch.zeros(2 * SUM_CHUNK)


def parts_of(world, numel, dtype):
    generator = torch.Generator().manual_seed(world * 1000 + numel)
    # Magnitudes far apart, so that the order of additions shows.
    return [(torch.randn(numel, generator=generator) * 10.0 ** (rank % 4)).to(dtype) for rank in range(world)]


def naive(parts):
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize("numel", [1, 64, SUM_CHUNK - 1, SUM_CHUNK, 2 * SUM_CHUNK + 17])
def test_rank_order(world, numel, dtype):
    parts, output = parts_of(world, numel, dtype), torch.full((numel,), float("nan"))
    sum_in_rank_order(output, parts, accumulate=False, scratch=SCRATCH)
    assert torch.equal(output, naive(parts))
    sum_in_rank_order(output, parts, accumulate=True, scratch=SCRATCH)
    assert torch.equal(output, naive([*parts, *parts]))


def test_order_matters_here():
    """Otherwise the test above would show nothing."""
    parts = parts_of(4, 1000, torch.float32)
    assert not torch.equal(naive(parts), naive(parts[::-1]))


@pytest.mark.parametrize("accumulate", [False, True])
def test_narrow_output_is_rounded_once(accumulate):
    parts = parts_of(3, 500, torch.bfloat16)
    before = torch.randn(500, generator=torch.Generator().manual_seed(5)).bfloat16()
    output = before.clone()
    sum_in_rank_order(output, parts, accumulate, SCRATCH)
    assert torch.equal(output, naive([before, *parts] if accumulate else parts).bfloat16())


def test_ledger_counts_shared_storage_once_and_keeps_the_maximum():
    ledger, held = Ledger(), [torch.zeros(100)]
    ledger.watch("gradients", lambda: [*held, held[0][10:20], None, torch.zeros(0)], padding_bytes=40)
    ledger.sample()
    held.append(torch.zeros(50, dtype=torch.bfloat16))
    ledger.sample()
    held.pop()
    ledger.sample()
    assert ledger.held == {"gradients": 400 + 100 - 40, "padding": 40}


def test_ledger_separates_setup_from_steps():
    ledger = Ledger()
    ledger.record("setup.broadcast", 10, 40)
    ledger.close_setup()
    ledger.record("gradients.reduce_scatter", 100, 200, padding=30)
    ledger.record("gradients.reduce_scatter", 100, 200)
    ledger.close_step()
    assert ledger.setup == {"setup.broadcast": Traffic(1, 10, 0, 40)}
    assert ledger.last_step == {"gradients.reduce_scatter": Traffic(2, 170, 30, 400)} and not ledger.traffic
    ledger.note("launch", "x")
    assert not ledger.events
