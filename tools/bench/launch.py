"""Starting the ranks of one variant, and ending them: within a time limit, whatever happens, none left behind.

Each rank is a process in a session of its own, so that one signal ends it together with whatever it started (a
compiler, for example). When one rank fails, the others are ended at once: a rank that waits for a dead one would wait
for minutes.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from deepzero.comm.rendezvous import LOOPBACK, host_store, loopback_variables
from tools.bench.contenders import Contender, Variant
from tools.bench.workload import Workload, tokens_for

ROOT = Path(__file__).resolve().parents[2]
MIB, GIB = 2**20, 2**30


@dataclass
class Outcome:
    """One variant in one round; ``error`` is None when it worked, else there is what its first rank noted before."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    """Piece to samples, each the slowest rank's, in seconds per step. Contenders have ``step``, and perhaps parts of it
    that they time themselves; the floor has several pieces."""
    losses: list[float] = field(default_factory=list)  # mean over ranks, of every step from the first untimed one
    cpu_seconds: dict[str, float] = field(default_factory=dict)
    """Piece to processor seconds per step, all threads of one rank together, of the busiest rank. Time in a table that
    is far above it was spent waiting, for another rank or for a processor that somebody else had."""
    build_peak_bytes: int = 0  # largest resident size until the model is built, of the largest rank
    step_peak_bytes: int = 0  # the same, while steps run
    parameters: int = 0
    wall_seconds: float = 0.0  # from the start of the processes to their end
    error: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    """What rank 0 noted beside: memory of device and host, arena, pipeline."""

    @property
    def peak_bytes(self) -> int:
        """The largest resident size of any rank, ever."""
        return max(self.build_peak_bytes, self.step_peak_bytes)

    def __str__(self) -> str:
        name, values = next(iter(self.seconds.items()), ("step", []))
        times = f"{name} median {median(values):.3f} s, best {min(values):.3f} s" if values else "no step timed"
        peak = f", peak {self.peak_bytes / MIB:.0f} MiB  ({self.wall_seconds:.0f} s)"
        return times + peak + (f"; failed: {self.error}" if self.error else "")


@dataclass(frozen=True)
class Plan:
    """How long each variant runs, and where its files go."""

    work: Workload
    warmup: int
    blocks: int
    steps: int  # of a block
    each: bool  # whether a sample is one step, or the mean of a block
    timeout_seconds: float
    folder: Path
    place: str = "cpu"  # where the model is drawn; see `rank.draw_model`
    commands: tuple[tuple[str, ...], ...] = ()  # before each block rank 0 runs one of these, if there are any
    between_nodes: tuple[float, ...] = ()
    """Bytes a second that a rank's simulated link to other nodes carries in each block; 0: any. Empty: no link."""


def run_variant(contender: Contender, variant: Variant, plan: Plan, tag: str) -> Outcome:
    """Start all ranks of ``variant``, wait, and read what they measured; ``tag`` makes the folder's name unique."""
    folder = plan.folder / f"{tag}-{contender.name}-{variant.name}"
    folder.mkdir(parents=True)
    tokens, spec = folder / "tokens.npy", folder / "spec.json"
    np.save(tokens, tokens_for(plan.work, plan.warmup + plan.blocks * plan.steps))
    build = {"builder": contender.builder, "options": variant.options, "tokens": tokens}
    spec.write_text(json.dumps({**asdict(plan), **build}, default=str))
    start = time.monotonic()
    error = _run_ranks(spec, plan)
    seen = [_noted(folder, rank) for rank in range(plan.work.ranks)]
    return _outcome([found for found in seen[: 1 if error else None] if found], error, time.monotonic() - start)


def _outcome(ranks: list[dict[str, Any]], error: str | None, wall_seconds: float) -> Outcome:
    """The slowest, busiest and largest rank's numbers."""
    if not ranks:
        return Outcome(error=error, wall_seconds=wall_seconds)

    def pieces(key: str) -> Iterator[tuple[str, list[Any]]]:
        return ((piece, [rank[key][piece] for rank in ranks]) for piece in ranks[0].get(key, {}))

    return Outcome(
        # strict: ranks that timed different numbers of steps would pair the wrong ones.
        seconds={piece: [max(step) for step in zip(*several, strict=True)] for piece, several in pieces("seconds")},
        cpu_seconds={piece: max(several) for piece, several in pieces("cpu_seconds")},
        losses=[sum(step) / len(step) for step in zip(*(rank.get("losses", []) for rank in ranks), strict=True)],
        **{name: max(rank.get(name, 0) for rank in ranks) for name in ("build_peak_bytes", "step_peak_bytes")},
        parameters=ranks[0].get("parameters", 0),
        facts=ranks[0].get("facts", {}),
        wall_seconds=wall_seconds,
        error=error,
    )


def _noted(folder: Path, rank: int) -> dict[str, Any]:
    """What a rank has written so far; nothing, before it is built."""
    file = folder / f"{rank}.json"
    return json.loads(file.read_text()) if file.exists() else {}


def _run_ranks(spec: Path, plan: Plan) -> str | None:
    """None when every rank came to its end, else one line or a few that say what went wrong."""
    store = host_store(0, timedelta(seconds=300))  # on a port of this machine that no other can reach
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(plan.work.ranks):
            command = [sys.executable, "-m", "tools.bench.rank", str(spec)]
            environment = rank_environment(plan.work, rank, store.port)
            processes.append(start(command, spec.parent / f"{rank}.log", spec.parent, environment))
        return _wait(processes, spec.parent, plan.timeout_seconds)
    finally:
        end_all(processes)


def start(command: Sequence[str], log: Path, cwd: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """A process in a session of its own, which prints to ``log``."""
    with open(log, "wb") as printed:
        where = {"cwd": cwd, "env": environment, "start_new_session": True}
        return subprocess.Popen(command, stdout=printed, stderr=subprocess.STDOUT, **where)


def environment_of(device: str) -> dict[str, str]:
    """This process's, for a program of the checkout. On the CPU deepzero is kept off a GPU that may be there."""
    found = {name: value for name, value in os.environ.items() if name != "DEEPZERO_DEVICE"}
    found["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return found | ({"DEEPZERO_DEVICE": "cpu"} if device == "cpu" else {})


def rank_environment(work: Workload, rank: int, port: int) -> dict[str, str]:
    """With ``env://`` rendezvous at the store that this process has opened at ``port``."""
    environment = {
        **environment_of(work.device),
        # DeepSpeed's compilation asks for ninja by name, and pip puts it beside the interpreter.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(work.ranks),
        "LOCAL_WORLD_SIZE": str(work.ranks),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # no rank opens a store to the world
        **loopback_variables(),
        "OMP_NUM_THREADS": str(work.threads),
    }
    # torch.compile's helpers would each take some hundred MiB of what is being measured.
    environment.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    return environment


def _wait(processes: list[subprocess.Popen[bytes]], folder: Path, timeout_seconds: float) -> str | None:
    deadline = time.monotonic() + timeout_seconds

    def unfinished() -> list[int]:
        return [rank for rank in range(len(processes)) if not _noted(folder, rank).get("done")]

    while True:
        codes = [process.poll() for process in processes]
        # A rank that has written its last number may end as it likes: some peers are noisy in their exit handlers.
        failed = [rank for rank in unfinished() if codes[rank] not in (None, 0)] if any(codes) else []
        if failed:
            code, log = codes[failed[0]], tail(folder / f"{failed[0]}.log")
            killed = " (by the system, for want of memory?)" if code == -signal.SIGKILL else ""
            return f"rank {failed[0]} ended with {code}{killed}: {log}"
        if all(code is not None for code in codes):
            return f"ranks {unfinished()} ended without a result" if unfinished() else None
        if time.monotonic() > deadline:
            if not (waiting := unfinished()):
                return None
            return f"ranks {waiting} not done after {timeout_seconds:.0f} s: {tail(folder / f'{waiting[0]}.log')}"
        time.sleep(0.05)


def end_all(processes: list[subprocess.Popen[bytes]]) -> None:
    """End every process group that is left, and reap every process."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    for process in processes:
        process.wait()


def end_on_signals() -> None:
    """A plain ``kill`` (``timeout`` sends it too) ends like Ctrl-C: ranks killed, scratch folder removed."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def tail(log: Path, characters: int = 1500) -> str:
    """The end of what a process printed, for an error."""
    return log.read_text(errors="replace").strip()[-characters:] or "(it printed nothing)"
