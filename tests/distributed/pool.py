"""A pool of gloo ranks that lives as long as the test session, so that a distributed test costs milliseconds.

The pool starts ranks on first use, one *sub-pool* per world size, each with its own processes and its own default
process group. A test asks for the fixture ``ranks`` and writes::

    def sum_of_ranks(rank, world_size, start):          # module level: it travels by reference
        x = torch.full((3,), start + rank)
        dist.all_reduce(x)
        return x.tolist()

    def test_sum(ranks):
        assert ranks.run(sum_of_ranks, 10, world_size=2) == [[21] * 3] * 2

A test that is wholly the ranks' has a shorter form: the body runs on every rank, its assertions too::

    @on_ranks(3)
    def test_sum(rank, world):
        assert sum_of_ranks(rank, world, 10) == [33] * 3

What a test may rely on, on every rank and in every call: one torch thread, the same seed, warnings as errors by the
same list as in ``pyproject.toml``, ``RANK`` and friends in the environment as our launcher sets them, the sub-pool's
default process group. What is left behind is undone or refused: see :func:`_guarded`.

When something goes wrong:

- A rank raises: the same exception is raised in the test, with that rank's traceback as its cause.
- A rank dies: :class:`RankDied` at once, not after the time-out.
- Nothing comes back in time: :class:`RankTimeout` with the Python stack of every rank.

In each case, and on Ctrl-C, all ranks of that sub-pool are killed, and the next test that needs them gets new ones.
A rank whose parent has vanished ends by itself. Ranks meet as the launcher's do, in a folder of their own.
"""

import atexit
import contextlib
import faulthandler
import functools
import gc
import inspect
import itertools
import multiprocessing
import multiprocessing.connection
import multiprocessing.context
import multiprocessing.forkserver
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from pathlib import Path
from unittest import mock

import pytest

MAX_RANKS = 6
START_SECONDS = 120.0
"""A rank that is not ready after this long has failed to start (a slow machine imports torch in ten seconds)."""
GRACE_SECONDS = 0.5
"""After the first failure, wait this long for what the other ranks have to say."""


class RankDied(RuntimeError):
    """A rank ended without an answer: killed, out of memory, ``os._exit``."""


class RankTimeout(RuntimeError):
    """No answer in time; the message holds each silent rank's Python stack."""


class RankError(RuntimeError):
    """Stands for a rank's exception that cannot be pickled."""


class LeakedState(RuntimeError):
    """A function returned and left the process in a state that would change the next test."""


class _Remote(Exception):
    """Carries the tracebacks of the ranks as the cause of what the test sees."""

    def __str__(self):
        return f"\n{self.args[0]}"


# ---- the test's side -------------------------------------------------------------------------------------------------


class RankPool:
    """Ranks for tests, started on first use and kept. One instance per session: the fixture ``ranks``.

    ``filters`` are arguments of :func:`warnings.filterwarnings`, applied in order around every call on every rank.
    """

    def __init__(self, filters=(("error",),)):
        self._filters = list(filters)
        self._pools = {}
        atexit.register(self.close)

    def run(self, fn, *args, world_size=2, timeout=60.0, process_group=True):
        """Call ``fn(rank, world_size, *args)`` on every rank and return what each returned, in rank order.

        ``fn`` is a function at module level of a test module, and the arguments pickle. The ranks' start is not part of
        the time-out. ``process_group=False`` gives ranks with the environment of our launcher and *no* process group;
        ``fn`` must destroy what it initialises.

        Raises:
            The exception of the rank that failed first; RankDied; RankTimeout; LeakedState.
        """
        if not 1 <= world_size <= MAX_RANKS:
            raise ValueError(f"world_size={world_size}: the pool has 1 to {MAX_RANKS} ranks")
        if "<" in fn.__qualname__:
            raise ValueError(f"{fn.__qualname__} must be a function at module level: ranks import it by name")
        key = (world_size, process_group)
        pool = self._pools.get(key)
        try:
            if pool is None:
                pool = self._pools[key] = _SubPool(world_size, process_group, self._filters)
                pool.start()
            return pool.call(fn, args, timeout)
        except BaseException:  # Ctrl-C and pytest-timeout included: nobody knows what the ranks are doing now
            if pool is not None:
                pool.kill()
            self._pools.pop(key, None)
            raise

    def close(self):
        """End every rank and wait until it is gone. May be called twice."""
        for pool in self._pools.values():
            pool.kill()
        self._pools.clear()

    def pids(self):
        return [p.pid for pool in self._pools.values() for p in pool.processes if p.is_alive() and p.pid]


def sampled(often, *axes, slow=()):
    """Return all combinations of the axes as parameters: those of neither ``often`` nor ``slow`` are exhaustive."""
    cases = dict.fromkeys(itertools.product(*axes), pytest.mark.exhaustive)
    assert {*often, *slow} <= cases.keys()
    cases |= {**dict.fromkeys(often, ()), **dict.fromkeys(slow, pytest.mark.slow)}
    return [pytest.param(*case, marks=marks) for case, marks in cases.items()]


def on_ranks(world_size=2, **options):
    """Make a function at module level a test: its body runs on every rank of ``ranks.run(…, world_size, **options)``.

    The function takes rank and number of ranks first, then fixtures and parameters, which must pickle. With
    ``world_size=None`` the number of ranks is a parameter of the test, under the name of the second argument.
    """

    def decorate(fn):
        _, world, *names = inspect.signature(fn).parameters
        taken = ["ranks", *([world] if world_size is None else []), *names]

        @functools.wraps(fn)
        def test(**given):
            world_now = given[world] if world_size is None else world_size
            given["ranks"].run(test, *(given[name] for name in names), world_size=world_now, **options)

        keyword = inspect.Parameter.KEYWORD_ONLY
        test.__signature__ = inspect.Signature([inspect.Parameter(name, keyword) for name in taken])
        test.on_rank = fn
        return test

    return decorate


def ready_to_fork():
    """A process that has imported what ranks and train.py need: they are copies of it. An import takes 3 s."""
    context = multiprocessing.get_context("forkserver")
    needed = ["torch", "torch._dynamo", "hydra", "deepzero.training.command_line", "tests.distributed.pool"]
    context.set_forkserver_preload(needed)
    with mock.patch.dict(os.environ, OMP_NUM_THREADS="1"):  # before torch is imported there
        multiprocessing.forkserver.ensure_running()
    return context


class _SubPool:
    """``world_size`` processes that form one world."""

    def __init__(self, world_size, process_group, filters):
        self.world_size, self.process_group, self.filters = world_size, process_group, filters
        self.processes, self.pipes = [], []
        self.folder = Path(tempfile.mkdtemp(prefix="deepzero-ranks-"))
        self._meetings = 0

    def start(self):
        """Start all ranks at once and wait until each has answered."""
        context = ready_to_fork()
        meeting = self._new_meeting()
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            setup = (rank, self.world_size, meeting, self.process_group, self.filters, str(self._stack_file(rank)))
            process = context.Process(target=_rank_main, args=(theirs, *setup), daemon=True, name=f"rank-{rank}")
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)
        self._collect("starting", START_SECONDS)

    def call(self, fn, args, timeout):
        """Send one job to every rank and gather the answers."""
        # Keys of an earlier rendezvous would be in the way.
        meeting = None if self.process_group else self._new_meeting()
        job = pickle.dumps((fn, args, meeting))
        for rank, pipe in enumerate(self.pipes):
            try:
                pipe.send_bytes(job)
            except OSError as error:
                raise self._died(rank, f"before {fn.__qualname__}") from error
        return self._collect(fn.__qualname__, timeout)

    def kill(self):
        for process in self.processes:
            if process.is_alive():
                process.kill()
        for process in self.processes:
            process.join(10)
        for pipe in self.pipes:
            pipe.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _new_meeting(self):
        """Where ranks meet: a new folder, which only this user can read."""
        self._meetings += 1
        folder = self.folder / f"meeting-{self._meetings}"
        folder.mkdir()
        return str(folder)

    def _stack_file(self, rank):
        return self.folder / f"stack-{rank}"

    def _collect(self, what, timeout):
        """One answer from every rank, or the reason why there is none."""
        deadline = time.monotonic() + timeout
        answers, failures = {}, []
        waiting = {pipe: rank for rank, pipe in enumerate(self.pipes)}
        while waiting:
            left = deadline - time.monotonic()
            ready = multiprocessing.connection.wait(list(waiting), max(left, 0))
            if not ready:
                break
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    kind, *rest = pickle.loads(pipe.recv_bytes())
                except (EOFError, OSError):
                    failures.append((rank, self._died(rank, f"in {what}"), "(it left no traceback)"))
                else:
                    if kind == "returned":
                        answers[rank] = rest[0]
                    else:
                        failures.append((rank, _load_exception(kind, rest[0]), rest[1]))
            if failures:
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if failures:
            raise self._first_failure(failures, sorted(waiting.values()))
        if waiting:
            raise RankTimeout(f"{what}: no answer within {timeout:g} s.\n{self._stacks(sorted(waiting.values()))}")
        return [answers[rank] for rank in range(self.world_size)]

    def _first_failure(self, failures, silent):
        """The error to raise. A dead rank comes first: what the others report is then 'connection closed by peer'."""
        failures.sort(key=lambda failure: not isinstance(failure[1], RankDied))
        text = "\n".join(f"--- rank {rank} of {self.world_size} ---\n{trace}" for rank, _, trace in failures)
        if silent:
            text += "\n" + self._stacks(silent)
        error = failures[0][1]
        error.__cause__ = _Remote(text)
        return error

    def _died(self, rank, when):
        process = self.processes[rank]
        process.join(5)  # the pipe closes a moment before the exit status is there
        code = process.exitcode
        cause = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit status {code}"
        return RankDied(f"rank {rank} of {self.world_size} died {when}: {cause}")

    def _stacks(self, ranks):
        """Ask each rank where it stands; works even while it waits inside a collective."""
        for rank in ranks:
            with contextlib.suppress(OSError):
                os.kill(self.processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.3)
        texts = []
        for rank in ranks:
            path = self._stack_file(rank)
            stack = path.read_text() if path.exists() else ""
            texts.append(f"--- rank {rank} of {self.world_size} has not answered and is here ---\n{stack}")
        return "\n".join(texts)


def _load_exception(kind, data):
    if kind == "skipped":
        return pytest.skip.Exception(data)
    error = pickle.loads(data)
    return error if isinstance(error, BaseException) else RankError(str(error))


# ---- the rank's side -------------------------------------------------------------------------------------------------


def _rank_main(pipe, rank, world_size, meeting, process_group, filters, stack_file):
    """Life of a rank: set up, then one call after another until the test session closes the pipe."""
    me, size = str(rank), str(world_size)
    os.environ.update(RANK=me, LOCAL_RANK=me, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    os.environ.update(OMP_NUM_THREADS="1", TORCHELASTIC_RESTART_COUNT="0")
    # gloo's thread tries a lock that another thread of the rank holds while it sends. Whoever is woken by the message
    # and takes the sender's core leaves gloo's to try again for milliseconds: on few cores a third of all processor
    # time. Batch processes, which Linux alone has, take no core from others when they wake.
    if hasattr(os, "SCHED_BATCH"):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl-C reaches the whole terminal; the parent decides
    stacks = open(stack_file, "w")  # noqa: SIM115 (faulthandler keeps it as long as the process lives)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, stacks)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    answer = _attempt(lambda: _prepare(process_group, meeting), [])
    while True:
        with contextlib.suppress(BrokenPipeError):
            pipe.send_bytes(answer)
        try:
            job = pipe.recv_bytes()
        except EOFError:
            return
        answer = _attempt(lambda job=job: _run(job, rank, world_size), filters)


def _end_with_parent():
    """However the test session ends, no rank outlives it."""
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os._exit(1)


def _prepare(process_group, meeting):
    import torch

    from deepzero.comm.rendezvous import LAUNCH_FOLDER_VARIABLE, loopback_variables

    torch.set_num_threads(1)
    os.environ.update({LAUNCH_FOLDER_VARIABLE: meeting, **loopback_variables()})
    if process_group:
        from deepzero.comm.process_group import init_distributed

        init_distributed(backend="gloo", timeout_seconds=120)
    _keep_imports()


_imported = 0


def _keep_imports():
    """Modules stay for good, so no collection need look at theirs again: it would take 40 ms after every call."""
    global _imported
    if len(sys.modules) > _imported:
        _imported = len(sys.modules)
        gc.freeze()


def _run(job, rank, world_size):
    fn, args, meeting = pickle.loads(job)
    if meeting is not None:
        os.environ["DEEPZERO_LAUNCH_FOLDER"] = meeting
    with _guarded(fn.__qualname__):
        return getattr(fn, "on_rank", fn)(rank, world_size, *args)


def _attempt(call, filters):
    """The pickled outcome of ``call``: what it returned, or its exception and traceback."""
    try:
        with warnings.catch_warnings(), _background_errors():
            for arguments in filters:
                warnings.filterwarnings(*arguments)
            return pickle.dumps(("returned", call()))
    except pytest.skip.Exception as error:  # its class does not pickle
        return pickle.dumps(("skipped", str(error), ""))
    except BaseException as error:  # SystemExit is an answer too
        trace = _traceback(error)
        try:
            pickled = pickle.dumps(error)
            pickle.loads(pickled)
        except Exception:
            pickled = pickle.dumps(f"{type(error).__name__}: {error}")
        return pickle.dumps(("raised", pickled, trace))


def _traceback(error):
    """The traceback as text; for a bare ``assert``, with the local values that pytest would have shown."""
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    frame = error.__traceback__
    if isinstance(error, AssertionError) and frame is not None:
        while frame.tb_next is not None:
            frame = frame.tb_next
        values = (f"    {name} = {value!r}"[:400] for name, value in frame.tb_frame.f_locals.items())
        text += "with local values\n" + "\n".join(values)
    return text


@contextlib.contextmanager
def _background_errors():
    """Errors that Python would only print (in ``__del__``, in a thread) fail the call."""
    caught = []
    old = sys.unraisablehook, threading.excepthook
    sys.unraisablehook = lambda info: caught.append(_background_text(info))
    threading.excepthook = lambda info: caught.append(_background_text(info))
    try:
        yield
    finally:
        sys.unraisablehook, threading.excepthook = old
    if caught:
        raise LeakedState("an error in the background (a thread or a destructor):\n" + "\n".join(caught))


def _background_text(info):
    return "".join(traceback.format_exception(info.exc_type, info.exc_value, info.exc_traceback))


@contextlib.contextmanager
def _guarded(name):
    """Each call starts from the same state; what it leaves behind is undone where that is harmless, else refused.

    Undone: environment, working directory, seeds, subgroups (when the next call begins: then every rank has answered,
    and no peer still talks through them). Refused with :class:`LeakedState`: another default process group than
    before, default dtype, gradient mode, thread count.
    """
    import random

    import numpy as np
    import torch
    import torch.distributed as dist

    def state():
        return {
            "the default process group": dist.group.WORLD,
            "torch.get_default_dtype()": torch.get_default_dtype(),
            "torch.is_grad_enabled()": torch.is_grad_enabled(),
            "torch.get_num_threads()": torch.get_num_threads(),
        }

    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    if (recorder := sys.modules.get("deepzero.comm.flight_recorder")) is not None:
        recorder.observer().subgroups.clear()
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    before, environment, folder = state(), dict(os.environ), Path.cwd()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        gc.collect()  # runs destructors, and frees what hangs in cycles, before the next call
    _keep_imports()  # only of a call that has returned: what an exception holds on to is to be freed
    for key, value in state().items():
        if value is not before[key]:
            raise LeakedState(f"{name} left {key} = {value}, it was {before[key]}; put it back before returning")
