"""``logger=wandb``: a W&B run; offline unless somebody is logged in, so that neither account nor network is needed.

**The axis is our own.** W&B numbers the rows of a run itself and refuses a smaller number than the last. A run that
goes on from a checkpoint takes some steps again, and their rows would be dropped. So every row carries ``step``, which
is declared the axis of all charts, and W&B's number is left to W&B; a step that was taken twice is there twice, and the
later row is the one that counts.

**One run, several starts.** The run's id lies in ``wandb/run_id`` of the run folder. A start that goes on from a
checkpoint takes it up again (``resume="allow"``): online W&B goes on with its run, and offline parts with one id are
joined by ``wandb sync``.
"""

from __future__ import annotations

import html
import netrc
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlparse

from deepzero.config.run import LoggerConfig
from deepzero.monitor.async_logger import Tell
from deepzero.monitor.metrics_file import put
from deepzero.monitor.scalars import COMMUNICATION_COLUMNS, MEMORY_COLUMNS, communication_rows, memory_rows, scalars

WandbMode = Literal["online", "offline", "disabled"]
MODES: dict[str, WandbMode] = {
    "online": "online", "offline": "offline", "disabled": "disabled", "run": "online", "dryrun": "offline",
}  # fmt: skip
"""Words of ``WANDB_MODE``, W&B's old ones for two of them included."""

FOLDER = "wandb"
RUN_ID = "run_id"
"""A file in ``wandb/`` of the run folder."""
TRACES, REPORT = "traces", "report.html"
"""What of the run folder goes along, where it is there: the profiler's files, and the report."""

START_SECONDS = 30.0
"""An online run that W&B's server has not accepted after this long goes on without W&B."""


class WandB:
    """A W&B run.

    Args:
        cfg: project, mode, name, group, tags.
        run_dir: the run folder.
        config: all settings.
        first_step: steps that were taken before this start of the run.
        tell: gets one line that says where the run is, and how to upload it.
    """

    def __init__(
        self, cfg: LoggerConfig, run_dir: Path, config: Mapping[str, Any], first_step: int, tell: Tell
    ) -> None:
        import wandb

        mode, earlier = wandb_mode(cfg, tell), earlier_id(run_dir, first_step)
        if os.environ.get("WANDB_MODE") and os.environ["WANDB_MODE"] not in MODES:
            os.environ["WANDB_MODE"] = "offline"  # W&B reads it too, and starts with no word that it does not know
        name = cfg.run_name or (None if os.environ.get("WANDB_NAME") else run_dir.name)
        self._run_dir = run_dir
        self._run = wandb.init(
            project=cfg.project,
            dir=str(run_dir),
            config=dict(config),
            mode=mode,
            name=name,
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
            part = shlex.quote(str(Path(self._run.dir).parent))
            everything = f"{shlex.quote(str(run_dir / FOLDER))}/offline-run-*"
            command = f"wandb sync {part if earlier is None else everything}"
            tell(f"wandb: offline, nothing leaves this machine; to upload: {command}")
        elif mode == "online":
            tell(f"wandb: {self._run.url}")

    def step(self, entry: Mapping[str, Any]) -> None:
        """A row of all numbers."""
        self._run.log({**scalars("train", entry), "step": entry["step"]})

    def validation(self, entry: Mapping[str, Any]) -> None:
        """A row of all numbers."""
        self._run.log({**scalars("validation", entry), "step": entry["step"]})

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Hand over the summary, tables, sample, traces and report, and close; with status 1 unless it finished."""
        try:
            self._run.summary.update({k: v for k, v in summary.items() if isinstance(v, (int, float, str))})
            if last := {**self._ledger(summary), **self._texts(summary)}:
                self._run.log({**last, "step": summary["steps"]})
            self._artifacts()
        finally:
            self._run.finish(exit_code=0 if summary.get("status") == "finished" else 1)

    def _ledger(self, summary: Mapping[str, Any]) -> dict[str, Any]:
        """Two tables, predicted beside measured, and a chart of bars for each."""
        import wandb

        found: dict[str, Any] = {}
        for name, columns, rows in (
            ("memory", MEMORY_COLUMNS, memory_rows(summary)),
            ("communication", COMMUNICATION_COLUMNS, communication_rows(summary)),
        ):
            if not rows:
                continue
            found[f"ledger/{name}"] = wandb.Table(columns=list(columns), data=rows)
            bars = [[f"{row[0]}, {what}", row[at]] for row in rows for at, what in ((1, "predicted"), (2, "measured"))]
            table = wandb.Table(columns=["what", "bytes"], data=[bar for bar in bars if bar[1] is not None])
            title = "held by one rank" if name == "memory" else "sent by one rank in one step"
            found[f"ledger/{name}_bars"] = wandb.plot.bar(table, "what", "bytes", title=f"Bytes {title}")
        return found

    def _texts(self, summary: Mapping[str, Any]) -> dict[str, Any]:
        """The sample, letter by letter, and the report as W&B shows it in its page."""
        import wandb

        found: dict[str, Any] = {}
        if summary.get("sample"):
            found["sample/text"] = wandb.Html(f"<pre>{html.escape(str(summary['sample']))}</pre>")
        if (report := self._run_dir / REPORT).is_file():
            found["report/html"] = wandb.Html(report.read_text(encoding="utf-8"), inject=False)
        return found

    def _artifacts(self) -> None:
        """Files to be downloaded. W&B's trace viewer opens artifacts of the type ``profile``."""
        import wandb

        traces = [path for path in sorted((self._run_dir / TRACES).glob("**/*")) if path.is_file()]
        report = [path] if (path := self._run_dir / REPORT).is_file() else []
        for name, kind, files in (("traces", "profile", traces), ("report", "report", report)):
            if files:
                artifact = wandb.Artifact(f"{name}-{self._run.id}", type=kind)
                for file in files:
                    # Where they are: W&B would copy them into the home directory, and traces are large.
                    place = file.relative_to(self._run_dir / TRACES) if kind == "profile" else file.name
                    artifact.add_file(str(file), name=str(place), policy="immutable", skip_cache=True)
                self._run.log_artifact(artifact)


def earlier_id(run_dir: Path, first_step: int) -> str | None:
    """The id that an earlier start of this run was given; None for a new run, and where W&B's variable says an id."""
    path = run_dir / FOLDER / RUN_ID
    if first_step == 0 or os.environ.get("WANDB_RUN_ID") or not path.is_file():
        return None
    return path.read_text(encoding="utf-8").strip() or None


def wandb_mode(cfg: LoggerConfig, tell: Tell) -> WandbMode:
    """As configured, else as W&B's own variable ``WANDB_MODE`` says, else by login.

    Args:
        cfg: ``wandb_mode``.
        tell: gets a line where the variable says what is not known. Nothing leaves the machine then: whoever has set it
            may have meant just that.
    """
    if cfg.wandb_mode != "auto":
        return cfg.wandb_mode
    wanted = os.environ.get("WANDB_MODE", "")
    if wanted:
        word = wanted.strip().lower()
        if word not in MODES:
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
