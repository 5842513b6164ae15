"""What ZeRO++ saves where links between nodes are slow: ``python -m tools.bench.zeropp``.

Four ranks on this machine pretend to be two nodes of two (``comm.ranks_per_node=2``). What a rank sends to the other
node takes ``bytes / bandwidth`` seconds of a simulated link: the bytes are those that the ledger counts, launches queue
up behind each other on a rank's link, and a collective's wait returns only when its bytes would have arrived. What
stays inside a node, and everything else, takes what it takes here. The bandwidth is stated in every row; the two ranks
of a node share it.

All variants live side by side on the same ranks, and blocks of steps of each follow each other in turn, so that a slow
minute of the machine meets all of them. Printed are medians of the steps' seconds, their ratio to stage 3's, and what a
closed form gives from the variant's own step without a slow link (t0) and its bytes: all of the link's time hidden
behind the step, ``max(t0, bytes/bandwidth)``, and none of it, ``t0 + bytes/bandwidth``.
"""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from deepzero.utils.closed_pipe import exit_with
from tools.bench.engines import settings_of, step_of
from tools.bench.report import table
from tools.bench.timing import parser_of, timed
from tools.bench.workload import TINY, Workload, batch, build_model, tokens_for

RANKS, PER_NODE = 4, 2
QWZ, QGZ = {"zero_quantized_weights": True}, {"zero_quantized_gradients": True}
HPZ, MICS = {"zero_hpz_partition_size": PER_NODE}, {"mics_shard_size": PER_NODE}
VARIANTS: dict[str, dict[str, Any]] = {
    "stage 3": {},
    "qwZ": QWZ,
    "hpZ": HPZ,
    "qgZ": QGZ,
    "qwZ + hpZ + qgZ": {**QWZ, **HPZ, **QGZ},
    "MiCS": MICS,
    "MiCS + qwZ + qgZ": {**MICS, **QWZ, **QGZ},
}
UNTHROTTLED = 0.0


class Link:
    """One rank's way to other nodes: a queue that carries so many bytes a second."""

    def __init__(self) -> None:
        self.bytes_per_second = UNTHROTTLED
        self._free_at = 0.0
        self.noted = 0.0
        """Bytes of the launch that the ledger has entered last."""

    def arrival(self) -> float:
        """When what was noted last will have arrived, on the clock of ``time.perf_counter``."""
        sent, self.noted = self.noted, 0.0
        if not self.bytes_per_second or not sent:
            return 0.0
        self._free_at = max(time.perf_counter(), self._free_at) + sent / self.bytes_per_second
        return self._free_at


def throttle() -> Link:
    """Put one link under every collective of this process."""
    from deepzero.comm.collectives import Pending
    from deepzero.comm.ledger import Ledger

    link = Link()
    record, begin, wait = Ledger.record, Pending.__init__, Pending.wait

    def recorded(self: Ledger, *entry: Any, **more: Any) -> None:
        record(self, *entry, **more)
        link.noted = entry[4] if len(entry) > 4 else 0.0

    def launched(self: Pending, *arguments: Any) -> None:
        begin(self, *arguments)
        self.__dict__["arrival"] = link.arrival()

    def waited(self: Pending) -> None:
        wait(self)
        time.sleep(max(0.0, self.__dict__.get("arrival", 0.0) - time.perf_counter()))

    Ledger.record, Pending.__init__, Pending.wait = recorded, launched, waited
    return link


def make_engine(work: Workload, changes: dict[str, Any]) -> Any:
    """A stage 3 engine on two pretended nodes."""
    import deepzero

    zero = {"stage": 3, "overlap_comm": True, "stage3_param_persistence_threshold": 1000, **changes}
    config = settings_of(work, zero, comm={"ranks_per_node": PER_NODE})
    return deepzero.initialize(model=build_model(work), config=config)[0]


def rank_program(
    work: Workload, steps: int, rounds: int, bandwidths: list[float], variants: list[str], file: str
) -> None:  # fmt: skip
    """One rank: blocks of steps of all variants, with and without a slow link; rank 0 writes what it measured."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    link = throttle()
    engines = {name: make_engine(work, VARIANTS[name]) for name in VARIANTS if name in variants}
    rank, tokens = dist.get_rank(), tokens_for(work, max(steps, 3))

    def block(engine: Any, count: int) -> float:
        step = step_of(engine)
        dist.barrier()
        return timed(lambda: ([step(*batch(work, tokens, n, rank)) for n in range(count)], dist.barrier())) / count

    for engine in engines.values():
        block(engine, 3)  # records the plan, compiles, touches all memory
    reports = {name: engine.report()["communication"] for name, engine in engines.items()}
    seconds: dict[str, dict[str, list[float]]] = {name: {} for name in engines}
    for _ in range(rounds):
        for bandwidth in (UNTHROTTLED, *bandwidths):
            for name, engine in engines.items():
                link.bytes_per_second = bandwidth / PER_NODE
                seconds[name].setdefault(str(bandwidth), []).append(block(engine, steps))
                link.bytes_per_second = UNTHROTTLED
    if rank == 0:
        sent = {name: sum(entry["measured"]["between_node_bytes"] for entry in found.values())
                for name, found in reports.items()}  # fmt: skip
        Path(file).write_text(json.dumps({"seconds": seconds, "between": sent}))
    dist.barrier()


def print_report(measured: dict[str, Any], bandwidths: list[float]) -> None:
    """The two tables, in Markdown."""
    totals = measured["between"]
    base = next(iter(totals))
    sizes = [[name, f"{total / 1e6:.2f}", f"{total / totals[base]:.3f}"] for name, total in totals.items()]
    print(table(["variant", "between nodes, MB per rank and step", "of stage 3's"], sizes) + "\n")
    rows = []
    for bandwidth in (UNTHROTTLED, *bandwidths):
        label = f"{bandwidth / 1e9:g} GB/s" if bandwidth else "not throttled"
        reference = median(measured["seconds"][base][str(bandwidth)])
        for name, runs in measured["seconds"].items():
            step, t0 = median(runs[str(bandwidth)]), median(runs[str(UNTHROTTLED)])
            ends = ["", "", ""]
            if bandwidth:
                travel = totals[name] / (bandwidth / PER_NODE)
                low, high = max(t0, travel), t0 + travel
                ends = [f"{low:.3f}", f"{high:.3f}", "yes" if low <= step * 1.05 and step <= high * 1.05 else "no"]
            rows.append([label, name, f"{step:.3f}", f"{step / reference:.3f}", *ends])
    head = ["link of a node", "variant", "step, s", "of stage 3's", "hidden, s", "exposed, s", "between the two"]
    print(table(head, rows))


def main() -> None:
    """Measure and print."""
    from deepzero.launch.launcher import launch

    parser = parser_of("zeropp", __doc__, steps=(4, "steps in a block"), rounds=(3, "that count"))
    add = parser.add_argument
    add("--bandwidth", type=float, nargs="+", default=[0.1, 0.025], help="of a node's link, in GB/s")
    add("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    add("--quick", action="store_true", help="a tiny model: does everything run?")
    given = parser.parse_args()
    work = replace(TINY if given.quick else Workload(n_layer=6, n_embd=384, n_head=6), ranks=RANKS)
    bandwidths = [value * 1e9 for value in given.bandwidth]
    environment = {"DEEPZERO_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="deepzero-bench-") as folder:
        file = Path(folder, "measured.json")
        arguments = (work, given.steps, given.rounds, bandwidths, given.variants, str(file))
        launch(__file__, "rank_program", arguments, nproc=RANKS, environment=environment)
        if given.quick:
            print("--quick: does everything run? The times mean nothing.\n")
        print_report(json.loads(file.read_text()), bandwidths)


if __name__ == "__main__":
    exit_with(main)
