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
import hashlib
import json
import mmap
import multiprocessing
import os
import random
import signal
import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib.machinery import SourceFileLoader
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tools.rewrite import PACKAGE, ROOT, functions, give_code, tree_of

ROOMS = ("comm", "runtime/zero", "offload", "checkpoint")
COMPILED = {"offload/adam_kernels.py", "utils/compile.py"}
"""Their functions are read by compilers, which know no probe and keep what they have compiled."""
TESTS = ("tests/unit", "tests/distributed", "deepzero")
HITS = "__deepzero_hits__"

_OTHER = {ast.Lt: ast.LtE, ast.Gt: ast.GtE, ast.Eq: ast.NotEq, ast.Is: ast.IsNot, ast.In: ast.NotIn, ast.And: ast.Or}
_OTHER |= {other: kind for kind, other in _OTHER.items()}
_OTHER |= {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult}
"""Operator → the one that a mutant has in its place."""
_WORDS = {"log", "warnings", "print", "ranges", "contextlib"}
"""Calls of these say something, or are in a profiler's trace only."""


@dataclass(frozen=True)
class Mutant:
    """Fault ``index`` of a file below ``deepzero/``; ``block`` is the line at which its run of statements begins."""

    file: str
    index: int
    line: int
    block: int
    operator: str
    before: str
    after: str

    def name(self) -> str:
        """The name that the table and ``--only`` use."""
        return f"{self.file}:{self.line}"


class Mutator(ast.NodeTransformer):
    """Finds all mutants of ``file`` (below ``deepzero/``), and makes the one with the index ``target``."""

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
        """Visits what can be executed, each list of statements run by run."""
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
        start = 1 if _is_text(node.body[0]) and len(node.body) > 1 else 0
        if not returns and len(self.found) > first and len(node.body) - start > 1:
            self._block = node.body[0].lineno
            node.body[start] = self._offer(node.body[start], "return at once", ast.Return())
        self._functions -= 1
        return node

    def visit_Expr(self, node: ast.Expr) -> Any:
        """A call for its effect is left out, unless it only says something."""
        if _is_text(node) or _only_words(node.value):
            return node
        self.generic_visit(node)
        return self._offer(node, "call left out", ast.Pass()) if isinstance(node.value, ast.Call) else node

    def visit_Assign(self, node: ast.Assign) -> Any:
        """A state is not kept."""
        self.generic_visit(node)
        stored = all(isinstance(target, (ast.Attribute, ast.Subscript)) for target in node.targets)
        return self._offer(node, "not assigned", ast.Pass()) if stored else node

    def visit_BinOp(self, node: Any) -> Any:
        """Numbers are combined otherwise; what joins texts is left alone."""
        self.generic_visit(node)
        sides = [node.left, node.right] if isinstance(node, ast.BinOp) else []
        text = any(isinstance(side, (ast.JoinedStr, ast.List)) or _is_text(side) for side in sides)
        return node if text or type(node.op) not in _OTHER else self._with_other(node, "operator")

    visit_AugAssign = visit_BinOp

    def visit_BoolOp(self, node: ast.BoolOp) -> Any:
        """And becomes or, or becomes and."""
        self.generic_visit(node)
        return self._with_other(node, "and/or")

    def visit_Compare(self, node: ast.Compare) -> Any:
        """The border moves, or the contrary is asked."""
        self.generic_visit(node)
        return node if len(node.ops) != 1 else self._with_other(node, "comparison", "ops")

    def _with_other(self, node: Any, what: str, field: str = "op") -> Any:
        operator = getattr(node, field)
        other = _OTHER[type(operator)]() if field == "op" else [_OTHER[type(operator[0])]()]
        return self._offer(node, what, type(node)(**{**dict(ast.iter_fields(node)), field: other}))

    def visit_UnaryOp(self, node: ast.UnaryOp) -> Any:
        """A negation is dropped."""
        self.generic_visit(node)
        return self._offer(node, "not dropped", node.operand) if isinstance(node.op, ast.Not) else node

    def _condition(self, node: Any) -> Any:
        self.generic_visit(node)
        if not isinstance(node.test, (ast.Compare, ast.UnaryOp, ast.BoolOp)):  # those have mutants of their own
            node.test = self._offer(node.test, "negated", ast.UnaryOp(ast.Not(), node.test))
        return node

    visit_If = visit_IfExp = visit_While = _condition

    def visit_Constant(self, node: ast.Constant) -> Any:
        """An integer is one larger, a truth value the other one."""
        if not isinstance(node.value, int):
            return node
        other = not node.value if isinstance(node.value, bool) else node.value + 1
        return self._offer(node, "constant", ast.Constant(other))

    def visit_Raise(self, node: Any) -> Any:
        """That something is raised is its condition's matter; how it is worded, no test's."""
        return node

    visit_Assert = visit_JoinedStr = visit_Raise


def _is_text(node: ast.AST) -> bool:
    value = node.value if isinstance(node, ast.Expr) else node
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


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
        mutator.visit(tree_of(file))
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
    """Puts a probe before every run of statements of a function; adds each one's (file, line) to ``known``."""

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
        """Visits every list of statements."""
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
            probed.append(statement)
            if first != last:
                last = first
                probe = ast.parse(f"{HITS}[{len(self.known)}] = 1").body[0]
                probe = ast.fix_missing_locations(ast.copy_location(probe, statement))
                self.known.append((self.file, first))
                probed.insert(len(probed) - (not _is_text(statement)), probe)  # a docstring stays first
        return probed


def instrument() -> tuple[mmap.mmap, list[tuple[str, int]]]:
    """From now on the rooms are imported with probes; returns their bytes, and which is which."""
    known: list[tuple[str, int]] = []
    codes = {}
    for file in sources():
        codes[str(PACKAGE / file)] = compile(Probes(file, known).visit(tree_of(file)), str(PACKAGE / file), "exec")
    hits = mmap.mmap(-1, len(known))
    setattr(builtins, HITS, hits)
    read = SourceFileLoader.get_code

    def get_code(self: SourceFileLoader, fullname: str) -> types.CodeType | None:
        return codes.get(self.path) or read(self, fullname)

    SourceFileLoader.get_code = get_code  # type: ignore[method-assign, assignment]
    return hits, known


def _fork_ranks() -> None:
    """From now on the pool of ranks is forked, so that ranks have this process's code."""
    from tests.distributed import pool

    fork = types.SimpleNamespace(**vars(multiprocessing))
    fork.get_context = lambda _: multiprocessing.get_context("fork")
    pool.multiprocessing = fork  # type: ignore[assignment]


@dataclass
class Mapper:
    """A pytest plugin that notes for each test which probes it has hit, on all ranks."""

    hits: mmap.mmap
    tests: dict[str, dict[str, Any]] = field(default_factory=dict)

    def pytest_collection_finish(self) -> None:
        """All imports are done."""
        _fork_ranks()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Clears the probes, lets the test run, and reads them."""
        self.hits[:] = bytes(len(self.hits))
        began, self.tests[item.nodeid] = time.monotonic(), {"failed": False}
        yield
        found = [number for number, hit in enumerate(self.hits[:]) if hit]
        self.tests[item.nodeid].update(seconds=round(time.monotonic() - began, 3), probes=found)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Notes a failure or a skip of set-up, call or teardown."""
        if report.failed or report.skipped:
            self.tests[report.nodeid]["failed"] = True


def make_map(work: Path, arguments: Sequence[str]) -> int:
    """Runs the tests once with probes, and keeps which ones executed what."""
    hits, known = instrument()
    mapper = Mapper(hits)
    pytest.main([*TESTS, "-q", "-p", "no:cacheprovider", *arguments], plugins=[mapper])
    passed = {test: found for test, found in mapper.tests.items() if not found["failed"]}
    lines: dict[str, list[str]] = {}
    for test, found in passed.items():
        for probe in found["probes"]:
            lines.setdefault("{}:{}".format(*known[probe]), []).append(test)
    seconds = {test: found["seconds"] for test, found in passed.items()}
    (work / "map.json").write_text(json.dumps({"digest": digest(), "seconds": seconds, "lines": lines}), "utf-8")
    failed = sorted(set(mapper.tests) - set(passed))
    print(f"map: {len(passed)} tests, {len(lines)} of {len(known)} runs of statements executed; not asked: {failed}")
    return 0


# ---------------------------------------------------------------------------------------------------------------------
# The run
# ---------------------------------------------------------------------------------------------------------------------


def install(mutant: Mutant, found: dict[str, list[types.FunctionType]]) -> int:
    """Gives the functions of the mutant's file their new code; returns how many have changed."""
    tree, path = Mutator(mutant.file, mutant.index).visit(tree_of(mutant.file)), PACKAGE / mutant.file
    return len(give_code(path, tree, found.get(str(path), ())))


@dataclass
class Runner:
    """A pytest plugin that has collected everything and tries mutants in place of a run, ``jobs`` at a time.

    A line of JSON for each mutant is added to ``results``; ``budget`` is seconds of tests as the map has measured them.
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
        """Tries all mutants."""
        _fork_ranks()
        found, items = functions(), {item.nodeid: item for item in session.items}

        children: dict[Connection, tuple[Mutant, int, float]] = {}
        try:
            for number, mutant in enumerate(self.chosen):
                while len(children) >= self.jobs:
                    self._reap(children)
                tests = [items[test] for test in self._tests(mutant) if test in items]
                if tests:
                    self._start(mutant, tests, found, children)
                else:
                    self._write(mutant, "not executed", 0)
                print(f"{number + 1}/{len(self.chosen)} {mutant.name()}", file=sys.stderr, flush=True)
            while children:
                self._reap(children)
        finally:  # Ctrl-C
            for _, pid, _ in children.values():
                self._end(pid)
        return True

    def _tests(self, mutant: Mutant) -> list[str]:
        """Returns the tests that execute it, the quickest first, as far as the budget goes."""
        seconds, total, taken = self.known["seconds"], 0.0, list[str]()
        for test in sorted(self.known["lines"].get(f"{mutant.file}:{mutant.block}", ()), key=seconds.__getitem__):
            total += seconds[test]
            if taken and total > self.budget:
                break
            taken.append(test)
        return taken

    def _start(self, mutant: Mutant, tests: list[pytest.Item], found: Any, children: dict[Connection, Any]) -> None:
        ours, theirs = multiprocessing.Pipe(duplex=False)
        pid = os.fork()
        if pid == 0:
            self._try(mutant, tests, found, theirs)
        theirs.close()
        limit = 60 + 10 * sum(self.known["seconds"][item.nodeid] for item in tests)
        children[ours] = mutant, pid, time.monotonic() + limit

    def _reap(self, children: dict[Connection, tuple[Mutant, int, float]]) -> None:
        """Writes down what became of those that have ended within a second."""
        ready, now = wait(list(children), 1.0), time.monotonic()
        for pipe in [pipe for pipe, (_, _, deadline) in children.items() if pipe in ready or now > deadline]:
            mutant, pid, _ = children.pop(pipe)
            try:
                answer = pipe.recv() if pipe in ready else ["killed", 0, "", "no end"]
            except EOFError:
                answer = ["killed", 0, "", "the process died"]
            self._end(pid)
            pipe.close()
            self._write(mutant, *answer)

    def _end(self, pid: int) -> None:
        """Kills a child and its ranks, if they are there still."""
        for victim in (-pid, pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
        os.waitpid(pid, 0)

    def _try(self, mutant: Mutant, tests: list[pytest.Item], found: Any, pipe: Connection) -> None:
        """In the child; does not return."""
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
            pipe.send(answer)
            os._exit(0)

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
    path = work / "map.json"
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"digest": None}
    if known["digest"] != digest():
        print(f"mutate: {path} is not there, or of another source; run `python tools/mutate.py map`")
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
    verbs: dict[str, Callable[[], int]] = {
        "map": lambda: make_map(args.work, args.pytest),
        "run": lambda: run(args.work, args),
        "table": lambda: table(args.work),
    }
    return verbs[args.verb]()


if __name__ == "__main__":
    sys.exit(main())
