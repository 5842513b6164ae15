"""qgZ's reduction alone: the sums of the plain definition to the bit, on any nodes; what it sends; error feedback."""

from collections import defaultdict

import pytest
import torch

from deepzero.comm.chaos import Chaos
from deepzero.comm.collectives import Communicator
from deepzero.comm.exact_sum import sum_in_rank_order
from deepzero.comm.ledger import Ledger, Traffic
from deepzero.comm.quantization import Format, Quantizer
from deepzero.comm.quantized_reduce import BETWEEN, INSIDE, QuantizedReduce
from deepzero.comm.reduce_scatter import REDUCE_SCATTER, BucketReducer
from deepzero.comm.topology import Nodes
from deepzero.config.engine import ChaosConfig
from deepzero.layout import plan_layout
from deepzero.runtime.memory_model import reduction_traffic, residual_bytes

CPU = torch.device("cpu")
SIZES = [700, 64, 3000, 5, 900]
"""Elements: buckets of several parameters, padding in some owners' parts, blocks that end early."""


def layout_of(world, sizes=SIZES, limit=1000):
    return plan_layout(sizes, world, limit)


def gradients(layout, rank, step, dtype):
    """One rank's gradients of one pass, a bucket's each; zero where there is no parameter."""
    generator, out = torch.Generator().manual_seed(100 * step + rank), []
    for bucket in layout.buckets:
        grad = torch.randn(bucket.numel, generator=generator) * 10.0 ** (rank % 3 - 1)
        for lo, hi in bucket.gaps():
            grad[lo:hi] = 0
        out.append(grad.to(dtype))
    return out


class Plain:
    """The definition, step by step, in one process that sees all ranks: no message, no chunk, no order of events."""

    def __init__(self, nodes, form, dtype, feedback=False):
        self.nodes, self.dtype, self.feedback = nodes, dtype, feedback
        self.form, self.quantizer = form, Quantizer(form)
        self.lost, self.measured = {}, defaultdict(lambda: [0.0, 0.0])

    def travels(self, x, sender, bucket, which):
        """``x`` as the receiver decodes it."""
        x, key = x.float(), (sender, bucket.index, which)
        if self.feedback:
            x = x + self.lost.get(key, torch.zeros(x.numel())).float()
        packed = self.form.open(torch.zeros(self.form.message_bytes(x.numel()), dtype=torch.uint8), x.numel())
        self.quantizer.pack(x, packed)
        decoded = torch.empty(x.numel())
        self.quantizer.unpack(packed, decoded)
        self.lost[key] = (x - decoded).nan_to_num(0, 0, 0).to(self.dtype)
        tally = self.measured[sender, bucket.index]
        tally[0] += float(x.double().square().sum())
        tally[1] += float((x.double() - decoded.double()).square().sum())
        return decoded

    def reduce(self, bucket, grads, before=None):
        """Every owner's sum. ``grads``: every rank's bucket; ``before``: what each owner has already."""
        per_node, sums = self.nodes.per_node, []
        for owner in range(self.nodes.world_size):
            mine = slice(owner * bucket.shard_numel, (owner + 1) * bucket.shard_numel)
            total = before[owner] if before else None
            for node in range(self.nodes.count):
                messenger = node * per_node + owner % per_node
                inside = total if self.nodes.count == 1 else None  # of one node nothing has to be put together first
                for rank in range(node * per_node, (node + 1) * per_node):
                    part = grads[rank][mine]
                    part = part.float() if rank == messenger else self.travels(part, rank, bucket, (1, owner))
                    inside = part if inside is None else inside + part
                if messenger != owner:
                    inside = self.travels(inside, messenger, bucket, (3, owner))
                total = inside if total is None or self.nodes.count == 1 else total + inside
            sums.append(total)
        return sums


def reducer_over(comm, layout, form, dtype, depth, feedback=False, exact_groups=frozenset()):
    strategy = QuantizedReduce(comm, [layout], dtype, Quantizer(form), exact_groups, feedback)
    return BucketReducer(comm, layout.largest_bucket, dtype, "exact", whole_sums=False, depth=depth, strategy=strategy)


def outputs_of(layout):
    return [torch.full((bucket.shard_numel,), float("nan")) for bucket in layout.buckets]


def send(reducer, layout, grads, outputs, accumulate=False):
    """One pass, all buckets in flight one after the other."""
    for bucket, output, grad in zip(layout.buckets, outputs, grads, strict=True):
        reducer.acquire(bucket, output, accumulate).copy_(grad)
        reducer.launch(bucket, output, accumulate)


def passes(comm, layout, form, dtype, depth, steps, feedback=False):
    """``steps`` passes that add up. The sums, and what was counted."""
    reducer, outputs = reducer_over(comm, layout, form, dtype, depth, feedback), outputs_of(layout)
    reducer.strategy.meter(True)
    for step in range(steps):
        send(reducer, layout, gradients(layout, comm.rank, step, dtype), outputs, step > 0)
    reducer.drain()
    return outputs, comm.ledger.traffic, reducer.strategy.measured, [t.nbytes for t in reducer.residuals()]


def check(found, nodes, layout, form, dtype, steps, feedback=False):
    """What every rank found is what the definition says."""
    world, plain = nodes.world_size, Plain(nodes, form, dtype, feedback)
    sums = [[torch.zeros(i.shard_numel) for i in layout.buckets] for _ in range(world)]
    for step in range(steps):
        grads = [gradients(layout, rank, step, dtype) for rank in range(world)]
        for number, bucket in enumerate(layout.buckets):
            before = [mine[number] for mine in sums] if step else None
            for rank, total in enumerate(plain.reduce(bucket, [grad[number] for grad in grads], before)):
                sums[rank][number] = total
    mean = defaultdict(Traffic)
    for rank, (outputs, traffic, measured, kept) in enumerate(found):
        for number, output in enumerate(outputs):
            assert torch.equal(output, sums[rank][number]), (nodes, rank, number)
            signal, noise = measured[0, number]
            assert signal == pytest.approx(plain.measured[rank, number][0], rel=1e-6)
            assert noise == pytest.approx(plain.measured[rank, number][1], rel=1e-5)
        for kind, counts in traffic.items():
            mean[kind].add(counts, 1 / world)
        assert sum(kept) == (residual_bytes([layout], nodes, dtype.itemsize) if feedback else 0)
    predicted = reduction_traffic([layout], nodes, form, dtype.itemsize, lambda group, index: False, steps)
    assert {k: t.as_dict() for k, t in mean.items()} == {k: pytest.approx(t.as_dict()) for k, t in predicted.items()}


def communicator(nodes, chaos=None):
    settings = ChaosConfig(enabled=chaos is not None, seed=chaos or 0, max_delay_ms=0.5)
    return Communicator(CPU, Ledger(), Chaos(settings, torch.distributed.get_rank()), nodes)


def on_ranks(rank, world, cases):
    return [
        passes(communicator(Nodes(world, per_node), chaos), layout_of(world), form, dtype, depth, 2, feedback)
        for per_node, form, dtype, depth, chaos, feedback in cases
    ]


@pytest.mark.parametrize(
    ("world", "sizes"), [(2, (1, 2)), (4, (1, 2, 4)), pytest.param(6, (2, 3), marks=pytest.mark.exhaustive)]
)
def test_the_plain_definition(ranks, world, sizes):
    """One node, one rank to a node, and both steps; overlap; chaos; feedback; wire dtypes; short blocks."""
    four, eight = Format(4, 128), Format(8, 192)
    cases = [
        (per_node, form, dtype, depth, chaos, feedback)
        for per_node in sizes
        for form, dtype, depth, chaos, feedback in (
            (four, torch.bfloat16, 2, 3, False),
            (eight, torch.float32, 1, None, True),
            (four, torch.float16, 2, 1, True),
        )[: 3 if world < 6 else 1]
    ]
    found = ranks.run(on_ranks, cases, world_size=world)
    for number, (per_node, form, dtype, _, _, feedback) in enumerate(cases):
        check([rank[number] for rank in found], Nodes(world, per_node), layout_of(world), form, dtype, 2, feedback)


def large(rank, world, form):
    """A bucket whose parts are several chunks; qgZ's sum and the exact one, and what each sent."""
    layout = plan_layout([world * 300_000], world, 1 << 30)
    outputs, sent = [], []
    for exact in (frozenset(), frozenset({0})):
        comm = communicator(Nodes(world, 2))
        reducer = reducer_over(comm, layout, form, torch.bfloat16, 1, exact_groups=exact)
        outputs += outputs_of(layout)
        send(reducer, layout, gradients(layout, rank, 0, torch.bfloat16), outputs[-1:])
        reducer.drain()
        sent.append(comm.ledger.traffic)
    return outputs, sent


def test_chunks_error_and_bytes_between_nodes(ranks):
    form = Format(4, 2048)
    found = ranks.run(large, form, world_size=4)
    layout = plan_layout([4 * 300_000], 4, 1 << 30)
    grads = [gradients(layout, rank, 0, torch.bfloat16)[0] for rank in range(4)]
    plain = Plain(Nodes(4, 2), form, torch.bfloat16).reduce(layout.buckets[0], grads)
    step = torch.stack([grad.float().abs().max() for grad in grads]).sum() / 7
    for rank, ((few, exact), (sent, sent_exact)) in enumerate(found):
        assert torch.equal(few, plain[rank])
        assert torch.equal(exact, sum_of([grad.split(few.numel())[rank] for grad in grads]))
        # Half a step of each contribution, and of the sum of those of a node.
        assert 0 < (few - exact).abs().max() <= step * 1.1
        assert set(sent) == {INSIDE, BETWEEN} and set(sent_exact) == {REDUCE_SCATTER}
        # An eighth, and the scales; less than a percent of the message is left over.
        ratio = sent[BETWEEN].between_node_bytes / sent_exact[REDUCE_SCATTER].between_node_bytes
        assert sent[INSIDE].between_node_bytes == 0 and ratio == pytest.approx(0.125 * (1 + 8 / 2048), rel=1e-3)


def sum_of(parts):
    output = torch.empty(parts[0].numel())
    sum_in_rank_order(output, parts, False, torch.empty(2048))
    return output


def constant(rank, world, per_node, feedback, steps):
    """The mean sum of gradients that never change: one of 7 in each block, the others 0.3 of a step."""
    layout, form = plan_layout([512], world, 512), Format(4, 64)
    reducer = reducer_over(communicator(Nodes(world, per_node)), layout, form, torch.float32, 2, feedback)
    (output,), grad = outputs_of(layout), torch.full((512,), 0.3)
    grad[::64] = 7
    for step in range(steps):
        send(reducer, layout, [grad], [output], step > 0)
    reducer.drain()
    small = torch.arange(output.numel()) % 64 != 0
    kept = [t.clone() for t in reducer.residuals()]
    reducer.forget_residuals()
    assert not any(t.any() for t in reducer.residuals())
    return output[small] / steps, kept


@pytest.mark.parametrize("per_node", [1, 2])
def test_feedback_takes_the_bias_away(ranks, per_node):
    for mean, kept in ranks.run(constant, per_node, True, 64, world_size=2):
        assert torch.allclose(mean, torch.tensor(0.6), atol=0.02) and kept
    for mean, kept in ranks.run(constant, per_node, False, 64, world_size=2):
        # Its own contribution alone: the other's is below half a step, for ever.
        assert torch.allclose(mean, torch.tensor(0.3)) and not kept


def overflow(rank, world, bad):
    layout = layout_of(world)
    reducer = reducer_over(communicator(Nodes(world, 2)), layout, Format(4, 64), torch.float16, 2, True)
    outputs, seen = outputs_of(layout), []
    for step in range(2):
        grads = gradients(layout, rank, step, torch.float16)
        if (step, rank) == (0, 3):
            grads[1][0] = bad
        send(reducer, layout, grads, outputs)
        reducer.drain()
        seen.append([bool(output.isfinite().all()) for output in outputs])
    return seen, all(t.isfinite().all() for t in reducer.residuals())


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_an_overflow_is_seen_and_does_not_linger(ranks, bad):
    found = ranks.run(overflow, bad, world_size=4)
    for rank, ((first, second), kept) in enumerate(found):
        # Element 0 of bucket 1 belongs to rank 0.
        assert first == [not (rank == 0 and number == 1) for number in range(len(first))]
        assert all(second) and kept


def exceptions(rank, world):
    layout = layout_of(world)
    comm = communicator(Nodes(world, 2), chaos=2)
    reducer = reducer_over(comm, layout, Format(4, 64), torch.bfloat16, 2)
    reducer.strategy.exact_buckets.add((0, 1))
    reducer.strategy.meter(True)
    outputs = outputs_of(layout)
    send(reducer, layout, gradients(layout, rank, 0, torch.bfloat16), outputs)
    reducer.drain()
    return outputs, comm.ledger.traffic, reducer.strategy.measured


def test_a_bucket_goes_the_exact_way(ranks):
    layout, plain = layout_of(4), Plain(Nodes(4, 2), Format(4, 64), torch.bfloat16)
    grads = [gradients(layout, rank, 0, torch.bfloat16) for rank in range(4)]
    mean = defaultdict(Traffic)
    for rank, (outputs, traffic, measured) in enumerate(ranks.run(exceptions, world_size=4)):
        for bucket, output in zip(layout.buckets, outputs, strict=True):
            mine = [grad[bucket.index] for grad in grads]
            if bucket.index == 1:
                assert torch.equal(output, sum_of([grad.split(bucket.shard_numel)[rank] for grad in mine]))
            else:
                assert torch.equal(output, plain.reduce(bucket, mine)[rank])
        assert set(measured) == {(0, bucket.index) for bucket in layout.buckets} - {(0, 1)}
        for kind, counts in traffic.items():
            mean[kind].add(counts, 1 / 4)
    predicted = reduction_traffic([layout], Nodes(4, 2), Format(4, 64), 2, lambda *at: at == (0, 1))
    assert set(predicted) == {INSIDE, BETWEEN, REDUCE_SCATTER}
    assert {k: t.as_dict() for k, t in mean.items()} == {k: pytest.approx(t.as_dict()) for k, t in predicted.items()}


def events(rank, world, depth):
    layout, comm = layout_of(world, [900] * 4), communicator(Nodes(world, 2))
    reducer, comm.ledger.trace = reducer_over(comm, layout, Format(4, 64), torch.bfloat16, depth), True
    send(reducer, layout, [torch.zeros(bucket.numel) for bucket in layout.buckets], outputs_of(layout))
    reducer.drain()
    short = {INSIDE: "in", BETWEEN: "out"}
    return [f"{event.what} {short[event.kind]}{event.where[-1]}" for event in comm.ledger.events]


def test_a_launch_waits_for_nothing_of_its_own(ranks):
    """Each exchange has the time of a whole bucket: its wait comes after the next launch, on all ranks."""
    first, *others = ranks.run(events, 2, world_size=4)
    assert all(other == first for other in others)
    assert first == [
        "launch in0",
        *("launch in1", "wait in0", "launch out0"),
        *("wait out0", "launch in2", "wait in1", "launch out1"),
        *("wait out1", "launch in3", "wait in2", "launch out2"),
        *("wait in3", "launch out3", "wait out2", "wait out3"),
    ]


def test_one_bucket_does_everything_at_once(ranks):
    expected = [f"{what}{number}" for number in range(4) for what in ("launch in", "wait in", "launch out", "wait out")]
    assert all(found == expected for found in ranks.run(events, 1, world_size=4))
