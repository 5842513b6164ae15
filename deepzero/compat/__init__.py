"""DeepSpeed's surface over what is there: the engine that ``initialize`` returns, and deepzero under DeepSpeed's name.

A script says ``import deepspeed`` in dozens of places, and so do the libraries below it. :func:`install` makes each of
them mean deepzero: an import hook answers for ``deepspeed`` and all modules under it from one table
(:mod:`deepzero.compat.import_paths`), and a folder with a module and a version of that name comes first on Python's
path, which tells ``importlib`` what is asked before anything is imported, and child processes what they shall import.
"""

from __future__ import annotations

import importlib
import os
import sys
import types
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path
from typing import Any

from deepzero.compat.import_paths import DIFFERENCES, MODULES, absence, refused_class

STAND_IN = Path(__file__).with_name("stand_in")
"""The folder that comes first on the path."""


def install() -> None:
    """Let ``import deepspeed`` mean deepzero, here and in every process that is started from here. Twice is harmless.

    It works with DeepSpeed installed and without. ``PYTHONPATH`` of this process changes, for those it starts.

    Raises:
        ImportError: DeepSpeed itself has been imported already; what has been taken from it cannot be taken back.

    It stays for the rest of the process, so the example is none that a doctest runs::

        from deepzero.compat import install
        install()
        import deepspeed  # deepspeed.zero.Init is deepzero's
    """
    present = sys.modules.get("deepspeed")
    if isinstance(present, StandInModule):
        return
    # The stand-in's own file asks for this while it is being imported.
    if present is not None and Path(getattr(present, "__file__", None) or "").parent != STAND_IN:
        raise ImportError(
            f"deepspeed is imported already, from {getattr(present, '__file__', 'somewhere')}: call "
            "deepzero.compat.install() before anything imports it, or run the script by python -m deepzero.compat"
        )
    finder = StandInFinder()
    sys.meta_path.insert(0, finder)
    folder = str(STAND_IN)
    # Beside other entries an empty one means the current folder; an empty PYTHONPATH means nothing.
    given = os.environ.get("PYTHONPATH")
    kept = [place for place in given.split(os.pathsep) if place != folder] if given else []
    os.environ["PYTHONPATH"] = os.pathsep.join([folder, *kept])
    obey_ds_accelerator()
    sys.path[:] = [folder, *(place for place in sys.path if place != folder)]
    sys.modules["deepspeed"] = module_from_spec(finder.spec("deepspeed"))


def obey_ds_accelerator() -> None:
    """Let ``DS_ACCELERATOR=cpu`` mean ``DEEPZERO_DEVICE=cpu``, which all of deepzero reads, unless that is set."""
    if os.environ.get("DS_ACCELERATOR") == "cpu" and not os.environ.get("DEEPZERO_DEVICE"):
        os.environ["DEEPZERO_DEVICE"] = "cpu"


obey_ds_accelerator()  # also where a script that says ``import deepzero`` never asks for the accelerator


class StandInModule(types.ModuleType):
    """One of DeepSpeed's modules; its names are fetched from their homes in deepzero when they are asked for."""

    def __getattr__(self, name: str) -> Any:
        if name == "__all__":
            return [public for public in dir(self) if not public.startswith("_")]
        value = self._find(name)
        setattr(self, name, value)
        return value

    def _find(self, name: str) -> Any:
        for home, names in MODULES[self.__name__]:
            if name in names and home == "=":
                return names[name] if names[name] != name else name.lower()
            if name in names and home.startswith("!"):
                return refused_class(name, home[1:])
            if name in names or ("*" in names and not name.startswith("__")):
                found = getattr(importlib.import_module(home), names.get(name, name), _NOTHING)
                # Behind a star a module is what the home itself has imported, or lies in its folder.
                if found is not _NOTHING and (name in names or not _is_module(found)):
                    return found
        if f"{self.__name__}.{name}" in MODULES:
            return importlib.import_module(f"{self.__name__}.{name}")
        raise AttributeError(absence(f"{self.__name__}.{name}"), name=name, obj=self)

    def __dir__(self) -> Iterator[str]:
        found = {
            *self.__dict__,
            *(path.rpartition(".")[2] for path in MODULES if path.rpartition(".")[0] == self.__name__),
        }
        for home in (importlib.import_module(home) for home, names in MODULES[self.__name__] if "*" in names):
            found.update(name for name in dir(home) if name[0] != "_" and not _is_module(vars(home).get(name)))
        found.update(*(names for _, names in MODULES[self.__name__]))
        return iter(sorted(found - {"*"}))


def _is_module(value: Any) -> bool:
    return type(value) is types.ModuleType  # not one of ours, which stand for names of DeepSpeed's


_NOTHING = object()


class StandInFinder(MetaPathFinder, Loader):
    """Finds ``deepspeed`` and what is under it, before Python looks into any folder."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        """A module of the table; None for what is not DeepSpeed's."""
        if fullname.partition(".")[0] != "deepspeed":
            return None
        if fullname not in MODULES:
            # For ``from deepspeed import a_name`` as well: an AttributeError's text would be lost there.
            raise ModuleNotFoundError(absence(fullname))
        return self.spec(fullname)

    def spec(self, name: str) -> ModuleSpec:
        """That every module has, since scripts import what is below any of them."""
        return ModuleSpec(name, self, origin=f"deepzero, {DIFFERENCES}", is_package=True)

    def create_module(self, spec: ModuleSpec) -> StandInModule:
        """An empty one; ``deepspeed`` itself has a file, which scripts print to see whose it is."""
        module = StandInModule(spec.name, "DeepSpeed's module of this name, as far as deepzero has what is in it.")
        if spec.name == "deepspeed":
            module.__file__ = str(STAND_IN / "deepspeed.py")
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to do: names come when they are asked for."""
