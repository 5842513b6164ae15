"""What building takes of a device at the most: never more than training, or than the model that it was given there.

Nothing here has memory: the device is torch's meta device, and this process pretends to be one of W ranks.
"""

import contextlib

import pytest
import torch
from torch import nn

from deepzero.comm.collectives import DryRunRank
from deepzero.comm.ledger import side_of
from deepzero.compat.deepspeed_engine import DeepSpeedEngine as Engine
from deepzero.config.deepspeed_json import load_engine_config
from deepzero.offload import optimizer_offload
from deepzero.offload.pinned_arena import HostArena
from deepzero.planning.dry_run import without_values
from deepzero.planning.op_cost import WorkMeter
from deepzero.runtime.optimizers import build_optimizer
from deepzero.runtime.zero import stage_1_and_2
from deepzero.runtime.zero.stage_1_and_2 import ParamGroup
from tests.distributed.one_of_many import one_of_many
from tests.distributed.training import config

WIDTH, LAYERS = 256, 8
LAYER, TABLE = WIDTH * WIDTH, 2 * WIDTH * WIDTH
BUCKET = LAYER + 2 * WIDTH


class Stack(nn.Module):
    """The first ``frozen`` layers are not trained."""

    def __init__(self, frozen):
        super().__init__()
        self.embed = nn.Embedding(2 * WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
        for layer in self.layers[:frozen]:
            layer.requires_grad_(False)


class DeviceMeter(WorkMeter):
    """Live bytes of the device; the host's look like the device's here, and do not count."""

    def on_host(self, make):
        def without_counting(*args):
            alive, peak = self.alive_bytes, self.peak_bytes
            made = make(*args)
            self.alive_bytes, self.peak_bytes = alive, peak
            return made

        return without_counting


HOST = {"offload_optimizer": {"device": "cpu"}}
SGD = {"type": "SGD", "params": {"lr": 0.1}}
CASES = {
    **{f"stage {stage}": {"stage": stage} for stage in (0, 1, 2, 3)},
    "stage 2, optimizer on the host": {"stage": 2, "zero": HOST},
    "stage 3, optimizer on the host": {"stage": 3, "zero": HOST},
    "stage 3, all on the host": {"stage": 3, "zero": {**HOST, "offload_param": {"device": "cpu"}}},
    "stage 2, fp32": {"stage": 2, "precision": "fp32"},
    "stage 3, fp32": {"stage": 3, "precision": "fp32"},
    "stage 2, no moments": {"stage": 2, "optimizer": SGD},
    "stage 3, no moments": {"stage": 3, "optimizer": SGD},
}


def peak_of(settings, world, given_on_device, frozen, monkeypatch):
    """In bytes, of the device: the most while it builds, what training holds there, what the given model took."""
    meter = DeviceMeter()
    with monkeypatch.context() as patched, one_of_many(DryRunRank(world - 1, world, "cuda", min(world, 8))):
        patched.setattr(HostArena, "allocate", meter.on_host(HostArena.allocate))
        if on_host := settings.zero.offload_optimizer.device == "cpu":
            patched.setattr(optimizer_offload, "allocate_state", meter.on_host(optimizer_offload.allocate_state))
        if not given_on_device:
            patched.setattr(stage_1_and_2, "any_on", lambda params, device: False)
        with torch.device("meta"), meter if given_on_device else contextlib.nullcontext():
            model = Stack(frozen)
        given = 4 * sum(param.numel() for param in model.parameters()) if given_on_device else 0
        trained = [param for param in model.parameters() if param.requires_grad]
        optimizer = build_optimizer(settings.optimizer, trained, on_host, without_values)
        with meter:
            meter.peak_bytes = meter.alive_bytes
            engine = Engine(model, optimizer, settings)
    training = sum(n for name, n in engine.ledger.predicted_memory.items() if side_of(name) == "device")
    if settings.zero.stage < 3:
        training += frozen * LAYER * (2 if settings.precision.dtype == "bf16" else 4)  # whole, and no model state
    engine.destroy()
    return meter.peak_bytes, training, given


@pytest.mark.parametrize("frozen", [0, LAYERS - 2])
@pytest.mark.parametrize("given_on_device", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_the_peak_of_building(monkeypatch, case, given_on_device, frozen):
    changes = {"precision": "bf16", "bucket": BUCKET, **CASES[case]}
    changes["zero"] = {"stage3_param_persistence_threshold": 0, **changes.get("zero", {})}
    settings = load_engine_config(config(**changes))
    for world in (2, 64):
        peak, training, given = peak_of(settings, world, given_on_device, frozen, monkeypatch)
        most = max(given, training)
        assert given <= peak <= 1.001 * most + 4 * TABLE, world
        assert "host" in case or peak > most / 2


@pytest.mark.parametrize("stage", [1, 3])
def test_only_fragments_wait_for_the_masters(monkeypatch, stage):
    """One bucket holds the whole model here, so that of most parameters this rank owns no element."""
    world, alive, meter = 8, [], DeviceMeter()
    allocate = ParamGroup.allocate_masters

    def look_and_allocate(group):
        alive.append(meter.alive_bytes)
        allocate(group)

    monkeypatch.setattr(ParamGroup, "allocate_masters", look_and_allocate)
    zero = {"stage3_param_persistence_threshold": 0}
    settings = load_engine_config(config(stage=stage, precision="bf16", bucket=2**30, zero=zero))
    with one_of_many(DryRunRank(3, world, "cuda", world)), meter:
        with torch.device("meta"):
            model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(64)))
        engine = Engine(model, build_optimizer(settings.optimizer, model.parameters(), False), settings)
    engine.destroy()
    whole = 64 * 32 * 32 * 4
    assert len(alive) == 1
    assert alive[0] <= 2 * whole / world  # fragments in fp32; stage 3 has its shard already
