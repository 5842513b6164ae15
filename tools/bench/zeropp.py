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

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a file
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from tools.bench.arguments import positive
from tools.bench.engines import settings_of
from tools.bench.stats import median
from tools.bench.workload import TINY, Workload, batch, build_model, make_tokens, tokens_needed

RANKS, PER_NODE = 4, 2
QWZ, HPZ, QGZ = (
    {"zero_quantized_weights": True},
    {"zero_hpz_partition_size": PER_NODE},
    {"zero_quantized_gradients": True},
)
VARIANTS: dict[str, dict[str, Any]] = {
    "stage 3": {},
    "qwZ": QWZ,
    "hpZ": HPZ,
    "qgZ": QGZ,
    "qwZ + hpZ + qgZ": {**QWZ, **HPZ, **QGZ},
    "MiCS": {"mics_shard_size": PER_NODE},
    "MiCS + qwZ + qgZ": {"mics_shard_size": PER_NODE, **QWZ, **QGZ},
}
UNTHROTTLED = 0.0


class Link:
    """One rank's way to other nodes: a queue that carries so many bytes a second."""

    def __init__(self) -> None:
        self.bytes_per_second = UNTHROTTLED
        self._free_at = 0.0
        self._noted = 0.0

    def send(self, between_bytes: float) -> None:
        """A launch has been entered in the ledger."""
        self._noted = between_bytes

    def arrival(self) -> float:
        """When what was noted last will have arrived, on the clock of ``time.perf_counter``."""
        sent, self._noted = self._noted, 0.0
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
        link.send(entry[4] if len(entry) > 4 else 0.0)

    def launched(self: Pending, *arguments: Any) -> None:
        begin(self, *arguments)
        self.__dict__["arrival"] = link.arrival()

    def waited(self: Pending) -> None:
        wait(self)
        left = self.__dict__.get("arrival", 0.0) - time.perf_counter()
        if left > 0:
            time.sleep(left)

    Ledger.record, Pending.__init__, Pending.wait = recorded, launched, waited  # type: ignore[method-assign]
    return link


def make_engine(work: Workload, changes: dict[str, Any]) -> Any:
    """A stage 3 engine on two pretended nodes."""
    import deepzero

    zero = {"stage": 3, "overlap_comm": True, "stage3_param_persistence_threshold": 1000, **changes}
    config = settings_of(work, zero, comm={"ranks_per_node": PER_NODE})
    return deepzero.initialize(model=build_model(work), config=config)[0]


def rank_program(settings: dict[str, Any]) -> None:
    """One rank: blocks of steps of all variants, with and without a slow link; rank 0 writes what it measured."""
    import torch.distributed as dist

    work, steps = Workload(**settings["work"]), settings["steps"]
    torch.set_num_threads(1)
    link = throttle()
    names = [name for name in VARIANTS if name in settings["variants"]]
    engines = {name: make_engine(work, VARIANTS[name]) for name in names}
    rank = dist.get_rank()
    tokens = make_tokens(work.vocab_size, tokens_needed(work, steps))

    def block(engine: Any, count: int) -> float:
        dist.barrier()
        started = time.perf_counter()
        for number in range(count):
            inputs, targets = batch(work, tokens, number % steps, rank)
            engine.backward(engine(inputs, targets))
            engine.step()
        dist.barrier()
        return (time.perf_counter() - started) / count

    for engine in engines.values():
        block(engine, 3)  # records the plan, compiles, touches all memory
    reports = {name: engine.report()["communication"] for name, engine in engines.items()}
    seconds: dict[str, dict[str, list[float]]] = {name: {} for name in names}
    for _ in range(settings["rounds"]):
        for bandwidth in (UNTHROTTLED, *settings["bandwidths"]):
            for name, engine in engines.items():
                link.bytes_per_second = bandwidth / PER_NODE
                seconds[name].setdefault(str(bandwidth), []).append(block(engine, steps))
                link.bytes_per_second = UNTHROTTLED
    if rank == 0:
        sent = {
            name: {kind: entry["measured"]["between_node_bytes"] for kind, entry in report.items()}
            for name, report in reports.items()
        }
        Path(settings["folder"], "measured.json").write_text(json.dumps({"seconds": seconds, "between": sent}))
    dist.barrier()


def print_report(measured: dict[str, Any], bandwidths: list[float], quick: bool) -> None:
    """The two tables, in Markdown."""
    totals = {name: sum(kinds.values()) for name, kinds in measured["between"].items()}
    base = next(iter(totals))
    if quick:
        print("--quick: does everything run? The times mean nothing.\n")
    print("| variant | between nodes, MB per rank and step | of stage 3's |\n| --- | --- | --- |")
    for name, total in totals.items():
        print(f"| {name} | {total / 1e6:.2f} | {total / totals[base]:.3f} |")
    print("\n| link of a node | variant | step, s | of stage 3's | hidden, s | exposed, s | between the two |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for bandwidth in (UNTHROTTLED, *bandwidths):
        reference = median(measured["seconds"][base][str(bandwidth)])
        for name, runs in measured["seconds"].items():
            step, t0 = median(runs[str(bandwidth)]), median(runs[str(UNTHROTTLED)])
            label = f"{bandwidth / 1e9:g} GB/s" if bandwidth else "not throttled"
            row = f"| {label} | {name} | {step:.3f} | {step / reference:.3f} |"
            if bandwidth:
                travel = totals[name] / (bandwidth / PER_NODE)
                low, high = max(t0, travel), t0 + travel
                print(
                    f"{row} {low:.3f} | {high:.3f} | {'yes' if low <= step * 1.05 and step <= high * 1.05 else 'no'} |"
                )
            else:
                print(f"{row} | | |")


def main() -> None:
    """Measure and print."""
    from deepzero.launch.launcher import launch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=positive, default=4, help="steps in a block")
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--bandwidth", type=float, nargs="+", default=[0.1, 0.025], help="of a node's link, in GB/s")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--quick", action="store_true", help="a tiny model: does everything run?")
    given = parser.parse_args()
    size = TINY.to_dict() if given.quick else {**Workload().to_dict(), "n_layer": 6, "n_embd": 384, "n_head": 6}
    work = Workload(**{**size, "ranks": RANKS})
    folder = Path(tempfile.mkdtemp(prefix="deepzero-bench-"))
    settings = {
        "work": work.to_dict(), "steps": given.steps, "rounds": given.rounds, "folder": str(folder),
        "bandwidths": [value * 1e9 for value in given.bandwidth], "variants": given.variants,
    }  # fmt: skip
    environment = {"DEEPZERO_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
    try:
        launch(str(Path(__file__).resolve()), "rank_program", (settings,), nproc=RANKS, environment=environment)
        print_report(json.loads((folder / "measured.json").read_text()), settings["bandwidths"], given.quick)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
