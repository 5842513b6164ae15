"""DeepSpeed's configs: names, meanings, defaults; other spellings and forms; what asks for nothing, what is refused."""

import base64
import json
import logging
import math
import sys
import types

import pytest

from deepzero.config import deepspeed_json
from deepzero.config import deepspeed_keys as ds
from deepzero.config.deepspeed_json import in_json_words, load_engine_config, load_zero_config
from deepzero.config.engine import EngineConfig, resolve_batch
from deepzero.config.strict import ConfigError
from tests.unit.test_docs import defaults_of_deepspeed, nested

CPU = {"device": "cpu"}

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
        zero = config.zero
        assert (zero.stage, zero.reduce_bucket_size, zero.allgather_bucket_size) == (1, 50_000_000, 20_000_000)
        assert (zero.overlap_comm, zero.reduce_scatter) == (True, False)
        assert config.optimizer.target == "AdamW" and config.optimizer.params["betas"] == [0.9, 0.95]
        assert (config.precision.dtype, config.scheduler.type) == ("bf16", "WarmupLR")
        assert (config.grad_accum_dtype, config.communication_data_type) == ("bf16", "fp32")
        assert (config.comm.reduce, config.comm.chaos.seed) == ("exact", 3)


def test_defaults_are_deepspeeds():
    config = load_engine_config({"train_batch_size": 4})
    assert (config.zero.stage, config.zero.reduce_bucket_size, config.zero.overlap_comm) == (0, 500_000_000, False)
    assert config.gradient_clipping == 1.0 and config.precision.dtype == "fp32"
    fp16 = load_engine_config({"train_batch_size": 4, "fp16": {"enabled": True}}).precision
    assert (fp16.initial_scale_power, fp16.loss_scale_window, fp16.hysteresis, fp16.min_loss_scale) == (16, 1000, 2, 1)


@pytest.fixture
def said(caplog):
    deepspeed_json._say.cache_clear()
    caplog.set_level(logging.WARNING, "deepzero.config")
    return caplog


def zero(**block):
    return {"zero_optimization": block}


@pytest.mark.parametrize(("given", "plain"), [
    (zero(stage=3, prefetch_bucket_size=7, param_persistence_threshold=8), zero(stage=3,
     stage3_prefetch_bucket_size=7, stage3_param_persistence_threshold=8)),
    (zero(stage=3, max_live_parameters="1e3", max_reuse_distance=2e3), zero(stage=3,
     stage3_max_live_parameters=1000, stage3_max_reuse_distance=2000)),
    (zero(stage=3, gather_16bit_weights_on_model_save=True, module_granularity_threshold=0), zero(stage=3)),
    (zero(stage=3, stage3_gather_fp16_weights_on_model_save=True), zero(stage=3)),
    (zero(stage=2, cpu_offload=True), zero(stage=2, offload_optimizer=CPU)),
    (zero(stage=2, cpu_offload=False, cpu_offload_param=False), zero(stage=2)),
    (zero(stage=3, cpu_offload=True, cpu_offload_param=True, cpu_offload_use_pin_memory=False), zero(stage=3,
     offload_optimizer={**CPU, "pin_memory": False}, offload_param={**CPU, "pin_memory": False})),
    (zero(stage=3, cpu_offload=True, cpu_offload_params=True), zero(stage=3, offload_optimizer=CPU, offload_param=CPU)),
    ({"zero_optimization": True, "allgather_size": 2e8}, zero(stage=1, allgather_bucket_size=200_000_000)),
    ({"zero_optimization": True}, zero(stage=1)),
    ({"zero_optimization": False}, {}),
    ({"bfloat16": {"enabled": True}}, {"bf16": {"enabled": True}}),
    ({"steps_per_print": math.inf}, {}),
    ({"_comment": "a note", "//": "and one", "#": ["more"]}, {}),
    ({"communication_data_type": "FP32"}, {"communication_data_type": "fp32"}),
    ({"data_types": {"grad_accum_dtype": "torch.bfloat16"}}, {"data_types": {"grad_accum_dtype": "bf16"}}),
    ({"optimizer": {"type": "Adam", "legacy_fusion": False}}, {"optimizer": {"type": "Adam"}}),
    ({"optimizer": {}, "scheduler": None}, {}),
    ({"optimizer": None, "scheduler": {}}, {}),
    ({"tensor_parallel": {"autotp_size": 1, "tp": {"tp_size": 1}}, "aio": {"queue_depth": 8}}, {}),
    (zero(zenflow=False), {}),
    ({"communication_data_type": "bfp16"}, {"communication_data_type": "bf16"}),
    # What a stage does not have, DeepSpeed passes over.
    (zero(stage=3, reduce_scatter=False), zero(stage=3)),
    (zero(stage=0, reduce_scatter=False, offload_param=CPU), zero(stage=0)),
    (zero(stage=3, offload_param={**CPU, "max_in_cpu": 5}), zero(stage=3, offload_param={**CPU, "max_in_cpu": 5},
     offload_optimizer=CPU)),
])  # fmt: skip
def test_other_spellings_mean_the_same(given, plain):
    assert load_engine_config(given) == load_engine_config(plain)


@pytest.mark.parametrize(("given", "words"), [
    (zero(stage=3, prefetch_bucket_size=7, stage3_prefetch_bucket_size=7), "twice, under two of its names"),
    (zero(stage=2, stage3_gather_fp16_weights_on_model_save=True, gather_16bit_weights_on_model_save=True),
     "twice, under two of its names"),
    ({"bf16": {}, "bfloat16": {}}, "twice, under two of its names"),
    ({"bf16": {"check_grad_overflow": "often"}}, "check_grad_overflow"),
    ({"fp16": {"check_grad_overflow": True}}, "check_grad_overflow"),
    (zero(cpu_offload=True, offload_optimizer=CPU), "older word for offload_optimizer"),
    ({"zero_optimization.reduce_bucket": 5.5}, "unknown config key 'zero_optimization.reduce_bucket'"),
    ({"allgather_size": 5}, "unknown config key 'allgather_size'"),
    (zero(prefetch_buckets=1), "unknown config key 'zero_optimization.prefetch_buckets'"),
    ({"gradient_allreduce_op": "sum"}, "gradient_allreduce_op='sum'.*mean over ranks"),
    ({"fp32_allreduce": True}, '"communication_data_type": "fp32"'),
    ({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, "'torch_autocast' .* use bf16 or fp16"),
    ({"compile": {"deepcompile": True}}, '"deepcompile": false'),
    ({"compile": {"enabled": True}}, "unknown config key 'compile.enabled'"),
    ({"tensor_parallel": {"autotp_size": 2}}, '\'tensor_parallel\' .* "autotp_size": 0$'),
    ({"tensor_parallel": {"tp_size": 2}}, "unknown config key 'tensor_parallel.tp_size'"),
    ({"optimizer": False}, r"optimizer must be an object like .* got False"),
    ({"optimizer": []}, r"optimizer must be an object like .* got \[\]"),
    ({"scheduler": []}, r"scheduler must be an object like .* got \[\]"),
    (zero(stage=2, zenflow={"overlap_step": False}), "'zero_optimization.zenflow' is a DeepSpeed key"),
    (zero(stage=2, zenflow={"enabled": False}), "'zero_optimization.zenflow' is a DeepSpeed key"),
    (zero(stage=2, zeropp_loco_param=False), "'zero_optimization.zeropp_loco_param' .* of older DeepSpeeds"),
    ({"aio": 5}, "aio=5 must be a mapping"),
    ({"aio": {"block_sise": 1}}, "unknown config key 'aio.block_sise'; DeepSpeed's are block_size"),
    ({"tensor_parallel": {"tp": {"size": 1}}}, "unknown config key 'tensor_parallel.tp.size'"),
    ({"checkpoint": {"load_universal": "maybe"}}, "checkpoint.load_universal='maybe' must be true or false"),
    ({"pipeline": True}, "pipeline=True must be a mapping"),
    ({"pipeline": {"stages": 4}}, "pipeline.stages=4 is not implemented"),
    ({"pipeline": {"stages": "two"}}, "pipeline.stages='two' must be an integer"),
    ({"dataloader_drop_last": "auto"}, "dataloader_drop_last='auto' must be true or false"),
    ({"bf16": {"bf16_optimizer_states": True}}, r"^bf16.bf16_optimizer_states=True is not implemented: leave it at "
     r"false \(the optimizer's states are fp32\)$"),
    (zero(stage=3, leaf_module={"classes": ["Experts"]}), "set_z3_leaf_modules before initialize"),
    (zero(ignore_unused_parameters=False), "without gradient counts as zeros"),
    ({"checkpoint": {"tag_validation": "foo"}}, "tag_validation='foo'"),
    ({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}, 'optimizer.params.lr="auto" is for a trainer'),
    ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}}, "scheduler.params.warmup_num_steps"),
    ({"steps_per_print": -math.inf}, "steps_per_print"),
    ({"gradient_cliping": 1.0}, "gradient_clipping"),
    ({"zero_optimization": {"stagee": 1}}, "zero_optimization.stage'"),
    ({"zero_optimization": {"stage": 7}}, "^zero_optimization.stage=7"),
    ({"zero_optimization": {"stage": "two"}}, "zero_optimization.stage='two' must be an integer"),
    ({"zero_optimization": {"reduce_bucket_size": 0.5}}, "must be an integer"),
    ({"zero_optimization": {"contiguous_gradients": "no"}}, "contiguous_gradients='no' must be true or false"),
    ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, "^zero_optimization.offload_optimizer"),
    ({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu", "pipeline_read": True}}}, "pipeline_read"),
    ({"fp16": {"enabled": True, "initial_scale_power": 1024}}, "initial_scale_power=1024: must be at most 127"),
    ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, "device=nvme needs the files' folder"),
    ({"zero_optimization": {"offload_optimizer": {"super_offload": True}}}, "super_offload' is a DeepSpeed key"),
    ({"bf16": {"enabled": "auto"}}, "auto"),
    ({"communication_data_type": {}}, "communication_data_type"),
    ({"bf16": True}, r'bf16=True must be an object with settings, like \{"enabled": true\}$'),
    ({"optimizer": {"type": "Adam", "lr": 0.1}}, r"'optimizer.lr': settings of the optimizer .* \{\"lr\": …\}"),
    ({"optimizer": {"type": "Adam", "parms": {}}}, "Did you mean 'optimizer.params'"),
    ({"zero_optimization": "on"}, r'must be an object with settings, like \{"stage": 2\}$'),
    ({"zero_optimization": {"overlap_comm": "yes"}}, "true or false"),
    ({"zero_optimization": {"stage": 2, "zero_hpz_partition_size": 2}}, "stage 3's, and zero_optimization.stage=2"),
    ({"fp16": {"enabled": True, "loss_scale": -1}}, "^fp16.loss_scale=-1"),
    ({"train_batch_size": "auto"}, 'train_batch_size="auto" is for a trainer'),
    ({"gradient_clipping": "auto"}, 'gradient_clipping="auto" is for a trainer'),
    ({"activation_checkpointing": {"partition_activation": True}}, "'activation_checkpointing.partition_activation'"),
    ({"datastates_ckpt": {"x": 1}}, "'datastates_ckpt' is a DeepSpeed key that deepzero does not implement"),
    ({"zero_optimization": {"legacy_stage1": True}}, "there is one stage 1"),
    ({"checkpoint": {"use_node_local_storage": "yes"}}, "one folder that all ranks see"),
    ({"checkpoint": {"parallel_write": {"pipeline_stage": True}}}, "checkpoint.parallel_write"),
    ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "both true"),
    ({"bf16": {"enable": True}}, "enabled"),
    ({"fp16": {"enabled": False, "loss_scal": 1}}, "loss_scale"),
    ({"optimizer": {"typ": "AdamW"}}, "optimizer"),
    ({"data_types": {"grad_accum_dtype": "int8"}}, "int8"),
    ({"train_batch_size": 0}, "train_batch_size=0"),
    ({"train_batch_size": True}, "must be a number"),
    ({"gradient_clipping": -1}, "gradient_clipping=-1"),
    ({"comm": {"reduce": "exakt"}}, "exact"),
])  # fmt: skip
def test_refused_by_name(given, words):
    with pytest.raises(ConfigError, match=words):
        load_engine_config(given)


def test_parameters_in_files_take_the_optimizer_along():
    """With what both blocks have; how many buffers, and how large, is said of parameters alone."""
    param = {"device": "nvme", "nvme_path": "/disk", "pin_memory": False, "buffer_count": 6, "buffer_size": 1e7}
    read = load_engine_config({"train_batch_size": 4, "zero_optimization": {"stage": 3, "offload_param": param}}).zero
    assert (read.offload_param.buffer_count, read.offload_param.buffer_size) == (6, 10**7)
    optimizer = read.offload_optimizer
    assert (optimizer.device, optimizer.nvme_path, optimizer.buffer_count) == ("nvme", "/disk", 4)
    assert not optimizer.pin_memory and read.shard_align == 2048


@pytest.mark.parametrize("key", ds.SATISFIED)
def test_satisfied_keys(key):
    """The value that deepzero fulfils is accepted; another is refused, not ignored."""
    values, _ = ds.SATISFIED[key]
    for value in values:
        assert load_engine_config(nested(key, value)) == EngineConfig()
    with pytest.raises(ConfigError, match=key.rpartition(".")[2]):
        load_engine_config(nested(key, "something else"))


def test_unreadable_files(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        load_engine_config(tmp_path / "absent.json")
    (tmp_path / "marked.json").write_text('{"train_batch_size": 4}', encoding="utf-8-sig")
    assert load_engine_config(tmp_path / "marked.json").train_batch_size == 4
    (tmp_path / "other.json").write_text('{"train_batch_size": 4}', encoding="utf-16")
    for path, words in ((tmp_path / "other.json", "can't decode"), ("a\0b", "null byte")):
        with pytest.raises(ConfigError, match=f"cannot be read: .*{words}"):
            load_engine_config(path)
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ConfigError, match="is not JSON"):
        load_engine_config(str(tmp_path / "broken.json"))
    (tmp_path / "twice.json").write_text('{"train_batch_size": 1, "train_batch_size": 2}')
    with pytest.raises(ConfigError, match=r"twice.json' has 'train_batch_size' twice in one object: leave one out"):
        load_engine_config(tmp_path / "twice.json")
    with pytest.raises(ConfigError, match="needs config="):
        load_engine_config(None)


@pytest.mark.parametrize(("total", "micro", "steps", "expected"), [
    (24, 4, None, (24, 4, 2)), (24, None, 2, (24, 4, 2)), (None, 4, 2, (24, 4, 2)), (24, None, None, (24, 8, 1)),
    (None, 4, None, (12, 4, 1)), (24, 4, 2, (24, 4, 2)),
    (10, 4, None, "12 would"), (25, 4, None, "24 or 36 would"), (24, 4, 3, "= 36"), (None, None, 2, "neither"),
])  # fmt: skip
def test_triad(total, micro, steps, expected):
    config = EngineConfig(total, micro, steps)
    if isinstance(expected, tuple):
        batch = resolve_batch(config, world_size=3)
        assert (batch.global_batch, batch.micro_batch, batch.accumulation) == expected
    else:
        with pytest.raises(ConfigError, match=expected):
            resolve_batch(config, world_size=3)


@pytest.mark.parametrize("key", ds.STEERING)
def test_what_only_steers_deepspeed_is_said_once(key, said):
    default, why = ds.STEERING[key]
    other = {bool: not default, int: 100, float: 2.0}[type(default)]

    def read(value):
        """The key stands alone, or beside the type that an optimizer needs."""
        config = nested(key, value)
        if "optimizer" in config:
            config["optimizer"]["type"] = "Adam"
        return load_engine_config(config)

    plain = read(default)
    assert read(None) == plain and said.messages == []
    assert read(other) == read(other) == plain
    assert [key in text and why in text for text in said.messages] == [True]
    with pytest.raises(ConfigError, match=key):
        read("something else")


VALUE = {dict: {"queue_depth": 1}, str: "fp32", bool: True, int: 7, float: 0.5}


@pytest.mark.parametrize(("key", "kind"), [(key, kind) for key, (kind, _) in ds.MOOT.items()] + [
    ((key,), float) for key in ds.DOTTED  # as TRL writes them
])  # fmt: skip
def test_what_says_nothing_is_said_once_and_is_of_its_kind(key, kind, said):
    def read(value):
        return load_engine_config({key[0]: value} if isinstance(key, tuple) else nested(key, value))

    name = key[0] if isinstance(key, tuple) else key
    assert read(VALUE[kind]) == read(VALUE[kind]) == load_engine_config({})
    assert [name in text and "changes nothing" in text for text in said.messages] == [True]
    with pytest.raises(ConfigError, match=name):
        read([5])


def test_only_the_first_rank_says_it_and_what_a_fixed_loss_scale_leaves_out(said, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    load_engine_config(zero(contiguous_gradients=False))
    assert said.messages == []
    monkeypatch.delenv("RANK")
    load_engine_config({"fp16": {"enabled": True, "loss_scale": 8, "hysteresis": 4}})
    assert ["loss_scale=8 is fixed, and hysteresis says nothing" in text for text in said.messages] == [True]


def test_a_setting_by_its_key():
    """As Trainer asks an engine's config."""
    given = {"gradient_clipping": 0.5, "optimizer": {"type": "Adam", "params": {"lr": 1}}}
    config = load_engine_config({**zero(stage=3), **given, "bf16": {"enabled": True}})
    assert config.get("zero_optimization", {}).get("stage") == 3
    assert {key: config.get(key) for key in given} == given
    assert config.get("bf16") == {"enabled": True, "check_grad_overflow": False} and not config.get("fp16")["enabled"]
    for absent in ("tensor_parallel", "scheduler", "train_batch_size", "get", "least", "where"):
        assert config.get(absent, {}) == {} and config.get(absent) is None
    block = {"enabled": True, "auto_cast": True, "loss_scale": 8.0, "initial_scale_power": 3, "loss_scale_window": 2,
             "hysteresis": 1, "consecutive_hysteresis": True, "min_loss_scale": 2.0}  # fmt: skip
    config = load_engine_config({"fp16": block})
    assert config.get("fp16") == block and not config.get("bf16")["enabled"]


def test_a_nodes_own_storage_is_the_shared_one_on_one_machine(monkeypatch):
    given = {"checkpoint": {"use_node_local_storage": True}}
    for world, local in ((None, None), ("4", "4")):
        for name, value in (("WORLD_SIZE", world), ("LOCAL_WORLD_SIZE", local)):
            monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
        assert load_engine_config(given) == load_engine_config({})
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="one folder that all ranks see"):
        load_engine_config(given)


def test_what_is_off_asks_for_nothing(said):
    """A config with a word on everything, all of it off, is the empty one."""
    off = {"enabled": False, "team": "x", "steps": [1]}
    plain = {name: off for name in ds.SWITCHED_OFF if name not in ds.SWITCH}
    by_switch = {name: {switch: values[-1], ds.INSIDE[name][1]: 1} for name, (switch, values) in ds.SWITCH.items()}
    given = {
        **dict.fromkeys([*ds.DOTTED, *(name for name in ds.MOOT if "." not in name)]),
        **{path: off for path in ds.NOT_IMPLEMENTED if "." not in path},
        "activation_checkpointing": {"partition_activations": False, "number_checkpoints": None},
        "aio": {},
        "pipeline": {},
        "use_data_before_expert_parallelism": False,
        "compression_training": {},
        "fp32_allreduce": False,
        "log_level": None,
        "timers": {"throughput": {"enabled": False, "synchronized": True}},
        "compile": {"deepcompile": False, "double_buffer": True},
        "tensor_parallel": {"autotp_size": 0, "dtype": "x"},
        "wall_clock_breakdown": None,
        "checkpoint": {"parallel_write": {"pipeline_stage": False}, "writer": None, "tag_validation": "Ignore"},
        "data_types": {"param_dtype": None, "buffer_dtype": "auto", "grad_accum_dtype": None},
        "fp16": {"enabled": False},
        "bf16": None,
        "zero_allow_untested_optimizer": 1,
        "zero_optimization": {
            "stage": 0,
            "leaf_module": {"classes": [], "names": []},
            "zenflow": None,
            "zeropp_loco_param": None,
            "save_muon_momentum_buffer_in_memory": False,
            "offload_param": {},
            "offload_optimizer": {"device": "none", "super_offload": False, "fast_init": True},
            # From Hugging Face's examples: whole parameters have nothing to gather.
            "stage3_gather_16bit_weights_on_model_save": True,
            "reduce_bucket_size": "auto",
            "contiguous_gradients": "auto",
        },
    }
    for switched in (dict.fromkeys(ds.SWITCHED_OFF, False), {**plain, **by_switch}, {"tensorboard": {}, "wandb": None}):
        assert load_engine_config(given | switched) == load_engine_config({})
    assert said.messages == []


@pytest.mark.parametrize("path", [*ds.NOT_IMPLEMENTED, *ds.SWITCHED_OFF])
def test_what_is_on_is_refused_by_name(path):
    by_presence = [{}] if path in ds.BY_PRESENCE else []
    for on in ({"enabled": True, "deepcompile": True, "autotp_size": 2}, True, "asked for", *by_presence):
        with pytest.raises(ConfigError, match=f"'{path}' is a DeepSpeed key that deepzero does not implement"):
            load_engine_config(nested(path, on))
    assert by_presence or load_engine_config(nested(path, {})) == load_engine_config({})


def test_before_a_trainer_has_filled_it_in():
    """``zero.Init`` reads the one block; ``initialize`` needs the numbers."""
    given = zero(stage=3, reduce_bucket_size="auto", stage3_prefetch_bucket_size="auto", param_persistence_threshold=9)
    given |= dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_clipping"), "auto")
    given |= {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}, "bf16": {"enabled": "auto"}}
    found = load_zero_config(given)
    assert (found.stage, found.stage3_param_persistence_threshold, found.reduce_bucket_size) == (3, 9, 500_000_000)
    with pytest.raises(ConfigError, match=r'^train_batch_size="auto" is for a trainer'):
        load_engine_config(given)
    with pytest.raises(ConfigError, match=r"^zero_optimization.stage=7"):
        load_zero_config(zero(stage=7))


def test_errors_name_the_jsons_keys():
    """Known ones, outside of quotes: what else begins like one is a module, a parameter, a file of the user's."""
    for text, said in (
        ("zero.stage=1: not zero.offload_param.", "zero_optimization.stage=1: not zero_optimization.offload_param."),
        ("rank's precision.hysteresis, precision.dtype=bf16", "rank's fp16.hysteresis, bf16.enabled=true"),
        ("(precision=fp32) precision.check_grad_overflow", "(fp32) bf16.check_grad_overflow"),
        ("zero.offload_param.nvme_path='/zero.stage'", "zero_optimization.offload_param.nvme_path='/zero.stage'"),
    ):
        assert in_json_words(text) == said
    kept = r"""zero.Init a.zero.stage /a/zero.stage zero.stage.bias precision.bias 'it\'s zero.stage' "zero.stage" """
    assert in_json_words(kept) == kept


def test_forms_of_a_config(tmp_path, monkeypatch):
    given = {"train_batch_size": 4, **zero(stage=2)}
    wanted = load_engine_config(given)
    text = base64.urlsafe_b64encode(json.dumps(given).encode()).decode()
    assert load_engine_config(text) == wanted
    with pytest.raises(ConfigError, match="base64 text, has 'a' twice"):
        load_engine_config(base64.urlsafe_b64encode(b'{"a": 1, "a": 2}').decode())
    commented = tmp_path / "config.hjson"
    commented.write_text("# all of it\n" + json.dumps(given))
    monkeypatch.setitem(sys.modules, "hjson", None)
    with pytest.raises(ConfigError, match=r"config.hjson' is not JSON: .* install the package hjson, or write JSON"):
        load_engine_config(commented)
    HjsonDecodeError = type("HjsonDecodeError", (ValueError,), {})

    def loads(text, object_pairs_hook):
        if not text.startswith("#"):
            raise HjsonDecodeError("line 1")
        return json.loads(text.partition("\n")[2], object_pairs_hook=object_pairs_hook)

    monkeypatch.setitem(sys.modules, "hjson", types.SimpleNamespace(loads=loads, HjsonDecodeError=HjsonDecodeError))
    assert load_engine_config(commented) == wanted
    for text, words in (('#\n{"a": 1, "a": 2}', "hjson' has 'a' twice"), ("{,", "neither JSON nor Hjson: line 1")):
        commented.write_text(text)
        with pytest.raises(ConfigError, match=words):
            load_engine_config(commented)


def test_every_key_of_deepspeed_is_known(monkeypatch):
    """Read, in a table, or another name of one that is: the installed DeepSpeed's, or those collected from one."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    keys = defaults_of_deepspeed()
    fields = {key.replace(".stage3_", ".") for key in keys} - {"zero_optimization.gather_fp16_weights_on_model_save"}
    assert len(keys) > 200 and len(fields - {*keys}) > 8
    for key in (*keys, *fields):
        try:
            load_engine_config(nested(key, "no such value"))
        except ConfigError as error:
            assert "unknown config key" not in str(error), key


def test_the_tables_agree():
    tables = [ds.SATISFIED, ds.STEERING, ds.MOOT, ds.SWITCHED_OFF, ds.NOT_IMPLEMENTED, ds.OLDER]
    everything = [key for table in tables for key in table]
    assert len(everything) == len(set(everything))
    assert {*ds.INSTEAD} <= {*ds.SWITCHED_OFF, *ds.NOT_IMPLEMENTED}
    assert {*ds.SWITCH} <= {*ds.INSIDE} <= {*ds.SWITCHED_OFF, *ds.MOOT, "tensor_parallel.tp"}
    assert all(name in ds.INSIDE[block] for block, (name, _) in ds.SWITCH.items())
    assert {*ds.BY_PRESENCE} <= {*ds.NOT_IMPLEMENTED}
