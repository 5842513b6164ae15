"""A model of 1.5 billion parameters, built under ``zero.Init`` by 4 ranks: the peak of each stays near its share."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BY_HAND = pytest.mark.exhaustive
PROGRAM = """
import resource, torch
torch.set_num_threads(1)
import deepzero
from deepzero.comm import process_group
from deepzero.models.gpt import GPT, ModelConfig

deepzero.init_distributed()
with deepzero.zero.Init(dtype=torch.bfloat16):
    model = GPT(ModelConfig(n_layer=LAYERS, n_embd=1600, n_head=25, vocab_size=50257, block_size=1024))
numel = sum(param.ds_numel for param in model.parameters())
held = sum(param.ds_tensor.nbytes for param in model.parameters())
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
for line in process_group.all_gather_object((numel, held, peak)):
    if process_group.rank() == 0:
        print("RANK", *line, flush=True)
process_group.shutdown()
"""


@pytest.mark.parametrize("layers", [pytest.param(16, marks=BY_HAND), pytest.param(48, marks=BY_HAND)])
@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in other units elsewhere")
def test_peak_memory_of_building(tmp_path, layers):
    """At most model / W + two buckets + 400 MB, interpreter and torch included."""
    program = tmp_path / "build.py"
    program.write_text(PROGRAM.replace("LAYERS", str(layers)))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", str(program)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("RANK")]
    assert len(lines) == 4
    for numel, held, peak in (map(int, line) for line in lines):
        assert numel > 1.5e9 * layers / 48
        assert held == pytest.approx(2 * numel / 4, rel=0.01)
        assert peak <= 2 * numel / 4 + 2 * (2 * numel / 16) + 400e6
