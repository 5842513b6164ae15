"""Loading: fill what this engine holds from a checkpoint of any stage and any number of ranks. Collective.

    1  find       rank 0 reads the manifest, compares its hash and all file sizes, and hands it to the others
    2  compare    is it this model, this optimizer? Refused before anything is changed
    3  read       each rank reads the runs that it holds, and the blocks around them; what nobody needs is checked, too
    4  complete   what all ranks hold alike goes from the rank that has read it to the others
    5  apply      hyper-parameters, schedule, loss scale, generators; the engine publishes the parameters

Step 3 writes into the live tensors, which would otherwise be held twice. When it fails, the engine holds a mixture; it
says so at every use until a load succeeds.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from deepzero.checkpoint import rng
from deepzero.checkpoint.checkpoint_dir import complete_beside
from deepzero.checkpoint.engine_state import EngineState, class_name, flat, plain_name
from deepzero.checkpoint.errors import CheckpointError, NoCheckpoint, OtherModel, naming, reason, together
from deepzero.checkpoint.json_codec import TORCH_DTYPES, decode, tensor_names
from deepzero.checkpoint.manifest import BUFFER, MASTER, PARAMETER, RNG, Entry, ParameterInfo, buffer_key
from deepzero.checkpoint.reader import CheckpointReader, read_own, remaining
from deepzero.comm import process_group
from deepzero.utils.formatting import listed
from deepzero.utils.storage import as_bytes

log = logging.getLogger(__name__)

BROADCAST = "checkpoint.broadcast"

_IMPLEMENTATION = {"foreach", "fused", "capturable", "differentiable", "per_tensor"}
"""An optimizer's settings that choose a kernel or a layout, and no result: the run's own stay."""


Format = Callable[[Path, str | None, EngineState, bool], CheckpointReader | None]
"""Given a folder, a tag, what is to be filled and whether weights are enough: a reader of another program's files, if
they are of this format; else None."""


def open_checkpoint(
    load_dir: Path, tag: str | None, holdings: EngineState, weights: bool, formats: Sequence[Format] = ()
) -> CheckpointReader:
    """1 find. A collective: rank 0 looks, and all have its manifest, or its error. What is of no format is ours."""
    found: CheckpointReader | CheckpointError | None = None
    if process_group.rank() == 0:
        try:
            foreign = (read(load_dir, tag, holdings, weights) for read in formats)
            found = next(filter(None, foreign), None) or read_own(load_dir, tag)
        except Exception as error:  # whatever it is: the others wait for this rank's word
            found = (NoCheckpoint if isinstance(error, NoCheckpoint) else CheckpointError)(reason(error))
    found = process_group.broadcast_object(found)
    if isinstance(found, CheckpointError):
        raise found
    return found


def naming_another(load_dir: Path, tag: str | None) -> contextlib.AbstractContextManager[None]:
    """Damage that is found inside is raised with the newest complete checkpoint beside it. A collective when it is."""

    def look() -> Path | None:
        beside = complete_beside(load_dir, tag) if process_group.rank() == 0 else None
        return process_group.broadcast_object(beside)

    return naming(look)


class Loader:
    """Loads one checkpoint, of which other programs' may lack buffers, into one engine's model state.

    ``optimizer``: its moments, counters and hyper-parameters, too. ``strict``: parameters and buffers have to be the
    same here and there.
    """

    def __init__(self, holdings: EngineState, reader: CheckpointReader, optimizer: bool, strict: bool) -> None:
        self.holdings, self.reader, self.optimizer, self.strict = holdings, reader, optimizer, strict
        self.manifest, self._rank = reader.manifest, holdings.comm.rank
        self._stored_as = {
            known: name for name, info in self.manifest.parameters.items() for known in (name, *info.aliases)
        }
        self._absent: set[str] = set()
        self._rng: dict[str, torch.Tensor] = {}

    def _info(self, name: str) -> ParameterInfo:
        return self.manifest.parameters[self._stored_as[name]]

    # ---- 2 compare ---------------------------------------------------------------------------------------------------

    def compare(self) -> None:
        """Raise a :class:`CheckpointError` on all ranks when the checkpoint does not fit one. Nothing changes."""
        keys: tuple[set[str], set[str]] = set(), set()
        with together(error=OtherModel):
            self._compare_model()
        with together():
            for run in self.holdings.runs():
                for known, kept in zip(keys, self.holdings.optimizer_state(run), strict=True):
                    known.update(kept)
        if self.optimizer:
            # A rank may hold nothing; what the optimizer keeps is what it keeps on any rank.
            everyone = process_group.all_gather_object(keys)
            with together():
                self._compare_optimizer(*(set().union(*sets) for sets in zip(*everyone, strict=True)))

    def _compare_model(self) -> None:
        names, buffers, stored = self.holdings.names(), self.holdings.buffers(), self._stored_as
        shapes = {known[0]: tuple(param.shape) for param, known in names.items()}
        here = {f"parameter {name!r}": shape for name, shape in shapes.items()}
        here |= {f"buffer {name!r}": tuple(tensor.shape) for name, tensor in buffers.items()}
        there = {f"parameter {name!r}": self._info(name).shape for name in shapes if name in stored}
        there |= {f"buffer {name!r}": tuple(kept["shape"]) for name, kept in self.manifest.buffers.items()}
        odd = [what for what, shape in here.items() if there.get(what, shape) != shape]
        other = [f"{what} has shape {there[what]} there and {here[what]} here" for what in odd]
        for known in names.values():
            if len(apart := sorted({stored[name] for name in known if name in stored})) > 1:
                other.append(f"{' and '.join(map(repr, apart))} are two parameters there and one (tied) here")
        kept = {name for name in shapes if name in stored and self._info(name).tensors}
        missing = {name for name, shape in shapes.items() if 0 not in shape} - kept
        self._absent = missing | (set(buffers) - set(self.manifest.buffers))
        missing = self._absent if self.reader.checked or self.reader.checks_files else missing
        self._absent = {*self._absent, *(shapes.keys() - stored)}  # one without elements, which nobody misses
        unknown = {*self.manifest.parameters, *self.manifest.buffers} - set(buffers) - set().union(*names.values())
        if not self.reader.checked:  # other programs store a shared buffer under each of its names
            unknown -= {plain_name(name) for name, _ in self.holdings.model.named_buffers(remove_duplicate=False)}
        text = other[:3]
        for what, which in (("missing there", missing), ("not known here", unknown)):
            text += [f"{len(which)} {what} ({listed(sorted(which))})"] if which else []
        if other or (self.strict and (missing or unknown)):
            advice = "" if other else "; load_module_strict=False loads what both have"
            raise CheckpointError(f"{self.reader.path} is of another model: {'; '.join(text)}{advice}")
        if text and self._rank == 0:
            log.warning("%s does not fit the model in all: %s", self.reader.path, "; ".join(text))

    def _compare_optimizer(self, mine: set[str], numbers: set[str]) -> None:
        optimizer, saved, path = self.holdings.optimizer, self.manifest.optimizer, self.reader.path
        infos, advice = self.manifest.parameters.values(), "load_optimizer_states=False loads the rest"
        here, there = class_name(optimizer), saved["class"]
        keys = {key for info in infos for key in info.tensors} - {MASTER, PARAMETER}
        numbers_there = {key for info in infos for key in info.state}
        alike = (mine, numbers) == (keys, numbers_there)
        # Where the class is not known (""), the names of what the optimizer keeps have to do.
        if here != there and not (alike and (mine or not there)):
            names = ", ".join(sorted(keys | numbers_there)) or "none"
            raise CheckpointError(
                f"{path} has the state of {there or 'an optimizer'} ({names}), and this run's optimizer is {here}; "
                f"{advice}"
            )
        if here != there and there and self._rank == 0:
            log.warning("%s: the state of %s goes into %s, which keeps the same names", path, there, here)
        if len(saved["groups"]) != len(optimizer.param_groups):
            counts = f"{len(saved['groups'])} optimizer groups, and this run has {len(optimizer.param_groups)}"
            raise CheckpointError(f"{path} has {counts}; {advice}")
        trained = {name: group for name, group in self.holdings.trained().items() if name in self._stored_as}
        for name, group in trained.items():
            if (index := self._info(name).optimizer_group) not in (None, group.optimizer_group):
                raise CheckpointError(
                    f"{path} has {name!r} in optimizer group {index}, and here it is in group "
                    f"{group.optimizer_group}: it would get another group's settings. Give the groups in the same "
                    f"order, with the same parameters; or {advice}"
                )
        if (lost := [name for name in trained if not self._info(name).trained]) and self.strict:
            what = f"no optimizer state for {lost[0]!r}, which was not trained when it was saved"
            raise CheckpointError(f"{path} has {what}; {advice}")

    # ---- 3 read ------------------------------------------------------------------------------------------------------

    def read(self) -> None:
        """Fill this rank's tensors. A collective: when one rank finds damage all raise, and tensors are a mixture."""
        with together():
            self.holdings.make_buffers_writable()
            runs = self.reader.read(self._wanted())
        everyone = process_group.all_gather_object(runs)
        if self.optimizer or self.reader.checks_files:
            # What no rank has read (headers, other ranks' generators) is checked, so that no damage stays hidden.
            with together():
                for number, (file, info) in enumerate(sorted(self.manifest.files.items())):
                    if number % self.holdings.comm.world_size == self._rank:
                        read = [run for theirs in everyone for run in theirs.get(file, ())]
                        self.reader.check(file, remaining(info.blocks, read))
        self._complete()

    def _wanted(self) -> Iterator[Entry]:
        groups = self.holdings.trained()
        for run in self.holdings.runs():
            if run.name not in self._absent and not groups[run.name].replicated:
                for key, tensor in self._states(run.name, run.master).items():
                    yield Entry(key, self._stored_as[run.name], run.start, run.cut(tensor))
        for entry in self.holdings.frozen_runs():
            if entry.name not in self._absent:
                key, stored = self._info(entry.name).values_key, self._stored_as[entry.name]
                yield Entry(key, stored, entry.start, entry.tensor)
        yield from (entry for entry, reader in self._replicated() if reader == self._rank)
        yield from self._generators()

    def _generators(self) -> Iterator[Entry]:
        """This rank's, kept until :meth:`restore_rng`."""
        comm = self.holdings.comm
        if self.manifest.world_size != comm.world_size or not self.optimizer:
            return
        for name, now in rng.capture(comm.device)[0].items():
            stored = f"{comm.rank}.{name}"
            if (extent := self.reader.extent(RNG, stored)) is None:
                continue
            if extent != (now.numel(), now.dtype):
                raise CheckpointError(
                    f"{self.reader.path} has a state of the random generator {name!r} that the one here cannot "
                    f"take: {extent[0]} x {extent[1]}, not {now.numel()} x {now.dtype}"
                )
            self._rng[name] = torch.empty_like(now)
            yield Entry(RNG, stored, 0, self._rng[name])

    def _states(self, name: str, master: torch.Tensor) -> dict[str, torch.Tensor]:
        """What is stored of a trained parameter, and where it goes; made where the optimizer has no such state yet.

        It is what the manifest names, **not** what this rank's optimizer holds, which may be state for the parameters
        of its own runs only: in stage 0 ranks have to launch the same collectives.
        """
        info = self._info(name)
        found = {info.values_key: master}
        for key, dtype in info.tensors.items() if self.optimizer and info.trained else ():
            if key != MASTER:
                state = self.holdings.optimizer.state[master]
                if key not in state:
                    state[key] = torch.zeros_like(master, dtype=TORCH_DTYPES[dtype], requires_grad=False)
                found[key] = state[key] = state[key].contiguous()
        return found

    # ---- 4 complete --------------------------------------------------------------------------------------------------

    def _replicated(self) -> list[tuple[Entry, int]]:
        """What all ranks hold alike, in stage 0 all there is, and for each the rank that reads it for the others."""
        here, found = self.holdings, list[Entry]()
        for group in here.groups:
            for index, master in here.masters(group).items() if group.replicated else ():
                if (name := plain_name(group.names[index])) not in self._absent:
                    states = self._states(name, master).items()
                    found += [Entry(key, self._stored_as[name], 0, flat(tensor)) for key, tensor in states]
        for name, tensor in here.replicated().items():
            if name not in self._absent:
                found.append(Entry(self._info(name).values_key, self._stored_as[name], 0, flat(tensor)))
        found += [Entry(BUFFER, name, 0, flat(t)) for name, t in here.buffers().items() if name not in self._absent]
        sizes = {f"{entry.key}/{entry.name}": entry.tensor.nbytes for entry in found}
        readers = here.shares(sizes)
        return [(entry, readers[f"{entry.key}/{entry.name}"]) for entry in found if entry.tensor.numel()]

    def _complete(self) -> None:
        """Hand round what one rank has read for all. A collective."""
        comm = self.holdings.comm
        for entry, reader in self._replicated():
            comm.broadcast(BROADCAST, as_bytes(entry.tensor), reader)
        if self.manifest.world_size == comm.world_size:
            key = buffer_key(self._rank)  # buffers that were another on this rank than on rank 0
            own = [(name, tensor) for name, tensor in self.holdings.buffers().items() if self.reader.extent(key, name)]
            with together():
                self.reader.read([Entry(key, name, 0, flat(tensor)) for name, tensor in own])

    # ---- 5 apply -----------------------------------------------------------------------------------------------------

    def apply_optimizer(self) -> None:
        """Numbers that the optimizer keeps for each parameter, and the hyper-parameters of its groups."""
        optimizer = self.holdings.optimizer
        for group in self.holdings.groups:
            # Every master of this rank: in stage 0 all of them, whoever has read them.
            for index, master in self.holdings.masters(group).items():
                name = plain_name(group.names[index])
                if name not in self._absent and self._info(name).trained:
                    state, info = optimizer.state[master], self._info(name)
                    # State of a later time than the checkpoint's is no state of it.
                    for key in set(state) - set(info.tensors) - set(info.state) if info.numel else ():
                        del state[key]
                    for key, encoded in info.state.items():
                        if tensor_names(encoded):
                            state[key] = self.reader.value(encoded).to(master.device)
                        else:
                            _set_scalar(state, key, encoded)
        changed, kept, here = [], self.manifest.optimizer, self.holdings.from_steps
        from_steps = set(kept.get("from_steps", ())) - _IMPLEMENTATION
        for live, saved in zip(optimizer.param_groups, kept["groups"], strict=True):
            # What steps put into a group, as some classes count them, is state: it comes back, or goes.
            for key in from_steps & saved.keys():
                device = saved[key].get("device", "cpu") if isinstance(saved[key], dict) else "cpu"
                _set_scalar(live, key, saved[key], device if device == "cpu" else self.holdings.comm.device)
            for key in here - saved.keys():
                live.pop(key, None)
            for key in [key for key in saved if key in live and key not in _IMPLEMENTATION | from_steps]:
                value = decode(saved[key], {})
                if torch.is_tensor(live[key]):
                    live[key].fill_(value)
                    continue
                if live[key] != value and key not in ("lr", "initial_lr"):
                    changed.append(f"{key}={value} instead of {live[key]}")
                live[key] = value
        here |= from_steps
        if changed and self._rank == 0:
            log.warning("the optimizer goes on with the checkpoint's %s", ", ".join(changed))
        if kept["class"] == class_name(optimizer) and (own := decode(kept.get("own"), {})):
            # By the class's own method, which gets back what was filled in place where torch would set copies.
            filled = {key: getattr(optimizer, key) for key in ("state", "param_groups")}
            for master in [master for master, state in optimizer.state.items() if not state]:
                del optimizer.state[master]  # which looking for it has made
            vars(optimizer)["__setstate__"] = lambda _: type(optimizer).__setstate__(optimizer, dict(filled))
            try:
                optimizer.load_state_dict(optimizer.state_dict() | own)
            finally:
                del vars(optimizer)["__setstate__"]
                vars(optimizer).update(filled)

    def restore_rng(self) -> None:
        """This rank's generators, where there were as many ranks; else they stay: no two ranks may draw alike."""
        if self._rng:
            rng.restore(self._rng, self.manifest.rng_numbers[self._rank], self.holdings.comm.device)

    def values(self, encoded: Any) -> Any:
        """A value of the manifest (client state, a schedule's), the same on all ranks: rank 0 reads its tensors."""
        value = None
        with together():
            if self._rank == 0:
                value = self.reader.value(encoded)
        return process_group.broadcast_object(value) if tensor_names(encoded) else decode(encoded, {})


def _set_scalar(state: dict[str, Any], key: str, encoded: Any, device: torch.device | str = "cpu") -> None:
    if not (isinstance(encoded, dict) and "dtype" in encoded):
        state[key] = decode(encoded, {})
        return
    dtype = TORCH_DTYPES[encoded["dtype"]]
    value = torch.full(encoded["shape"], decode(encoded["value"], {}), dtype=dtype, device=device)
    if torch.is_tensor(state.get(key)):
        state[key].copy_(value)
    else:
        state[key] = value
