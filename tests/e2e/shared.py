"""A small corpus, and the real runs that several tests look at. The fixtures of the same names: tests/conftest.py."""

import fcntl
import json
import os
import pty
import select
import shlex
import signal
import struct
import sys
import termios
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.distributed.pool import ready_to_fork
from tests.e2e import runs


def write_corpus(folder: Path) -> Path:
    """Some hundred kilobytes of text in three files."""
    for number, line in enumerate(("for i in range(10):\n    print(i)\n", "def f(x):\n    return x\n", "x = [1, 2]\n")):
        (folder / f"{number}.txt").write_text(line * 2000, encoding="utf-8")
    return folder


def nobody(cwd: Path) -> dict[str, str]:
    """The environment of somebody who is logged in nowhere."""
    return {"HOME": str(cwd), "NETRC": str(cwd / "none")}


def full_disk(cwd: Path, tiny: list[str], names: str = "[]") -> tuple[Path, runs.Done]:
    """A run whose files may not grow above 16 kB."""
    more = ["train.steps=60", "train.eval_every=0", "train.save_every=0", "train.log_every=20", "hydra.run.dir=run"]
    words = runs.last_of_each_key([sys.executable, runs.TRAIN, *tiny, *more, f"logger.names={names}"])
    return cwd / "run", runs.finished(["bash", "-c", f"ulimit -f 16; exec {shlex.join(words)}"], cwd, **nobody(cwd))


def watched(cwd: Path, tiny: list[str]) -> tuple[Path, str]:
    """A run on a terminal, with everything that can watch one: its folder, and what the terminal showed."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    arguments = [*tiny, "train.steps=30", "logger=all", "profiler=torch", "profiler.ranks=[0,1]", "hydra.run.dir=run"]
    with runs.started([sys.executable, runs.TRAIN, *arguments], cwd, stdout=follower, **nobody(cwd)) as command:
        os.close(follower)
        places: set[tuple[str, int]] = set()
        seen = _read_all(leader, command, places)
        (cwd / "listening.json").write_text(json.dumps(sorted(places)), encoding="ascii")
        assert command.process.wait(10) == 0
        assert command.processes() == {}
    os.close(leader)
    return cwd / "run", seen


def _read_all(leader: int, command: runs.Command, places: set[tuple[str, int]]) -> str:
    seen, end = b"", time.monotonic() + runs.TIMEOUT_SECONDS
    while time.monotonic() < end:
        ready, _, _ = select.select([leader], [], [], 0.2)
        places.update(command.listening())
        if ready:
            try:
                seen += os.read(leader, 65536)
            except OSError:  # the other side is closed
                break
        elif command.process.poll() is not None:
            break
    return seen.decode("utf-8", "replace")


def sweep(cwd: Path, tiny: list[str]) -> tuple[Path, runs.Done]:
    """``-m zero.stage=0,1,2,3`` on two ranks: its folder, and what it printed."""
    done = runs.train("-m", "zero.stage=0,1,2,3", *tiny, "hydra.sweep.dir=out", cwd=cwd, timeout=110)
    assert done.status == 0, done.err
    return cwd / "out", done


def broken(cwd: Path, tiny: list[str]) -> tuple[Path, runs.Done]:
    """Three ranks, and an infinite loss on rank 0 in step 5; loggers are watching."""
    arguments = [*tiny, "launch.nproc=3", "debug=overflow", "logger=all", "hydra.run.dir=run"]
    return cwd / "run", runs.train(*arguments, cwd=cwd, **nobody(cwd))


def killed(cwd: Path, tiny: list[str]) -> runs.Done:
    return runs.finished([sys.executable, "-W", "error", runs.PROGRAMS, "lose", str(cwd)], cwd)


def asked(
    cwd: Path, tiny: list[str], launched_by: str = "launcher", number: int = signal.SIGINT
) -> tuple[runs.Done, int]:  # fmt: skip
    """Two ranks that a signal lets leave in order, as under nohup, which torchrun does not heed; and how many have."""
    nohup = ["sh", "-c", 'trap "" HUP; exec "$0" "$@"', sys.executable]
    start = runs.TORCHRUN if launched_by == "torchrun" else nohup
    with runs.started([*start, runs.PROGRAMS, "stop", str(cwd)], cwd) as command:
        runs.wait_until(lambda: len(list(cwd.glob("ready*"))) == 2, "two ranks")
        if launched_by == "launcher":
            os.kill(command.process.pid, signal.SIGHUP)
            time.sleep(0.5)
            assert len(command.ranks()) == 2
        os.kill(command.process.pid, number)
        done = command.wait(40)
    return done, len(list(cwd.glob("left*")))


RUNS = {make.__name__: make for make in (killed, asked, full_disk, watched, sweep, broken)}
"""In the order in which tests ask for them."""


def make_all(places: dict[str, Path], tiny: list[str], pipe: Connection) -> None:
    """In a process of its own: one run after the other; each is handed over as it ends, or what went wrong."""
    for name, place in places.items():
        try:
            pipe.send((name, RUNS[name](place, tiny), None))
        except Exception as error:
            pipe.send((name, None, error))


class RealRuns:
    """The runs with these names, which begin at once; to ask for one waits for it."""

    def __init__(self, places: dict[str, Path], tiny: list[str]) -> None:
        context = ready_to_fork()
        self.places, self._known = places, {}
        self._pipe, theirs = context.Pipe(duplex=False)
        self._process = context.Process(target=make_all, args=(places, tiny, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def __getitem__(self, name: str) -> Any:
        while name not in self._known:
            done, result, error = self._pipe.recv()
            self._known[done] = result, error
        result, error = self._known[name]
        if error is not None:
            raise error
        return result

    def close(self) -> None:
        """Who breaks off a session waits for the run that is under way."""
        if set(self._known) != set(self.places):
            self._process.join(runs.TIMEOUT_SECONDS)
        self._process.kill()
        self._pipe.close()
