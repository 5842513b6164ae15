"""Which buffers a pool keeps."""

import torch

from deepzero.runtime.zero.buffer_pool import BufferPool
from deepzero.utils.storage import storage_ptr_of


def test_where_room_is_tight_buffers_are_kept_from_pass_to_pass():
    """Whether or not sizes were planned before."""
    for planned in ([], [8]):
        pool = BufferPool(torch.float32, torch.device("cpu"), 100)
        if planned:
            pool.settle(planned, 100)
        pool.settle([], 24)
        pool.begin_step()
        first = pool.take(16)
        place = storage_ptr_of(first)
        del first
        pool.give(place)
        pool.begin_step()
        assert [buffer.data_ptr() for buffer in pool.buffers() if buffer.numel() == 16] == [place], planned
