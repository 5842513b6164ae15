"""A mutation run: small faults are put into the code, one at a time, and the tests have to notice each.

By hand, before a release, on a machine that nobody else needs (half an hour for the map, some seconds a mutant)::

    python tools/mutate.py map                            # which tests execute which lines; kept in --work
    python tools/mutate.py run --seed 1 --count 300       # the same seed takes the same mutants of the same source
    python tools/mutate.py run --only comm/ring.py:104    # those of one line
    python tools/mutate.py run --again --budget 600       # survivors once more, with all of their tests
    python tools/mutate.py table                          # what survived, as Markdown for docs/log.md

A mutant is a changed syntax tree of one function: a call that is a statement of its own is left out, a condition is
negated, a comparison, an operator or a constant changed, a function returns at once (:class:`Mutator`). What only words
a message is left alone, and so are kernels that a compiler keeps (:data:`COMPILED`).

**Nothing is written into the checkout.** pytest collects the tests once, in this process, with all imports done. For
each mutant it is forked; the child gives every function of the mutated file its new code object and runs the tests that
execute the mutated line, the quickest first, until one fails. Ranks of ``tests/distributed/pool.py`` are forked from
the child and have the mutant too. Processes that a test starts by a command do not: tests/e2e is not asked.

**The map** comes from the same machinery: a byte in shared memory for each run of statements without a branch, set by
the instrumented source and read after each test, on all ranks. A test that fails in the map is not asked later.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import contextlib
import gc
import hashlib
import json
import mmap
import multiprocessing
import os
import random
import select
import signal
import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "deepzero"
ROOMS = ("comm", "runtime/zero", "offload", "checkpoint")
COMPILED = {
    "offload/adam_numba.py",
    "offload/adam_kernels.py",
    "utils/compile.py",
}
"""Their functions are read by compilers, which know no probe and keep what they have compiled."""
TESTS = ("tests/unit", "tests/distributed", "deepzero")
HITS = "__deepzero_hits__"

_COMPARE = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_ARITHMETIC = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult}
_WORDS = {"log", "warnings", "print", "ranges", "contextlib"}
"""Calls of these say something, or are in a profiler's trace only."""


@dataclass(frozen=True)
class Mutant:
    """One small fault."""

    file: str
    """Below ``deepzero/``."""
    index: int
    """Among the mutants of the file."""
    line: int
    block: int
    """The line at which its run of statements begins."""
    operator: str
    before: str
    after: str

    def name(self) -> str:
        """For the table, and for ``--only``."""
        return f"{self.file}:{self.line}"


class Mutator(ast.NodeTransformer):
    """Finds all mutants of a file, and makes one of them.

    Args:
        file: below ``deepzero/``.
        target: which one is made; None: none.
    """

    def __init__(self, file: str, target: int | None = None) -> None:
        self.file, self.target, self.found = file, target, list[Mutant]()
        self._functions = self._block = 0

    def _offer(self, node: Any, operator: str, new: Any) -> Any:
        if not self._functions:
            return node
        before, after = (" ".join(ast.unparse(n).split())[:90] for n in (node, new))
        self.found.append(Mutant(self.file, len(self.found), node.lineno, self._block, operator, before, after))
        return ast.copy_location(new, node) if len(self.found) - 1 == self.target else node

    def generic_visit(self, node: ast.AST) -> ast.AST:
        """Every list of statements, run by run."""
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "args") and not isinstance(node, ast.Call):
                continue
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                outer = self._block
                setattr(node, name, [self._statement(first, statement) for first, statement in _runs(value)])
                self._block = outer
            elif isinstance(value, list):
                setattr(node, name, [self.visit(item) if isinstance(item, ast.AST) else item for item in value])
            elif isinstance(value, ast.AST):
                setattr(node, name, self.visit(value))
        return node

    def _statement(self, first: int, statement: ast.stmt) -> Any:
        self._block = first
        return self.visit(statement)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        """A procedure may return at once."""
        self._functions += 1
        first = len(self.found)
        self.generic_visit(node)
        returns = any(isinstance(n, (ast.Return, ast.Yield, ast.YieldFrom)) for n in ast.walk(node))
        body = _without_docstring(node.body)
        if not returns and len(self.found) > first and len(body) > 1:
            self._block = node.body[0].lineno
            body[0] = self._offer(body[0], "return at once", ast.Return())
            node.body[len(node.body) - len(body) :] = body
        self._functions -= 1
        return node

    def visit_Expr(self, node: ast.Expr) -> Any:
        """A call for its effect."""
        if isinstance(node.value, ast.Constant) or _only_words(node.value):
            return node
        self.generic_visit(node)
        return self._offer(node, "call left out", ast.Pass()) if isinstance(node.value, ast.Call) else node

    def visit_Assign(self, node: ast.Assign) -> Any:
        """A state that is not kept."""
        self.generic_visit(node)
        if all(isinstance(target, (ast.Attribute, ast.Subscript)) for target in node.targets):
            return self._offer(node, "not assigned", ast.Pass())
        return node

    def visit_AugAssign(self, node: ast.AugAssign) -> Any:
        """Add, subtract."""
        self.generic_visit(node)
        other = _ARITHMETIC.get(type(node.op))
        return self._offer(node, "operator", ast.AugAssign(node.target, other(), node.value)) if other else node

    def visit_BinOp(self, node: ast.BinOp) -> Any:
        """Of numbers; what joins texts is left alone."""
        self.generic_visit(node)
        other = _ARITHMETIC.get(type(node.op))
        text = any(isinstance(side, (ast.JoinedStr, ast.List)) or _is_text(side) for side in (node.left, node.right))
        return self._offer(node, "operator", ast.BinOp(node.left, other(), node.right)) if other and not text else node

    def visit_Compare(self, node: ast.Compare) -> Any:
        """The border, or the contrary."""
        self.generic_visit(node)
        if len(node.ops) != 1 or type(node.ops[0]) not in _COMPARE:
            return node
        return self._offer(
            node, "comparison", ast.Compare(node.left, [_COMPARE[type(node.ops[0])]()], node.comparators)
        )

    def visit_BoolOp(self, node: ast.BoolOp) -> Any:
        """And, or."""
        self.generic_visit(node)
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        return self._offer(node, "and/or", ast.BoolOp(other, node.values))

    def visit_UnaryOp(self, node: ast.UnaryOp) -> Any:
        """Not."""
        self.generic_visit(node)
        return self._offer(node, "not dropped", node.operand) if isinstance(node.op, ast.Not) else node

    def _condition(self, node: Any) -> Any:
        self.generic_visit(node)
        if not isinstance(node.test, (ast.Compare, ast.UnaryOp, ast.BoolOp)):  # those have mutants of their own
            node.test = self._offer(node.test, "negated", ast.UnaryOp(ast.Not(), node.test))
        return node

    visit_If = visit_IfExp = visit_While = _condition

    def visit_Constant(self, node: ast.Constant) -> Any:
        """One more; true or false."""
        if isinstance(node.value, bool):
            return self._offer(node, "constant", ast.Constant(not node.value))
        if isinstance(node.value, int):
            return self._offer(node, "constant", ast.Constant(node.value + 1))
        return node

    def visit_Raise(self, node: Any) -> Any:
        """That it is raised is its condition's matter; how it is worded, no test's."""
        return node

    visit_Assert = visit_JoinedStr = visit_Raise


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    first = body[0]
    is_text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return body[1:] or body if is_text else body


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _only_words(node: ast.expr) -> bool:
    while isinstance(node, (ast.Call, ast.Attribute)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return isinstance(node, ast.Name) and node.id in _WORDS


def _runs(statements: list[ast.stmt]) -> Iterator[tuple[int, ast.stmt]]:
    """Each statement with the line at which its run begins: the first one, and the one after each branch."""
    first, fresh = 0, True
    for statement in statements:
        if fresh:
            first = statement.lineno
        yield first, statement
        fresh = isinstance(statement, (ast.If, ast.For, ast.While, ast.Try, ast.With))


def sources() -> list[str]:
    """The files under mutation."""
    files = [path.relative_to(PACKAGE).as_posix() for room in ROOMS for path in sorted((PACKAGE / room).glob("*.py"))]
    return [file for file in files if file not in COMPILED]


def mutants() -> list[Mutant]:
    """All there are."""
    found: list[Mutant] = []
    for file in sources():
        mutator = Mutator(file)
        mutator.visit(ast.parse((PACKAGE / file).read_text(encoding="utf-8")))
        found += mutator.found
    return found


def digest() -> str:
    """Of the source that is mutated: what is known of another one's lines is of no use."""
    texts = [(PACKAGE / file).read_bytes() for file in sources()]
    return hashlib.sha256(b"".join(texts)).hexdigest()[:16]


# ---------------------------------------------------------------------------------------------------------------------
# The map: which tests execute which lines
# ---------------------------------------------------------------------------------------------------------------------


class Probes(ast.NodeTransformer):
    """Puts a probe before every run of statements of a function.

    Args:
        file: below ``deepzero/``.
        known: (file, line) of all probes so far; grows.
    """

    def __init__(self, file: str, known: list[tuple[str, int]]) -> None:
        self.file, self.known = file, known
        self._functions = 0

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        """Only here is anything executed again and again."""
        self._functions += 1
        self.generic_visit(node)
        self._functions -= 1
        return node

    def generic_visit(self, node: ast.AST) -> ast.AST:
        """Every list of statements."""
        super().generic_visit(node)
        inside = self._functions or isinstance(node, ast.FunctionDef)
        for name in ("body", "orelse", "finalbody") if inside and not isinstance(node, ast.ClassDef) else ():
            statements = getattr(node, name, None)
            if isinstance(statements, list) and statements and isinstance(statements[0], ast.stmt):
                setattr(node, name, self._probed(statements))
        return node

    def _probed(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        probed: list[ast.stmt] = []
        last = 0
        for first, statement in _runs(statements):
            if first != last:
                last = first
                probe = ast.parse(f"{HITS}[{len(self.known)}] = 1").body[0]
                probe = ast.fix_missing_locations(ast.copy_location(probe, statement))
                self.known.append((self.file, first))
                is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
                probed += [statement, probe] if is_text else [probe, statement]  # a docstring comes first
            else:
                probed.append(statement)
        return probed


def instrument() -> tuple[mmap.mmap, list[tuple[str, int]]]:
    """From now on the rooms are imported with probes; returns their bytes, and which is which."""
    known: list[tuple[str, int]] = []
    codes = {}
    for file in sources():
        tree = ast.parse((PACKAGE / file).read_text(encoding="utf-8"))
        codes[str(PACKAGE / file)] = compile(Probes(file, known).visit(tree), str(PACKAGE / file), "exec")
    hits = mmap.mmap(-1, len(known))
    setattr(builtins, HITS, hits)
    read = SourceFileLoader.get_code

    def get_code(self: SourceFileLoader, fullname: str) -> types.CodeType | None:
        return codes.get(self.path) or read(self, fullname)

    SourceFileLoader.get_code = get_code  # type: ignore[method-assign, assignment]
    return hits, known


class _Forking:
    """``multiprocessing`` for the pool of ranks: forked, so that they have this process's code."""

    def __getattr__(self, name: str) -> Any:
        return getattr(multiprocessing, name)

    def get_context(self, _: str) -> Any:
        return multiprocessing.get_context("fork")


def _fork_ranks() -> None:
    from tests.distributed import pool

    pool.multiprocessing = _Forking()  # type: ignore[assignment]


@dataclass
class Mapper:
    """A pytest plugin that writes the map.

    Args:
        hits: the probes' bytes.
    """

    hits: mmap.mmap
    tests: dict[str, dict[str, Any]] = field(default_factory=dict)

    def pytest_collection_finish(self) -> None:
        """All imports are done."""
        _fork_ranks()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """One test."""
        self.hits[:] = bytes(len(self.hits))
        began, self.tests[item.nodeid] = time.monotonic(), {"failed": False}
        yield
        found = [number for number, hit in enumerate(self.hits[:]) if hit]
        self.tests[item.nodeid].update(seconds=round(time.monotonic() - began, 3), probes=found)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Of its three parts."""
        if report.failed or report.skipped:
            self.tests[report.nodeid]["failed"] = True


def make_map(work: Path, arguments: Sequence[str]) -> int:
    """Run the tests once with probes, and keep which ones executed what."""
    hits, known = instrument()
    mapper = Mapper(hits)
    pytest.main([*TESTS, "-q", "-p", "no:cacheprovider", *arguments], plugins=[mapper])
    lines: dict[str, list[str]] = {}
    for test, found in mapper.tests.items():
        for probe in () if found["failed"] else found["probes"]:
            lines.setdefault("{}:{}".format(*known[probe]), []).append(test)
    seconds = {test: found["seconds"] for test, found in mapper.tests.items() if not found["failed"]}
    text = json.dumps({"digest": digest(), "seconds": seconds, "lines": lines})
    (work / "map.json").write_text(text, encoding="utf-8")
    failed = [test for test, found in mapper.tests.items() if found["failed"]]
    print(f"map: {len(seconds)} tests, {len(lines)} of {len(known)} runs of statements executed; not asked: {failed}")
    return 0


# ---------------------------------------------------------------------------------------------------------------------
# The run
# ---------------------------------------------------------------------------------------------------------------------


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _key(code: types.CodeType) -> tuple[str, int, str]:
    return code.co_filename, code.co_firstlineno, code.co_name


def functions() -> dict[str, list[types.FunctionType]]:
    """All that exist, by their file."""
    gc.unfreeze()  # tests/conftest.py keeps what is imported out of the collector's sight
    found: dict[str, list[types.FunctionType]] = {}
    for candidate in gc.get_objects():
        if type(candidate) is types.FunctionType:  # some objects answer isinstance by a warning
            found.setdefault(candidate.__code__.co_filename, []).append(candidate)
    gc.freeze()
    return found


def install(mutant: Mutant, found: dict[str, list[types.FunctionType]]) -> int:
    """Give the functions of the mutant's file their new code; returns how many have changed."""
    path = str(PACKAGE / mutant.file)
    tree = ast.parse(Path(path).read_text(encoding="utf-8"))
    tree = ast.fix_missing_locations(Mutator(mutant.file, mutant.index).visit(tree))
    new = {_key(code): code for code in _codes(compile(tree, path, "exec"))}
    changed = 0
    for function in found.get(path, ()):
        code = new.get(_key(function.__code__))
        if code is not None and code != function.__code__:
            function.__code__ = code
            changed += 1
    return changed


@dataclass
class Child:
    """A mutant under test in a process of its own."""

    mutant: Mutant
    pid: int
    pipe: int
    deadline: float

    def end(self) -> None:
        """Kill it and its ranks, if they are there still."""
        for victim in (-self.pid, self.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.pipe)


@dataclass
class Runner:
    """A pytest plugin that has collected everything and tries mutants in place of a run.

    Args:
        chosen: mutants to try.
        known: the map.
        results: a line of JSON for each mutant is added there.
        budget: seconds of tests for each mutant, as the map has measured them.
        jobs: how many at a time.
    """

    chosen: list[Mutant]
    known: dict[str, Any]
    results: Path
    budget: float
    jobs: int
    failure: tuple[str, str] | None = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """In a child: the first failure kills the mutant."""
        if report.failed and self.failure is None:
            text = str(report.longreprtext).strip().splitlines()
            self.failure = report.nodeid, next((line for line in text if line.startswith("E ")), "")[2:].strip()[:160]

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """All mutants, ``jobs`` at a time."""
        _fork_ranks()
        found, items = functions(), {item.nodeid: item for item in session.items}
        children: list[Child] = []
        try:
            for number, mutant in enumerate(self.chosen):
                while len(children) >= self.jobs:
                    children = self._reap(children)
                tests = [items[test] for test in self._tests(mutant) if test in items]
                if tests:
                    children.append(self._start(mutant, tests, found))
                else:
                    self._write(mutant, "not executed", 0)
                print(f"{number + 1}/{len(self.chosen)} {mutant.name()}", file=sys.stderr, flush=True)
            while children:
                children = self._reap(children)
        finally:  # Ctrl-C
            for child in children:
                child.end()
        return True

    def _tests(self, mutant: Mutant) -> list[str]:
        """Those that execute it, the quickest first, as far as the budget goes."""
        seconds = self.known["seconds"]
        tests = sorted(self.known["lines"].get(f"{mutant.file}:{mutant.block}", ()), key=lambda test: seconds[test])
        taken: list[str] = []
        total = 0.0
        for test in tests:
            total += seconds[test]
            if taken and total > self.budget:
                break
            taken.append(test)
        return taken

    def _start(self, mutant: Mutant, tests: list[pytest.Item], found: dict[str, list[types.FunctionType]]) -> Child:
        ours, theirs = os.pipe()
        pid = os.fork()
        if pid == 0:
            self._try(mutant, tests, found, theirs)
        os.close(theirs)
        seconds = 60 + 10 * sum(self.known["seconds"][item.nodeid] for item in tests)
        return Child(mutant, pid, ours, time.monotonic() + seconds)

    def _try(
        self, mutant: Mutant, tests: list[pytest.Item], found: dict[str, list[types.FunctionType]], pipe: int
    ) -> None:
        """In the child. Does not return."""
        answer: list[Any] = ["not installed", 0]
        try:
            os.setsid()
            nothing = os.open(os.devnull, os.O_RDWR)
            for descriptor in (0, 1, 2):
                os.dup2(nothing, descriptor)
            if install(mutant, found):
                answer = ["survived", len(tests)]
                for number, (item, after) in enumerate(zip(tests, [*tests[1:], None], strict=True)):
                    item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
                    if self.failure is not None:
                        answer = ["killed", number + 1, *self.failure]
                        break
        except BaseException as error:  # a mutant that breaks pytest itself is noticed
            answer = ["killed", 0, "", f"{type(error).__name__}: {error}"[:160]]
        finally:
            os.write(pipe, json.dumps(answer).encode())
            os._exit(0)

    def _reap(self, children: list[Child]) -> list[Child]:
        """Those that are still at work, once at least one has ended."""
        while True:
            ready = select.select([child.pipe for child in children], [], [], 1.0)[0]
            now = time.monotonic()
            ended = [child for child in children if child.pipe in ready or now > child.deadline]
            for child in ended:
                text = os.read(child.pipe, 65536).decode() if child.pipe in ready else '["killed", 0, "", "no end"]'
                status, asked, *more = json.loads(text or '["killed", 0, "", "the process died"]')
                child.end()
                self._write(child.mutant, status, asked, *more)
            if ended:
                return [child for child in children if child not in ended]

    def _write(self, mutant: Mutant, status: str, asked: int, by: str = "", error: str = "") -> None:
        covering = len(self.known["lines"].get(f"{mutant.file}:{mutant.block}", ()))
        entry = {**asdict(mutant), "status": status, "asked": asked, "of": covering, "by": by, "error": error}
        with self.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


def choose(everything: list[Mutant], seed: int, count: int, only: Sequence[str]) -> list[Mutant]:
    """The same for the same seed and source."""
    if only:
        return [mutant for mutant in everything if any(mutant.name().startswith(name) for name in only)]
    return random.Random(seed).sample(everything, min(count, len(everything)))


def run(work: Path, args: argparse.Namespace) -> int:
    """Try the chosen mutants that have no result yet."""
    known = json.loads((work / "map.json").read_text(encoding="utf-8"))
    if known["digest"] != digest():
        print("mutate: the source has changed since the map was made; run `python tools/mutate.py map` again")
        return 2
    results = work / f"results-{digest()}.jsonl"
    entries = {(entry["file"], entry["index"]): entry for entry in _entries(results)}
    chosen = choose(mutants(), args.seed, args.count, args.only)
    if args.again:
        unsure = [key for key, e in entries.items() if e["status"] == "survived" and e["asked"] < e["of"]]
        chosen = [mutant for mutant in mutants() if (mutant.file, mutant.index) in unsure]
    elif not args.only:
        chosen = [mutant for mutant in chosen if (mutant.file, mutant.index) not in entries]
    runner = Runner(chosen, known, results, args.budget, args.jobs)
    pytest.main([*TESTS, "-q", "-s", "-p", "no:cacheprovider", *args.pytest], plugins=[runner])
    return table(work)


def _entries(results: Path) -> list[dict[str, Any]]:
    if not results.exists():
        return []
    lines = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    return list({(line["file"], line["index"]): line for line in lines}.values())  # the last word on each


def table(work: Path) -> int:
    """What is known of this source's mutants."""
    entries = _entries(work / f"results-{digest()}.jsonl")
    print("| Room | Mutants | Killed | Survived | Not executed |\n| --- | --- | --- | --- | --- |")
    for room in (*ROOMS, ""):
        mine = [entry for entry in entries if entry["file"].startswith(room)]
        count = [sum(e["status"] == status for e in mine) for status in ("killed", "survived", "not executed")]
        print(f"| {f'`{room}`' if room else 'all'} | {len(mine)} | {' | '.join(map(str, count))} |")
    print("\n| Survivor | Mutation | Tests asked |\n| --- | --- | --- |")
    for entry in sorted(entries, key=lambda e: (e["file"], e["line"])):
        if entry["status"] != "killed":
            print(
                f"| `{entry['file']}:{entry['line']}` | {entry['operator']}: `{entry['before']}` → `{entry['after']}` "
                f"| {entry['asked']} of {entry['of']} |"
            )
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("verb", choices=("map", "run", "table"))
    parser.add_argument("--work", type=Path, default=Path(os.environ.get("TMPDIR", "/tmp")) / "deepzero-mutants")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--only", action="append", default=[], metavar="FILE[:LINE]")
    parser.add_argument("--again", action="store_true", help="survivors that not all of their tests were asked about")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of tests for each mutant")
    parser.add_argument("--jobs", type=int, default=2)
    args, rest = parser.parse_known_args(arguments)
    args.pytest = rest
    args.work.mkdir(parents=True, exist_ok=True)
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    verbs: dict[str, Callable[[], int]] = {
        "map": lambda: make_map(args.work, args.pytest),
        "run": lambda: run(args.work, args),
        "table": lambda: table(args.work),
    }
    return verbs[args.verb]()


if __name__ == "__main__":
    sys.exit(main())
