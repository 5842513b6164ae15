"""Every command that README and book show: run as it stands, run elsewhere, or read by its own program's parser.

A command belongs to the first of these classes that has it, and one that none has fails. What is only read has its
reason here: `READ` for our programs, `OTHERS` for those of other projects.
"""

import argparse
import itertools
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
from torch.distributed.run import get_args_parser

from deepzero.config.engine import resolve_batch
from deepzero.config.hydra_errors import check_words
from deepzero.training.command_line import CONFIGS
from deepzero.utils.closed_pipe import Interrupted, exit_with
from tests.configs.compose import run_config
from tests.e2e import runs
from tests.unit.test_docs import PAGES, ROOT, fenced, prose, text

OURS = ("python", "torchrun", "pytest")
START = rf"(?:{'|'.join(OURS)}|pip|git|source|ruff|mypy|mkdocs|wandb|tensorboard|sbatch)"

TOUR = [
    "python train.py --help",
    "python train.py --cfg job",
    "python examples/tables.py --table four",
    "python examples/ring.py",
    "python script.py",
    "torchrun --standalone --nproc-per-node=2 train.py zero.stage=2 experiment=smoke",
    "python train.py zero.stage=3 experiment=smoke train.eval_every=0 profiler=torch 'profiler.ranks=[0,1]'"
    " hydra.run.dir=traced",
    "python -m tools.trace_report traced --html traced/trace.html",
    "python -m tools.report FOLDER",
    "python -m tools.verify runs/a/checkpoints",
    "python -m tools.export runs/a/checkpoints exported --dtype bf16",
    "python -m tools.simulate --probe --ranks 2 --save here.json",
]
"""These are run in one folder, from the traced run on beside the ones before it; `MEANT` stands for an open place."""
MEANT = {"FOLDER": "traced", "runs/a/checkpoints": "traced/checkpoints"}

HF_TRAINER = (
    "torchrun --nproc-per-node 2 -m deepzero.compat examples/hf_trainer.py --deepspeed examples/zero3_auto.json "
    "--output_dir runs/llama --max_steps 20 --logging_steps 1 --per_device_train_batch_size 4 --bf16"
)
ACCELERATE_LOOP = "-m deepzero.compat examples/accelerate_loop.py --config examples/zero2_auto.json"
ELSEWHERE = {
    "python -m tools.deepspeed_surface": "tests/compat/test_surface.py",
    "python -m tools.walk zero.stage=2": "tests/distributed/test_walk.py",
    "python -m tools.walk zero.stage=3": "tests/distributed/test_walk.py",
    "python examples/tables.py": "tests/unit/test_examples.py",
    "python examples/stage1_by_all_reduce.py": "tests/unit/test_examples.py",
    "python examples/one_number.py": "tests/unit/test_examples.py",
    HF_TRAINER: "tests/compat/test_trainer.py",
    f"torchrun --nproc-per-node 2 {ACCELERATE_LOOP}": "tests/compat/test_accelerate.py",
    "python -m deepzero.compat -m accelerate.commands.launch --use_deepspeed --num_processes 2 "
    + ACCELERATE_LOOP.rpartition("compat ")[2]: "tests/compat/test_accelerate.py",
    "python -m tools.plan model=gpt2_1_3b zero.stage=3 train_micro_batch_size_per_gpu=1 --ranks 8 --moves 12": (
        "tests/unit/test_book.py"
    ),
}
"""What another test runs."""

READ = {
    r"train\.py": "trains for minutes; its settings are composed, as is the batch, and tests/e2e runs shorter ones",
    r"tools\.(plan|simulate|advise)": "tens of seconds each; tests/unit runs all three on small models",
    r"tools\.(walk|report|trace_report|verify|export)": "needs a model or a folder that the page leaves open",
    r"tools\.bench\.\w+": "measures for minutes, on a quiet machine or a GPU; tests run some of them on tiny models",
    r"tools/(mutate|loss_compare)\.py": "runs tests for hours; compares two runs of minutes",
    r"tools\.measure_house": ".ci/run runs it",
    r"tools\.waits": "runs for each wait of the package: minutes; tests/distributed runs it for some",
    r"script\.py": "under torchrun; the same script is run without it",
    r"pytest": "the tests themselves: paths, markers and names are looked up",
}
"""Programs of ours whose arguments are read by their own parsers, and why they are not run."""
OTHERS = {
    r"pip install": "changes the environment; its extras are looked up",
    r"git clone|source |python -m venv": "a clone and an environment of the reader's own",
    r"ruff (check|format) \.|mkdocs ": ".ci/run has them",
    r"wandb|tensorboard": "a service or a window; a file that is named is looked up",
    r"sbatch": "needs Slurm; the settings behind the script are composed",
}


def commands():
    """Every command once, with its page: of blocks without the prompt and the comment, of prose what is in code."""
    found = {}
    for page in PAGES:
        lines = re.sub(r"^```python\n.*?^```", "", text(page), flags=re.M | re.S).replace("\\\n", " ").splitlines()
        inside = "\n".join(fenced(page)).replace("\\\n", " ").splitlines()
        shown = [part for line in inside if line in lines for part in re.split(rf" +# | && |: (?={START} )", line)]
        spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose(page))]
        for shown_or_span in [*shown, *spans]:
            command = re.sub(r"^(\$|then:) ", "", shown_or_span.strip())
            if re.match(rf"{START} \S", command) and not re.match(r"\w+ is ", command):
                found.setdefault(" ".join(command.split()), page.name)
    return sorted(found.items())


def classes_of(command):
    """The classes that have a command; `READ` and `OTHERS` only where no table names it in full."""
    if command in TOUR or command in ELSEWHERE:
        return [table for table in (TOUR, ELSEWHERE) if command in table]
    program = re.search(r"(?:^| )(train\.py|script\.py|(?<=-m )tools[\w.]+|tools/\w+\.py|^pytest)(?: |$)", command)
    patterns = [p for p in READ if program and command.startswith(OURS) and re.fullmatch(p, program[1])]
    if re.fullmatch(r"torchrun \S+", command):  # a flag alone, of which the sentence says what it does
        patterns.append(r"train\.py")
    return [*patterns, *(pattern for pattern in OTHERS if re.match(pattern, command))]


def test_every_command_is_in_exactly_one_class():
    shown = dict(commands())
    assert len(shown) > 100
    assert {command: len(classes_of(command)) for command in shown if len(classes_of(command)) != 1} == {}
    gone = {*TOUR, *ELSEWHERE} - set(shown)
    used = {pattern for command in shown for pattern in classes_of(command) if isinstance(pattern, str)}
    assert (gone, {*READ, *OTHERS} - used) == (set(), set())
    for command, test in ELSEWHERE.items():
        program = re.search(r"(?:tools\.|examples/)(\w+)", command)[1]
        assert re.search(rf"\b{program}\b", text(ROOT / test)), f"{test} does not run {command}"


def settings_read(words):
    """The overrides of train.py, of a sweep its first point: composed, and a batch found for the ranks."""
    words = [word for word in words if word != "-m"]
    check_words(words, CONFIGS)
    run = run_config(*(re.sub(r"=([^\[,]+),.*", r"=\1", word) for word in words))
    assert resolve_batch(run.engine, run.launch.nproc or 2).global_batch


class Read(Exception):
    """A program's parser has read its arguments, and here it ends."""


def reading(original):
    """A method of argparse's parser that ends the program when it has read the arguments; its help can be printed."""

    def parse(self, *args, **named):
        found = original(self, *args, **named)
        if sys._getframe(1).f_globals["__name__"] != "argparse":  # which calls one from the other
            assert "usage" in self.format_help()
            raise Read(found)
        return found

    return parse


def arguments_read(file, words, monkeypatch):
    """What the program in ``file`` reads of its command line; its own complaint ends the test."""
    for name in ("parse_args", "parse_known_args", "parse_intermixed_args"):
        monkeypatch.setattr(argparse.ArgumentParser, name, reading(vars(argparse.ArgumentParser)[name]))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", [str(file), *words])
    with pytest.raises(Read) as read:
        runpy.run_path(str(file), run_name="__main__")
    return read.value.args[0]


def pytest_read(words):
    """Of a pytest command: every path is there, every marker is declared, some test has the name."""
    options = dict(itertools.pairwise(words))
    for path in (word for word in words if "/" in word):
        assert (ROOT / path).exists(), path
    declared = re.findall(r'^    "(\w+): ', text(ROOT / "pyproject.toml"), re.M)
    assert set(re.findall(r"\w+", options.get("-m", ""))) <= {*declared, "and", "not"}
    files = [file for folder in ("tests", "deepzero") for file in (ROOT / folder).rglob("*.py")]
    assert any(re.search(rf"def test_\w*{options.get('-k', '')}", text(file)) for file in files)


@pytest.mark.parametrize("command", [command for command, _ in commands() if command not in (*TOUR, *ELSEWHERE)])
def test_what_is_not_run_is_read_by_its_own_program(command, monkeypatch):
    monkeypatch.chdir(ROOT)
    program, *words = [word.replace("…", "x") for word in shlex.split(command) if word != "…"]
    if program == "pytest":
        pytest_read(words)
    elif program == "torchrun":
        options = get_args_parser().parse_args(words if words[-1][:2] != "--" else [*words, "train.py"])
        assert options.training_script in ("train.py", "script.py")
        settings_read(options.training_script_args)
    elif program == "sbatch":
        script = next(number for number, word in enumerate(words) if word.endswith(".sbatch"))
        assert (ROOT / words[script]).is_file()
        settings_read(words[script + 1 :])
    elif program == "python" and words[0] == "train.py":
        settings_read(words[1:])
    elif program == "python" and words[:2] != ["-m", "venv"]:
        name, rest = (words[1].replace(".", "/") + ".py", words[2:]) if words[0] == "-m" else (words[0], words[1:])
        needed = {"report": ["run"], "trace_report": ["run"], "verify": ["run"], "mutate": ["map"]}
        rest = rest or needed.get(name.rpartition("/")[2][:-3], [])
        options = arguments_read(ROOT / name, rest, monkeypatch)
        if getattr(options, "overrides", None):
            settings_read(options.overrides)
    else:
        extras = re.findall(r"\[(\w+)\]", " ".join(words)) if program == "pip" else []
        assert all(re.search(rf"^{extra} = \[", text(ROOT / "pyproject.toml"), re.M) for extra in extras)
        assert all((ROOT / word).exists() for word in words if word.startswith(("examples/", "tools/", "docs/")))


@pytest.fixture
def clone(tmp_path):
    """A folder that looks like a clone, in which the README's script lies too; runs leave their folders there."""
    for name in ("train.py", "configs", "deepzero", "tools", "examples", "pyproject.toml", "README.md", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    blocks = fenced(ROOT / "README.md")
    for name, first in (("ds_config.json", "{\n"), ("script.py", "import torch\n")):
        (tmp_path / name).write_text(next(block for block in blocks if block.startswith(first)), encoding="utf-8")
    return tmp_path


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_tour(clone):
    """What can be run in a minute together, as the pages show it."""
    scripts = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    assert shutil.which("torchrun", path=scripts)
    environment = {**os.environ, "PATH": scripts, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def run(command):
        words = [MEANT.get(word, word) for word in shlex.split(command)]
        if words[0] == "python" and not re.search(r"train\.py \w|ring|script|--ranks", command):  # it starts no rank
            _, *module, program = words[: 3 if words[1] == "-m" else 2]
            done = runs.refused(*words[len(module) + 2 :], cwd=clone, program=program)
            status, out, err = done.status, done.out, done.err
        else:
            done = subprocess.run(words, cwd=clone, env=environment, capture_output=True, text=True, timeout=120)
            status, out, err = done.returncode, done.stdout, done.stderr
        assert status == 0 and out and "Traceback" not in err, f"{command}\n{out[-2000:]}\n{err[-2000:]}"

    traced = next(number for number, command in enumerate(TOUR) if "=traced" in command)
    with ThreadPoolExecutor(2) as pool:  # to import torch, which all of them do, takes one core
        list(pool.map(lambda part: list(map(run, part)), (TOUR[:traced], TOUR[traced:])))
    for made in ("traced/report.html", "traced/trace.html", "exported/model.safetensors", "here.json"):
        assert (clone / made).stat().st_size, made


# ---- a reader that has seen enough -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("words", ["examples/tables.py", pytest.param("train.py --help", marks=pytest.mark.exhaustive)])
def test_a_closed_pipe_ends_a_program_quietly(words):
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, *words.split()]
    with os.fdopen(write) as pipe:
        done = subprocess.run(command, cwd=ROOT, stdout=pipe, stderr=subprocess.PIPE, timeout=100)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


def test_ctrl_c_during_the_imports(tmp_path):
    (tmp_path / "torch.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n", encoding="ascii")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "train.py"], cwd=ROOT, env=environment, capture_output=True, timeout=100)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, b"", b"")


@pytest.mark.parametrize(("ends", "status"), [
    (lambda: 3, 3), (str, 0), (lambda: sys.exit(2), 2), (lambda: signal.raise_signal(2), 130),
    (mock.Mock(side_effect=Interrupted(signal.SIGTERM)), 143),
])  # fmt: skip
def test_the_exit_status_is_the_programs(ends, status):
    with pytest.raises(SystemExit) as ended:
        exit_with(ends)
    assert (ended.value.code or 0) == status


def test_a_closed_standard_output_is_no_error(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(SystemExit, match=r"^0$"):
        exit_with(lambda: print("to nobody", flush=True) or 0)
    sys.stdout.close()


def test_another_pipe_that_breaks_is_an_error(capfd):
    with pytest.raises(BrokenPipeError, match="a rank's"):
        exit_with(mock.Mock(side_effect=BrokenPipeError("a rank's")))


def test_export_asks_for_a_dtype(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["export", "runs/a/checkpoints", "exported"])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(ROOT / "tools" / "export.py"), run_name="__main__")
    assert "--dtype bf16 or fp16, or --dtype fp32" in capsys.readouterr().err
