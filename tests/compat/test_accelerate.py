"""Hugging Face's accelerate, unmodified, on two ranks: a plain loop, its state, its launcher, skipped steps."""

import sys

import pytest

from tests.compat.libraries import check_like_deepspeed, prepared, run_example, tell

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def folder(tmp_path):
    return prepared(tmp_path)


def check_loop(told):
    """Micro-batches 0-3, a save, 4-7, a load, and 4-7 again to the same bits."""
    losses, norms = told["losses"], told["norms"]
    assert len(losses) == 12 and losses[4:8] == losses[8:] and norms[2:4] == norms[4:]
    assert told["lr"][2:4] == told["lr"][4:] and told["bare"] == "LlamaForCausalLM"
    assert len(told["sums"]) == 12 and all(total > loss for total, loss in zip(told["sums"], losses, strict=True))


@pytest.mark.parametrize("stage", [2, 3])
def test_a_plain_loop(folder, stage):
    told = tell(("loop",), stage, "fp32", folder)["loop"]
    check_loop(told)
    check_like_deepspeed(told, "loop", ("losses", "norms", "sums", "lr", "numel"))


def test_its_launcher(folder):
    """``accelerate launch`` as a module under deepzero's name: the ranks that it starts find deepzero as well."""
    launch = [sys.executable, "-m", "deepzero.compat", "-m", "accelerate.commands.launch", "--use_deepspeed",
              "--num_processes=2", "--main_process_port=0", "--mixed_precision=bf16", "--num_machines=1",
              "--dynamo_backend=no"]  # fmt: skip
    check_loop(tell(("loop",), 3, "bf16", folder, launch)["loop"])


def test_the_example(tmp_path):
    """The docs' command, to fewer steps, by torchrun and by accelerate's launcher: the same losses."""
    words = ["--config", "examples/zero2_auto.json", "--steps", "4", "--accumulate", "2", "--save", str(tmp_path)]
    told = run_example("accelerate_loop", words)
    assert len(told["train_losses"]) == 4 and told["train_losses"][-1] < told["train_losses"][0]
    launch = [sys.executable, "-m", "deepzero.compat", "-m", "accelerate.commands.launch", "--use_deepspeed",
              "--num_processes", "2", "--main_process_port", "0"]  # fmt: skip
    assert run_example("accelerate_loop", words, launch) == told


def test_skipped_steps_move_no_schedule(folder):
    told = tell(("skips",), 2, "fp16", folder)["skips"]
    skipped, lr = told["skipped"], told["lr"]
    assert skipped[0] and not skipped[-1]
    assert [rate for rate, jumped in zip(lr, skipped, strict=True) if jumped] == [lr[0]] * sum(skipped)
    assert lr[-1] < lr[0]
