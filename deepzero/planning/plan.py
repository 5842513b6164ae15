"""A rehearsal as something to read: memory by category, volume by kind, and every move of a step in order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from deepzero.comm.ledger import side_of
from deepzero.planning.dry_run import DryRunResult
from deepzero.runtime.memory_model import AGREEMENT
from deepzero.utils.formatting import short_bytes

MOVES = ("fetch", "release", "launch", "wait", "copy", "boundary", "step", "publish")
"""What the table lists; gradients that arrive are counted in between."""


def rows(rehearsal: DryRunResult, waits: bool = False) -> Iterator[dict[str, Any]]:
    """The step's moves in order, on request with those where the program waits.

    A row's ``gradients`` are how many became ready since the row before.
    """
    gradients = number = 0
    for event in rehearsal.events:
        if event.what == "gradient_ready":
            gradients += 1
        elif event.what in MOVES and (waits or event.what != "wait"):
            number += 1
            yield {
                "number": number,
                "what": event.what,
                "kind": f"for {event.kind}" if event.what == "fetch" else event.kind,
                "where": event.where,
                "names": rehearsal.name_of(event),
                "bytes": event.sent.bytes if event.sent is not None else 0,
                "between_node_bytes": event.sent.between_node_bytes if event.sent is not None else 0,
                "gradients": gradients,
            }
            gradients = 0


def as_dict(rehearsal: DryRunResult) -> dict[str, Any]:
    """Everything, for a JSON file."""
    return {
        "stage": rehearsal.stage,
        "rank": rehearsal.rank,
        "world_size": rehearsal.nodes.world_size,
        "ranks_per_node": rehearsal.nodes.per_node,
        "model_numel": rehearsal.model_numel,
        "micro_batches": rehearsal.micro_batches,
        "memory": memory(rehearsal),
        "host_bytes": rehearsal.host_bytes,
        "traffic": {kind: traffic.as_dict() for kind, traffic in rehearsal.predicted.items()},
        "flops": sum(op.flops for op in rehearsal.work),
        "moves": list(rows(rehearsal, waits=True)),
    }


def memory(rehearsal: DryRunResult) -> dict[str, int]:
    """Bytes of one rank by category, closed forms first; ``activations`` is what the rehearsal held beside them."""
    found = {category: size for category, size in rehearsal.memory.items() if size}
    return {**found, "activations": rehearsal.activation_bytes}


def text(rehearsal: DryRunResult, moves: int | None = None) -> str:
    """For a terminal, with ``moves`` rows of the table at most; None: all; 0: none."""
    nodes, micro_batches = rehearsal.nodes, rehearsal.micro_batches
    lines = [
        f"on {rehearsal.device_type}: stage {rehearsal.stage}, {rehearsal.model_numel:,} parameters, "
        f"{nodes.world_size} ranks on {nodes.count} node{'s' if nodes.count > 1 else ''}, {micro_batches} "
        f"micro-batch{'es' if micro_batches > 1 else ''} a step; rank {rehearsal.rank}",
        "",
        f"{'held by one rank':<34}{'bytes':>14}",
    ]
    found = memory(rehearsal)
    for side, total in (("device", "all of these"), ("host", "in host memory"), ("file", "in files")):
        if held := {name: size for name, size in found.items() if side_of(name) == side}:
            lines += [f"  {name:<32}{short_bytes(size):>14}" for name, size in held.items()]
            lines.append(f"  {total:<32}{short_bytes(sum(held.values())):>14}")
    lines += ["", f"{'sent by one rank in one step':<34}{'calls':>8}{'bytes':>14}{'between nodes':>16}"]
    for kind, traffic in rehearsal.predicted.items():
        between = short_bytes(traffic.between_node_bytes) if traffic.between_node_bytes else "-"
        lines.append(f"  {kind:<32}{traffic.calls:>8g}{short_bytes(traffic.bytes):>14}{between:>16}")
    volume = [t for kind, t in rehearsal.predicted.items() if kind != AGREEMENT and "offload" not in kind]
    elements = sum(traffic.elements for traffic in volume) / rehearsal.model_numel
    each = f"{sum(traffic.bytes for traffic in volume) / rehearsal.model_numel:.3f} bytes a parameter"
    lines.append(f"  {'volume, in elements':<32}{'':>8}{elements:>12.3f} Ψ  = {each}")
    if table := list(rows(rehearsal)) if moves != 0 else []:
        lines += ["", "one step, in order", *map(_line, table[:moves])]
        if moves is not None and moves < len(table):
            lines.append(f"  … and {len(table) - moves} more")
    return "\n".join(lines)


def _line(row: dict[str, Any]) -> str:
    size = f"{short_bytes(row['bytes'])} sent" if row["bytes"] else ""
    gradients = f"after {row['gradients']} gradients" if row["gradients"] else ""
    what = " ".join(filter(None, (row["kind"], row["where"])))
    names = f"({row['names']})" if row["names"] else ""
    return f"  {row['number']:>5}  {row['what']:<8} {what:<52} {size:>16}  {gradients} {names}".rstrip()
