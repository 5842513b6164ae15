"""How much of a checkpoint is read: over all ranks about once, whatever the layout it was saved in."""

import pytest

from deepzero.checkpoint import reader
from deepzero.checkpoint.checkpoint_dir import find, read_manifest
from tests.distributed.checkpoints import engine_for, train_and_save
from tests.distributed.training import TinyModel


def bytes_of_a_load(rank, world, folder, stage):
    engine = engine_for(world, stage, model=TinyModel(hidden=400))
    sizes, fill = [], reader.fill
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            reader, "fill", lambda path, file, view, at: (sizes.append(len(view)), fill(path, file, view, at))
        )
        engine.load_checkpoint(folder)
    engine.destroy()
    return sum(sizes)


@pytest.mark.parametrize(
    ("stage", "saved_by"), [pytest.param(0, 1, marks=pytest.mark.exhaustive), (2, 4), (3, 3), (3, 1)]
)
def test_four_ranks_read_a_checkpoint_once(ranks, tmp_path, stage, saved_by):
    ranks.run(train_and_save, tmp_path, 2, 1, {"model": TinyModel(hidden=400)}, world_size=saved_by)
    path = find(tmp_path, None)
    stored = sum(info.bytes for info in read_manifest(path).files.values())
    read = sum(ranks.run(bytes_of_a_load, tmp_path, stage, world_size=4))
    assert stored <= read <= 1.1 * stored, read / stored
