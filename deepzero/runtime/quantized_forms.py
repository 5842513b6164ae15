"""The closed forms of qgZ: what a quantised reduction sends and keeps. Pure integers; see ``quantized_reduce.py``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from deepzero.comm.ledger import Traffic
from deepzero.comm.quantization import Format
from deepzero.comm.quantized_reduce import BETWEEN, INSIDE
from deepzero.comm.reduce_scatter import REDUCE_SCATTER
from deepzero.comm.topology import Nodes
from deepzero.layout import FlatLayout


def reduction_traffic(
    layouts: Sequence[FlatLayout],
    nodes: Nodes,
    form: Format,
    wire: int,
    goes_exact: Callable[[int, int], bool],
    times: int = 1,
) -> dict[str, Traffic]:
    """``times`` reductions of everything, mean over ranks, by kind.

    With R ranks on each of N nodes and parts of p elements, a rank sends (R-1) N parts inside its node, and N-1 to
    other nodes; of true elements of a bucket the (R-1)/R-th and the (N-1)/W-th part, in the mean over ranks.

    Args:
        layouts: of all groups.
        nodes: W, R and N; more than one rank.
        form: of the messages.
        wire: bytes per element of what goes the exact way.
        goes_exact: of a group's number and a bucket's within it.
        times: how often a step reduces.

    Example:
        >>> from deepzero.layout import plan_layout
        >>> layout = plan_layout([1 << 20], world_size=4, bucket_limit=1 << 20)
        >>> forms = reduction_traffic([layout], Nodes(4, 2), Format(4, 2048), 2, lambda group, index: False)
        >>> {kind: (t.elements / 2**20, t.bytes / 2**20, t.between_node_bytes / 2**20) for kind, t in forms.items()}
        {'gradients.reduce_inside_node': (0.5, 0.2509765625, 0.0),
         'gradients.reduce_between_nodes': (0.25, 0.12548828125, 0.12548828125)}
    """
    forms: dict[str, Traffic] = {}
    world, inside, count = nodes.world_size, nodes.per_node, nodes.count
    for group, layout in enumerate(layouts):
        for bucket in layout.buckets:
            true, padding = bucket.true_numel(), bucket.numel - bucket.true_numel()
            # For each kind: how many parts a rank sends, their bytes, and how many of these leave the node.
            if goes_exact(group, bucket.index):
                part_bytes = wire * bucket.shard_numel
                sends = [(REDUCE_SCATTER, world - 1, part_bytes, (world - inside) * part_bytes)]
            else:
                part_bytes = form.message_bytes(bucket.shard_numel)
                sends = [
                    (INSIDE, (inside - 1) * count, part_bytes, 0),
                    (BETWEEN, count - 1, part_bytes, (count - 1) * part_bytes),
                ]
            for kind, parts, nbytes, between in sends:
                if parts:
                    sent = Traffic(1, parts * true / world, parts * padding / world, parts * nbytes, between)
                    forms.setdefault(kind, Traffic()).add(sent, times)
    return forms


def mail_bytes(shard_numel: int, nodes: Nodes, form: Format) -> int:
    """Room for one bucket's messages, both ways, and for the sum inside a node, where something follows it.

    Example:
        >>> mail_bytes(4096, Nodes(4, 2), Format(4, 2048)) / 4096
        7.0234375
    """
    inside, count = nodes.per_node, nodes.count
    messages = 2 * ((inside - 1) * count + count - 1) * form.message_bytes(shard_numel)
    return messages + (4 * shard_numel if inside > 1 and count > 1 else 0)


def residual_bytes(layouts: Sequence[FlatLayout], nodes: Nodes, wire: int) -> int:
    """Error feedback's bytes on each rank, of the layouts that are quantised: padded elements, ``wire`` bytes each.

    Example:
        >>> from deepzero.layout import plan_layout
        >>> residual_bytes([plan_layout([4096], world_size=4, bucket_limit=4096)], Nodes(4, 2), 2)
        6144
    """
    parts = (nodes.per_node - 1) * nodes.count + nodes.count - 1
    return wire * parts * sum(layout.shard_numel for layout in layouts)
