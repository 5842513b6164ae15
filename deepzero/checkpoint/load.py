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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deepzero.checkpoint import rng
from deepzero.checkpoint.checkpoint_dir import complete_beside, find, read_manifest
from deepzero.checkpoint.engine_state import EngineState, StateRun, plain_name
from deepzero.checkpoint.errors import CheckpointError, reason
from deepzero.checkpoint.huggingface import is_foreign, model_names, read_foreign
from deepzero.checkpoint.json_codec import TORCH_DTYPES, decode, tensor_names
from deepzero.checkpoint.manifest import BUFFER, MASTER, PARAMETER, RNG, Manifest, ParameterInfo, buffer_key
from deepzero.checkpoint.reader import CheckpointReader, ReadRequest, remaining
from deepzero.checkpoint.save_plan import class_name
from deepzero.comm import process_group
from deepzero.comm.process_group import raise_on_all_ranks
from deepzero.layout import Bucket, ParamSlot
from deepzero.runtime.zero.optimizer_shard import ParamGroup

log = logging.getLogger(__name__)

ALL_GATHER = "checkpoint.all_gather"
BROADCAST = "checkpoint.broadcast"


@dataclass(frozen=True)
class LoadOptions:
    """What is to be loaded, and how strictly."""

    optimizer: bool = True
    """Moments, counters and hyper-parameters of the optimizer."""
    strict: bool = True
    """Parameters and buffers have to be the same here and there."""
    buffers: bool = True
    """Buffers too; other programs' files leave out some."""


def open_checkpoint(load_dir: str | Path, tag: str | None, weights_for: EngineState | None = None) -> CheckpointReader:
    """1 find. A collective: rank 0 looks, and all have its manifest.

    Args:
        load_dir: a checkpoint, or the folder of several.
        tag: which one.
        weights_for: the model, when nothing but its weights is wanted: plain safetensors will do then.

    Raises:
        CheckpointError: on every rank; see :func:`find`, :func:`read_manifest` and :func:`read_foreign`.
    """
    found: tuple[str, Any, Any, bool] = ("", None, None, True)
    if process_group.rank() == 0:
        try:
            if is_foreign(load_dir, tag):
                path, manifest = _read_foreign(load_dir, weights_for)
                found = ("", str(path), manifest, False)
            else:
                path = find(load_dir, tag)
                found = ("", str(path), read_manifest(path), True)
        except Exception as error:  # whatever it is: the others wait for this rank's word
            found = (reason(error), None, None, True)
    problem, path_text, manifest, checked = process_group.broadcast_object(found)
    if problem:
        raise CheckpointError(problem)
    return CheckpointReader(Path(path_text), manifest, checked)


@contextlib.contextmanager
def naming_another(load_dir: str | Path, tag: str | None) -> Iterator[None]:
    """Damage that is found inside is raised with the newest complete checkpoint beside it. A collective when it is."""
    try:
        yield
    except CheckpointError as error:
        beside = None
        if process_group.rank() == 0:
            with contextlib.suppress(OSError):
                beside = complete_beside(load_dir, tag)
        raise CheckpointError(error.text, process_group.broadcast_object(beside)) from None


def check_rest(reader: CheckpointReader, everyone: list[dict[str, list[tuple[int, int]]]]) -> str | None:
    """This rank's share of the blocks that no rank has read: so no damage stays hidden.

    Args:
        reader: of the checkpoint.
        everyone: by rank, the runs of blocks that it has read of each file.

    Returns:
        What is wrong.
    """
    try:
        for number, (file, info) in enumerate(sorted(reader.manifest.files.items())):
            if number % process_group.world_size() == process_group.rank():
                read = [run for theirs in everyone for run in theirs.get(file, ())]
                reader.check(file, remaining(info.blocks, read))
    except Exception as error:
        return reason(error)
    return None


def _read_foreign(load_dir: str | Path, model: EngineState | None) -> tuple[Path, Manifest]:
    if model is None:
        raise CheckpointError(
            f"{load_dir} holds plain safetensors: weights, without the state of an optimizer; load_module_only=True "
            "loads them"
        )
    every_buffer = [plain_name(name) for name, _ in model.model.named_buffers(remove_duplicate=False)]
    return read_foreign(load_dir, model_names(model.names(), model.buffers(), every_buffer))


class Loader:
    """Loads one checkpoint into one engine's model state.

    Args:
        holdings: what is to be filled.
        reader: of the checkpoint.
        parts: what is wanted of it.
    """

    def __init__(self, holdings: EngineState, reader: CheckpointReader, parts: LoadOptions) -> None:
        self.holdings, self.reader, self.parts = holdings, reader, parts
        self.manifest: Manifest = reader.manifest
        self._stored_as = {
            known: name for name, info in self.manifest.parameters.items() for known in (name, *info.aliases)
        }
        self._absent: set[str] = set()
        self._rng: dict[str, torch.Tensor] = {}

    # ---- 2 compare ---------------------------------------------------------------------------------------------------

    def compare(self) -> None:
        """Raise a :class:`CheckpointError` on all ranks when the checkpoint does not fit one. Nothing changes."""
        problem, keys = None, (set[str](), set[str]())
        try:
            self._compare_model()
            keys = self._state_keys()
        except Exception as error:
            problem = reason(error)
        raise_on_all_ranks(problem, CheckpointError)
        if self.parts.optimizer:
            # A rank may hold nothing; what the optimizer keeps is what it keeps on any rank.
            everyone = process_group.all_gather_object(keys)
            try:
                self._compare_optimizer(*(set().union(*sets) for sets in zip(*everyone, strict=True)))
            except Exception as error:
                problem = reason(error)
            raise_on_all_ranks(problem, CheckpointError)

    def _state_keys(self) -> tuple[set[str], set[str]]:
        """What the optimizer keeps on this rank: for each element, and for a parameter as a whole."""
        runs = [run for group in self.holdings.groups for run in self.holdings.runs(group)]
        moments = {key for run in runs for key in self.holdings.moments(run)}
        return moments, {key for run in runs for key in self.holdings.scalars(run)}

    def _compare_model(self) -> None:
        names = self.holdings.names()
        shapes = {known[0]: tuple(param.shape) for param, known in names.items()}
        other = [
            f"parameter {name!r} has shape {self._info(name).shape} there and {shape} here"
            for name, shape in shapes.items()
            if name in self._stored_as and self._info(name).shape != shape
        ]
        buffers = self.holdings.buffers()
        other += [
            f"buffer {name!r} has shape {tuple(self.manifest.buffers[name]['shape'])} there and {tuple(t.shape)} here"
            for name, t in buffers.items()
            if name in self.manifest.buffers and tuple(self.manifest.buffers[name]["shape"]) != tuple(t.shape)
        ]
        for _, known in names.items():
            there = sorted({self._stored_as[name] for name in known if name in self._stored_as})
            if len(there) > 1:
                other.append(f"{' and '.join(map(repr, there))} are two parameters there and one (tied) here")
        stored = {name for name in shapes if name in self._stored_as and self._info(name).tensors}
        self._absent = {name for name, shape in shapes.items() if name not in stored and 0 not in shape}
        self._absent |= {name for name in buffers if name not in self.manifest.buffers}
        here = {known for all_names in names.values() for known in all_names}
        known_there = {*self.manifest.parameters, *self.manifest.buffers}
        unknown = sorted(known_there - here - set(buffers))
        missing = sorted(self._absent if self.parts.buffers else self._absent - set(buffers))
        text = [*other[:3], *_listed("missing there", missing), *_listed("not known here", unknown)]
        if other or (self.parts.strict and (missing or unknown)):
            advice = "" if other else "; load_module_strict=False loads what both have"
            raise CheckpointError(f"{self.reader.path} is of another model: {'; '.join(text)}{advice}")
        if text and self.holdings.comm.rank == 0:
            log.warning("%s does not fit the model in all: %s", self.reader.path, "; ".join(text))

    def _compare_optimizer(self, mine: set[str], numbers: set[str]) -> None:
        optimizer, saved = self.holdings.optimizer, self.manifest.optimizer
        advice = "load_optimizer_states=False loads the rest"
        here, there = class_name(optimizer), saved["class"]
        keys = {key for info in self.manifest.parameters.values() for key in info.tensors} - {MASTER, PARAMETER}
        numbers_there = {key for info in self.manifest.parameters.values() for key in info.state}
        if here != there and (not mine or (mine, numbers) != (keys, numbers_there)):
            raise CheckpointError(
                f"{self.reader.path} has the state of {there} ({', '.join(sorted(keys | numbers_there)) or 'none'}), "
                f"and this run's optimizer is {here}; {advice}"
            )
        if here != there and self.holdings.comm.rank == 0:
            log.warning("%s: the state of %s goes into %s, which keeps the same names", self.reader.path, there, here)
        if len(saved["groups"]) != len(optimizer.param_groups):
            raise CheckpointError(
                f"{self.reader.path} has {len(saved['groups'])} optimizer groups, and this run has "
                f"{len(optimizer.param_groups)}; {advice}"
            )
        for name, (group, _) in self.holdings.trained().items():
            index = self._info(name).optimizer_group if name in self._stored_as else None
            if index not in (None, group.optimizer_group):
                raise CheckpointError(
                    f"{self.reader.path} has {name!r} in optimizer group {index}, and here it is in group "
                    f"{group.optimizer_group}: it would get another group's settings. Give the groups in the same "
                    f"order, with the same parameters; or {advice}"
                )
        lost = [n for n in self.holdings.trained() if n in self._stored_as and not self._info(n).trained]
        if lost and self.parts.strict:
            raise CheckpointError(
                f"{self.reader.path} has no optimizer state for {lost[0]!r}, which was not trained when it was saved; "
                f"{advice}"
            )

    def _info(self, name: str) -> ParameterInfo:
        return self.manifest.parameters[self._stored_as[name]]

    # ---- 3 read ------------------------------------------------------------------------------------------------------

    def read(self) -> None:
        """Fill this rank's tensors. A collective.

        Raises:
            CheckpointError: on every rank, when one has found damage; the tensors are a mixture then.
        """
        problem: str | None = None
        runs: dict[str, list[tuple[int, int]]] = {}
        try:
            runs = self.reader.read(self._wanted())
        except Exception as error:  # whatever it is: the others must not wait for what this rank has read
            problem = reason(error)
        raise_on_all_ranks(problem, CheckpointError)
        everyone = process_group.all_gather_object(runs)
        if self.parts.optimizer:
            # Headers, other ranks' generators.
            raise_on_all_ranks(check_rest(self.reader, everyone), CheckpointError)
        self._complete()

    def _wanted(self) -> list[ReadRequest]:
        wanted = []
        for group in self.holdings.groups:
            for run in self.holdings.runs(group):
                if run.name not in self._absent:
                    wanted += self._of_run(run)
        for name, fragment, shard in self.holdings.frozen_runs():
            if name not in self._absent:
                wanted.append(ReadRequest(self._values_key(name), self._stored_as[name], fragment.start, shard))
        for name, key, tensor in self._mine_of_replicated():
            wanted.append(ReadRequest(key, name, 0, tensor))
        return wanted + self._generators()

    def _generators(self) -> list[ReadRequest]:
        """This rank's, kept until :meth:`restore_rng`."""
        comm = self.holdings.comm
        if self.manifest.world_size != comm.world_size or not self.parts.optimizer:
            return []
        for name, now in rng.capture(comm.device)[0].items():
            stored = f"{comm.rank}.{name}"
            if self.reader.has(RNG, stored):
                extent = self.reader.stored_numel(RNG, stored), self.reader.stored_dtype(RNG, stored)
                if extent != (now.numel(), now.dtype):
                    raise CheckpointError(
                        f"{self.reader.path} has a state of the random generator {name!r} that the one here cannot "
                        f"take: {extent[0]} x {extent[1]}, not {now.numel()} x {now.dtype}"
                    )
                self._rng[name] = torch.empty_like(now)
        return [ReadRequest(RNG, f"{comm.rank}.{name}", 0, tensor) for name, tensor in self._rng.items()]

    def _values_key(self, name: str) -> str:
        return MASTER if MASTER in self._info(name).tensors else PARAMETER

    def _of_run(self, run: StateRun) -> list[ReadRequest]:
        stored = self._stored_as[run.name]
        moments = self._moments(run.name, run.master)
        return [
            ReadRequest(self._values_key(run.name), stored, run.start, run.cut(run.master)),
            *(ReadRequest(key, stored, run.start, run.cut(moment)) for key, moment in moments.items()),
        ]

    def _moments(self, name: str, master: torch.Tensor) -> dict[str, torch.Tensor]:
        """What is stored of the optimizer's state, and where it goes; made where the optimizer has none yet."""
        info = self._info(name)
        if not self.parts.optimizer or not info.trained:
            return {}
        state = self.holdings.optimizer.state[master]
        for key, dtype in info.tensors.items():
            if key != MASTER and key not in state:
                state[key] = torch.zeros_like(master, dtype=TORCH_DTYPES[dtype], requires_grad=False)
        return {key: state[key] for key in info.tensors if key != MASTER}

    # ---- what all ranks hold alike -----------------------------------------------------------------------------------

    def _replicated(self) -> dict[str, tuple[str, str, torch.Tensor]]:
        """By a label for people: stored name, key, tensor."""
        found = {}
        for name, tensor in self.holdings.replicated().items():
            if name not in self._absent and tensor.numel():
                found[f"parameter {name}"] = (self._stored_as[name], self._values_key(name), tensor)
        for name, tensor in self.holdings.buffers().items():
            if name not in self._absent and tensor.numel():
                found[f"buffer {name}"] = (name, BUFFER, tensor)
        return found

    def _readers(self) -> dict[str, int]:
        return self.holdings.shares({label: tensor.nbytes for label, (_, _, tensor) in self._replicated().items()})

    def _mine_of_replicated(self) -> Iterable[tuple[str, str, torch.Tensor]]:
        readers = self._readers()
        for label, (name, key, tensor) in self._replicated().items():
            if readers[label] == self.holdings.comm.rank:
                yield name, key, _flat(tensor)

    def _complete(self) -> None:
        """4 complete: hand round what one rank has read for all. A collective."""
        comm, readers = self.holdings.comm, self._readers()
        for label, (_, _, tensor) in self._replicated().items():
            flat = _flat(tensor)
            comm.broadcast(BROADCAST, flat.view(torch.uint8), readers[label])
        if self.manifest.world_size == comm.world_size:
            self._own_buffers()
        for group in self.holdings.groups:
            if group.whole and comm.world_size > 1:
                for bucket in group.layout.buckets:
                    self._gather(group, bucket)

    def _own_buffers(self) -> None:
        """Buffers that were another on this rank than on rank 0."""
        key = buffer_key(self.holdings.comm.rank)
        own = [ReadRequest(key, n, 0, _flat(t)) for n, t in self.holdings.buffers().items() if self.reader.has(key, n)]
        problem = None
        try:
            self.reader.read(own)
        except Exception as error:
            problem = reason(error)
        raise_on_all_ranks(problem, CheckpointError)

    def _gather(self, group: ParamGroup, bucket: Bucket) -> None:
        """Stage 0: every rank has read a W-th part of each master and moment, and needs all."""
        masters = {fragment.slot.index: m for fragment, m in zip(group.fragments, group.masters, strict=True)}
        # By key, from what the manifest says, **not** from what this rank's optimizer holds: it may hold state for the
        # parameters of its own runs only, and the ranks would not launch the same collectives.
        by_key: dict[str, list[tuple[ParamSlot, torch.Tensor]]] = {}
        for slot in bucket.slots:
            name = plain_name(group.names[slot.index])
            if slot.numel and name not in self._absent:
                master = masters[slot.index]
                for key, tensor in {MASTER: master, **self._moments(name, master)}.items():
                    by_key.setdefault(key, []).append((slot, tensor))
        for values in by_key.values():
            whole = torch.empty(bucket.numel, dtype=values[0][1].dtype, device=values[0][1].device)
            for slot, value in values:
                whole[slot.offset - bucket.offset :][: slot.numel].copy_(value.detach())
            self.holdings.comm.all_gather(ALL_GATHER, whole, 0, f"bucket {bucket.index}").wait()
            for slot, value in values:
                value.detach().copy_(whole[slot.offset - bucket.offset :][: slot.numel])

    # ---- 5 apply -----------------------------------------------------------------------------------------------------

    def apply_optimizer(self) -> None:
        """Numbers that the optimizer keeps for each parameter, and the hyper-parameters of its groups."""
        optimizer = self.holdings.optimizer
        for group in self.holdings.groups:
            for run in self._owned(group):
                if run.name not in self._absent and self._info(run.name).trained:
                    state, info = optimizer.state[run.master], self._info(run.name)
                    # State of a later time than the checkpoint's is no state of it.
                    for key in set(state) - set(info.tensors) - set(info.state) if info.numel else ():
                        del state[key]
                    _set_scalars(state, info.state)
        changed: dict[str, tuple[Any, Any]] = {}
        for live, saved in zip(optimizer.param_groups, self.manifest.optimizer["groups"], strict=True):
            for key, encoded in saved.items():
                value = decode(encoded, {})
                if key in _IMPLEMENTATION or key not in live:
                    continue
                if torch.is_tensor(live[key]):
                    live[key].fill_(value)
                    continue
                if live[key] != value and key not in ("lr", "initial_lr"):
                    changed[key] = (live[key], value)
                live[key] = value
        if changed and self.holdings.comm.rank == 0:
            text = ", ".join(f"{key}={there} instead of {here}" for key, (here, there) in changed.items())
            log.warning("the optimizer goes on with the checkpoint's %s", text)

    def _owned(self, group: Any) -> list[StateRun]:
        """Every master of this rank: in stage 0 all of them, though each is read in parts."""
        if group.whole:
            pairs = zip(group.fragments, group.masters, strict=True)
            return [
                StateRun(plain_name(group.names[fragment.slot.index]), 0, fragment.numel, master, 0)
                for fragment, master in pairs
            ]
        return list(self.holdings.runs(group))

    def restore_rng(self) -> None:
        """This rank's generators, where there were as many ranks; else they stay: no two ranks may draw alike."""
        if self._rng:
            rng.restore(self._rng, self.manifest.rng_numbers[self.holdings.comm.rank], self.holdings.comm.device)

    def values(self, encoded: Any) -> Any:
        """A value of the manifest (client state, a schedule's), the same on all ranks: rank 0 reads its tensors.

        Raises:
            CheckpointError: on every rank; damage.
        """
        value, problem = None, None
        if self.holdings.comm.rank == 0:
            try:
                value = self.reader.value(encoded)
            except Exception as error:
                problem = reason(error)
        raise_on_all_ranks(problem, CheckpointError)
        return process_group.broadcast_object(value) if tensor_names(encoded) else decode(encoded, {})


_IMPLEMENTATION = {"foreach", "fused", "capturable", "differentiable"}
"""Settings that choose a kernel and no result: the run's own stay."""


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, 1-D."""
    return tensor.detach().view(-1)


def _set_scalars(state: dict[str, Any], saved: dict[str, Any]) -> None:
    for key, encoded in saved.items():
        if isinstance(encoded, dict) and "dtype" in encoded:
            value = torch.full(encoded["shape"], decode(encoded["value"], {}), dtype=TORCH_DTYPES[encoded["dtype"]])
            if torch.is_tensor(state.get(key)):
                state[key].copy_(value)
            else:
                state[key] = value
        else:
            state[key] = decode(encoded, {})


def _listed(what: str, names: list[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return [f"{len(names)} {what} ({', '.join(names[:3])}{more})"]
