"""What all tests share: the pool of ranks, the CPU as device, and the GPU tests' skip."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator

import pytest
from _pytest.config import parse_warning_filter  # pytest has no public reader of its own filterwarnings setting

from tests.distributed.pool import RankPool

# Results must not depend on the machine: everything runs on the CPU, on ranks and in commands that tests start too,
# unless a test marked `gpu` takes this away again.
os.environ.setdefault("DEEPZERO_DEVICE", "cpu")
# Whoever starts the tests in the background of a shell, or under nohup, has these ignored, and what tests start would
# inherit it: a launcher heeds that, and Ctrl-C would end nothing.
for number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


@pytest.fixture(scope="session")
def ranks(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    """Gloo ranks that live as long as the session: ``ranks.run(fn, *args, world_size=2)``. See the module ``pool``."""
    filters = [parse_warning_filter(line, escape=False) for line in request.config.getini("filterwarnings")]
    pool = RankPool(filters)
    yield pool
    pool.close()


def pytest_collection_finish() -> None:
    """What was imported stays for good: no collection of garbage need look at it again (a tenth of the unit tests)."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked ``gpu`` are skipped, by name, where there is no GPU."""
    if not any(item.get_closest_marker("gpu") for item in items):
        return
    import torch

    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
