"""States in files against the disk itself, in one process: ``python -m tools.bench.files FOLDER``.

One rank steps on a stack of linear layers whose optimizer states lie in a file in FOLDER. In turn with it one thread
reads as many bytes as the step reads, then writes as many as it writes, by direct I/O, from end to end of another
nameless file there: what a program reaches that does nothing else. The bar compares medians: bytes a second, over those
of the disk alone.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import torch

import deepzero
from deepzero.comm import process_group
from deepzero.utils.closed_pipe import exit_with
from tools.bench.report import print_machine, table
from tools.bench.timing import interleaved, multiple_of, parser_of, timed

BAR = 0.85
PIECE_BYTES = 16 << 20


def sequential(folder: Path, read: int, written: int) -> Callable[[], None]:
    """Read so many bytes, then write so many, one piece after the other."""
    file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - it lives as long as the function
    os.posix_fallocate(file.fileno(), 0, max(read, written))
    fcntl.fcntl(file.fileno(), fcntl.F_SETFL, fcntl.fcntl(file.fileno(), fcntl.F_GETFL) | os.O_DIRECT)
    memory = memoryview(mmap.mmap(-1, PIECE_BYTES))

    def run() -> None:
        for call, total in ((os.preadv, read), (os.pwritev, written)):
            for start in range(0, total, PIECE_BYTES):
                call(file.fileno(), [memory[: min(PIECE_BYTES, total - start)]], start)

    return run


def engine_of(folder: Path, layers: int, width: int, bucket: int, buffers: int) -> deepzero.Engine:
    """One rank with states in files, both pipelines on."""
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(layers)))
    files = {"device": "nvme", "nvme_path": str(folder), "buffer_count": buffers, "pipeline_read": True}
    zero = {"stage": 2, "reduce_bucket_size": bucket, "offload_optimizer": {**files, "pipeline_write": True}}
    settings = {
        "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }  # fmt: skip
    return deepzero.initialize(model=model, config=settings)[0]


def main(given: Sequence[str] | None = None) -> int:
    """The command; 1 where the bar is missed."""
    parser = parser_of(
        "files", __doc__, layers=(24, "linear layers"), width=(2048, "their width"), rounds=(5, "that are counted"),
        bucket=(8 << 20, "elements of a bucket at the most"),
    )  # fmt: skip
    parser.add_argument("--buffers", type=multiple_of(1, least=12), default=24, help="buffer_count (default 24)")
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="on the disk that is measured")
    asked = parser.parse_args(given)
    if not asked.folder.is_dir():
        parser.error(f"{asked.folder} is no folder")
    logging.getLogger("deepzero").setLevel(logging.ERROR)
    engine = engine_of(asked.folder, asked.layers, asked.width, asked.bucket, asked.buffers)
    batch = torch.randn(1, asked.width, dtype=torch.bfloat16)
    inside = list[float]()

    def step() -> None:
        engine.backward(engine(batch).float().square().mean())
        engine.zero.optimizer_shard.drain_grads()
        inside.append(timed(engine.step))

    step()
    files = {kind: leg["bytes"] for kind, leg in engine.zero.offload_report().items() if kind.startswith("file_")}
    # Sums were written in the backward pass, which is not in the time.
    read, written = int(files["file_read"]), int(files["file_write"] - files["file_read"] // 4)
    inside.clear()
    runs = {"step": step, "disk": sequential(asked.folder, read, written)}
    seconds = interleaved(runs, asked.rounds)
    seconds["step"] = inside[-asked.rounds :]
    print_machine(f"{asked.layers} layers of {asked.width} x {asked.width}, 1 rank")
    moved, medians = read + written, {name: median(values) for name, values in seconds.items()}
    rows = [[name, f"{value:.3f}", f"{moved / value / 1e9:.2f}"] for name, value in medians.items()]
    print(table(["", "seconds", "GB/s"], rows))
    ratio = medians["disk"] / medians["step"]
    print(f"{moved / 1e9:.2f} GB a step; the step reaches {ratio:.2f} of the disk alone, at least {BAR} is asked for")
    engine.destroy()
    process_group.shutdown()
    return int(ratio < BAR)


if __name__ == "__main__":
    exit_with(main)
