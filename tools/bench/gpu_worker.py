"""One contender of ``tools.bench.gpu`` in a process of its own: ``python -m tools.bench.gpu_worker SPEC.json``.

The order is the same for everybody:

    build       the model on the device from the seed, then the engine over it; *build seconds, build peak*
    warm up     untimed steps: first touches, compiled kernels, the recorded plan of stage 3
    time        blocks of steps. Only before and after a block the program waits for the device: a copy that runs into
                the next step is part of the design, and a wait after every step would take that away
    close       what the host holds; a delayed update is finished

After every one of them ``RESULT.json`` is written anew, so that a process that is ended in the middle has still said
how far it came; at the end the same JSON is printed. Should the host run out of memory, the kernel ends this process
and not the one that waits for it.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tools.bench.engines import deepspeed_of, step_of
from tools.bench.gpu_offload import engine_config, parameters
from tools.bench.group import leave
from tools.bench.rank import end_with_parent, peak_resident, pick_device, reset_peak
from tools.bench.workload import Workload, batch, build_model, make_tokens, tokens_needed

PLAIN_BYTES = 20
"""For each parameter on the device without offload: compute 2, gradients 4, master 4, moments 8, and what building it
in fp32 leaves over."""


class Note:
    """What is known so far, on the disk."""

    def __init__(self, file: Path) -> None:
        self.file, self.facts = file, dict[str, Any](done=False)

    def write(self, **more: Any) -> None:
        """Add facts, and replace the file in one go."""
        self.facts.update(more)
        partial = self.file.with_suffix(".partial")
        partial.write_text(json.dumps(self.facts))
        partial.replace(self.file)


class HostMemory:
    """How much of the host's memory this process has taken, as the system's own account says; pinned pages too."""

    def __init__(self) -> None:
        from deepzero.offload.pinned_arena import available_host_bytes

        self._read = available_host_bytes
        self.before = available_host_bytes() or 0
        self.taken = 0

    def look(self) -> int:
        """The most so far."""
        self.taken = max(self.taken, self.before - (self._read() or 0))
        return self.taken


def build(spec: dict[str, Any], work: Workload, device: torch.device) -> Any:
    """An engine of either library."""
    config = engine_config(work, spec["zero"], spec.get("bf16_sums", False))
    if spec["library"] == "deepspeed":
        return deepspeed_of(_model(None, work, device), config, device)
    import deepzero

    return deepzero.initialize(model=_model(spec.get("parts_on"), work, device), config=config)[0]


def _model(parts_on: str | None, work: Workload, device: torch.device) -> nn.Module:
    """The model, drawn on the device: a CPU would take a minute for some billions of values."""
    if parts_on is None:
        with device:
            return build_model(work)
    from deepzero.zero import Init

    with Init(dtype=torch.bfloat16, remote_device="cpu" if parts_on == "cpu" else None), device:
        return build_model(work)


def too_large(spec: dict[str, Any], work: Workload, device: torch.device) -> str | None:
    """Why a contender without offload cannot run on this device, or None."""
    if device.type != "cuda" or "offload_optimizer" in spec["zero"]:
        return None
    needed, total = PLAIN_BYTES * parameters(work), torch.cuda.get_device_properties(device).total_memory
    if needed <= 0.9 * total:
        return None
    return f"{needed / 2**30:.0f} GiB on the device without offload, which has {total / 2**30:.0f}"


def run(spec: dict[str, Any], note: Note) -> None:
    """Everything; see the module's docstring."""
    work = Workload(**spec["work"])
    device = pick_device(work, 0)
    if reason := too_large(spec, work, device):
        note.write(done=True, skipped=reason)
        return
    if device.type == "cuda":
        torch.cuda.init()  # its peaks cannot be reset before
    host, started = HostMemory(), time.perf_counter()
    reset_peak(device)
    engine = build(spec, work, device)
    _synchronize(device)
    facts = {"build_seconds": time.perf_counter() - started, "build_device_bytes": _device_peak(device)}
    note.write(parameters=parameters(work), host_bytes=host.look(), **facts, **_arena(spec, engine))
    if device.type == "cuda":
        torch.cuda.empty_cache()
        reset_peak(device)
    _steps(spec, work, device, engine, note, host)
    if spec["library"] == "deepzero":
        engine.finish_delayed_update()
        note.write(memory=engine.report()["memory"])
    note.write(done=True, host_bytes=host.look(), resident_bytes=peak_resident())


def _steps(
    spec: dict[str, Any], work: Workload, device: torch.device, engine: Any, note: Note, host: HostMemory
) -> None:
    """Warm up, then blocks of steps."""
    warmup, blocks, steps = spec["warmup"], spec["blocks"], spec["steps"]
    tokens = make_tokens(work.vocab_size, tokens_needed(work, warmup + blocks * steps))
    losses: list[torch.Tensor] = []
    step = step_of(engine)

    def some(count: int) -> float:
        _synchronize(device)
        started = time.perf_counter()
        for _ in range(count):
            inputs, targets = (t.to(device) for t in batch(work, tokens, len(losses), 0))
            losses.append(step(inputs, targets))
        _synchronize(device)
        return time.perf_counter() - started

    note.write(warmup_seconds=some(warmup) if warmup else 0.0)
    seconds: list[float] = []
    for _ in range(blocks):
        seconds.append(some(steps) / steps)
        pipeline = engine.offload_report() if spec["library"] == "deepzero" else {}
        known = {"seconds": seconds, "losses": [float(loss) for loss in losses], "pipeline": pipeline}
        note.write(**known, device_bytes=_device_peak(device), host_bytes=host.look())


def _arena(spec: dict[str, Any], engine: Any) -> dict[str, Any]:
    """The arena of deepzero, in bytes and in words."""
    if spec["library"] != "deepzero" or engine.describe_offload() is None:
        return {}
    return {"arena_bytes": engine.zero.offload.arena.nbytes, "described": engine.describe_offload()}


def _device_peak(device: torch.device) -> int:
    """Most bytes that torch's allocator had given out; 0 without a GPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def end_first() -> None:
    """Ask Linux to end this process before others when memory runs out."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def main(program: Callable[[dict[str, Any], Note], None] = run) -> None:
    """Read the spec, run, print what is known."""
    end_with_parent()
    end_first()
    file = Path(sys.argv[1])
    note = Note(file.with_name("RESULT.json"))
    program(json.loads(file.read_text()), note)
    print(json.dumps(note.facts), flush=True)
    leave()


if __name__ == "__main__":
    main()
