"""Compose configs in this process, as `python train.py ARGUMENTS` would."""

from __future__ import annotations

from typing import Any

import hydra
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

import train
from deepzero.config.run import RunConfig
from deepzero.config.strict import ConfigError


def settings(*overrides: str) -> dict[str, Any]:
    """The composed config as plain dictionaries."""
    with hydra.initialize_config_dir(str(train.CONFIGS), version_base="1.3"):
        return train.settings_of(hydra.compose("train", overrides=list(overrides)))


def run_config(*overrides: str) -> RunConfig:
    """The typed settings."""
    with hydra.initialize_config_dir(str(train.CONFIGS), version_base="1.3"):
        return train.read_config(hydra.compose("train", overrides=list(overrides)))


def complaint(*overrides: str, ranks: int = 2) -> str:
    """What the user reads when ``overrides`` cannot be used; "" when they can."""
    try:
        train.check_words(overrides, train.CONFIGS)
        run = run_config(*overrides)
        train.preflight(run, ranks, train.choose_device(run, ranks))
    except (HydraException, OmegaConfBaseException, ConfigError) as error:
        return train.plain_names(train.explain(error, train.CONFIGS, train.valid_keys))
    return ""
