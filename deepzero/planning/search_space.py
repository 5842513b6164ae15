"""The question that ``autotune.py`` answers, and the settings among which it looks: all that the user has not fixed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from deepzero.comm.topology import find_nodes
from deepzero.config.engine import resolve_batch
from deepzero.config.run import RunConfig
from deepzero.config.strict import ConfigError
from deepzero.planning.clusters import Cluster
from deepzero.planning.dry_run import ClusterShape
from deepzero.planning.estimate import MakeProgram, Offloaded, Setting
from deepzero.utils.formatting import flatten

HEADROOM = 0.1
"""Part of a memory that is left free: on the device for CUDA's context, NCCL's buffers and what the caching allocator
loses by rounding and fragmentation; on the host for the system, the data and the processes themselves."""
OFFLOADS: dict[Offloaded, tuple[str, ...]] = {
    "none": (),
    "optimizer": ("zero.offload_optimizer.device=cpu",),
    "optimizer_and_param": ("zero.offload_optimizer.device=cpu", "zero.offload_param.device=cpu"),
}
FIRST_STAGE: dict[Offloaded, int] = {"none": 0, "optimizer": 1, "optimizer_and_param": 3}
FAMILIES = [(stage, offload) for offload in OFFLOADS for stage in range(FIRST_STAGE[offload], 4)]
"""Stages and what they offload."""
LOSSY = {"qwz": (3,), "qgz": (1, 2, 3), "all": (3,)}  # ZeRO++'s choices that change bits, and their stages
_STAGE, _OFFLOAD, _CHECKPOINTING = "zero.stage", "zero.offload_", "model.activation_checkpointing"
_MICRO, _GLOBAL = "train_micro_batch_size_per_gpu", "train_batch_size"
_BUCKETS = ("zero.reduce_bucket_size", "zero.allgather_bucket_size")
_PREFETCH = "zero.stage3_prefetch_bucket_size"
_ZEROPP = ("zeropp", "zero.zero_", "zero.mics_", "zero.quantization.", "comm.ranks_per_node")


@dataclass(frozen=True)
class Question:
    """One request for advice: what the user has chosen, the cluster, the limits of the search."""

    words: tuple[str, ...]  # the user's overrides, which stay
    compose: Callable[[Sequence[str]], RunConfig]  # overrides to settings: `deepzero.training.command_line.compose`
    make: MakeProgram
    cluster: Cluster
    world: ClusterShape
    headroom: float = HEADROOM
    global_batch: int | None = None
    """Sequences of an optimizer step; None: as the overrides say, or whatever is fastest."""
    lossy: bool = False  # try what changes bits
    rehearsals: int = 12  # at most so many
    seconds: float = 50.0  # no rehearsal begins that will not be over by then; but for the first
    tell: Callable[[str], None] = lambda _: None

    @property
    def device_bytes(self) -> float:
        """Bytes of a device that a rank may use."""
        return self.cluster.memory_bytes * (1 - self.headroom)

    @property
    def host_bytes(self) -> float:
        """What the ranks of a node may use of its host."""
        return self.cluster.host_bytes * (1 - self.headroom)


def words_of(setting: Setting) -> list[str]:
    """A setting as overrides, all of it."""
    stage, micro_batch = f"{_STAGE}={setting.stage}", f"{_MICRO}={setting.micro_batch}"
    checkpointing = f"{_CHECKPOINTING}={str(setting.checkpointing).lower()}"
    return [stage, *OFFLOADS[setting.offload], checkpointing, micro_batch, *setting.extra]


class Space:
    """The settings that are left when the user has chosen."""

    def __init__(self, question: Question) -> None:
        self.question, self.world_size = question, question.world.world_size
        self.run = question.compose(question.words)
        plain = question.compose([word for word in question.words if word.startswith("model=")])
        self.typed = {word.lstrip("+~").partition("=")[0] for word in question.words}
        one, other = (flatten(dataclasses.asdict(some)) for some in (self.run, plain))
        self.changed = {key.removeprefix("engine.") for key in one if one[key] != other.get(key)}
        engine = self.run.engine
        self.nodes = find_nodes(engine.comm.ranks_per_node or question.world.ranks_of_host, self.world_size)
        if question.global_batch is not None and engine.train_batch_size not in (None, question.global_batch):
            raise ConfigError(
                f"--global-batch {question.global_batch}: train_batch_size={engine.train_batch_size} says another; "
                "leave one of them out"
            )
        self.global_batch = question.global_batch or engine.train_batch_size
        if self.global_batch is not None:  # else an error says what would divide
            resolve_batch(dataclasses.replace(engine, train_batch_size=self.global_batch), self.world_size)

    def fixed(self, name: str) -> bool:
        """Whether the user has chosen a key: typed it, or a group or experiment that sets it to another value.

        A name that ends in ``_`` or ``.`` stands for all keys that begin so.
        """
        if name == _OFFLOAD and "offload" in self.typed:
            return True
        many = name.endswith(("_", "."))
        return any(key.startswith(name) if many else key == name for key in self.typed | self.changed)

    def families(self) -> list[tuple[int, Offloaded]]:
        """Stages and what they offload."""
        zero, found = self.run.engine.zero, FAMILIES
        if self.fixed(_OFFLOAD):
            given: Offloaded = "optimizer_and_param" if zero.offload_param.device != "none" else "optimizer"
            given = given if zero.offload_optimizer.device != "none" else "none"
            found = [family for family in found if family[1] == given]
        return [family for family in found if not self.fixed(_STAGE) or family[0] == zero.stage]

    def checkpointing(self) -> list[bool]:
        """With, without, or as it was chosen; other people's models keep theirs."""
        now = self.run.model.activation_checkpointing
        return [now] if self.fixed(_CHECKPOINTING) or self.run.model.library != "own" else [False, True]

    def batches(self) -> list[tuple[int, int]]:
        """Micro-batch and accumulation, the smallest micro-batch first."""
        engine = self.run.engine
        micro, steps = engine.train_micro_batch_size_per_gpu, engine.gradient_accumulation_steps
        if self.global_batch is None:
            sizes = [micro] if micro is not None else [1 << power for power in range(9)]
            return [(size, steps or 1) for size in sizes]
        each = self.global_batch // self.world_size
        pairs = [(size, each // size) for size in range(1, each + 1) if each % size == 0]
        return [pair for pair in pairs if micro in (None, pair[0]) and steps in (None, pair[1])]

    def words(self, setting: Setting) -> tuple[str, ...]:
        """The user's, and what makes the setting of them."""
        ours: list[str] = []
        if not self.fixed(_STAGE):
            ours.append(f"{_STAGE}={setting.stage}")
        if not self.fixed(_OFFLOAD):
            ours += OFFLOADS[setting.offload]
        if not self.fixed(_CHECKPOINTING) and setting.checkpointing != self.run.model.activation_checkpointing:
            ours.append(f"{_CHECKPOINTING}={str(setting.checkpointing).lower()}")
        if self.run.engine.train_micro_batch_size_per_gpu is None:
            ours.append(f"{_MICRO}={setting.micro_batch}")
        if self.question.global_batch is not None and self.run.engine.train_batch_size is None:
            ours.append(f"{_GLOBAL}={self.question.global_batch}")
        return (*self.question.words, *ours, *setting.extra)

    def variants(self, best: Setting, limit: int, numel: int) -> list[tuple[str, ...]]:
        """Further overrides to try on the fastest setting so far, whose buckets have up to ``limit`` elements."""
        zero = self.run.engine.zero
        found: list[tuple[str, ...]] = []
        if not any(map(self.fixed, _BUCKETS)):
            sizes = [limit // 2] if limit < numel else []
            sizes += [2 * limit] if limit == min(zero.reduce_bucket_size, zero.allgather_bucket_size) else []
            found += [tuple(f"{key}={size}" for key in _BUCKETS) for size in sizes]
        if best.stage == 3 and not self.fixed(_PREFETCH) and zero.stage3_prefetch_bucket_size < limit:
            found.append((f"{_PREFETCH}={limit}",))
        if any(map(self.fixed, _ZEROPP)):
            return found
        size, several = self.nodes.per_node, self.nodes.count > 1 and self.nodes.per_node > 1
        node, hpz = f"comm.ranks_per_node={size}", f"zero.zero_hpz_partition_size={size}"
        if best.stage == 3 and several:
            found.append(("zeropp=hpz", hpz, node))
            if best.offload != "optimizer_and_param":
                found.append(("zeropp=mics", f"zero.mics_shard_size={size}", node))
        for name, stages in LOSSY.items() if self.question.lossy and self.world_size > 1 else ():
            if best.stage in stages and (several or name != "all"):
                found.append((f"zeropp={name}", *((hpz, node) if name == "all" else ())))
        return found
