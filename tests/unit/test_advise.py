"""Advice: predictions are those of ``simulate``, what is listed fits, what is printed composes, what is fixed stays."""

import dataclasses
import json
import shlex
from types import SimpleNamespace

import pytest

from deepzero.planning.autotune import NOTHING_FITS, Search, command, rehearse_option, text
from deepzero.planning.clusters import H100_HDR
from deepzero.planning.dry_run import ClusterShape, dry_run
from deepzero.planning.estimate import Estimator, Setting
from deepzero.planning.search_space import Question
from deepzero.planning.simulate import simulate
from deepzero.runtime.memory_model import Elements, StateSizes, predicted_memory
from deepzero.training.build_model import program_of
from deepzero.training.command_line import compose
from tests.e2e import runs
from tools import advise as tool

TINY = ("model.n_layer=1", "model.n_embd=64", "model.block_size=16")
WIDE = ("model.n_layer=6", "model.n_embd=512", "model.n_head=8", "model.block_size=16")
"""19 M parameters, whose states are many times their buffers and activations."""


def ask(*words, ranks=2, memory=80e9, per_node=8, **more):
    """A question about a cluster of H100, with other memory."""
    cluster = dataclasses.replace(H100_HDR, memory_bytes=memory)
    world = ClusterShape(ranks, min(ranks, per_node))
    return Question(words, compose, program_of, cluster, world, **{"seconds": 1e6, **more})


def plain(stage, micro_batch, accumulation=1):
    return Setting(stage, "none", False, micro_batch, accumulation)


@pytest.fixture(scope="module")
def advice():
    """Everything but checkpointing and the micro-batch is open."""
    return Search(ask(*TINY, "model.activation_checkpointing=false", "train_micro_batch_size_per_gpu=2")).run()


def test_all_stages_and_offloads_are_ranked(advice):
    families = {option.setting.family for option in advice.options}
    offloaded = {(1, "optimizer"), (2, "optimizer"), (3, "optimizer"), (3, "optimizer_and_param")}
    assert families == {(0, "none"), (1, "none"), (2, "none"), (3, "none")} | offloaded
    speeds = [float(f"{option.tokens_per_second:.3g}") for option in advice.options]
    assert speeds == sorted(speeds, reverse=True)
    assert not advice.refused and not advice.waiting


def test_of_equals_the_one_without_offload_is_first():
    """Offload of a model of 0.9 million parameters was advised for the 1.4 MB of 72 GB that it saves."""
    search = object.__new__(Search)
    make = lambda offload, speed, held: SimpleNamespace(
        setting=SimpleNamespace(offload=offload),
        tokens_per_second=speed,
        simulated=SimpleNamespace(device_bytes=held),
        words=(),
    )
    search.options = [make("optimizer", 8531.0, 1), make("none", 8532.0, 3), make("none", 8533.0, 2)]
    search.options += [make("optimizer", 8541.0, 1)]
    search._sort()
    assert [(o.setting.offload, o.simulated.device_bytes) for o in search.options] == [
        ("optimizer", 1), ("none", 2), ("none", 3), ("optimizer", 1)
    ]  # fmt: skip


def test_predictions_are_those_of_simulate(advice):
    for option in (advice.options[0], advice.options[-1]):
        run = compose(option.words)
        again = simulate(dry_run(program_of(run, 2), ClusterShape(2, 2)), advice.question.cluster, 2 * 2 * 16)
        assert option.step_seconds == again.timeline.seconds
        assert option.simulated.as_dict() == again.as_dict()
        assert option.tokens_per_second == again.as_dict()["tokens_per_second"]


@pytest.mark.parametrize("words", [("zero.stage=3",), ("offload=optimizer",), ("optimizer=muon", "zero.stage=1")])
def test_states_are_known_without_a_rehearsal(words):
    run, world = compose((*WIDE, "train_micro_batch_size_per_gpu=1", *words)), ClusterShape(2, 2)
    rehearsed = dry_run(program_of(run, 2), world).memory
    for category, size in Estimator(run, program_of, H100_HDR, world).states().items():
        assert size == pytest.approx(rehearsed[category], rel=0.01), category


def test_an_offload_of_nothing_is_estimated():
    run = compose((*TINY, "offload=optimizer", "zero.offload_optimizer.ratio=0"))
    nothing = Estimator(run, program_of, H100_HDR, ClusterShape(2, 2))(Setting(2, "optimizer", False, 1))
    assert nothing.host_bytes == 0 and nothing.seconds > 0


def test_what_is_printed_composes_to_what_was_rehearsed(advice):
    for option in advice.options:
        words = shlex.split(command(option, advice.question))
        assert words[:3] == ["python", "train.py", "launch.nproc=2"]
        run, setting = compose(words[2:]), option.setting
        zero = run.engine.zero
        offloaded = {"none": (), "optimizer": ("cpu",), "optimizer_and_param": ("cpu", "cpu")}[setting.offload]
        devices = (zero.offload_optimizer.device, zero.offload_param.device)
        assert (zero.stage, devices) == (setting.stage, (*offloaded, "none", "none")[:2])
        assert run.engine.train_micro_batch_size_per_gpu == setting.micro_batch == 2
        assert run.model.activation_checkpointing is setting.checkpointing is False
    assert command(advice.options[0], advice.question) in text(advice)


def test_offload_takes_from_the_device_and_costs_time(advice):
    """The host's memory is no part of a device's, and the CPU's step takes its time, wherever the parameters are."""
    found = {option.setting.family: option for option in advice.options if not option.setting.extra}
    for stage, offload in ((2, "optimizer"), (3, "optimizer"), (3, "optimizer_and_param")):
        with_host, without = found[stage, offload].simulated, found[stage, "none"].simulated
        assert with_host.rehearsal.activation_bytes <= 1.01 * without.rehearsal.activation_bytes + 4096
        states = with_host.rehearsal.held
        moved = 2 * (states["host_masters"] + states["host_moments"]) + states["host_gradients"]
        stepped = sum(span.end - span.start for span in with_host.timeline.spans if span.lane == "host")
        assert stepped == pytest.approx(2 * moved / H100_HDR.host_memory_bandwidth, rel=2e-3)  # padding
        assert with_host.timeline.exposed_by_kind()["optimizer step"] > 0


def test_small_memory_leaves_stage_3_alone():
    """Whole parameters alone would take more than there is; a 64th of all states does not."""
    ranks, memory = 64, 36e6
    given = ("offload=none", "model.activation_checkpointing=false", "train_micro_batch_size_per_gpu=1")
    found = Search(ask(*WIDE, *given, ranks=ranks, memory=memory, rehearsals=1)).run()
    sizes = StateSizes(
        compute=2, accumulation=4, moments=8, wire=2, stage=2, overlap=True, micro_batches=1, whole_reduce=False,
        exact=False,
    )  # fmt: skip
    of_stages = [dataclasses.replace(sizes, stage=stage) for stage in (2, 3)]
    forms = [sum(predicted_memory(Elements(found.estimator.numel), ranks, given).values()) for given in of_stages]
    assert forms[0] > 0.9 * memory > forms[1]
    assert {option.setting.stage for option in found.options} == {3}
    assert sorted(refused.setting.stage for refused in found.refused) == [0, 1, 2]
    assert all(option.simulated.device_bytes <= 0.9 * memory for option in found.options)
    for said in ("stage 0: at least", "a rank has moments", "torchrun --nnodes=8 --nproc-per-node=8"):
        assert said in text(found)
    stage_2 = next(refused for refused in found.refused if refused.setting.stage == 2)
    assert stage_2.memory["parameters"] == pytest.approx(2 * found.estimator.numel)


def test_the_largest_micro_batch_that_fits():
    """Memory for some sequences; what is chosen fits, and the estimate of twice as many does not."""
    given = ("offload=none", "zero.stage=2", "model.activation_checkpointing=false")
    search = Search(ask(*TINY, *given, memory=8e6, rehearsals=4))
    best = search.run().options[0]
    assert best.setting.micro_batch > 1 and best.simulated.device_bytes <= 0.9 * 8e6
    more = search.estimator(dataclasses.replace(best.setting, micro_batch=4 * best.setting.micro_batch))
    assert more.device_bytes > 0.9 * 8e6


def test_what_is_fixed_stays():
    given = (*TINY, "zero.stage=3", "zero.offload_optimizer.device=cpu", "model.activation_checkpointing=true")
    given += ("train_micro_batch_size_per_gpu=3", "zero.reduce_bucket_size=70000", "optimizer.lr=0.5")
    found = Search(ask(*given)).run()
    assert [option.words for option in found.options] == [given]
    assert found.options[0].setting == Setting(3, "optimizer", True, 3)


def test_a_key_of_stage_3_does_not_fix_the_stage():
    space = Search(ask(*TINY, "zero.stage3_max_live_parameters=1000000")).space
    assert len(space.families()) == 8 and space.checkpointing() == [False, True]
    families = Search(ask(*TINY, "experiment=smoke", "zeropp=hpz")).space.families()
    assert families == [(3, offload) for offload in ("none", "optimizer", "optimizer_and_param")]


def test_nodes_bring_hpz_and_lossy_brings_the_rest():
    few, many = (Search(ask(*TINY, ranks=8, per_node=4, lossy=lossy)).space for lossy in (False, True))
    best = plain(3, 1)
    assert [extra[0] for extra in few.variants(best, 1 << 20, 1 << 16)] == ["zeropp=hpz", "zeropp=mics"]
    everything = many.variants(best, 1 << 20, 1 << 16)
    assert [extra[0] for extra in everything[2:]] == ["zeropp=qwz", "zeropp=qgz", "zeropp=all"]
    for extra in everything:
        assert compose([*TINY, "zero.stage=3", *extra]).engine.zero.secondary_size in (1, 4)
    assert few.variants(plain(2, 1), 1 << 20, 1 << 16) == []


def test_many_micro_batches_lie_on_a_straight_line():
    words = (*TINY, "zero.stage=3", "train_micro_batch_size_per_gpu=1", "train_batch_size=12")
    question = ask(*words)
    option, run = rehearse_option(question, plain(3, 1, 6), words), compose(words)
    whole = simulate(dry_run(program_of(run, 2), question.world), question.cluster, 12 * 16)
    assert option.straight_line
    assert option.tokens == whole.tokens
    assert option.step_seconds == pytest.approx(whole.timeline.seconds, rel=1e-9)
    assert option.simulated.device_bytes == pytest.approx(whole.device_bytes, abs=64)  # losses


def test_a_global_batch_is_kept():
    space = Search(ask(*TINY, global_batch=12)).space
    assert space.batches() == [(1, 6), (2, 3), (3, 2), (6, 1)]
    run = compose(space.words(plain(1, 3, 2)))
    assert (run.engine.train_batch_size, run.engine.train_micro_batch_size_per_gpu) == (12, 3)


def test_one_micro_batch_a_step_may_fit_where_several_smaller_ones_do_not():
    """Of stages 0 and 1 several sum their gradients in fp32."""
    given = (*WIDE, "zero.stage=1", "offload=none", "model.activation_checkpointing=false")
    fits, none = (Search(ask(*given, memory=memory, global_batch=4)).run() for memory in (2.7e8, 2e8))
    assert {(one.setting.micro_batch, one.setting.accumulation) for one in fits.options} == {(2, 1)}
    assert [one.setting.micro_batch for one in none.refused] == [2]


def test_nothing_fits(capsys, tmp_path):
    file, given = tmp_path / "advice.json", ["offload=none", "model.activation_checkpointing=false"]
    status = tool.main([*WIDE, "--ranks", "2", "--memory-gb", "0.06", *given, "--json", str(file)])
    out = capsys.readouterr().out
    assert status == tool.NOTHING
    assert f"{NOTHING_FITS}; nearest is zero.stage=3 " in out and "devices of about" in out
    assert "what would help: 16 ranks instead of 2" in out
    assert "what would help: zero.stage=3 zero.offload_optimizer.device=cpu zero.offload_param.device=cpu" in out
    written = json.loads(file.read_text(encoding="utf-8"))
    assert written["options"] == [] and len(written["refused"]) == 4
    assert all(refused["too_much"] > 0 for refused in written["refused"])


@pytest.mark.exhaustive
def test_what_is_printed_runs(advice, tmp_path):
    """The one that offloads most, for two steps on this machine."""
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("for i in range(10):\n    print(i)\n" * 2000, encoding="utf-8")
    option = next(one for one in advice.options if one.setting.family == (3, "optimizer_and_param"))
    words = shlex.split(command(option, advice.question))[2:]
    few = ("train.steps=2", "train.eval_every=0", "train.sample_tokens=0", "train.save_every=0")
    more = (*few, "data=text", f"data.path={corpus}", f"hydra.run.dir={tmp_path / 'run'}")
    done = runs.train(*words, *more, cwd=tmp_path)
    assert done.status == 0, done.err
    assert "step 2/2" in " ".join(done.out.split())
