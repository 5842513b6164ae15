"""Notes that survive a restart, the number of the restart, and what a rank may ask for on SIGTERM."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deepzero.comm import elastic, stop_request
from deepzero.comm.elastic import recall, remember, restart_count

ROOT = Path(__file__).parents[2]


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of torchrun's agent, as local rank 0 finds it in its second attempt."""
    file = tmp_path / "none_x1y2" / "attempt_1" / "0" / "error.json"
    file.parent.mkdir(parents=True)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.delenv(elastic.RESTART_VARIABLE, raising=False)
    return tmp_path / "none_x1y2"


def test_a_note(agent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert recall("run_dir") is None
    remember("run_dir", "out/é")
    remember("run_dir", "out/è")
    monkeypatch.setenv("LOCAL_RANK", "1")
    later = agent / "attempt_2" / "1" / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(later))
    assert recall("run_dir") == "out/è"
    remember("run_dir", "from another rank")
    assert recall("run_dir") == "out/è"
    assert sorted(path.name for path in agent.iterdir()) == ["attempt_1", "deepzero-run_dir"]
    assert recall("step") is None


@pytest.mark.parametrize("name", ["", "a/b", "../x", "a b"])
def test_bad_names(name: str, agent: Path) -> None:
    with pytest.raises(ValueError, match="name="):
        remember(name, "x")


@pytest.mark.parametrize(
    "variables",
    [
        {"TORCHELASTIC_ERROR_FILE": ""},
        {"TORCHELASTIC_ERROR_FILE": "/dev/null"},
        {"TORCHELASTIC_ERROR_FILE": "/somewhere/else/0/error.json"},
        {"DEEPZERO_RESTART": "0"},  # the launcher's agent lives for one attempt only
    ],
)
def test_no_notes_without_torchrun(variables: dict[str, str], agent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    remember("run_dir", "x")
    assert recall("run_dir") is None


def test_restart_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DEEPZERO_RESTART", raising=False)
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    assert restart_count() == 0
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    assert restart_count() == 2
    monkeypatch.setenv("DEEPZERO_RESTART", "3")
    assert restart_count() == 3


@pytest.mark.parametrize("seconds", [-1.0, 25.1, 30.0, float("nan")])
def test_grace_that_the_agent_would_not_grant(seconds: float) -> None:
    with pytest.raises(ValueError, match="killed 30 s after SIGTERM"):
        stop_request.on_stop_request(lambda: None, seconds)
    assert stop_request.registered() is None


def test_a_request_can_be_withdrawn() -> None:
    stop_request.on_stop_request(print, 3.0)
    assert stop_request.registered() == (print, 3.0)
    stop_request.on_stop_request(None)
    assert stop_request.registered() is None


PROGRAM = """
import time
from deepzero.comm import rank_process, stop_request
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
print("left", flush=True)
"""
REQUEST = "stop_request.on_stop_request(ask, 1.0)"


@pytest.mark.parametrize(
    ("before", "inside", "leaves", "signals", "said", "status"),
    [
        ("", "", True, ["TERM"], ["stopped by SIGTERM"], 143),
        (REQUEST, "", True, ["TERM"], ["asked", "left"], 0),
        (REQUEST, "", False, ["TERM"], ["asked", "stopped by SIGTERM; it had not left 1 s later"], 143),
        (REQUEST, "", True, ["INT"], ["stopped by SIGINT"], 130),
        (REQUEST, "", True, ["HUP"], ["stopped by SIGHUP"], 129),
        (REQUEST.replace("1.0", "20"), "", False, ["TERM", "TERM"], ["asked", "stopped by SIGTERM"], 143),
        (REQUEST.replace("1.0", "20"), "", False, ["TERM", "HUP"], ["asked", "stopped by SIGHUP"], 129),
        (
            REQUEST.replace("1.0", "20"),
            "1 / 0",
            False,
            ["TERM"],
            ["asked", "stopped by SIGTERM; its callback failed"],
            143,
        ),
    ],
)
def test_signals(before: str, inside: str, leaves: bool, signals: list[str], said: list[str], status: int) -> None:
    code = PROGRAM.format(before=before, inside=inside, leaves=leaves)
    command = [sys.executable, "-c", code]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    ) as rank:
        try:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "ready\n"
            for name in signals:
                subprocess.run(["kill", f"-{name}", str(rank.pid)], check=True)
                time.sleep(0.3)
            assert rank.wait(30) == status
            assert rank.stdout.read().splitlines() == said
        finally:
            rank.kill()
