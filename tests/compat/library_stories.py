"""What scripts do with transformers, accelerate, peft, trl and Lightning, as a program: each story is a function.

    torchrun --nproc-per-node 2 -m deepzero.compat tests/compat/library_stories.py STORY,… STAGE PRECISION FOLDER

``FOLDER/base`` holds the model that all begin with (:func:`write_base`). Rank 0 prints what a story returns, one line
of JSON. Nothing here names deepzero: without ``-m deepzero.compat`` the same stories are told by DeepSpeed.
"""

import gc
import json
import os
import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

LLAMA = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=32, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
TARGETS = ["q_proj", "v_proj"]


def write_base(folder):
    """A tiny Llama with values that no random generator has made, all of which bf16 can hold."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**LLAMA))
    with torch.no_grad():
        for number, (name, param) in enumerate(model.named_parameters()):
            wave = (torch.arange(param.numel(), dtype=torch.float64) * 1.7 + number).sin() * 0.15
            param.copy_((wave + (1 if "norm" in name else 0)).bfloat16().view_as(param))
    model.save_pretrained(folder)


class Tokens(Dataset):
    """Sequences with a rule in them that can be learnt."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        ids = torch.arange(16) * (index % 5 + 1) % 61 + 3
        return {"input_ids": ids, "labels": ids}


class Story:
    """A stage, a precision and a folder, and what all stories share."""

    def __init__(self, stage, precision, folder):
        self.stage, self.precision, self.folder = stage, precision, folder

    @property
    def rank(self):
        return torch.distributed.get_rank()

    def model(self, name="base"):
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(f"{self.folder}/{name}")

    def settings(self, **changed):
        zero = {"stage": self.stage, "reduce_bucket_size": "auto"}
        if self.stage == 3:
            zero |= {"stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": 40,
                     "stage3_gather_16bit_weights_on_model_save": True}  # fmt: skip
        zero |= changed.pop("zero", {})
        batch = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        auto = dict.fromkeys((*batch, "gradient_clipping"), "auto")
        return {**auto, "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto", "initial_scale_power": 8},
                "zero_optimization": zero, **changed}  # fmt: skip

    def arguments(self, config=None, kind=None, **changed):
        from accelerate import PartialState
        from transformers import TrainingArguments

        PartialState(backend="gloo")  # on a GPU accelerate finds the backend itself
        given = dict(
            output_dir=self.folder, max_steps=4, per_device_train_batch_size=2, learning_rate=1e-2, logging_steps=1,
            save_strategy="no", report_to=[], disable_tqdm=True, bf16=self.precision == "bf16",
            fp16=self.precision == "fp16", deepspeed=config or self.settings(),
            accelerator_config={"use_configured_state": True}, use_cpu=True,
        )  # fmt: skip
        return (kind or TrainingArguments)(**{**given, **changed})

    def trainer(self, args, model=None):
        from transformers import Trainer

        return Trainer(model or self.model(), args, train_dataset=Tokens(), eval_dataset=Tokens())

    # ---- transformers ------------------------------------------------------------------------------------------------

    def train(self):
        """Accumulation and gradient checkpointing; evaluation behind it."""
        trainer = self.trainer(self.arguments(gradient_accumulation_steps=2, gradient_checkpointing=True))
        trainer.train()
        return {**told(trainer), "eval_loss": trainer.evaluate()["eval_loss"]}

    def offload(self):
        """The optimizer in host memory."""
        device = {"offload_optimizer": {"device": "cpu"}}
        trainer = self.trainer(self.arguments(self.settings(zero=device, zero_force_ds_cpu_optimizer=False)))
        trainer.train()
        return told(trainer)

    def evaluate(self):
        """Without training, so without an optimizer, which transformers permits in stage 3 alone."""
        return self.trainer(self.arguments()).evaluate()["eval_loss"]

    def blocks(self):
        """Optimizer and schedule named in the JSON, with "auto" in both."""
        params = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
        steps = dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto")
        config = self.settings(optimizer={"type": "AdamW", "params": params},
                               scheduler={"type": "WarmupDecayLR", "params": steps})  # fmt: skip
        trainer = self.trainer(self.arguments(config, warmup_steps=2))
        trainer.train()
        return told(trainer)

    def save(self):
        """A checkpoint in the middle, the model at the end."""
        trainer = self.trainer(self.arguments(save_strategy="steps", save_steps=2))
        trainer.train()
        trainer.save_model(f"{self.folder}/saved")
        return {**told(trainer), "eval_loss": trainer.evaluate()["eval_loss"]}

    def resume(self):
        """Go on in another process from the checkpoint in the middle."""
        trainer = self.trainer(self.arguments())
        trainer.train(resume_from_checkpoint=f"{self.folder}/checkpoint-2")
        return told(trainer)

    def pretrained(self):
        """What :meth:`save` has saved, with more tokens; generation of different lengths; saved and loaded again."""
        import deepspeed

        args = self.arguments()
        model = self.model("saved")
        model.resize_token_embeddings(72)
        trainer = self.trainer(args, model)
        trainer.train()
        prompt = torch.arange(4)[None] + self.rank
        made = model.generate(prompt, max_new_tokens=3 + self.rank, do_sample=False, pad_token_id=0)
        trainer.save_model(f"{self.folder}/wider")
        torch.distributed.barrier()
        again = self.model("wider")
        pairs = list(zip(model.parameters(), again.parameters(), strict=True))
        with deepspeed.zero.GatheredParameters([param for pair in pairs for param in pair], enabled=self.stage == 3):
            same = all(torch.equal(one.float(), other.float()) for one, other in pairs)
            rows = len(again.get_input_embeddings().weight)
        return {**told(trainer), "made": made.tolist(), "same": same, "rows": rows}

    # ---- peft, trl ---------------------------------------------------------------------------------------------------

    def lora(self, resume=None):
        """Adapters alone train, and alone are saved."""
        from peft import LoraConfig, get_peft_model

        args = self.arguments(save_strategy="no" if resume else "steps", save_steps=2, output_dir=f"{self.folder}/lora")
        torch.manual_seed(0)
        trainer = self.trainer(args, get_peft_model(self.model(), LoraConfig(r=4, target_modules=TARGETS)))
        trainer.train(resume_from_checkpoint=resume)
        trainer.save_model(f"{self.folder}/adapter")
        return {**told(trainer), "eval_loss": trainer.evaluate()["eval_loss"]}

    def lora_resume(self):
        return self.lora(f"{self.folder}/lora/checkpoint-2")

    def sft(self):
        """Supervised fine-tuning; then a generation from the engine's whole weights, and training goes on."""
        import datasets
        from trl import SFTConfig, SFTTrainer
        from trl.models import unwrap_model_for_generation

        lines = [" ".join(f"w{(7 * line + word) % 61}" for word in range(12)) for line in range(64)]
        data = datasets.Dataset.from_list([{"text": line} for line in lines])
        args = self.arguments(kind=SFTConfig, max_length=16)
        trainer = SFTTrainer(self.model(), args, train_dataset=data, processing_class=words())
        trainer.train()
        with unwrap_model_for_generation(trainer.model_wrapped, trainer.accelerator) as whole:
            made = whole.generate(torch.tensor([[5, 12]]), max_new_tokens=3, do_sample=False)
        batch = next(iter(trainer.get_train_dataloader()))
        with trainer.accelerator.accumulate(trainer.model_wrapped):
            after = trainer.training_step(trainer.model_wrapped, batch)
        return {**told(trainer), "made": made.tolist(), "after": after.item()}

    def dpo(self):
        """Preferences, with a reference model that has no optimizer."""
        import datasets
        from trl import DPOConfig, DPOTrainer

        rows = [{"prompt": f"w{i % 61} w1", "chosen": f" w{(i + 1) % 61} w2", "rejected": f" w{(i + 30) % 61} w3"}
                for i in range(64)]  # fmt: skip
        args = self.arguments(kind=DPOConfig, max_length=16)
        data = datasets.Dataset.from_list(rows)
        trainer = DPOTrainer(self.model(), self.model(), args=args, train_dataset=data, processing_class=words())
        trainer.train()
        return {**told(trainer), "margins": [entry["rewards/margins"] for entry in steps_of(trainer)]}

    # ---- accelerate --------------------------------------------------------------------------------------------------

    def prepared(self, **changed):
        """An accelerator, and what it makes of model, optimizer, batches and schedule."""
        from accelerate import Accelerator, DeepSpeedPlugin
        from accelerate.utils import InitProcessGroupKwargs

        precision = {"fp32": "no"}.get(self.precision, self.precision)
        plugin = DeepSpeedPlugin(hf_ds_config=self.settings(**changed))
        group = [InitProcessGroupKwargs(backend="gloo")]
        accelerator = Accelerator(mixed_precision=precision, gradient_accumulation_steps=2, deepspeed_plugin=plugin,
                                  kwargs_handlers=group)  # fmt: skip
        model = self.model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
        return accelerator, *accelerator.prepare(model, optimizer, DataLoader(Tokens(), batch_size=2), schedule)

    def loop(self):
        """Two optimizer steps, a save, two more, a load, and the same two again."""
        accelerator, model, optimizer, batches, schedule = self.prepared()
        losses, norms, sums, lr = [], [], [], []

        def go(batches):
            for batch in batches:
                with accelerator.accumulate(model):
                    loss = model(**batch).loss
                    accelerator.backward(loss)
                    norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                losses.append(loss.item())
                sums.append(accelerator.gather(loss.detach()[None]).sum().item())
                if accelerator.sync_gradients:
                    norms.append(norm)
                    lr.append(schedule.get_last_lr()[0])

        given = list(batches)
        go(given[:4])
        accelerator.save_state(f"{self.folder}/state")
        go(given[4:8])
        accelerator.load_state(f"{self.folder}/state")
        go(given[4:8])
        whole = accelerator.get_state_dict(model)
        numel = sum(value.numel() for value in whole.values()) if whole is not None else None
        bare = accelerator.unwrap_model(model)
        return {"losses": losses, "norms": norms, "sums": sums, "lr": lr, "numel": numel, "bare": type(bare).__name__}

    def skips(self):
        """fp16 whose scale begins far too high: neither optimizer nor schedule moves before it has come down."""
        accelerator, model, optimizer, batches, schedule = self.prepared(
            fp16={"enabled": True, "initial_scale_power": 24, "hysteresis": 1}
        )
        skipped, lr = [], []
        for batch in list(batches) * 2:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                optimizer.step()
                schedule.step()
            if accelerator.sync_gradients:
                skipped.append(accelerator.optimizer_step_was_skipped)
                lr.append(schedule.get_last_lr()[0])
        return {"skipped": skipped, "lr": lr}

    # ---- Lightning ---------------------------------------------------------------------------------------------------

    def lightning(self):
        """Train with accumulation, validate, and go on in a second trainer from the checkpoint of the first."""
        import lightning.pytorch as pl
        from lightning.pytorch.strategies import DeepSpeedStrategy

        class OnAnyDevice(DeepSpeedStrategy):
            """The strategy without its two checks that there is a GPU."""

            def setup_environment(self):
                super(DeepSpeedStrategy, self).setup_environment()

            def setup_distributed(self):
                self.set_world_ranks()
                self._init_deepspeed_distributed()

        class Net(pl.LightningModule):
            def __init__(self):
                super().__init__()
                self.seen = []

            def configure_model(self):
                torch.manual_seed(0)
                self.body = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))

            def training_step(self, batch, index):
                loss = self.validation_step(batch, index)
                self.seen.append(loss.item())
                return loss

            def validation_step(self, batch, index):
                loss = (self.body(batch[0]).float() - batch[1].float()).pow(2).mean()
                self.log("loss", loss, sync_dist=True)
                return loss

            def configure_optimizers(self):
                optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
                schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
                return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

        def fit(epochs, **more):
            net, precision = Net(), {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}[self.precision]
            strategy = OnAnyDevice(stage=self.stage, process_group_backend="gloo")
            trainer = pl.Trainer(
                strategy=strategy, accelerator="cpu", devices=2, precision=precision, max_epochs=epochs, logger=False,
                enable_progress_bar=False, enable_model_summary=False, accumulate_grad_batches=2,
                gradient_clip_val=1.0, default_root_dir=self.folder, **more,
            )  # fmt: skip
            return net, trainer

        points = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
        batches = DataLoader(torch.utils.data.TensorDataset(points, points.sum(1, keepdim=True)), batch_size=4)
        keep = pl.callbacks.ModelCheckpoint(dirpath=self.folder, filename="first", save_top_k=1)
        first, trainer = fit(1, callbacks=[keep])
        trainer.fit(first, batches)
        validated = trainer.validate(first, batches, verbose=False)[0]["loss"]
        whole, trainer = fit(2, enable_checkpointing=False)
        trainer.fit(whole, batches)
        second, trainer = fit(2, enable_checkpointing=False)
        trainer.fit(second, batches, ckpt_path=keep.best_model_path)
        return {"first": first.seen, "second": second.seen, "whole": whole.seen, "validated": validated}

    def fabric(self):
        """Lightning's Fabric: a loop of one's own; a save in the middle, a load behind it, and the rest again."""
        import lightning.fabric
        from lightning.fabric.strategies import DeepSpeedStrategy

        class OnAnyDevice(DeepSpeedStrategy):
            """The strategy without its two checks that there is a GPU."""

            def setup_environment(self):
                super(DeepSpeedStrategy, self).setup_environment()

            def _setup_distributed(self):
                self._set_world_ranks()
                self._init_deepspeed_distributed()
                self._format_config()

        strategy = OnAnyDevice(stage=self.stage, process_group_backend="gloo")
        precision = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}[self.precision]
        fabric = lightning.fabric.Fabric(strategy=strategy, accelerator="cpu", devices=2, precision=precision)
        fabric.launch()
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
        net, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
        points = torch.randn(6, 4, 8, generator=torch.Generator().manual_seed(1 + fabric.global_rank))

        def go(batches):
            for batch in batches:
                loss = (net(batch).float() - batch.sum(1, keepdim=True)).pow(2).mean()
                fabric.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                yield loss.item()

        losses = list(go(points[:2]))
        state = {"net": net, "optimizer": optimizer, "step": 2}
        fabric.save(f"{self.folder}/fabric", state)
        losses += go(points[2:])
        state["step"] = 0
        fabric.load(f"{self.folder}/fabric", state)
        return {"losses": losses, "again": list(go(points[2:])), "step": state["step"]}


def told(trainer):
    """What the trainer's own log says of each step."""
    return {name: [entry[name] for entry in steps_of(trainer)] for name in ("loss", "grad_norm", "learning_rate")}


def steps_of(trainer):
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def words():
    """A tokenizer of 64 words that needs no download."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    known = ["<pad>", "<bos>", "<eos>"] + [f"w{number}" for number in range(61)]
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(known)}, unk_token="<eos>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def main():
    names, stage, precision, folder = sys.argv[1:]
    from accelerate.state import AcceleratorState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    Path(folder).mkdir(exist_ok=True)
    for name in names.split(","):
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        result = getattr(Story(int(stage), precision, folder), name)()
        if torch.distributed.get_rank() == 0:
            print(f"\nSTORY {name} {json.dumps(result)}", flush=True)
        # As in a new program, but for the process group: what both libraries remember is of the story before.
        AcceleratorState._reset_state()
        unset_hf_deepspeed_config()
        gc.collect()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
