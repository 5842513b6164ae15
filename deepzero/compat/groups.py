"""DeepSpeed's ``deepspeed.utils.groups``: all ranks share the data, and nothing else is parallel.

Source: ``utils/groups.py`` of [DeepSpeed].
"""

from __future__ import annotations

from typing import Any

from deepzero.comm import process_group
from deepzero.compat import comm

_OF_DATA = {
    "group": comm.get_world_group,
    "group_ranks": lambda: range(process_group.world_size()),
    "rank": process_group.rank,
    "world_size": process_group.world_size,
}
_OF_ONE = {"rank": lambda: 0, "world_size": lambda: 1, "src_rank": process_group.rank}
_NAMES = {
    f"{mark}get_{kind}_parallel_{what}": answer
    for kinds, answers in ((("data", "sequence_data"), _OF_DATA), (("model", "tensor_model", "sequence"), _OF_ONE))
    for kind in kinds
    for what, answer in answers.items()
    for mark in ("", "_")
}
_clone_world_group = comm.get_world_group


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _NAMES[name]


def __dir__() -> list[str]:
    return sorted(_NAMES)


def initialize(ep_size: int = 1, mpu: Any = None) -> None:
    """Nothing to do: groups are there when the process group is. NotImplementedError for any other parallelism."""
    if ep_size != 1 or mpu is not None:
        raise NotImplementedError("deepzero shards data-parallel training alone: ep_size must be 1 and mpu None")
