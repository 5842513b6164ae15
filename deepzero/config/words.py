"""Hydra's errors in words: one message, with the nearest name that exists. Knows Hydra's texts, not Hydra."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from deepzero.config.parse import ConfigError


def explain(error: Exception, configs: Path, valid_keys: Callable[[], list[str]]) -> str:
    """Hydra's error as one message; a misspelt key or choice comes with the nearest one that exists.

    Args:
        error: what Hydra or OmegaConf raised.
        configs: the folder of the config groups.
        valid_keys: gives every dotted key; asked only when one is unknown.
    """
    if isinstance(error, ConfigError):
        return str(error)
    lines = [line.strip() for e in (error, error.__cause__) if e is not None for line in str(e).splitlines()]
    text = "\n".join(dict.fromkeys(line for line in lines if line and not line.startswith("full_key:")))
    unknown_choice = re.search(r"Could not find '([^'/]+)/([^']+)'", text)
    if unknown_choice:
        group, choice = unknown_choice.groups()
        if (configs / group).is_dir():
            return no_such_choice(configs, group, choice)
    twice = re.search(r"Multiple values for ([\w/]+)\. To override a value use 'override [^:]+: ([^']+)'", text)
    if twice:
        return f"{twice[1]} has a choice already; write {twice[1]}={twice[2]}, without +"
    unknown_key = re.search(r"Could not override '([^']+)'", text)
    if unknown_key:
        key = unknown_key.group(1)
        return f"unknown config key {key!r}.{_nearest(key, valid_keys())} `python train.py --help` lists all keys"
    override = getattr(error, "override", None)  # of a parse error
    return f"{override}: {text}" if override and str(override) not in text else text


def no_such_choice(configs: Path, group: str, choice: str) -> str:
    """A group takes the name of one of its files. ``zero=2`` and ``zero=stage2`` mean the key."""
    choices = sorted(path.stem for path in (configs / group).glob("*.yaml"))
    stage = re.fullmatch(r"(?:stage_?)?(\d(?:,\d)*)", choice) if group == "zero" else None
    near = f" Did you mean 'zero.stage={stage[1]}'?" if stage else _nearest(choice, choices, f"{group}=")
    return f"{group}={choice}: no such choice.{near} There are: {', '.join(choices)}"


def _nearest(word: str, valid: list[str], prefix: str = "") -> str:
    """`` Did you mean …?``, or nothing. Full names are compared first, then last parts: ``lr`` finds optimizer.lr."""
    near = difflib.get_close_matches(word, valid, n=1, cutoff=0.6)
    if not near:
        last = word.rsplit(".", 1)[-1]
        near = [name for name in valid if name.rsplit(".", 1)[-1] == last][:1]
    return f" Did you mean {prefix + near[0]!r}?" if near else ""


def dotted(mapping: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Every key of nested mappings, dotted.

    Example:
        >>> dotted({"zero": {"stage": 0}, "seed": 1})
        ['zero', 'zero.stage', 'seed']
    """
    found = []
    for key, value in mapping.items():
        found.append(prefix + key)
        if isinstance(value, Mapping):
            found += dotted(value, f"{prefix}{key}.")
    return found


def plain_names(text: str) -> str:
    """DeepSpeed's JSON puts arguments under ``params``; on the command line they stand directly in their group."""
    return text.replace("optimizer.params.", "optimizer.").replace("scheduler.params.", "scheduler.")
