"""The journey of one gradient, or in stage 3 of one parameter, told while it happens.

    python -m tools.walk zero.stage=2 --parameter blocks.0.attn.qkv.weight
    python -m tools.walk --update  # makes the transcripts in docs/ anew

Real ranks on this machine build a tiny GPT and take an optimizer step. Python's profiler reports every function that is
called. Of those in HOPS (tools/walk.py) the ones that handle the parameter are printed, in the order of their calls,
with the lines of source that count and the tensors that they hold; steps have docs/step.md's numbers.
"""

from __future__ import annotations

import argparse
import difflib
import inspect
import itertools
import json
import re
import shlex
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any, NamedTuple

import torch

from deepzero.comm import process_group
from deepzero.config.engine import resolve_batch
from deepzero.config.run import RunConfig
from deepzero.config.strict import ConfigError, require
from deepzero.launch.launcher import RankFailed, launch
from deepzero.models.hf import check_library
from deepzero.runtime.initialize import initialize
from deepzero.runtime.pytree import scalar_loss
from deepzero.runtime.zero.partitioned_param_coordinator import in_backward
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
    name: str  # as :func:`code_of` finds it
    text: str
    quotes: str  # texts, with | between them: the lines of the function's source that contain one of them are printed
    shows: dict[str, str] | None = None  # name: expression over its names, `returned`, `caller`, and `w`, the Watch
    when: str = "call"  # read, and printed, when the function begins; or when it ends, at its "return"
    whose: str = "mine"  # "callers": called on behalf of the bucket; "all": of all parameters at once
    at: str = ""  # the function at which it is printed, if that is another one


BUILD, FETCH, RELEASE, READY = "0 build", "1 fetch", "2 release", "3 gradient ready"
BOUNDARY, STEP, PUBLISH = "4 boundary", "5 step", "6 publish"
NOW, MINE, SHARD = {"param": "w.param.data"}, {"grad_S": "w.grad_S", "master_S": "w.master"}, {"shard_S": "w.shard"}
HOPS = (
    Hop(BUILD, "take_values", "rank 0's values arrive",
        "values = |param.data = |comm.broadcast(", {"values": "returned"}, "return"),
    Hop(BUILD, "ParamGroup._keep_fragments", "my fragment: uncast into the fp32 master, cast into flat_P or shard_S",
        "values = self.|part = values|= into_master(|else kept|.param_fragment(self.", NOW, "return"),
    Hop(BUILD, "ParamGroup._attach_params", "the parameter becomes a view of flat_P",
        "self.comm.all_gather(|param.data = ", NOW, "return"),
    Hop(BUILD, "OptimizerShard.__init__", "the optimizer's tensors on this rank; grads[master] is a view of grad_S",
        "torch.zeros(|self.grads = ", MINE, "return", "all"),
    Hop(FETCH, "ModuleHooks._pre_forward_hook.pre_forward", "its module is about to run; from here on autograd saves "
        "by `pack`, and reads by `unpack`", "self._stack.append(|for key in|if key not in|coordinator.fetch"),
    Hop(FETCH, "ModuleHooks.unpack", "the backward pass reads what was saved; a bucket in `current` needs no fetch",
        "if packed.key|self.coordinator.fetch|flat = bucket|view = flat.as"),
    Hop(FETCH, "PartitionedParameterCoordinator.fetch_sub_module", "keys: bucket numbers; planned: what the plan has "
        "for this use; live: launched, not released; current: keys of the use under way, until the next",
        "planned = |.release_s|is not None:|fetches|.launch(|nt_l|nt = fro|in keys:|LIGHT:|.wait()|ms and|.show()  #",
        {"keys": "list(keys)", "by": "f'{caller}, for ' + 'the bucket of ' * (not show_params) + where"}),
    Hop(FETCH, "PartitionedBucket.launch", "NOT_AVAILABLE to INFLIGHT",
        "buffer = self.pool|.launch(kind|self.status = ", SHARD),
    Hop("", "PlainAllGather.launch", "into: the bucket; messages: its buffer (qwZ has others); my shard is copied "
        "to its place there and sent (fetch_shard: offload)", "messages, rank|.fetch_shard(|self.make_m|self._pend"),
    Hop("", "Communicator.exchange", "torch is called: whole parts of the bucket are sent, on CPUs one by one",
        ".isend(", {"send": "[*send[: self.rank], *send[self.rank + 1 :]]"}, whose="callers"),
    Hop(FETCH, "PartitionedBucket.wait", "INFLIGHT to AVAILABLE", ".finish()|self.status = ",
        {"gathered": "w.part_of(self.gathered)"}, "return"),
    Hop("", "PartitionedBucket.show", "parameters become views: no copy", "whole, start = |for param|param.show("),
    Hop("", "ZeroParameter.show", "what the parameter shows from here on", "self.data = ", {"param": "values"}),
    Hop("", "ModuleHooks.pack", "autograd saves the weight; in its place it gets a record",
        "found = self|offset = |SavedWeight(owner", {"shape": "list(returned.shape)"}, "return"),
    Hop(RELEASE, "PartitionedParameterCoordinator.release_sub_module", "by the next fetch; _release calls "
        "what is below", "planned.rel|# True", {"released": "f'{[*planned.release]}, as {[*next_keys]} is fetched'"}),
    Hop(RELEASE, "PartitionedBucket.release", "AVAILABLE to NOT_AVAILABLE; give takes the buffer at `address` back "
        "into the pool; shard_is_buffer: with one rank", "self.hide()|self._gathered = |self.status = |pool.give("),
    Hop(READY, "BackwardPasses._gradient_ready", "autograd's hook", "self._stage.", {"param.grad": "param.grad"}),
    Hop(READY, "GradientReducer.reduce_ready_gradient", "taken, counted; complete buckets leave, in `order`; sent_now: "
        "in stage 2 always; again: a second in the pass", ".take(|._count(|while not|._reduce_b|._cursor +="),
    Hop(READY, "UnreducedGradients.take", "it is taken out of param.grad",
        "param.grad = |waiting[param_id] = ", {"param.grad": "w.param.grad"}, "return"),
    Hop(READY, "GradientReducer._count", "missing: how many gradients the bucket still waits for",
        "-= 1", {"missing": "self._missing[self._position[param_id]]"}, "return"),
    Hop("", "GradientReducer._reduce_bucket", "output: the bucket's part of grad_S; accumulate: add, from the 2nd "
        "micro-batch on; rest: offload, norm", ".grad_output(|.acquire(|.fill(|.launch(", {"bucket": "bucket.index"}),
    Hop("", "UnreducedGradients.fill", "the bucket's gradients are copied into views of the buffer, and freed",
        "in zip(views|_waiting.pop(|s.append(|_foreach_copy_(", {"send_buffer": "w.part_of(send_buffer)"}, "return"),
    Hop("", "BucketReducer._launch_exact", "called by launch, as comm.reduce is exact; outgoing: a part for each "
        "owner; recv: the others' terms of our sum; our own stays here", "inflight.terms = |comm.exchange("),
    Hop("", "BucketReducer._finish", "by drain at the boundary, or by acquire when its buffer is needed; no overlap: "
        "by launch, at once", "pending.wait()|comm.sum_in"),
    Hop("", "sum_in_rank_order", "adds up terms", "target = output|total = t|sum_chunk(|on_chunk(", whose="callers"),
    Hop("", "sum_chunk", "in fp32, in rank order: rank 0's term is copied, or added too with accumulate",
        "for number|added = |values = |values.copy_(|if added|total.add_(", whose="callers"),
    Hop("", "sum_in_rank_order", "at its end: the terms and their sum", "on_chunk(target",
        {"term": "[f'from rank {q}  ' * (len(terms) > 1) + line for q, term in enumerate(terms)"
                 " for line in in_words(w.fragment_of(term))]", "sum": "w.fragment_of(output)"}, "return", "callers"),
    Hop(BOUNDARY, "Engine._take_model_step", "steps 4 to 6, for all parameters; in _prepare_step stage 3 releases "
        "all, and makes its plan in the first step", "_prepare_step(|.reduce_gradients(", whose="all"),
    Hop(STEP, "Engine._take_model_step", "mean_divisor: ranks x micro-batches x loss scale; skipped if not finite",
        "= agree(|norm = |clip = |if agreement.finite:|_shard.step(", whose="all", at="agree"),
    Hop(STEP, "agree", "summed over ranks: squared norm (integers in bins: no order matters), losses, flags",
        "comm.all_reduce(|return Step", {"norm of the sums": "returned.norm"}, "return", "all"),
    Hop(STEP, "OptimizerShard._unscale_and_step", "by step; grad_S (to() makes no copy) is divided, if the kernel "
        "does not", "grads = |.grad = g|unscale_and_c|optimizer.st", {"divisor": "divisor"} | MINE, "return", "all"),
    Hop(PUBLISH, "Engine._take_model_step", "step 6", ".publish(", None, "return", "all", "OptimizerShard.step"),
    Hop(PUBLISH, "ZeroStage1And2.publish_bucket", "called by all_gather_dp_groups: my part is cast from the masters",
        ".copy_(|.launch_all"),
    Hop(PUBLISH, "ZeroStage1And2.launch_all_gather", "whole: this bucket in flat_P", ".all_gath", {"cast": "w.shard"}),
    Hop(PUBLISH, "ZeroStage1And2.wait_all_gathers", "called by publish, at last", ".wait()", NOW, "return", "all"),
    Hop(PUBLISH, "PartitionedParamGroup.cast_masters", "the masters are cast", "masters := |.copy_(", SHARD, "return"),
)  # fmt: skip


def code_of(name: str) -> CodeType:
    """The code of a function of the core: ``function``, ``Class.method``, or one inside another one."""
    first, *rest = name.split(".")
    core = [vars(module) for path, module in sys.modules.items() if re.match(r"deepzero\.(comm|runtime)\.", path)]
    found = inspect.unwrap(next(names[first] for names in core if first in names))
    for part in rest:
        if inside := getattr(found, "__code__", None):
            return next(one for one in inside.co_consts if isinstance(one, CodeType) and one.co_name == part)
        found = inspect.unwrap(getattr(found, part))
    return found.__code__


def in_source(hop: Hop) -> tuple[str, dict[int, str]]:
    """Where the function is: its file, and the line of its head, before which are decorators; and what is quoted."""
    lines = dict(enumerate(*inspect.getsourcelines(code := code_of(hop.name))))
    head = next(number for number, line in lines.items() if line.lstrip().startswith("def "))
    found = {number: line for number, line in lines.items() if any(map(line.__contains__, hop.quotes.split("|")))}
    quoted = textwrap.dedent("".join(found.values())).splitlines()
    return f"{Path(code.co_filename).relative_to(ROOT).as_posix()}:{head}", dict(zip(found, quoted, strict=True))


class Watch:
    """What one rank sees of ``param``: ``seen`` has the hops' numbers, which pass it is, and what they hold."""

    def __init__(self, param: torch.nn.Parameter) -> None:
        self.param, self.seen = param, list[tuple[int, str, list[str]]]()
        self.group = self.bucket = None  # of the layout; None until they are built
        self.master = self.grad_S = None  # of this rank's fragment; None where other ranks own all of it
        self._hops = {(code_of(hop.at or hop.name), hop.when): number for number, hop in enumerate(HOPS)}

    def learn(self, shard: Any) -> None:
        """Find the parameter in the ``OptimizerShard``, which is built last. The expressions of HOPS read it here."""
        for group in shard.groups:
            for param, slot in zip(group.params, group.layout.slots, strict=True):
                if param is self.param:
                    self.group, self.slot, self.rank = group, slot, shard.rank
        self.bucket = next(bucket for bucket in self.group.layout.buckets if self.slot in bucket.slots)
        if mine := self.group.fragment_and_master(self.slot.index):
            self.fragment, self.master = mine
            self.grad_S = shard.grads[self.master]
        self.key = getattr(getattr(getattr(self.param, "_record", None), "bucket", None), "key", None)  # its number

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

    def is_mine(self, value: Any) -> bool:
        """Whether a value is the parameter, is a list with it, or belongs to its bucket."""
        if value is self.param or (isinstance(value, list) and any(one is self.param for one in value)):
            return True
        if self.bucket is not None and type(value).__name__ == "SavedWeight":
            return bool(value.key == self.key and value.offset == self.slot.offset - self.bucket.offset)
        holds = (getattr(value, name, None) for name in ("bucket", "in_layout"))  # what is under way; stage 3's bucket
        return self.bucket is not None and self.bucket in (value, *holds)

    def concerns(self, hop: Hop, frame: FrameType, returned: Any) -> bool:
        """Whether a call is about the parameter."""
        if hop.whose == "all":  # of all parameters, or of those of some groups
            return any(group is self.group for group in getattr(frame.f_locals.get("self"), "groups", [self.group]))
        if returned is not None and hop.name == "ModuleHooks.pack":
            return self.is_mine(returned)
        for _ in range(4 if hop.whose == "callers" else 1):
            names = frame.f_locals if self.bucket or hop.whose == "mine" else {}
            # Of a group's function that is called bucket by bucket, the call for the parameter's own.
            many = None if self.bucket and "bucket" in names else getattr(names.get("self"), "params", None)
            keys = getattr(names.get("planned"), "release", ()) if hop.step == RELEASE else names.get("keys", ())
            if any(map(self.is_mine, [*names.values(), many])) or (self.bucket and self.key in keys):
                return True
            if "bucket" in names or frame.f_back is None:  # the nearest caller with a bucket says which
                return False
            frame = frame.f_back
        return False

    @torch.no_grad()
    def profile(self, frame: FrameType, event: str, returned: Any) -> None:
        """For :func:`sys.setprofile`."""
        if (number := self._hops.get((frame.f_code, event))) is None:
            return
        if (hop := HOPS[number]).name == "OptimizerShard.__init__":
            self.learn(frame.f_locals["self"])
        with torch._C.DisableTorchFunctionSubclass():
            if self.concerns(hop, frame, returned):
                above = frame.f_back.f_back if frame.f_back.f_code.co_name == "inner" else frame.f_back  # no wrapper
                ours = {"returned": returned, "w": self, "caller": above.f_code.co_name}
                names = {**globals(), **frame.f_globals, **frame.f_locals, **ours}
                held = {name: in_words(eval(expression, names)) for name, expression in (hop.shows or {}).items()}
                told = [f"{name}  {line}" for name, lines in held.items() for line in lines]
                prefetched = hop.name == "PartitionedBucket.launch" and above.f_locals.get("note")
                during = (", backward" if in_backward() else ", forward") + ", by a prefetch" * bool(prefetched)
                self.seen.append((number, during * (hop.step == FETCH), told))


def in_words(value: Any) -> list[str]:
    """A value, one line for each tensor."""
    if isinstance(value, list) and value and not isinstance(value[0], int):
        return [line for one in value for line in in_words(one)]
    if not isinstance(value, torch.Tensor):
        return [{type(None): "none", float: "{:.4g}", FunctionType: "encoded"}.get(type(value), "{}").format(value)]
    kind, memory = f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}", value.untyped_storage().nbytes()
    if memory < value.nbytes:
        return [f"{kind}, a placeholder of {memory} bytes"]
    numbers = [f"{number:.4g}" for number in value.detach().flatten()[:3].tolist()]
    return [f"{kind}, {value.nbytes:,} bytes: {' '.join(numbers)}{' …' * (value.numel() > 3)}"]


def observe(run: RunConfig, name: str, steps: int) -> list[tuple[int, str, list[str]]]:
    """On every rank: build the engine and take ``steps`` steps; watch the building and the last step."""
    torch.manual_seed(run.train.seed)
    model = build_model(run)
    watch = Watch(dict(model.named_parameters())[name])
    from torch import _dynamo  # noqa: F401  # the first step imports it: watched, that would take ten seconds

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
    return watch.seen


def program(run: RunConfig, name: str, steps: int, answer: str) -> None:
    """One rank; rank 0 writes down what all have seen."""
    process_group.init_distributed("gloo", timeout_seconds=120)
    seen = process_group.gather_object(observe(run, name, steps))
    process_group.shutdown()
    if seen is not None:
        Path(answer).write_text(json.dumps(seen), encoding="utf-8")


def transcript(seen: Sequence[Sequence[Sequence[Any]]], above: str = "") -> str:
    """The ranks' reports, hop by hop; what several saw alike stands once. What the page has ``above`` is not quoted."""
    text, step, known = list[str](), "", set[str]()
    for calls in zip(*seen, strict=True):  # all ranks make the same calls: what else they launch would not be paired
        ((number, during),) = {(number, during) for number, during, _ in calls}
        told = f" {(hop := HOPS[number]).name}\n" in above
        if hop.step and hop.step + during != step and (hop.step, step) != (RELEASE, BOUNDARY):
            step = hop.step + during
            text.append(f"\n{step}" + "\n  as in a gradient's way, step 3, and its sum" * (told and step == READY))
        if told and step == READY:
            continue
        place, quoted = in_source(hop)
        text.append(f"  {place} {hop.name}")
        if not told and hop.text not in known:  # whoever meets the function again has read them
            text += [f"    {hop.text}", *(f"{number:>8} | {line}" for number, line in quoted.items())]
        known |= {hop.text} if step != BUILD else set()  # step 0 is for looking up
        for column in itertools.zip_longest(*(lines for *_, lines in calls)):
            for line in dict.fromkeys(filter(None, column)):
                ranks = [str(rank) for rank, found in enumerate(column) if found == line]
                text.append(f"    {'rank' if len(ranks) == 1 else 'ranks'} {', '.join(ranks)}  {line}")
    return "\n".join(text).lstrip("\n")


def settings(words: Sequence[str], name: str, step: int | None) -> tuple[RunConfig, str, int]:
    """The arguments of :func:`observe`; raises ConfigError as train.py does, or where there is no such parameter."""
    tiny = [word for word in TINY if word.partition("=")[0] not in {given.partition("=")[0] for given in words}]
    run = command_line.with_fallback_batch(command_line.compose([*tiny, *words]))
    resolve_batch(run.engine, run.launch.nproc or 1)
    check_library(run.model)
    with torch.device("meta"):
        names = [found for found, _ in build_model(run).named_parameters()]
    if name not in names:
        near = "".join(f"; did you mean {found}?" for found in difflib.get_close_matches(name, names, n=1, cutoff=0.4))
        raise ConfigError(f"--parameter {name}: there is none of this name{near}\nthe model has {', '.join(names)}")
    require(step is None or step >= 1, "--step", step, "the first step has number 1")
    return run, name, step or (2 if run.engine.zero.stage == 3 else 1)


def walk(options: argparse.Namespace, above: str = "") -> str:
    """Start the ranks; the transcript."""
    job = settings(options.overrides, options.parameter, options.step)
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "seen.json")
        environment = {"DEEPZERO_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
        launch(__file__, "program", (*job, str(answer)), nproc=job[0].launch.nproc or 1, environment=environment)
        return transcript(json.loads(answer.read_text(encoding="utf-8")), above)


PLACE = re.compile(r"^<!-- walk: ([^\n]*) -->\n(?:\n?```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)
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
    told = lambda place: walk(options_of(shlex.split(place[1])), place.string[: place.start()])
    renewed = lambda place: f"<!-- walk: {place[1]} -->\n\n```text\n{told(place)}\n```\n"
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
