"""A byte-level Llama learns the text of the LICENSE: Hugging Face's Trainer under ZeRO. No line of it names deepzero.

    torchrun --nproc-per-node 2 -m deepzero.compat examples/hf_trainer.py --deepspeed examples/zero3_auto.json
        --output_dir runs/llama --max_steps 20 --logging_steps 1 --per_device_train_batch_size 4 --bf16

in one line. Arguments are those of ``transformers.TrainingArguments``; ``"auto"`` in the JSON file takes its value from
them. With ``--resume_from_checkpoint DIR`` a later run goes on. Without ``-m deepzero.compat`` it runs under DeepSpeed.
"""

import json
import os
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, HfArgumentParser, LlamaConfig, Trainer, TrainingArguments

TEXT = Path(__file__).resolve().parents[1] / "LICENSE"
TOKENS = 64


class Bytes(Dataset):
    """Windows of a file's bytes; a byte is a token."""

    def __init__(self, path: Path) -> None:
        self.ids = torch.tensor(list(path.read_bytes()))

    def __len__(self) -> int:
        return len(self.ids) // TOKENS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        window = self.ids[index * TOKENS : (index + 1) * TOKENS]
        return {"input_ids": window, "labels": window}


def parse_arguments() -> TrainingArguments:
    """What the command line says. Without a GPU accelerate has to be told which backend ranks meet on."""
    if not torch.cuda.is_available():
        from accelerate import PartialState

        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        PartialState(backend="gloo")
        parser = HfArgumentParser(TrainingArguments)
        parser.set_defaults(accelerator_config={"use_configured_state": True}, use_cpu=True)
        return parser.parse_args_into_dataclasses()[0]
    return HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()[0]


def main() -> None:
    """Train, evaluate, save."""
    args = parse_arguments()
    torch.manual_seed(args.seed)
    # In stage 3 the model is cut as it is made: the arguments above have told transformers so. With --bf16 it has
    # values that bf16 can hold, as published weights do: DeepSpeed would round others before it made its masters.
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=TOKENS),
        dtype=torch.bfloat16 if args.bf16 else torch.float32,
    )  # fmt: skip
    trainer = Trainer(model, args, train_dataset=Bytes(TEXT), eval_dataset=Bytes(TEXT.with_name("CONTRIBUTING.md")))
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    losses = {"eval_loss": trainer.evaluate()["eval_loss"]}
    losses["train_losses"] = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    if trainer.is_world_process_zero():
        print(json.dumps(losses))


if __name__ == "__main__":
    main()
