"""DeepSpeed's names in its checkpoints: keys of dictionaries and parts of file names.

Source: ``checkpoint/constants.py`` of [DeepSpeed].
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

OPTIMIZER_STATE_DICT, BASE_OPTIMIZER_STATE = "optimizer_state_dict", "base_optimizer_state"
SINGLE_PARTITION_OF_FP32_GROUPS, FP32_FLAT_GROUPS = "single_partition_of_fp32_groups", "fp32_flat_groups"
PARAM, PARAM_GROUPS, PARAM_SLICE_MAPPINGS = "param", "param_groups", "param_slice_mappings"
LOSS_SCALER, FP32_WEIGHT_KEY, UNIVERSAL_CHECKPOINT_INFO = "loss_scaler", "fp32", "universal_checkpoint_info"
PARAM_SHAPES, BUFFER_NAMES, DS_VERSION = "param_shapes", "buffer_names", "ds_version"
FROZEN_PARAM_SHAPES, FROZEN_PARAM_FRAGMENTS = "frozen_param_shapes", "frozen_param_fragments"

FILE = re.compile(r"(?:(?:[bf]p?f?16_)?zero_pp_rank_(\d+)_)?mp_rank_(\d+)_?(model|optim)_states\.pt")
"""A file's rank (none where one file serves all), its place in a model that is divided, and what it holds."""


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
