"""DeepSpeed's ``get_accelerator()``: the device that ranks compute on, under the names of DeepSpeed's methods.

It is a namespace of functions from three tables. On a GPU most are torch's own for the device. On the CPU nothing runs
beside the program, so there are no streams and events, and memory is what this process has of the host's.

Source: ``accelerator/abstract_accelerator.py`` and its classes for CUDA and the CPU in [DeepSpeed].
"""

from __future__ import annotations

import contextlib
import functools
import os
from types import SimpleNamespace
from typing import Any

import torch

from deepzero.comm import process_group
from deepzero.compat import obey_ds_accelerator
from deepzero.config.strict import ConfigError
from deepzero.device import accelerator, accelerator_of, installed
from deepzero.offload.pinned_arena import available_host_bytes
from deepzero.runtime.consistency import check_precision

_OF_TORCH = (
    "Event Stream current_device current_stream default_stream device_count empty_cache get_rng_state initial_seed "
    "is_available is_current_stream_capturing manual_seed manual_seed_all max_memory_allocated max_memory_reserved "
    "memory_allocated memory_reserved memory_stats reset_peak_memory_stats set_device set_rng_state stream synchronize"
)
_NOTHING_ON_CPU = (
    "create_graph current_stream default_stream empty_cache range_pop range_push replay_graph reset_peak_memory_stats "
    "set_device synchronize"
)
_TENSORS = dict(BFloat16="bfloat16", Byte="uint8", Double="double", Float="float", Half="half", Int="int", Long="long")


class DeepSpeedAccelerator(SimpleNamespace):
    """``cpu`` or ``cuda``. Made by :func:`get_accelerator`."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"get_accelerator() has no {name}; docs/coming_from_deepspeed.md says what is here")


def _pin(tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True) -> torch.Tensor:
    size = tensor.shape if match_shape else (tensor.numel(),)
    return tensor.pin_memory() if make_copy else torch.empty(size, dtype=tensor.dtype, pin_memory=True)


def _on_gpu(gpu: Any) -> dict[str, Any]:
    """``gpu`` is torch's module for it."""
    return {name: getattr(gpu, name) for name in _OF_TORCH.split()} | {
        "available_memory": lambda device_index=None: gpu.mem_get_info(device_index)[0],
        "capture_to_graph": lambda graph, pool=None, stream=None: gpu.graph(graph, pool, stream),
        "create_graph": gpu.CUDAGraph,
        "default_generator": lambda device_index: gpu.default_generators[device_index],
        "is_triton_supported": lambda: gpu.get_device_capability() >= (8, 0),
        "lazy_call": gpu._lazy_call,
        "pin_memory": _pin,
        "range_pop": lambda domain=None: gpu.nvtx.range_pop(),
        "range_push": lambda msg, domain=None, category=None: gpu.nvtx.range_push(msg),
        "replay_graph": lambda graph: graph.replay(),
        "total_memory": lambda device_index=None: gpu.get_device_properties(device_index).total_memory,
    }


def _on_cpu() -> dict[str, Any]:
    cpu, variables = torch.device("cpu"), os.environ
    its = accelerator_of(cpu)
    used = lambda device_index=None: its.memory_allocated(cpu)
    peak = lambda device_index=None: its.max_memory_allocated(cpu)
    physical = its.total_memory(cpu)
    told = ("LOCAL_SIZE", "LOCAL_WORLD_SIZE")
    return dict.fromkeys(_NOTHING_ON_CPU.split(), lambda *_, **__: None) | {
        **dict.fromkeys(("Event", "Stream")),
        "available_memory": lambda device_index=None: available_host_bytes() or physical,
        "capture_to_graph": lambda graph, pool=None, stream=None: contextlib.nullcontext(),
        "current_device": lambda: int(variables.get("LOCAL_RANK", "0")),
        "default_generator": lambda device_index: torch.default_generator,
        # There is room for every rank that a launcher starts, and for a few where nobody has said how many.
        "device_count": lambda: (
            int(next((variables[name] for name in told if name in variables), 0)) or max(4, os.cpu_count() or 1)
        ),
        "get_rng_state": lambda device_index=None: torch.get_rng_state(),
        "initial_seed": torch.initial_seed,
        "is_available": lambda: True,
        "is_current_stream_capturing": lambda: False,
        "is_triton_supported": lambda: False,
        "lazy_call": lambda callback: callback(),
        **dict.fromkeys(("manual_seed", "manual_seed_all"), torch.manual_seed),
        **dict.fromkeys(("max_memory_allocated", "max_memory_reserved"), peak),
        **dict.fromkeys(("memory_allocated", "memory_reserved"), used),
        "memory_stats": lambda device_index=None: {
            "allocated_bytes.all.current": used(),
            "allocated_bytes.all.peak": peak(),
        },
        "pin_memory": lambda tensor, make_copy=True, match_shape=True: tensor,  # no device copies from it
        "set_rng_state": lambda new_state, device_index=None: torch.set_rng_state(new_state),
        "stream": lambda stream: contextlib.nullcontext(),
        "total_memory": lambda device_index=None: physical,
    }


def _anywhere(kind: str, its: dict[str, Any]) -> dict[str, Any]:
    def named(device_index: int | None = None) -> str:
        return kind if device_index is None or kind == "cpu" else f"{kind}:{device_index}"

    def computes_in(dtype: str) -> bool:  # in which deepzero trains here
        with contextlib.suppress(ConfigError):
            check_precision(dtype, torch.device(named()))
            return True
        return False

    dtypes = {"fp32": torch.float, "fp16": torch.half, "bf16": torch.bfloat16}
    tensors = {f"{name}Tensor": functools.partial(torch.tensor, dtype=getattr(torch, dtype), device=kind)
               for name, dtype in _TENSORS.items()}  # fmt: skip
    synchronized = ("is_synchronized_device", "use_host_timers", "resolves_data_dependency")
    return dict.fromkeys((*synchronized, "handles_memory_backpressure"), lambda: kind == "cpu") | tensors | {
        "_name": kind,
        "communication_backend_name": lambda: "nccl" if kind == "cuda" else "gloo",
        "current_device_name": lambda: named(its["current_device"]()),
        "device": lambda device_index=None: torch.device(named(device_index)),
        "device_name": named,
        "is_bf16_supported": lambda: computes_in("bf16"),
        "is_fp16_supported": lambda: computes_in("fp16"),
        "is_pinned": lambda tensor: tensor.is_pinned(),
        # Older names, which torch has given up.
        "max_memory_cached": its["max_memory_reserved"],
        "memory_cached": its["memory_reserved"],
        "on_accelerator": lambda tensor: tensor.device.type == kind,
        "random": lambda: torch.random,
        **dict.fromkeys(("reset_max_memory_allocated", "reset_max_memory_cached"), its["reset_peak_memory_stats"]),
        "supported_dtypes": lambda: [dtype for name, dtype in dtypes.items() if computes_in(name)],
        "visible_devices_envs": lambda: ["CUDA_VISIBLE_DEVICES"],
    }  # fmt: skip


@functools.cache
def get_accelerator() -> DeepSpeedAccelerator:
    """The kind of device that engines of this process compute on; ``DS_ACCELERATOR`` may name no other."""
    obey_ds_accelerator()
    if (named := os.environ.get("DS_ACCELERATOR")) not in (None, "", "cpu", "cuda"):
        raise ConfigError(f"DS_ACCELERATOR={named}: deepzero computes on cuda and cpu; set it to one, or unset it")
    kind = process_group.default_device().type
    if named and named != kind:
        raise ConfigError(
            f"DS_ACCELERATOR={named}, but this process computes on {kind}: torch finds "
            f"{installed().device_count()} GPUs, DEEPZERO_DEVICE={os.environ.get('DEEPZERO_DEVICE', '')}; unset one"
        )
    if kind not in ("cpu", "cuda"):
        raise ConfigError(f"get_accelerator() answers for cuda and cpu, and this process computes on {kind}")
    its = _on_gpu(accelerator().module) if kind == "cuda" else _on_cpu()
    return DeepSpeedAccelerator(**its, **_anywhere(kind, its))


def is_current_accelerator_supported() -> bool:
    """Whether deepzero computes on it; another one is refused by :func:`get_accelerator`."""
    return bool(get_accelerator())
