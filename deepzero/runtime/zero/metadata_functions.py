"""What torch may be asked about a partitioned parameter without its values. Data for ``partition_parameters.py``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import get_default_nowrap_functions

_PROPERTIES = """
shape dtype device grad _grad requires_grad is_leaf grad_fn ndim layout is_cuda is_cpu is_meta is_sparse is_mps
is_sparse_csr is_quantized is_mkldnn is_nested is_xpu is_hpu is_ipu is_xla is_vulkan is_maia is_mtia output_nr _version
_backward_hooks _post_accumulate_grad_hooks retains_grad name itemsize nbytes names _cdata
""".split()  # noqa: SIM905
_METHODS = """
size dim numel nelement ndimension is_floating_point is_complex is_signed is_conj is_neg register_hook requires_grad_
register_post_accumulate_grad_hook element_size get_device is_contiguous __len__ __hash__ is_inference is_same_size
is_pinned is_shared retain_grad
""".split()  # noqa: SIM905
_FUNCTIONS = "is_floating_point is_complex is_signed is_conj is_neg numel is_same_size is_inference".split()  # noqa: SIM905


def _collect() -> frozenset[Any]:
    found: set[Any] = set(get_default_nowrap_functions())
    for name in _PROPERTIES:
        descriptor = getattr(Tensor, name, None)
        for access in ("__get__", "__set__", "__delete__"):
            method = getattr(descriptor, access, None)
            # Only reading, and what autograd and hooks write: a gradient, a flag, a list of hooks.
            writable = name in ("grad", "_grad", "requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks")
            if method is not None and (access == "__get__" or writable):
                found.add(method)
    found.update(getattr(Tensor, name) for name in _METHODS if hasattr(Tensor, name))
    found.update(getattr(torch, name) for name in _FUNCTIONS if hasattr(torch, name))
    return frozenset(found)


METADATA = _collect()
"""Functions and property accessors that need no values; they see the logical shape."""

READS_WITHOUT_VALUES = frozenset({Tensor.detach, torch.detach, Tensor.data.__get__})  # type: ignore[attr-defined]
"""They return an alias, which is as partitioned as the parameter."""
