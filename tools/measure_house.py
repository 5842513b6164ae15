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
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepzero.utils.closed_pipe import exit_with

MAX_FILE_LINES, MAX_FUNCTION_LINES = 800, 80

FOLDERS: dict[str, tuple[int, int]] = {
    "deepzero/config": (1_689, 1150),
    "deepzero/comm": (4_525, 2720),
    "deepzero/runtime": (4_773, 3050),
    "deepzero/runtime/zero": (5_868, 4550),
    "deepzero/offload": (3_540, 2500),
    "deepzero/checkpoint": (3_688, 2610),
    "deepzero/launch": (725, 650),
    "deepzero/health": (651, 560),
    "deepzero/monitor": (2_495, 1600),
    "deepzero/planning": (2_245, 1650),
    "deepzero/profiling": (1_176, 800),
    "deepzero/models": (542, 540),
    "deepzero/data": (515, 400),
    "deepzero/training": (1_005, 380),
    "deepzero/compat": (3_355, 1200),
    "deepzero": (38_667, 23_500),
    "tools": (5_883, 2700),
    "tools/book": (1084, 1000),
    "examples": (764, 700),
    "tests": (32_720, 17_000),
}
"""Folder → lines of its Python files, (budget, target). A folder is counted without those below it in ``APART``."""
APART = {"deepzero/runtime": ("deepzero/runtime/zero/",), "tools": ("tools/book/", "tools/walk.py")}

READING_PATH = re.compile(r"^\d+\. +`(deepzero/[\w/]+\.py)`", re.MULTILINE)
"""A line of the list in the README's section on reading."""
CORE = re.compile("deepzero/(comm|runtime|offload|checkpoint)/")
PROTOCOL = re.compile(r"(typing\.)?Protocol")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
THREADS = {"Thread", "Timer", "ThreadPool", "ThreadPoolExecutor", "start_new_thread"}
CHANGES = {"append", "extend", "insert", "add", "update", "setdefault", "pop", "popitem", "remove", "discard", "clear"}
SILENT = {getattr(tokenize, name) for name in ("NL", "NEWLINE", "INDENT", "DEDENT", "ENCODING", "ENDMARKER")}


class Source:
    """One Python file: its path from the repository's root, its text and its syntax tree."""

    def __init__(self, path: str, text: str) -> None:
        self.path, self.text, self.tree = path, text, ast.parse(text, path)
        self.lines = len(text.splitlines())

    def nodes(self, *kinds: type[ast.AST]) -> Iterator[Any]:
        """Every node of these kinds, nested ones too."""
        return (node for node in ast.walk(self.tree) if isinstance(node, kinds))

    def imports(self) -> set[str]:
        """Dotted names of the modules, or of what is taken from them, that any part of the file imports."""
        absolute = {alias.name for node in self.nodes(ast.Import) for alias in node.names}
        taken = (node for node in self.nodes(ast.ImportFrom) if not node.level)
        return absolute | {f"{node.module}.{alias.name}" for node in taken for alias in node.names}

    def comments_and_code(self) -> tuple[int, int]:
        """Lines that are a comment, and lines of code: neither blank, nor comment, nor docstring."""
        comments: set[int] = set()
        code: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type == tokenize.COMMENT:
                comments.update([token.start[0]] if token.line.lstrip().startswith("#") else [])
            elif token.type not in SILENT:
                code.update(range(token.start[0], token.end[0] + 1))
        for node in self.nodes(ast.Expr):
            if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
                code.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        return len(comments), len(code)

    def dry_run_branches(self) -> int:
        """Conditions that ask whether tensors or ranks are real."""
        asks = re.compile(r"\bis_meta\b|['\"]meta['\"]|dry_run|rehears|\bfake", re.IGNORECASE)
        return sum(1 for node in self.nodes(ast.If, ast.IfExp, ast.While) if asks.search(ast.unparse(node.test)))

    def threads(self) -> int:
        """Threads that are started, or kinds of thread that are defined."""
        started = [node.func for node in self.nodes(ast.Call)]
        bases = [base for node in self.nodes(ast.ClassDef) for base in node.bases]
        return sum(ast.unparse(node).rpartition(".")[2] in THREADS for node in (*started, *bases))

    def mutable_state(self) -> set[str]:
        """Names of the module that functions rebind (``global``) or whose container the file changes."""
        rebound = {name for node in self.nodes(ast.Global) for name in node.names}
        assigned = [node for node in self.nodes(ast.Assign, ast.AnnAssign) if node in self.tree.body]
        targets = [target for node in assigned for target in getattr(node, "targets", None) or [node.target]]
        held = {target.id for target in targets if isinstance(target, ast.Name)}
        for inner in self.nodes(ast.Attribute, ast.Subscript):
            if isinstance(inner.value, ast.Name) and inner.value.id in held:
                stored = isinstance(inner.ctx, (ast.Store, ast.Del))
                if stored or (isinstance(inner, ast.Attribute) and inner.attr in CHANGES):
                    rebound.add(inner.value.id)
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
        mark = "" if self.kept else "  BELOW" if self.least else "  ABOVE"
        return f"{self.what:<52}{self.now:>9,g}{self.budget:>9,g}{self.target:>9,g}{mark}  {self.note}".rstrip()


def read(root: Path) -> dict[str, Source]:
    """The Python files of the repository at ``root``, by path."""
    folders = [root / name for name in ("deepzero", "tools", "tests", "examples")]
    paths = sorted([*root.glob("*.py"), *(path for folder in folders for path in folder.rglob("*.py"))])
    names = {path: path.relative_to(root).as_posix() for path in paths}
    return {name: Source(name, path.read_text(encoding="utf-8")) for path, name in names.items()}


def files_of(house: dict[str, Source], folder: str) -> list[Source]:
    """The files below a folder, without those that have a budget of their own."""
    below = [source for name, source in house.items() if name.startswith(folder + "/")]
    return [one for one in below if folder not in APART or not one.path.startswith(APART[folder])]


def members(package: list[Source]) -> dict[str, tuple[set[str], set[str]]]:
    """Class → its methods, and the attributes that it sets on ``self``; with those of its bases in the package."""
    nodes = {node.name: node for source in package for node in source.nodes(ast.ClassDef)}
    # A protocol only says what others have.
    nodes = {name: node for name, node in nodes.items() if not any(map(PROTOCOL.match, map(ast.unparse, node.bases)))}

    def whole(name: str, seen: frozenset[str] = frozenset()) -> tuple[set[str], set[str]]:
        node = nodes[name]
        methods = {item.name for item in node.body if isinstance(item, FUNCTIONS)}
        stores = [
            item for item in ast.walk(node) if isinstance(item, ast.Attribute) and isinstance(item.ctx, ast.Store)
        ]
        stored = {item.attr for item in stores if isinstance(item.value, ast.Name) and item.value.id == "self"}
        for base in node.bases:
            above = ast.unparse(base).rpartition(".")[2].partition("[")[0]
            if above in nodes and above not in seen:
                more = whole(above, seen | {name})
                methods, stored = methods | more[0], stored | more[1]
        return methods, stored

    return {name: whole(name) for name in nodes}


def reading_path(root: Path) -> list[str]:
    """The files that the README tells a reader to read, in order."""
    return READING_PATH.findall((root / "README.md").read_text(encoding="utf-8"))


def rows(root: Path, house: dict[str, Source]) -> Iterator[Row]:
    """What is measured, line by line."""
    for folder, (budget, target) in FOLDERS.items():
        files = files_of(house, folder)
        yield Row(f"lines of {folder}/", sum(source.lines for source in files), budget, target, f"{len(files)} files")
    yield Row("lines of train.py", house["train.py"].lines, 150, 150)
    yield Row("lines of tools/walk.py", house["tools/walk.py"].lines if "tools/walk.py" in house else 0, 365, 300)

    path = [house[name] for name in reading_path(root)]
    counts = [source.comments_and_code() for source in path]
    density = round(100 * sum(comments for comments, _ in counts) / max(sum(code for _, code in counts), 1), 1)
    yield Row("lines of the reading path", sum(source.lines for source in path), 5500, 5500, f"{len(path)} files")
    yield Row("comments per 100 lines of code on it", density, 14, 12, least=True)

    package, zero = files_of(house, "deepzero"), files_of(house, "deepzero/runtime/zero")
    yield Row("classes in runtime/zero", sum(1 for source in zero for _ in source.nodes(ast.ClassDef)), 30, 30)
    below = [source for source in zero if any(name.startswith("deepzero.offload") for name in source.imports())]
    yield Row("files of runtime/zero that import offload", len(below), 0, 0)
    core = [source for source in package if CORE.match(source.path) and "dry_run" not in source.path]
    branches = [count for source in core if (count := source.dry_run_branches())]
    yield Row("branches for dry runs in the core", sum(branches), 0, 0, f"in {len(branches)} files")
    state = [f"{one.path.removeprefix('deepzero/')}:{name}" for one in package for name in sorted(one.mutable_state())]
    yield Row("module-level mutable state", len(state), 2, 2, ", ".join(state[:3]) + (" …" if len(state) > 3 else ""))

    # A thread that has not chosen its device makes a context on GPU 0 as soon as it asks CUDA anything.
    threads = sum(source.threads() for source in package if source.path != "deepzero/utils/threads.py")
    yield Row("threads started past utils/threads.py", threads, 0, 0)
    yield from class_rows(package)

    large = [source.path for source in house.values() if source.lines > MAX_FILE_LINES]
    yield Row(f"files of more than {MAX_FILE_LINES} lines", len(large), 0, 0, ", ".join(large))
    functions = [(source.path, node) for source in house.values() for node in source.nodes(*FUNCTIONS)]
    long = [f"{path}:{node.lineno}" for path, node in functions
            if (node.end_lineno or 0) - node.lineno + 1 > MAX_FUNCTION_LINES]  # fmt: skip
    yield Row(f"functions of more than {MAX_FUNCTION_LINES} lines", len(long), 0, 0, ", ".join(long))


def class_rows(package: list[Source]) -> Iterator[Row]:
    """The largest classes, and the names that two files define."""
    sizes = members(package)
    for what, index, budget, target in (("methods", 0, 25, 25), ("attributes", 1, 20, 20)):
        largest = max(sizes, key=lambda name: len(sizes[name][index]))
        over = sum(len(size[index]) > target for size in sizes.values())
        now, note = len(sizes[largest][index]), f"{largest}; {over} above the target"
        yield Row(f"{what} of the largest class", now, budget, target, note)
    constructors: dict[str, int] = {}
    places: dict[str, set[str]] = {}
    for source in package:
        for node in source.nodes(ast.ClassDef):
            places.setdefault(node.name, set()).add(source.path)
            for item in node.body:
                if isinstance(item, ast.FunctionDef) and item.name == "__init__":
                    taken = item.args  # "self" is not counted
                    count = len([*taken.posonlyargs, *taken.args, *taken.kwonlyargs]) - 1
                    constructors[f"{node.name} ({source.path})"] = count
    most = max(constructors, key=lambda name: constructors[name])
    yield Row("constructor parameters", constructors[most], 8, 8, most)
    twice = sorted(name for name, files in places.items() if len(files) > 1)
    yield Row("class names defined twice in the package", len(twice), 0, 0, ", ".join(twice))


def main(arguments: list[str] | None = None) -> int:
    """Print the table. Returns the exit status: 1 where a budget is exceeded."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).parents[1], help="the repository")
    root = parser.parse_args(arguments).root
    if not (root / "train.py").is_file():
        parser.error(f"{root} is not the repository: there is no train.py")
    table = list(rows(root, read(root)))
    print(f"{'':<52}{'now':>9}{'budget':>9}{'target':>9}")
    print(*table, sep="\n")
    exceeded = [row.what for row in table if not row.kept]
    print("\nhouse: " + (f"budget exceeded: {', '.join(exceeded)}" if exceeded else "every budget is kept"))
    return 1 if exceeded else 0


if __name__ == "__main__":
    exit_with(main)
