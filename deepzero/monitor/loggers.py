"""W&B and TensorBoard. Neither is needed, and neither can stop a run: one that fails says so once and is left out."""

from __future__ import annotations

import netrc
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol, cast
from urllib.parse import urlparse

from deepzero.config.run import LoggerConfig

WandbMode = Literal["online", "offline", "disabled"]

WANDB_START_SECONDS = 30.0
"""An online run that W&B's server has not accepted after this long goes on without W&B."""


class Sink(Protocol):
    """Whatever wants to know about a run."""

    def step(self, entry: Mapping[str, Any]) -> None:
        """An optimizer step is over."""

    def validation(self, entry: Mapping[str, Any]) -> None:
        """A validation is over."""

    def finish(self, summary: Mapping[str, Any]) -> None:
        """The run is over."""


class Guarded:
    """A sink whose failures are reported once and cost nothing else.

    Args:
        name: for the message.
        make: builds the sink; its failure counts too (not installed, no disk, no network).
        tell: prints a line.
    """

    def __init__(self, name: str, make: Callable[[], Sink], tell: Callable[[str], None]) -> None:
        self._name, self._tell = name, tell
        self._sink: Sink | None = None
        self._try(lambda: setattr(self, "_sink", make()))

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
        # Third-party code over a network can raise anything, SystemExit included; none of it is worth a training run.
        except (Exception, SystemExit) as error:
            self._sink = None
            self._tell(f"{self._name}: {type(error).__name__}: {error}; training goes on without {self._name}")

    def step(self, entry: Mapping[str, Any]) -> None:
        """Pass on, unless the sink has failed."""
        if self._sink is not None:
            self._try(lambda: self._sink.step(entry) if self._sink is not None else None)

    def validation(self, entry: Mapping[str, Any]) -> None:
        """Pass on, unless the sink has failed."""
        if self._sink is not None:
            self._try(lambda: self._sink.validation(entry) if self._sink is not None else None)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Pass on, unless the sink has failed."""
        if self._sink is not None:
            self._try(lambda: self._sink.finish(summary) if self._sink is not None else None)


class TensorBoard:
    """Scalars as event files in ``tensorboard/`` of the run folder."""

    def __init__(self, run_dir: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run_dir / "tensorboard"))

    def step(self, entry: Mapping[str, Any]) -> None:
        """One scalar for each number."""
        self._write("train", entry)

    def validation(self, entry: Mapping[str, Any]) -> None:
        """One scalar for each number."""
        self._write("validation", entry)

    def _write(self, prefix: str, entry: Mapping[str, Any]) -> None:
        for key, value in _numbers(entry).items():
            self._writer.add_scalar(f"{prefix}/{key}", value, entry["step"])

    def finish(self, summary: Mapping[str, Any]) -> None:
        """The sample as text, then close."""
        if summary.get("sample"):
            self._writer.add_text("sample", str(summary["sample"]))
        self._writer.close()


class WandB:
    """A W&B run; offline unless somebody is logged in, so that neither account nor network is needed."""

    def __init__(
        self, cfg: LoggerConfig, run_dir: Path, config: Mapping[str, Any], tell: Callable[[str], None]
    ) -> None:
        import wandb

        mode = wandb_mode(cfg)
        settings = wandb.Settings(silent=True, console="off", init_timeout=WANDB_START_SECONDS)
        self._run = wandb.init(
            project=cfg.project, dir=str(run_dir), config=dict(config), mode=mode, name=run_dir.name, settings=settings
        )
        if mode == "offline":
            tell(f"wandb: offline, nothing leaves this machine; to upload: wandb sync {Path(self._run.dir).parent}")
        elif mode == "online":
            tell(f"wandb: {self._run.url}")

    def step(self, entry: Mapping[str, Any]) -> None:
        """Log every number."""
        self._run.log({f"train/{k}": v for k, v in _numbers(entry).items()}, step=entry["step"])

    def validation(self, entry: Mapping[str, Any]) -> None:
        """Log every number. W&B joins it to the step's other numbers, which come right before."""
        self._run.log({f"validation/{k}": v for k, v in _numbers(entry).items()}, step=entry["step"])

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Hand over the summary's scalars and close; with status 1 when the run failed."""
        self._run.summary.update({k: v for k, v in summary.items() if isinstance(v, (int, float, str))})
        self._run.finish(exit_code=0 if summary.get("status") == "finished" else 1)


def _numbers(entry: Mapping[str, Any]) -> dict[str, float]:
    return {k: float(v) for k, v in entry.items() if k != "step" and isinstance(v, (int, float))}


def wandb_mode(cfg: LoggerConfig) -> WandbMode:
    """As configured, else as W&B's own variable ``WANDB_MODE`` says, else by login."""
    if cfg.wandb_mode != "auto":
        return cfg.wandb_mode
    wanted = os.environ.get("WANDB_MODE")
    if wanted in ("online", "offline", "disabled"):
        return cast(WandbMode, wanted)
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
