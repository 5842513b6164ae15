"""Hugging Face's Trainer, unmodified, on two ranks: its steps are DeepSpeed's, and a resumed run is the whole one."""

import pytest

from tests.compat.libraries import DEEPSPEED, check_like_deepspeed, prepared, tell

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
STORIES = ("train", "offload", "blocks", "save", "pretrained")


@pytest.fixture(scope="module", params=[(2, "fp32"), (3, "fp32"), (3, "bf16")], ids="stage{0[0]}-{0[1]}".format)
def run(request, tmp_path_factory):
    """Stage, precision, folder and what has been told there."""
    folder = prepared(tmp_path_factory.mktemp("trainer"))
    stage, precision = request.param
    return stage, precision, folder, tell(STORIES, stage, precision, folder)


def test_steps_are_those_of_deepspeed(run):
    stage, precision, _, told = run
    for name in STORIES:
        assert len(told[name]["loss"]) == 4
        if precision == "fp32":
            check_like_deepspeed(told[name], stage, name)
    assert told["offload"]["loss"] == pytest.approx(told["save"]["loss"], rel=1e-5 if precision == "fp32" else 2e-2)


def test_a_run_goes_on_in_another_process(run):
    stage, precision, folder, told = run
    resumed = tell(("resume",), stage, precision, folder)["resume"]
    assert resumed == {key: told["save"][key] for key in resumed}


def test_saved_models_are_whole(run):
    import torch
    from transformers import LlamaForCausalLM

    _, precision, folder, told = run
    from tests.compat.library_stories import Tokens

    model = LlamaForCausalLM.from_pretrained(folder / "saved")
    data = Tokens()
    ids = torch.stack([data[index]["input_ids"] for index in range(len(data))])
    with torch.no_grad():
        loss = model(input_ids=ids, labels=ids).loss.item()
    assert loss == pytest.approx(told["save"]["eval_loss"], rel=1e-5 if precision == "fp32" else 2e-2)
    assert told["pretrained"]["same"] and told["pretrained"]["rows"] == 72


def test_evaluation_without_training(tmp_path):
    assert tell(("evaluate",), 3, "fp32", prepared(tmp_path))["evaluate"] == pytest.approx(DEEPSPEED["3"]["evaluate"])


def test_generation_of_different_lengths(run):
    assert [len(row) for row in run[3]["pretrained"]["made"]] == [7]
