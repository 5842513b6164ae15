"""The mutation run's own parts: what it changes, what it leaves alone, and that a change reaches the functions."""

import ast

from tools import mutate, rewrite

SOURCE = '''
LIMIT = 3

def count(items, seen, start=0):
    """Docs, 4."""
    seen.append(f"{1 + 1}")
    total = start
    if items and not seen[1:]:
        for item in items:
            total += item - 1
    if total > LIMIT:
        raise ValueError("more than " + str(1))
    return total

def clear(items):
    """A procedure."""
    print("cleared")
    items.clear()
    items.append(True)
'''


def found(target=None):
    """All mutants of the source, and its tree with one of them made."""
    mutator = mutate.Mutator("a.py", target)
    tree = mutator.visit(ast.parse(SOURCE))
    return mutator.found, ast.fix_missing_locations(tree)


def test_what_is_changed():
    mutants, tree = found()
    assert ast.dump(tree) == ast.dump(ast.parse(SOURCE))
    assert [(m.line, m.block, m.operator, m.after) for m in mutants] == [
        (6, 5, "call left out", "pass"),
        (8, 5, "constant", "2"),
        (8, 5, "not dropped", "seen[1:]"),
        (8, 5, "and/or", "items or not seen[1:]"),
        (10, 10, "constant", "2"),
        (10, 10, "operator", "item + 1"),
        (10, 10, "operator", "total -= item - 1"),
        (11, 11, "comparison", "total >= LIMIT"),
        (18, 16, "call left out", "pass"),
        (19, 16, "constant", "False"),
        (19, 16, "call left out", "pass"),
        (17, 16, "return at once", "return"),
    ]


def test_each_differs_in_one_place():
    mutants, _ = found()
    texts = {ast.unparse(found(mutant.index)[1]) for mutant in mutants}
    assert len(texts) == len(mutants)
    assert ast.unparse(ast.parse(SOURCE)) not in texts


def test_a_mutant_reaches_the_functions_that_exist(tmp_path, monkeypatch):
    monkeypatch.setattr(mutate, "PACKAGE", tmp_path), monkeypatch.setattr(rewrite, "PACKAGE", tmp_path)
    path = tmp_path / "a.py"
    path.write_text(SOURCE, encoding="utf-8")
    names = {}
    exec(compile(SOURCE, str(path), "exec", dont_inherit=True), names)
    count = names["count"]
    assert count([2, 3], []) == 3
    mutants = {mutant.operator: mutant for mutant in found()[0] if mutant.line == 10}
    assert mutate.install(mutants["operator"], {str(path): [count, names["clear"]]}) == 1
    assert count([2, 3], []) == -3


def test_probes_tell_what_was_executed():
    known = []
    tree = mutate.Probes("a.py", known).visit(ast.parse(SOURCE))
    hits = bytearray(99)
    names = {mutate.HITS: hits}
    exec(compile(tree, "a.py", "exec"), names)
    names["count"]([], [])
    assert names["count"].__doc__ == "Docs, 4."
    assert {line for (_, line), hit in zip(known, hits, strict=False) if hit} == {5, 11, 13}
    assert {mutant.block for mutant in found()[0]} <= {line for _, line in known}


def test_the_same_seed_takes_the_same_mutants(monkeypatch):
    monkeypatch.setattr(mutate, "ROOMS", ["comm"])
    everything = mutate.mutants()
    first = mutate.choose(everything, 1, 50, [])
    assert first == mutate.choose(everything, 1, 50, []) != mutate.choose(everything, 2, 50, [])
    assert {mutant.file for mutant in mutate.choose(everything, 1, 50, ["comm/ring.py"])} == {"comm/ring.py"}
