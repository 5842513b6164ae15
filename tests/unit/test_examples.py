"""The programs of the chapters print what the chapters quote, and refuse what they cannot do."""

import contextlib
import io
import re
import subprocess
import sys

import pytest
import torch

from deepzero.comm.ring import simulate
from examples import one_number, ring, stage1_by_all_reduce, tables
from tests import ROOT
from tests.e2e import runs


def quoted(page):
    """The text blocks of a chapter, as lists of lines."""
    blocks = re.findall(r"^```text\n(.*?)^```", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.M | re.S)
    return [block.splitlines() for block in blocks]


def stands_in(block, printed):
    """Whether a page's block is a run of the printed lines."""
    return any(printed[start : start + len(block)] == block for start in range(len(printed)))


def test_one_number_says_of_the_weight_what_the_chapter_quotes():
    printed, blocks = list(one_number.one_weight(1e-4)), quoted("one_number.md")
    assert len(blocks) == 5
    assert [stands_in(block, printed) for block in blocks] == [True] * 4 + [False]


@pytest.mark.slow
def test_one_number_trains_as_the_chapter_quotes():
    """The table's first line, of whose columns rounding on another kind of processor may change the last digit."""
    runs = {name: list(one_number.train(one_number.WINDOW, 1e-4, name == "with masters")) for name in one_number.NAMES}
    *head, line = one_number.table(runs)
    page = quoted("one_number.md")[-1]
    assert page[1:3] == head
    ours, theirs = ([float(number) for number in re.findall(r"[\d.]+", text)] for text in (line, page[3]))
    assert len(ours) == 6
    assert ours == pytest.approx(theirs, abs=0.02, rel=0.05)
    assert len(page) == 3 + 300 // one_number.WINDOW


def test_the_formula_is_adamw():
    torch.manual_seed(0)
    weight = torch.randn(100)
    param = weight.clone().requires_grad_()
    theirs = torch.optim.AdamW([param], lr=1e-2, weight_decay=0.1)
    ours = one_number.Adam(weight, 1e-2, weight_decay=0.1)
    for _ in range(20):
        param.grad = torch.randn(100)
        weight = ours.step(weight, param.grad)
        theirs.step()
    torch.testing.assert_close(weight, param.detach())


def test_the_ring_is_quoted():
    """As it is told of a simulation, whose hops are those of real ranks: ``tests/distributed/test_ring.py``."""
    tensors = [ring.gradients(rank) for rank in range(4)]
    hops, results = simulate(tensors), [tensor.tolist() for tensor in tensors]
    printed = [*ring.tell(hops, 4, 8), "", *ring.check(hops, results, results[0], 8), *tables.four()]
    assert [stands_in(block, printed) for block in quoted("data_parallelism.md")] == [True] * 5


def test_the_tables_are_quoted():
    printed = [line.rstrip() for table in tables.TABLES.values() for line in table()]
    pages = ("stage1.md", "stage2.md", "memory.md")
    blocks = [block for page in pages for block in quoted(page) if "(predicted)" not in block[0]]
    assert [stands_in(block, printed) for block in blocks] == [True] * 7


def one_rank_tells(rank, world):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        stage1_by_all_reduce.program()
    return out.getvalue().splitlines()


def test_stage_1_by_all_reduce_is_quoted(ranks):
    told, *others = ranks.run(one_rank_tells, world_size=4, process_group=False)
    assert told in quoted("stage1.md") and others == [[]] * 3


def test_odd_arguments_are_named_and_refused(capsys, monkeypatch):
    of_number = [["--lr", "0"], ["--steps", "-1"], ["--plot", "x.png"], ["--plot", "no/such/folder/x.svg"]]
    cases = [*((one_number, given) for given in of_number), (tables, ["--table", "x"])]
    for program, arguments in [*cases, (stage1_by_all_reduce, ["--ranks", "1"]), (ring, ["--numel", "0"])]:
        monkeypatch.setattr(sys, "argv", ["program", *arguments])
        with pytest.raises(SystemExit, match="2"):
            program.main()
        assert arguments[-1] in capsys.readouterr().err


def test_the_command_of_the_chapter():
    done = runs.refused("--steps", "0", cwd=ROOT, program="examples/one_number.py")
    assert (done.status, done.err) == (0, "")
    assert done.out.splitlines() == list(one_number.one_weight(1e-4))


@pytest.mark.slow
def test_stage_1_by_all_reduce_starts_its_ranks():
    command = [sys.executable, "examples/stage1_by_all_reduce.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert (done.returncode, runs.told_everywhere(done.stderr)) == (0, "")
    assert done.stdout.splitlines() in quoted("stage1.md")
