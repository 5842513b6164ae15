"""``logger=wandb``: a W&B run; offline unless somebody is logged in, so that neither account nor network is needed.

**The axis is our own.** W&B numbers the rows of a run itself and refuses a smaller number than the last. A run that
goes on from a checkpoint takes some steps again, and their rows would be dropped. So every row carries ``step``, which
is declared the axis of all charts, and W&B's number is left to W&B; a step that was taken twice is there twice, and the
later row is the one that counts.

**One run, several starts.** The run's id lies in ``wandb/run_id`` of the run folder. A start that goes on from a
checkpoint takes it up again (``resume="allow"``): online W&B goes on with its run, and offline parts with one id are
joined by ``wandb sync``.

**Names.** A run that nobody has named is called by what was typed, which is how it differs from the default run.
"""

from __future__ import annotations

import dataclasses
import hashlib
import html
import netrc
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlparse

from deepzero.config.run import LoggerConfig
from deepzero.monitor.async_logger import Kind, Tell
from deepzero.monitor.metrics_file import REPORT, put, scalars

WandbMode = Literal["online", "offline", "disabled"]
MODES: dict[str, WandbMode] = {
    "online": "online", "offline": "offline", "disabled": "disabled", "run": "online", "dryrun": "offline",
}  # fmt: skip
"""Words of ``WANDB_MODE``, W&B's old ones for two of them included."""
FOLDER = "wandb"
RUN_ID = "run_id"  # a file in `wandb/` of the run folder
TRACES = "traces"  # the profiler's files in the run folder, which go along, as the report does
START_SECONDS = 30.0  # an online run that W&B's server has not accepted after this long goes on without W&B
TABLES = {
    "memory": ("Bytes held by one rank", ("category", "predicted_bytes", "measured_bytes", "measured/predicted")),
    "communication": (
        "Bytes sent by one rank in one step",
        ("kind", "predicted_bytes", "measured_bytes", "measured/predicted", "calls", "elements", "padding_elements"),
    ),
}
"""The ledger's two tables: title of the chart, columns."""
LIMIT = 128  # characters of a name; W&B's limit for the names of projects and groups, and more than a table shows
_ELSEWHERE = ("hydra.", "logger", "launch.device", "launch.max_restarts")
"""How it is watched and where it lies says nothing about a run."""


class WandB:
    """A W&B run, of a start after ``first_step`` steps; ``tell`` gets one line on where it is, and how to upload it."""

    def __init__(
        self, cfg: LoggerConfig, run_dir: Path, config: Mapping[str, Any], first_step: int, tell: Tell
    ) -> None:
        import wandb

        mode, earlier = wandb_mode(cfg, tell), earlier_id(run_dir, first_step)
        if os.environ.get("WANDB_MODE") and os.environ["WANDB_MODE"] not in MODES:
            os.environ["WANDB_MODE"] = "offline"  # W&B reads it too, and starts with no word that it does not know
        self._run_dir = run_dir
        self._run = wandb.init(
            project=cfg.project,
            dir=str(run_dir),
            config=dict(config),
            mode=mode,
            name=cfg.run_name or (None if os.environ.get("WANDB_NAME") else run_dir.name),
            group=cfg.group,
            tags=list(cfg.tags) or None,
            id=earlier,
            resume="allow" if earlier is not None else None,
            settings=wandb.Settings(silent=True, console="off", init_timeout=START_SECONDS),
        )
        (run_dir / FOLDER).mkdir(exist_ok=True)  # W&B makes it, unless it is disabled
        put(run_dir / FOLDER / RUN_ID, self._run.id + "\n")
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        if mode == "offline":
            parts = shlex.quote(str(Path(self._run.dir).parent))
            if earlier is not None:
                parts = f"{shlex.quote(str(run_dir / FOLDER))}/offline-run-*"
            tell(f"wandb: offline, nothing leaves this machine; to upload: wandb sync {parts}")
        elif mode == "online":
            tell(f"wandb: {self._run.url}")

    def write(self, kind: Kind, entry: Mapping[str, Any]) -> None:
        """A row of all numbers."""
        self._run.log({**scalars(kind, entry), "step": entry["step"]})

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Hand over the summary, tables, sample, traces and report, and close; with status 1 unless it finished."""
        import wandb

        report = self._run_dir / REPORT
        try:
            self._run.summary.update({k: v for k, v in summary.items() if isinstance(v, (int, float, str))})
            last = self._ledger(summary)
            if summary.get("sample"):  # letter by letter
                last["sample/text"] = wandb.Html(f"<pre>{html.escape(str(summary['sample']))}</pre>")
            if report.is_file():
                last["report/html"] = wandb.Html(report.read_text(encoding="utf-8"), inject=False)
            if last:
                self._run.log({**last, "step": summary["steps"]})
            traces = self._run_dir / TRACES
            self._artifact("traces", "profile", traces, sorted(traces.glob("**/*")))
            self._artifact("report", "report", self._run_dir, [report])
        finally:
            self._run.finish(exit_code=0 if summary.get("status") == "finished" else 1)

    def _ledger(self, summary: Mapping[str, Any]) -> dict[str, Any]:
        """Two tables, predicted beside measured, and a chart of bars for each."""
        import wandb

        found: dict[str, Any] = {}
        for name, (title, columns) in TABLES.items():
            if rows := ledger_rows(summary, name):
                found[f"ledger/{name}"] = wandb.Table(columns=list(columns), data=rows)
                bars = [
                    [f"{row[0]}, {what}", row[at]] for row in rows for at, what in ((1, "predicted"), (2, "measured"))
                ]
                table = wandb.Table(columns=["what", "bytes"], data=[bar for bar in bars if bar[1] is not None])
                found[f"ledger/{name}_bars"] = wandb.plot.bar(table, "what", "bytes", title=title)
        return found

    def _artifact(self, name: str, kind: str, folder: Path, paths: list[Path]) -> None:
        """Files to be downloaded, those that are there. W&B's trace viewer opens artifacts of the type ``profile``."""
        import wandb

        if files := [path for path in paths if path.is_file()]:
            artifact = wandb.Artifact(f"{name}-{self._run.id}", type=kind)
            for file in files:  # where they are: W&B would copy them into the home directory, and traces are large
                place = str(file.relative_to(folder))
                artifact.add_file(str(file), name=place, policy="immutable", skip_cache=True)
            self._run.log_artifact(artifact)


def ledger_rows(summary: Mapping[str, Any], name: str) -> list[list[Any]]:
    """``memory`` or ``communication`` of one rank, in the order of the columns; empty when nothing was trained."""
    rows = []
    for what, entry in (summary.get(name) or {}).items():
        predicted, measured, counts = entry["predicted"], entry["measured"], list[float]()
        if name == "communication":
            counts = [measured[key] for key in TABLES[name][1][-3:]]
            predicted, measured = (predicted or {}).get("bytes"), measured["bytes"]
        rows.append([what, predicted, measured, measured / predicted if predicted else None, *counts])
    return rows


def earlier_id(run_dir: Path, first_step: int) -> str | None:
    """The id that an earlier start of this run was given; None for a new run, and where W&B's variable says an id."""
    path = run_dir / FOLDER / RUN_ID
    if first_step == 0 or os.environ.get("WANDB_RUN_ID") or not path.is_file():
        return None
    return path.read_text(encoding="utf-8").strip() or None


def wandb_mode(cfg: LoggerConfig, tell: Tell) -> WandbMode:
    """As configured, else as W&B's own variable ``WANDB_MODE`` says, else by login.

    Where the variable says what is not known, ``tell`` gets a line, and nothing leaves the machine: whoever has set it
    may have meant just that.
    """
    if cfg.wandb_mode != "auto":
        return cfg.wandb_mode
    if wanted := os.environ.get("WANDB_MODE", ""):
        if (word := wanted.strip().lower()) not in MODES:
            known = ", ".join(MODES)
            tell(f"wandb: WANDB_MODE={wanted!r} is none of {known}: taken as offline; logger.wandb_mode overrides it")
        return MODES.get(word, "offline")
    return "online" if _wandb_login_exists() else "offline"


def _wandb_login_exists() -> bool:
    """Whether ``wandb login`` has been run: a key in the environment, or an entry for the host in the netrc file."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    path = Path(os.environ.get("NETRC", Path.home() / ".netrc"))
    try:
        return netrc.netrc(str(path)).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def name_of(overrides: Sequence[str], limit: int = LIMIT) -> str | None:
    """The overrides of a command line, as typed, in one line; of a path the last part. None: nothing is to be said.

    A name of more than ``limit`` characters ends in a digest of the whole.

    Example:
        >>> name_of(["zero.stage=2", "optimizer.lr=3e-4", "logger=wandb", "hydra.run.dir=run", "data.path='/a/b.txt'"])
        'zero.stage=2,optimizer.lr=3e-4,data.path=b.txt'
        >>> name_of(["zero.stage=2", "optimizer.lr=3e-4"], limit=20)
        'zero.stage=~6c55c623'
        >>> name_of(["logger=wandb"]) is None
        True
    """
    said = []
    for override in overrides:
        if not override.lstrip("+~").startswith(_ELSEWHERE):
            key, equals, value = override.partition("=")
            value = value.strip("'\"")
            said.append(key + equals + (Path(value).name or value if "/" in value else value))
    name = ",".join(said)
    if len(name) > limit:
        name = f"{name[: limit - 9]}~{hashlib.sha256(os.fsencode(name)).hexdigest()[:8]}"
    return name or None


def named(cfg: LoggerConfig, overrides: Sequence[str], sweep_dir: str | None) -> LoggerConfig:
    """Fill in what ``logger.*`` leaves open: the name by what was typed, the group by the folder of the sweep that the
    run belongs to, if it does. W&B's own variables count as settings.
    """
    name, group = cfg.run_name, cfg.group
    if name is None and not os.environ.get("WANDB_NAME"):
        name = name_of(overrides)
    if group is None and sweep_dir is not None and not os.environ.get("WANDB_RUN_GROUP"):
        group = sweep_dir[-LIMIT:]  # of a long path the end, where the date is
    return dataclasses.replace(cfg, run_name=name, group=group)
