"""Notes that survive a restart, the number of the restart, and what a rank may ask for on SIGTERM."""

import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from deepzero.comm import rendezvous
from deepzero.launch import rank_process
from deepzero.launch.rank_process import recall, remember, restart_count
from tests import ROOT


@pytest.fixture
def agent(tmp_path, monkeypatch):
    """The folder of torchrun's agent, as local rank 0 finds it in its second attempt."""
    file = tmp_path / "none_x1y2" / "attempt_1" / "0" / "error.json"
    file.parent.mkdir(parents=True)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.delenv(rank_process.RESTART_VARIABLE, raising=False)
    return tmp_path / "none_x1y2"


def test_a_note(agent, monkeypatch):
    assert recall("run_dir") is None
    remember("run_dir", "out/é")
    remember("run_dir", "out/è")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(agent / "attempt_2" / "1" / "error.json"))
    assert recall("run_dir") == "out/è"
    remember("run_dir", "from another rank")
    assert recall("run_dir") == "out/è"
    assert sorted(path.name for path in agent.iterdir()) == ["attempt_1", "deepzero-run_dir"]
    assert recall("step") is None


def test_bad_names(agent):
    for name in ("", "a/b", "../x", "a b"):
        with pytest.raises(ValueError, match="name="):
            remember(name, "x")


@pytest.mark.parametrize(("variable", "value"), [
    ("TORCHELASTIC_ERROR_FILE", ""),
    ("TORCHELASTIC_ERROR_FILE", "/dev/null"),
    ("TORCHELASTIC_ERROR_FILE", "/somewhere/else/0/error.json"),
    ("DEEPZERO_RESTART", "0"),  # our launcher outlives its ranks, and needs no notes
])  # fmt: skip
def test_no_notes_without_torchrun(variable, value, agent, monkeypatch):
    monkeypatch.setenv(variable, value)
    remember("run_dir", "x")
    assert recall("run_dir") is None


def test_restart_count(monkeypatch):
    for name in ("DEEPZERO_RESTART", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    assert restart_count() == 0
    for name, count in (("TORCHELASTIC_RESTART_COUNT", 2), ("DEEPZERO_RESTART", 3)):
        monkeypatch.setenv(name, str(count))
        assert restart_count() == count


def test_a_request_to_leave_in_order():
    for seconds in (-1.0, 25.1, 30.0, float("nan")):  # the agent would not grant it
        with pytest.raises(ValueError, match="killed 30 s after SIGTERM"):
            rank_process.on_stop_request(lambda: None, seconds)
        assert rank_process._STOP_REQUESTS.callback is None
    rank_process.on_stop_request(print, 3.0)
    assert (rank_process._STOP_REQUESTS.callback, rank_process._STOP_REQUESTS.grace_seconds) == (print, 3.0)
    rank_process.on_stop_request(None)
    assert rank_process._STOP_REQUESTS.callback is None


def test_ranks_agree_on_a_fresh_part_of_an_old_store():
    """Whatever earlier attempts have left: questions, answers, signatures, of more ranks than there are now."""
    patience = timedelta(seconds=20)
    server = rendezvous.host_store(0, patience)

    def attempt(world, late):
        parts = {}

        def join(rank):
            time.sleep(0.1 if rank == late else 0)
            client = dist.TCPStore("127.0.0.1", server.port, is_master=False)
            parts[rank] = rendezvous.fresh(client, rank, world, patience)

        with ThreadPoolExecutor(world) as pool:
            list(pool.map(join, range(world)))
        assert sorted(parts) == list(range(world)) and not parts[0].check(["address"])
        parts[world - 1].set("address", "new")
        assert all(part.get("address") == b"new" for part in parts.values())

    for world, late in ((3, 0), (3, 2), (2, 0), (2, 1), (4, 1), (1, 0)):
        attempt(world, late)
    with pytest.raises(RuntimeError, match=r"ranks \[1\] have not come within 0.3 s"):
        rendezvous.fresh(server, 0, 2, timedelta(seconds=0.3))


def test_whose_store_is_shared(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert rendezvous.shared_by_attempts()
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    assert not rendezvous.shared_by_attempts()


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="there the store is a file")
def test_a_store_in_memory_outlives_the_launchers_folder(tmp_path, monkeypatch):
    memory, folder = os.memfd_create("store"), tmp_path / "launch"
    folder.mkdir()
    (folder / rendezvous.STORE).symlink_to(f"/proc/self/fd/{memory}")
    for name, value in {rendezvous.LAUNCH_FOLDER_VARIABLE: str(folder), "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    store, *_ = rendezvous.meet(timedelta(seconds=1))
    shutil.rmtree(folder)  # as what cleans /tmp does
    store.set("key", "value")
    assert store.get("key") == b"value"
    os.close(memory)


PROGRAM = """
import signal, sys, time
for name in sys.argv[1:]:
    signal.signal(signal.Signals[name], signal.SIG_IGN)  # as `nohup` and a shell's `&` do it
from deepzero.launch import rank_process
asked = []
def ask():
    asked.append(1)
    print("asked", flush=True)
    {inside}
rank_process.watch(None, lambda reason: print(reason, flush=True))
{before}
print("ready", flush=True)
while not (asked and {leaves}):
    time.sleep(0.01)
time.sleep(0.2)
print("left", flush=True)
"""
REQUEST = "rank_process.on_stop_request(ask, 0.5)"


WORKER = """
import os
worker = os.fork()
if not worker:
    time.sleep(20)
    os._exit(0)
time.sleep(0.3)
os.kill(worker, signal.SIGTERM)  # as multiprocessing.Pool ends its workers
assert os.waitpid(worker, 0)[1] == signal.SIGTERM
asked.append(1)
"""
"""A signal to a forked child is none for this rank."""
SLOW, LONG = pytest.mark.slow, REQUEST.replace("0.5", "20")


def case(*given, marks=pytest.mark.exhaustive):
    return pytest.param(*given, marks=marks)


@pytest.mark.parametrize(("before", "inside", "leaves", "signals", "said", "status"), [
    ("", "", True, ["ignored HUP", "ignored INT", "TERM"], ["stopped by SIGTERM"], 143),
    (REQUEST, "", True, ["TERM"], ["asked", "left"], 0),
    (REQUEST, "", False, ["TERM"], ["asked", "stopped by SIGTERM; it had not left 0.5 s later"], 143),
    (WORKER, "", True, [], ["left"], 0),
    case(REQUEST, "", True, ["INT"], ["asked", "left"], 0),
    case(REQUEST, "", True, ["HUP"], ["stopped by SIGHUP"], 129),
    case(LONG, "", False, ["TERM", "2", "TERM"], ["asked", "stopped by SIGTERM"], 143),
    case(REQUEST, "", True, ["TERM", "TERM"], ["asked", "left"], 0),  # by Slurm, and passed on by the launcher
    case(LONG, "", False, ["TERM", "HUP"], ["asked", "stopped by SIGHUP"], 129),
    case(LONG, "sys.exit()", False, ["TERM"], ["asked", "stopped by SIGTERM; its callback failed"], 143, marks=SLOW),
])  # fmt: skip
def test_signals(before, inside, leaves, signals, said, status):
    code = PROGRAM.format(before=before, inside=inside, leaves=leaves)
    ignored = [f"SIG{name[-3:]}" for name in signals if name.startswith("ignored")]
    command, pipes = [sys.executable, "-c", code, *ignored], {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, **pipes, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}) as rank:
        try:
            assert rank.stdout.readline() == "ready\n"
            for name in signals:
                if name.isdigit():
                    time.sleep(int(name))
                else:
                    rank.send_signal(signal.Signals[f"SIG{name.removeprefix('ignored ')}"])
                    time.sleep(0.1)  # two at once might arrive as one
            assert rank.wait(30) == status
            assert rank.stdout.read().splitlines() == said
        finally:
            rank.kill()
