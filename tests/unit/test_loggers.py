"""Loggers that fail in every way there is, and what they make of a run: names, tables, ids, offline or not."""

import io
import json
import math
import threading
import time

import pytest

from deepzero.config.run import LoggerConfig
from deepzero.config.strict import ConfigError
from deepzero.monitor.async_logger import Background, finish_all
from deepzero.monitor.metrics_file import read_metrics, scalars
from deepzero.monitor.monitor import Monitor, make_monitor
from deepzero.monitor.wandb_logger import LIMIT, RUN_ID, earlier_id, ledger_rows, name_of, named, wandb_mode
from tests.e2e.readers import as_fp32, compare, tensorboard_rows, wandb_files, wandb_records, wandb_rows
from tests.unit.test_monitor import FACTS, WORK, step

PATIENCE = 20.0
"""Seconds; far more than anything here needs."""


class Failing:
    """A sink that does ``bad`` at its call number ``at``, or at its ``finish``, and writes down all calls."""

    def __init__(self, bad=lambda: None, at=0):
        self.bad, self.at = bad, at
        self.seen = []

    def _call(self, what):
        self.seen.append(what)
        if self.at in (len(self.seen), what):
            self.bad()

    def write(self, kind, entry):
        self._call(kind)

    def finish(self, summary):
        self._call("finish")


def disk_full():
    raise OSError("disk full")


def leave():
    raise SystemExit(3)


@pytest.fixture
def hang():
    """Waits until the test is over."""
    over = threading.Event()
    yield lambda: over.wait(PATIENCE) and None
    over.set()


DONE = {"status": "finished"}
SEEN = ["train", "train", "train", "validation", "finish"]


def ended(make, start=PATIENCE):
    """What is told of a run past a logger, which ends soon: three steps, a validation, the end; ``start``: seconds."""
    told, started = [], time.monotonic()
    background = Background("x", make, told.append)
    background.start(start)
    for number in (1, 2, 3):
        background.write("train", {"step": number})
    background.write("validation", {"step": 3})
    background.finish(DONE)
    assert time.monotonic() - started < PATIENCE / 2
    return told


@pytest.mark.parametrize("bad", [lambda: None, lambda: time.sleep(0.1)], ids=["good", "slow"])
def test_a_good_logger_sees_everything_in_order(bad):
    """What waits when the run ends is still written."""
    sink = Failing(bad, 1)
    assert ended(lambda _: sink) == []
    assert sink.seen == SEEN


@pytest.mark.parametrize(("at", "seen"), [(2, 2), (4, 4), ("finish", 5)])
@pytest.mark.parametrize(("bad", "words"), [(disk_full, "OSError: disk full"), (leave, "SystemExit: 3")])
def test_a_logger_that_fails_says_so_once(bad, words, at, seen):
    sink = Failing(bad, at)
    assert ended(lambda _: sink) == [f"x: {words}; training goes on without x"]
    assert len(sink.seen) == seen
    (line,) = ended(lambda _: bad() or Failing())  # it cannot even start
    assert line.endswith("training goes on without x")


def test_a_logger_that_hangs_while_it_starts_or_at_the_end(hang, monkeypatch):
    late = "x: not done after 0.2 s; the run ends without it"
    with monkeypatch.context() as patch:
        patch.setattr("deepzero.monitor.async_logger.FINISH_SECONDS", 0.2)
        assert ended(lambda _: Failing(hang, "finish")) == [late]
        told = ended(lambda _: hang() or Failing(), start=0.1)
    assert [line.partition(" after ")[0] for line in told] == ["x: not ready", "x: not done"]
    monkeypatch.setattr("deepzero.monitor.async_logger.STOP_SECONDS", 0.2)  # a run that is asked to stop
    told = []
    Background("x", lambda _: Failing(hang, "finish"), told.append).finish({"status": "stopped"})
    assert told == [late]


def test_a_logger_that_hangs_at_a_step_costs_no_time_and_no_memory(hang, monkeypatch):
    monkeypatch.setattr("deepzero.monitor.async_logger.ROOM", 10)
    monkeypatch.setattr("deepzero.monitor.async_logger.FINISH_SECONDS", 0.2)
    told, sink = [], Failing(hang, 1)
    background = Background("x", lambda _: sink, told.append)
    background.write("train", {"step": 0})
    end = time.monotonic() + PATIENCE
    while not sink.seen and time.monotonic() < end:  # until the thread has taken it
        time.sleep(0.01)
    started = time.monotonic()
    for number in range(1000):
        background.write("train", {"step": number})
    assert time.monotonic() - started < PATIENCE / 2
    assert background._waiting.qsize() == 10
    background.finish(DONE)
    assert told == [
        "x: does not keep up; entries are left out, metrics.jsonl has them all",
        "x: not done after 0.2 s; the run ends without it",
        "x: 990 entries were left out; metrics.jsonl has them",
    ]


def test_loggers_that_hang_share_their_time_and_a_good_one_is_closed(hang, monkeypatch):
    monkeypatch.setattr("deepzero.monitor.async_logger.ROOM", 1)
    monkeypatch.setattr("deepzero.monitor.async_logger.FINISH_SECONDS", 0.5)
    told, good = [], Failing()
    full, *others = [
        Background(name, lambda _, sink=sink: sink, told.append)
        for name, sink in (
            ("full", Failing(hang, 1)), *((name, Failing(hang, "finish")) for name in "bcd"), ("good", good)
        )
    ]  # fmt: skip
    for number in (1, 2, 3):  # the end of the run finds room where entries do not
        full.write("train", {"step": number})
    started = time.monotonic()
    finish_all([full, *others], DONE)
    assert time.monotonic() - started < 1.5
    assert good.seen == ["finish"]
    assert [line for line in told if "not done" in line] == [
        f"{name}: not done after 0.5 s; the run ends without it" for name in ("full", "b", "c", "d")
    ]


def watched(run_dir, monkeypatch, wandb, tensorboard):
    """A monitor with two loggers in place of the real ones, and what it prints."""
    monkeypatch.setattr("deepzero.monitor.monitor.WandB", lambda *_: wandb)
    monkeypatch.setattr("deepzero.monitor.monitor.TensorBoard", lambda *_: tensorboard)
    stream = io.StringIO()
    return make_monitor(WORK, LoggerConfig(names=("wandb", "tensorboard")), run_dir, {}, stream=stream), stream


def test_a_monitor_with_two_loggers_that_hang_ends_in_the_time_of_one(tmp_path, monkeypatch, hang):
    monkeypatch.setattr("deepzero.monitor.async_logger.STOP_SECONDS", 0.8)
    monitor, stream = watched(tmp_path, monkeypatch, Failing(hang, "finish"), Failing(hang, "finish"))
    started = time.monotonic()
    monitor.broken_off()
    assert 0.7 < time.monotonic() - started < 1.5
    assert stream.getvalue().count("not done after 0.8 s") == 2


@pytest.mark.parametrize("at", [1, 3, 4, "finish"])
@pytest.mark.parametrize("bad", [disk_full, leave])
def test_metrics_and_summary_are_whole_whatever_a_logger_does(tmp_path, monkeypatch, bad, at):
    good = Failing()
    monitor, stream = watched(tmp_path, monkeypatch, Failing(bad, at), good)
    for number in (1, 2, 3):
        monitor.step(step(number), 0.5)
    monitor.validation(3, 2.0)
    monitor.finish(FACTS)
    assert [entry["step"] for entry in read_metrics(tmp_path)] == [1, 2, 3, 3]
    assert json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))["status"] == "finished"
    assert stream.getvalue().count("training goes on without wandb") == 1
    assert good.seen == SEEN


def test_a_run_that_is_stopped_closes_its_loggers(tmp_path):
    sink = Failing()
    monitor = Monitor(WORK, tmp_path, [sink])
    monitor.step(step(1), 0.5)
    monitor.stopped("stopped by SIGTERM", {})
    assert sink.seen == ["train", "finish"]


def test_what_loggers_make_of_an_entry_and_of_the_ledger():
    entry = {"step": 7, "loss": 1.0, "skipped": True, "mfu": None, "comm/exposed_seconds": 0.5, "note": "no number"}
    assert scalars("train", entry) == {"train/loss": 1.0, "train/skipped": 1.0, "comm/exposed_seconds": 0.5}
    assert scalars("validation", {"step": 0, "val_loss": 2.0}) == {"validation/val_loss": 2.0}
    assert ledger_rows(FACTS, "memory") == [["parameters", 40, 40, 1.0]]
    assert ledger_rows(FACTS, "communication") == [["gradients.reduce_scatter", 24, 24, 1.0, 1, 10, 2]]
    nothing = {"memory": None, "communication": None}
    assert ledger_rows(nothing, "memory") == ledger_rows(nothing, "communication") == []


def test_two_points_of_a_sweep_never_share_a_name():
    long = [f"model.some_rather_long_key_{i}=1" for i in range(20)]
    one, other = (name_of([*long, f"zero.stage={stage}"]) or "" for stage in (1, 2))
    assert one != other
    assert len(one) == len(other) == LIMIT


def test_what_the_user_says_of_names_counts(nobody, monkeypatch):
    def both(cfg, overrides=("zero.stage=1", "+logger.tags=[a]"), sweep="multirun/today/noon"):
        found = named(cfg, overrides, sweep)
        return found.run_name, found.group

    assert both(LoggerConfig()) == ("zero.stage=1", "multirun/today/noon")
    assert both(LoggerConfig(run_name="mine", group="ours")) == ("mine", "ours")
    assert both(LoggerConfig(), (), None) == (None, None)
    monkeypatch.setenv("WANDB_NAME", "theirs")
    monkeypatch.setenv("WANDB_RUN_GROUP", "theirs")
    assert both(LoggerConfig()) == (None, None)


@pytest.mark.parametrize(("settings", "key"), [
    ({"run_name": "x" * 129}, "logger.run_name"),
    ({"group": ""}, "logger.group"),
    ({"tags": ("x" * 65,)}, "logger.tags"),
    ({"project": "a/b"}, "logger.project='a/b'"),
])  # fmt: skip
def test_what_wandb_would_refuse_is_refused_before_the_run(settings, key):
    with pytest.raises(ConfigError, match=key):
        LoggerConfig(**settings)


@pytest.fixture
def nobody(monkeypatch, tmp_path):
    """No word of W&B in the environment, and no login of any kind; returns the place of the netrc file."""
    for name in ("MODE", "API_KEY", "BASE_URL", "RUN_ID", "NAME", "RUN_GROUP"):
        monkeypatch.delenv(f"WANDB_{name}", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    return tmp_path / "netrc"


def test_only_a_run_that_goes_on_takes_up_its_id(nobody, tmp_path, monkeypatch):
    assert earlier_id(tmp_path, 5) is None
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / RUN_ID).write_text("abc\n", encoding="utf-8")
    assert (earlier_id(tmp_path, 5), earlier_id(tmp_path, 0)) == ("abc", None)
    monkeypatch.setenv("WANDB_RUN_ID", "of-the-agent")
    assert earlier_id(tmp_path, 5) is None


def test_wandb_is_offline_unless_somebody_is_logged_in(nobody, monkeypatch):
    assert wandb_mode(LoggerConfig(), print) == "offline"
    nobody.write_text("machine api.wandb.ai\n  login user\n  password not-a-key\n")
    nobody.chmod(0o600)
    assert wandb_mode(LoggerConfig(), print) == "online"
    assert wandb_mode(LoggerConfig(wandb_mode="offline"), print) == "offline"
    monkeypatch.setenv("WANDB_MODE", "disabled")  # its own variable
    assert wandb_mode(LoggerConfig(), print) == "disabled"
    assert wandb_mode(LoggerConfig(wandb_mode="online"), print) == "online"


@pytest.mark.parametrize(("word", "mode"), [
    ("run", "online"), ("", "online"), ("Offline", "offline"), ("dryrun", "offline"), ("off", "offline"),
])  # fmt: skip
def test_wandb_sends_nothing_against_a_word_of_its_variable(nobody, monkeypatch, word, mode):
    monkeypatch.setenv("WANDB_API_KEY", "not-a-key")
    monkeypatch.setenv("WANDB_MODE", word)
    told = []
    assert wandb_mode(LoggerConfig(), told.append) == mode
    assert len(told) == (word == "off")
    assert all("WANDB_MODE='off' is none of online, offline, disabled, run, dryrun" in line for line in told)


@pytest.mark.slow
def test_a_run_that_goes_on_is_one_run_of_wandb(nobody, tmp_path, monkeypatch):
    """The second start takes steps 3 and 4 again. W&B itself would not start with the word that its variable has."""
    monkeypatch.setenv("WANDB_MODE", "off")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    run_dir = tmp_path / "run"
    more = {"quantization/weights_snr_db/h.0.attn.weight+2": 41.5, "comm/hidden_fraction": 0.25, "grad_norm": math.inf}
    cfg, told = LoggerConfig(names=("wandb",), run_name="mine", group="ours", tags=("a", "b")), io.StringIO()
    for first_step, steps in ((0, (1, 2, 3, 4)), (2, (3, 4, 5))):
        monitor = make_monitor(WORK, cfg, run_dir, {"seed": 7}, first_step, stream=told)
        for number in steps:
            monitor.step(step(number, loss=number + first_step / 10, **more), 0.5)
        monitor.validation(steps[-1], 2.0)
        monitor.finish(FACTS)
    first, second = wandb_files(run_dir)
    records = [wandb_records(first), wandb_records(second)]
    starts = [next(record["run"] for record in part if record["type"] == "run") for part in records]
    assert starts[0]["run_id"] == starts[1]["run_id"]
    assert [start.get("resume", False) for start in starts] == [False, True]
    for start in starts:
        assert (start["display_name"], start["run_group"], start["tags"]) == ("mine", "ours", ["a", "b"])
    rows = wandb_rows(run_dir)
    assert [rows["train", number]["train/loss"] for number in (1, 2, 3, 4, 5)] == [1.0, 2.0, 3.2, 4.2, 5.2]
    assert set(more) - {"grad_norm"} <= set(rows["train", 5])
    del rows["validation", 4]  # of the first start, whose step 4 came to nothing
    compare(run_dir, rows)
    assert f"wandb sync {run_dir}/wandb/offline-run-*" in told.getvalue()
    assert "WANDB_MODE='off' is none of" in told.getvalue()


def test_a_run_that_goes_on_hides_what_came_to_nothing_from_tensorboard(tmp_path):
    cfg = LoggerConfig(names=("tensorboard",))
    for first_step, steps in ((0, (1, 2, 3, 4)), (2, (3, 4, 5)), (0, (1, 2))):
        monitor = make_monitor(WORK, cfg, tmp_path, {"seed": 7}, first_step, stream=io.StringIO())
        for number in steps:
            monitor.step(step(number, loss=number + first_step / 10), 0.5)
        monitor.finish(FACTS)
        compare(tmp_path, tensorboard_rows(tmp_path), as_fp32)
