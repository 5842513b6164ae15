"""Starting the ranks of one variant, and ending them: within a time limit, whatever happens, none left behind.

Each rank is a process in a session of its own, so that one signal ends it together with whatever it started (a
compiler, for example). When one rank fails, the others are ended at once: a rank that waits for a dead one would wait
for minutes.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from deepzero.comm.rendezvous import LOOPBACK, host_store, loopback_variables
from tools.bench.contenders import Contender, Variant
from tools.bench.stats import mean_over_ranks, slowest_rank
from tools.bench.workload import Workload

ROOT = Path(__file__).resolve().parents[2]
MIB = 2**20


@dataclass
class Outcome:
    """One variant in one round; ``error`` is None when it worked."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    """Piece to step times, each the slowest rank's. Contenders have one piece, ``step``; the floor has several."""

    losses: list[float] = field(default_factory=list)
    """Mean over ranks, of every step from the first untimed one."""

    cpu_seconds: dict[str, float] = field(default_factory=dict)
    """Piece to processor seconds per step, all threads of one rank together, of the busiest rank. Time in a table that
    is far above it was spent waiting, for another rank or for a processor that somebody else had."""

    build_peak_bytes: int = 0
    """Largest resident size until the model is built, of the largest rank."""

    step_peak_bytes: int = 0
    """The same, while steps run."""

    parameters: int = 0
    wall_seconds: float = 0.0
    """From the start of the processes to their end."""

    error: str | None = None

    @property
    def peak_bytes(self) -> int:
        """The largest resident size of any rank, ever."""
        return max(self.build_peak_bytes, self.step_peak_bytes)


@dataclass(frozen=True)
class Plan:
    """How long each variant runs, and where its files go."""

    work: Workload
    steps: int
    warmup: int
    timeout_seconds: float
    tokens_file: Path
    folder: Path


def run_variant(contender: Contender, variant: Variant, plan: Plan, tag: str) -> Outcome:
    """Start all ranks of ``variant``, wait, and read what they measured.

    Args:
        contender: whose variant it is.
        variant: the configuration to run.
        plan: lengths and limits.
        tag: makes the folder of this run unique, for example the number of the round.

    Returns:
        What the ranks measured, or an outcome whose ``error`` says which rank failed and how.
    """
    folder = plan.folder / f"{tag}-{contender.name}-{variant.name}"
    folder.mkdir(parents=True)
    spec = folder / "spec.json"
    fields: dict[str, Any] = {
        "builder": contender.builder,
        "options": variant.options,
        "work": plan.work.to_dict(),
        "steps": plan.steps,
        "warmup": plan.warmup,
        "tokens": str(plan.tokens_file),
    }
    spec.write_text(json.dumps(fields))
    start = time.monotonic()
    error = _run_ranks(spec, plan)
    if error is not None:
        return Outcome(error=error, wall_seconds=time.monotonic() - start)
    results = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(plan.work.ranks)]
    return Outcome(
        seconds={piece: slowest_rank([r["seconds"][piece] for r in results]) for piece in results[0]["seconds"]},
        cpu_seconds={piece: max(r["cpu_seconds"][piece] for r in results) for piece in results[0]["cpu_seconds"]},
        losses=mean_over_ranks([r["losses"] for r in results]),
        build_peak_bytes=max(r["build_peak_bytes"] for r in results),
        step_peak_bytes=max(r["step_peak_bytes"] for r in results),
        parameters=max(r["parameters"] for r in results),
        wall_seconds=time.monotonic() - start,
    )


def _run_ranks(spec: Path, plan: Plan) -> str | None:
    """None when every rank ended well and wrote its file, else one line or a few that say what went wrong."""
    store = open_store()
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(plan.work.ranks):
            with open(spec.parent / f"{rank}.log", "wb") as log:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "tools.bench.rank", str(spec)],
                        env=rank_environment(plan.work, rank, store.port),
                        cwd=spec.parent,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        return _wait(processes, spec, plan)
    finally:
        end_all(processes)


def rank_environment(work: Workload, rank: int, port: int) -> dict[str, str]:
    """The parent's environment plus what ``env://`` rendezvous, thread counts and the import path need.

    Args:
        work: the workload.
        rank: whose environment.
        port: of the store that this process has opened, so that no rank opens one to the world.
    """
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(work.ranks),
        "LOCAL_WORLD_SIZE": str(work.ranks),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        **loopback_variables(),
        "OMP_NUM_THREADS": str(work.threads),
        "DEEPZERO_BENCH_DEVICE": work.device,
    }


def _wait(processes: list[subprocess.Popen[bytes]], spec: Path, plan: Plan) -> str | None:
    deadline = time.monotonic() + plan.timeout_seconds
    while True:
        codes = [process.poll() for process in processes]
        written = [(spec.parent / f"{rank}.json").exists() for rank in range(len(processes))]
        for rank, code in enumerate(codes):
            # A rank that has written its numbers may end as it likes: some peers are noisy in their exit handlers.
            if code not in (None, 0) and not written[rank]:
                return f"rank {rank} ended with {code}: {tail(spec.parent / f'{rank}.log')}"
        if all(code is not None for code in codes):
            absent = [rank for rank, done in enumerate(written) if not done]
            return f"ranks {absent} ended without a result" if absent else None
        if time.monotonic() > deadline:
            waiting = [rank for rank, done in enumerate(written) if not done]
            if not waiting:
                return None
            log = spec.parent / f"{waiting[0]}.log"
            return f"ranks {waiting} not done after {plan.timeout_seconds:.0f} s: {tail(log)}"
        time.sleep(0.05)


def end_all(processes: list[subprocess.Popen[bytes]]) -> None:
    """End every process group that is left, and reap every process."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    for process in processes:
        process.wait()


def tail(log: Path, characters: int = 1500) -> str:
    """The end of what a process printed, for an error."""
    text = log.read_text(errors="replace").strip()
    return text[-characters:] or "(it printed nothing)"


def open_store() -> TCPStore:
    """Where ranks meet, on a port of this machine that no other can reach; closed when nobody holds it any more."""
    return host_store(0, timedelta(seconds=300))


def version_of(package: str) -> str | None:
    """The installed version of a package, or None; reads metadata only, imports nothing."""
    from importlib import metadata

    if importlib.util.find_spec(package) is None:
        return None
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
