"""DeepSpeed's JSON: names, meanings, defaults; every other key refused by name."""

import json

import pytest

from deepzero.config.deepspeed_json import load_engine_config
from deepzero.config.deepspeed_keys import INSIDE, SATISFIED, SWITCH, SWITCHED_OFF
from deepzero.config.engine import EngineConfig, resolve_batch
from deepzero.config.strict import ConfigError

FULL = {
    "train_batch_size": 16,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.3,
    "steps_per_print": 10,
    "bf16": {"enabled": True},
    "fp16": {"enabled": False, "loss_scale": 0, "initial_scale_power": 12},
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 5e7, "allgather_bucket_size": "2e7", "overlap_comm": True,
     "contiguous_gradients": True, "reduce_scatter": False},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95]}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
    "data_types": {"grad_accum_dtype": "bf16"},
    "communication_data_type": "fp32",
    "comm": {"reduce": "exact", "chaos": {"enabled": True, "seed": 3}},
    "zero_allow_untested_optimizer": True,
}  # fmt: skip


def test_every_key_arrives(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(FULL))
    for given in (FULL, path, str(path)):
        config = load_engine_config(given)
        assert (config.train_batch_size, config.gradient_accumulation_steps) == (16, 2)
        assert (config.gradient_clipping, config.steps_per_print) == (0.3, 10)
        assert config.precision.dtype == "bf16"
        zero = config.zero
        assert (zero.stage, zero.reduce_bucket_size, zero.allgather_bucket_size) == (1, 50_000_000, 20_000_000)
        assert (zero.overlap_comm, zero.reduce_scatter) == (True, False)
        assert config.optimizer.target == "AdamW" and config.optimizer.params["betas"] == [0.9, 0.95]
        assert config.scheduler.type == "WarmupLR"
        assert (config.grad_accum_dtype, config.communication_data_type) == ("bf16", "fp32")
        assert (config.comm.reduce, config.comm.chaos.seed) == ("exact", 3)


def test_defaults_are_deepspeeds():
    config = load_engine_config({"train_batch_size": 4})
    assert (config.zero.stage, config.zero.reduce_bucket_size, config.zero.overlap_comm) == (0, 500_000_000, False)
    assert config.gradient_clipping == 1.0 and config.precision.dtype == "fp32"
    fp16 = load_engine_config({"train_batch_size": 4, "fp16": {"enabled": True}}).precision
    assert (fp16.initial_scale_power, fp16.loss_scale_window, fp16.hysteresis, fp16.min_loss_scale) == (16, 1000, 2, 1)


@pytest.mark.parametrize(("given", "message"), [
    ({"gradient_cliping": 1.0}, "gradient_clipping"),
    ({"zero_optimization": {"stagee": 1}}, "zero_optimization.stage'"),
    ({"zero_optimization": {"stage": 7}}, "^zero_optimization.stage=7"),
    ({"zero_optimization": {"stage": "two"}}, "zero_optimization.stage='two' must be an integer"),
    ({"zero_optimization": {"reduce_bucket_size": 0.5}}, "must be an integer"),
    ({"zero_optimization": {"contiguous_gradients": "no"}}, "contiguous_gradients='no' must be true or false"),
    ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, "^zero_optimization.offload_optimizer"),
    ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, "device=nvme needs the files' folder"),
    ({"zero_optimization": {"offload_optimizer": {"super_offload": True}}}, "super_offload' is a DeepSpeed key"),
    ({"bf16": {"enabled": "auto"}}, "auto"),
    ({"communication_data_type": {}}, "communication_data_type"),
    ({"bf16": True}, r'bf16=True must be an object with settings, like \{"enabled": true\}$'),
    ({"optimizer": {"type": "Adam", "lr": 0.1}}, r"'optimizer.lr': settings of the optimizer .* \{\"lr\": …\}"),
    ({"optimizer": {"type": "Adam", "parms": {}}}, "Did you mean 'optimizer.params'"),
    ({"zero_optimization": "on"}, "must be an object with settings$"),
    ({"zero_optimization": {"overlap_comm": "yes"}}, "true or false"),
    ({"zero_optimization": {"stage": 2, "zero_hpz_partition_size": 2}}, "stage 3's, and zero_optimization.stage=2"),
    ({"fp16": {"enabled": True, "loss_scale": -1}}, "^fp16.loss_scale=-1"),
    ({"train_batch_size": "auto"}, 'train_batch_size="auto" is for a trainer'),
    ({"gradient_clipping": "auto"}, 'gradient_clipping="auto" is for a trainer'),
    ({"wandb": {"enabled": True}}, "'wandb' is a DeepSpeed key"),
    ({"amp": True}, "'amp' is a DeepSpeed key"),
    ({"activation_checkpointing": {"partition_activation": True}}, "'activation_checkpointing.partition_activation'"),
    ({"datastates_ckpt": {"x": 1}}, "'datastates_ckpt' is a DeepSpeed key that deepzero does not implement"),
    ({"zero_optimization": {"legacy_stage1": True}}, "there is one stage 1"),
    ({"checkpoint": {"use_node_local_storage": "yes"}}, "one folder that all ranks see"),
    ({"checkpoint": {"parallel_write": {"pipeline_stage": True}}}, "checkpoint.parallel_write"),
    ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "both true"),
    ({"bf16": {"enable": True}}, "enabled"),
    ({"fp16": {"enabled": False, "loss_scal": 1}}, "loss_scale"),
    ({"optimizer": {"typ": "AdamW"}}, "optimizer"),
    ({"optimizer": {"type": "AdamW", "lr": 1}}, "optimizer.lr"),
    ({"data_types": {"grad_accum_dtype": "int8"}}, "int8"),
    ({"train_batch_size": 0}, "train_batch_size=0"),
    ({"train_batch_size": True}, "must be a number"),
    ({"gradient_clipping": -1}, "gradient_clipping=-1"),
    ({"comm": {"reduce": "exakt"}}, "exact"),
    ({"flops_profiler": {"enabled": True}}, "flops_profiler"),
])  # fmt: skip
def test_refused(given, message):
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        load_engine_config(given)


def test_parameters_in_files_take_the_optimizer_along():
    """With what both blocks have; how many buffers, and how large, is said of parameters alone."""
    param = {"device": "nvme", "nvme_path": "/disk", "pin_memory": False, "buffer_count": 6, "buffer_size": 1e7}
    read = load_engine_config({"train_batch_size": 4, "zero_optimization": {"stage": 3, "offload_param": param}}).zero
    assert (read.offload_param.buffer_count, read.offload_param.buffer_size) == (6, 10**7)
    optimizer = read.offload_optimizer
    assert (optimizer.device, optimizer.nvme_path, optimizer.buffer_count) == ("nvme", "/disk", 4)
    assert not optimizer.pin_memory and read.shard_align == 2048


def test_what_is_switched_off_is_accepted():
    off = {name: {"enabled": False, "team": "x", "steps": [1]} for name in SWITCHED_OFF if name not in SWITCH}
    off |= {name: {switch: value, INSIDE[name][1]: 1} for name, (switch, values) in SWITCH.items() for value in values}
    off |= {"tensorboard": {}, "wandb": None}
    off["activation_checkpointing"] = {"partition_activations": False, "number_checkpoints": None}
    # From Hugging Face's examples: whole parameters have nothing to gather.
    off["zero_optimization"] = {"stage": 2, "stage3_gather_16bit_weights_on_model_save": True}
    off["zero_optimization"] |= {"reduce_bucket_size": "auto", "contiguous_gradients": "auto"}
    assert load_engine_config(off) == load_engine_config({"zero_optimization": {"stage": 2}})


@pytest.mark.parametrize("key", SATISFIED)
def test_satisfied_keys(key):
    """The value that deepzero fulfils is accepted; another is refused, not ignored."""
    *blocks, name = key.split(".")

    def wrap(value):
        return {blocks[0]: {name: value}} if blocks else {name: value}

    values, _ = SATISFIED[key]
    for value in values:
        assert load_engine_config(wrap(value)) == EngineConfig()
    with pytest.raises(ConfigError, match=name):
        load_engine_config(wrap("something else"))


def test_unreadable_files(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        load_engine_config(tmp_path / "absent.json")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ConfigError, match="is not JSON"):
        load_engine_config(str(tmp_path / "broken.json"))
    (tmp_path / "twice.json").write_text('{"train_batch_size": 1, "train_batch_size": 2}')
    with pytest.raises(ConfigError, match=r"twice.json' has 'train_batch_size' twice in one object: leave one out"):
        load_engine_config(tmp_path / "twice.json")
    with pytest.raises(ConfigError, match="needs config="):
        load_engine_config(None)


@pytest.mark.parametrize(
    ("total", "micro", "steps", "expected"),
    [(24, 4, None, (24, 4, 2)), (24, None, 2, (24, 4, 2)), (None, 4, 2, (24, 4, 2)), (24, None, None, (24, 8, 1)),
     (None, 4, None, (12, 4, 1)), (24, 4, 2, (24, 4, 2))],
)  # fmt: skip
def test_triad(total, micro, steps, expected):
    config = EngineConfig(
        train_batch_size=total, train_micro_batch_size_per_gpu=micro, gradient_accumulation_steps=steps
    )
    batch = resolve_batch(config, world_size=3)
    assert (batch.global_batch, batch.micro_batch, batch.accumulation) == expected


@pytest.mark.parametrize(
    ("total", "micro", "steps", "message"),
    [(10, 4, None, "12 would"), (25, 4, None, "24 or 36 would"), (24, 4, 3, "= 36"), (None, None, 2, "neither")],
)
def test_triad_that_does_not_divide(total, micro, steps, message):
    config = EngineConfig(
        train_batch_size=total, train_micro_batch_size_per_gpu=micro, gradient_accumulation_steps=steps
    )
    with pytest.raises(ConfigError, match=message):
        resolve_batch(config, world_size=3)
