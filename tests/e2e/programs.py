"""Programs for ranks that fail in every way a rank can fail. Started by test_launch.py, not collected."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from deepzero.comm import launcher, process_group, rank_process  # noqa: E402
from deepzero.config.parse import ConfigError  # noqa: E402


def misbehave(how: str, folder: str) -> None:
    """Join the group, leave a sign of life, then do what ``how`` says."""
    process_group.init_distributed()
    rank = process_group.rank()
    (Path(folder) / f"alive{rank}").write_text(str(os.getpid()), encoding="ascii")
    if rank == 1:
        if how == "raise":
            raise ValueError("rank 1 has had enough")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exit":
            sys.exit(5)
    if how == "config":
        raise ConfigError("zero.stage=7: no such stage")
    while how in ("raise", "kill", "exit"):
        process_group.broadcast_object("are you there?")  # rank 0 loses its peer here
    if how == "sleep":
        time.sleep(600)
    process_group.shutdown()


def main() -> None:
    """``python programs.py HOW FOLDER``: launch two ranks, and say how it ended; under torchrun, be one of them."""
    here, (how, folder) = str(Path(__file__).resolve()), sys.argv[1:]
    if launcher.under_launcher():
        rank_process.run_here(misbehave, how, folder)
        return
    environment = {"OMP_NUM_THREADS": "1", "DEEPZERO_DEVICE": "cpu"}
    try:
        launcher.launch(here, "misbehave", (how, folder), nproc=2, environment=environment)
    except launcher.Interrupted as error:
        print(f"interrupted by {error.signum}")
    except (launcher.RankFailed, ConfigError) as error:
        print(f"{type(error).__name__}: {error}")
    else:
        print("done")


if __name__ == "__main__":
    main()
