"""What all tests share: the pool of ranks, real runs, the CPU as device, and the GPU tests' skip."""

import gc
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from _pytest.config import parse_warning_filter  # pytest has no public reader of its own filterwarnings setting

from tests.distributed.pool import RankPool, ready_to_fork
from tests.e2e import runs, shared

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
    pool = RankPool([parse_warning_filter(line, escape=False) for line in request.config.getini("filterwarnings")])
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides of the smallest sensible run, in fp32 so that results do not depend on how a batch is cut."""
    return [*runs.TINY, f"data.path={shared.write_corpus(tmp_path_factory.mktemp('corpus'))}", "precision=fp32"]


@pytest.fixture(scope="session")
def real_runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny: list[str]
) -> Iterator[shared.RealRuns]:
    """Of the runs in ``shared.RUNS`` those that a test looks at. Another process starts one after the other."""
    wanted = {name for item in request.session.items for name in item.fixturenames}
    real = shared.RealRuns({name: tmp_path_factory.mktemp(name) for name in shared.RUNS if name in wanted}, tiny)
    yield real
    real.close()


def _result_of(name: str) -> Any:
    """A fixture: what came of a real run."""

    def fixture(real_runs: shared.RealRuns) -> Any:
        return real_runs[name]

    return pytest.fixture(scope="session", name=name)(fixture)


killed, asked, full_disk, watched, sweep, broken = map(_result_of, shared.RUNS)


def pytest_collection(session: pytest.Session) -> None:
    """Among all tests some need ranks, copies of a process that imports torch: on one core, while another collects."""
    if session.config.args_source is session.config.ArgsSource.TESTPATHS:
        ready_to_fork()


def pytest_collection_finish() -> None:
    """What was imported stays for good: no collection of garbage need look at it again (a tenth of the unit tests)."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Real runs begin beside what needs one core: after ranks, before their tests; no GPU: ``gpu`` is skipped."""
    order = {"distributed": 0, "unit": 1, "e2e": 3}
    items.sort(key=lambda item: order.get(item.path.parent.name, 2))
    if not any(item.get_closest_marker("gpu") for item in items):
        return
    import torch

    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
