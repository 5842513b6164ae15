"""From the command line to ranks: Hydra composes, the settings are checked, ranks start, every error is one message.

``python train.py`` starts its ranks on this machine; under ``torchrun`` this process is one. Of the package
only this file imports Hydra and OmegaConf: what is behind :func:`read_config` are frozen dataclasses.

Exit status: 0 done · 1 a rank failed · 2 settings that cannot be used · 128 + n ended by signal n.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial, partialmethod
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import hydra
import torch
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from deepzero.checkpoint.checkpoint_dir import LOCK, holds, release
from deepzero.comm.process_group import refuse_missing_gpu
from deepzero.comm.rendezvous import MPI_SIZES, discover_mpi, refuse_several
from deepzero.config.hydra_errors import check_words, explain, plain_names
from deepzero.config.run import RunConfig
from deepzero.config.strict import ConfigError
from deepzero.device import installed
from deepzero.launch import launcher, rank_process
from deepzero.launch.launcher import RankFailed, default_nproc, launch, under_launcher
from deepzero.launch.rank_process import CONFIG_ERROR_EXIT, FAILURE_EXIT, fail_as_rank, leave, run_here
from deepzero.machine import check_machine
from deepzero.monitor.metrics_file import write_error, write_failed_summary
from deepzero.monitor.report.compare import runs_in, text_table
from deepzero.monitor.report.sections import write_report_or_tell
from deepzero.monitor.terminal import say
from deepzero.monitor.wandb_logger import named
from deepzero.offload.file_store import check_folders
from deepzero.planning import plan
from deepzero.planning.dry_run import ClusterShape, dry_run
from deepzero.training import run_folder
from deepzero.training.build_model import preflight, program_of, threads_of_rank
from deepzero.training.run_folder import Command, at_its_start, cannot_write, has_begun
from deepzero.utils.closed_pipe import Interrupted
from deepzero.utils.formatting import flatten

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
# The one source of defaults: configs/train.yaml begins with what the dataclasses say, and its groups hold choices.
ConfigStore.instance().store("dataclasses", RunConfig.defaults())
HYDRAS_ERRORS = (HydraException, OmegaConfBaseException, YAMLError)
NO_FOLDER = ("hydra.run.dir=.", "hydra.output_subdir=null")


class CommandLine:
    """One call of ``train.py``: a run, or a sweep of runs.

    ``train(run, run_dir, command)`` is the program of each rank, and ``program`` the file that defines it.
    """

    def __init__(self, train: Callable[[RunConfig, str, Command], None], program: Path) -> None:
        self._train, self._program, self._process = train, program, os.getpid()
        self._refused: list[str] = []  # jobs of a sweep that have no folder, which the table is made of
        self.status = 0
        """Exit status so far: a job of a sweep that fails does not stop the others."""

    def run(self, job: Callable[[DictConfig], None]) -> NoReturn:
        """Let Hydra compose and call ``job``, once or for each job of a sweep; leave with the exit status."""
        os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # Hydra then raises its errors instead of printing them
        # A launcher plugin's jobs unpickle what is defined in the program, in processes that start elsewhere.
        paths = (str(self._program.parent), os.environ.get("PYTHONPATH"))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        # Our preset has the name of the plugin's own; Hydra merges them, and says that it will not always do so.
        warnings.filterwarnings("ignore", r"\s*'hydra/launcher/submitit_slurm' is validated against ConfigStore schema")
        try:
            _prepare_words()
            hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name="train")(job)()
        except (*HYDRAS_ERRORS, ConfigError) as error:
            self._refuse(plain_names(explain(error, CONFIGS, partial(valid_keys, sys.argv[1:]))))
        except BrokenPipeError:  # ``--help | head``
            raise
        except OSError as error:  # Hydra's: those of a run have been told
            said = f"cannot write to standard output: {error.strerror}"  # ``--help``; a file's error has its name
            self._refuse(str(cannot_write(Path(), error)) if error.filename else said)
        except ValueError as error:
            if NewFolders.noted is not None:  # not Hydra's
                raise
            self._refuse(f"Hydra refuses a flag, or cannot read a config file: {error}")
        except RuntimeError as error:
            # Of a launcher plugin: not installed, no Slurm here, or a job that failed elsewhere.
            missing = "Unknown plugin class" in str(error)
            if not (missing or '"srun"' in str(error) or type(error).__module__.startswith("submitit.")):
                raise
            say(f"{error}; pip install 'deepzero[slurm]'" if missing else str(error))
            self.status = CONFIG_ERROR_EXIT if missing else FAILURE_EXIT
        except (KeyboardInterrupt, SystemExit) as error:  # a signal has ended the run, and with it the sweep
            self.status = int(error.code or 0) if isinstance(error, SystemExit) else 128 + signal.SIGINT
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # nothing is left to interrupt
        if NewFolders.noted is not None and NewFolders.noted[2] and (runs := runs_in(NewFolders.noted[0])):
            say("\n" + "\n".join([text_table(runs), *self._refused]), sys.stdout)
        remove_unused()
        if under_launcher():
            leave(self.status)
        sys.exit(self.status)

    def _refuse(self, problem: str) -> None:
        if under_launcher():
            fail_as_rank(ConfigError(problem))
        say(problem)
        self.status = CONFIG_ERROR_EXIT

    def job(self, cfg: DictConfig) -> None:
        """One run, or one point of a sweep."""
        run_dir, command = Path(HydraConfig.get().runtime.output_dir), self._typed(cfg)
        if under_launcher():
            tell = partial(self._tell_failure, cfg, run_dir, command, time.time())
            run_here(self._train_here, cfg, str(run_dir), command, on_failure=tell)
            return
        way_on: Callable[[], str] = str
        try:
            run = read_config(cfg)
            if run.plan:
                print_plan(with_fallback_batch(run))
                return
            way_on = partial(command.way_on, run_dir, run.train.steps)
            self._start_ranks(run, run_dir, command)
            if HydraConfig.get().mode != RunMode.MULTIRUN:
                say(way_on(), sys.stdout)
        except (ConfigError, RankFailed, OSError) as error:
            said = f"the run could not be started: {error}" if isinstance(error, OSError) else plain_names(str(error))
            say(said)
            if isinstance(error, ConfigError):
                self._refused.append(f"{os.path.relpath(run_dir)}: refused: {said.splitlines()[0]}")
            self.status = CONFIG_ERROR_EXIT if isinstance(error, ConfigError) else FAILURE_EXIT
            if isinstance(error, RankFailed):
                say(way_on())
            if os.getpid() != self._process:  # a launcher plugin runs jobs elsewhere and must hear of it
                raise
        except Interrupted as error:
            say(f"{error}; what there is lies in {run_dir}")
            say(way_on())
            # Not an Exception for Hydra to collect: it ends a sweep, too.
            raise SystemExit(128 + error.signum) from None
        finally:
            remove_unused(run_dir)
            release(run_dir)

    def _typed(self, cfg: DictConfig) -> Command:
        """The command of this job, to be kept and to be said again."""
        hydra_cfg, words = HydraConfig.get(), sys.argv[1:]
        if hydra_cfg.mode == RunMode.MULTIRUN:  # one run of the sweep is gone on with by itself
            words = list(hydra_cfg.overrides.task)
        start = run_folder.torchrun_words(sys.argv[0]) if under_launcher() else (run_folder.interpreter(),)
        program = sys.argv[0] if Path(sys.argv[0]).name == self._program.name else str(self._program)
        parts = {"config": cfg, "hydra": HydraConfig.instance().cfg, "overrides": hydra_cfg.overrides.task}
        files = {f"{name}.yaml": OmegaConf.to_yaml(part) for name, part in parts.items()}
        return Command((*start, program), words, files, under_launcher())

    def _start_ranks(self, run: RunConfig, run_dir: Path, command: Command) -> None:
        """Check what can be checked, start the ranks on this machine, wait for them."""
        refuse_several()
        nproc = run.launch.nproc or default_nproc(run.launch.device)
        device = launcher.choose_device(run.launch.device, nproc)
        run_folder.take(run_dir)
        run = with_fallback_batch(at_its_start(run, run_dir, nproc))
        preflight(run, nproc, device)
        check_folders(run.engine.zero)
        say(check_machine(run, program_of, run_dir, nproc, device))
        threads = threads_of_rank(run, device) or os.environ.get("OMP_NUM_THREADS") or launcher.default_threads(nproc)
        environment = {"DEEPZERO_DEVICE": device, "OMP_NUM_THREADS": str(threads)}
        started, restarts, args = time.time(), run.launch.max_restarts, (run, str(run_dir), command)
        try:
            launch(str(self._program), "train", args, nproc=nproc, environment=environment, max_restarts=restarts)
        except (ConfigError, RankFailed, Interrupted) as error:
            if isinstance(error, ConfigError) and not has_begun(run_dir, started):
                raise
            if sys.stdout.isatty():
                print()  # below the bar
            failure = error.__cause__ if isinstance(error, Interrupted) else error
            headline = failure.headline if isinstance(failure, RankFailed) else str(error)
            _record_failure(run_dir, headline, dataclasses.asdict(run), started)
            if isinstance(failure, RankFailed) and failure.full:
                where = write_error(run_dir, failure.full)
                told = RankFailed(failure.headline, f"{failure.frames}\n{where}".lstrip("\n"))
                if failure is error:
                    raise told from None
                say(str(told))  # it failed before it was interrupted
            raise

    def _train_here(self, cfg: DictConfig, run_dir: str, command: Command) -> None:
        """A rank that torchrun has started: what the launching process would have checked, then the program."""
        first, started, folder = os.environ["RANK"] == "0", time.time(), Path(run_dir).resolve()
        logging.getLogger().handlers.clear()  # Hydra's: what is logged beside what is printed would be said twice
        try:
            run = read_config(cfg)
            if run.plan:
                raise ConfigError("plan=true starts nothing: run it with python, not with torchrun")
            here, world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), int(os.environ["WORLD_SIZE"])
            run.launch.need(run.launch.nproc in (None, here), "nproc", f"{here} ranks were started; leave it out")
            run.launch.idle_unless(False, "the launcher restarts (--max-restarts); leave it out", "max_restarts")
            if run.launch.device == "auto":
                refuse_missing_gpu()
            # Each may be shown its own GPU alone. One that has none is refused when it joins the others.
            ranks = 1 if installed().device_count() == 1 else here
            os.environ["DEEPZERO_DEVICE"] = device = launcher.choose_device(run.launch.device, ranks)
            if (threads := threads_of_rank(run, device)) is not None:
                torch.set_num_threads(threads)
            folder = run_folder.join(run, run_dir)
            if first:
                run_folder.take(folder)
            run = with_fallback_batch(at_its_start(run, folder, world_size))
            preflight(run, world_size, device)
            self._train(run, run_dir, command)
        except ConfigError:
            if not has_begun(folder, started):
                remove_unused()
                release(folder)
            raise
        if first:
            say(command.way_on(folder, run.train.steps), sys.stdout)

    def _tell_failure(self, cfg: DictConfig, run_dir: Path, command: Command, started: float, reason: str) -> None:
        """What the launching process would have written down of a rank that fails, if the run folder is this rank's."""
        if not holds(run_dir):  # another run's folder, or no run has begun
            return
        try:
            settings = dataclasses.asdict(read_config(cfg))
        except ConfigError:
            settings = settings_of(cfg)
        _record_failure(run_dir, reason, settings, started)
        say(command.way_on(run_dir, cfg.train.steps))


class NewFolders(Callback):
    """Hydra's callback, which it builds and keeps to itself: before Hydra makes a folder, what is there is noted.

    Hydra makes the run folder before anybody has looked at the settings. What came below ``noted`` and stayed empty is
    taken away by :func:`remove_unused`: a command that is refused leaves no folder.
    """

    noted: ClassVar[tuple[Path, Path, bool] | None] = None
    """The folder that Hydra makes, the nearest above it (or it) that was there before, and whether it is a sweep's."""

    def _note(self, kind: str, config: Any, **_: Any) -> None:
        # A folder that is named by the second is a command's own: who finds it taken waits for the next second's name.
        named_by_second = "%S" in OmegaConf.to_yaml(OmegaConf.masked_copy(config.hydra[kind], "dir"))
        taken = None
        while (path := Path(config.hydra[kind].dir).resolve()) != taken:
            type(self).noted = path, next(at for at in (path, *path.parents) if at.exists()), kind == "sweep"
            with contextlib.suppress(OSError):  # Hydra says it, when it tries
                if named_by_second:
                    path.mkdir(parents=True)
                return
            taken = path
            if path.is_dir():
                time.sleep(1 - time.time() % 1)
                OmegaConf.clear_cache(config)  # which keeps ``now``, for a sweep's jobs too

    on_run_start, on_multirun_start = partialmethod(_note, "run"), partialmethod(_note, "sweep")


def remove_unused(run_dir: Path | None = None) -> None:
    """Remove a folder that Hydra has made and no run has begun in, and those above it as far as Hydra has made them.

    ``run_dir`` is one of a sweep's; None: the folder of the run, or of the whole sweep.
    """
    if NewFolders.noted is None:
        return
    folder = (run_dir or NewFolders.noted[0]).resolve()
    stays = NewFolders.noted[1]
    with contextlib.suppress(OSError):  # what holds something stays
        found = list(folder.iterdir()) if stays in folder.parents else []
        # Another run may have been given the same folder: its lock stays.
        if {path.name for path in found} <= {"multirun.yaml", *([LOCK] if holds(folder) else [])}:
            for path in found:
                path.unlink()
        while stays in folder.parents:
            folder.rmdir()
            folder = folder.parent


def _prepare_words() -> None:
    """Refuse what Hydra would take without a word; say where Hydra makes no folder, or the one of an earlier start."""
    words = sys.argv[1:]
    check_words(words, CONFIGS)
    sweep = bool(flags := [word for word in words if word in ("-m", "--multirun")])
    # Hydra's parser takes the overrides before the flag or those behind it, and refuses the others.
    sys.argv[1:] = [*flags[:1], *(word for word in words if word not in flags)]
    if "plan=true" in map(str.lower, words) and not sweep:
        sys.argv += NO_FOLDER  # nothing is run
    if not under_launcher() and any(os.environ.get(name, "1") != "1" for name in MPI_SIZES):
        discover_mpi()  # one process of mpirun alone starts ranks as any other process does
    if under_launcher():
        if sweep:
            raise ConfigError("a sweep (-m) starts the ranks of each job itself: run it with python, not with torchrun")
        # Rank 0's Hydra makes the run folder; the others' Hydra must not make more of them.
        earlier = rank_process.recall(run_folder.RUN_FOLDER_NOTE)
        if os.environ["RANK"] != "0":
            sys.argv += NO_FOLDER
        elif earlier is not None:
            # Its name was made of the time of the first start.
            sys.argv += [f"hydra.run.dir={run_folder.in_hydras_quotes(earlier)}"]


def _record_failure(run_dir: Path, reason: str, settings: dict[str, Any], started: float) -> None:
    write_failed_summary(run_dir, reason, settings, time.time() - started)
    write_report_or_tell(run_dir, say)


def print_plan(run: RunConfig) -> None:
    """``plan=true``: what this run would hold, send and fetch on this machine, in order."""
    nproc = run.launch.nproc or default_nproc(run.launch.device)
    kind: Any = launcher.choose_device(run.launch.device, nproc)
    preflight(run, nproc, kind)
    say(plan.text(dry_run(program_of(run, nproc), ClusterShape(nproc, nproc, kind))), sys.stdout)


def read_config(cfg: DictConfig) -> RunConfig:
    """Hydra's mapping to the typed settings; everything after this is plain dataclasses."""
    run = RunConfig.from_mapping(settings_of(cfg))
    if HydraConfig.initialized():  # not where a test composes
        hydra_cfg = HydraConfig.get()
        sweep_dir = hydra_cfg.sweep.dir if hydra_cfg.mode == RunMode.MULTIRUN else None
        run = dataclasses.replace(run, logger=named(run.logger, list(hydra_cfg.overrides.task), sweep_dir))
    return run


def with_fallback_batch(run: RunConfig) -> RunConfig:
    """``train.fallback_batch_size`` where neither the settings nor a checkpoint say how large a batch is."""
    engine = run.engine
    if engine.train_batch_size is None and engine.train_micro_batch_size_per_gpu is None:
        engine = dataclasses.replace(engine, train_batch_size=run.train.fallback_batch_size)
    return dataclasses.replace(run, engine=engine)


def settings_of(cfg: DictConfig) -> dict[str, Any]:
    """The composed config as plain dictionaries, interpolations resolved."""
    try:
        settings: Any = OmegaConf.to_container(cfg, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key}: {str(error).splitlines()[0]}") from None
    return {str(key): value for key, value in settings.items()}


def compose(overrides: Sequence[str]) -> RunConfig:
    """The settings of ``train.py`` with these words on its command line, for tools; a ConfigError where it has one."""
    check_words(overrides, CONFIGS)
    try:
        with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
            return RunConfig.from_mapping(settings_of(hydra.compose("train", overrides=list(overrides))))
    except HYDRAS_ERRORS as error:
        raise ConfigError(explain(error, CONFIGS, partial(valid_keys, overrides))) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"Hydra cannot read a config file: {error}") from None


def valid_keys(words: Sequence[str]) -> list[str]:
    """Every key of the config in which ``words`` choose from the groups, dotted, Hydra's own too, and every group."""
    chosen = [word for f in CONFIGS.rglob("*.yaml") if (word := f"{f.parent.relative_to(CONFIGS)}={f.stem}") in words]
    with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
        settings: Any = OmegaConf.to_container(hydra.compose("train", chosen, return_hydra_config=True), resolve=False)
    keys = [leaf.rsplit(".", cut)[0] for leaf in flatten(settings) for cut in range(leaf.count(".") + 1)]
    return list(dict.fromkeys([*keys, *(path.name for path in sorted(CONFIGS.iterdir()) if path.is_dir())]))
