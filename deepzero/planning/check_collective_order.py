"""Whether all ranks launch the same collectives in the same order: else they wait for each other for ever.

What a rank launches depends on the modules that it runs and on the layout, which is the same everywhere; its own number
decides only which bytes it sends. So ranks that run the same program launch the same, and rehearsing them all would
show one result thousands of times. What is rehearsed is each different program, and of every program the ranks at whose
number something could change: the first and the last, the ends of a node and of a partition, one in the middle.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from deepzero.config.strict import ConfigError
from deepzero.planning.dry_run import ClusterShape, DryRunResult, TrainStep, dry_run, launched


@dataclass(frozen=True)
class Difference:
    """The first collective in which a rank differs from the others."""

    rank: int
    reference: int
    number: int  # of the first collective that differs, from 1 on; 0: all are alike, and what is computed differs
    expected: str  # what the reference launches there, and for which module
    found: str

    def __str__(self) -> str:
        if self.number == 0:
            return (
                f"rank {self.rank} launches what the others launch, and computes something else: it has {self.found}, "
                f"where rank {self.reference} has {self.expected}"
            )
        return (
            f"rank {self.rank} leaves the others at collective {self.number}: it launches {self.found}, where rank "
            f"{self.reference} launches {self.expected}"
        )


def telling_ranks(world: ClusterShape, sizes: Sequence[int] = ()) -> list[int]:
    """The ranks at whose number something could change, ``sizes`` being those of partitions inside: hpZ's, MiCS's.

    Example:
        >>> telling_ranks(ClusterShape(1024, 8))
        [0, 7, 8, 512, 1023]
    """
    last = world.world_size - 1
    edges = {0, last, world.world_size // 2}
    for size in (world.ranks_of_host, *sizes):
        edges |= {size - 1, size}
    return sorted(rank for rank in edges if 0 <= rank <= last)


def skipping(program: TrainStep, module: str) -> TrainStep:
    """The same program, but for one module that gives back what it is given: a rank that has gone wrong."""

    def model() -> nn.Module:
        made = program.model()
        try:
            found = made.get_submodule(module)
        except AttributeError:
            names = ", ".join(name for name, _ in itertools.islice(made.named_modules(), 1, 9))
            raise ConfigError(f"no module {module!r} to skip; the model has {names} …") from None
        if type(found).forward is nn.Module.forward:
            kind = type(found).__name__
            raise ConfigError(f"module {module!r} to skip is a {kind}, which is never called; name one of those in it")
        found.forward = lambda value, *rest, **options: value
        return made

    return dataclasses.replace(program, model=model)


def compare(rehearsals: Sequence[DryRunResult], wrong: Collection[int] = ()) -> list[Difference]:
    """Every rank that does not launch, or does not compute gradients of, what most of them do.

    Ranks that are known to go ``wrong`` have no say: what the others do is right, however few they are.
    """
    right = [r for r in rehearsals if r.rank not in wrong] or list(rehearsals)
    paths = [(r.trail, sorted(r.gradients)) for r in right]
    # The first of those that most ranks share.
    reference = right[max(range(len(paths)), key=lambda k: (paths.count(paths[k]), -paths.index(paths[k])))]
    found = []
    for rehearsal in rehearsals:
        if rehearsal.trail != reference.trail:
            found.append(_difference(reference, rehearsal))
        elif sorted(rehearsal.gradients) != sorted(reference.gradients):
            expected, got = _other_gradients(reference.gradients, rehearsal.gradients)
            found.append(Difference(rehearsal.rank, reference.rank, 0, expected, got))
    return found


def _other_gradients(reference: list[str], other: list[str]) -> tuple[str, str]:
    """It launches the same, so that nobody waits; its part of some sums is zeros, or the others' is."""
    lacks = [name for name in dict.fromkeys(reference) if name not in other]
    named = lacks or [name for name in dict.fromkeys(other) if name not in reference]
    if not named:
        return f"{len(reference)} gradients", f"{len(other)} gradients of the same parameters"
    names = named[0] + (f" and {len(named) - 1} more" if len(named) > 1 else "")
    return ("one", f"no gradient of {names}") if lacks else ("none", f"a gradient of {names}")


def _difference(reference: DryRunResult, other: DryRunResult) -> Difference:
    pairs = itertools.zip_longest(_launches(reference), _launches(other), fillvalue=(("", "", 0, 0), "nothing more"))
    for number, ((key, expected), (theirs, found)) in enumerate(pairs, start=1):
        if key != theirs:
            return Difference(other.rank, reference.rank, number, expected, found)
    raise RuntimeError("the trails differ, and no collective does")


def _launches(rehearsal: DryRunResult) -> Iterator[tuple[tuple[str, str, int, int], str]]:
    """What is compared, and how it is called: with the module whose turn it is."""
    module = ""
    for event in rehearsal.events:
        if event.what == "fetch":
            module = event.kind.removeprefix("prefetch at ")
        elif event.what == "launch":
            names = rehearsal.name_of(event)
            size = f"of {event.sent.elements:,} elements" if event.sent is not None else ""
            what = " ".join(filter(None, (event.kind, event.where, names and f"({names})", size)))
            yield launched(event), f"{what} at {module}" if module else what


def check(
    program: TrainStep,
    world: ClusterShape,
    wrong: Mapping[int, str] | None = None,
    ranks: Sequence[int] | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> tuple[list[DryRunResult], list[Difference]]:
    """Rehearse ``ranks`` (None: the :func:`telling_ranks`), and those that go wrong, and compare them.

    ``wrong`` are modules that single ranks leave out. ``tell`` is called before each rehearsal, which may take some
    seconds. Returns the rehearsals, in the order of ranks, and what differs.
    """
    wrong, zero = dict(wrong or {}), program.config.zero
    sizes = [size for size in (zero.zero_hpz_partition_size, zero.mics_shard_size) if size > 1]
    chosen = telling_ranks(world, sizes) if ranks is None else list(ranks)
    if not chosen and not wrong:
        raise ConfigError("no rank to rehearse; name at least one")
    if set(chosen) <= set(wrong):  # a rank that goes right, to compare with
        chosen += [next((rank for rank in range(world.world_size) if rank not in wrong), min(wrong))]
    for rank in (*chosen, *wrong):
        if not 0 <= rank < world.world_size:
            raise ConfigError(f"rank {rank}: this world has ranks 0 to {world.world_size - 1}")
    found = []
    for rank in sorted({*chosen, *wrong}):
        tell(f"rehearsing rank {rank}" + (f" without {wrong[rank]}" if rank in wrong else ""))
        found.append(dry_run(skipping(program, wrong[rank]) if rank in wrong else program, world, rank))
    return found, compare(found, wrong)
