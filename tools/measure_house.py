"""How large and how clear the code is, measured: ``python -m tools.measure_house`` prints one table.

A package that is to be read in a day grows by one useful feature at a time. So its sizes are counted, each has a
budget, and the exit status is 1 where one is exceeded; ``.ci/run`` calls it. Beside each budget stands the
target. Budgets are lowered as the code shrinks; a change that has to raise one raises it here, for a reviewer to see.
What may import what is checked by ``lint-imports``, banned names and docstrings by ``ruff``: see ``pyproject.toml``.

Everything is read with :mod:`ast` and :mod:`tokenize`; nothing is imported, so it needs no torch and takes seconds.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

MAX_FILE_LINES, MAX_FUNCTION_LINES = 800, 80

FOLDERS: dict[str, tuple[int, int]] = {
    "deepzero/config": (1355, 1150),
    "deepzero/comm": (3447, 2720),
    "deepzero/runtime": (3520, 3050),
    "deepzero/runtime/zero": (5660, 4550),
    "deepzero/offload": (3180, 2500),
    "deepzero/checkpoint": (3610, 2610),
    "deepzero/launch": (694, 650),
    "deepzero/health": (634, 560),
    "deepzero/monitor": (2702, 1600),
    "deepzero/planning": (2245, 1650),
    "deepzero/profiling": (1230, 800),
    "deepzero/models": (545, 540),
    "deepzero/data": (485, 400),
    "deepzero/training": (950, 380),
    "deepzero/compat": (1200, 1200),
    "deepzero": (36_400, 23_500),
    "tools": (5930, 2700),
    "tests": (27_400, 17_000),
}
"""Folder → lines of its Python files, (budget, target). ``deepzero/runtime`` is counted without ``zero/``."""

READING_PATH = re.compile(r"^\d+\. +`(deepzero/[\w/]+\.py)`", re.MULTILINE)
"""A line of the list in the README's section on reading."""


@dataclass
class Source:
    """One Python file: its path from the repository's root, its text and its syntax tree."""

    path: str
    text: str
    tree: ast.Module = field(init=False)

    def __post_init__(self) -> None:
        self.tree = ast.parse(self.text, self.path)

    @property
    def lines(self) -> int:
        """All lines, blank ones too."""
        return len(self.text.splitlines())

    def classes(self) -> Iterator[ast.ClassDef]:
        """Every class, nested ones too."""
        return (node for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef))

    def functions(self) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        """Every function and method."""
        return (node for node in ast.walk(self.tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))

    def imports(self) -> set[str]:
        """Dotted names of the modules, or of what is taken from them, that any part of the file imports."""
        found: set[str] = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found.update(f"{node.module}.{alias.name}" for alias in node.names)
        return found

    def comments_and_code(self) -> tuple[int, int]:
        """Lines that are a comment, and lines of code: neither blank, nor comment, nor docstring."""
        comments: set[int] = set()
        code: set[int] = set()
        silent = (
            tokenize.NL,
            tokenize.NEWLINE,
            tokenize.INDENT,
            tokenize.DEDENT,
            tokenize.ENCODING,
            tokenize.ENDMARKER,
        )
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type == tokenize.COMMENT:
                comments.update([token.start[0]] if token.line.lstrip().startswith("#") else [])
            elif token.type not in silent:
                code.update(range(token.start[0], token.end[0] + 1))
        for node in ast.walk(self.tree):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                code.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        return len(comments), len(code)

    def dry_run_branches(self) -> int:
        """Conditions that ask whether tensors or ranks are real."""
        tests = [node.test for node in ast.walk(self.tree) if isinstance(node, (ast.If, ast.IfExp, ast.While))]
        asks = re.compile(r"\bis_meta\b|['\"]meta['\"]|dry_run|rehears|\bfake", re.IGNORECASE)
        return sum(1 for test in tests if asks.search(ast.unparse(test)))

    def threads(self) -> int:
        """Threads that are started, or kinds of thread that are defined."""
        kinds = {"Thread", "Timer", "ThreadPool", "ThreadPoolExecutor", "start_new_thread"}
        started = [node.func for node in ast.walk(self.tree) if isinstance(node, ast.Call)]
        bases = [base for node in self.classes() for base in node.bases]
        return sum(ast.unparse(node).rpartition(".")[2] in kinds for node in (*started, *bases))

    def mutable_state(self) -> set[str]:
        """Names of the module that functions rebind (``global``) or whose container the file changes."""
        rebound = {name for node in ast.walk(self.tree) if isinstance(node, ast.Global) for name in node.names}
        held: set[str] = set()
        for node in self.tree.body:
            targets = (
                node.targets
                if isinstance(node, ast.Assign)
                else [node.target]
                if isinstance(node, ast.AnnAssign)
                else []
            )
            held.update(target.id for target in targets if isinstance(target, ast.Name))
        changes = {
            "append",
            "add",
            "update",
            "pop",
            "clear",
            "setdefault",
            "extend",
            "remove",
            "discard",
            "insert",
            "popitem",
        }
        for inner in ast.walk(self.tree):
            if not isinstance(inner, (ast.Attribute, ast.Subscript)) or not isinstance(inner.value, ast.Name):
                continue
            changes_it = isinstance(inner, ast.Attribute) and inner.attr in changes
            if changes_it or isinstance(inner.ctx, (ast.Store, ast.Del)):
                rebound |= held & {inner.value.id}
        return rebound


@dataclass(frozen=True)
class Row:
    """One line of the table. ``least``: the budget is a lower bound."""

    what: str
    now: float
    budget: float
    target: float
    note: str = ""
    least: bool = False

    @property
    def kept(self) -> bool:
        """Whether the budget is."""
        return self.now >= self.budget if self.least else self.now <= self.budget

    def __str__(self) -> str:
        mark = "" if self.kept else "  ABOVE" if not self.least else "  BELOW"
        return f"{self.what:<52}{self.now:>9,g}{self.budget:>9,g}{self.target:>9,g}{mark}  {self.note}".rstrip()


def read(root: Path) -> dict[str, Source]:
    """The Python files of the repository at ``root``, by path."""
    paths = [
        *root.glob("*.py"),
        *(path for folder in ("deepzero", "tools", "tests", "examples") for path in (root / folder).rglob("*.py")),
    ]
    names = {path.relative_to(root).as_posix(): path for path in sorted(paths)}
    return {name: Source(name, path.read_text(encoding="utf-8")) for name, path in names.items()}


def files_of(house: dict[str, Source], folder: str) -> list[Source]:
    """The files below a folder; ``deepzero/runtime`` without ``zero/``, which has a budget of its own."""
    below = [source for name, source in house.items() if name.startswith(folder + "/")]
    if folder == "deepzero/runtime":
        below = [source for source in below if not source.path.startswith("deepzero/runtime/zero/")]
    return below


def members(house: dict[str, Source]) -> dict[str, tuple[set[str], set[str]]]:
    """Class → its methods, and the attributes that it sets on ``self``; with those of its bases in the package."""
    nodes = {node.name: node for source in package(house) for node in source.classes()}
    own: dict[str, tuple[set[str], set[str]]] = {}
    for name, node in nodes.items():
        methods = {item.name for item in node.body if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef))}
        stored = {
            inner.attr
            for inner in ast.walk(node)
            if isinstance(inner, ast.Attribute)
            and isinstance(inner.ctx, ast.Store)
            and isinstance(inner.value, ast.Name)
            and inner.value.id == "self"
        }
        own[name] = methods, stored

    def whole(name: str, seen: frozenset[str] = frozenset()) -> tuple[set[str], set[str]]:
        methods, stored = (set(part) for part in own[name])
        for base in nodes[name].bases:
            above = ast.unparse(base).rpartition(".")[2].partition("[")[0]
            if above in nodes and above not in seen and not is_protocol(nodes[above]):
                more = whole(above, seen | {name})
                methods, stored = methods | more[0], stored | more[1]
        return methods, stored

    return {name: whole(name) for name in nodes if not is_protocol(nodes[name])}


def is_protocol(node: ast.ClassDef) -> bool:
    """Whether a class only says what others have."""
    return any(ast.unparse(base).startswith(("Protocol", "typing.Protocol")) for base in node.bases)


def package(house: dict[str, Source]) -> list[Source]:
    """The files of ``deepzero/``."""
    return [source for name, source in house.items() if name.startswith("deepzero/")]


def reading_path(root: Path) -> list[str]:
    """The files that the README tells a reader to read, in order."""
    return READING_PATH.findall((root / "README.md").read_text(encoding="utf-8"))


def rows(root: Path, house: dict[str, Source]) -> Iterator[Row]:
    """What is measured, line by line."""
    for folder, (budget, target) in FOLDERS.items():
        files = files_of(house, folder)
        yield Row(f"lines of {folder}/", sum(source.lines for source in files), budget, target, f"{len(files)} files")
    yield Row("lines of train.py", house["train.py"].lines, 150, 150)

    path = [house[name] for name in reading_path(root)]
    comments, code = (
        (sum(column) for column in zip(*(source.comments_and_code() for source in path), strict=True))
        if path
        else (0, 0)
    )
    yield Row("lines of the reading path", sum(source.lines for source in path), 6120, 5500, f"{len(path)} files")
    yield Row("comments per 100 lines of code on it", round(100 * comments / max(code, 1), 1), 7, 12, least=True)

    zero = [source for source in package(house) if source.path.startswith("deepzero/runtime/zero/")]
    yield Row("classes in runtime/zero", sum(1 for source in zero for _ in source.classes()), 46, 30)
    below = [source for source in zero if any(name.startswith("deepzero.offload") for name in source.imports())]
    yield Row("files of runtime/zero that import offload", len(below), 0, 0)
    core = [
        source
        for source in package(house)
        if source.path.split("/")[1] in ("comm", "runtime", "offload", "checkpoint") and "dry_run" not in source.path
    ]
    branches = {source.path: source.dry_run_branches() for source in core if source.dry_run_branches()}
    yield Row("branches for dry runs in the core", sum(branches.values()), 17, 0, f"in {len(branches)} files")
    state = [
        f"{source.path.removeprefix('deepzero/')}:{name}"
        for source in package(house)
        for name in sorted(source.mutable_state())
    ]
    yield Row("module-level mutable state", len(state), 11, 2, ", ".join(state[:3]) + (" …" if len(state) > 3 else ""))

    # A thread that has not chosen its device makes a context on GPU 0 as soon as it asks CUDA anything.
    threads = sum(source.threads() for source in package(house) if source.path != "deepzero/utils/threads.py")
    yield Row("threads started past utils/threads.py", threads, 0, 0)

    sizes = members(house)
    for what, index, budget, target in (("methods", 0, 63, 25), ("attributes", 1, 32, 20)):
        largest = max(sizes, key=lambda name: len(sizes[name][index]))
        over = sum(len(size[index]) > target for size in sizes.values())
        yield Row(
            f"{what} of the largest class",
            len(sizes[largest][index]),
            budget,
            target,
            f"{largest}; {over} above the target",
        )
    constructors = {
        f"{node.name} ({source.path})": len(parameters(item))
        for source in package(house)
        for node in source.classes()
        for item in node.body
        if isinstance(item, ast.FunctionDef) and item.name == "__init__"
    }
    most = max(constructors, key=lambda name: constructors[name])
    yield Row("constructor parameters", constructors[most], 10, 8, most)
    twice = duplicates(house)
    yield Row("class names defined twice in the package", len(twice), 0, 0, ", ".join(twice))
    large = [source.path for source in house.values() if source.lines > MAX_FILE_LINES]
    yield Row(f"files of more than {MAX_FILE_LINES} lines", len(large), 0, 0, ", ".join(large))
    long = [
        f"{source.path}:{node.lineno}"
        for source in house.values()
        for node in source.functions()
        if (node.end_lineno or 0) - node.lineno + 1 > MAX_FUNCTION_LINES
    ]
    yield Row(f"functions of more than {MAX_FUNCTION_LINES} lines", len(long), 0, 0, ", ".join(long))


def parameters(function: ast.FunctionDef) -> list[str]:
    """Names of a method's parameters, ``self`` left out."""
    taken = function.args
    return [arg.arg for arg in (*taken.posonlyargs, *taken.args, *taken.kwonlyargs)][1:]


def duplicates(house: dict[str, Source]) -> list[str]:
    """Names of public classes that two files of the package define."""
    seen: dict[str, set[str]] = {}
    for source in package(house):
        for node in source.classes():
            seen.setdefault(node.name, set()).add(source.path)
    return sorted(name for name, places in seen.items() if len(places) > 1)


def main(arguments: list[str] | None = None) -> int:
    """Print the table. Returns the exit status: 1 where a budget is exceeded."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).parents[1], help="the repository")
    root = parser.parse_args(arguments).root
    table = list(rows(root, read(root)))
    print(f"{'':<52}{'now':>9}{'budget':>9}{'target':>9}")
    print(*table, sep="\n")
    exceeded = [row.what for row in table if not row.kept]
    print("\nhouse: " + (f"budget exceeded: {', '.join(exceeded)}" if exceeded else "every budget is kept"))
    return 1 if exceeded else 0


if __name__ == "__main__":
    sys.exit(main())
