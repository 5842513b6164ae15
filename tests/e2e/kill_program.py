"""Lives of ranks that are killed: a process that has imported everything forks them, one life after another.

Started by test_kills.py, not collected. It reads jobs from a file, one JSON object a line, forks the ranks of a life,
and writes to another file who was born and who has ended. It starts no thread and joins no group, so a fork is sound.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from deepzero.checkpoint import async_save, shard_file  # noqa: E402
from deepzero.checkpoint import checkpoint_dir as folders  # noqa: E402
from deepzero.comm import process_group  # noqa: E402
from deepzero.health import hang_report  # noqa: E402
from tests.distributed.training import make_model, one_step, start  # noqa: E402

DONE, WRONG, FAILED = 0, 3, 4
"""How a rank ends by itself; WRONG: a checkpoint has given other bits than were saved."""
SAVE_EVERY = 3
KEEP_LAST = 2


def slow_disk(seconds):
    """Writing takes its time, and so does everything around a commit: there are instants to be killed at."""
    put, replace, flush = shard_file.put, Path.replace, folders.flush_folder

    def slow_put(file, view):
        put(file, view[: len(view) // 2])
        time.sleep(seconds / 40)
        put(file, view[len(view) // 2 :])

    def slow_replace(self, target):
        time.sleep(seconds / 20)
        moved = replace(self, target)
        time.sleep(seconds / 20)
        return moved

    def slow_flush(path):
        time.sleep(seconds / 20)
        flush(path)

    # Those who can wait have thirty seconds, and three.
    async_save.GONE_SECONDS, async_save.BEAT_SECONDS, hang_report.ROLL_CALL_SECONDS = 2.0, 0.5, 1.0
    shard_file.put, folders.flush_folder = slow_put, slow_flush
    Path.replace = slow_replace


def live(job, rank):
    """One rank of one life: go on from the newest checkpoint, compare with the reference, train and save."""
    settings = {"stage": job["stage"], "bucket": 900, "precision": job["precision"], "comm": {"timeout_seconds": 60}}
    if job.get("files"):
        files = {"device": "nvme", "nvme_path": job["files"]}
        pipelined = {**files, "buffer_count": 12, "pipeline_read": True, "pipeline_write": True}
        settings["zero"] = {"offload_optimizer": pipelined} | ({"offload_param": files} if job["stage"] == 3 else {})
    engine = start(make_model(), **settings)
    world, folder = job["world"], Path(job["folder"])
    record = Path(job["record"]) if job.get("record") else None
    reference = None if record else json.loads(Path(job["reference"]).read_text())
    if record is None:
        Path(job["alive"], f"joined{rank}").touch()
        slow_disk(job["slow"])
        if folders.latest_tag(folder) is not None:
            _, client = engine.load_checkpoint(folder)
            found = engine.global_steps, client["step"], engine.params_sha256()
            if found != (client["step"], client["step"], reference["sha256"][str(client["step"])]):
                print(f"loaded {found}, which is not the reference's step")
                return WRONG
        Path(job["alive"], f"loaded{rank}").touch()
    losses, hashes = {}, {}
    while engine.global_steps < job["until"]:
        step = engine.global_steps
        losses[step + 1] = one_step(engine, rank, world, step).loss
        hashes[step + 1] = engine.params_sha256() if record else ""
        if record is None:
            if losses[step + 1] != reference["losses"][str(step + 1)]:
                print(f"step {step + 1}: loss {losses[step + 1]}, not the reference's")
                return WRONG
            if (step + 1) % SAVE_EVERY == 0:
                save(engine, folder, step + 1)
    engine.wait_for_checkpoint()
    if record is not None and rank == 0:
        record.write_text(json.dumps({"losses": losses, "sha256": hashes}))
    engine.destroy()
    return DONE


def save(engine, folder, step):
    """By turns in the background and not."""
    behind = step // SAVE_EVERY % 2 == 0
    engine.save_checkpoint(folder, f"step_{step}", {"step": step}, asynchronous=behind, keep_last=KEEP_LAST)


def born(job, rank):
    """The child of a fork; ends as a program does, with what is registered for its end."""
    log = os.open(Path(job["logs"]) / f"life{job['life']}-rank{rank}.txt", os.O_WRONLY | os.O_CREAT, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(job["world"]))
    os.environ["DEEPZERO_LAUNCH_FOLDER"] = job["meeting"]
    status = FAILED
    try:
        torch.set_num_threads(1)
        status = live(job, rank)
        process_group.shutdown()
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main(jobs, events):
    """Fork what the jobs say, and tell who has ended, until a job says that it is over."""
    parent = os.getppid()
    handed = 0
    assert len(os.listdir("/proc/self/task")) == 1, "a fork of a process with threads is not sound"

    def tell(**event):
        with events.open("a") as file:
            file.write(json.dumps(event) + "\n")

    tell(ready=True)
    while os.getppid() == parent:
        lines = jobs.read_text().splitlines()
        for line in lines[handed:]:
            job = json.loads(line)
            if "end" in job:
                return
            pids = []
            for rank in range(job["world"]):
                if (pid := os.fork()) == 0:
                    born(job, rank)
                pids.append(pid)
            tell(life=job["life"], pids=pids)
        handed = len(lines)
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            pid = 0
        if pid:
            tell(ended=pid, status=os.waitstatus_to_exitcode(status))
        else:
            time.sleep(0.005)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
