"""What ``tools.bench.gpu`` starts, within a budget of seconds, and the file that holds what came out so far."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.bench.launch import ROOT, end_all, open_store, rank_environment, tail
from tools.bench.workload import Workload

GIB = 2**30
FREE_AGAIN_SECONDS = 15.0


class Clock:
    """The budget: everything has to be over when it is spent."""

    def __init__(self, seconds: float, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._start, self.seconds = now, now(), seconds

    def elapsed(self) -> float:
        """Seconds since the start."""
        return self._now() - self._start

    def left(self) -> float:
        """Seconds until the budget is spent."""
        return self.seconds - self.elapsed()


class Results:
    """Everything that is known, on the disk after every change: a run that is cut off has lost nothing.

    Args:
        folder: gets ``results.json`` and ``page.md``.
        facts: of the run.
        render: makes the page.
    """

    def __init__(self, folder: Path, facts: dict[str, Any], render: Callable[[dict[str, Any]], str]) -> None:
        self.folder, self._render = folder, render
        self.found: dict[str, Any] = {**facts, "skipped": []}
        folder.mkdir(parents=True, exist_ok=True)
        self.save()

    def skip(self, what: str) -> None:
        """Something is left out; say so, here and on the page."""
        print(f"skipped: {what}", flush=True)
        self.found["skipped"].append(what)
        self.save()

    def put(self, key: str, value: Any) -> None:
        """A part's result, whole or so far."""
        self.found[key] = value
        self.save()

    def save(self) -> None:
        """Write both files anew."""
        for name, text in (("results.json", json.dumps(self.found, indent=1)), ("page.md", self._render(self.found))):
            partial = self.folder / f".{name}.partial"
            partial.write_text(text)
            partial.replace(self.folder / name)


def run_worker(spec: dict[str, Any], timeout_seconds: float, scratch: Path, log: Path) -> dict[str, Any]:
    """One contender in a process of its own.

    Args:
        spec: for ``gpu_worker``.
        timeout_seconds: then the process is ended, with whatever it started.
        scratch: an empty folder.
        log: what the process prints is added here.

    Returns:
        What the worker wrote, also when it was ended in the middle; then ``error`` says why. And ``wall_seconds``.
    """
    scratch.mkdir(parents=True)
    file, output, result = scratch / "SPEC.json", scratch / "output", scratch / "RESULT.json"
    file.write_text(json.dumps(spec))
    store = open_store()
    free_before, started, error = _free(), time.monotonic(), None
    with open(output, "wb") as printed:
        process = subprocess.Popen(
            [sys.executable, "-m", "tools.bench.gpu_worker", str(file)],
            env=worker_environment(Workload(**spec["work"]), store.port),
            cwd=scratch,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        process.wait(timeout_seconds)
    except subprocess.TimeoutExpired:
        error = f"not done after {timeout_seconds:.0f} s"
    finally:
        end_all([process])
    found: dict[str, Any] = json.loads(result.read_text()) if result.exists() else {"done": False}
    if not found["done"]:
        killed = " (by the system, for want of memory?)" if process.returncode == -signal.SIGKILL else ""
        found["error"] = f"{error or f'ended with {process.returncode}' + killed}: {tail(output)}"
    with open(log, "ab") as everything:
        everything.write(f"\n=== {spec['name']}\n".encode() + output.read_bytes())
    _wait_until_free(free_before)
    return {**found, "wall_seconds": time.monotonic() - started}


def worker_environment(work: Workload, port: int) -> dict[str, str]:
    """A world of one rank; on the CPU deepzero is kept off a GPU that may be there."""
    environment = rank_environment(work, 0, port)
    environment.pop("DEEPZERO_DEVICE", None)
    if work.device == "cpu":
        environment["DEEPZERO_DEVICE"] = "cpu"
    # DeepSpeed's compilation asks for ninja by name, and pip puts it beside the interpreter.
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", "")])
    # torch.compile's helpers would each take some hundred MiB of what is being measured.
    environment.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    return environment


def _free() -> int:
    from deepzero.offload.pinned_arena import available_host_bytes

    return available_host_bytes() or 0


def _wait_until_free(before: int) -> None:
    """A hundred GiB of locked pages take seconds to come back."""
    until = time.monotonic() + FREE_AGAIN_SECONDS
    while _free() < before - 2 * GIB and time.monotonic() < until:
        time.sleep(0.2)


def run_tests(timeout_seconds: float, folder: Path, device: str) -> dict[str, Any]:
    """The GPU tests of offload, in a process of their own.

    Returns:
        ``passed``, ``failed``, ``skipped``, ``seconds``, ``failures`` (name and text), or ``error``.
    """
    report, output = folder / "tests.xml", folder / "tests.log"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "tests/gpu", "-k", "offload or arena", "-q"]
    # It is bits that are asked for here: a warning of another torch is no failure, nor is a plugin that is not there.
    command += ["-p", "no:cacheprovider", f"--junitxml={report}", "-W", "default", "-o", "addopts=--strict-markers"]
    environment = {name: value for name, value in os.environ.items() if name != "DEEPZERO_DEVICE"}
    if device == "cpu":
        environment["DEEPZERO_DEVICE"] = "cpu"
    started, error = time.monotonic(), None
    with open(output, "wb") as printed:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=printed, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        process.wait(timeout_seconds)
    except subprocess.TimeoutExpired:
        error = f"not done after {timeout_seconds:.0f} s"
    finally:
        end_all([process])
    seconds = time.monotonic() - started
    if error or not report.exists():
        return {"error": f"{error or f'pytest ended with {process.returncode}'}: {tail(output)}", "seconds": seconds}
    return {**read_junit(report), "seconds": seconds}


def read_junit(report: Path) -> dict[str, Any]:
    """Counts, and the failures' texts, of pytest's XML."""
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    bad = [(case, part) for case in cases for part in case if part.tag in ("failure", "error")]
    skipped = sum(1 for case in cases if case.find("skipped") is not None)
    failures = [{"name": case.get("name", "?"), "text": (part.text or "")[-3000:]} for case, part in bad]
    names = {id(case) for case, _ in bad}
    return {
        "passed": len(cases) - skipped - len(names),
        "failed": len(names),
        "skipped": skipped,
        "failures": failures,
    }
