"""Small trace files whose figures can be worked out by hand. Times are given in milliseconds."""

import json
from pathlib import Path
from typing import Any

THREAD, LANE = 1, 1_000_000_000


def event(name: str, begin: float, end: float, cat: str, tid: int = THREAD, **args: Any) -> dict[str, Any]:
    times = {"ts": begin * 1000, "dur": (end - begin) * 1000}
    return {"ph": "X", "name": name, "cat": cat, "pid": 9, "tid": tid, **times, "args": args}


def ours(name: str, begin: float, end: float) -> dict[str, Any]:
    """A range of the training thread."""
    return event(f"zero.{name}", begin, end, "user_annotation")


def flight(name: str, launch: tuple[float, float], wait: tuple[float, float], place: str = "x") -> list[dict[str, Any]]:
    """A collective with its launch and its wait; ``name`` is ``bucket N|NOTE``."""
    bucket, note = name.split("|")
    text = f"{bucket} ({place}) {note}".strip()
    return [
        ours(f"launch {text}", *launch),
        ours(f"wait {text}", *wait),
        event(f"zero.in_flight {text}", launch[0], wait[1], "communication", LANE),
    ]


def step(number: int, begin: float, end: float) -> dict[str, Any]:
    return event(f"ProfilerStep#{number}", begin, end, "user_annotation")


def save(path: Path, *events: Any, rank: int = 0) -> Path:
    """A file with these events, lists of them flattened."""
    flat = [e for item in events for e in (item if isinstance(item, list) else [item])]
    content = {"schemaVersion": 1, "distributedInfo": {"rank": rank, "world_size": 2}, "traceEvents": flat}
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def cpu_trace(path: Path) -> Path:
    """One step of 100 ms. Stood still: 1 + 9 (gather 5), 2 (gather 4), 1 + 10 (reduction 5): 23 ms; copies 5 ms.

    Under way: 0 to 20 (gathers), 50 to 90 (the reduction), copy 92 to 97: 65 ms. Hidden: 65 - 28 = 37 ms.
    """
    return save(
        path,
        step(3, 0, 100),
        [ours("forward", 0, 40), ours("backward", 40, 80), ours("boundary", 80, 91), ours("step", 91, 99)],
        flight("bucket 5|parameters.all_gather_forward", (0, 1), (1, 10), "wte"),
        flight("bucket 4|parameters.all_gather_forward prefetch", (10, 10), (18, 20), "blocks.0"),
        flight("bucket 5|gradients.reduce_scatter", (50, 51), (80, 90), "wte.weight"),
        ours("H2D bucket 5 (wte.weight) offload.parameters_to_device", 92, 97),
        # Operators: 30 ms on this thread, of which 2 lie in a wait, and 10 beside them on another one.
        [event("aten::mm", 8, 38, "cpu_op"), event("aten::mm", 30, 40, "cpu_op", 2)],
        event("c10d::send", 0, 1, "cpu_op"),
    )


def gpu_trace(path: Path) -> Path:
    """One step of 100 ms on a GPU. Kernels 10 to 40 and 45 to 80, NCCL 5 to 20, 38 to 50 and 78 to 90, a copy 92 to 96.

    Under way: 15 + 12 + 12 + 4 = 43 ms. Computing: 65 ms. Exposed: 5 to 10, 40 to 45, 80 to 90, 92 to 96: 24 ms.
    """

    def kernel(name: str, begin: float, end: float, number: int, cat: str = "kernel") -> dict[str, Any]:
        return event(name, begin, end, cat, 7, correlation=number)

    def launch(text: str, begin: float, number: int) -> list[dict[str, Any]]:
        call = event("cudaLaunchKernel", begin + 0.1, begin + 0.2, "cuda_runtime", correlation=number)
        return [ours(text, begin, begin + 1), call]

    gather, reduction = "parameters.all_gather_forward", "gradients.reduce_scatter"
    return save(
        path,
        step(7, 0, 100),
        [ours("forward", 0, 20), ours("backward", 20, 60), ours("boundary", 60, 99)],
        launch(f"launch bucket 3 (wte) {gather}", 1, 1),
        launch(f"launch bucket 2 (blocks.0) {gather}", 15, 2),
        launch(f"launch bucket 3 (wte.weight) {reduction}", 55, 3),
        launch("H2D bucket 3 (wte.weight) offload.parameters_to_device", 70, 4),
        kernel("ncclDevKernel_AllGather_RING_LL", 5, 20, 1),
        kernel("ncclDevKernel_AllGather_RING_LL", 38, 50, 2),
        kernel("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", 78, 90, 3),
        kernel("Memcpy HtoD (Pinned -> Device)", 92, 96, 4, "gpu_memcpy"),
        [kernel("gemm", 10, 40, 11), kernel("gemm", 45, 79, 12), kernel("Memset (Device)", 79, 80, 13, "gpu_memset")],
    )
