"""The batch of a run that goes on, on as many ranks as before or not; and checkpoints that a run cannot begin with."""

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from deepzero.config.engine import EngineConfig, resolve_batch
from deepzero.config.strict import ConfigError
from deepzero.training import resume, run_folder


def split(ranks, saved_by, micro, **config):
    """How a global batch of 12 that was saved with micro-batches of ``micro`` is cut on ``ranks``."""
    batch = {"global_batch": 12, "micro_batch": micro, "accumulation": 12 // micro // saved_by}
    saved = SimpleNamespace(world_size=saved_by, batch=batch)
    sizes = resolve_batch(resume.keep_global_batch(EngineConfig(**config), saved, ranks), ranks)
    return f"{sizes.global_batch} = {sizes.micro_batch} x {sizes.accumulation} x {ranks}"


def test_fewer_ranks_accumulate_more():
    assert split(4, 4, 3, train_batch_size=12) == "12 = 3 x 1 x 4"
    assert split(3, 4, 3, train_batch_size=12) == "12 = 2 x 2 x 3"
    assert split(1, 4, 3, train_batch_size=12) == "12 = 3 x 4 x 1"


def test_more_ranks_take_smaller_micro_batches():
    assert split(6, 2, 6, train_batch_size=12) == "12 = 2 x 1 x 6"


def test_a_second_start_with_the_fewer_ranks_keeps_the_batch():
    # The command names the micro-batch only, which on one rank would make a global batch of 6.
    assert split(1, 2, 6, train_micro_batch_size_per_gpu=6) == "12 = 6 x 2 x 1"
    assert split(1, 1, 6, train_micro_batch_size_per_gpu=6) == "12 = 6 x 2 x 1"


def test_a_second_start_with_the_fewer_ranks_keeps_the_micro_batch():
    # More than the first start had might not fit into memory.
    assert split(2, 2, 3, train_batch_size=12) == "12 = 3 x 2 x 2"


def test_what_a_run_names_goes_first():
    assert split(2, 2, 6, train_batch_size=24) == "24 = 12 x 1 x 2"
    assert split(2, 2, 6, train_micro_batch_size_per_gpu=2) == "12 = 2 x 3 x 2"
    assert split(2, 2, 6, train_batch_size=12, gradient_accumulation_steps=3) == "12 = 2 x 3 x 2"


def test_a_batch_that_ranks_cannot_share():
    with pytest.raises(ConfigError, match="train_batch_size=12, which 5 ranks cannot share evenly"):
        split(5, 4, 3, train_batch_size=12)


def test_fewer_steps_than_were_taken(monkeypatch):
    monkeypatch.setattr(resume, "read_manifest", lambda path: SimpleNamespace(counters={"global_steps": 7}))
    resume.manifest_of(Path("saved"), 7)
    with pytest.raises(ConfigError, match=r"train\.steps=6: saved was saved after step 7; name at least as many"):
        resume.manifest_of(Path("saved"), 6)


def test_a_kill_before_latest_was_written_for_the_first_time(tmp_path):
    own = tmp_path / "checkpoints"
    for step in (4, 8):
        (own / resume.tag_of(step)).mkdir(parents=True)
        (own / resume.tag_of(step) / "COMMIT").touch()
    assert resume.find_start("auto", tmp_path) == own / resume.tag_of(8)
    assert resume.find_start(None, tmp_path, restarted=True) == own / resume.tag_of(8)
    (own / "latest").write_text(resume.tag_of(4))
    assert resume.find_start("auto", tmp_path) == own / resume.tag_of(4)
    assert resume.find_start("auto", tmp_path / "elsewhere") is None


def test_a_run_goes_back_to_a_checkpoint_of_its_own(tmp_path, monkeypatch):
    """Where the newest is damaged, say. Another run's only counts until this one has saved, and so does a restart's."""
    monkeypatch.chdir(tmp_path)
    own, other = Path("run/checkpoints"), Path("other/checkpoints")
    for folder in (own, other):
        for step in (4, 8):
            (folder / resume.tag_of(step)).mkdir(parents=True)
            (folder / resume.tag_of(step) / "COMMIT").touch()
        (folder / "latest").write_text(resume.tag_of(8))
    older = own / resume.tag_of(4)
    for named in (older, older.resolve()):
        assert resume.find_start(str(named), Path("run")) == older
        assert resume.find_start(str(named), Path("run"), restarted=True) == own / resume.tag_of(8)
    assert resume.find_start(str(other / resume.tag_of(4)), Path("run")) == own / resume.tag_of(8)
    assert resume.find_start(str(other / resume.tag_of(4)), Path("new")) == other / resume.tag_of(4)


def test_a_run_goes_back_where_latest_cannot_be_read(tmp_path, monkeypatch):
    """Or cannot be written, which is one line."""
    own = tmp_path / "checkpoints"
    (own / "step_4").mkdir(parents=True)
    (own / "step_4" / "COMMIT").touch()
    (own / "latest").write_bytes(b"\xff")
    run = SimpleNamespace(train=SimpleNamespace(resume=str(own / "step_4"), seed=0), data=SimpleNamespace(name="tiny"))
    data = {"data": "tiny", "sequences": 9, "seed": 0}
    engine = SimpleNamespace(
        load_checkpoint=lambda path: (path, {"data": data}), global_steps=4, global_samples=8, global_rank=0
    )
    sampler = SimpleNamespace(go_on=lambda *_: None, num_sequences=9)
    command = SimpleNamespace(keep=lambda _: None)
    assert run_folder.load_start(run, tmp_path, engine, sampler, command) == 4
    assert (own / "latest").read_text() == "step_4\n"

    def full(path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    (own / "latest").write_text("step_2\n")
    monkeypatch.setattr(run_folder, "point_latest", full)
    with pytest.raises(ConfigError, match=r"cannot write .*/step_4: No space left on device; make room there"):
        run_folder.load_start(run, tmp_path, engine, sampler, command)
