"""peft's adapters and TRL's trainers, unmodified, on two ranks."""

import pytest

from tests.compat.libraries import DEEPSPEED, check_like_deepspeed, loss_of_all, prepared, tell

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize("stage", [2, 3])
def test_adapters(tmp_path, stage):
    """They alone train and are saved; a resumed run is the whole one; the saved adapter is what was trained."""
    peft = pytest.importorskip("peft", reason="needs the extra hf")
    folder = prepared(tmp_path)
    told = tell(("lora",), stage, "fp32", folder)["lora"]
    check_like_deepspeed(told, "lora")
    assert tell(("lora_resume",), stage, "fp32", folder)["lora_resume"] == told
    of_adapter = loss_of_all(folder / "base", lambda model: peft.PeftModel.from_pretrained(model, folder / "adapter"))
    assert of_adapter == pytest.approx(told["eval_loss"], rel=1e-5)


@pytest.mark.parametrize("stage", [2, 3])
def test_fine_tuning_and_preferences(tmp_path, stage):
    """A generation from whole weights in between; a reference model that has no optimizer."""
    pytest.importorskip("trl", reason="needs the extra libraries")
    told = tell(("sft", "dpo"), stage, "fp32", prepared(tmp_path))
    check_like_deepspeed(told["sft"], "sft", ("loss", "grad_norm", "after"))
    assert told["sft"]["made"] == DEEPSPEED["sft"]["made"]
    check_like_deepspeed(told["dpo"], "dpo", ("loss", "grad_norm", "margins"))
