"""A random small model and a random way to train it, both told by a number."""

import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import deepzero
from tests.distributed.training import config
from tests.distributed.weight_uses import USES, WIDTH, checkpointed

HOW = ("none", "reentrant", "non_reentrant", "selective", "selective+rest", "nested", "none+save_on_cpu")
REUSED = ("addmm", "at", "linear", "twice", "lora", "conv")


@dataclass
class Part:
    use: str
    how: str
    as_function: bool = False
    """The block's ``forward`` is checkpointed: no module is called."""
    bare: bool = False
    """The ``forward`` of what the block uses is called: no hook of that module runs."""
    again: int | None = None
    """The number of an earlier block whose module this one uses too."""
    tied: bool = False
    """``weight`` is that of the last block that has one of the same shape."""
    passed: bool = False
    """A weight is given to the checkpointed function as an argument."""
    calls: int = 1

    def __post_init__(self) -> None:
        if self.use == "lstm" and self.how.startswith("selective"):
            self.how = "non_reentrant"  # torch's own LSTM in fp16 writes into what selective checkpointing keeps


@dataclass
class Recipe:
    seed: int
    parts: list[Part]
    frozen: float
    """The probability of a parameter to be frozen."""
    precision: str = "fp32"
    steps: int = 2
    accumulation: int = 1
    forwards: int = 1
    """Forward passes before one backward pass."""
    evaluations: tuple[str, ...] = ()
    plain_backward: bool = False
    skips: bool = False
    """A block is left out in the second step."""
    optimizer: str = "AdamW"
    clipping: float = 0.5
    choose: random.Random = field(default_factory=random.Random, repr=False)
    """For what the stages may differ in."""


def recipe_of(seed: int) -> Recipe:
    """The same for every stage."""
    rng = random.Random(seed)
    parts: list[Part] = []
    common = rng.choice([None, None, *HOW])
    for number in range(rng.randint(2, 6)):
        earlier = [n for n, part in enumerate(parts) if part.again is None and part.use in REUSED]
        parts.append(Part(
            use=rng.choice(sorted(USES)), how=common or rng.choice(HOW), as_function=rng.random() < 0.3,
            again=rng.choice(earlier) if earlier and rng.random() < 0.15 else None,
            tied=number > 0 and rng.random() < 0.2, passed=rng.random() < 0.15, calls=rng.choice([1, 1, 1, 2]),
        ))  # fmt: skip
    return Recipe(
        seed=seed, parts=parts, frozen=rng.choice([0.0, 0.3, 0.6, 0.9]),
        precision=rng.choice(["fp32", "fp32", "bf16", "fp16"]), steps=rng.choice([2, 2, 3]),
        accumulation=rng.choice([1, 1, 2, 3]), forwards=rng.choice([1, 1, 1, 2]),
        evaluations=tuple(w for w in ("first", "before", "between", "after") if rng.random() < 0.25),
        plain_backward=rng.random() < 0.2, skips=rng.random() < 0.15,
        optimizer=rng.choice(["AdamW", "SGD"]), clipping=rng.choice([0.0, 0.5]), choose=rng,
    )  # fmt: skip


class Block(nn.Module):
    """``x + after(tanh(use(x)))``, one of them frozen, or both, or none."""

    def __init__(self, use: nn.Module, bare: bool) -> None:
        super().__init__()
        self.use, self.after, self.bare = use, nn.Linear(WIDTH, WIDTH), bare

    def forward(self, x: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
        y = self.after(torch.tanh(self.use.forward(x) if self.bare else self.use(x)))
        return x + y if weight is None else x + y + x * weight.flatten()[:WIDTH]


class RandomModel(nn.Module):
    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.parts, self.skipped = recipe.parts, -1
        self.first, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList()
        weights: dict[torch.Size, nn.Parameter] = {}
        for part in recipe.parts:
            module = USES[part.use]() if part.again is None else self.blocks[part.again].use
            if (weight := getattr(module, "weight", None)) is not None and part.again is None:
                if part.tied and weight.shape in weights:
                    module.weight = weights[weight.shape]
                weights[weight.shape] = module.weight
            self.blocks.append(Block(module, part.bare))
        rng = random.Random(recipe.seed)
        for param in self.blocks.parameters():
            param.requires_grad_(rng.random() >= recipe.frozen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for number, (part, block) in enumerate(zip(self.parts, self.blocks, strict=True)):
            if number == self.skipped:
                continue
            run = block.forward if part.as_function else block
            given = (block.after.weight,) if part.passed else ()
            for _ in range(part.calls):
                x = checkpointed(part.how, run, x, *given)
        return x.float().pow(2).mean()


def common_settings(recipe: Recipe) -> dict[str, Any]:
    params = {"lr": 1e-2, "weight_decay": 0.1} if recipe.optimizer != "SGD" else {"lr": 1e-2, "momentum": 0.9}
    return {
        "precision": recipe.precision,
        "gradient_accumulation_steps": recipe.accumulation,
        "gradient_clipping": recipe.clipping,
        "optimizer": {"type": recipe.optimizer, "params": params},
        **({"fp16": {"initial_scale_power": 8}} if recipe.precision == "fp16" else {}),
    }


def plain_settings(recipe: Recipe, stage: int, **more: Any) -> dict[str, Any]:
    return config(stage=stage, **{**common_settings(recipe), **more})


def lower_settings(recipe: Recipe, stage: int) -> dict[str, Any]:
    choose = recipe.choose
    zero: dict[str, Any] = {}
    if stage and recipe.optimizer == "CPUAdam" and choose.random() < 0.5:
        zero["offload_optimizer"] = {"device": "cpu", "ratio": choose.choice([0.5, 1.0])}
    bucket, overlap = choose.choice([40, 300, 10**6]), choose.random() < 0.5
    chaos = choose.choice([None, choose.randrange(1000)])
    return calm(config(stage=stage, bucket=bucket, overlap=overlap, zero=zero, chaos=chaos, **common_settings(recipe)))


def third_settings(recipe: Recipe, offload: bool | None = None, **zero: Any) -> dict[str, Any]:
    """Stage 3 in some random way; ``offload``, which needs an optimizer of its own, is open if None."""
    choose = recipe.choose
    zero.update(
        stage3_param_persistence_threshold=choose.choice([0, 0, 20, 150]),
        stage3_prefetch_bucket_size=choose.choice([0, 150, 600, 10**6]),
        stage3_max_live_parameters=choose.choice([1, 500, 10**9]),
        stage3_max_reuse_distance=choose.choice([0, 300, 10**9]),
    )
    if offload is None:
        offload = choose.random() < 0.3
    if offload:
        recipe.optimizer = "CPUAdam"
        zero["offload_optimizer"] = {"device": "cpu", "ratio": choose.choice([0.5, 1.0])}
        if choose.random() < 0.7:
            zero["offload_param"] = {"device": "cpu", "max_in_cpu": choose.choice([0, 600, 10**9])}
    bucket, overlap = choose.choice([40, 300, 300, 900, 10**6]), choose.random() < 0.5
    chaos = choose.choice([None, choose.randrange(1000), choose.randrange(1000)])
    return calm(config(stage=3, bucket=bucket, overlap=overlap, zero=zero, chaos=chaos, **common_settings(recipe)))


def calm(settings: dict[str, Any]) -> dict[str, Any]:
    """Poison, but delays of microseconds: there are many models."""
    if "chaos" in settings["comm"]:
        settings["comm"]["chaos"]["max_delay_ms"] = 0.01
    return settings


def batch(recipe: Recipe, number: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10_000 * recipe.seed + 100 * rank + number)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[recipe.precision]
    return torch.randn(6, WIDTH, generator=generator).to(dtype)


def trained(recipe: Recipe, settings: dict[str, Any], rank: int, init: bool = False) -> list[Any]:
    """What must be the same: each step's loss and norm, each evaluation's loss, the parameters at the end."""
    torch.manual_seed(recipe.seed)
    with deepzero.zero.Init(enabled=init):
        model = RandomModel(recipe)
    engine, *_ = deepzero.initialize(model=model, config=settings)
    seen: list[Any] = []

    def evaluate(when: str) -> None:
        if when in recipe.evaluations:
            model.eval()
            with torch.no_grad():
                seen.append((when, float(engine(batch(recipe, 99, rank)))))
            model.train()

    evaluate("first")
    for step in range(recipe.steps):
        model.skipped = 0 if recipe.skips and step == 1 else -1
        for micro in range(recipe.accumulation):
            evaluate("before")
            numbers = [step + 10 * micro + 30 * n for n in range(recipe.forwards)]
            loss = sum(engine(batch(recipe, number, rank)) for number in numbers)
            evaluate("between")
            if recipe.plain_backward and recipe.precision != "fp16":
                loss.backward()
            else:
                engine.backward(loss)
            engine.step()
        evaluate("after")
        seen.append((engine.last_step.loss, engine.last_step.grad_norm))
    seen.append(engine.params_sha256())
    engine.destroy()
    return seen
