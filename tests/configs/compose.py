"""Compose configs in this process, as `python train.py ARGUMENTS` would."""

import functools
import pickle
from collections.abc import Callable
from typing import Any

import hydra
from hydra._internal import defaults_list
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository, IConfigRepository
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from deepzero.config.hydra_errors import check_words, explain, plain_names
from deepzero.config.run import RunConfig
from deepzero.config.strict import ConfigError
from deepzero.launch.launcher import choose_device
from deepzero.training import command_line
from deepzero.training.build_model import preflight
from deepzero.training.command_line import CONFIGS

_load, _merge = ConfigRepository.load_config, ConfigLoaderImpl._compose_config_from_defaults_list
_choices, _made = defaults_list._create_interpolation_map, dict[tuple[str, ...], bytes]()


def _once(what: str, repository: IConfigRepository, make: Callable[[], Any]) -> Any:
    """Two dozen files, which Hydra loads and merges anew for each of a session's hundreds of compositions."""
    key = (what, *(source.path for source in repository.get_sources()))
    if key not in _made:
        _made[key] = pickle.dumps(make())
    return pickle.loads(_made[key])


def _load_once(repository: ConfigRepository, config_path: str) -> Any:
    return _once(config_path, repository, lambda: _load(repository, config_path))


def _merge_once(loader: ConfigLoaderImpl, defaults: list[Any], repo: IConfigRepository) -> Any:
    """By the files and their places; the words on the command line come after."""
    return _once(repr(defaults), repo, lambda: _merge(loader, defaults, repo))


def _choices_if_there_are(overrides: Any, defaults: list[Any], self_added: bool) -> Any:
    """What interpolations in a list of defaults may refer to, which Hydra also collects where there is no such list."""
    return _choices(overrides, defaults, self_added) if defaults else None


for owner, name, quicker in (
    (ConfigRepository, "load_config", _load_once),
    (ConfigLoaderImpl, "_compose_config_from_defaults_list", _merge_once),
    (defaults_list, "_create_interpolation_map", _choices_if_there_are),
):
    setattr(owner, name, quicker)


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
