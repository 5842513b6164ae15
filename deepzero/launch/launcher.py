"""Starting ranks: ``python train.py`` becomes as many processes as there are devices.

Under ``torchrun`` (or anything else that sets ``RANK`` and friends) the ranks exist already and nothing is started;
:func:`under_launcher` tells. Otherwise :func:`launch` starts one process per rank on this machine, and ends all of them
when one fails.

- *No door.* The ranks meet at a file that only this user can open (:mod:`deepzero.comm.rendezvous`), and listen for
  each other on the loopback address. This process listens nowhere. (torch's elastic agent listens on every address of
  the machine, and unpickles what it finds in its store.)
- *The rank's own error*, once. Ranks write theirs to files (:mod:`deepzero.launch.rank_process`), the launcher picks
  the cause among the echoes.
- *Ctrl-C reaches the launcher only.* Ranks live in sessions of their own. Ctrl-C is passed on as SIGTERM, and what else
  comes as it is: ranks that have asked for time (``rank_process.on_stop_request``) get it, and are killed after
  :data:`GRACE_SECONDS`, or at once when Ctrl-C is pressed again.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from deepzero.comm.rendezvous import JOINED, LAUNCH_FOLDER_VARIABLE, STORE, loopback_variables
from deepzero.launch.rank_process import RESTART_VARIABLE, SAME_REQUEST_SECONDS, RankReport, read_reports, root_cause
from deepzero.utils.closed_pipe import Interrupted
from deepzero.utils.errors import ConfigError

GRACE_SECONDS = 30.0
"""A rank that was told to end, by a signal or since another one has failed, is killed after this long."""
_POLL_SECONDS = 0.02
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
# A rank imports what this process would: `-c` alone would look in the current folder first.
_RANK = "import sys; sys.path[:] = sys.argv[2:]; from deepzero.launch.rank_process import main; main(sys.argv[1])"


class RankFailed(RuntimeError):
    """A rank failed. The message is what its user should read: a ``headline`` (which rank, and why) and, shortened, the
    user's own ``frames``; ``full`` is the whole traceback.
    """

    def __init__(self, headline: str, frames: str = "", full: str = "") -> None:
        super().__init__(headline + (f"\n{frames}" if frames else ""))
        self.headline, self.frames, self.full = headline, frames, full


def under_launcher() -> bool:
    """Whether torchrun, or another launcher that speaks its language, has started this process as a rank."""
    told = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
    # A world of one without LOCAL_RANK is what notebooks and pods set for every program: its machine is the run's.
    return told and ("LOCAL_RANK" in os.environ or os.environ["WORLD_SIZE"] != "1")


def default_nproc(wanted: str = "auto") -> int:
    """Ranks that a run gets on this machine: one for each GPU, or 2 where there is none or the CPU is ``wanted``."""
    from deepzero.device import installed

    return 2 if _wants_cpu(wanted) else installed().device_count() or 2


def _wants_cpu(wanted: str) -> bool:
    from deepzero.comm.process_group import cpu_is_meant

    return wanted == "cpu" or (wanted == "auto" and cpu_is_meant())


def choose_device(wanted: str, nproc: int) -> str:
    """``cpu``, or torch's word for this machine's GPUs (``cuda``), for ``nproc`` ranks.

    It is said when it is the CPU though a GPU may be meant.
    ``wanted`` is ``launch.device``: ``auto``, ``cpu`` or ``cuda``.

    Raises:
        ConfigError: ``cuda`` is wanted, and there are too few.
    """
    from deepzero.comm.process_group import missing_gpu, say_cpu
    from deepzero.device import installed

    if _wants_cpu(wanted):
        return "cpu"
    gpus = installed().device_count()
    if gpus >= nproc:
        return installed().kind
    why = f"{nproc} ranks want a GPU each, and this machine has {gpus}" if gpus else missing_gpu()
    if wanted == "cuda":
        raise ConfigError(f"launch.device=cuda: {why or 'this machine has no GPU'}; launch.device=cpu needs none")
    if why:
        say_cpu(why)
    return "cpu"


def default_threads(nproc: int) -> int:
    """Intra-op threads of each of ``nproc`` ranks: the cores this process may use, shared out, at least one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    return max(1, cores // nproc)


def launch(
    file: str,
    name: str,
    args: tuple[Any, ...],
    *,
    nproc: int,
    environment: Mapping[str, str],
    max_restarts: int = 0,
    on_restart: Callable[[int, RankFailed], None] | None = None,
) -> None:
    """Run function ``name`` of Python file ``file`` on ``nproc`` ranks of this machine, and wait for all of them.

    Args:
        file: absolute path of a Python file.
        name: function at its top level; called as ``name(*args)`` on every rank.
        args: picklable.
        nproc: how many ranks.
        environment: variables that ranks get on top of this process's own.
        max_restarts: how often all ranks are started again after one has failed or was killed. They find the number
            of the restart in ``DEEPZERO_RESTART``, and have to go on from a checkpoint by themselves. A failure before
            any rank has ever joined the process group would only happen again, and is raised at once.
        on_restart: called with 1, 2, … and the failure before each restart; by default one line on stderr says it.

    Raises:
        ConfigError: a rank refused its settings; the message says why.
        RankFailed: a rank failed, was killed or could not be started, and there is no restart left.
        Interrupted: SIGINT, SIGTERM, SIGHUP or SIGQUIT.
    """

    def say(number: int, error: RankFailed) -> None:
        print(f"{error.headline.splitlines()[0]}; restart {number} of {max_restarts}", file=sys.stderr, flush=True)

    job = {"parent": os.getpid(), "file": file, "name": name, "args": pickle.dumps(args)}
    joined = False
    try:
        # Among temporary files, not in /dev/shm: systemd empties that when the user logs out, a container's has 64 MB.
        whole = tempfile.TemporaryDirectory(prefix="deepzero-launch-", ignore_cleanup_errors=True)
    except OSError as error:
        raise RankFailed(
            f"no folder for the ranks to meet in: {type(error).__name__}: {error}; TMPDIR can name a place for it",
            full=traceback.format_exc(),
        ) from None
    with whole as root, _locked(root), _Signals() as signals:
        for attempt in range(max_restarts + 1):
            # A folder each: stores and reports of different attempts must not mix.
            folder = Path(root, str(attempt))
            variables = {**environment, RESTART_VARIABLE: str(attempt), LAUNCH_FOLDER_VARIABLE: str(folder)}
            try:
                _attempt(folder, job, nproc, variables, signals)
                return
            except RankFailed as error:
                joined = joined or (folder / JOINED).exists() or not Path(root).exists()  # what cleans /tmp has it
                if attempt == max_restarts or not joined:
                    raise
                with signals.raised():
                    (on_restart or say)(attempt + 1, error)


@contextlib.contextmanager
def _locked(folder: str) -> Iterator[None]:
    """What cleans /tmp (systemd-tmpfiles: of what is 10 days old) leaves a folder that is locked, and all below it."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_SH)
        yield
    finally:
        os.close(handle)


def _attempt(
    folder: Path, job: Mapping[str, Any], nproc: int, environment: Mapping[str, str], signals: _Signals
) -> None:
    """Start the ranks once and wait for them; raises what they died of, or that a signal has ended them."""
    path = folder / "job.pickle"
    ranks: list[subprocess.Popen[bytes]] = []
    store: list[int] = []
    try:
        try:
            folder.mkdir(parents=True)
            path.write_bytes(pickle.dumps(job))
            if hasattr(os, "memfd_create"):  # Linux; elsewhere the ranks make a file of that name
                # The name leads each rank to a file in memory: on a disk that is full a record would be torn, and the
                # ranks left without a store when they need it to say so.
                store.append(os.memfd_create("deepzero-store"))
                (folder / STORE).symlink_to(f"/proc/self/fd/{store[0]}")
            for rank in range(nproc):
                command = [sys.executable, "-c", _RANK, str(path), *map(str, sys.path)]
                variables = _rank_environment(rank, nproc, environment)
                ranks.append(subprocess.Popen(command, env=variables, start_new_session=True, pass_fds=store))
        except OSError as error:
            raise RankFailed(
                f"rank {len(ranks)} of {nproc} could not be started: {type(error).__name__}: {error}; "
                f"`ulimit -a` shows the limits of processes and open files, `df {folder.parent}` the space for notes",
                full=traceback.format_exc(),
            ) from None
        exit_codes = _wait(ranks, signals)
    finally:
        _send(ranks, signal.SIGKILL)  # does nothing after an orderly end
        for process in ranks:
            process.wait()
        for handle in store:
            os.close(handle)
    reports = read_reports(folder)
    # A rank that obeys the signal leaves no report: one that is there tells of a failure on the way out.
    failed = exit_codes or any(not report.peer_gone for report in reports)
    failure = _failure(reports, exit_codes) if failed else None
    if signals.received:
        raise Interrupted(signals.received[0]) from failure
    if failure is not None:
        raise failure


def _wait(ranks: Sequence[subprocess.Popen[bytes]], signals: _Signals) -> dict[int, int]:
    """Wait for all ranks; end them when one fails, or when a signal asks for it.

    Returns the exit status of each rank that failed by itself.
    """
    passed_on, deadline = 0, math.inf
    asked: set[int] = set()  # ranks that have been told to end …
    sent: set[int] = set()  # … and by which signals

    def end(number: int, seconds: float) -> None:
        nonlocal deadline
        deadline = min(deadline, time.monotonic() + seconds)
        sent.add(number)
        asked.update(rank for rank, process in enumerate(ranks) if process.returncode is None)
        _send(ranks, number)

    while None in [process.poll() for process in ranks]:  # all are looked at, not only up to the first that runs
        for number in signals.received[passed_on:]:
            passed_on += 1
            if signals.received[:passed_on].count(signal.SIGINT) > 1:
                end(signal.SIGKILL, 0)
            else:
                # A rank that is still importing would answer SIGINT with a traceback.
                end(signal.SIGTERM if number == signal.SIGINT else number, GRACE_SECONDS)
        if not asked and any(process.returncode for process in ranks):
            end(signal.SIGTERM, GRACE_SECONDS)
        if time.monotonic() >= deadline:
            end(signal.SIGKILL, 0)
        time.sleep(_POLL_SECONDS)
    codes = {rank: process.returncode for rank, process in enumerate(ranks) if process.returncode}
    return {rank: code for rank, code in codes.items() if rank not in asked or (code < 0 and -code not in sent)}


def _send(ranks: Sequence[subprocess.Popen[bytes]], number: int) -> None:
    """A signal to every rank that still runs, and to its children. A reaped one's number may belong to a stranger."""
    for process in ranks:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # it has just ended
                os.killpg(process.pid, number)


def _rank_environment(rank: int, nproc: int, extra: Mapping[str, str]) -> dict[str, str]:
    """This process's variables and a rank's own. What a launcher has told this process is no news for its ranks."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("TORCHELASTIC_") and name not in ("MASTER_ADDR", "MASTER_PORT")
    }
    # gloo's C++ errors repeat what the exception says; NCCL's watchdog ends a process with nothing but its log line.
    gloo = extra.get("DEEPZERO_DEVICE", os.environ.get("DEEPZERO_DEVICE")) == "cpu"
    defaults = {
        "TORCH_CPP_LOG_LEVEL": "FATAL" if gloo else "ERROR",
        "KINETO_LOG_LEVEL": "99",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",  # as torchrun has it: a lost peer ends the process
    }
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": nproc, "LOCAL_WORLD_SIZE": nproc}
    own = {name: str(number) for name, number in numbers.items()}
    return {**defaults, **inherited, **loopback_variables(), **extra, **own}


class _Signals:
    """The signals that have asked this process to end: noted, during a launch, for the loop that waits for ranks."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self._raises = False
        self._again_from = 0.0  # when Ctrl-C counts again
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Signals:
        if threading.current_thread() is threading.main_thread():
            # Who has a signal ignored for this process (`nohup`, a shell's `&`) means it.
            handlers = {number: signal.getsignal(number) for number in _ENDING}
            self._before = {n: handler for n, handler in handlers.items() if handler not in (signal.SIG_IGN, None)}
        for number in self._before:
            signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():  # a sweep's next job finds the handlers as they were
            signal.signal(number, handler)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if signum == signal.SIGINT:
            # A terminal's Ctrl-C comes twice where a wrapper (`uv run`, `timeout`) passes it on.
            if (now := time.monotonic()) < self._again_from:
                return
            self._again_from = now + SAME_REQUEST_SECONDS
        self.received.append(signum)
        if self._raises:
            raise Interrupted(signum)

    @contextlib.contextmanager
    def raised(self) -> Iterator[None]:
        """While no rank runs nobody looks at notes: then a signal raises where this process is."""
        if self.received:
            raise Interrupted(self.received[0])
        self._raises = True
        try:
            yield
        finally:
            self._raises = False


def _failure(reports: list[RankReport], exit_codes: Mapping[int, int]) -> Exception:
    """What to tell the user, from what the ranks said and how they ended."""
    cause = root_cause(reports)
    # A rank that left no report did not end by an exception. SIGTERM is the launcher's own way of ending the others.
    silent = set(exit_codes) - {r.rank for r in reports} if cause is None or cause.peer_gone else set()
    killed = {r: -exit_codes[r] for r in sorted(silent) if exit_codes[r] < 0 and -exit_codes[r] != signal.SIGTERM}
    if killed:
        names = {member.value: member.name for member in signal.Signals}
        why: dict[int, str] = {
            signal.SIGKILL: "; when nobody did this by hand, the machine ran out of memory (`dmesg` tells): try a "
            "smaller train_micro_batch_size_per_gpu, model.activation_checkpointing=true or a higher zero.stage",
            signal.SIGBUS: "; a file that it has mapped was cut short, or its disk has failed (data=tokens, nvme_path)",
        }
        return RankFailed("\n".join(
            f"rank {rank} was killed by signal {number} ({names.get(number, 'real-time')})"
            + why.get(number, "")
            for rank, number in killed.items()
        ))  # fmt: skip
    # Somebody else than this launcher has asked a rank to end, and it did, perhaps together with the others, in order.
    if silent and {exit_codes[r] for r in silent} == {128 + signal.SIGTERM}:
        return Interrupted(signal.SIGTERM)
    if cause is None:
        rank, code = min(exit_codes.items())
        return RankFailed(f"rank {rank} ended with exit status {code} and left no error report")
    if cause.kind == "config":
        return ConfigError(cause.title)
    return RankFailed(f"rank {cause.rank} failed: {cause.title}", cause.frames, cause.full)
