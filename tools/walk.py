"""The journey of one gradient, or in stage 3 of one parameter, told while it happens.

    python -m tools.walk zero.stage=2 --parameter blocks.0.attn.qkv.weight
    python -m tools.walk --update

Real ranks on this machine build a tiny GPT and take an optimizer step. Python's profiler reports every function that is
called. Of those that are listed in HOPS (tools/walk.py) the ones that handle the parameter are printed, in the order of
their calls, with the tensors that they hold; a function that is not called is not printed. The steps are numbered as in
docs/step.md. The second form makes the transcripts in docs/ anew.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import inspect
import itertools
import json
import re
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any, NamedTuple

import torch

from deepzero.comm import process_group
from deepzero.config.engine import resolve_batch
from deepzero.config.run import RunConfig
from deepzero.config.strict import ConfigError
from deepzero.launch.launcher import RankFailed, launch
from deepzero.models.hf import check_library
from deepzero.runtime.initialize import initialize
from deepzero.runtime.pytree import scalar_loss
from deepzero.training import command_line
from deepzero.training.build_model import build_model
from deepzero.utils.closed_pipe import exit_with
from tools import composed

ROOT = Path(__file__).resolve().parents[1]
PARAMETER = "blocks.0.attn.qkv.weight"
TINY = ("experiment=smoke", "model.vocab_size=64", "zero.reduce_bucket_size=6000", "launch.nproc=2")
"""Unless the command line says otherwise: a model of 35,000 parameters in seven buckets."""


class Hop(NamedTuple):
    """A function that is printed when it is called with the parameter, with its bucket, or with a list that has it."""

    step: str  # "" where it belongs to the step under way: a bucket may arrive in step 3 or in step 4
    where: str  # "file:Class.function" below deepzero/
    text: str
    shows: dict[str, str]  # name: expression over the function's own names, `returned`, and `w`, the Watch
    when: str = "return"  # "call" reads the expressions when the function begins; "end" also prints it where it ends
    whose: str = "mine"  # "callers": called on behalf of the bucket; "all": of all parameters at once


BUILD, FETCH, RELEASE, READY = "0 build", "1 fetch", "2 release", "3 gradient ready"
BOUNDARY, STEP, PUBLISH = "4 boundary", "5 step", "6 publish"
PASSES, COLLECTIVES, REDUCER = "runtime/backward_passes.py:", "comm/collectives.py:", "comm/reduce_scatter.py:"
FLAT, SHARD, GRADS, STAGE3, HOOKS, BUCKET, PARAM = (
    f"runtime/zero/{name}.py:"
    for name in ("stage_1_and_2", "optimizer_shard", "gradient_reduction", "stage3", "module_hooks",
                 "partitioned_bucket", "partition_parameters")
)  # fmt: skip
FETCH_SUB_MODULE = "runtime/zero/partitioned_param_coordinator.py:PartitionedParameterCoordinator.fetch_sub_module"
NOW, MINE = {"param": "w.param.data"}, {"grad_S": "w.grad_S", "master_S": "w.master"}
HOPS = (
    Hop(BUILD, FLAT + "take_values", "rank 0's values arrive", {"values": "returned"}),
    Hop(BUILD, FLAT + "ParamGroup._keep_fragments", "this rank's fragment is kept, the rest let go", NOW, "end"),
    Hop(BUILD, FLAT + "ParamGroup._attach_params", "the parameter becomes a view of flat_P", NOW, "end"),
    Hop(BUILD, SHARD + "OptimizerShard.__init__", "what the optimizer has on this rank: its fragment", MINE, "end",
        "all"),
    Hop(FETCH, HOOKS + "ModuleHooks._pre_forward_hook.pre_forward", "its module is about to run",
        {"module": "self._names[module]"}, "call"),
    Hop(FETCH, HOOKS + "ModuleHooks.unpack", "the backward pass asks for the weight that it saved",
        {"shape": "list(packed.shape)"}, "call"),
    Hop(FETCH, FETCH_SUB_MODULE, "buckets are released, launched, prefetched, waited for",
        {"keys": "list(keys)", "where": "where"}, "call"),
    Hop(FETCH, BUCKET + "PartitionedBucket.launch", "NOT_AVAILABLE to INFLIGHT", {"shard_S": "w.shard"}, "call"),
    Hop("", COLLECTIVES + "Communicator.exchange", "torch is called: whole parts of the bucket leave",
        {"kind": "kind", "send": "[part for q, part in enumerate(send) if q != self.rank]"}, "call", "callers"),
    Hop(FETCH, BUCKET + "PartitionedBucket.wait", "INFLIGHT to AVAILABLE", {"gathered": "w.part_of(self.gathered)"}),
    Hop("", PARAM + "ZeroParameter.show", "what the parameter shows from here on", {"param": "values"}, "call"),
    Hop("", HOOKS + "ModuleHooks.pack", "autograd saves the weight, and is given a record in its place",
        {"shape": "list(returned.shape)"}),
    Hop(RELEASE, BUCKET + "PartitionedBucket.release", "AVAILABLE to NOT_AVAILABLE", NOW),
    Hop(READY, PASSES + "BackwardPasses._gradient_ready", "autograd has completed the gradient",
        {"param.grad": "param.grad"}, "call"),
    Hop(READY, GRADS + "UnreducedGradients.take", "it is taken out of param.grad",
        {"param.grad": "w.param.grad", "waiting": "self.waiting_of(w.param)"}),
    Hop(READY, GRADS + "GradientReducer._count", "so many of its bucket's gradients are still to come, after this one",
        {"missing": "self._missing[self._position[key]]"}),
    Hop("", GRADS + "GradientReducer._reduce_bucket", "its last gradient is there, and it is next in order",
        {"bucket": "bucket.index"}, "call"),
    Hop("", GRADS + "UnreducedGradients.fill", "the bucket's gradients are copied into a buffer, and freed",
        {"send_buffer": "w.part_of(send_buffer)", "waiting": "self.waiting_of(w.param)"}),
    Hop("", REDUCER + "BucketReducer._finish", "the bucket is waited for", {"bucket": "inflight.bucket.index"}, "call"),
    Hop("", "comm/exact_sum.py:sum_in_rank_order", "contributions to this rank's fragment are added, rank 0's first",
        {"part": "[w.fragment_of(part) for part in parts]", "sum": "w.fragment_of(output)"}, "return", "callers"),
    Hop(BOUNDARY, GRADS + "GradientReducer.reduce_gradients", "what is left is sent; all is waited for",
        {}, "call", "all"),
    Hop(STEP, "runtime/consistency.py:agree", "one all-reduce: the norm of all sums, and the mean loss",
        {"norm": "returned.norm", "loss": "returned.loss"}, "return", "all"),
    Hop(STEP, SHARD + "OptimizerShard.step", "what is divided by, once: ranks, micro-batches, loss scale, clip",
        {"divisor": "divisor"}, "call", "all"),
    Hop(STEP, SHARD + "OptimizerShard._unscale_and_step", "the optimizer has stepped on the fragment", MINE,
        "return", "all"),
    Hop(PUBLISH, FLAT + "ZeroStage1And2.publish_bucket", "the master is cast; the bucket leaves, but in stage 0",
        {"cast": "w.shard"}),
    Hop(PUBLISH, FLAT + "ZeroStage1And2.wait_all_gathers", "the buckets have arrived", NOW, "return", "all"),
    Hop(PUBLISH, STAGE3 + "PartitionedParamGroup.cast_masters", "the master is cast into the shard; nothing is sent",
        {"shard_S": "w.shard"}),
)  # fmt: skip


def code_of(where: str) -> CodeType:
    """The code of ``file:Class.function`` below deepzero/, also of a function inside another one."""
    path, _, names = where.partition(":")
    found: Any = importlib.import_module("deepzero." + path.removesuffix(".py").replace("/", "."))
    for name in names.split("."):
        if inside := getattr(found, "__code__", None):
            return next(one for one in inside.co_consts if isinstance(one, CodeType) and one.co_name == name)
        found = inspect.unwrap(getattr(found, name))
    return found.__code__


def line_of(code: CodeType) -> int:
    """The line of a function's ``def``; its code begins at its decorators."""
    lines, first = inspect.getsourcelines(code)
    return first + next(number for number, line in enumerate(lines) if line.lstrip().startswith("def "))


class Watch:
    """What one rank sees of ``param``: ``seen`` has the numbers of hops, and lines about what they hold."""

    def __init__(self, param: torch.nn.Parameter) -> None:
        self.param, self.seen = param, list[list[Any]]()
        self.group: Any = None
        self.bucket: Any = None  # of the layout; None until there is one
        self.master = self.grad_S = None  # of this rank's fragment; None where other ranks own all of it
        self._open: dict[FrameType, list[Any]] = {}
        self._hops = {code_of(hop.where): number for number, hop in enumerate(HOPS)}

    def learn(self, shard: Any) -> None:
        """Find the parameter in the ``OptimizerShard``, which is built last."""
        for group in shard.groups:
            for slot in group.layout.slots:
                if group.params[slot.index] is self.param:
                    self.group, self.slot, self.rank = group, slot, shard.rank
                    self.bucket = next(bucket for bucket in group.layout.buckets if slot in bucket.slots)
            for fragment, master in zip(group.fragments, group.masters, strict=True):
                if self.group is group and fragment.slot == self.slot:
                    self.fragment, self.master, self.grad_S = fragment, master, shard.grads[master]
        partitioned = getattr(getattr(self.param, "_zero", None), "bucket", None)
        self.key = partitioned and partitioned.key  # the coordinator's number for the bucket

    # ---- what the expressions of HOPS read ---------------------------------------------------------------------------

    shard = property(lambda self: None if self.master is None else self.group.param_fragment(self.fragment))

    def part_of(self, bucket: torch.Tensor) -> torch.Tensor:
        """The parameter's elements of its bucket."""
        return bucket[self.slot.offset - self.bucket.offset : self.slot.end - self.bucket.offset]

    def fragment_of(self, shard: Any) -> Any:
        """The parameter's elements of this rank's shard of its bucket."""
        if not isinstance(shard, torch.Tensor) or shard.numel() != self.bucket.shard_numel:
            return shard  # quantised, or of several ranks
        start = self.bucket.part_start(self.rank)
        return shard[max(self.slot.offset - start, 0) : max(self.slot.end - start, 0)]

    # ---- the profiler ------------------------------------------------------------------------------------------------

    def is_mine(self, value: Any) -> bool:
        """Whether a value is the parameter, is a list with it, or belongs to its bucket."""
        if value is self.param or (isinstance(value, list) and any(one is self.param for one in value)):
            return True
        if self.bucket is not None and type(value).__name__ == "SavedWeight":
            return bool(value.key == self.key and value.offset == self.slot.offset - self.bucket.offset)
        holds = (getattr(value, name, None) for name in ("bucket", "layout"))  # what is under way; stage 3's bucket
        return self.bucket is not None and self.bucket in (value, *holds)

    def concerns(self, hop: Hop, frame: FrameType, returned: Any) -> bool:
        """Whether a call is about the parameter."""
        if hop.whose == "all":  # of all parameters, or of those of some groups
            return any(group is self.group for group in getattr(frame.f_locals.get("self"), "groups", [self.group]))
        if returned is not None and hop.where == HOOKS + "ModuleHooks.pack":
            return self.is_mine(returned)
        for _ in range(3 if hop.whose == "callers" else 1):
            names = frame.f_locals if self.bucket or hop.whose == "mine" else {}
            # Of a group's function that is called bucket by bucket, the call for the parameter's own.
            values = [*names.values(), None if "bucket" in names else getattr(names.get("self"), "params", None)]
            if any(map(self.is_mine, values)) or (self.bucket and self.key in names.get("keys", ())):
                return True
            if "bucket" in names or frame.f_back is None:  # the nearest caller with a bucket says which
                return False
            frame = frame.f_back
        return False

    def profile(self, frame: FrameType, event: str, returned: Any) -> None:
        """For :func:`sys.setprofile`."""
        if event == "call" and (number := self._hops.get(frame.f_code)) is not None:
            self._open[frame] = [number, None]
            if HOPS[number].when != "end":
                self.seen.append(self._open[frame])
            if HOPS[number].when == "call":
                self._look(self._open.pop(frame), frame, None)
        elif event == "return" and frame in self._open:
            record = self._open.pop(frame)
            if HOPS[record[0]].when == "end":
                self.seen.append(record)
            self._look(record, frame, returned)

    @torch.no_grad()
    def _look(self, record: list[Any], frame: FrameType, returned: Any) -> None:
        hop = HOPS[record[0]]
        if hop.where == SHARD + "OptimizerShard.__init__":
            self.learn(frame.f_locals["self"])
        with torch._C.DisableTorchFunctionSubclass():
            if self.concerns(hop, frame, returned):
                names = {**frame.f_globals, **frame.f_locals, "returned": returned, "w": self}
                held = {name: eval(expression, names) for name, expression in hop.shows.items()}
                record[1] = [f"{name}  {line}" for name, value in held.items() for line in in_words(value)]


def in_words(value: Any) -> list[str]:
    """A value, one line for each tensor."""
    if isinstance(value, list) and value and not isinstance(value[0], int):
        return [line for one in value for line in in_words(one)]
    if not isinstance(value, torch.Tensor):
        in_one = {type(None): "none", float: "{:.4g}", FunctionType: "encoded"}.get(type(value), "{}")
        return [in_one.format(value)]
    kind, memory = f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}", value.untyped_storage().nbytes()
    if memory < value.nbytes:
        return [f"{kind}, a placeholder of {memory} bytes"]
    numbers = [f"{number:.4g}" for number in value.detach().flatten()[:3].tolist()]
    return [f"{kind}, {value.nbytes:,} bytes: {' '.join(numbers)}{' …' * (value.numel() > 3)}"]


def observe(run: RunConfig, name: str, steps: int) -> list[list[Any]]:
    """On every rank: build the engine and take ``steps`` steps; watch the building and the last step."""
    torch.manual_seed(run.train.seed)
    model = build_model(run)
    watch = Watch(dict(model.named_parameters())[name])
    sys.setprofile(watch.profile)
    engine, *_ = initialize(model=model, config=run.engine, total_steps=run.train.steps)
    generator = torch.Generator().manual_seed(process_group.rank())
    shape = (engine.train_micro_batch_size_per_gpu(), run.model.block_size + 1)
    for step in range(1, steps + 1):
        sys.setprofile(watch.profile if step == steps else None)
        for _ in range(engine.gradient_accumulation_steps()):
            tokens = torch.randint(0, run.model.vocab_size, shape, generator=generator)
            engine.backward(scalar_loss(engine(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())))
            engine.step()
    sys.setprofile(None)
    engine.destroy()
    return [record for record in watch.seen if record[1] is not None]


def program(run: RunConfig, name: str, steps: int, answer: str) -> None:
    """One rank; rank 0 writes down what all have seen."""
    process_group.init_distributed("gloo", timeout_seconds=120)
    seen = process_group.gather_object(observe(run, name, steps))
    process_group.shutdown()
    if seen is not None:
        Path(answer).write_text(json.dumps(seen), encoding="utf-8")


def transcript(seen: Sequence[Sequence[Sequence[Any]]]) -> str:
    """The ranks' reports, hop by hop; what several ranks saw alike stands once."""
    told: dict[tuple[int, int], dict[int, list[str]]] = {}  # hop, and which of its calls: rank to lines
    order: list[tuple[int, int]] = []
    for rank, records in enumerate(seen):
        place = 0
        for position, (number, lines) in enumerate(records):
            key = number, [other for other, _ in records[:position]].count(number)
            if key not in told:
                order.insert(place, key)
            told.setdefault(key, {})[rank] = lines
            place = order.index(key) + 1
    text, step = [], ""
    for key in order:
        hop = HOPS[key[0]]
        if hop.step not in ("", step):
            step = hop.step
            text.append(f"\n{step}")
        path, _, name = hop.where.partition(":")
        text.append(f"  deepzero/{path}:{line_of(code_of(hop.where))} {name}\n    {hop.text}")
        for column in itertools.zip_longest(*told[key].values()):
            for line in dict.fromkeys(line for line in column if line is not None):
                ranks = [str(rank) for rank, found in zip(told[key], column, strict=True) if found == line]
                text.append(f"    {'rank' if len(ranks) == 1 else 'ranks'} {', '.join(ranks)}  {line}")
    return "\n".join(text).lstrip("\n")


def settings(words: Sequence[str], name: str, step: int | None) -> tuple[RunConfig, str, int]:
    """The arguments of :func:`observe`, checked.

    Raises:
        ConfigError: as train.py's; or the model has no such parameter.
    """
    given = {word.partition("=")[0] for word in words}
    tiny = [word for word in TINY if word.partition("=")[0] not in given]
    run = command_line.with_fallback_batch(command_line.compose([*tiny, *words]))
    resolve_batch(run.engine, run.launch.nproc or 1)
    check_library(run.model)
    with torch.device("meta"):
        names = [found for found, _ in build_model(run).named_parameters()]
    if name not in names:
        near = "".join(f"; did you mean {found}?" for found in difflib.get_close_matches(name, names, n=1, cutoff=0.4))
        raise ConfigError(f"--parameter {name}: there is none of this name{near}\nthe model has {', '.join(names)}")
    if step is not None and step < 1:
        raise ConfigError(f"--step {step}: the first step has number 1")
    return run, name, step or (2 if run.engine.zero.stage == 3 else 1)


def walk(options: argparse.Namespace) -> str:
    """Start the ranks; the transcript."""
    job = settings(options.overrides, options.parameter, options.step)
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "seen.json")
        environment = {"DEEPZERO_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
        launch(__file__, "program", (*job, str(answer)), nproc=job[0].launch.nproc or 1, environment=environment)
        return transcript(json.loads(answer.read_text(encoding="utf-8")))


PLACE = re.compile(r"^<!-- walk: (.*) -->\n(?:\n?```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)
"""In a page: the words of the command, and the transcript below them."""


def options_of(words: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        "python -m tools.walk", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("overrides", nargs="*", metavar="KEY=VALUE", help="as for train.py: zero.stage=3 launch.nproc=4")
    add("--parameter", metavar="NAME", default=PARAMETER, help=f"default: {PARAMETER}")
    add("--step", type=int, metavar="N", help="which step; default: 1, in stage 3 the 2nd, which follows a plan")
    add("--update", action="store_true", help="make every transcript in docs/ anew, and nothing else")
    return parser.parse_intermixed_args(words)


@composed.tool
def main(argv: Sequence[str] | None = None) -> int:
    """Print the transcript; 0, 1 where a rank failed, or 2 for settings that cannot be used."""
    options = options_of(argv)
    renewed = lambda place: f"<!-- walk: {place[1]} -->\n\n```text\n{walk(options_of(shlex.split(place[1])))}\n```\n"
    try:
        for page in sorted(ROOT.glob("docs/*.md")) if options.update else ():
            page.write_text(PLACE.sub(renewed, page.read_text(encoding="utf-8")), encoding="utf-8")
        if not options.update:
            print(walk(options))
    except RankFailed as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    exit_with(main)
