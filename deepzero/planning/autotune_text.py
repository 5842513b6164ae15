"""Advice as something to read, and the command that starts what it advises."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping
from typing import Any

from deepzero.planning import plan
from deepzero.planning.autotune import Option, Refused, TuningAdvice
from deepzero.planning.search_space import Question, words_of
from deepzero.utils.formatting import short_bytes, short_number

NOTHING_FITS = "nothing fits"
_COLUMNS = f"{'':>3}  {'stage':<6}{'offload':<20}{'micro x accum':>14}  {'ckpt':<5}{'step':>11}{'tokens/s':>10}"
_COLUMNS += f"{'device':>10}{'host/node':>10}  besides"


def command(option: Option, question: Question) -> str:
    """What to type: ``train.py`` starts the ranks of one machine by itself, torchrun those of several."""
    world, words = question.world, [word for word in option.words if not word.lstrip("+").startswith("launch.nproc=")]
    rest = shlex.join(words)
    nodes = world.world_size // world.ranks_of_host
    if nodes == 1:
        return f"python train.py launch.nproc={world.world_size} {rest}"
    start = f"torchrun --nnodes={nodes} --nproc-per-node={world.ranks_of_host}"
    return f"{start} --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 train.py {rest}"


def text(advice: TuningAdvice) -> str:
    """Returns the advice as text for a terminal."""
    question = advice.question
    world, cluster = question.world, question.cluster
    nodes = world.world_size // world.ranks_of_host
    lines = [
        f"{advice.numel:,} parameters; {cluster.name}: {world.world_size} ranks, "
        f"{nodes} node{'s' if nodes > 1 else ''} of {world.ranks_of_host}",
        f"to be used: {short_bytes(question.device_bytes)} of {short_bytes(cluster.memory_bytes)} on a device, "
        f"{short_bytes(question.host_bytes)} of {short_bytes(cluster.host_bytes)} in a node's host memory",
    ]
    if advice.options:
        lines += ["", "what fits, the fastest first", _COLUMNS]
        lines += [_row(number, option) for number, option in enumerate(advice.options, start=1)]
        if any(option.straight_line for option in advice.options):
            lines.append("     ~ drawn out from two and three rehearsed micro-batches")
    if advice.waiting:
        lines += ["", "what may fit, by estimate; not rehearsed for want of time (--seconds)"]
        lines += [
            f"  {_name(one.setting.stage, one.setting.offload)}: about {short_number(one.tokens_per_second)} tokens/s, "
            f"{short_bytes(one.device_bytes + one.buffers)}"
            for one in advice.waiting
        ]
    if advice.refused:
        lines += ["", "what does not, at its smallest", *map(_refused, advice.refused)]
    lines += ["", *_end(advice)]
    return "\n".join(lines)


def _end(advice: TuningAdvice) -> list[str]:
    if advice.options:
        best = advice.options[0]
        kinds = list(best.simulated.timeline.exposed_by_kind().items())[:3]
        waits = ", ".join(f"{seconds * 1e3:.3g} ms for {kind}" for kind, seconds in kinds)
        share = f"{best.simulated.exposed_share:.0%} of the step it waits" + (f": {waits}" if waits else "")
        return [f"the first: {share}", "run", f"  {command(best, advice.question)}"]
    if advice.waiting:
        return ["nothing was rehearsed that fits; give it more --seconds"]
    nearest = min(
        (one for one in advice.refused if one.too_much), key=lambda one: one.too_much + one.buffers, default=None
    )
    lines = [NOTHING_FITS]
    if nearest is not None:
        where = "a node's host memory" if nearest.on_host else "a device"
        words, about = " ".join(words_of(nearest.setting)), "" if nearest.rehearsed else "about "
        lines[0] += (
            f"; nearest is {words}, which lacks {about}{short_bytes(nearest.too_much + nearest.buffers)} on {where}"
        )
    return lines + [f"what would help: {one}" for one in advice.help]


def _row(number: int, option: Option) -> str:
    setting, simulated = option.setting, option.simulated
    batch = f"{setting.micro_batch} x {setting.accumulation}"
    host = short_bytes(simulated.host_bytes_per_node) if simulated.host_bytes_per_node else "-"
    mark = "~" if option.straight_line else ""
    kept = "yes" if setting.checkpointing else "no"
    return (
        f"{number:>3}  {setting.stage:<6}{setting.offload:<20}{batch:>14}  {kept:<5}"
        f"{f'{mark}{option.step_seconds * 1e3:.4g} ms':>11}{short_number(option.tokens_per_second):>10}"
        f"{short_bytes(simulated.device_bytes):>10}{host:>10}  {' '.join(setting.extra)}"
    ).rstrip()


def _name(stage: int, offload: str) -> str:
    return f"stage {stage}" + ("" if offload == "none" else f", {offload.replace('_', ' ')} in host memory")


def _refused(refused: Refused) -> str:
    name = _name(*refused.setting.family)
    if refused.reason:
        return f"  {name}: {refused.reason}"
    side = {k: v for k, v in refused.memory.items() if k.startswith("host_") == refused.on_host and v}
    largest = sorted(side.items(), key=lambda item: -item[1])
    where = "a node's host memory" if refused.on_host else "a device"
    parts = ", ".join(f"{category} {short_bytes(size)}" for category, size in largest[:3])
    how = "" if refused.rehearsed else "at least "
    return f"  {name}: {how}{short_bytes(refused.too_much)} too much for {where}; a rank has {parts}"


def as_dict(advice: TuningAdvice) -> dict[str, Any]:
    """Everything, for a JSON file."""
    question = advice.question
    return {
        "parameters": advice.numel,
        "cluster": dataclasses.asdict(question.cluster),
        "world_size": question.world.world_size,
        "ranks_per_node": question.world.ranks_of_host,
        "usable_device_bytes": question.device_bytes,
        "usable_host_bytes_per_node": question.host_bytes,
        "options": [_option_dict(option, question) for option in advice.options],
        "not_rehearsed": [{**dataclasses.asdict(one), "device_bytes": one.device_bytes} for one in advice.waiting],
        "refused": [dataclasses.asdict(one) for one in advice.refused],
        "help": advice.help,
        "seconds": advice.took,
    }


def _option_dict(option: Option, question: Question) -> Mapping[str, Any]:
    return {
        **dataclasses.asdict(option.setting),
        **option.simulated.as_dict(),
        "step_seconds": option.step_seconds,
        "tokens_per_second": option.tokens_per_second,
        "straight_line": option.straight_line,
        "memory": plan.memory(option.simulated.rehearsal),
        "overrides": list(option.words),
        "command": command(option, question),
    }
