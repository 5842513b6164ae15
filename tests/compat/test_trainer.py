"""Hugging Face's Trainer, unmodified, on two ranks: its steps are DeepSpeed's, and a resumed run is the whole one."""

import pytest

from tests.compat.libraries import check_like_deepspeed, loss_of_all, prepared, run_example, tell

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
STORIES = ("train", "offload", "blocks", "save", "pretrained")


@pytest.fixture(scope="module", params=[(2, "fp32"), (3, "fp32"), (3, "bf16")], ids="stage{0[0]}-{0[1]}".format)
def run(request, tmp_path_factory):
    """Stage, precision, folder and what has been told there."""
    folder = prepared(tmp_path_factory.mktemp("trainer"))
    stage, precision = request.param
    return stage, precision, folder, tell(STORIES, stage, precision, folder)


def test_steps_are_those_of_deepspeed(run):
    _, precision, _, told = run
    for name in STORIES:
        assert len(told[name]["loss"]) == 4
        if precision == "fp32":
            check_like_deepspeed(told[name], name)
    assert told["offload"]["loss"] == pytest.approx(told["save"]["loss"], rel=1e-5 if precision == "fp32" else 2e-2)


def test_a_run_goes_on_in_another_process(run):
    stage, precision, folder, told = run
    resumed = tell(("resume",), stage, precision, folder)["resume"]
    assert resumed == {key: told["save"][key] for key in resumed}


def test_saved_models_are_whole(run):
    _, precision, folder, told = run
    near = 1e-5 if precision == "fp32" else 2e-2
    assert loss_of_all(folder / "saved") == pytest.approx(told["save"]["eval_loss"], rel=near)
    again = told["pretrained"]
    assert again["same"] and again["rows"] == 72
    assert [len(row) for row in again["made"]] == [7], "the ranks generate different lengths"


def test_evaluation_without_training(tmp_path):
    told = tell(("evaluate",), 3, "fp32", prepared(tmp_path))["evaluate"]
    assert told == pytest.approx(loss_of_all(tmp_path / "base"), rel=1e-5)


def test_the_example(tmp_path):
    """The docs' command, to fewer steps; it goes on from a checkpoint of its own."""
    prepared(tmp_path)
    words = ["--deepspeed", "examples/zero3_auto.json", "--output_dir", str(tmp_path), "--max_steps", "4",
             "--logging_steps", "1", "--per_device_train_batch_size", "4", "--bf16", "--save_steps", "2"]  # fmt: skip
    first = run_example("hf_trainer", words)
    assert len(first["train_losses"]) == 4 and first["eval_loss"] < first["train_losses"][0]
    assert run_example("hf_trainer", [*words, "--resume_from_checkpoint", str(tmp_path / "checkpoint-2")]) == first
