"""Lightning's DeepSpeedStrategy, also under Fabric, and a loop under Ray Train, on two ranks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compat import libraries
from tests.e2e import runs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize(("stage", "precision"), [(2, "fp32"), (3, "bf16")])
def test_lightning(tmp_path, stage, precision):
    """A second trainer goes on from the first one's checkpoint to the bits of one that was not interrupted.

    In stage 3 the model is made under ``zero.Init``; Lightning's "32-true" would cast it before there is an engine.
    """
    pytest.importorskip("lightning", reason="needs the extra libraries")
    told = libraries.tell(("lightning",), stage, precision, tmp_path)["lightning"]
    assert len(told["first"]) == 8 and told["first"] + told["second"] == told["whole"]
    assert 0 < told["validated"] < max(told["first"])


@pytest.mark.parametrize(("stage", "precision"), [(2, "bf16"), (3, "fp32")])
def test_fabric(tmp_path, stage, precision):
    """Fabric's ``optimizer.step()`` is the engine's; what a load brings back goes on to the same bits."""
    pytest.importorskip("lightning", reason="needs the extra libraries")
    told = libraries.tell(("fabric",), stage, precision, tmp_path)["fabric"]
    assert len(told["losses"]) == 6 and told["losses"][2:] == told["again"] and told["step"] == 2


def test_ray(tmp_path):
    """Both stages on workers that Ray starts: two ranks of one world, and the same bits."""
    pytest.importorskip("ray.train", reason="needs the extra libraries")
    program, told = str(Path(libraries.__file__).with_name("ray_program.py")), []
    for stage in (2, 3):
        command = [sys.executable, program, str(stage), str(tmp_path)]
        environment = {**os.environ, "PYTHONPATH": str(runs.ROOT), "RAY_USAGE_STATS_ENABLED": "0"}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-4000:]
        result = next(line for line in done.stdout.splitlines() if line.startswith("STORY ray "))
        told.append({key: json.loads(result[10:])[key] for key in ("losses", "world_size", "sha256")})
    assert told[0] == told[1] and told[0]["world_size"] == 2 and told[0]["losses"][-1] < told[0]["losses"][0]
