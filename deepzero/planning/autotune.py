"""Which stage, which offload, which micro-batch: every setting that fits, the fastest first, by rehearsal.

In order: *fix* what the user has chosen · *estimate* every setting of what is left (``estimate.py``) and strike out
what cannot fit · *rehearse* the best of each stage and offload, with a smaller micro-batch where the first did not fit
after all · *refine* the fastest: bucket sizes, looking ahead, hpZ and MiCS between nodes; what changes bits (qwZ, qgZ)
only when it is asked for · *sort* by tokens per second.

A prediction that is shown comes from a rehearsal on the cluster's numbers, as ``tools.simulate`` would give it. Only
where a step has many micro-batches, two and three of them are rehearsed, and the rest is a straight line: each further
one launches, computes and waits for the same.
"""

from __future__ import annotations

import dataclasses
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deepzero.comm.ledger import side_of
from deepzero.config.engine import resolve_batch
from deepzero.config.strict import ConfigError
from deepzero.planning import plan
from deepzero.planning.dry_run import dry_run
from deepzero.planning.estimate import Estimate, Estimator, Offloaded, Setting
from deepzero.planning.search_space import FAMILIES, Question, Space, words_of
from deepzero.planning.simulate import Simulated, simulate
from deepzero.utils.formatting import short_bytes, short_number

STRAIGHT = 3  # micro-batches of a step up to which it is rehearsed as it is
SURE = 0.85  # of estimated activations: so much there will be at least
WAITS = 0.05  # of the step: a fastest setting that waits longer is tried with a larger micro-batch
ENOUGH = 0.99  # of the best throughput: a smaller micro-batch that reaches it is taken
NOTHING_FITS = "nothing fits"


@dataclass(frozen=True)
class Option:
    """One setting, rehearsed."""

    setting: Setting
    words: tuple[str, ...]  # overrides that make it: the user's, then ours
    simulated: Simulated
    step_seconds: float
    tokens: int  # of an optimizer step
    straight_line: bool  # drawn out from two and three micro-batches

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second over all ranks."""
        return self.tokens / self.step_seconds


@dataclass(frozen=True)
class Refused:
    """A stage and offload of which nothing fits, or that does not go with what was given."""

    setting: Setting
    memory: dict[str, int]  # bytes of one rank by category, at the smallest; empty where `reason` says all
    too_much: float  # bytes beyond what may be used, of a device or of a node's host; 0 where `reason` says all
    on_host: bool
    rehearsed: bool
    reason: str = ""
    buffers: int = 0  # bytes that come on top by estimate, where nothing was rehearsed


def rehearse_option(question: Question, setting: Setting, words: Sequence[str]) -> Option:
    """One setting on the cluster; a ConfigError where the words do not go together, or not with so many ranks."""
    run, world = question.compose(words), question.world
    batch = resolve_batch(run.engine, world.world_size)
    each = run.model.block_size * batch.micro_batch * world.world_size

    def simulated(accumulation: int) -> Simulated:
        engine = run.engine
        if accumulation != batch.accumulation:
            micro, steps = batch.micro_batch, accumulation
            alone = dataclasses.replace(engine, train_batch_size=None, train_micro_batch_size_per_gpu=micro)
            engine = dataclasses.replace(alone, gradient_accumulation_steps=steps)
        program = question.make(dataclasses.replace(run, engine=engine), world.world_size)
        return simulate(dry_run(program, world), question.cluster, each * accumulation)

    found = simulated(min(batch.accumulation, STRAIGHT))
    seconds, tokens, further = found.timeline.seconds, each * batch.accumulation, batch.accumulation - STRAIGHT
    if further > 0:
        seconds += further * (seconds - simulated(STRAIGHT - 1).timeline.seconds)
    return Option(setting, tuple(words), found, seconds, tokens, further > 0)


class Search:
    """Finds the settings that fit, and how fast they are: the advice, when it has been run."""

    def __init__(self, question: Question) -> None:
        self.question, self.space = question, Space(question)
        self.began = time.perf_counter()
        question.tell("probing the model")
        self.estimator = Estimator(self.space.run, question.make, question.cluster, question.world)
        self.options: list[Option] = []  # what fits, the fastest first
        self.refused: list[Refused] = []
        self.waiting: list[Estimate] = []  # what may fit, and was not rehearsed
        self.help: list[str] = []  # where nothing fits: what would
        self.rehearsed, self.longest, self.took = 0, 0.0, 0.0
        self.extra: dict[tuple[tuple[int, Offloaded], bool], float] = {}
        """Bytes by which rehearsals have shown an estimate to be too small."""

    def run(self) -> Search:
        """Estimate, rehearse, refine, sort; returns itself."""
        chosen = []
        for family in self.space.families():
            candidates = self._candidates(family)
            if candidates:
                chosen.append(candidates)
                continue
            nearest = min(self._smallest([family], self.space.checkpointing()), key=lambda one: self._beyond(one)[0])
            refused = Refused(nearest.setting, nearest.memory, *self._beyond(nearest), False, buffers=nearest.buffers)
            self.refused.append(refused)
        for candidates in sorted(chosen, key=lambda some: -some[0].tokens_per_second):
            if self._may_rehearse(refining=False):
                self._settle(candidates)
            else:
                self.waiting.append(candidates[0])
        self._sort()
        self._grow()
        if self.options:
            best = self.options[0].setting
            for extra in self.space.variants(best, self.estimator.limit, self.estimator.numel):
                if self._may_rehearse(refining=True):
                    self._try(dataclasses.replace(best, extra=extra))
            self._sort()
        if not self.options and not self.waiting:
            self.help = self._help()
        self.took = time.perf_counter() - self.began
        return self

    def _candidates(self, family: tuple[int, Offloaded]) -> list[Estimate]:
        """Settings of a family that may fit, in the order in which they are to be tried: the most promising first."""
        found = []
        for checkpointing in self.space.checkpointing():
            for micro_batch, accumulation in self.space.batches():
                estimate = self.estimator(Setting(*family, checkpointing, micro_batch, accumulation))
                if self._beyond(estimate)[0] <= 0:  # a larger one may: with one micro-batch a step nothing is summed
                    found.append(estimate)
        if not found:
            return []
        fits = [one for one in found if self._likely(one)] or found
        enough = ENOUGH * max(one.tokens_per_second for one in fits)
        fast = [one for one in fits if one.tokens_per_second >= enough]
        first = min(fast, key=lambda one: (one.device_bytes, one.setting.micro_batch))
        rest = [one for one in found if one is not first]
        return [first, *sorted(rest, key=lambda one: -one.tokens_per_second)]

    def _beyond(self, estimate: Estimate) -> tuple[float, bool]:
        """Bytes too many, at the least; and whether it is the host that has too few."""
        sure = estimate.device_bytes - round((1 - SURE) * estimate.memory["activations"])
        host = estimate.host_bytes * self.estimator.nodes.per_node - self.question.host_bytes
        device = sure - self.question.device_bytes
        return (device, False) if device >= host else (host, True)

    def _likely(self, estimate: Estimate) -> bool:
        key = (estimate.setting.family, estimate.setting.checkpointing)
        extra = self.extra.get(key, estimate.buffers)
        return estimate.device_bytes + extra <= self.question.device_bytes and self._beyond(estimate)[0] <= 0

    def _may_rehearse(self, refining: bool) -> bool:
        """One always; a further one where it will be over in time, by the longest so far, and leaves some to refine."""
        until = time.perf_counter() - self.began + self.longest
        in_time = until < self.question.seconds * (1.0 if refining else 0.75)
        return self.rehearsed < self.question.rehearsals and (in_time or not self.rehearsed)

    def _settle(self, candidates: list[Estimate]) -> None:
        """Rehearse until one fits; after one that does not, what it has shown to be too large is passed over."""
        last: Refused | None = None
        remaining = list(candidates)
        while remaining and (last is None or self._may_rehearse(refining=False)):
            estimate = remaining.pop(0)
            if (last := self._try(estimate.setting, estimate)) is None:
                return
            if last.reason or last.on_host:
                break
            left = [one for one in remaining if one.device_bytes < estimate.device_bytes]
            # Where none looks as if it did, the smallest decides.
            likely = [one for one in left if self._likely(one)]
            remaining = likely or sorted(left, key=lambda one: one.device_bytes)[:1]
        if last is not None:
            self.refused.append(last)

    def _try(self, setting: Setting, estimate: Estimate | None = None) -> Refused | None:
        """Rehearse one setting, and note it where it fits; returns why it does not, or None."""
        self.rehearsed += 1
        words = self.space.words(setting)
        self.question.tell(f"rehearsing {self.rehearsed}: {' '.join(words[len(self.question.words) :]) or 'as given'}")
        began = time.perf_counter()
        try:
            option = rehearse_option(self.question, setting, words)
        except ConfigError as error:
            return Refused(setting, {}, 0.0, False, True, str(error))
        self.longest = max(self.longest, time.perf_counter() - began)
        simulated = option.simulated
        if estimate is not None:
            too_small = simulated.device_bytes - estimate.device_bytes
            self.extra[setting.family, setting.checkpointing] = too_small
        over = simulated.device_bytes - self.question.device_bytes
        host = simulated.host_bytes_per_node - self.question.host_bytes
        if max(over, host) > 0:
            return Refused(setting, plan.memory(simulated.rehearsal), over if over > 0 else host, over <= 0, True)
        self.options.append(option)
        return None

    def _sort(self) -> None:
        """The fastest first; of equals, one without offload, then the one that holds less, then the plainer one."""
        speed = lambda one: float(f"{one.tokens_per_second:.3g}")
        rank = lambda one: (-speed(one), one.setting.offload != "none", one.simulated.device_bytes, len(one.words))
        self.options.sort(key=rank)

    def _grow(self) -> None:
        """Larger micro-batches for the fastest, as long as it waits much and gains by them: estimates hide too much."""
        while (options := self.options) and options[0].simulated.exposed_share > WAITS:
            best = options[0].setting
            larger = next((size for size in self.space.batches() if size[0] > best.micro_batch), None)
            if larger is None or not self._may_rehearse(refining=True):
                return
            setting = dataclasses.replace(best, micro_batch=larger[0], accumulation=larger[1])
            estimate = self.estimator(setting)
            if not self._likely(estimate) or self._try(setting, estimate) is not None:
                return
            self._sort()
            if options[0].setting == best:
                return

    def _help(self) -> list[str]:
        """By estimate: more ranks, other settings than those that were given, more memory."""
        said, here = [], self.estimator
        for power in range(1, 11):
            size = self.space.world_size << power
            self.estimator = here.of(dataclasses.replace(self.question.world, world_size=size))
            if any(self._likely(one) for one in self._smallest(self.space.families(), self.space.checkpointing())):
                said.append(f"{size} ranks instead of {self.space.world_size}")
                break
        self.estimator = here
        both = [False, True] if self.space.run.model.library == "own" else self.space.checkpointing()
        fits = [one for one in self._smallest(FAMILIES, both, micro_batch=1) if self._likely(one)]
        if fits:
            words = " ".join(words_of(max(fits, key=lambda one: one.tokens_per_second).setting))
            said.append(f"{words}, which the given settings exclude")
        device = [one.too_much + one.buffers for one in self.refused if one.too_much > 0 and not one.on_host]
        if device:
            needed = (self.question.device_bytes + min(device)) / (1 - self.question.headroom)
            now = short_bytes(self.question.cluster.memory_bytes)
            said.append(f"devices of about {short_bytes(needed)} instead of {now}")
        return said

    def _smallest(
        self, families: Sequence[tuple[int, Offloaded]], checkpointing: Sequence[bool], micro_batch: int | None = None
    ) -> list[Estimate]:
        batches = self.space.batches() if micro_batch is None else [(micro_batch, self.space.batches()[0][1])]
        settings = [Setting(*f, kept, *batch) for f in families for kept in checkpointing for batch in batches]
        return [self.estimator(setting) for setting in settings]


# ---- advice as something to read, and the command that starts what it advises ----------------------------------------


def command(option: Option, question: Question) -> str:
    """What to type: ``train.py`` starts the ranks of one machine by itself, torchrun those of several."""
    world, words = question.world, [word for word in option.words if not word.lstrip("+").startswith("launch.nproc=")]
    if (nodes := world.world_size // world.ranks_of_host) == 1:
        return f"python train.py launch.nproc={world.world_size} {shlex.join(words)}"
    start = f"torchrun --nnodes={nodes} --nproc-per-node={world.ranks_of_host}"
    return f"{start} --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 train.py {shlex.join(words)}"


def text(advice: Search) -> str:
    """Returns the advice as text for a terminal."""
    question = advice.question
    world, cluster = question.world, question.cluster
    nodes = world.world_size // world.ranks_of_host
    lines = [
        f"{advice.estimator.numel:,} parameters; {cluster.name}: {world.world_size} ranks, "
        f"{nodes} node{'s' if nodes > 1 else ''} of {world.ranks_of_host}",
        f"to be used: {short_bytes(question.device_bytes)} of {short_bytes(cluster.memory_bytes)} on a device, "
        f"{short_bytes(question.host_bytes)} of {short_bytes(cluster.host_bytes)} in a node's host memory",
    ]
    if advice.options:
        lines += ["", "what fits, the fastest first", _ROW.format(*_COLUMNS)]
        lines += [_row(number, option) for number, option in enumerate(advice.options, start=1)]
        if any(option.straight_line for option in advice.options):
            lines.append("     ~ drawn out from two and three rehearsed micro-batches")
    if advice.waiting:
        lines += ["", "what may fit, by estimate; not rehearsed for want of --seconds or --rehearsals"]
        lines += [
            f"  {_name(one.setting)}: about {short_number(one.tokens_per_second)} tokens/s, "
            f"{short_bytes(one.device_bytes + one.buffers)}"
            for one in advice.waiting
        ]
    if advice.refused:
        lines += ["", "what does not, at its smallest", *map(_refused, advice.refused)]
    return "\n".join([*lines, "", *_end(advice)])


def _end(advice: Search) -> list[str]:
    if advice.options:
        best = advice.options[0]
        kinds = list(best.simulated.timeline.exposed_by_kind().items())[:3]
        waits = ", ".join(f"{seconds * 1e3:.3g} ms for {kind}" for kind, seconds in kinds)
        share = f"{best.simulated.exposed_share:.0%} of the step it waits" + (f": {waits}" if waits else "")
        return [f"the first: {share}", "run", f"  {command(best, advice.question)}"]
    if advice.waiting:
        return ["nothing was rehearsed that fits; give it more --seconds or --rehearsals"]
    end, short = NOTHING_FITS, [one for one in advice.refused if one.too_much]
    if short:
        nearest = min(short, key=lambda one: one.too_much + one.buffers)
        lacks = ("" if nearest.rehearsed else "about ") + short_bytes(nearest.too_much + nearest.buffers)
        end += f"; nearest is {' '.join(words_of(nearest.setting))}, which lacks {lacks} on {_where(nearest)}"
    return [end, *(f"what would help: {one}" for one in advice.help)]


_COLUMNS = ("", "stage", "offload", "micro x accum", "ckpt", "step", "tokens/s", "device", "host/node", "besides")
_ROW = "{:>3}  {:<6}{:<20}{:>14}  {:<5}{:>11}{:>10}{:>10}{:>10}  {}"


def _row(number: int, option: Option) -> str:
    setting, simulated = option.setting, option.simulated
    return _ROW.format(
        number,
        setting.stage,
        setting.offload,
        f"{setting.micro_batch} x {setting.accumulation}",
        "yes" if setting.checkpointing else "no",
        f"{'~' if option.straight_line else ''}{option.step_seconds * 1e3:.4g} ms",
        short_number(option.tokens_per_second),
        short_bytes(simulated.device_bytes),
        short_bytes(simulated.host_bytes_per_node) if simulated.host_bytes_per_node else "-",
        " ".join(setting.extra),
    ).rstrip()


def _name(setting: Setting) -> str:
    offload = setting.offload.replace("_", " ")
    return f"stage {setting.stage}" + ("" if offload == "none" else f", {offload} in host memory")


def _where(refused: Refused) -> str:
    return "a node's host memory" if refused.on_host else "a device"


def _refused(refused: Refused) -> str:
    if refused.reason:
        return f"  {_name(refused.setting)}: {refused.reason}"
    side = {k: v for k, v in refused.memory.items() if side_of(k) == ("host" if refused.on_host else "device") and v}
    largest = sorted(side.items(), key=lambda item: -item[1])[:3]
    parts = ", ".join(f"{category} {short_bytes(size)}" for category, size in largest)
    too_much = ("" if refused.rehearsed else "at least ") + short_bytes(refused.too_much)
    return f"  {_name(refused.setting)}: {too_much} too much for {_where(refused)}; a rank has {parts}"


def as_dict(advice: Search) -> dict[str, Any]:
    """Everything, for a JSON file."""
    question = advice.question
    options = [
        {
            **dataclasses.asdict(option.setting),
            **option.simulated.as_dict(),
            "step_seconds": option.step_seconds,
            "tokens_per_second": option.tokens_per_second,
            "straight_line": option.straight_line,
            "memory": plan.memory(option.simulated.rehearsal),
            "overrides": list(option.words),
            "command": command(option, question),
        }
        for option in advice.options
    ]
    return {
        "parameters": advice.estimator.numel,
        "cluster": dataclasses.asdict(question.cluster),
        "world_size": question.world.world_size,
        "ranks_per_node": question.world.ranks_of_host,
        "usable_device_bytes": question.device_bytes,
        "usable_host_bytes_per_node": question.host_bytes,
        "options": options,
        "not_rehearsed": [{**dataclasses.asdict(one), "device_bytes": one.device_bytes} for one in advice.waiting],
        "refused": [dataclasses.asdict(one) for one in advice.refused],
        "help": advice.help,
        "seconds": advice.took,
    }
