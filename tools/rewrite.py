"""Other code for functions that exist: how ``tools.mutate`` and ``tools.waits`` put faults into a running program."""

from __future__ import annotations

import ast
import contextlib
import gc
import types
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "deepzero"


def tree_of(file: str) -> ast.Module:
    """The syntax tree of a file of the package."""
    return ast.parse((PACKAGE / file).read_text(encoding="utf-8"))


def functions() -> dict[str, list[types.FunctionType]]:
    """All functions that exist, by their file's path."""
    gc.unfreeze()  # tests/conftest.py keeps what is imported out of the collector's sight
    found: dict[str, list[types.FunctionType]] = {}
    for candidate in gc.get_objects():
        if type(candidate) is types.FunctionType:  # some objects answer isinstance by a warning
            found.setdefault(candidate.__code__.co_filename, []).append(candidate)
    gc.freeze()
    return found


def codes(code: types.CodeType) -> Iterator[tuple[tuple[str, int], types.CodeType]]:
    """The code objects inside of one, itself too, by name and first line."""
    yield (code.co_name, code.co_firstlineno), code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes(constant)


Changed = list[tuple[types.FunctionType, types.CodeType]]  # functions with the code that they had


def give_code(path: Path, tree: ast.AST, existing: Iterable[types.FunctionType]) -> Changed:
    """Let the functions of the file at ``path`` do what ``tree``, a changed form of it, says; returns those changed."""
    # The flags of this file's own __future__ imports are none of theirs.
    new = dict(codes(compile(ast.fix_missing_locations(tree), str(path), "exec", dont_inherit=True)))
    before: Changed = []
    for function in existing:
        old = function.__code__
        code = new.get((old.co_name, old.co_firstlineno))
        # One that closes over fewer names cannot be given: its closure has a cell for each.
        if code is not None and code != old and len(code.co_freevars) == len(old.co_freevars):
            before.append((function, old))
            function.__code__ = code
    return before


@contextlib.contextmanager
def rewritten(file: str, tree: ast.AST) -> Iterator[None]:
    """Inside, the functions of a file of the package do what ``tree`` says."""
    path = PACKAGE / file
    before = give_code(path, tree, functions().get(str(path), ()))
    try:
        yield
    finally:
        for function, code in before:
            function.__code__ = code
