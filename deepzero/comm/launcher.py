"""Starting ranks: ``python train.py`` becomes as many processes as there are devices, through torch's elastic agent.

Under ``torchrun`` (or anything else that sets ``RANK`` and friends) the ranks exist already and nothing is started;
:func:`under_launcher` tells. Otherwise :func:`launch` does on one machine what ``torchrun --standalone`` does: an agent
with a rendezvous on a free loopback port, one process per rank, all of them ended when one fails.

What is added to the agent, because a person sits in front of it:

- *The rank's own error*, once, instead of the agent's report. Ranks write theirs to files
  (:mod:`deepzero.comm.rank_process`), the launcher picks the cause among the echoes.
- *Ctrl-C reaches the launcher only.* Ranks live in sessions of their own. Ctrl-C and SIGTERM are passed on as SIGTERM:
  ranks that have asked for time (:mod:`deepzero.comm.stop_request`) get it, and are killed by the agent after 30
  seconds, or at once when Ctrl-C is pressed again.
- *Restarts* (``max_restarts``). When a rank fails or is killed, all are started again, by a new agent.
- *Quiet.* The agent's log lines and the C++ warnings of c10d stay away unless ``LOGLEVEL`` or ``TORCH_CPP_LOG_LEVEL``
  asks for them.

Sources: torch's ``distributed/launcher/api.py`` and ``distributed/elastic`` (interfaces, read in the installed torch).
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from deepzero.comm.elastic import RESTART_VARIABLE
from deepzero.comm.process_group import JOINED, LAUNCH_FOLDER_VARIABLE
from deepzero.comm.rank_process import Report, read_reports, root_cause
from deepzero.config.parse import ConfigError

_PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])
_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


class RankFailed(RuntimeError):
    """A rank failed. The message is what its user should read: a headline and the user's own frames.

    Args:
        headline: which rank, and why.
        frames: where, shortened.
        full: the whole traceback.
    """

    def __init__(self, headline: str, frames: str = "", full: str = "") -> None:
        super().__init__(headline + (f"\n{frames}" if frames else ""))
        self.headline, self.frames, self.full = headline, frames, full


class Interrupted(Exception):
    """A signal ended the run; ``signum`` says which."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.signum = signum


def under_launcher() -> bool:
    """Whether torchrun, or another launcher that speaks its language, has started this process as a rank."""
    return all(name in os.environ for name in _LAUNCHER_VARIABLES)


def default_nproc() -> int:
    """Ranks that a run gets on this machine: one for each GPU, or 2 where there is none."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 2


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
            any rank has joined the process group would only happen again, and is raised at once.
        on_restart: called with 1, 2, … and the failure before each restart; by default one line on stderr says it.

    Raises:
        ConfigError: a rank refused its settings; the message says why.
        RankFailed: a rank failed or was killed, and there is no restart left.
        Interrupted: SIGINT, SIGTERM, SIGHUP or SIGQUIT.
    """
    from torch.distributed.elastic.multiprocessing import SignalException

    def say(number: int, error: RankFailed) -> None:
        print(f"{error.headline.splitlines()[0]}; restart {number} of {max_restarts}", file=sys.stderr, flush=True)

    job = {"parent": os.getpid(), "sys_path": sys.path, "file": file, "name": name, "args": pickle.dumps(args)}
    with (
        tempfile.TemporaryDirectory(prefix="deepzero-launch-") as name_of_root,
        _signals(Path(name_of_root)) as received,
    ):
        try:
            for attempt in range(max_restarts + 1):
                # A folder each: reports and process numbers of different attempts must not mix.
                folder = Path(name_of_root) / str(attempt)
                folder.mkdir()
                variables = {RESTART_VARIABLE: str(attempt), LAUNCH_FOLDER_VARIABLE: str(folder)}
                try:
                    _attempt(folder, job, nproc, {**environment, **variables}, received)
                    return
                except RankFailed as error:
                    if attempt == max_restarts or not (folder / JOINED).exists():
                        raise
                    (on_restart or say)(attempt + 1, error)
        except SignalException as error:  # also between two attempts, where the last agent's handlers still stand
            raise Interrupted(received[0] if received else int(error.sigval)) from None


def _attempt(
    folder: Path, job: Mapping[str, Any], nproc: int, environment: Mapping[str, str], received: list[int]
) -> None:
    """Start the ranks once and wait for them; raises what they died of, or torch's ``SignalException``."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    path = folder / "job.pickle"
    path.write_bytes(pickle.dumps(job))
    agent = elastic_launch(_agent_config(nproc, folder), sys.executable)
    with _environment(environment), _quiet_agent():
        try:
            agent("-m", "deepzero.comm.rank_process", str(path))
        except ChildFailedError as error:
            if received:
                raise Interrupted(received[0]) from None
            exit_codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
            raise _failure(read_reports(folder), exit_codes) from None
        finally:
            kill_ranks(folder)  # does nothing after an orderly end


def _agent_config(nproc: int, folder: Path) -> Any:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=uuid.uuid4().hex,
        role="rank",
        # Port 0: the agent's store takes a free port, and the ranks meet in that same store, so nobody can take
        # the port in between. The loopback address is named because a machine's own name often cannot be resolved.
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(log_dir=str(folder / "agent")),
        # SIGINT is missing here on purpose: see _signals.
        signals_to_handle="SIGTERM,SIGHUP,SIGQUIT",
    )


@contextlib.contextmanager
def _environment(extra: Mapping[str, str]) -> Iterator[None]:
    """The ranks' environment: the agent hands on this process's own, so it is changed and put back."""
    # gloo's C++ errors repeat what the exception says; NCCL's watchdog ends a process with nothing but its log line.
    gloo = extra.get("DEEPZERO_DEVICE", os.environ.get("DEEPZERO_DEVICE")) == "cpu"
    defaults = {"TORCH_CPP_LOG_LEVEL": "FATAL" if gloo else "ERROR", "KINETO_LOG_LEVEL": "99"}
    if Path("/sys/class/net/lo").exists():
        defaults["GLOO_SOCKET_IFNAME"] = "lo"  # gloo would look up the machine's name, which need not resolve
    wanted = {key: value for key, value in defaults.items() if key not in os.environ}
    wanted.update(extra)
    paths = [_PACKAGE_ROOT, *filter(None, [os.environ.get("PYTHONPATH")])]
    wanted["PYTHONPATH"] = os.pathsep.join(paths)
    before = {key: os.environ.get(key) for key in (*wanted, "TORCHELASTIC_SIGNALS_TO_HANDLE")}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value


@contextlib.contextmanager
def _quiet_agent() -> Iterator[None]:
    """The agent logs every ended process, with traceback. The user gets the rank's own error instead."""
    if "LOGLEVEL" in os.environ:
        yield
        return
    names = [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed")]
    loggers = [logging.getLogger(name) for name in {*names, "torch.distributed.elastic", "torch.distributed.launcher"}]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger, value in zip(loggers, before, strict=True):
            logger.disabled = value


@contextlib.contextmanager
def _signals(folder: Path) -> Iterator[list[int]]:
    """Turn SIGINT into the agent's orderly end; yields the signals that came.

    The agent would pass SIGINT on as SIGINT, and a rank that is still importing would answer with a traceback.
    Handlers are put back at the end, the agent's own included, so that a sweep's next job starts clean.
    """
    from torch.distributed.elastic.multiprocessing import SignalException

    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def on_interrupt(signum: int, frame: FrameType | None) -> None:
        received.append(signum)
        if len(received) == 1:
            raise SignalException("interrupted", sigval=signal.SIGTERM)
        kill_ranks(folder)  # asked twice: no more waiting

    handled = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.getsignal(number) for number in handled}
    signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def kill_ranks(folder: Path) -> None:
    """SIGKILL to every rank that has written its number below ``folder`` and still runs, and to its children."""
    for path in [*folder.glob("rank*.pid"), *folder.glob("*/rank*.pid")]:
        with contextlib.suppress(ValueError, OSError):
            pid = int(path.read_text(encoding="ascii"))
            if os.getpgid(pid) == pid and _is_our_child(pid):
                os.killpg(pid, signal.SIGKILL)


def _is_our_child(pid: int) -> bool:
    """Whether ``pid`` is a child that nobody has reaped; else the number may belong to a stranger by now."""
    if not hasattr(os, "waitid"):  # macOS before Python 3.13
        return False
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _failure(reports: list[Report], exit_codes: Mapping[int, int]) -> Exception:
    """What to tell the user, from what the ranks said and how they ended."""
    cause = root_cause(reports)
    # A rank that left no report did not end by an exception. SIGTERM is the agent's own way of ending the others.
    silent = set(exit_codes) - {r.rank for r in reports}
    killed = {r: -exit_codes[r] for r in sorted(silent) if exit_codes[r] < 0 and -exit_codes[r] != signal.SIGTERM}
    if cause is None or (cause.peer_gone and killed):
        if killed:
            return RankFailed("\n".join(_killed_text(rank, number) for rank, number in killed.items()))
        if cause is None:
            rank, code = next(iter(sorted(exit_codes.items())))
            return RankFailed(f"rank {rank} ended with exit status {code} and left no error report")
    if cause.kind == "config":
        return ConfigError(cause.title)
    return RankFailed(f"rank {cause.rank} failed: {cause.title}", cause.frames, cause.full)


def _killed_text(rank: int, number: int) -> str:
    text = f"rank {rank} was killed by signal {number} ({signal.Signals(number).name})"
    if number == signal.SIGKILL:
        text += "; when nobody did this by hand, the machine ran out of memory (`dmesg` tells): try a smaller "
        text += "train_micro_batch_size_per_gpu, model.activation_checkpointing=true or a higher zero.stage"
    return text
