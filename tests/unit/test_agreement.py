"""What is said about a precision before the first step."""

import logging
import platform

import pytest
import torch

from deepzero.runtime import consistency

CPU = torch.device("cpu")


@pytest.fixture
def processor(monkeypatch):
    """Make this a processor with, or without, the named instructions; None: torch cannot tell."""

    def make(bf16, amx, machine="x86_64"):
        consistency._say_slow.cache_clear()
        monkeypatch.setattr(platform, "machine", lambda: machine)
        for name, answer in (("_is_avx512_bf16_supported", bf16), ("_is_amx_tile_supported", amx)):
            if answer is None:
                monkeypatch.delattr(torch.cpu, name, raising=False)
            else:
                monkeypatch.setattr(torch.cpu, name, lambda answer=answer: answer, raising=False)

    yield make
    consistency._say_slow.cache_clear()


def test_slow_bf16_is_said_once(processor, caplog):
    processor(False, False)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            consistency.check_precision("bf16", CPU)
        consistency.check_precision("fp32", CPU)
    assert [record.getMessage()[:15] for record in caplog.records] == ["precision=bf16:"]


@pytest.mark.parametrize(
    "answers", [(True, False), (False, True), (None, False), (None, None), (False, False, "aarch64")]
)
def test_nothing_is_said_of_others(processor, caplog, answers):
    processor(*answers)
    consistency.check_precision("bf16", CPU)
    assert not caplog.records
