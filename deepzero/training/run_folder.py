"""A run's folder: what is there before it begins, from which checkpoint it goes on, saving, and how it is left.

**A command that is refused leaves no folder**: see ``command_line.NewFolders``. Files come when the run begins: Hydra's
record too (:meth:`Command.keep`), which Hydra itself would write at once.

**The same command with the same folder goes on**, whether a person, a scheduler or a launcher types it: a run keeps its
checkpoints in its own folder, and ``train.resume=auto`` takes the newest of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepzero.checkpoint import checkpoint_dir
from deepzero.checkpoint.checkpoint_dir import RUN_CHECKPOINTS, complete_beside, complete_tags, read_manifest
from deepzero.checkpoint.errors import CheckpointError, OtherModel, said_complete
from deepzero.checkpoint.manifest import Manifest
from deepzero.comm import process_group
from deepzero.comm.simulated_streams import simulate_streams
from deepzero.compat.deepspeed_engine import DeepSpeedEngine
from deepzero.config.engine import EngineConfig, resolve_batch
from deepzero.config.hydra_errors import split
from deepzero.config.run import RunConfig
from deepzero.config.strict import ConfigError
from deepzero.data.sampler import GlobalBatchSampler
from deepzero.launch import rank_process
from deepzero.monitor.metrics_file import METRICS, clear

RUN_FOLDER_NOTE = "run-folder"  # in which a rank leaves the folder's name for the attempts after this one


def take(run_dir: Path) -> None:
    """Take the right to write in the run folder, for one process, which has it until it ends; or a ConfigError."""
    if complete_tags(run_dir) or checkpoint_dir.is_complete(run_dir):
        raise ConfigError(f"hydra.run.dir={run_dir} holds checkpoints: name their run's folder, above it, or another")
    try:
        checkpoint_dir.acquire(run_dir)
    except CheckpointError as error:
        raise ConfigError(f"hydra.run.dir: {error}") from None
    except OSError as error:
        raise cannot_write(run_dir, error) from None


def cannot_write(run_dir: Path, error: OSError) -> ConfigError:
    """What to say of a folder that cannot be made or written to when the run begins."""
    full = "make room there, or " if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else ""
    choose = f"{full}choose another hydra.run.dir (hydra.sweep.dir of a sweep)"
    return ConfigError(f"cannot write {error.filename or run_dir}: {error.strerror}; {choose}")


def has_begun(run_dir: Path, since: float) -> bool:
    """Whether ranks that were started at ``since`` (``time.time()``) have begun to write there."""
    return (run_dir / METRICS).exists() and (run_dir / METRICS).stat().st_mtime >= since


# ---- where a run begins ----------------------------------------------------------------------------------------------


def tag_of(step: int) -> str:
    """The tag of a run's checkpoint after ``step`` optimizer steps."""
    return f"step_{step:08d}"


def find_start(resume: str | None, run_dir: Path, restarted: bool = False) -> Path | None:
    """The checkpoint that a run begins with; None for the beginning.

    ``resume`` is ``train.resume``. A checkpoint in the run folder itself is where the run goes back to; any other place
    counts until this run has saved something. Where the ranks were ``restarted`` by a launcher, what this run has saved
    goes before everything. A ConfigError: there is none where ``resume`` says, or the folder has some that it excludes.
    """
    own, tag = run_dir / RUN_CHECKPOINTS, None
    try:
        if resume is not None and not restarted and Path(os.path.expanduser(resume)).resolve().parent == own.resolve():
            tag = Path(resume).name
            return checkpoint_dir.find(own, tag)
        if resume is not None or restarted:
            # ``latest`` is written after the first checkpoint has appeared: a kill may come between.
            newest = checkpoint_dir.latest_tag(own) or next(reversed(complete_tags(own)), None)
            if newest is not None:
                return checkpoint_dir.find(own, newest)
        elif saved := complete_tags(own):
            raise ConfigError(
                f"train.resume=null, and {own} holds checkpoints of an earlier run ({', '.join(saved)}): "
                "train.resume=auto goes on from them; to begin anew choose another hydra.run.dir, or remove them"
            )
        return None if resume in (None, "auto") else checkpoint_dir.find(resume, None)
    except CheckpointError as error:
        beside = complete_beside(own if complete_tags(own) else resume or own, tag)
        own_folder = tag is not None or resume in (None, "auto")
        other = way_out(beside) or ("; no other is complete: choose another hydra.run.dir" if own_folder else "")
        raise ConfigError(f"train.resume={resume or 'null'}: {without_calls(str(error))}{other}") from None


def without_calls(text: str) -> str:
    """What is wrong with a checkpoint, without arguments of the engine's calls, which nobody types here."""
    text = re.sub(r", and with tag= the one.*", ", or name one of them; train.init_from takes plain weights", text)
    text = text.replace("name the checkpoint with tag=", "name one")
    return re.sub(r";(?: or)? load_\w+=(?:True|False)[^;]*", "", text)


def way_out(beside: Path | None, key: str = "train.resume") -> str:
    """What goes instead of a damaged checkpoint, to stand behind what is wrong with it."""
    return f"; {said_complete(beside)}: the same command with {key}={beside} goes on from there" if beside else ""


def manifest_of(path: Path, total_steps: int) -> Manifest:
    """The manifest of the checkpoint that a run of ``total_steps`` begins with.

    A ConfigError says that it is damaged, or has more steps behind it than the run is to take.
    """
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        other = way_out(complete_beside(path.parent, path.name)) or "; no other is whole: choose another hydra.run.dir"
        raise ConfigError(f"{error}{other}") from None
    if (taken := manifest.counters["global_steps"]) > total_steps:
        raise ConfigError(f"train.steps={total_steps}: {path} was saved after step {taken}; name at least as many")
    return manifest


def keep_global_batch(config: EngineConfig, manifest: Manifest, world_size: int) -> EngineConfig:
    """The same global batch on any number of ranks: the micro-batch as it was or smaller, more of them or fewer.

    A run that names another ``train_batch_size`` than the checkpoint's gets what it names; and the micro-batch or the
    accumulation that it names, where the global batch can be cut like that. The number of ranks being the same says
    nothing: the checkpoint may be of a run that had already gone on with fewer of them than it began with.

    Example (24 sequences as 4 ranks x 1 x 6; on 3 ranks)::

        >>> from types import SimpleNamespace
        >>> saved = SimpleNamespace(world_size=4, batch={"global_batch": 24, "micro_batch": 6, "accumulation": 1})
        >>> kept = keep_global_batch(EngineConfig(train_batch_size=24), saved, world_size=3)
        >>> kept.train_batch_size, kept.train_micro_batch_size_per_gpu
        (24, 4)
    """
    total, micro = manifest.batch["global_batch"], config.train_micro_batch_size_per_gpu
    if config.train_batch_size not in (None, total):
        return config
    if micro is not None or config.gradient_accumulation_steps is not None:
        named = dataclasses.replace(config, train_batch_size=total)
        with contextlib.suppress(ConfigError):
            resolve_batch(named, world_size)
            return named
    share, rest = divmod(total, world_size)
    if rest:
        raise ConfigError(
            f"the checkpoint was trained with train_batch_size={total}, which {world_size} ranks cannot share evenly; "
            f"start a number of ranks that divides it, or set another train_batch_size"
        )
    most = min(micro or manifest.batch["micro_batch"], share)
    micro = max(size for size in range(1, most + 1) if share % size == 0)
    return dataclasses.replace(
        config, train_batch_size=total, train_micro_batch_size_per_gpu=micro, gradient_accumulation_steps=None
    )


def at_its_start(run: RunConfig, run_dir: Path, world_size: int) -> RunConfig:
    """The run as it begins: one that goes on from a checkpoint keeps its global batch, on any number of ranks.

    A ConfigError says that there is nothing to begin with where the settings say.
    """
    if (path := find_start(run.train.resume, run_dir, rank_process.restart_count() > 0)) is not None:
        manifest = manifest_of(path, run.train.steps)
        engine = keep_global_batch(run.engine, manifest, world_size)
        other = manifest.other_micro_batch(resolve_batch(engine, world_size).micro_batch)
        if other and engine.comm.world_size_invariant:
            raise ConfigError(f"comm.world_size_invariant=true, but {other}; start a number of ranks that divides them")
        return dataclasses.replace(run, engine=engine)
    if run.train.init_from is not None and not os.path.exists(os.path.expanduser(run.train.init_from)):
        raise ConfigError(f"train.init_from={run.train.init_from}: no such file or folder")
    return run


def join(run: RunConfig, run_dir_name: str) -> Path:
    """Meet the other ranks; returns the run folder: rank 0's, or that of the attempts before this one."""
    if run.engine.comm.simulated_streams:
        simulate_streams()  # before the model is built
    process_group.init_distributed(timeout_seconds=run.engine.comm.timeout_seconds)
    # A host that joins a running job may get rank 0, and would begin a folder of its own.
    earlier = [note for note in process_group.all_gather_object(rank_process.recall(RUN_FOLDER_NOTE)) if note]
    run_dir = Path(earlier[0] if earlier else process_group.broadcast_object(run_dir_name)).resolve()
    rank_process.remember(RUN_FOLDER_NOTE, str(run_dir))
    return run_dir


def load_start(
    run: RunConfig, run_dir: Path, engine: DeepSpeedEngine, sampler: GlobalBatchSampler, command: Command
) -> int:
    """Load what the run begins with, if anything; returns how many steps have been taken already."""
    path = process_group.broadcast_object(find_start(run.train.resume, run_dir, rank_process.restart_count() > 0))
    own = path is not None and path.parent == run_dir / RUN_CHECKPOINTS
    try:
        if path is not None:
            _, client_state = engine.load_checkpoint(path)
            if client_state is None:  # for a folder that is not there, which is where a run begins
                raise CheckpointError(f"{path} was there when the run looked for it, and is gone")
            saved = client_state.get("data")
            sampler.go_on(engine.global_steps, engine.global_samples)
            if (now := data_of(run, sampler)) != saved and engine.global_rank == 0:
                _tell(f"the checkpoint was trained on {saved}, this run goes on with {now}")
            if run.train.init_from is not None and engine.global_rank == 0:
                _tell(f"train.init_from={run.train.init_from} is not read: this run goes on from {path}")
        elif run.train.init_from is not None:
            engine.load_checkpoint(run.train.init_from, load_module_only=True)
    except CheckpointError as error:  # the message says it all, and another attempt would read the same files
        key, where = ("train.resume", "") if path else ("train.init_from", f"train.init_from={run.train.init_from}: ")
        other = isinstance(error, OtherModel)
        advice = "; set model.* as it was when that was saved" if other else ""
        if path is not None and not other:
            whole = ", where they are whole" if "damaged" in error.text else ""
            elsewhere = " hydra.run.dir=ANOTHER" if own else ""
            advice = f"; train.resume=null train.init_from={path}{elsewhere} takes the weights alone{whole}"
        raise ConfigError(where + without_calls(error.text) + (way_out(error.beside, key) or advice)) from None
    if engine.global_rank == 0:  # not before: a run that is refused removes nothing
        try:
            if own and path is not None and not path.name.startswith("."):
                checkpoint_dir.point_latest(path)  # the run goes back to it, and restarts follow
            when = clear(run_dir, going_on=own)
            command.keep(run_dir)
        except OSError as error:
            raise cannot_write(run_dir, error) from None
        if when is not None and not own and rank_process.restart_count() == 0:
            _tell(f"replacing the run of {when:%Y-%m-%d %H:%M:%S} in {run_dir}")
    return engine.global_steps


def _tell(text: str) -> None:
    with contextlib.suppress(OSError):  # that standard output is gone is said at the first step
        print(text, flush=True)


def data_of(run: RunConfig, sampler: GlobalBatchSampler) -> dict[str, Any]:
    """What the order of the data depends on; the position in it is the number of sequences seen."""
    return {"data": run.data.name, "sequences": sampler.num_sequences, "seed": run.train.seed}


# ---- the command that goes on ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Command:
    """One run as it was typed; of a sweep, one of its runs."""

    start: Sequence[str]  # the words before the overrides: ``python train.py``, or torchrun with what it needs
    overrides: Sequence[str]
    files: Mapping[str, str]  # names and texts of Hydra's own record: config, overrides, Hydra's settings
    by_torchrun: bool  # then ranks say for themselves how to go on; else the process that has started them does

    def keep(self, run_dir: Path) -> None:
        """Write Hydra's record when the run begins: a run that is refused leaves no trace in the folder."""
        folder = run_dir / ".hydra"
        known = folder.exists()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name, text in self.files.items():
                (folder / name).write_text(text, encoding="utf-8")
        except OSError:  # of a disk that is full, for one
            if not known:
                shutil.rmtree(folder, ignore_errors=True)
            raise

    def way_on(self, run_dir: Path, total_steps: int) -> str:
        """Which step was saved last, and the command that goes on from there; empty where nothing was saved.

        After the last of ``total_steps`` the command asks for twice as many.
        """
        try:
            if (path := find_start("auto", run_dir)) is None:
                return ""
            step = read_manifest(path).counters["global_steps"]
        except (ConfigError, CheckpointError):  # whoever tries to go on reads what is wrong with it
            return ""
        more = [f"train.steps={2 * total_steps}"] if step >= total_steps else []
        # Without train.resume the newest checkpoint of the folder counts. The value that was typed named the beginning
        # of this run: null is refused now that there are checkpoints, and an earlier one of them would be gone back to.
        replaced = {"hydra.run.dir", "train.resume", *(split(word)[1] for word in more)}
        kept = [word for word in self.overrides if split(word)[1] not in replaced]
        words = [*self.start, *kept, *more, f"hydra.run.dir={in_hydras_quotes(str(run_dir))}"]
        typed = " ".join(map(in_shells_quotes, words))
        return f"saved after step {step}; to go on{' to more steps' if more else ''}: {typed}"


def interpreter() -> str:
    """This Python as a shell finds it: by its name where that leads here, else by its path."""
    name = Path(sys.executable).name
    return name if shutil.which(name) == sys.executable else sys.executable


def torchrun_words(program: str) -> tuple[str, ...]:
    """How torchrun was called on this node, from the table of processes; shortened where there is none to read."""
    try:
        words = Path(f"/proc/{os.getppid()}/cmdline").read_text(encoding="utf-8").split("\0")
        return tuple(words[: words.index(program)])
    except (OSError, ValueError):
        return ("torchrun", "...")


def in_hydras_quotes(value: str) -> str:
    r"""The value of an override as Hydra reads it to the letter; plain where it can stand as it is.

    Example:
        >>> print(in_hydras_quotes("runs/1"), in_hydras_quotes("it's (2)"))
        runs/1 'it\'s (2)'
    """
    if re.fullmatch(r"[\w./+-]+", value, re.ASCII):
        return value
    # A backslash is an escape only where a quote follows.
    escaped = re.sub(r"(\\*)('|$)", lambda found: 2 * found[1] + ("\\'" if found[2] else ""), value)
    return "'" + escaped.replace("${", "\\${") + "'"


def in_shells_quotes(word: str) -> str:
    """A word for the shell; one with Hydra's quotes in double ones where that can be.

    Example:
        >>> print(in_shells_quotes("zero.stage=2"), in_shells_quotes("data.path='my text'"), in_shells_quotes("a b"))
        zero.stage=2 "data.path='my text'" 'a b'
    """
    return f'"{word}"' if "'" in word and not set(word) & set('"$`\\!') else shlex.quote(word)
