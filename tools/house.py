"""The house's rules, checked: floors, walls, sizes, docstrings. ``python tools/house.py`` prints one line a violation.

deepzero is a house of rooms on floors, and a room imports only from the floors below it. That is what keeps it
readable in a day: whoever reads ``comm/`` need not know ``runtime/``, and a feature that wants to be woven through all
rooms is refused by a machine, before a reviewer has to. The rules are architecture, so they are written here as tables
(:data:`FLOORS`, :data:`WALLS`, :data:`RESERVED`) and a change to one of them is a change to this file.

Everything is read with :mod:`ast`; nothing is imported, so the checks need no torch and take a second. Every form of
import counts: ``import a.b``, ``from a import b``, relative ones, those inside functions or ``if TYPE_CHECKING``,
``importlib.import_module("a.b")``, and the attribute ``torch.distributed`` of a plain ``import torch``.

Usage:
    python tools/house.py            check; exit status 1 if a rule is broken
    python tools/house.py --graph    print who imports whom, floor by floor
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

MAX_FILE_LINES = 800
MAX_FUNCTION_LINES = 80

PACKAGE = "deepzero"
ROOTS = ("deepzero", "tools", "tests", "examples", "docs", "configs")
"""Folders that are read, besides the files at the top of the repository."""

FLOORS: tuple[tuple[str, int], ...] = (
    ("deepzero.config", 0),
    ("deepzero.version", 0),
    ("deepzero.layout", 0),
    ("deepzero.durable", 0),
    ("deepzero.utils.compile", 0),
    ("deepzero.utils.exit_hooks", 0),
    ("deepzero.utils.threads", 0),
    ("deepzero.comm", 1),
    ("deepzero.comm.reduce_scatter", 2),
    ("deepzero.comm.quantized_reduce", 2),
    ("deepzero.launch", 2),
    ("deepzero.health", 2),
    ("deepzero.offload", 2),
    ("deepzero.runtime", 3),
    ("deepzero.checkpoint", 4),
    ("deepzero.offload.offload_states", 4),
    ("deepzero.compat", 5),
    ("deepzero.runtime.initialize", 6),
    ("deepzero.evaluation", 6),
    ("deepzero.training", 7),
    ("deepzero.planning", 6),
    ("deepzero.monitor", 4),
    ("deepzero.profiling", 4),
    ("deepzero.models", 4),
    ("deepzero.data", 4),
    ("deepzero.utils", 5),
    ("deepzero.ops", 5),
    ("deepzero.zero", 5),
)
"""Module or package → floor; the longest name that fits counts. The package ``deepzero`` itself stands above all."""

_ZERO = "deepzero.runtime.zero"
WALLS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("deepzero.models", ("deepzero.runtime", "deepzero.comm", "deepzero.offload"), "a model knows nothing of ZeRO"),
    (f"{_ZERO}.stage_1_and_2", (f"{_ZERO}.stage3",), "the stages do not know each other"),
    (f"{_ZERO}.stage3", (f"{_ZERO}.stage_1_and_2",), "the stages do not know each other"),
    (
        f"{_ZERO}.partition_parameters",
        (f"{_ZERO}.partitioned_param_coordinator", f"{_ZERO}.module_hooks", f"{_ZERO}.stage3"),
        "it knows where bytes lie, not the order in which they are needed",
    ),
    (f"{_ZERO}.partitioned_param_coordinator", (f"{_ZERO}.stage3",), "a part does not know the whole"),
)
"""(who, must not import these, why), where the floors alone would allow it."""

RESERVED: tuple[tuple[str, tuple[str, ...], str], ...] = (
    (
        "torch.distributed",
        ("deepzero/comm/", "deepzero/health/", "tools/", "examples/", "tests/"),
        "only deepzero/comm talks to other ranks",
    ),
    ("hydra", ("train.py", "tests/"), "Hydra stops at train.py"),
    ("omegaconf", ("train.py", "tests/"), "Hydra stops at train.py"),
)
"""(module, the only places that import it, why)."""

THREADS = ("Thread", "Timer", "ThreadPool", "ThreadPoolExecutor", "start_new_thread")
"""Called, or inherited from, in ``deepzero/utils/threads.py`` alone."""

LATE = ("wandb", "tensorboard", "torch.utils.tensorboard", "torch_tb_profiler", "matplotlib", "deepspeed")
"""In the package and in train.py these are imported inside the functions that need them."""


@dataclass(frozen=True)
class Violation:
    """One broken rule at one place."""

    path: str
    line: int
    rule: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message} [{self.rule}]"


@dataclass(frozen=True)
class Import:
    """One use of a module: the absolute dotted name, and whether loading the file executes it."""

    target: str
    line: int
    at_load: bool


@dataclass(frozen=True)
class SourceFile:
    """A parsed Python file. ``path`` is relative to the repository, with slashes."""

    path: str
    module: str
    is_package: bool
    tree: ast.Module
    imports: tuple[Import, ...]


@dataclass(frozen=True)
class House:
    """All that the rules look at."""

    lines: dict[str, int]
    files: tuple[SourceFile, ...]
    broken: tuple[Violation, ...]

    def modules(self) -> dict[str, SourceFile]:
        """The modules of the package by dotted name."""
        return {f.module: f for f in self.files if within(f.module, PACKAGE)}

    def edges(self) -> Iterator[tuple[SourceFile, str, int]]:
        """Imports inside the package: (importer, imported module, line)."""
        modules = self.modules()
        for file in modules.values():
            for use in file.imports:
                target = use.target
                while target and target not in modules:  # from deepzero.a import NAME: the module is deepzero.a
                    target = target.rpartition(".")[0]
                if target and not (target == file.module and use.target != file.module):
                    yield file, target, use.line


def within(name: str, package: str) -> bool:
    """Whether dotted ``name`` is ``package`` or lies inside it.

    Example:
        >>> within("a.bc", "a.b"), within("a.b.c", "a.b")
        (False, True)
    """
    return name == package or name.startswith(package + ".")


# ---------------------------------------------------------------------------------------------------------------------
# Reading
# ---------------------------------------------------------------------------------------------------------------------


def read_house(root: Path) -> House:
    """Parse every Python file of the repository at ``root``; a file that does not parse is itself a violation."""
    lines: dict[str, int] = {}
    files: list[SourceFile] = []
    broken: list[Violation] = []
    for path in sorted(_paths(root)):
        name = path.relative_to(root).as_posix()
        text = path.read_text(encoding="utf-8")
        lines[name] = len(text.splitlines())
        if path.suffix != ".py":
            continue
        try:
            tree = ast.parse(text, name)
        except SyntaxError as error:
            broken.append(Violation(name, error.lineno or 1, "syntax", f"does not parse: {error.msg}"))
            continue
        is_package = path.name == "__init__.py"
        module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        files.append(SourceFile(name, module, is_package, tree, tuple(_imports(tree, module, is_package))))
    return House(lines, tuple(files), tuple(broken))


def _paths(root: Path) -> Iterator[Path]:
    yield from root.glob("*.py")
    for folder in ROOTS:
        for path in (root / folder).rglob("*"):
            hidden = any(part.startswith(".") or part == "__pycache__" for part in path.relative_to(root).parts)
            if path.suffix in (".py", ".yaml", ".yml", ".sh", ".sbatch") and path.is_file() and not hidden:
                yield path


def _imports(tree: ast.Module, module: str, is_package: bool) -> Iterator[Import]:
    """Every import of a file, in all its forms."""
    aliases: dict[str, str] = {}
    late = _late_nodes(tree)
    for node in ast.walk(tree):
        at_load = id(node) not in late
        if isinstance(node, ast.Import):
            for name in node.names:
                aliases[name.asname or name.name.split(".")[0]] = name.name if name.asname else name.name.split(".")[0]
                yield Import(name.name, node.lineno, at_load)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, module, is_package)
            for name in node.names:
                aliases[name.asname or name.name] = f"{base}.{name.name}"
                yield Import(base if name.name == "*" else f"{base}.{name.name}", node.lineno, at_load)
        elif isinstance(node, ast.Call) and node.args and _called(node) in ("import_module", "__import__"):
            name_node = node.args[0]
            if isinstance(name_node, ast.Constant) and isinstance(name_node.value, str):
                yield Import(name_node.value, node.lineno, at_load)
    for node in ast.walk(tree):  # the attribute of an imported package: torch.distributed after `import torch`
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            full = f"{aliases.get(node.value.id, '')}.{node.attr}"
            if any(full == reserved for reserved, _, _ in RESERVED):
                yield Import(full, node.lineno, id(node) not in late)


def _late_nodes(tree: ast.Module) -> set[int]:
    """Ids of the nodes that do not run when the module is loaded: inside functions and ``if TYPE_CHECKING``."""
    late: set[int] = set()
    for node in ast.walk(tree):
        body = node.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) else []
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            body = node.body
        for statement in body:
            late.update(id(inner) for inner in ast.walk(statement))
    return late


def _absolute(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    parts = parts[: len(parts) - node.level + (1 if is_package else 0)]
    return ".".join(parts + ([node.module] if node.module else []))


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


# ---------------------------------------------------------------------------------------------------------------------
# The rules: each takes the house and yields what is wrong in it
# ---------------------------------------------------------------------------------------------------------------------


def check_file_sizes(house: House) -> Iterator[Violation]:
    """No file is longer than a reader's patience."""
    for path, count in house.lines.items():
        if count > MAX_FILE_LINES:
            yield Violation(path, MAX_FILE_LINES + 1, "file-size", f"{count} lines, at most {MAX_FILE_LINES}: split it")


def check_function_sizes(house: House) -> Iterator[Violation]:
    """No function is longer than a screen."""
    for file in house.files:
        for node in ast.walk(file.tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                count = (node.end_lineno or node.lineno) - node.lineno + 1
                if count > MAX_FUNCTION_LINES:
                    text = f"{node.name} has {count} lines, at most {MAX_FUNCTION_LINES}: split it"
                    yield Violation(file.path, node.lineno, "function-size", text)


def floor_of(module: str) -> int | None:
    """The floor of a module of the package by :data:`FLOORS`, None if it has none."""
    if module == PACKAGE:
        return 1 + max(floor for _, floor in FLOORS)
    fitting = [(len(name), floor) for name, floor in FLOORS if within(module, name)]
    return max(fitting)[1] if fitting else None


def check_floors(house: House) -> Iterator[Violation]:
    """A room imports only from floors below it, or from itself. A room is a folder right under the package."""
    for module, file in house.modules().items():
        if floor_of(module) is None:
            yield Violation(file.path, 1, "floors", f"{module} has no floor: enter it in FLOORS of tools/house.py")
    for file, target, line in house.edges():
        own, other = floor_of(file.module), floor_of(target)
        if own is None or other is None or other < own:
            continue
        if other > own:
            text = f"{file.module} (floor {own}) imports {target} (floor {other}): only floors below may be imported"
            yield Violation(file.path, line, "floors", text)
        elif file.module.split(".")[1:2] != target.split(".")[1:2]:
            text = f"{file.module} imports {target}, another room of the same floor {own}"
            yield Violation(file.path, line, "floors", text)


def check_walls(house: House) -> Iterator[Violation]:
    """Some neighbours do not know each other though the floors would let them."""
    for file, target, line in house.edges():
        for who, banned, why in WALLS:
            if within(file.module, who) and any(within(target, name) for name in banned):
                yield Violation(file.path, line, "walls", f"{file.module} imports {target}: {why}")


def check_reserved(house: House) -> Iterator[Violation]:
    """Some modules are imported in one place only."""
    for file in house.files:
        for module, places, why in RESERVED:
            allowed = any(
                file.path == place or (place.endswith("/") and file.path.startswith(place)) for place in places
            )
            lines = {use.line for use in file.imports if within(use.target, module)}
            for line in sorted(lines) if not allowed else ():
                yield Violation(file.path, line, "reserved", f"{module} is used here: {why}")


def check_late(house: House) -> Iterator[Violation]:
    """Heavy and optional modules are imported by the function that needs them."""
    for file in house.files:
        for use in file.imports if file.path == "train.py" or within(file.module, PACKAGE) else ():
            if use.at_load and any(within(use.target, module) for module in LATE):
                yield Violation(
                    file.path, use.line, "late", f"{use.target} at module level: import it where it is used"
                )


def check_star_imports(house: House) -> Iterator[Violation]:
    """Every name can be traced to where it comes from."""
    for file in house.files:
        for node in ast.walk(file.tree):
            if isinstance(node, ast.ImportFrom) and any(name.name == "*" for name in node.names):
                yield Violation(
                    file.path, node.lineno, "star-import", f"from {node.module} import *: name what you use"
                )


def check_asserts(house: House) -> Iterator[Violation]:
    """``python -O`` removes asserts, and their message names no value: the package raises."""
    for file in house.modules().values():
        for node in ast.walk(file.tree):
            if isinstance(node, ast.Assert):
                yield Violation(file.path, node.lineno, "assert", "a bare assert: raise an error that names the value")


def check_threads(house: House) -> Iterator[Violation]:
    """A thread that has not chosen its device makes a context on GPU 0 as soon as it asks CUDA anything."""
    for file in house.files:
        if file.path.startswith("tests/") or file.path == "deepzero/utils/threads.py":
            continue
        for node in ast.walk(file.tree):
            if isinstance(node, ast.Call):
                names = [_called(node)]
            elif isinstance(node, ast.ClassDef):
                names = [ast.unparse(base).rpartition(".")[2] for base in node.bases]
            else:
                continue
            for name in set(names).intersection(THREADS):
                text = f"{name}: start threads with start_thread or thread_pool of deepzero/utils/threads.py"
                yield Violation(file.path, node.lineno, "threads", text)


def check_docstrings(house: House) -> Iterator[Violation]:
    """Every module, public class, public function and public method of the package is documented."""
    for file in house.modules().values():
        if not ast.get_docstring(file.tree):
            yield Violation(file.path, 1, "docstring", f"module {file.module} has no docstring")
        for name, node in _public(file.tree.body, ""):
            if not ast.get_docstring(node):
                yield Violation(file.path, node.lineno, "docstring", f"{name} is public and has no docstring")


def _public(
    body: Iterable[ast.stmt], prefix: str
) -> Iterator[tuple[str, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]]:
    for node in body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and not node.name.startswith("_"):
            marks = [ast.unparse(mark).split(".")[-1] for mark in node.decorator_list]
            if not {"overload", "setter", "deleter"} & set(marks):  # documented at the first definition
                yield prefix + node.name, node
            if isinstance(node, ast.ClassDef):
                yield from _public(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, (ast.If, ast.Try)):
            yield from _public([*node.body, *node.orelse], prefix)


def check_cycles(house: House) -> Iterator[Violation]:
    """No module imports itself through others; a late import only hides a cycle, so it counts too."""
    graph: dict[str, dict[str, int]] = {module: {} for module in house.modules()}
    for file, target, line in house.edges():
        graph[file.module].setdefault(target, line)
    seen: set[frozenset[str]] = set()
    for module in sorted(graph):
        cycle = _shortest_cycle(graph, module)
        if cycle and frozenset(cycle) not in seen:
            seen.add(frozenset(cycle))
            line = graph[module][cycle[1 % len(cycle)]]
            path = house.modules()[module].path
            yield Violation(path, line, "cycle", "import cycle: " + " -> ".join([*cycle, module]))


def _shortest_cycle(graph: dict[str, dict[str, int]], start: str) -> list[str]:
    """The modules on the shortest way from ``start`` back to it, ``start`` first; empty if there is none."""
    ways = [[start]]
    visited: set[str] = set()
    for way in ways:
        for target in sorted(graph[way[-1]]):
            if target == start:
                return way
            if target not in visited:
                visited.add(target)
                ways.append([*way, target])
    return []


RULES: tuple[Callable[[House], Iterator[Violation]], ...] = (
    check_file_sizes,
    check_function_sizes,
    check_floors,
    check_walls,
    check_cycles,
    check_reserved,
    check_late,
    check_star_imports,
    check_asserts,
    check_threads,
    check_docstrings,
)


def violations(root: Path) -> list[Violation]:
    """All broken rules of the repository at ``root``, by file and line."""
    house = read_house(root)
    found = [*house.broken, *(violation for rule in RULES for violation in rule(house))]
    return sorted(set(found), key=lambda v: (v.path, v.line, v.rule, v.message))


def graph(root: Path) -> str:
    """Who imports whom inside the package, from the top floor down, as text."""
    house = read_house(root)
    targets: dict[str, set[str]] = {module: set() for module in house.modules()}
    for file, target, _ in house.edges():
        targets[file.module].add(target)
    text: list[str] = []
    floors = {module: floor_of(module) for module in targets}
    for floor in sorted({f for f in floors.values() if f is not None}, reverse=True):
        text.append(f"floor {floor}")
        for module in sorted(m for m, f in floors.items() if f == floor):
            names = ", ".join(sorted(t.removeprefix(PACKAGE + ".") for t in targets[module]))
            text.append(f"  {module.removeprefix(PACKAGE + '.')}" + (f" -> {names}" if names else ""))
    return "\n".join(text)


def main(arguments: list[str] | None = None) -> int:
    """Check, or draw the graph. Returns the exit status."""
    parser = argparse.ArgumentParser(description="The house's rules: floors, walls, sizes, docstrings.")
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).parents[1], help="the repository")
    parser.add_argument("--graph", action="store_true", help="print who imports whom, floor by floor")
    options = parser.parse_args(arguments)
    if not (options.root / PACKAGE).is_dir():
        parser.error(f"{options.root} holds no package {PACKAGE}/")
    if options.graph:
        print(graph(options.root))
        return 0
    found = violations(options.root)
    for violation in found:
        print(violation)
    count = len(read_house(options.root).lines)
    print(f"house: {len(found)} violations in {count} files" if found else f"house: {count} files, all rules kept")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
