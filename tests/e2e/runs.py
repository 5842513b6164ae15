"""Start `python train.py` or torchrun as a user would, with a time-out, and leave no process behind whatever happens.

Every started process carries a mark in its environment, which all its descendants inherit: that is how ranks are found
again that live in sessions of their own.
"""

import contextlib
import json
import os
import resource
import runpy
import signal
import subprocess
import sys
import time
import uuid
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests import ROOT, doors
from tests.distributed.pool import ready_to_fork

TRAIN = str(ROOT / "train.py")
TIMEOUT_SECONDS = 90.0
PROGRAMS = str(ROOT / "tests" / "e2e" / "programs.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
SOON = 30.0
"""A rank that has lost another one ends by itself within so many seconds."""
MARK = "DEEPZERO_TEST_MARK"

TINY = ("experiment=smoke", "model.n_layer=1", "model.block_size=16", "train.sample_tokens=8", "data=text")
"""A model of 22,000 parameters; the caller gives data.path."""


@dataclass(frozen=True)
class Done:
    status: int
    out: str
    err: str
    seconds: float


class Command:
    def __init__(self, arguments: list[str], cwd: Path, stdout: int = subprocess.PIPE, **environment: str) -> None:
        self.mark = uuid.uuid4().hex
        # One thread a rank whoever starts it: the tests share few cores.
        env = {**os.environ, "OMP_NUM_THREADS": "1", MARK: self.mark, **environment}
        for name in ("PYTHONPATH", "WANDB_MODE", "WANDB_API_KEY"):
            env.pop(name, None)  # train.py has to find its package by itself, and nobody is logged in
        self.process = subprocess.Popen(
            last_of_each_key(arguments), cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=stdout,
            stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        self.started = time.monotonic()

    def wait(self, timeout: float = TIMEOUT_SECONDS) -> Done:
        """Wait for the end, which leaves no process; on time-out everything is killed, and what was printed is told."""
        try:
            out, err = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            out, err = self.process.communicate()
            raise TimeoutError(f"no end after {timeout} s\n--- stdout\n{out}\n--- stderr\n{err}") from None
        assert self.processes() == {}, "processes were left over"
        return Done(self.process.returncode, out, told_everywhere(err), time.monotonic() - self.started)

    def processes(self) -> dict[int, str]:
        """Every living process that descends from this command: number and command line."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if f"{MARK}={self.mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                    found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        return found

    def ranks(self) -> list[int]:
        """Process numbers of the ranks, in rank order, whoever has started them."""
        by_rank = {}
        for pid in self.processes():
            with contextlib.suppress(OSError):
                # The agent hands RANK over at the start of the process, so it is in the initial environment.
                for variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    if variable.startswith(b"RANK="):
                        by_rank[int(variable[5:])] = pid
        return [by_rank[rank] for rank in sorted(by_rank)]

    def listening(self) -> set[tuple[str, int]]:
        """Address and port of each socket at which any of its processes listens."""
        return doors.listening(self.processes())

    def kill(self) -> None:
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def told_everywhere(err: str) -> str:
    """Standard error without the line that only users of some processors get."""
    return "".join(line for line in err.splitlines(True) if "this processor has no bf16 arithmetic" not in line)


def last_of_each_key(arguments: list[str]) -> list[str]:
    """Of overrides for one key the last: tests add theirs to others', and train.py refuses a key that comes twice."""
    if TRAIN not in arguments:
        return arguments
    at = arguments.index(TRAIN) + 1
    last = {word.partition("=")[0].lstrip("+"): word for word in arguments[at:]}
    return [*arguments[:at], *last.values()]


@contextlib.contextmanager
def started(arguments: list[str], cwd: Path, stdout: int = subprocess.PIPE, **environment: str) -> Iterator[Command]:
    """A command that is surely gone afterwards."""
    command = Command(arguments, cwd, stdout, **environment)
    try:
        yield command
    finally:
        command.kill()
        command.process.communicate()


def finished(arguments: list[str], cwd: Path, timeout: float = TIMEOUT_SECONDS, **environment: str) -> Done:
    with started(arguments, cwd, **environment) as command:
        return command.wait(timeout)


def train(*overrides: str, cwd: Path, timeout: float = TIMEOUT_SECONDS, **environment: str) -> Done:
    """``python train.py OVERRIDES``; warnings are errors, in the launching process and in the ranks."""
    return finished([sys.executable, TRAIN, *overrides], cwd, timeout, PYTHONWARNINGS="error", **environment)


def refused(
    *words: str, cwd: Path, program: str = TRAIN, file_bytes: int | None = None, out: str | None = None,
    **environment: str,
) -> Done:  # fmt: skip
    """As :func:`train`, for commands that start no rank: in a copy of a process that has imported torch already.

    ``program`` is a file or a module. As on a full disk no file may grow above ``file_bytes``; ``out`` is its stdout.
    """
    context, began = ready_to_fork(), time.monotonic()
    pipes = [context.Pipe(duplex=False) for _ in range(2)]
    arguments = last_of_each_key([program, *words])
    process = context.Process(target=_run, args=(arguments, cwd, environment, file_bytes, out, *(w for _, w in pipes)))
    process.start()
    texts = []
    for reader, writer in pipes:
        writer.close()
        with open(os.dup(reader.fileno()), encoding="utf-8") as file:
            texts.append(file.read())
        reader.close()
    process.join(TIMEOUT_SECONDS)
    assert process.exitcode is not None
    return Done(process.exitcode, texts[0], texts[1], time.monotonic() - began)


def _run(
    arguments: list[str], cwd: Path, environment: dict[str, str], file_bytes: int | None, out: str | None,
    *pipes: Connection,
) -> None:  # fmt: skip
    for number, pipe in enumerate(pipes, start=1):
        os.dup2(pipe.fileno(), number)
        pipe.close()
    if out is not None:
        os.dup2(os.open(out, os.O_WRONLY), 1)
    if file_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
    os.environ.update(environment)
    os.chdir(cwd)
    sys.argv, sys.path = arguments, [str(ROOT), *sys.path]
    warnings.simplefilter("error")
    if arguments[0].endswith(".py"):
        runpy.run_path(arguments[0], run_name="__main__")
    else:
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)


def entries(run_dir: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The steps and the validations of a run's metrics.jsonl."""
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    everything = [json.loads(line, parse_constant=_refuse) for line in lines]
    return [e for e in everything if "loss" in e], [e for e in everything if "val_loss" in e]


def steps_taken(run_dir: Path) -> int:
    """How far a run has come that may still be writing."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    return max((entry["step"] for entry in map(json.loads, lines) if "loss" in entry), default=0)


def trajectory(run_dir: Path) -> Any:
    """All that two runs of the same bits have in common: every step, every validation, the parameters at the end."""
    steps, validations = entries(run_dir)
    names = ("step", "loss", "lr", "grad_norm", "grad_norm_clipped", "loss_scale", "skipped", "tokens_seen")
    numbers = [tuple(entry[name] for name in names) for entry in steps]
    validated = [(e["step"], e["val_loss"], e["tokens_seen"]) for e in validations]
    return numbers, validated, summary(run_dir)["params_sha256"]


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def summary(run_dir: Path) -> dict[str, Any]:
    value = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"), parse_constant=_refuse)
    assert isinstance(value, dict)
    return value


def wait_until(condition: Any, what: str, timeout: float = TIMEOUT_SECONDS, every: float = 0.05) -> None:
    """Poll ``condition`` until it is true; all times in seconds."""
    end = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not within {timeout} s")
        time.sleep(every)
