"""Every wait is needed: each is taken out in turn, and simulated streams have to notice.

::

    python -m tools.waits                          # all, some minutes; exit status 1 if one is not noticed
    python -m tools.waits --only copy_streams      # those whose name holds the text
    python -m tools.waits --list                   # what there is, and which program reaches it first

A *wait* is what orders two streams, or a stream and the program: ``record``, ``wait``, ``synchronize``, ``finish`` of
an event, a copy or a collective. They are found in the syntax trees of the package (:func:`sites`), called or handed on
as a function. Programs then run on simulated streams, and whatever an event, a collective or a synchronisation passes
by on its way says which of the sites it came from: what only shares the name (``ledger.record``) orders nothing and is
left alone. A site is taken out (``copy.wait()`` becomes ``copy``) in the quickest program that reaches it, then in the
others, until one raises or gives another result.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import contextlib
import importlib
import inspect
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

from deepzero.comm import simulated_streams as simulation
from tools.rewrite import PACKAGE, ROOT, rewritten, tree_of

VERBS = {"record", "wait", "synchronize", "finish"}
HANDED = "__deepzero_handed__"
LOOKING_ON = {"device.py", "comm/simulated_streams.py", "comm/happens_before.py"}
"""The devices themselves, and who looks on."""
ELSEWHERE = {
    "runtime/zero/overlap_param_gather.py OverlappedZeroStage1And2.wait_all_gathers: self._under_way[0].wait()": (
        "tests/distributed/test_overlap_param_gather.py: collectives of NCCL are in one order, gloo's are not"
    )
}
"""Noticed on CPUs, and by which test: on a GPU another wait implies it."""


@dataclass(frozen=True)
class Site:
    """A wait: in which file, the how-maniest of it; its line, its function, its words; called, or handed on."""

    file: str
    number: int
    line: int
    function: str
    words: str
    called: bool
    statement: bool  # the call is a statement of its own

    def __str__(self) -> str:
        return f"{self.file} {self.function}: {self.words}"


class _Waits(ast.NodeTransformer):
    """Finds the waits of a file, and takes the one numbered ``target`` out; -1: all that are handed on say so."""

    def __init__(self, file: str, target: int | None = None, verbs: Collection[str] = VERBS) -> None:
        self.file, self.target, self.verbs, self.found = file, target, verbs, list[Site]()
        self._path: list[str] = []
        self._statement: ast.AST | None = None

    def visit(self, node: ast.AST) -> Any:
        named = isinstance(node, (ast.FunctionDef, ast.ClassDef))
        if named:
            self._path.append(node.name)  # type: ignore[attr-defined]
        if isinstance(node, ast.Expr):
            self._statement = node.value
        called = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in self.verbs
        handed = isinstance(node, ast.Attribute) and node.attr in self.verbs and isinstance(node.ctx, ast.Load)
        if not called and not handed:
            node = self.generic_visit(node)
        elif self._path:
            receiver = node.func if called else node  # type: ignore[attr-defined]
            receiver.value = self.visit(receiver.value)
            words, line = " ".join(ast.unparse(node).split())[:100], int(receiver.end_lineno)
            place = (self.file, len(self.found), line, ".".join(self._path))
            self.found.append(Site(*place, words, called, node is self._statement))
            if self.target == -1 and not called:
                which = ast.parse(f"{HANDED}({len(self.found) - 1}, {self.file!r})", mode="eval").body
                which.args.append(node)  # type: ignore[attr-defined]
                node = ast.copy_location(which, node)
            elif len(self.found) - 1 == self.target:
                nothing = ast.parse("lambda *_, **__: None", mode="eval").body
                node = ast.copy_location(receiver.value if called else nothing, node)
        if named:
            self._path.pop()
        return node


def sites(files: Iterable[str] | None = None, verbs: Collection[str] = VERBS) -> list[Site]:
    """All waits of the package, or of some of its files."""
    found = []
    for file in files or sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py")):
        if file not in LOOKING_ON and not file.startswith(("compat/", "profiling/")):
            waits = _Waits(file, verbs=verbs)
            waits.visit(tree_of(file))
            found += waits.found
    return found


def changed(file: str, target: int, verbs: Collection[str] = VERBS) -> contextlib.AbstractContextManager[None]:
    """Inside, every function of a file has what :class:`_Waits` has made of it."""
    return rewritten(file, _Waits(file, target, verbs).visit(tree_of(file)))


def programs() -> dict[str, Callable[[], Any]]:
    """Each shows what can be seen of it. They use the models of the tests, which are imported here alone."""
    from tools.stream_programs import ALL

    return ALL


@contextlib.contextmanager
def passers(found: list[Site]) -> Iterator[set[Site]]:
    """Which sites are on the stack when something is ordered inside."""
    lines: dict[tuple[str, int], list[Site]] = {}
    for site in found:
        lines.setdefault((str(PACKAGE / site.file), site.line), []).append(site)
    passed: set[Site] = set()
    running: list[Site] = []
    numbered = {(site.number, site.file): site for site in found}

    def handed(number: int, file: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            running.append(numbered[number, file])
            try:
                return function(*args, **kwargs)
            finally:
                running.pop()

        return call

    def on_the_way() -> set[Site]:
        frame, here = sys._getframe(2), set(running)
        while frame is not None:
            here.update(lines.get((frame.f_code.co_filename, frame.f_lineno), ()))
            frame = frame.f_back  # type: ignore[assignment]
        return here

    def watched(method: Any, records: bool) -> Any:
        def call(self: Any, *args: Any) -> Any:
            # To record orders nothing before somebody waits: an event that only takes the time never does.
            if records:
                self.recorded_at = on_the_way()
            else:
                passed.update(on_the_way(), getattr(self, "recorded_at", ()))
            return method(self, *args)

        return call

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(builtins, HANDED, handed, create=True))
        for file in {site.file for site in found if not site.called}:
            stack.enter_context(changed(file, -1))
        for kind, names in (
            (simulation._Event, ("record", "wait", "synchronize")),
            (simulation._Work, ("wait",)),
            (simulation.SimulatedAccelerator, ("synchronize",)),
        ):
            for name in names:
                stack.enter_context(mock.patch.object(kind, name, watched(getattr(kind, name), name == "record")))
        yield passed


@dataclass
class Baseline:
    """What a program shows when nothing is left out, how long that takes, and which sites it passes."""

    shown: str
    seconds: float
    passed: set[Site]


def baselines(found: list[Site], only: Collection[str] = ()) -> dict[str, Baseline]:
    """Of all programs, or of some, the quickest first."""
    made = {}
    for program, show in programs().items():
        if only and program not in only:
            continue
        run_once = time.perf_counter()
        with passers(found) as passed:
            shown = str(show())
        made[program] = Baseline(shown, time.perf_counter() - run_once, passed)
    return dict(sorted(made.items(), key=lambda item: item[1].seconds))


def notices(site: Site, known: dict[str, Baseline]) -> tuple[str, str] | None:
    """Which program notices that a site is gone, and how; None: none."""
    for program, calm in known.items():
        if site not in calm.passed:
            continue
        with changed(site.file, site.number):
            try:
                shown = str(programs()[program]())
            except Exception as error:
                return program, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        if shown != calm.shown:
            return program, "other results"
    return None


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=inspect.getdoc(sys.modules[__name__]).splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--only", default="", metavar="TEXT")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args(arguments)
    sys.path.insert(0, str(ROOT))
    importlib.import_module("deepzero")
    found = sites()
    known = baselines(found)
    ordering = [site for site in found if any(site in calm.passed for calm in known.values())]
    chosen = [site for site in ordering if options.only in str(site)]
    silent = [site for site in found if site not in ordering]
    unnoticed = []
    for number, site in enumerate(chosen if not options.list else ()):
        noticed = notices(site, known)
        elsewhere = ELSEWHERE.get(str(site), "")
        unnoticed += [site] * (noticed is None and not elsewhere)
        said = elsewhere or "NOT NOTICED" if noticed is None else f"{noticed[0]}: {noticed[1][:110]}"
        print(f"{number + 1}/{len(chosen)} {site}\n    {said}", flush=True)
    for site in silent if options.list or not options.only else ():
        print(f"orders nothing here: {site}")
    of_names = f"{len(found)} of these names, {len(ordering)} order something"
    print(f"{of_names}; not noticed: {len(unnoticed)} of {len(chosen)}")
    return int(bool(unnoticed))


if __name__ == "__main__":
    sys.exit(main())
