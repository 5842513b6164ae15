"""A small model and a training loop that runs on the ranks of the pool. Shared by the tests of the engine."""

import contextlib
import copy
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import deepzero
from deepzero.comm import process_group

VOCAB, WIDTH, LENGTH = 40, 24, 8


class TinyModel(nn.Module):
    """Embedding, two blocks of odd sizes (nothing divides by 3 or 64), tied head: padding and tying are exercised."""

    def __init__(self, hidden: int = 37) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, hidden), nn.GELU(), nn.Linear(hidden, WIDTH))
            for _ in range(2)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def through(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x + block(x)

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = self.through(block, x)
        return self.head(self.norm(x)).float()

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Any:
        return nn.functional.cross_entropy(self.logits(ids).flatten(0, 1), labels.flatten())


class Checkpointed(TinyModel):
    """Blocks are run again in the backward pass, in one of torch's two ways."""

    reentrant = False

    def through(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x + checkpoint(block, x, use_reentrant=self.reentrant)


class Reentrant(Checkpointed):
    reentrant = True


class Wide(TinyModel):
    """Weights of 9,600 elements: several ranks have a part of each, also where a part is whole blocks of a disk."""

    def __init__(self) -> None:
        super().__init__(400)


KINDS = {"plain": TinyModel, "checkpoint": Checkpointed, "reentrant": Reentrant, "wide": Wide}


def make_model(seed: int = 0) -> TinyModel:
    """The same values on every rank and in every call."""
    torch.manual_seed(seed)
    return TinyModel()


def make_batch(step: int, sequences: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The global batch of a step: ids and labels ``[sequences, LENGTH]``, the same on every rank."""
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(0, VOCAB, (sequences, LENGTH + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def my_micro_batches(step: int, rank: int, world: int, micro: int, accumulation: int) -> list[tuple[torch.Tensor, ...]]:
    """This rank's micro-batches of a step."""
    ids, labels = make_batch(step, micro * accumulation * world)
    chunks = []
    for k in range(accumulation):
        lo = (k * world + rank) * micro
        chunks.append((ids[lo : lo + micro], labels[lo : lo + micro]))
    return chunks


WHOLE = {"stage3_param_persistence_threshold": 0}
"""Stage 3 with every parameter partitioned."""

BASE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 0.5,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
}


def config(**changes: Any) -> dict[str, Any]:
    """``BASE`` changed: ``stage``, ``bucket``, ``overlap``, ``precision``, ``reduce``, ``chaos`` or top-level keys."""
    out = copy.deepcopy(BASE)
    zero = {"stage": changes.pop("stage", 0)}
    if (bucket := changes.pop("bucket", None)) is not None:
        zero["reduce_bucket_size"] = bucket
    if changes.pop("overlap", False):
        zero["overlap_comm"] = True
    zero.update(changes.pop("zero", {}))
    out["zero_optimization"] = zero
    if (precision := changes.pop("precision", "fp32")) == "bf16":
        out["bf16"] = {"enabled": True}
    elif precision == "fp16":
        out["fp16"] = {"enabled": True, **changes.pop("fp16", {})}
    out["comm"] = {"reduce": changes.pop("reduce", "exact")}
    if (chaos := changes.pop("chaos", None)) is not None:
        out["comm"]["chaos"] = {"enabled": True, "seed": chaos, "max_delay_ms": 0.5}
    out.update(changes)
    return out


def train(
    rank: int, world: int, settings: dict[str, Any], steps: int = 20, kind: Any = "plain",
    plain_backward: bool = False, evaluated: bool = False,
) -> tuple[tuple[Any, ...], dict[str, Any]]:  # fmt: skip
    """Train a model of ``KINDS``, or what a call makes (``init``: a plain one that ``zero.Init`` has cut).

    Returns everything that must be the same bits, losses, norms and the parameters' hash, and the engine's report.
    ``evaluated``: before each micro-batch there is an evaluation, whose loss is one of the losses.
    """
    torch.manual_seed(0)
    with deepzero.zero.Init(enabled=kind == "init"):
        model = kind() if callable(kind) else KINDS.get(kind, TinyModel)()
    engine, *_ = deepzero.initialize(model=model, config=settings)
    losses, norms = [], []
    accumulation, micro = engine.gradient_accumulation_steps(), engine.train_micro_batch_size_per_gpu()
    for step in range(steps):
        for ids, labels in my_micro_batches(step, rank, world, micro, accumulation):
            if evaluated:
                with torch.no_grad():
                    losses.append(float(engine(*make_batch(step, 2))))
            loss = engine(ids, labels)
            if plain_backward:
                loss.backward()
            else:
                engine.backward(loss)
            engine.step()
        losses.append(engine.last_step.loss)
        norms.append((engine.last_step.grad_norm, engine.last_step.grad_norm_clipped))
    return (losses, norms, engine.params_sha256()), engine.report()


def train_each(rank: int, world: int, cases: list[Any], steps: int = 20, *how: bool) -> list[Any]:
    """:func:`train` for each case: its settings, or its settings and its model's kind."""
    each = [case if isinstance(case, tuple) else (case, "plain") for case in cases]
    return [train(rank, world, settings, steps, kind, *how) for settings, kind in each]


def check_same_bits(
    ranks: Any, cases: list[Any], steps: int = 20, world_size: int = 2, evaluated: bool = False
) -> tuple[Any, list[Any]]:
    """Train each case on every rank: all give the first one's bits. Returns these, and rank 0's reports."""
    results = ranks.run(train_each, cases, steps, False, evaluated, world_size=world_size, timeout=110)
    reference = results[0][0][0]
    for per_rank in results:
        for number, (bits, _) in enumerate(per_rank):
            assert bits == reference, f"case {number} differs"
    return reference, [report for _, report in results[0]]


SGD = {"type": "SGD", "params": {"lr": 0.1}}


def scripted(module: nn.Module) -> nn.Module:
    """What torch's deprecated compiler makes of it, without the warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(module)


def start(model: nn.Module, **changes: Any) -> deepzero.Engine:
    engine, *_ = deepzero.initialize(model=model, config=config(**changes))
    return engine


def built(settings: dict[str, Any], model: Any = make_model, **given: Any) -> deepzero.Engine:
    """An engine over ``model``, or over what ``model()`` makes of seed 0."""
    torch.manual_seed(0)
    made = model if isinstance(model, nn.Module) else model()
    return deepzero.initialize(model=made, config=settings, **given)[0]


def step_on(engine: deepzero.Engine, *batch: Any) -> None:
    step_from(engine, engine(*batch))


def step_from(engine: deepzero.Engine, loss: torch.Tensor) -> None:
    engine.backward(loss)
    engine.step()


def one_step(engine: deepzero.Engine, rank: int, world: int, step: int = 0) -> Any:
    """One optimizer step on the data of ``step``; its record."""
    for ids, labels in my_micro_batches(step, rank, world, engine.batch.micro_batch, engine.batch.accumulation):
        step_on(engine, ids.to(engine.device), labels.to(engine.device))
    return engine.last_step


def go(engine: deepzero.Engine, rank: int, world: int, first: int, last: int) -> list[float]:
    """The steps on the data of ``first`` to ``last`` - 1; their losses."""
    return [one_step(engine, rank, world, step).loss for step in range(first, last)]


def same_in_stages_2_and_3(make: Any, step: Any, steps: int = 3, **changes: Any) -> None:
    """``step`` shows the same, and leaves the same bits, in stage 2 and in stage 3 with all parameters partitioned."""
    outcomes = []
    for stage in (2, 3):
        torch.manual_seed(0)
        engine = start(make(stage), **{"stage": stage, "bucket": 700, "zero": WHOLE, **changes})
        outcomes.append(([step(engine, number) for number in range(steps)], engine.params_sha256()))
        assert stage == 2 or engine.stage.coordinator.training.dropped == 0
        engine.destroy()
    assert outcomes[0] == outcomes[1]


def check_alike(value: Any) -> None:
    """All ranks have this value."""
    everyone = process_group.all_gather_object(value)
    assert everyone == [value] * len(everyone)


def is_gathered(param: nn.Parameter) -> bool:
    """Whether the bucket of a partitioned parameter is on this rank, or on its way, shown or not."""
    return param._record.placed()[0].status is not deepzero.zero.ZeroParamStatus.NOT_AVAILABLE  # type: ignore[attr-defined]


def as_predicted(communication: dict[str, Any]) -> None:
    """Every kind of communication was counted as it was predicted."""
    for kind, counts in communication.items():
        assert counts["measured"] == pytest.approx(counts["predicted"]), kind


@contextlib.contextmanager
def log_lines(name: str = "deepzero") -> Iterator[list[str]]:
    """What is logged inside, on this rank."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(name).addHandler(handler)
    try:
        yield lines
    finally:
        logging.getLogger(name).removeHandler(handler)
