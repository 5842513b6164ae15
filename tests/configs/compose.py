"""Compose configs in this process, as `python train.py ARGUMENTS` would."""

import functools
import pickle
from typing import Any

import hydra
from hydra._internal.config_repository import ConfigRepository
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from deepzero.config.hydra_errors import check_words, explain, plain_names
from deepzero.config.run import RunConfig
from deepzero.config.strict import ConfigError
from deepzero.launch.launcher import choose_device
from deepzero.training import command_line
from deepzero.training.build_model import preflight
from deepzero.training.command_line import CONFIGS

_load, _loaded = ConfigRepository.load_config, dict[tuple[str, ...], bytes]()


def _load_once(repository: ConfigRepository, config_path: str) -> Any:
    """Two dozen files, which Hydra loads anew for each of a session's hundreds of compositions: a third of the time."""
    key = (config_path, *(source.path for source in repository.get_sources()))
    if key not in _loaded:
        _loaded[key] = pickle.dumps(_load(repository, config_path))
    return pickle.loads(_loaded[key])


ConfigRepository.load_config = _load_once  # type: ignore[method-assign]


def settings(*overrides: str) -> dict[str, Any]:
    """The composed config as plain dictionaries."""
    with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return command_line.settings_of(hydra.compose("train", overrides=list(overrides)))


def run_config(*overrides: str) -> RunConfig:
    """The typed settings."""
    with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
        cfg = hydra.compose("train", overrides=list(overrides))
        return command_line.with_fallback_batch(command_line.read_config(cfg))


def complaint(*overrides: str, ranks: int = 2) -> str:
    """What the user reads when ``overrides`` cannot be used; "" when they can."""
    try:
        check_words(overrides, CONFIGS)
        run = run_config(*overrides)
        preflight(run, ranks, choose_device(run.launch.device, ranks))
    except (HydraException, OmegaConfBaseException, ConfigError) as error:
        return plain_names(explain(error, CONFIGS, functools.partial(command_line.valid_keys, overrides)))
    return ""
