"""The random generators of one rank: Python's, numpy's, torch's on the CPU and on this rank's GPU."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from deepzero.device import accelerator_of


def capture(device: torch.device) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The state of all generators: 1-D tensors by name, and the numbers that belong to them."""
    version, words, python_gauss = random.getstate()
    kind, keys, position, has_gauss, numpy_gauss = np.random.get_state(legacy=True)
    tensors = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(words, dtype=torch.int64, device="cpu"),
        "numpy": torch.from_numpy(np.asarray(keys, dtype=np.int64)),
    }
    if (accelerator := accelerator_of(device)).has_streams:
        tensors[device.type] = accelerator.rng_state(device)
    numpys = {"numpy_position": int(position), "numpy_has_gauss": int(has_gauss), "numpy_gauss": float(numpy_gauss)}
    return tensors, {"python_version": version, "python_gauss": python_gauss, "numpy_kind": str(kind), **numpys}


def restore(tensors: dict[str, torch.Tensor], numbers: dict[str, Any], device: torch.device) -> None:
    """Go on where :func:`capture` was called. A GPU's state is left out where there was or is none."""
    torch.set_rng_state(tensors["torch"])
    random.setstate((numbers["python_version"], tuple(tensors["python"].tolist()), numbers["python_gauss"]))
    words = tensors["numpy"].numpy().astype(np.uint32)
    rest = (numbers[f"numpy_{name}"] for name in ("position", "has_gauss", "gauss"))
    np.random.set_state((numbers["numpy_kind"], words, *rest))
    if (accelerator := accelerator_of(device)).has_streams and device.type in tensors:
        accelerator.set_rng_state(tensors[device.type], device)
