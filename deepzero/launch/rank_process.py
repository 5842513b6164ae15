"""One rank's process, around its program: what it says when it fails, and how it ends when it is told to.

``python train.py`` starts ``python -c "… main(JOB)"`` once per rank (:mod:`deepzero.launch.launcher` wrote JOB and
reads the reports); under ``torchrun`` the process exists already and calls :func:`run_here`.

**Telling causes from consequences.** When one rank fails, its neighbours fail a moment later, because a collective
lost its peer. A user wants the first error, not the three that follow from it. So every failure becomes a
:class:`RankReport` with its time and a flag for "my peer is gone", and :func:`root_cause` picks.

**Ending at once.** A rank mostly sits inside a C++ wait, where Python's signal handlers do not run. The C-level handler
does, and writes a byte to the wakeup pipe; a thread that sleeps on this pipe ends the process, also when the launcher
has vanished. A program that wants to leave in order says so with :func:`on_stop_request`.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import importlib.util
import json
import math
import os
import pickle
import re
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from deepzero.comm import flight_recorder
from deepzero.durable import write_whole
from deepzero.utils.errors import ConfigError
from deepzero.utils.exit_hooks import finish, finish_within
from deepzero.utils.threads import start_thread

FAILURE_EXIT, CONFIG_ERROR_EXIT = 1, 2  # the second for settings that cannot be used, as argparse has it
ORPHAN_POLL_SECONDS = 0.5
FINISH_SECONDS = 10.0  # what a save under way gets when a rank ends with an error
CONSEQUENCE_DELAY_SECONDS = 1.5
"""Under torchrun: a rank whose error may be another rank's echo waits this long; torchrun ends it before it speaks."""
MAX_GRACE_SECONDS = 25.0  # the launcher and torchrun's agent kill a rank 30 seconds after SIGTERM
SAME_REQUEST_SECONDS = 1.0
"""Slurm signals every process of a job, and then the launcher or agent passes on what it got itself."""
RESTART_VARIABLE = "DEEPZERO_RESTART"  # the launcher tells its ranks: "0" in the first attempt

# What gloo, NCCL, TCPStore and c10d say when the other side has gone away.
_PEER_IS_GONE = re.compile(
    r"connection (closed|reset|refused)|broken pipe|peer closed|remote process exited|ncclremoteerror|ncclsystemerror"
    r"|socket timeout|read timeout|failed to recv|sendbytes failed|recvvalue failed|unable to reach peer"
    r"|watchdog caught collective|communicator was aborted|timed out waiting \d+ms for (send|recv)"
    r"|\[gloo|/gloo/|application timeout caused pair closure",
    re.IGNORECASE,
)


# ---- why a rank has ended --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankReport:
    """Why one rank ended."""

    rank: int
    kind: str  # ``config``: the message says it all; ``error``: anything else
    title: str  # type and message, and those of its cause; for ``config`` the message alone
    frames: str  # the user's own, innermost last; empty for ``config``, and where the message says it all
    full: str  # the whole traceback, for the run folder
    seconds: float  # ``time.time()`` of the failure
    peer_gone: bool  # probably the echo of another rank's failure

    def text(self) -> str:
        """What the user reads."""
        if self.kind == "config":
            return self.title
        return f"rank {self.rank} failed: {self.title}" + (f"\n{self.frames}" if self.frames else "")

    @property
    def exit_status(self) -> int:
        """Of the rank's process."""
        return CONFIG_ERROR_EXIT if self.kind == "config" else FAILURE_EXIT


def describe(error: BaseException, rank: int) -> RankReport:
    """Make a :class:`RankReport` of an exception that is being handled."""
    full = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    if isinstance(error, ConfigError):
        return RankReport(rank, "config", str(error), "", full, time.time(), False)
    cause = error.__cause__
    title = _title(error) + ("" if cause is None else f"\n  caused by {_title(cause)}")
    chain = " ".join(str(e) for e in (error, cause, error.__context__) if e is not None)
    gone = isinstance(error, (RuntimeError, OSError)) and _PEER_IS_GONE.search(chain) is not None
    gone = getattr(error, "peer_left", gone)  # the watchdog has found it out
    frames = "" if getattr(error, "says_it_all", False) else _user_frames(error)
    return RankReport(rank, "error", title, frames, full, time.time(), gone)


def _title(error: BaseException) -> str:
    message = str(error).strip()
    return type(error).__name__ + (f": {message}" if message else "")


def _user_frames(error: BaseException, limit: int = 6) -> str:
    """The last frames outside of installed packages and of this file; the very last ones where all are inside."""
    frames = traceback.extract_tb(error.__traceback__)
    hidden = (os.sep + "site-packages" + os.sep, os.sep + "dist-packages" + os.sep, "<frozen", "<string>", __file__)
    own = [frame for frame in frames if not any(part in frame.filename for part in hidden)]
    return "".join(traceback.format_list((own or list(frames))[-limit:])).rstrip()


def root_cause(reports: Iterable[RankReport]) -> RankReport | None:
    """The earliest failure that is not an echo; else the earliest echo; None when nobody reported."""
    return min(reports, key=lambda r: (r.peer_gone, r.seconds), default=None)


def write_report(folder: Path, report: RankReport) -> None:
    """For the launcher, which may read while a rank writes."""
    write_whole(folder / f"rank{report.rank}.json", json.dumps(asdict(report)).encode())


def read_reports(folder: Path) -> list[RankReport]:
    """All reports that ranks have left in ``folder``."""
    return [RankReport(**json.loads(path.read_text(encoding="utf-8"))) for path in sorted(folder.glob("rank*.json"))]


# ---- SIGTERM and Ctrl-C: the end, or a request -----------------------------------------------------------------------


class StopRequests:
    """What this rank's program wants to happen on SIGTERM and SIGINT, and which of them has come."""

    callback: Callable[[], None] | None = None
    grace_seconds = 0.0
    asked_by: signal.Signals | None = None

    def on_stop_request(self, callback: Callable[[], None] | None, grace_seconds: float = 20.0) -> None:
        """On SIGTERM or SIGINT call ``callback``, and end this rank only if it is still there ``grace_seconds`` later.

        The callback is called once, from another thread than the program's, and has to be quick: it sets a flag that
        the program looks at between two steps. A second of these signals, and SIGHUP at any time, ends the rank at
        once. What comes within :data:`SAME_REQUEST_SECONDS` is not a second one. SIGTERM also comes when another rank
        has failed. The program need not tell this apart: its next collective raises.

        With None these signals end this rank at once again.

        Raises:
            ValueError: ``grace_seconds`` is negative or above :data:`MAX_GRACE_SECONDS`.
        """
        if not 0 <= grace_seconds <= MAX_GRACE_SECONDS:
            raise ValueError(
                f"grace_seconds={grace_seconds}: must lie between 0 and {MAX_GRACE_SECONDS:g}, "
                "because a rank is killed 30 s after SIGTERM"
            )
        self.callback, self.grace_seconds = callback, grace_seconds

    def stop_signal(self) -> signal.Signals:
        """The signal that this rank was asked to stop by; SIGTERM where another rank was asked."""
        return self.asked_by or signal.SIGTERM


_STOP_REQUESTS = StopRequests()
on_stop_request, stop_signal = _STOP_REQUESTS.on_stop_request, _STOP_REQUESTS.stop_signal


def watch(parent: int | None, on_stop: Callable[[str], None] | None = None) -> None:
    """End this process at once on SIGTERM, SIGINT or SIGHUP, and when its launcher is gone (``parent``, or an agent).

    Where the program has called :func:`on_stop_request`, the first SIGTERM or SIGINT is passed on to it, and ends the
    process only when the grace is over. ``on_stop`` is called with the reason in words before; it has to be quick.
    """
    with contextlib.suppress(RuntimeError):  # there is no stderr
        faulthandler.enable()
    if parent is not None and sys.platform == "linux":
        # The kernel kills this process when its parent ends, even while C code holds Python's lock for good.
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG in <linux/prctl.h>
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    # Without the agent there is no store, and nobody who would end this rank; another launcher's parent may be a shell.
    launcher = os.getppid() if parent is None and "TORCHELASTIC_RUN_ID" in os.environ else parent
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    replaced: dict[int, Any] = {}
    silent: Callable[..., None] = lambda *_: None
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        # What `nohup` or a shell's `&` has had ignored stays so. Only our launcher signals its ranks, and means it.
        if parent is not None or signal.getsignal(number) is not signal.SIG_IGN:
            # The Python-level handler has nothing to do: the byte in the pipe is the message.
            replaced[number] = signal.signal(number, silent)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def forget() -> None:
        """A forked child has the pipe too: a signal that ends it (``Pool.terminate``) would end this rank."""
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGHUP):  # not SIGINT: on Ctrl-C data workers wait for the rank's word
            if signal.getsignal(number) is silent:  # and not a handler of the program's own
                signal.signal(number, replaced[number])

    os.register_at_fork(after_in_child=forget)

    def wait_for_the_end() -> None:
        requests, asked_at, grace = _STOP_REQUESTS, 0.0, math.inf
        while True:
            ready, _, _ = select.select([reader], [], [], ORPHAN_POLL_SECONDS)
            number = os.read(reader, 1)[0] if ready else 0
            asks = number in (signal.SIGTERM, signal.SIGINT)
            if asks and requests.asked_by is None and (callback := requests.callback) is not None:
                requests.asked_by, asked_at, grace = signal.Signals(number), time.monotonic(), requests.grace_seconds
                try:
                    callback()
                except BaseException:  # SystemExit, too; and the program never hears of the request
                    traceback.print_exc()
                    leave(128 + number, f"stopped by {signal.Signals(number).name}; its callback failed", on_stop)
            elif asks and time.monotonic() < asked_at + SAME_REQUEST_SECONDS:
                continue
            elif asks or number == signal.SIGHUP:
                leave(128 + number, f"stopped by {signal.Signals(number).name}", on_stop)
            elif requests.asked_by is not None and time.monotonic() >= asked_at + grace:
                late = f"it had not left {grace:g} s later"
                leave(128 + requests.asked_by, f"stopped by {requests.asked_by.name}; {late}", on_stop)
            elif not ready and launcher is not None and os.getppid() != launcher:
                with contextlib.suppress(Exception):
                    print(f"rank {os.environ['RANK']}: the launcher has vanished", file=sys.stderr, flush=True)
                leave(FAILURE_EXIT, "the launcher has vanished", on_stop)

    start_thread(wait_for_the_end, "deepzero-watch")


def leave(status: int, reason: str = "", tell: Callable[[str], None] | None = None) -> NoReturn:
    """``tell`` the ``reason``, and end this rank without Python's own shutdown, after success as after failure.

    Shutdown would wait for threads that wait for a peer that is gone. And gloo's threads may still be letting go of the
    last tensors: one that asks for Python's lock after Python has closed it aborts the process (seen about once in a
    hundred runs, after everything had been written).
    """
    for act in (partial(tell, reason) if tell else str, lambda: sys.stdout.flush(), lambda: sys.stderr.flush()):
        with contextlib.suppress(Exception):  # a stream may be None, too
            act()
    os._exit(status)


# ---- under torchrun --------------------------------------------------------------------------------------------------


def run_here(program: Callable[..., None], *args: Any, on_failure: Callable[[str], None] | None = None) -> None:
    """Run ``program(*args)`` as a rank that torchrun has started, and end the process if it fails.

    The error is printed by the rank that has it. Ranks whose error may be an echo, or the same as their neighbour's,
    wait a moment first: torchrun ends them as soon as it sees the first one fail. ``on_failure`` is called with the
    reason in words when this rank fails or is stopped.
    """
    watch(None, on_failure)
    try:
        program(*args)
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:  # `sys.exit(0)` is no failure
            raise
        fail_as_rank(error, on_failure)


def fail_as_rank(error: BaseException, on_failure: Callable[[str], None] | None = None) -> NoReturn:
    """End a rank that torchrun has started: tell torchrun, tell the user, leave. See :func:`run_here`."""
    report = describe(error, int(os.environ["RANK"]))
    _tell_peers(report)
    if report.peer_gone or (report.kind == "config" and os.environ.get("LOCAL_RANK", "0") != "0"):
        time.sleep(CONSEQUENCE_DELAY_SECONDS)
    print(report.text(), file=sys.stderr, flush=True)
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        # The file that torchrun shows as root cause, in torch's format, with our text in place of a traceback.
        details = {"py_callstack": report.text(), "timestamp": str(int(report.seconds))}
        message = {"message": {"message": report.title, "extraInfo": details}}
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps(message), encoding="utf-8")
    leave(report.exit_status, report.text(), on_failure)


def _tell_peers(report: RankReport) -> None:
    """What the other ranks will say of this one when they miss it. Not when it is stopped: that has to be quick."""
    with contextlib.suppress(Exception):
        flight_recorder.leave(f"has failed: {report.title.splitlines()[0]}")
    # Ranks often have the same error, and a save under way can still become complete; not where a peer is gone.
    if not report.peer_gone:
        with contextlib.suppress(Exception):
            finish_within(FINISH_SECONDS)


def restart_count() -> int:
    """How often the ranks of this run have been started again; 0 in the first attempt, and without a launcher."""
    return int(os.environ.get(RESTART_VARIABLE) or os.environ.get("TORCHELASTIC_RESTART_COUNT") or "0")


def remember(name: str, value: str) -> None:
    """Leave a note for this node's ranks in later attempts. Local rank 0 writes it; elsewhere this does nothing.

    Under torchrun nothing of ours is alive between two attempts; but its agent gives every rank a file for its error,
    ``<folder>/attempt_<n>/<local rank>/error.json``, in a folder that is the same for all attempts (torch's
    ``DefaultLogsSpecs.reify``): notes lie there. ``name`` has letters, digits and ``_ . -``.
    """
    if (path := _note(name)) is not None and os.environ.get("LOCAL_RANK", os.environ.get("RANK")) == "0":
        write_whole(path, value.encode())  # this process may be killed at any instant


def recall(name: str) -> str | None:
    """The note that this node's local rank 0 has left; None when there is none, and when not under torchrun."""
    path = _note(name)
    with contextlib.suppress(FileNotFoundError):
        return None if path is None else path.read_text(encoding="utf-8")
    return None


def _note(name: str) -> Path | None:
    if not re.fullmatch(r"[\w.-]+", name):
        raise ValueError(f"name={name!r}: a note's name has letters, digits and _ . - only")
    if not (error_file := os.environ.get("TORCHELASTIC_ERROR_FILE")) or RESTART_VARIABLE in os.environ:
        return None
    folders = Path(error_file).parents
    attempt = len(folders) > 2 and re.fullmatch(r"attempt_\d+", folders[1].name)
    return folders[2] / f"deepzero-{name}" if attempt else None


# ---- under our launcher ----------------------------------------------------------------------------------------------


def load_program(path: str, name: str) -> Callable[..., None]:
    """The function ``name`` of the Python file ``path``, imported under the file's own name, not as ``__main__``."""
    module_name = Path(path).stem
    if (module := sys.modules.get(module_name)) is None or getattr(module, "__file__", None) != path:
        spec = importlib.util.spec_from_file_location(module_name, path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{path} is not a Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        spec.loader.exec_module(module)
    program = getattr(module, name)
    if not callable(program):
        raise TypeError(f"{name} of {path} is not a function")
    return program


def main(job_path: str) -> NoReturn:
    """The life of a rank that the launcher has started with a JOB."""
    rank, folder = int(os.environ["RANK"]), Path(job_path).parent
    # The launcher is a parent that this process can trust: it wrote the job into a folder that only this user can read.
    job = pickle.loads(Path(job_path).read_bytes())
    watch(job["parent"])
    if os.getppid() != job["parent"]:
        leave(FAILURE_EXIT)
    try:
        try:
            load_program(job["file"], job["name"])(*pickle.loads(job["args"]))
        except SystemExit as error:
            if error.code:  # `sys.exit(0)` is no failure
                raise
        finish()
        with contextlib.suppress(Exception):
            flight_recorder.leave("has ended its program")
        leave(0)
    except BaseException as error:
        report = describe(error, rank)
        try:
            write_report(folder, report)
        except OSError:  # no room, or the folder is gone: then this rank says it
            with contextlib.suppress(OSError):
                print(report.text(), file=sys.stderr, flush=True)
        _tell_peers(report)
        leave(report.exit_status)
