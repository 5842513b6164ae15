"""A plain training loop with Hugging Face's accelerate under ZeRO. No line of it names deepzero.

    torchrun --nproc-per-node 2 -m deepzero.compat examples/accelerate_loop.py --config examples/zero2_auto.json

Optimizer and schedule are torch's own. Without ``-m deepzero.compat`` the same line runs under DeepSpeed.
"""

import argparse
import json
from pathlib import Path

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.utils import InitProcessGroupKwargs, set_seed
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

TEXT = Path(__file__).resolve().parents[1] / "LICENSE"
TOKENS = 64


def main() -> None:
    """Train for ``--steps`` optimizer steps and print their losses."""
    parser = argparse.ArgumentParser(description="a byte-level GPT-2 learns the text of the LICENSE")
    parser.add_argument("--config", required=True, help="a DeepSpeed JSON file")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches of an optimizer step")
    parser.add_argument("--precision", choices=("no", "bf16", "fp16"), default="bf16", help="of the computation")
    parser.add_argument("--save", help="a folder for the state of training, which the script then loads again")
    args = parser.parse_args()

    set_seed(0)
    # Without a GPU accelerate has to be told which backend ranks meet on.
    group = [] if torch.cuda.is_available() else [InitProcessGroupKwargs(backend="gloo")]
    accelerator = Accelerator(
        mixed_precision=args.precision,
        gradient_accumulation_steps=args.accumulate,
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=args.config),
        kwargs_handlers=group,
    )
    ids = torch.tensor(list(TEXT.read_bytes()))
    batches = DataLoader(ids[: len(ids) // TOKENS * TOKENS].view(-1, TOKENS), batch_size=4, shuffle=True)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_embd=64, n_layer=2, n_head=4, n_positions=TOKENS,
                                       resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))  # fmt: skip
    if args.precision == "bf16":  # values that bf16 can hold, as published weights have; DeepSpeed rounds others first
        model.bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    model, optimizer, batches, schedule = accelerator.prepare(model, optimizer, batches, schedule)

    losses: list[float] = []
    while len(losses) < args.steps:
        total = 0.0
        for batch in batches:
            with accelerator.accumulate(model):
                loss = model(input_ids=batch, labels=batch).loss
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            total += accelerator.gather(loss.detach()).mean().item() / args.accumulate
            if accelerator.sync_gradients:
                losses.append(total)
                total = 0.0
                if len(losses) == args.steps:
                    break
    if args.save:
        accelerator.save_state(args.save)
        accelerator.load_state(args.save)
    accelerator.print(json.dumps({"train_losses": losses, "lr": schedule.get_last_lr()}))


if __name__ == "__main__":
    main()
