"""What every compiled kernel here needs: is there a compiler, and, on CPUs, code that never compiles twice.

A kernel is a few lines of torch over whole tensors, written for a reader, which the compiler turns into one pass over
memory. It is compiled before training, checked against the same lines in plain torch, and then serves every size.
Who uses one: ``comm/quantization.py`` and ``offload/adam_kernels.py``.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import shlex
import shutil
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

T = TypeVar("T")
_COMPILING = threading.RLock()


class CompilationError(RuntimeError):
    """There is no compiled kernel, and why."""


def why_not_compiled(device_type: str = "cpu") -> str:
    """Why nothing can be compiled here, as far as can be told without trying; empty when it seems possible.

    ``cpu`` takes a C++ compiler, ``cuda`` takes Triton.
    """
    if device_type == "cpu":
        name = os.environ.get("CXX") or {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++")
        if not (words := shlex.split(name)) or shutil.which(words[0]) is None:
            return f"no C++ compiler ({name} is not there; the environment variable CXX can name another)"
    elif device_type != "cuda":
        return f"nothing is compiled for devices of type {device_type}"
    elif importlib.util.find_spec("triton") is None:
        return "no Triton (the package triton is not installed)"
    if any(os.environ.get(switch) == "1" for switch in ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE")):
        return "compiling is switched off by TORCHDYNAMO_DISABLE or TORCH_COMPILE_DISABLE"
    return ""


def compile_apart(lines: Callable[..., Any], name: str) -> Callable[..., Any]:
    """``torch.compile``, so that one function serves all lengths and thread counts, and never recompiles.

    **No guard asks anything of later calls.** They must bring tensors of the dtypes, device, dimensions and strides of
    the first call, whose sizes the caller has marked dynamic where they change.

    ``lines`` is a module-level function, ``name`` this variant's alone. Its first call, inside :func:`compilation`,
    compiles.
    """
    # Compiled code hangs on the code object, which each variant needs for itself because no guard tells them apart.
    code = lines.__code__.replace(co_name=name)
    own = types.FunctionType(code, lines.__globals__, name)
    options: dict[str, Any] = {
        # What the guards would ask (dtypes, contiguity, more than one element) has been asked by then; their other
        # questions (thread count, gradient mode, views) would only recompile, eight times, and then not any more.
        "guard_filter_fn": torch.compiler.skip_all_guards_unsafe,
        "cpp.dynamic_threads": True,
        "cpp.enable_floating_point_contract_flag": "off",
    }
    return torch.compile(own, fullgraph=True, options=options)


def compiled_once(make: Callable[..., T]) -> Callable[..., T]:
    """Cache the kernels that ``make`` compiles, by its arguments."""
    cached = functools.cache(make)

    @functools.wraps(make)
    def get(*variant: Any) -> T:
        with _COMPILING:  # a thread that asks meanwhile waits, and gets the same; filters of warnings are the process's
            return cached(*variant)

    get.cache_clear = cached.cache_clear  # type: ignore[attr-defined]
    return get


@contextmanager
def compilation() -> Iterator[None]:
    """Around a first call: no warnings from inside the compiler, and one kind of error.

    Raises:
        CompilationError: for whatever a compiler, a linker or dynamo raises.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecations inside torch._dynamo are not the user's
            _probe_without_torch()
            yield
    except Exception as error:
        text = str(error).strip().splitlines() or [""]
        raise CompilationError(f"the compiler failed: {type(error).__name__}: {text[0]}") from error


def _probe_without_torch() -> None:
    """Let the probes for vector instructions load libtorch_cpu alone, as torch 2.13's own do.

    Before 2.13 up to ten processes import torch for them, one after the other, in every process that compiles for a
    CPU: 14 to 35 s at every start, also with a warm cache.
    """
    isa = importlib.import_module("torch._inductor.cpu_vec_isa").VecISA
    library = Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"
    if not hasattr(isa, "_probe_load") and library.exists():
        light = f"import ctypes\ntry:\n    ctypes.CDLL({str(library)!r})\nexcept OSError:\n    __import__('torch')"
        isa._avx_py_load = isa._avx_py_load.replace("import torch", light)


def is_compiled(module: nn.Module) -> bool:
    """Whether the module runs as compiled code: ``torch.compile(module)``, or ``module.compile()``."""
    return module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"


def never_compiled(function: T) -> T:
    """``torch.compiler.disable``, which covers what ``function`` calls, too, without its half microsecond a call."""
    dynamo: Any = torch._C._dynamo.eval_frame
    strategy = dynamo._FrameExecStrategy(dynamo._FrameAction.SKIP, dynamo._FrameAction.SKIP)
    dynamo.set_code_exec_strategy(function.__code__, strategy)  # type: ignore[attr-defined]
    function._torchdynamo_disable = True  # type: ignore[attr-defined]  # what is traced stops at a call of it
    return function
