"""W&B and TensorBoard after a real run: every number is there, and their own readers and pages show it."""

import json
import re
import time
from pathlib import Path

import pytest

from tests import doors
from tests.e2e import tensorboard_pages as browser
from tests.e2e.readers import as_fp32, compare, tensorboard_rows, wandb_files, wandb_records, wandb_rows


def test_loggers_and_profiler_need_no_account(watched):
    run_dir, seen = watched
    assert "to upload: wandb sync" in seen
    assert "training goes on without" not in seen
    traces = sorted(p.name.split(".")[0] for p in (run_dir / "traces").glob("*.pt.trace.json"))
    assert traces == ["rank0", "rank1"]


def test_nothing_of_the_run_listens_beyond_this_machine(watched):
    found = json.loads((watched[0].parent / "listening.json").read_text())
    assert len(found) >= 2, "gloo has a socket on each rank"
    assert doors.beyond(found) == []


def test_both_hold_every_metric(watched):
    compare(watched[0], wandb_rows(watched[0]))
    compare(watched[0], tensorboard_rows(watched[0]), as_fp32)


def of_kind(records, kind):
    return [record[kind] for record in records if record["type"] == kind]


def test_wandb_shows_config_ledger_sample_and_traces(watched):
    run_dir, _ = watched
    (file,) = wandb_files(run_dir)
    records = wandb_records(file)
    summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    (run,) = of_kind(records, "run")
    assert run["project"] == "deepzero"
    assert run["config"]["update"]["engine"]["zero"]["stage"] == summary["config"]["engine"]["zero"]["stage"]
    assert run["display_name"].startswith("experiment=smoke,model.n_layer=1")
    assert {m.get("glob_name"): m.get("step_metric") for m in of_kind(records, "metric")}["*"] == "step"
    last = of_kind(records, "history")[-1]["item"]
    kinds = {key.removesuffix("._type"): value for key, value in last.items() if key.endswith("._type")}
    shown = {"ledger/memory", "ledger/communication", "ledger/memory_bars_table", "ledger/communication_bars_table"}
    assert kinds == {**dict.fromkeys(shown, "table-file"), "sample/text": "html-file", "report/html": "html-file"}
    table = json.loads((file.parent / "files" / last["ledger/memory.path"]).read_text(encoding="utf-8"))
    held = {row[0]: (row[1], row[2]) for row in table["data"]}
    assert held == {name: (v["predicted"], v["measured"]) for name, v in summary["memory"].items()}
    (traces,) = (found for found in of_kind(records, "artifact") if found["type"] == "profile")
    traced = set((run_dir / "traces").glob("*.pt.trace.json"))
    assert {Path(entry["local_path"]) for entry in traces["manifest"]["contents"]} == traced
    assert [end["exit_code"] for end in of_kind(records, "exit")] == [0]


def test_tensorboard_shows_config_ledger_and_sample(watched):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(watched[0] / "tensorboard"))
    reader.Reload()
    texts = {
        tag: reader.Tensors(tag)[0].tensor_proto.string_val[0].decode()
        for tag in reader.Tags()["tensors"]
        if tag.endswith("/text_summary")
    }
    assert '"stage": 2' in texts["config/text_summary"]
    assert "gradients.reduce_scatter" in texts["ledger/text_summary"]
    assert texts["sample/text_summary"]


PLUGIN = "data/plugin/pytorch_profiler/"


def words(page):
    """What a page shows, without scripts and styles."""
    body = re.sub(r"<(script|style)\b.*?</\1>", "", page[page.rindex("<body") :], flags=re.S)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", body))


@pytest.mark.slow
def test_tensorboard_lists_the_run_and_its_pages_load(watched, tmp_path):
    browser.need_a_browser()
    with browser.tensorboard(watched[0]) as url, browser.without_charts(url) as relay:
        assert browser.get_json(url + "data/runs") == ["tensorboard"]
        plugins = browser.get_json(url + "data/plugins_listing")
        assert all(plugins[name]["enabled"] for name in ("scalars", "text", "hparams"))
        # It says that it loads nothing, too, before it has begun to.
        while (traces := browser.get_json(url + PLUGIN + "runs"))["loading"] or not traces["runs"]:
            time.sleep(0.1)
        assert traces["runs"] == ["traces"]
        where = "run=traces&worker=rank0&span=1"
        steps = browser.get_json(f"{url}{PLUGIN}overview?{where}")["steps"]["rows"]
        assert len(steps) == 3  # profiler.active
        events = browser.get_json(f"{url}{PLUGIN}trace?{where}")["traceEvents"]
        assert any(event.get("name", "").startswith("aten::") for event in events)

        pages = {
            "time series": (url + "#timeseries", ["train /loss", "train /grad_norm", "validation 3 cards"]),
            "overview": (relay + PLUGIN + "index.html",
                         ["Configuration", "Number of Worker(s) 2", "Step Time", "rank0"]),
            "distributed": (relay + PLUGIN + "index.html#Distributed",
                            ["Distributed View", "Communication Operations"]),
        }  # fmt: skip
        for name, (page, expected) in pages.items():
            picture = tmp_path / f"{name}.png"
            seen = words(browser.look(page, picture))
            assert [word for word in expected if word not in seen] == [], (name, seen[:1000])
            assert picture.stat().st_size > 10_000
