"""DeepSpeed's methods of an engine for its batches: a loader of them, and their sizes.

:class:`~deepzero.compat.deepspeed_engine.DeepSpeedEngine` has these functions as methods.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler

from deepzero.compat.engine_getters import EngineGetters
from deepzero.config.engine import resolve_batch
from deepzero.config.strict import ConfigError, convert, require
from deepzero.device import accelerator_of
from deepzero.utils.errors import MisuseError

ROUTES = ("train", "eval", "predict")
"""What a loader of ``deepspeed_io`` is for."""


def _count(call: str, name: str, value: Any) -> int:
    """What is given as a number of sequences, or a ConfigError."""
    count: int = convert(int, value, f"{call}: {name}")
    require(count >= 1, f"{call}: {name}", value, "must be at least 1 sequence")
    return count


def refuse_stream(call: str, dataset: Any, world_size: int) -> None:
    """Raise a ConfigError for a dataset that several ranks cannot share out."""
    if isinstance(dataset, IterableDataset) and world_size > 1:
        raise ConfigError(
            f"{call}: an IterableDataset has no indices to share out: each of {world_size} ranks would train on the "
            "same samples. Let its iterator give this rank's share (torch.distributed.get_rank()), and make a torch "
            "DataLoader of it instead"
        )


def deepspeed_io(
    self: EngineGetters, dataset: Dataset[Any], batch_size: int | None = None, route: str = "train",
    pin_memory: bool = True, data_sampler: Sampler[Any] | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None, num_local_io_workers: int | None = None,
) -> DataLoader[Any]:  # fmt: skip
    """A loader of this rank's micro-batches, as many on every rank.

    The last one may be smaller, and the first samples come twice where the ranks do not divide their number; with
    ``dataloader_drop_last`` both are dropped instead. The route ``train`` has an order that
    ``loader.sampler.set_epoch`` shuffles anew; others keep the dataset's. ``collate_fn`` is ``initialize``'s where
    none is given. Raises a ConfigError for a route that is none and for an iterable dataset on several ranks.
    """
    if route not in ROUTES:
        raise ConfigError(f"deepspeed_io(route={route!r}): routes are {', '.join(ROUTES)}")
    if data_sampler is None:
        refuse_stream("deepspeed_io", dataset, self.world_size)
    collate_fn = collate_fn or self.collate_fn
    drop_last = self.config.dataloader_drop_last
    if data_sampler is None and not isinstance(dataset, IterableDataset):
        ranks, shuffle = (self.world_size, self.global_rank), route == "train"
        data_sampler = DistributedSampler(dataset, *ranks, shuffle=shuffle, drop_last=drop_last)
    return DataLoader(
        dataset, self.batch.micro_batch if batch_size is None else _count("deepspeed_io", "batch_size", batch_size),
        sampler=data_sampler, collate_fn=collate_fn,
        pin_memory=pin_memory and accelerator_of(self.device).has_streams, num_workers=num_local_io_workers or 0,
        drop_last=drop_last,
    )  # fmt: skip


def set_train_batch_size(self: EngineGetters, train_batch_size: int) -> None:
    """Let further optimizer steps have other numbers of micro-batches. Between two steps; on every rank.

    What the report predicts is still of the number that the engine was built with. Raises a ConfigError where it
    does not divide, and a MisuseError within a step or where wider sums have no room (stages 0 and 1 in 16 bits).
    """
    train_batch_size = _count("set_train_batch_size", "train_batch_size", train_batch_size)
    whole = dataclasses.replace(self.config, train_batch_size=train_batch_size, gradient_accumulation_steps=None,
                                train_micro_batch_size_per_gpu=self.batch.micro_batch)  # fmt: skip
    batch, dtypes = resolve_batch(whole, self.world_size), self.zero.dtypes
    if self.passes.count:
        raise MisuseError("set_train_batch_size within an optimizer step: call it after engine.step()")
    narrow = dtypes.compute != dtypes.accumulation and all(flat is None for flat in self.stage.gradients.unreduced.flat)
    if batch.accumulation > 1 and not self.zero.stage.gradients.every_pass and narrow:
        raise MisuseError(
            f"set_train_batch_size({train_batch_size}): the engine was built for one micro-batch, and the sum of "
            f"{batch.accumulation} would be kept in {dtypes.compute}. Start with gradient_accumulation_steps of at "
            "least 2, or use zero stage 2 or 3"
        )
    self.batch = batch
    self.micro_steps -= self.micro_steps % batch.accumulation  # the next micro-batch is the first of its step


def set_train_micro_batch_size(self: EngineGetters, micro_batch_size: int) -> None:
    """Say how many sequences a micro-batch has from now on, for the count of samples. On every rank."""
    micro_batch_size = _count("set_train_micro_batch_size", "micro_batch_size", micro_batch_size)
    batch = self.batch
    samples = micro_batch_size * batch.accumulation * batch.world_size
    self.batch = dataclasses.replace(batch, micro_batch=micro_batch_size, global_batch=samples)
