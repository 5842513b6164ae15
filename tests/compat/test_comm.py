"""DeepSpeed's ways to join ranks, its collectives, and its accelerator."""

import logging
import os
import subprocess
import sys
import warnings
from collections import namedtuple
from datetime import timedelta
from unittest import mock

import pytest
import torch

import deepzero
from deepzero.comm import process_group, rendezvous
from deepzero.compat import accelerator, comm, utilities
from deepzero.config.strict import ConfigError

RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "DEEPZERO_LAUNCH_FOLDER")


def joined(rank, world, settings, variables):
    """Join by DeepSpeed's keywords in an environment of these variables alone; what each collective gives."""
    with mock.patch.dict(os.environ):
        for name in RANKS:
            os.environ.pop(name, None)
        os.environ.update({name: value.format(rank=rank, world=world) for name, value in variables.items()})
        given = {"rank": rank, "world_size": world} if "init_method" in settings else {}
        if "config" in settings:
            if "MASTER_PORT" in variables:
                deepzero.zero.Init(config={**settings["config"], "zero_optimization": {"stage": 3}})
            deepzero.initialize(model=torch.nn.Linear(1, 1), **settings)
        else:
            deepzero.init_distributed("gloo", timeout=timedelta(seconds=60), **settings, **given)
        deepzero.init_distributed(backend="gloo", timeout_seconds=60, config=None)  # a second time is no error
        try:
            return rank == process_group.rank(), collectives(rank, world)
        finally:
            comm.destroy_process_group()


def collectives(rank, world):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ones, whole, mine = torch.full((world,), rank + 1.0), torch.empty(world), torch.empty(1)
        comm.all_gather_into_tensor(output_tensor=whole, tensor=torch.tensor([rank + 1.0]), log_name="mine")
        comm.reduce_scatter_tensor(output_tensor=mine, tensor=ones, op=comm.ReduceOp.MAX)
        comm.all_reduce(ones, async_op=True, debug="x").wait()
        pair = comm.new_group([0, world - 1])
        objects = [None, None]
        if rank not in (0, world - 1):
            with pytest.warns(UserWarning, match=f"all_gather_object: rank {rank} is not in this group"):
                comm.all_gather_object(objects, rank, group=pair)
            with pytest.warns(UserWarning, match=f"broadcast_object_list: rank {rank} is not in this group"):
                comm.broadcast_object_list(objects, 0, group=pair)
            assert objects == [None, None]
        else:
            comm.all_gather_object(objects, {"rank": rank}, group=pair)
            assert objects == [{"rank": 0}, {"rank": world - 1}]
            said = [rank]
            comm.broadcast_object_list(said, 0, group=pair)
            assert said == [0]
            assert comm.get_all_ranks_from_group(pair) == [0, world - 1]
        words = [rank, {"two": torch.tensor(2)}] if rank == 1 else [None, None]
        comm.broadcast_object_list(words, src=1)
        comm.barrier()
        assert utilities._get_data_parallel_world_size() == comm.get_world_size() == world
        assert utilities._get_data_parallel_group() is comm.get_world_group()
        assert utilities.get_model_parallel_rank() == 0
    return whole.tolist(), mine.item(), ones.tolist(), words[0], words[1]["two"].item()


@pytest.mark.parametrize("way", ["file", "tcp", "openmpi", "initialize", "zero.Init"])
def test_ways_to_join(ranks, tmp_path, way):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    mpi = {f"OMPI_COMM_WORLD_{name}": "{rank}" for name in ("RANK", "LOCAL_RANK")}
    mpi |= {f"OMPI_COMM_WORLD_{name}": "{world}" for name in ("SIZE", "LOCAL_SIZE")}
    settings, variables = {
        "file": ({"init_method": f"file://{tmp_path}/store"}, {"LOCAL_RANK": "{rank}", "MASTER_ADDR": "127.0.0.1"}),
        "tcp": ({"init_method": f"tcp://127.0.0.1:{port}"}, {"LOCAL_RANK": "{rank}"}),
        "openmpi": ({"distributed_port": port, "verbose": False}, mpi),
        "initialize": ({"distributed_port": port, "config": {"train_batch_size": 3}}, mpi),
        "zero.Init": ({"config": {"train_batch_size": 3}}, {**mpi, "MASTER_PORT": str(port)}),
    }[way]
    done = ranks.run(joined, settings, variables, world_size=3, process_group=False)
    assert done == [(True, ([1.0, 2.0, 3.0], 3.0, [6.0] * 3, 1, 2))] * 3


@pytest.mark.parametrize(("variables", "port", "told"), [
    ("OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1 OMPI_COMM_WORLD_LOCAL_RANK=0", None,
     "LOCAL_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 RANK=0 WORLD_SIZE=1"),
    ("PMI_RANK=0", None, ""),
    ("PMI_RANK=1 PMI_SIZE=2 MASTER_ADDR=a", None, "MASTER_ADDR=a MASTER_PORT=29500 RANK=1 WORLD_SIZE=2"),
    ("PMI_RANK=1 PMI_SIZE=2 MASTER_ADDR=a MASTER_PORT=7", None, "MASTER_ADDR=a MASTER_PORT=7 RANK=1 WORLD_SIZE=2"),
    ("PMI_RANK=1 PMI_SIZE=2 MASTER_ADDR=a MASTER_PORT=7", 8, "MASTER_ADDR=a MASTER_PORT=8 RANK=1 WORLD_SIZE=2"),
    ("PMI_RANK=0 PMI_SIZE=1 MASTER_ADDR=a MASTER_PORT=7", None,
     "MASTER_ADDR=127.0.0.1 MASTER_PORT=7 RANK=0 WORLD_SIZE=1"),
    ("OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 PMI_RANK=0 PMI_SIZE=2 MASTER_ADDR=a", 8,
     "MASTER_ADDR=a MASTER_PORT=8 RANK=3 WORLD_SIZE=4"),
])  # fmt: skip
def test_what_an_mpi_tells(monkeypatch, variables, port, told):
    """One process alone is told, too; mpirun's word goes before that of the srun which started it."""
    environment = dict(variable.split("=") for variable in variables.split())
    monkeypatch.setattr(os, "environ", environment)
    rendezvous.discover_mpi(port, verbose=False)
    assert " ".join(f"{name}={environment[name]}" for name in sorted(RANKS) if name in environment) == told


@pytest.mark.parametrize(("variables", "words"), [
    ("WORLD_SIZE=2 RANK=x", "RANK='x' must be a whole number from 0 to 1"),
    ("WORLD_SIZE=1 RANK=1", "RANK='1' must be a whole number from 0 to 0"),
    ("WORLD_SIZE=0 RANK=0", "WORLD_SIZE='0' must be"),
    ("WORLD_SIZE=2 RANK=0 MASTER_PORT=0", "MASTER_PORT='0' must be a whole number from 1 to 65535"),
    ("SLURM_STEP_NUM_TASKS=4 SLURM_PROCID=1", "SLURM_STEP_NUM_TASKS=4: this process is one of 4, and nothing tells it"),
    ("SLURM_STEP_NUM_TASKS=4 OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1", "SLURM_STEP_NUM_TASKS=4: this process is"),
    ("PMI_RANK=1 PMI_SIZE=2", r"ranks by MPI \(PMI_RANK=1, PMI_SIZE=2\): set MASTER_ADDR"),
])  # fmt: skip
def test_variables_that_cannot_be_used(monkeypatch, variables, words):
    """Several of them let a process wait for ranks that cannot come, or train alone without a word."""
    process_group.shutdown()  # of another test, in this process
    for name in RANKS:
        monkeypatch.delenv(name, raising=False)
    if variables.startswith("WORLD_SIZE"):
        variables = f"MASTER_ADDR=127.0.0.1 MASTER_PORT=1 {variables}"
    for variable in variables.split():
        monkeypatch.setenv(*variable.split("="))
    with pytest.raises(ConfigError, match=words):
        deepzero.initialize(model=torch.nn.Linear(1, 1), config={"train_batch_size": 2})


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"timeout": 30}, ConfigError, "timedelta"),
        ({"dist_init_required": False}, ConfigError, "has joined no process group"),
        ({"config": {"comms_logger": {"enabled": True}}}, NotImplementedError, "comms_logger"),
        ({"config": {"comms_logger": True}}, NotImplementedError, "comms_logger"),
        ({"config": "logged.json"}, NotImplementedError, "comms_logger"),
        ({"config": "missing.json"}, ConfigError, r"missing\.json"),
        ({"auto_mpi_discovery": 60}, ConfigError, "auto_mpi_discovery=60.*timeout_seconds="),
        ({"backend": "gloo", "dist_backend": "gloo"}, ConfigError, "backend and dist_backend, which are one thing"),
        ({"timeout": timedelta(5), "timeout_seconds": 5}, ConfigError, "timeout_seconds and timeout, which are one"),
    ],
)
def test_arguments_that_cannot_be_used(tmp_path, monkeypatch, settings, error, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "logged.json").write_text('{"comms_logger": {"enabled": true}}')
    with mock.patch.object(comm, "is_initialized", lambda: False), pytest.raises(error, match=words):
        deepzero.init_distributed(**settings)


@pytest.mark.parametrize("joined", [False, True])
def test_who_logs(monkeypatch, joined):
    """Without ranks nobody, once there are several to choose from; each text once."""
    said = []
    # A logger of its own: where DeepSpeed is installed, what libraries import of it changes the one of this name.
    with mock.patch.object(logging, "getLogger", logging.Logger):
        monkeypatch.setattr(utilities, "logger", utilities._made.__wrapped__())
    monkeypatch.setattr(utilities.logger, "log", lambda level, text: said.append(text))
    monkeypatch.setattr(process_group, "is_initialized", lambda: joined)
    monkeypatch.setattr(process_group, "rank", lambda: 0)
    for ranks in (None, [], [1], [0], [-1]):
        utilities.log_dist(f"{ranks}", ranks)
        for once in (utilities.log_dist_once, utilities.logger.log_dist_once):
            once(f"{ranks} once, {joined}", ranks)
    texts = ["None", "[]", "[1]", "[0]", "[-1]"][3 if joined else 0 :]
    assert said == [f"[Rank 0] {text}{ending}" for text in texts for ending in ("", f" once, {joined}")]
    utilities.logger.handlers[0].emit = said.append
    for text in ("careful", "careful", "or not"):
        utilities.logger.warning_once(text)
    assert [record.getMessage() for record in said[-2:]] == ["careful", "or not"]


def test_utilities():
    pair = namedtuple("pair", "a b")
    moved = utilities.move_to_device([pair(torch.ones(1), {"c": (torch.ones(1), 2)})], "meta")
    assert type(moved[0]) is pair and moved[0].a.is_meta and moved[0].b["c"][0].is_meta and moved[0].b["c"][1] == 2
    block = {"partition_activations": True, "cpu_checkpointing": False}
    utilities.configure(None, {"train_batch_size": "auto", "activation_checkpointing": block})
    for wrong, error in (({"cpu_checkpointing": True}, NotImplementedError), ({"cpu_offload": True}, ConfigError)):
        with pytest.raises(error, match=next(iter(wrong))):
            utilities.configure(None, {"activation_checkpointing": {**block, **wrong}})


def test_names_of_the_package():
    import deepzero.comm

    weight = torch.ones(2, requires_grad=True)
    optimizer = deepzero.ops.adam.FusedAdam([weight], lr=0.5, adam_w_mode=False)
    assert isinstance(optimizer, deepzero.ops.adam.FusedAdam) and type(optimizer) is torch.optim.Adam
    with pytest.raises(ValueError, match="amsgrad=True"):
        deepzero.ops.FusedAdam([weight], amsgrad=True)
    derived = type("Derived", (deepzero.ops.FusedAdam,), {})
    with pytest.raises(TypeError, match=r"Derived derives from FusedAdam.*derive from torch\.optim\.AdamW"):
        derived([weight])
    assert deepzero.get_accelerator() is deepzero.accelerator.get_accelerator()

    assert deepzero.comm.all_gather_object is comm.all_gather_object and comm.has_all_gather_into_tensor()
    assert not comm.has_nothing()
    for name in comm.NAMES:
        assert getattr(deepzero.comm, name) is not None, name
    load = "import sys; from deepzero.comm import process_group; print([m for m in sys.modules if '.compat' in m])"
    assert subprocess.check_output([sys.executable, "-c", load], text=True).strip() == "[]"
    for name in ("nothing", "all_gather_everything"):
        with pytest.raises(AttributeError, match=name):
            getattr(deepzero.comm, name)
    with pytest.raises(NotImplementedError, match="ledger"):
        comm.all_reduce(torch.ones(1), prof=True)


@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_accelerator(monkeypatch, kind):
    if kind == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    monkeypatch.setenv("DEEPZERO_DEVICE", "")
    monkeypatch.setenv("DS_ACCELERATOR", kind)
    device = accelerator.get_accelerator.__wrapped__()
    assert device.device_name() == kind == device.device().type and device.is_available()
    assert device.communication_backend_name() == {"cpu": "gloo", "cuda": "nccl"}[kind]
    assert device.device_name(1) == {"cpu": "cpu", "cuda": "cuda:1"}[kind]
    tensor = device.FloatTensor([1.0, 2.0])
    assert device.on_accelerator(tensor) and tensor.device.type == kind
    assert 0 < device.memory_allocated() <= device.total_memory() and device.available_memory() > 0
    assert torch.float in device.supported_dtypes() and device.is_fp16_supported()
    assert device.is_synchronized_device() == (kind == "cpu") == (device.Stream is None)
    assert torch.equal(device.pin_memory(torch.ones(2, 2)), torch.ones(2, 2))
    state = device.get_rng_state()
    drawn = [torch.rand(3, device=kind) for _ in range(2) if device.set_rng_state(state) is None]
    assert torch.equal(*drawn)
    device.synchronize(), device.empty_cache(), device.reset_peak_memory_stats()
    with device.stream(device.current_stream()):
        device.range_push("part"), device.range_pop()
    with pytest.raises(AttributeError, match="no warp_drive"):
        device.warp_drive()
    with (
        mock.patch("torch.accelerator.current_accelerator", lambda check_available=False: torch.device("cuda")),
        mock.patch("torch.accelerator.device_count", lambda: 1),
        mock.patch("torch.accelerator.current_device_index", lambda: 0),
    ):
        assert accelerator.get_accelerator.__wrapped__().device_name() == process_group.default_device().type == kind
    monkeypatch.setenv("DEEPZERO_DEVICE", "cpu")
    monkeypatch.setenv("DS_ACCELERATOR", "cuda")
    with pytest.raises(ConfigError, match="DS_ACCELERATOR=cuda, but this process computes on cpu"):
        accelerator.get_accelerator.__wrapped__()
    monkeypatch.setenv("DS_ACCELERATOR", "tpu")
    with pytest.raises(ConfigError, match="DS_ACCELERATOR=tpu"):
        accelerator.get_accelerator.__wrapped__()
