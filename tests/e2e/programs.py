"""Programs for ranks that fail in every way a rank can fail. Started by test_launch.py, not collected."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from deepzero.config.strict import ConfigError  # noqa: E402
from deepzero.launch import launcher, rank_process  # noqa: E402
from deepzero.launch.rank_process import on_stop_request  # noqa: E402

if "RANK" in os.environ:  # the launcher's own process needs none of these, and an import of torch takes seconds
    import torch

    from deepzero.comm import process_group
    from deepzero.comm.chaos import Chaos
    from deepzero.comm.collectives import Communicator
    from deepzero.comm.ledger import Ledger
    from deepzero.config.engine import ChaosConfig


def misbehave(how, folder):
    """Join the group, leave a sign of life, then do what ``how`` says."""
    if how == "never":
        raise ValueError("no rank ever joins")
    process_group.init_distributed(timeout_seconds=6 if how == "freeze" else 600)
    rank, folder = process_group.rank(), Path(folder)
    (folder / "folder").write_text(os.environ.get("DEEPZERO_LAUNCH_FOLDER", ""), encoding="utf-8")
    (folder / f"alive{rank}").write_text(str(os.getpid()), encoding="ascii")
    if rank == 1 and how == "raise":
        raise ValueError("rank 1 has had enough")
    if rank == 1 and how == "exit":
        sys.exit(5)
    if how == "config":
        raise ConfigError("zero.stage=7: no such stage")
    while how in ("raise", "exit"):
        process_group.broadcast_object("are you there?")  # rank 0 loses its peer here
    while how == "talk":
        process_group.all_gather_object("are you there?")
        time.sleep(0.01)
    act = {
        "sleep": lambda: time.sleep(600), "again": lambda: fail_twice(rank, folder), "note": lambda: leave_a_note(rank),
        "lose": lambda: train(rank, signal.SIGKILL), "freeze": lambda: train(rank, signal.SIGSTOP),
        "save": lambda: save_slowly(folder), "save and fail": lambda: save_slowly(folder),
        "save and lose": lambda: save_slowly(folder, lose=True),
        "stop": lambda: wait_for_the_stop(rank, folder, False),
        "stubborn": lambda: wait_for_the_stop(rank, folder, True),
    }  # fmt: skip
    act[how]()
    if how == "save and fail":
        raise ValueError("all ranks alike")
    process_group.shutdown()


def save_slowly(folder, lose=False):
    """Begin to save, and end; ``lose``: the save fails after that."""
    import deepzero
    from deepzero.checkpoint import shard_file

    put = shard_file.put

    def slow(file, view):
        time.sleep(0.2)
        if lose:
            raise OSError(5, "Input/output error")
        put(file, view)

    shard_file.put = slow
    settings = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "Adam"}}
    engine, *_ = deepzero.initialize(model=torch.nn.Linear(3, 3), config=settings)
    engine.save_checkpoint(folder / "checkpoints", tag="last", asynchronous=True)


def train(rank, number):
    """Steps with a collective each; in the middle of the fifth, rank 1 gets the signal."""
    comm = Communicator(torch.device("cpu"), Ledger(), Chaos(ChaosConfig(), rank))
    for step in range(1, 100):
        comm.flight_recorder.step, comm.flight_recorder.position = step, "backward"
        if (rank, step) == (1, 5):
            os.kill(os.getpid(), number)
        parts = [torch.full((1000,), float(rank)) for _ in range(comm.world_size)]
        comm.exchange("gradients.reduce_scatter", parts, [torch.empty(1000) for _ in parts], where="bucket 0").wait()


def fail_twice(rank, folder):
    """Killed in the first attempt, an exception in the second, success in the third."""
    attempt = rank_process.restart_count()
    with (folder / f"attempts{rank}").open("a", encoding="ascii") as file:
        file.write(f"{attempt}\n")
    process_group.barrier()
    if rank == 1 and attempt == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1 and attempt == 1:
        raise ValueError("not yet")
    process_group.barrier()


def leave_a_note(rank):
    """The first attempt leaves a note and fails, the others read it."""
    text = f"rank {rank}, restart {rank_process.restart_count()}, note {rank_process.recall('run_dir')}\n"
    os.write(1, text.encode())  # in one piece, since the ranks share the pipe
    process_group.barrier()  # nobody writes before everybody has read
    rank_process.remember("run_dir", f"written by rank {rank}")
    process_group.barrier()
    if rank_process.restart_count() < 2:
        raise ValueError("try again")


def wait_for_the_stop(rank, folder, stubborn):
    """Go on until a rank was asked to stop, then end in order; a stubborn one never does."""
    asked = threading.Event()
    on_stop_request(asked.set, grace_seconds=5.0 if stubborn else 20.0)
    (folder / f"ready{rank}").touch()
    while stubborn:
        time.sleep(600)
    while not any(process_group.all_gather_object(asked.is_set())):
        time.sleep(0.05)
    process_group.barrier()
    (folder / f"left{rank}").touch()


def pause(number, error):
    """Long enough for a signal between two attempts."""
    print(f"before restart {number}", flush=True)
    time.sleep(60)


def main():
    """``python programs.py HOW FOLDER``: launch two ranks, and say how it ended; under torchrun, be one of them."""
    here, (how, folder) = str(Path(__file__).resolve()), sys.argv[1:]
    if launcher.under_launcher():
        rank_process.run_here(misbehave, how, folder)
        return
    restarts = {"max_restarts": 3} if how in ("again", "never", "pause", "config") else {}
    restarts |= {"on_restart": pause} if how == "pause" else {}
    arguments = ("again" if how == "pause" else how, folder)
    environment = {"OMP_NUM_THREADS": "1", "DEEPZERO_DEVICE": "cpu"}
    try:
        launcher.launch(here, "misbehave", arguments, nproc=2, environment=environment, **restarts)
    except launcher.Interrupted as error:
        print(f"interrupted by {error.signum}")
    except (launcher.RankFailed, ConfigError) as error:
        print(f"{type(error).__name__}: {error}")
    else:
        print("done")


if __name__ == "__main__":
    main()
