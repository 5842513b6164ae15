"""DeepSpeed's small helpers around checkpoints.

Source: ``checkpoint/utils.py`` of [DeepSpeed].
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def get_model_ckpt_name_for_rank(base_folder: str, mp_rank_str: str) -> str:
    """The file in which DeepSpeed keeps a model; deepzero's own checkpoints have none of this name."""
    return str(Path(base_folder) / f"mp_rank_{mp_rank_str}_model_states.pt")


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """Copies of all tensors in lists, tuples and dictionaries, on ``device``; other values as they are.

    ``torch.save`` would write the whole buffer that a view looks at, and of a copy writes what it is.
    """
    if torch.is_tensor(item):
        return item.detach().to(device, copy=True)
    if isinstance(item, dict):
        return type(item)({key: clone_tensors_for_torch_save(value, device) for key, value in item.items()})
    if isinstance(item, (list, tuple)):
        copies = [clone_tensors_for_torch_save(value, device) for value in item]
        return copies if isinstance(item, list) else tuple(copies)
    return item
