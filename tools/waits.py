"""Every wait is needed: each is taken out in turn, and simulated streams have to notice.

::

    python -m tools.waits                          # all, some minutes; exit status 1 if one is not noticed
    python -m tools.waits --only copy_streams      # those whose name holds the text
    python -m tools.waits --list                   # what there is, and which program reaches it first

A *wait* is what orders two streams, or a stream and the program: ``record``, ``wait``, ``synchronize``, ``finish`` of
an event, a copy or a collective. They are found in the syntax trees of the package (:func:`sites`), called or handed on
as a function. Programs then run on simulated streams, and whatever an event, a collective or a synchronisation passes
by on its way says which of the sites it came from: what only shares the name (``ledger.record``) orders nothing and is
left alone. A site is taken out (``copy.wait()`` becomes ``copy``) in the quickest program that reaches it, then in the
others, until one raises or gives another result.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import contextlib
import functools
import gc
import importlib
import inspect
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch

from deepzero.comm import simulated_streams as simulation
from deepzero.device import accelerator_of
from tools.rewrite import PACKAGE, ROOT, rewritten, tree_of

VERBS = {"record", "wait", "synchronize", "finish"}
HANDED = "__deepzero_handed__"
LOOKING_ON = {"device.py", "comm/simulated_streams.py", "comm/happens_before.py"}
"""The devices themselves, and who looks on."""
ELSEWHERE = {
    "runtime/zero/overlap_param_gather.py OverlappedZeroStage1And2.wait_all_gathers: self._under_way[0].wait()": (
        "tests/distributed/test_overlap_param_gather.py: collectives of NCCL are in one order, gloo's are not"
    )
}
"""Noticed on CPUs, and by which test: on a GPU another wait implies it."""


@dataclass(frozen=True)
class Site:
    """A wait: in which file, the how-maniest of it; its line, its function, its words; called, or handed on."""

    file: str
    number: int
    line: int
    function: str
    words: str
    called: bool
    statement: bool
    """The call is a statement of its own."""

    def __str__(self) -> str:
        return f"{self.file} {self.function}: {self.words}"


class _Waits(ast.NodeTransformer):
    """Finds the waits of a file, and takes the one numbered ``target`` out; -1: all that are handed on say so."""

    def __init__(self, file: str, target: int | None = None, verbs: Collection[str] = VERBS) -> None:
        self.file, self.target, self.verbs, self.found = file, target, verbs, list[Site]()
        self._path: list[str] = []
        self._statement: ast.AST | None = None

    def visit(self, node: ast.AST) -> Any:
        named = isinstance(node, (ast.FunctionDef, ast.ClassDef))
        if named:
            self._path.append(node.name)  # type: ignore[attr-defined]
        if isinstance(node, ast.Expr):
            self._statement = node.value
        called = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in self.verbs
        handed = isinstance(node, ast.Attribute) and node.attr in self.verbs and isinstance(node.ctx, ast.Load)
        if not called and not handed:
            node = self.generic_visit(node)
        elif self._path:
            receiver = node.func if called else node  # type: ignore[attr-defined]
            receiver.value = self.visit(receiver.value)
            words, line = " ".join(ast.unparse(node).split())[:100], int(receiver.end_lineno)
            place = (self.file, len(self.found), line, ".".join(self._path))
            self.found.append(Site(*place, words, called, node is self._statement))
            if self.target == -1 and not called:
                which = ast.parse(f"{HANDED}({len(self.found) - 1}, {self.file!r})", mode="eval").body
                which.args.append(node)  # type: ignore[attr-defined]
                node = ast.copy_location(which, node)
            elif len(self.found) - 1 == self.target:
                nothing = ast.parse("lambda *_, **__: None", mode="eval").body
                node = ast.copy_location(receiver.value if called else nothing, node)
        if named:
            self._path.pop()
        return node


def sites(files: Iterable[str] | None = None, verbs: Collection[str] = VERBS) -> list[Site]:
    """All waits of the package, or of some of its files."""
    found = []
    for file in files or sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py")):
        if file not in LOOKING_ON and not file.startswith(("compat/", "profiling/")):
            waits = _Waits(file, verbs=verbs)
            waits.visit(tree_of(file))
            found += waits.found
    return found


def changed(file: str, target: int, verbs: Collection[str] = VERBS) -> contextlib.AbstractContextManager[None]:
    """Inside, every function of a file has what :class:`_Waits` has made of it."""
    return rewritten(file, _Waits(file, target, verbs).visit(tree_of(file)))


# ---- programs --------------------------------------------------------------------------------------------------------


def programs() -> dict[str, Callable[[], Any]]:
    """Each shows what can be seen of it."""
    from tests.distributed import test_null_gpu as parts
    from tests.distributed.test_offload import settings
    from tests.distributed.test_removals import PROGRAMS

    def overlapped(ratio: float | None) -> dict[str, Any]:
        given = settings(2, ratio, precision="bf16", gradient_accumulation_steps=2)
        given["zero_optimization"]["overlap_param_gather"] = True
        return given

    delayed = 2, settings(
        3, 1.0, precision="bf16", offload={"delayed_update": True, "delay_after_steps": 0}
    ), "plain"  # fmt: skip
    made: dict[str, Callable[[], Any]] = {
        name: functools.partial(engine_of, *given) for name, given in PROGRAMS.items()
    }
    return made | {
        "alone on the device": functools.partial(engine_of, 1, settings(2, precision="bf16"), "plain"),
        "built by zero.Init": functools.partial(engine_of, *PROGRAMS["stage 3 on the host"], init=True),
        "activations": parts.activations,
        "activations, poisoned": functools.partial(parts.activations, chaos=True),
        "publishing under the forward pass": functools.partial(engine_of, 2, overlapped(0.5), "plain"),
        "the same, from the device": functools.partial(engine_of, 2, overlapped(None), "plain"),
        "the delayed update of stage 3": functools.partial(engine_of, *delayed),
        "a load": parts.test_a_load_waits_for_the_last_copies,
        "a pass that breaks off": broken_off,
        "readers between steps": functools.partial(
            read_between_steps, {**overlapped(None), "gradient_accumulation_steps": 1}
        ),
        "a load by one of two ranks": loaded_by_two,
        "a gradient of another stream": parts.test_a_gradient_of_another_stream_is_not_freed_too_early,
        "several streams": functools.partial(parts.of_several_streams, 2),
        "batches": parts.test_batches_come_one_ahead,
        "batches, not all of them": stopped_early,
    }


def engine_of(world: int, given: dict[str, Any], kind: str, init: bool = False) -> Any:
    """Some steps of an engine on simulated streams, and what can be done between them."""
    import deepzero
    from deepzero.utils import safe_get_full_fp32_param, safe_get_full_grad, safe_set_full_fp32_param
    from tests.distributed.null_gpu import null_gpu
    from tests.distributed.training import KINDS, make_batch

    torch.manual_seed(0)
    seen: list[Any] = []
    with null_gpu(world if world > 1 else 0), tempfile.TemporaryDirectory() as folder:
        with deepzero.zero.Init(enabled=init, remote_device="cpu"):
            model = KINDS[kind]()
        engine, *_ = deepzero.initialize(model=model, config=given)
        weight = dict(engine.module.named_parameters())["blocks.0.1.weight"]

        def batch(number: int) -> list[torch.Tensor]:
            return [t.to("cuda:0") for t in make_batch(number, 2)]

        def look(module: Any, *_: Any) -> None:
            with deepzero.zero.GatheredParameters(module.weight):
                seen.append(float(module.weight.detach().float().sum()))

        for step in range(4):
            looking = engine.module.blocks[0][1].register_forward_hook(look) if step == 1 else None
            for k in range(engine.batch.accumulation):
                engine.backward(engine(*batch(10 * step + k)))
                if step == 2 and k == 0:  # a micro-batch that does not count
                    engine.zero_grad()
                    engine.backward(engine(*batch(3)))
                if engine.is_gradient_accumulation_boundary():
                    grad = safe_get_full_grad(weight)
                    seen.append(None if grad is None else float(grad.sum()))
                engine.step()
            if looking is not None:
                looking.remove()
            if step == 0:
                with torch.no_grad():
                    engine(*batch(5))
                engine.finish_delayed_update()
                with deepzero.zero.GatheredParameters(weight, modifier_rank=0), torch.no_grad():
                    weight.mul_(0.5)
                engine.offload_states(non_blocking=True)
                engine.reload_states(non_blocking=True)
            if step == 1:
                engine.finish_delayed_update()
                safe_set_full_fp32_param(weight, safe_get_full_fp32_param(weight).cpu() + 0.125)
                engine.offload_states()
                engine.reload_states()
                engine.load_module_state_dict({k: v + 0.25 for k, v in engine.module_state_dict().items()})
                for tag in ("one", "two") if world == 1 else ():
                    engine.save_checkpoint(folder, tag, asynchronous=True)
            seen.append((engine.last_step.loss, engine.last_step.grad_norm))
        if world == 1:
            engine.load_checkpoint(folder)
            engine.backward(engine(*batch(7)))
        seen.append(engine.params_sha256())
        engine.destroy()
        del engine, weight, model
        gc.collect()
    return seen


def stopped_early() -> None:
    """Who takes a batch and no more frees the next one, which is on its way."""
    from tests.distributed.test_null_gpu import test_who_stops_early_frees_no_memory_under_a_copy as stop

    with pytest.MonkeyPatch.context() as patch:
        stop(True, patch)


def broken_off() -> Any:
    """A parameter is written that a forward pass has prefetched, and has not come to."""
    import deepzero
    from deepzero.utils import safe_set_full_fp32_param
    from tests.distributed.null_gpu import null_gpu
    from tests.distributed.test_offload import settings
    from tests.distributed.training import KINDS, make_batch

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    torch.manual_seed(0)
    with null_gpu(2):
        engine, *_ = deepzero.initialize(model=KINDS["plain"](), config=settings(3, precision="bf16"))
        batch = [t.to("cuda:0") for t in make_batch(0, 2)]
        for _ in range(2):
            engine.backward(engine(*batch))
            engine.step()
        breaking = engine.module.blocks[0][0].register_forward_hook(stop)
        with contextlib.suppress(KeyboardInterrupt):
            engine(*batch)
        breaking.remove()
        stage3 = engine.zero.stage3
        bucket = next(b for b in stage3.coordinator.buckets if b.status.name == "INFLIGHT")
        safe_set_full_fp32_param(bucket.params[0], torch.zeros(bucket.params[0].ds_shape))
        engine.backward(engine(*batch))
        engine.step()
        seen = engine.last_step.loss, engine.params_sha256()
        engine.destroy()
        del engine, stage3, bucket
        gc.collect()
    return seen


def read_between_steps(given: dict[str, Any]) -> Any:
    """Parameters are on their way, and are read: by a model in eval mode, by a view, when the program ends."""
    import deepzero
    from deepzero.runtime.zero import overlap_param_gather
    from tests.distributed.null_gpu import null_gpu
    from tests.distributed.training import KINDS, make_batch

    torch.manual_seed(0)
    with null_gpu(2):
        engine, *_ = deepzero.initialize(model=KINDS["plain"](), config=given)
        (group,) = engine.zero.groups
        batch, seen, held = [t.to("cuda:0") for t in make_batch(0, 2)], [], None
        for step in range(6):
            engine.backward(engine(*batch))
            engine.step()
            if step == 1:  # what is sent first is waited for alone, unless a module in eval mode reads for others
                engine.module.embed.eval()(batch[0])
                seen.append(group.flat_P.float().sum())
                engine.module.embed.train()
            if step == 2:  # first used on a stream of the program's own; and by two threads at once, on two streams
                bias = engine.module.blocks[0][1].bias
                bucket = vars(bias)["_under_way"]
                for _ in range(2):
                    with accelerator_of(group.device).stream(group.device).running():
                        bucket.wait()
                        seen.append(bias.detach().float().sum())
                accelerator_of(group.device).synchronize(group.device)
            if step == 3:
                held = group.flat_P[1:]
            if step == 5:
                assert held is not None
                seen.append(held.float().sum())
                held = None
        # Of most modules nobody asks anything in this step; it writes over what is on its way to them.
        engine.backward(engine.module.embed(batch[0]).float().mean())
        engine.step()
        under_way = len(overlap_param_gather.all_under_way())
        overlap_param_gather.finish()
        seen.append(group.flat_P.float().sum())
        shown = [under_way, *map(float, seen)]
        engine.destroy()
        del engine, group, held
        gc.collect()
    return shown


def loaded_by_two() -> Any:
    """What one rank has saved in stage 0 is read by the first of two, who each read a part and send it."""
    import deepzero
    from tests.distributed.null_gpu import null_gpu
    from tests.distributed.test_offload import settings
    from tests.distributed.training import KINDS, make_batch

    seen = []
    with tempfile.TemporaryDirectory() as folder:
        for world in (0, 2):
            torch.manual_seed(0)
            with null_gpu(world):
                engine, *_ = deepzero.initialize(model=KINDS["plain"](), config=settings(0, precision="bf16"))
                if world:
                    engine.load_checkpoint(folder)
                batch = [t.to("cuda:0") for t in make_batch(0, 2)]
                engine.backward(engine(*batch))
                engine.step()
                seen.append(engine.params_sha256())
                if not world:
                    engine.save_checkpoint(folder)
                engine.destroy()
                del engine
                gc.collect()
    return seen


@contextlib.contextmanager
def passers(found: list[Site]) -> Iterator[set[Site]]:
    """Which sites are on the stack when something is ordered inside."""
    lines: dict[tuple[str, int], list[Site]] = {}
    for site in found:
        lines.setdefault((str(PACKAGE / site.file), site.line), []).append(site)
    passed: set[Site] = set()
    running: list[Site] = []
    numbered = {(site.number, site.file): site for site in found}

    def handed(number: int, file: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            running.append(numbered[number, file])
            try:
                return function(*args, **kwargs)
            finally:
                running.pop()

        return call

    def on_the_way() -> set[Site]:
        frame, here = sys._getframe(2), set(running)
        while frame is not None:
            here.update(lines.get((frame.f_code.co_filename, frame.f_lineno), ()))
            frame = frame.f_back  # type: ignore[assignment]
        return here

    def watched(method: Any, records: bool) -> Any:
        def call(self: Any, *args: Any) -> Any:
            # To record orders nothing before somebody waits: an event that only takes the time never does.
            if records:
                self.recorded_at = on_the_way()
            else:
                passed.update(on_the_way(), getattr(self, "recorded_at", ()))
            return method(self, *args)

        return call

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(builtins, HANDED, handed, create=True))
        for file in {site.file for site in found if not site.called}:
            stack.enter_context(changed(file, -1))
        for kind, names in (
            (simulation._Event, ("record", "wait", "synchronize")),
            (simulation._Work, ("wait",)),
            (simulation.SimulatedAccelerator, ("synchronize",)),
        ):
            for name in names:
                stack.enter_context(mock.patch.object(kind, name, watched(getattr(kind, name), name == "record")))
        yield passed


@dataclass
class Baseline:
    """What a program shows when nothing is left out, how long that takes, and which sites it passes."""

    shown: str
    seconds: float
    passed: set[Site]


def baselines(found: list[Site], only: Collection[str] = ()) -> dict[str, Baseline]:
    """Of all programs, or of some, the quickest first."""
    made = {}
    for program, show in programs().items():
        if only and program not in only:
            continue
        run_once = time.perf_counter()
        with passers(found) as passed:
            shown = str(show())
        made[program] = Baseline(shown, time.perf_counter() - run_once, passed)
    return dict(sorted(made.items(), key=lambda item: item[1].seconds))


def notices(site: Site, known: dict[str, Baseline]) -> tuple[str, str] | None:
    """Which program notices that a site is gone, and how; None: none."""
    for program, calm in known.items():
        if site not in calm.passed:
            continue
        with changed(site.file, site.number):
            try:
                shown = str(programs()[program]())
            except Exception as error:
                return program, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        if shown != calm.shown:
            return program, "other results"
    return None


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=inspect.getdoc(sys.modules[__name__]).splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--only", default="", metavar="TEXT")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args(arguments)
    sys.path.insert(0, str(ROOT))
    importlib.import_module("deepzero")
    found = sites()
    known = baselines(found)
    ordering = [site for site in found if any(site in calm.passed for calm in known.values())]
    chosen = [site for site in ordering if options.only in str(site)]
    silent = [site for site in found if site not in ordering]
    unnoticed = []
    for number, site in enumerate(chosen if not options.list else ()):
        noticed = notices(site, known)
        elsewhere = ELSEWHERE.get(str(site), "")
        unnoticed += [site] * (noticed is None and not elsewhere)
        said = elsewhere or "NOT NOTICED" if noticed is None else f"{noticed[0]}: {noticed[1][:110]}"
        print(f"{number + 1}/{len(chosen)} {site}\n    {said}", flush=True)
    for site in silent if options.list or not options.only else ():
        print(f"orders nothing here: {site}")
    print(
        f"{len(found)} of these names, {len(ordering)} order something; not noticed: {len(unnoticed)} of {len(chosen)}"
    )
    return int(bool(unnoticed))


if __name__ == "__main__":
    sys.exit(main())
