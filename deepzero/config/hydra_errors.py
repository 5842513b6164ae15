"""What is typed on the command line, and Hydra's errors in words. Knows Hydra's texts, not Hydra.

One message for each mistake, with the nearest name that exists; and what Hydra would take without a word, or answer
with a traceback, refused before Hydra is asked (:func:`check_words`).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from deepzero.config.strict import ConfigError

FOLDERS = ("hydra.run.dir", "hydra.sweep.dir")


def check_words(words: Sequence[str], configs: Path) -> None:
    """Raise a ConfigError for the first of ``words`` that Hydra would take silently, or answer with a traceback."""
    given: dict[str, str] = {}
    groups = {path.name: sorted(file.stem for file in path.glob("*.yaml")) for path in configs.iterdir()}
    for word in words:
        prefix, key, value = split(word)
        if key.startswith("--") and ("." in key or key[2:] in groups):  # as other programs have it
            raise ConfigError(f"{word}: settings have no dashes; write {key[2:]}={value or 'VALUE'}")
        choices = groups.get(key, [])
        if prefix == "~" and choices and "none" not in choices and key != "experiment":
            raise ConfigError(f"{word}: every run has a choice of {key}: write {key}=CHOICE, of {', '.join(choices)}")
        if not re.search(r"\w", word) and "=" not in word and not word.startswith("-"):  # "$EXTRA" that is empty
            raise ConfigError(f"{word!r} is no setting; write KEY=VALUE, or leave it out")
        if word.startswith("-") or "=" not in word:
            continue
        if not key:
            raise ConfigError(f"{word}: no key is named; write KEY={value or 'VALUE'}, and no space before the =")
        if key in given:
            raise ConfigError(f"{key} is given twice, as {given[key]} and as {word}: which is meant? Leave one out")
        given[key] = word
        if not prefix and key in groups and re.fullmatch(r"[-+\d.,]+|true|false", value, re.IGNORECASE):
            raise ConfigError(no_such_choice(configs, key, value))
        if key in FOLDERS and not value.strip("'\""):
            raise ConfigError(f"{word}: no folder is named; write {key}=FOLDER, or leave it out")
        for path in (Path(value), *Path(value).parents) if key in FOLDERS else ():
            if path.exists() and not path.is_dir():
                raise ConfigError(f"{word}: {path} is a file, and the run needs a folder; choose another name")


def split(word: str) -> tuple[str, str, str]:
    """Of an override Hydra's prefix, the key and the value.

    Example:
        >>> split("++zero.stage=2"), split("~optimizer.momentum")
        (('++', 'zero.stage', '2'), ('~', 'optimizer.momentum', ''))
    """
    key, _, value = word.partition("=")
    name = key.lstrip("+~")
    return key[: len(key) - len(name)], name.strip(), value


def explain(error: Exception, configs: Path, valid_keys: Callable[[], list[str]]) -> str:
    """Hydra's error as one message; a misspelt key or choice comes with the nearest one that exists.

    ``configs`` is the folder of the config groups; ``valid_keys`` gives every dotted key, asked for if one is unknown.
    """
    if isinstance(error, ConfigError):
        return str(error)
    lines = [line.strip() for e in (error, error.__cause__) if e is not None for line in str(e).splitlines()]
    text = "\n".join(dict.fromkeys(line for line in lines if line and not line.startswith("full_key:")))
    if found := re.search(r"Could not find '([^'/]+)/([^']+)'", text):
        group, choice = found.groups()
        if group == "hydra":  # hydra/launcher=slurm
            there = re.search(r"Available options in '[^']+':\n(.*?)\nConfig search path", text, re.DOTALL)
            names = f" There are: {', '.join(there[1].split())}" if there else ""
            return f"hydra/{choice.replace('/', '=', 1)}: no such choice.{names}"
        if (configs / group).is_dir():
            return no_such_choice(configs, group, choice)
    if found := re.search(r"Multiple values for ([\w/]+)\. To override a value use 'override [^:]+: ([^']+)'", text):
        return f"{found[1]} has a choice already; write {found[1]}={found[2]}, without +"
    if found := re.search(r"Could not (?:override|delete from config\.) '([^']+)'", text):
        return no_such_key(found[1], configs, valid_keys())
    override = getattr(error, "override", None)  # of a parse error
    if override and "=" not in str(override):
        what = override if "missing EQUAL" in text else "KEY"
        return f"{override}: this is no setting; a setting has a key and a value. Write {what}=VALUE, without a space"
    key, _, value = str(override).partition("=")
    if value and re.search(r"Lexer|(mismatched|extraneous|viable) (input|alternative)|Unknown function", text):
        quoted = f'"{key}=\\"{value}\\""' if "'" in value else f"\"{key}='{value}'\""
        return f"{override}: Hydra cannot read this value. A text stands in quotes inside the shell's: {quoted}"
    return f"{override}: {text}" if override and str(override) not in text else text


def no_such_key(key: str, configs: Path, valid: list[str]) -> str:
    """A key that there is not in what was chosen, with the nearest one that there is, or all that stand beside it."""
    wrong = f"unknown config key {key!r}."
    parent, _, last = key.rpartition(".")
    if parent and (configs / parent / f"{last}.yaml").is_file():
        return f"{wrong} Did you mean {f'{parent}={last}'!r}?"
    if key != plain_names(key):
        return f"unknown config key: on the command line there is no params; write {plain_names(key)}=VALUE"
    beside = [name.rpartition(".")[2] for name in valid if parent and name.rpartition(".")[0] == parent and name != key]
    if near := difflib.get_close_matches(last, beside, n=1, cutoff=0.6):
        return f"{wrong} Did you mean {f'{parent}.{near[0]}'!r}?"
    if beside:
        more = f"; what else its class takes: +{key}=VALUE" if parent == "optimizer" else ""
        return f"{wrong} There are: {', '.join(name for name in beside if not name.startswith('_'))}{more}"
    if chosen := [f for f in sorted(configs.glob("*/*.yaml")) if f.stem == key.partition(".")[0]]:  # DeepSpeed's bf16
        return f"{wrong} Did you mean {f'{chosen[0].parent.name}={chosen[0].stem}'!r}?"
    ours = [name for name in valid if name.startswith("hydra") == key.startswith("hydra") and name != key]
    return f"{wrong}{_nearest(key, ours)} `python train.py --help` lists all keys"


def no_such_choice(configs: Path, group: str, choice: str) -> str:
    """A group takes the name of one of its files. ``zero=2`` and ``zero=stage2`` mean the key."""
    choices = sorted(path.stem for path in (configs / group).glob("*.yaml"))
    stage = re.fullmatch(r"(?:stage_?)?(\d(?:,\d)*)", choice) if group == "zero" else None
    near = f" Did you mean 'zero.stage={stage[1]}'?" if stage else _nearest(choice, choices, f"{group}=")
    return f"{group}={choice}: no such choice.{near} There are: {', '.join(choices)}"


def _nearest(word: str, valid: list[str], prefix: str = "") -> str:
    """`` Did you mean …?``, or nothing. Names with the same last part come first: ``lr`` finds optimizer.lr."""
    same_last = [name for name in valid if name.rpartition(".")[2] == word.rpartition(".")[2]]
    near = difflib.get_close_matches(word, same_last, 1, 0) or difflib.get_close_matches(word, valid, 1, 0.6)
    return f" Did you mean {prefix + near[0]!r}?" if near else ""


def plain_names(text: str) -> str:
    """DeepSpeed's JSON puts arguments under ``params``; on the command line they stand directly in their group."""
    return text.replace("optimizer.params.", "optimizer.").replace("scheduler.params.", "scheduler.")
