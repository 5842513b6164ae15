"""DeepSpeed's ``get_accelerator()``: the device that ranks compute on, under the names of DeepSpeed's methods.

On a GPU most of them are functions of :mod:`torch.cuda`. On the CPU nothing runs beside the program, so there are
no streams and events, and memory is what this process has of the host's.

Source: ``accelerator/abstract_accelerator.py`` and its classes for CUDA and the CPU in [DeepSpeed].
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

from deepzero.config.strict import ConfigError
from deepzero.offload.pinned_arena import available_host_bytes
from deepzero.runtime.consistency import check_precision
from deepzero.runtime.diagnostics import peak_bytes, used_bytes

_CPU = torch.device("cpu")
_OF_TORCH_CUDA = (
    "Event Stream current_device current_stream default_stream device_count empty_cache get_rng_state initial_seed "
    "is_available is_current_stream_capturing manual_seed manual_seed_all max_memory_allocated max_memory_reserved "
    "memory_allocated memory_reserved memory_stats reset_peak_memory_stats set_device set_rng_state stream synchronize"
)
"""Methods that are torch's functions, word for word."""


def _nothing(*_: Any, **__: Any) -> None:
    """For what a CPU has no need to do."""


def _used(device_index: int | None = None) -> int:
    return used_bytes(_CPU)


def _peak(device_index: int | None = None) -> int:
    return peak_bytes(_CPU)


def _ranks_here() -> int:
    """A CPU has room for every rank that its launcher starts; nobody has said how many: for one a core."""
    told = os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or os.cpu_count()
    return int(told or 1)


_ON_CPU: dict[str, Any] = {
    "Event": None,
    "Stream": None,
    "current_device": lambda: int(os.environ.get("LOCAL_RANK", "0")),
    "device_count": _ranks_here,
    "get_rng_state": lambda device_index=None: torch.get_rng_state(),
    "initial_seed": torch.initial_seed,
    "is_available": lambda: True,
    "is_current_stream_capturing": lambda: False,
    "manual_seed": torch.manual_seed,
    "manual_seed_all": torch.manual_seed,
    "max_memory_allocated": _peak,
    "max_memory_reserved": _peak,
    "memory_allocated": _used,
    "memory_reserved": _used,
    "memory_stats": lambda device_index=None: {
        "allocated_bytes.all.current": _used(),
        "allocated_bytes.all.peak": _peak(),
    },
    "set_rng_state": lambda new_state, device_index=None: torch.set_rng_state(new_state),
    "stream": lambda stream: contextlib.nullcontext(),
}
_OLDER = {"memory_cached": "memory_reserved", "max_memory_cached": "max_memory_reserved"} | dict.fromkeys(
    ("reset_max_memory_allocated", "reset_max_memory_cached"), "reset_peak_memory_stats"
)
_TENSORS = {
    f"{name}Tensor": dtype
    for name, dtype in zip(
        ("BFloat16", "Byte", "Double", "Float", "Half", "Int", "Long"),
        (torch.bfloat16, torch.uint8, torch.double, torch.float, torch.half, torch.int, torch.long),
        strict=True,
    )
}


class Accelerator:
    """The CPU or CUDA. Made by :func:`get_accelerator`."""

    def __init__(self, kind: str) -> None:
        self._name = kind

    def __getattr__(self, name: str) -> Any:
        if name in _TENSORS:
            return functools.partial(torch.tensor, dtype=_TENSORS[name], device=self._name)
        name = _OLDER.get(name, name)
        if name not in _OF_TORCH_CUDA.split():
            raise AttributeError(f"get_accelerator() has no {name}; docs/coming_from_deepspeed.md says what is here")
        return getattr(torch.cuda, name) if self._name == "cuda" else _ON_CPU.get(name, _nothing)

    # ---- the device --------------------------------------------------------------------------------------------------

    def device_name(self, device_index: int | None = None) -> str:
        """``cpu``, ``cuda`` or ``cuda:1``."""
        return self._name if device_index is None or self._name == "cpu" else f"cuda:{device_index}"

    def device(self, device_index: int | None = None) -> torch.device:
        """The same for torch."""
        return torch.device(self.device_name(device_index))

    def current_device_name(self) -> str:
        """``cpu``, or the GPU in use with its number."""
        return self.device_name(self.current_device())

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies there."""
        return tensor.device.type == self._name

    def communication_backend_name(self) -> str:
        """The backend for its tensors."""
        return "nccl" if self._name == "cuda" else "gloo"

    def is_synchronized_device(self) -> bool:
        """Whether an operation has happened when its call returns."""
        return self._name == "cpu"

    use_host_timers = resolves_data_dependency = handles_memory_backpressure = is_synchronized_device

    # ---- what it can -------------------------------------------------------------------------------------------------

    def _computes_in(self, dtype: str) -> bool:
        try:
            check_precision(dtype, self.device())
        except ConfigError:
            return False
        return True

    def is_bf16_supported(self) -> bool:
        """Whether deepzero trains in bf16 here."""
        return self._computes_in("bf16")

    def is_fp16_supported(self) -> bool:
        """Whether deepzero trains in fp16 here."""
        return self._computes_in("fp16")

    def supported_dtypes(self) -> list[torch.dtype]:
        """What models can be trained in."""
        known = {"fp32": torch.float, "fp16": torch.half, "bf16": torch.bfloat16}
        return [dtype for name, dtype in known.items() if self._computes_in(name)]

    def is_triton_supported(self) -> bool:
        """Whether Triton's kernels run here."""
        return self._name == "cuda" and torch.cuda.get_device_capability() >= (8, 0)

    # ---- memory ------------------------------------------------------------------------------------------------------

    def total_memory(self, device_index: int | None = None) -> int:
        """Bytes that the device, or the host, has."""
        if self._name == "cpu":
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return torch.cuda.get_device_properties(device_index).total_memory

    def available_memory(self, device_index: int | None = None) -> int:
        """Bytes that nobody uses."""
        if self._name == "cpu":
            return available_host_bytes() or self.total_memory()
        return torch.cuda.mem_get_info(device_index)[0]

    def pin_memory(self, tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True) -> torch.Tensor:
        """A copy in page-locked memory; without ``make_copy`` memory alone. On the CPU the tensor itself."""
        if self._name == "cpu":
            return tensor
        if make_copy:
            return tensor.pin_memory()
        return tensor.new_empty(tensor.shape if match_shape else (tensor.numel(),), device="cpu", pin_memory=True)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's memory is page-locked."""
        return tensor.is_pinned()

    # ---- the rest ----------------------------------------------------------------------------------------------------

    def random(self) -> Any:
        """Torch's module of random numbers."""
        return torch.random

    def default_generator(self, device_index: int) -> torch.Generator:
        """The device's generator."""
        return torch.default_generator if self._name == "cpu" else torch.cuda.default_generators[device_index]

    def range_push(self, msg: str, domain: str | None = None, category: str | None = None) -> None:
        """Begin a range for NVIDIA's profiler; nothing on the CPU. It is in no domain of its own."""
        if self._name == "cuda":
            torch.cuda.nvtx.range_push(msg)

    def range_pop(self, domain: str | None = None) -> None:
        """End it."""
        if self._name == "cuda":
            torch.cuda.nvtx.range_pop()

    def lazy_call(self, callback: Callable[[], Any]) -> Any:
        """Call it when the device is in use."""
        return callback() if self._name == "cpu" else torch.cuda._lazy_call(callback)

    def visible_devices_envs(self) -> list[str]:
        """Variables that say which devices a process sees."""
        return ["CUDA_VISIBLE_DEVICES"]

    def set_visible_devices_envs(self, current_env: dict[str, str], local_accelerator_ids: list[int]) -> None:
        """Write them into an environment."""
        current_env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, local_accelerator_ids))


def chosen_device(environment: Mapping[str, str]) -> str | None:
    """The device that ``DS_ACCELERATOR`` names; None: none.

    Raises:
        ConfigError: one that deepzero does not compute on.
    """
    asked = environment.get("DS_ACCELERATOR")
    if asked not in (None, "", "cpu", "cuda"):
        raise ConfigError(f"DS_ACCELERATOR={asked}: deepzero computes on cuda and cpu; set it to one, or unset it")
    return asked or None


@functools.cache
def get_accelerator() -> Accelerator:
    """The device of this process: ``DS_ACCELERATOR``, else CUDA where a GPU can be used, else the CPU."""
    found = "cuda" if torch.cuda.is_available() and os.environ.get("DEEPZERO_DEVICE") != "cpu" else "cpu"
    return Accelerator(chosen_device(os.environ) or found)


def is_current_accelerator_supported() -> bool:
    """Always: others are not found."""
    return True


DeepSpeedAccelerator = Accelerator
