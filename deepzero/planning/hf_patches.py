"""What Hugging Face's models ask about values, answered for a rehearsal, which has none.

Before each forward pass ``transformers`` looks at the position numbers, to find out whether several short sequences
were packed into a row. A run of deepzero gives none, so that they count up from 0 and nothing is packed.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def nothing_is_packed() -> Iterator[None]:
    """While it lasts, position numbers on the meta device are those of one sequence to a row.

    Releases of ``transformers`` that do not ask have nothing to be exchanged.
    """
    # Importing it takes seconds: only where the model has done so already.
    masking: Any = sys.modules.get("transformers.masking_utils")
    original = getattr(masking, "find_packed_sequence_indices", None)
    if original is None:
        yield
        return

    def find(position_ids: torch.Tensor, *rest: Any, **options: Any) -> Any:
        return None if position_ids.is_meta else original(position_ids, *rest, **options)

    masking.find_packed_sequence_indices = find
    try:
        yield
    finally:
        masking.find_packed_sequence_indices = original
