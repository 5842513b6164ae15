"""Code without one of its statements: for tests that show that something notices."""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import types
from dataclasses import dataclass


@dataclass(frozen=True)
class Removal:
    """One statement of one function."""

    module: str
    function: str
    """Qualified."""
    statement: str
    number: int
    """Of the equal statements in that function."""

    def __str__(self):
        return f"{self.module.rsplit('.', 1)[1]}.{self.function}: {self.statement}" + (
            f" #{self.number}" * (self.number > 0)
        )


def calls_of(module, verbs):
    """The statements of a module that are nothing but the call of a method named in ``verbs``."""
    found = []

    def look(node, path):
        for child in ast.iter_child_nodes(node):
            named = isinstance(child, (ast.FunctionDef, ast.ClassDef))
            inside = [*path, child] if named else path
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Call):
                called = child.value.func
                if isinstance(called, ast.Attribute) and called.attr in verbs and path:
                    function = ".".join(part.name for part in path)
                    text = ast.unparse(child)
                    number = sum((f, t) == (function, text) for f, t, _ in found)
                    found.append((function, text, number))
            look(child, inside)

    look(ast.parse(inspect.getsource(importlib.import_module(module))), [])
    return [Removal(module, function, text, number) for function, text, number in found]


@contextlib.contextmanager
def without(removal):
    """Inside, the statement is skipped."""
    module = importlib.import_module(removal.module)
    tree = ast.parse(inspect.getsource(module))
    body = tree
    for name in removal.function.split("."):
        body = next(node for node in ast.walk(body) if getattr(node, "name", None) == name and node is not body)
    equal = [n for n in ast.walk(body) if isinstance(n, ast.Expr) and ast.unparse(n) == removal.statement]
    chosen = sorted(equal, key=lambda node: node.lineno)[removal.number]

    class Skip(ast.NodeTransformer):
        def visit_Expr(self, node):
            # The names stay known to the compiler, so that the function keeps its closure.
            return ast.copy_location(ast.If(ast.Constant(False), [node], []), node) if node is chosen else node

    code = compile(ast.fix_missing_locations(Skip().visit(tree)), module.__file__, "exec", dont_inherit=True)
    holder = module
    for name in removal.function.split("."):
        if isinstance(holder, types.FunctionType):
            break  # what is inside of a function is made anew by its code
        code = next(c for c in code.co_consts if isinstance(c, types.CodeType) and c.co_name == name)
        holder = inspect.getattr_static(holder, name)
        holder = getattr(holder, "__func__", holder)  # a class method
        if not isinstance(holder, type):
            holder = holder.fget if isinstance(holder, property) else inspect.unwrap(holder)
    before, holder.__code__ = holder.__code__, code
    try:
        yield
    finally:
        holder.__code__ = before
