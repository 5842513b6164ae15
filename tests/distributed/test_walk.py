"""The journey of a gradient as ``tools.walk`` tells it, and as the pages show it."""

import re
import shlex

import pytest

from deepzero.config.strict import ConfigError
from tools import walk

NUMBER = re.compile(r"-?\d+(?:\.\d+(?:e-?\d+)?|e-?\d+)")  # no sizes, no lines of files: those are exact
PLACES = [
    pytest.param(place[1], place[2], place.string[: place.start()], id=f"{page.name}: {place[1]}")
    for page in sorted(walk.ROOT.glob("docs/*.md"))
    for place in walk.PLACE.finditer(page.read_text(encoding="utf-8"))
]
STEPS = {0: "03456", 1: "03456", 2: "03456", 3: "0112113456"}


def observed(rank, world, job):
    return walk.observe(*job)


def told(ranks, words):
    """The transcript of a command, on ranks of the pool."""
    options = walk.options_of(shlex.split(words))
    job = walk.settings(options.overrides, options.parameter, options.step)
    return ranks.run(observed, job, world_size=job[0].launch.nproc)


@pytest.mark.parametrize(("words", "shown", "above"), PLACES)
def test_the_pages_show_what_happens(ranks, words, shown, above):
    now, how = walk.transcript(told(ranks, words), above).splitlines(), "renew the pages: python -m tools.walk --update"
    assert shown is not None, how
    # Another kind of processor rounds otherwise.
    assert [NUMBER.sub("0", line) for line in shown.splitlines()] == [NUMBER.sub("0", line) for line in now], how
    for before, line in zip(shown.splitlines(), now, strict=True):
        numbers = [[float(number) for number in NUMBER.findall(one)] for one in (before, line)]
        assert numbers[0] == pytest.approx(numbers[1], rel=0.1, abs=1e-4), f"{before}\n{line}\n{how}"


def test_every_hop_is_made_in_some_stage(ranks):
    """A function that is renamed away, or whose call no longer has to do with the parameter, would vanish unnoticed."""
    missing = {hop.name for hop in walk.HOPS}
    for stage, steps in STEPS.items():
        seen = told(ranks, f"zero.stage={stage}")
        missing -= {walk.HOPS[number].name for records in seen for number, *_ in records}
        text = walk.transcript(seen)
        assert "".join(re.findall(r"^\d", text, re.M)) == steps
        assert ["becomes a view of flat_P" in text, "by  pre_forward, for " in text] == [stage < 3, stage == 3]
    assert not missing


def test_a_rank_without_a_fragment_and_a_bucket_that_is_waited_for_early(ranks):
    text = walk.transcript(told(ranks, "zero.stage=2 zero.overlap_comm=false launch.nproc=3 --parameter norm.weight"))
    assert "ranks 1, 2  master_S  none" in text
    assert text.index("sum_in_rank_order\n") < text.index("4 boundary")


def test_settings_that_cannot_be_walked():
    for words, complaint in {
        "--parameter blocks.0.attn.qvk.weight": r"none of this name; did you mean blocks.0.attn.qkv.weight\?",
        "zero.stage=4": "stages are 0, 1, 2 and 3",
        "zero.stge=2": "Did you mean 'zero.stage'",
        "--step 0": "the first step has number 1",
        "train_batch_size=7": "train_batch_size",
    }.items():
        options = walk.options_of(shlex.split(words))
        with pytest.raises(ConfigError, match=complaint):
            walk.settings(options.overrides, options.parameter, options.step)


@pytest.mark.slow
def test_the_command(capfd):
    assert walk.main(["zero.stage=1", "--parameter", "norm.weight", "zero.reduce_bucket_size=100000"]) == 0
    assert "6 publish" in capfd.readouterr().out
    assert walk.main(["zero.stage=7"]) == 2
    assert "stages are" in capfd.readouterr().err
