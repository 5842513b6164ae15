"""A stream of tokens as sequences of T: inputs and, one token later, targets.

Window ``i`` is tokens ``i·T … i·T + T``: inputs are all of it but the last, targets all but the first.
Windows share their boundary token, so that every token but the first of the corpus is a target exactly once per
epoch. A rest at the end shorter than a window is not used. Nothing is copied until a batch is asked for, hence a
memory-mapped file of any size costs a batch of memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deepzero.config.strict import ConfigError
from deepzero.device import accelerator_of


def batches_on(device: torch.device, batches: Iterable[tuple[Tensor, ...]]) -> Iterator[tuple[Tensor, ...]]:
    """The same ``batches`` on ``device``: on a GPU one ahead, while it works on the one before, and without waiting.

    Tensors that are there already are passed on. One in locked memory is copied from as it is: write to it no more.

    Example:
        >>> [float(x.sum()) for (x,) in batches_on(torch.device("cpu"), ((torch.full((2,), i),) for i in range(3)))]
        [0.0, 2.0, 4.0]
    """
    accelerator = accelerator_of(device)
    if not accelerator.has_streams:
        for batch in batches:
            yield tuple(tensor.to(device) for tensor in batch)
        return
    stream, given, arrived = accelerator.batch_stream(device), accelerator.event(device), accelerator.event(device)
    ahead: tuple[Tensor, ...] = ()
    try:
        for batch in batches:
            # Only from locked memory does a copy go on by itself. Its destination is the current stream's, which will
            # free it: so the copy comes after what that stream was doing with this memory, work of the last batch.
            locked = {k: accelerator.pin(tensor) for k, tensor in enumerate(batch) if tensor.device.type == "cpu"}
            following = tuple(
                torch.empty_like(tensor, device=device) if k in locked else tensor.to(device)
                for k, tensor in enumerate(batch)
            )
            given.record()
            if ahead:
                arrived.wait()  # before the event is recorded anew
            with stream.running():
                given.wait()
                for k, source in locked.items():
                    following[k].copy_(source, non_blocking=True)
                arrived.record()
            if ahead:
                yield ahead
            ahead = following
        if ahead:
            arrived.wait()
            yield ahead
    finally:
        # Who stops early frees what is still being copied, and the current stream may take that memory at once.
        arrived.wait()


class TokenSequences:
    """Sequences of ``block_size`` tokens over a 1-D array.

    Args:
        tokens: 1-D integers; may be a memory map.
        block_size: T, tokens per sequence.
        name: of these tokens, for messages: "training corpus".
        vocab_size: of the model; every batch is then checked for ids that the model's embedding does not have, which
            would be an unexplained index error on a CPU and a dead process on a GPU.

    Raises:
        ConfigError: fewer tokens than one sequence and its last target.

    Example:
        >>> inputs, targets = TokenSequences(np.arange(9), block_size=4).batch(np.array([1, 0]))
        >>> inputs.tolist(), targets.tolist()
        ([[4, 5, 6, 7], [0, 1, 2, 3]], [[5, 6, 7, 8], [1, 2, 3, 4]])
    """

    def __init__(
        self, tokens: npt.NDArray[np.integer], block_size: int, name: str = "corpus", vocab_size: int | None = None
    ) -> None:
        if tokens.ndim != 1:
            raise ConfigError(f"the {name} must be one stream of tokens, got an array of shape {tokens.shape}")
        if len(tokens) < block_size + 1:
            raise ConfigError(
                f"the {name} has {len(tokens)} tokens, and one sequence of model.block_size={block_size} needs "
                f"{block_size + 1} (with its last target); use a larger corpus (or another data.max_bytes "
                "or data.val_fraction), or a smaller model.block_size"
            )
        self.tokens, self.block_size, self.name, self.vocab_size = tokens, block_size, name, vocab_size

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.block_size

    def batch(self, indices: npt.NDArray[np.integer]) -> tuple[Tensor, Tensor]:
        """Inputs and targets of the sequences ``indices`` [b]: contiguous int64 [b, T] on the CPU.

        Raises:
            IndexError: no such sequence.
            ConfigError: a token id that the model does not have.
        """
        size = self.block_size
        window = np.empty((len(indices), size + 1), dtype=np.int64)
        for row, index in enumerate(indices):
            if not 0 <= index < len(self):
                raise IndexError(f"sequence {index} of the {self.name}, which has {len(self)}")
            window[row] = self.tokens[int(index) * size : (int(index) + 1) * size + 1]
        if self.vocab_size is not None and len(indices) and window.max() >= self.vocab_size:
            raise ConfigError(
                f"token id {window.max()} in the {self.name} is outside the model's vocabulary: set "
                f"model.vocab_size to at least {window.max() + 1} (it is {self.vocab_size}), or give other token files"
            )
        both = torch.from_numpy(window)
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()
