"""The launcher's own part: starting, waiting, signals, the device. With real ranks: tests/e2e/test_launch.py."""

import contextlib
import errno
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from deepzero import device
from deepzero.comm import process_group
from deepzero.comm.rendezvous import JOINED, LAUNCH_FOLDER_VARIABLE, STORE
from deepzero.config.run import RunConfig
from deepzero.config.strict import ConfigError
from deepzero.launch import launcher
from deepzero.launch.launcher import Interrupted, RankFailed, choose_device, default_nproc, launch
from deepzero.launch.rank_process import describe, write_report
from deepzero.training import command_line


def start(*scripts):
    """Shells in the place of ranks."""
    return [subprocess.Popen(["sh", "-c", script], start_new_session=True) for script in scripts]


def wait(*scripts):
    return launcher._wait(start(*scripts), launcher._Signals())


@contextlib.contextmanager
def ignored(*numbers):
    """By this process, and by those that it starts."""
    before = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def test_the_rank_that_fails_ends_the_others():
    ranks = start("exec sleep 60", "exit 3")
    assert launcher._wait(ranks, launcher._Signals()) == {1: 3}
    assert ranks[0].returncode == -signal.SIGTERM
    assert wait("kill -KILL $$", "exec sleep 60") == {0: -signal.SIGKILL}
    assert wait("exit 0") == {}


@pytest.mark.parametrize("received", [[signal.SIGTERM], [signal.SIGINT, signal.SIGINT]])
def test_ranks_that_do_not_listen_are_killed(received, monkeypatch):
    """After a while, and at once where Ctrl-C was pressed twice."""
    if len(received) == 1:
        monkeypatch.setattr(launcher, "GRACE_SECONDS", 0.1)
    signals = launcher._Signals()
    with ignored(signal.SIGTERM):
        ranks = start("exec sleep 60")
    signals.received += received
    launcher._wait(ranks, signals)
    assert ranks[0].returncode == -signal.SIGKILL


LOST, FULL = RuntimeError("Connection closed by peer"), OSError("disk full")


@pytest.mark.parametrize(("codes", "said", "told"), [
    ({1: 3}, [], "rank 1 ended with exit status 3"),
    # The save with which a rank wants to leave fails; what its neighbour then lost is no news.
    ({}, [LOST], None),
    ({}, [LOST, FULL], "rank 1 failed: OSError: disk full"),
])  # fmt: skip
def test_a_failure_beside_a_signal_is_told(codes, said, told, tmp_path, monkeypatch):
    def wait(ranks, signals):
        signals.received.append(signal.SIGINT)
        for rank, error in enumerate(said):
            write_report(tmp_path / "0", describe(error, rank))
        return codes

    monkeypatch.setattr(launcher, "_wait", wait)
    with pytest.raises(Interrupted, match="SIGINT") as caught:
        launcher._attempt(tmp_path / "0", {"parent": os.getpid()}, 2, {}, launcher._Signals())
    cause = caught.value.__cause__
    assert cause is None if told is None else cause.headline.startswith(told)


def test_one_ctrl_c_that_comes_twice_is_one(monkeypatch):
    """The terminal's own, and the same one passed on by `uv run`."""
    signals = launcher._Signals()
    for at in (10.0, 10.05, 10.9, 11.5):
        monkeypatch.setattr(launcher.time, "monotonic", lambda at=at: at)
        signals._note(signal.SIGINT, None)
        signals._note(signal.SIGTERM, None)
    assert signals.received.count(signal.SIGINT) == 2 and signals.received.count(signal.SIGTERM) == 4


def test_what_was_ignored_stays_ignored():
    """SIGHUP by nohup, and Ctrl-C for what a shell has started with ``&``."""
    before = signal.getsignal(signal.SIGTERM)
    with ignored(signal.SIGHUP):
        with launcher._Signals() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGTERM)
            assert signals.received == [signal.SIGTERM]
            with pytest.raises(Interrupted), signals.raised():
                raise AssertionError("a signal was noted before")
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    assert signal.getsignal(signal.SIGTERM) == before
    # While no rank runs, a signal raises.
    with launcher._Signals() as signals, pytest.raises(Interrupted, match="SIGTERM"), signals.raised():
        os.kill(os.getpid(), signal.SIGTERM)


def go(nproc=2, **settings):
    launch(__file__, "go", (), nproc=nproc, environment={}, **settings)


def test_a_rank_that_cannot_be_started(monkeypatch):
    real, started = subprocess.Popen, []

    def popen(command, **settings):
        if started:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        started.append(real(["sleep", "60"], **settings))
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", popen)
    with pytest.raises(RankFailed) as caught:
        go(3, max_restarts=2)
    said = "rank 1 of 3 could not be started: BlockingIOError: [Errno 11] Resource temporarily unavailable; `ulimit -a`"
    assert caught.value.headline.startswith(said)
    assert "Traceback" in caught.value.full and caught.value.frames == ""
    assert [process.returncode for process in started] == [-signal.SIGKILL]


def test_no_place_to_meet(monkeypatch):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/tmp/x")
    monkeypatch.setattr(tempfile, "TemporaryDirectory", mock.Mock(side_effect=full))
    with pytest.raises(RankFailed, match=r"no folder for the ranks to meet in: OSError: .*'/tmp/x'; TMPDIR can name"):
        go()


def meet_under(expected):
    """A rank: its launch lies where TMPDIR says, for as long as it lasts, and the store on no disk."""
    folder = Path(os.environ[LAUNCH_FOLDER_VARIABLE])
    assert folder.parents[1] == Path(expected)
    cleaner = os.open(folder.parent, os.O_RDONLY)
    with pytest.raises(BlockingIOError):  # systemd-tmpfiles asks in this way, and goes on
        fcntl.flock(cleaner, fcntl.LOCK_EX | fcntl.LOCK_NB)
    dist.FileStore(str(folder / STORE)).set("key", "value")
    if hasattr(os, "memfd_create"):
        assert os.readlink((folder / STORE).readlink()).startswith("/memfd:")
    sys.exit()  # which is no failure


def test_the_launch_lies_where_tmpdir_says(monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    other = tmp_path.with_name("other")  # the folder in which the command is typed has modules of the same names
    (other / "deepzero").mkdir(parents=True)
    for path in ("deepzero/__init__.py", "json.py"):
        (other / path).write_text("raise ImportError('not what the launcher has')", encoding="ascii")
    monkeypatch.chdir(other)
    before = set(os.listdir("/dev/fd"))
    launch(__file__, "meet_under", (str(tmp_path),), nproc=1, environment={})
    assert list(tmp_path.iterdir()) == [] and set(os.listdir("/dev/fd")) == before


@pytest.mark.parametrize("joins", [0, 1])
def test_a_failed_start_counts_as_a_restart_once_ranks_have_joined(joins, monkeypatch):
    attempts = []

    def attempt(folder, *_):
        attempts.append(folder)
        folder.mkdir()
        if len(attempts) <= joins:
            (folder / JOINED).touch()
        if len(attempts) < 3:
            raise RankFailed(f"attempt {len(attempts)}")

    said = []
    monkeypatch.setattr(launcher, "_attempt", attempt)
    with contextlib.nullcontext() if joins else pytest.raises(RankFailed, match="attempt 1"):
        go(max_restarts=3, on_restart=lambda number, error: said.append((number, error.headline)))
    assert said == ([(1, "attempt 1"), (2, "attempt 2")] if joins else [])
    assert len({*attempts}) == (3 if joins else 1)
    assert not attempts[0].parent.exists() and attempts[0].parent.name.startswith("deepzero-launch-")


def test_ranks_hear_nothing_of_an_older_launcher(monkeypatch):
    older = {"MASTER_ADDR": "far", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x", "GLOO_SOCKET_IFNAME": "eth0"}
    for name, value in {**older, "LOCAL_RANK": "7", "MASTER_KEY": "kept"}.items():
        monkeypatch.setenv(name, value)
    variables = launcher._rank_environment(1, 2, {"OMP_NUM_THREADS": "5"})
    assert not {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"} & set(variables)
    assert variables["GLOO_SOCKET_IFNAME"].startswith("lo")
    assert variables["NCCL_SOCKET_IFNAME"].startswith("=lo")
    assert [variables[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")] == list("1122")
    assert (variables["OMP_NUM_THREADS"], variables["MASTER_KEY"]) == ("5", "kept")


@pytest.fixture
def gpus(monkeypatch):
    """A machine with two GPUs; gets the devices that are chosen."""
    chosen = []
    for name in ("DEEPZERO_DEVICE", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_LOCALID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(process_group, "is_initialized", lambda: False)  # another test may have
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    with device.use(device.Accelerator("cuda")):
        yield chosen


@pytest.mark.parametrize(("variables", "expected"), [
    ({"LOCAL_RANK": "1"}, 1),
    ({"LOCAL_RANK": "0", "RANK": "2", "WORLD_SIZE": "4", "SLURM_LOCALID": "1", "SLURM_PROCID": "2"}, 0),
    ({"RANK": "3", "WORLD_SIZE": "4", "SLURM_LOCALID": "1", "SLURM_PROCID": "3"}, 1),
    ({"RANK": "2", "WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_RANK": "2"}, 0),
    ({}, 1),  # alone: the one that the caller has chosen
    ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "1"}, 1),
    ({"RANK": "1", "WORLD_SIZE": "4"}, "LOCAL_RANK is not set: rank 1 of 4 cannot know which of 2 GPUs"),
    # A script in a Slurm job has started the ranks: Slurm's word is about the script.
    ({"RANK": "1", "WORLD_SIZE": "4", "SLURM_LOCALID": "0", "SLURM_PROCID": "0"}, "LOCAL_RANK is not set"),
    ({"LOCAL_RANK": "2", "RANK": "2", "WORLD_SIZE": "4"}, "LOCAL_RANK=2: this process sees 2 GPUs only"),
    ({"RANK": "2", "SLURM_LOCALID": "2", "SLURM_PROCID": "2"}, "SLURM_LOCALID=2: this process sees 2 GPUs only"),
    ({"LOCAL_RANK": "", "RANK": "2", "WORLD_SIZE": "4"}, "LOCAL_RANK='' is not a rank's number .* sees 2 GPUs"),
    ({"LOCAL_RANK": "-1"}, "LOCAL_RANK='-1' is not a rank's number"),
    ({"RANK": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "two", "OMPI_COMM_WORLD_RANK": "2"}, "LOCAL_RANK='two' is not"),
])  # fmt: skip
def test_a_ranks_gpu(variables, expected, gpus, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if isinstance(expected, int):
        assert process_group.default_device() == torch.device("cuda", expected)
    else:
        with pytest.raises(ConfigError, match=expected):
            process_group.default_device()


def test_a_rank_of_torchrun_that_is_shown_its_own_gpu_alone(gpus, monkeypatch):
    """As the refusal above advises; four such ranks are on one machine."""
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    variables = {"LOCAL_RANK": "0", "RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "DEEPZERO_DEVICE": ""}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    def join(*_):
        raise ConfigError(f"joins on {process_group.default_device()}, {os.environ['DEEPZERO_DEVICE']}")

    monkeypatch.setattr(command_line, "read_config", lambda cfg: RunConfig())
    monkeypatch.setattr(command_line.run_folder, "join", join)
    with pytest.raises(ConfigError, match="joins on cuda:0, cuda"):
        command_line.CommandLine(print, Path(__file__))._train_here(None, "run", None)


def test_a_group_that_the_caller_has_joined(gpus, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(process_group, "is_initialized", lambda: True)
    world = SimpleNamespace(bound_device_id=None)  # without saying which device is its
    monkeypatch.setattr(process_group.dist, "group", SimpleNamespace(WORLD=world))
    process_group.init_distributed()
    assert gpus == [torch.device("cuda", 1)]


@pytest.fixture
def no_gpu(monkeypatch):
    """A CUDA build of torch on a machine without a usable GPU."""
    for name in ("DEEPZERO_DEVICE", "RANK", "LOCAL_RANK", "SLURM_LOCALID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(process_group, "is_initialized", lambda: False)  # another test may have
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    process_group.say_cpu.cache_clear()


def test_the_cpu_is_not_taken_in_silence(no_gpu, capsys, monkeypatch):
    monkeypatch.setattr(process_group, "is_initialized", lambda: True)
    monkeypatch.setattr(process_group.dist, "get_rank", lambda: 0)
    assert choose_device("auto", 2) == choose_device("auto", 2) == "cpu"
    process_group.init_distributed()
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and said.startswith("running on the CPU: torch ")
    assert "finds none to use (CUDA_VISIBLE_DEVICES=5)" in said
    with pytest.raises(ConfigError, match=r"launch\.device=cuda: torch .* finds none"):
        choose_device("cuda", 1)


@pytest.mark.parametrize(("variables", "named"), [
    ({"LOCAL_RANK": "3", "RANK": "3"}, "LOCAL_RANK=3"),
    ({"SLURM_LOCALID": "1", "SLURM_PROCID": "2", "RANK": "2"}, "SLURM_LOCALID=1"),
    ({"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_RANK": "2", "RANK": "2"}, "OMPI_COMM_WORLD_LOCAL_RANK=0"),
    ({"SLURM_LOCALID": "0", "SLURM_PROCID": "0", "RANK": "2"}, None),  # a word about the script that has started it
    ({"LOCAL_RANK": "3", "DEEPZERO_DEVICE": "cpu"}, None),
])  # fmt: skip
def test_a_rank_of_a_launch_does_not_take_the_cpu_by_itself(variables, named, no_gpu, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if named:
        told = rf"^{named}: this process sees 0 GPUs: torch .*CUDA_VISIBLE_DEVICES=5.* DEEPZERO_DEVICE=cpu$"
        with pytest.raises(ConfigError, match=told):
            process_group.default_device()
        monkeypatch.setattr(torch.version, "cuda", None)  # a build for the CPU has nothing to miss
    assert process_group.default_device().type == "cpu"


def test_a_laptop_with_torchs_usual_build_is_not_refused(no_gpu, monkeypatch):
    """Nothing tells of a GPU: neither a driver nor a variable; Slurm's word for none is none."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(Path, "exists", lambda path: False)
    for shown in (None, "", "-1", "NoDevFiles"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown) if shown is not None else monkeypatch.delenv(
            "CUDA_VISIBLE_DEVICES"
        )
        assert process_group.default_device().type == "cpu"
    monkeypatch.setattr(Path, "exists", lambda path: str(path) == "/dev/kfd")
    with pytest.raises(ConfigError, match="LOCAL_RANK=0: this process sees 0 GPUs"):
        process_group.default_device()


@pytest.mark.parametrize("variables", [{"DEEPZERO_DEVICE": "cpu"}, {"RANK": "1"}])
def test_the_cpu_is_taken_in_silence(variables, no_gpu, capsys, monkeypatch):
    """Where it is meant, and on all ranks but one."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert choose_device("auto", 2) == choose_device("cpu", 2) == "cpu"
    assert capsys.readouterr().err == ""


def test_a_cpu_build_beside_a_driver(no_gpu, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(Path, "exists", lambda path: str(path) == "/proc/driver/nvidia/version")
    assert "has an NVIDIA driver, and torch" in str(process_group.missing_gpu())
    monkeypatch.setattr(Path, "exists", lambda path: False)
    assert process_group.missing_gpu() is None


def test_too_few_gpus(gpus, capsys, monkeypatch):
    process_group.say_cpu.cache_clear()
    assert choose_device("auto", 2) == choose_device("cuda", 2) == "cuda"
    assert choose_device("auto", 3) == "cpu"
    assert "running on the CPU: 3 ranks want a GPU each, and this machine has 2." in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"launch\.device=cuda: 3 ranks want a GPU each, and this machine has 2"):
        choose_device("cuda", 3)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 8)
    assert [default_nproc(wanted) for wanted in ("auto", "cuda", "cpu")] == [8, 8, 2]
    monkeypatch.setenv("DEEPZERO_DEVICE", "cpu")
    assert [default_nproc(wanted) for wanted in ("auto", "cuda", "cpu")] == [2, 8, 2]
