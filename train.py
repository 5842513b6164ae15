"""Train a GPT under ZeRO: ``python train.py zero.stage=2``. ``python train.py --help`` lists what can be chosen.

Hydra composes ``configs/`` (:func:`main`, :func:`job`) → one frozen ``RunConfig``, checked as far as it can be before
anything is started (:func:`preflight`) → ranks, started here or by torchrun → :func:`train`, the program of each rank,
with the loop. Hydra and OmegaConf are imported in this file only; nothing behind ``RunConfig`` knows them.

Exit status: 0 done · 1 a rank failed · 2 settings that cannot be used · 128 + n ended by signal n.
"""

from __future__ import annotations

import dataclasses
import math
import os
import signal
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if "RANK" in os.environ:  # under torchrun; read by torch when it is imported: no C++ text above our own errors
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import deepzero
from deepzero.checkpoint.checkpoint_dir import holds, release
from deepzero.comm import process_group
from deepzero.config.hydra_errors import check_words, dotted, explain, plain_names
from deepzero.config.run import RunConfig
from deepzero.config.strict import ConfigError
from deepzero.data.corpus import load_corpus
from deepzero.data.sampler import GlobalBatchSampler
from deepzero.evaluation import sample, validate
from deepzero.launch import elastic, launcher
from deepzero.launch.launcher import Interrupted, RankFailed, default_nproc, default_threads, launch, under_launcher
from deepzero.launch.preemption import on_stop_request
from deepzero.launch.rank_process import CONFIG_ERROR_EXIT, FAILURE_EXIT, fail_as_rank, leave, run_here
from deepzero.monitor.metrics_file import write_error, write_failed_summary
from deepzero.monitor.report.compare import runs_in, text_table
from deepzero.monitor.report.write import write_report_or_tell
from deepzero.monitor.run_name import named
from deepzero.monitor.terminal import say
from deepzero.planning import plan
from deepzero.planning.dry_run import ClusterShape, dry_run
from deepzero.profiling.trace import trace
from deepzero.training.build_model import build_model, program_of, sequences
from deepzero.training.command import Command, interpreter, torchrun_words
from deepzero.training.memory_timeline import StepTimeline, complete_timeline
from deepzero.training.preflight import preflight
from deepzero.training.reporting import build_monitor, final_facts, step_record
from deepzero.training.run_folder import (
    RUN_FOLDER_NOTE,
    at_its_start,
    cannot_write,
    has_begun,
    join,
    load_start,
    remove_unused,
    save_if_due,
    stop,
    sweep_folder,
    take,
)

HERE = Path(__file__).resolve()
CONFIGS = HERE.parent / "configs"
MAIN_PROCESS = os.getpid()
STATUS = [0]
"""Exit status so far: a job of a sweep that fails does not stop the others."""


# ---- the program of each rank ----------------------------------------------------------------------------------------


def train(run: RunConfig, run_dir_name: str, command: Command) -> None:
    """Build everything, train, validate, sample, sum up. Every rank runs this, however it was started."""
    run_dir = join(run, run_dir_name)
    torch.autograd.set_detect_anomaly(run.debug.detect_anomaly)
    corpus = load_corpus(run.data)
    torch.manual_seed(run.train.seed)  # the same initial parameters on every rank
    model = build_model(run)
    engine, *_ = deepzero.initialize(model=model, config=run.engine, total_steps=run.train.steps)
    torch.manual_seed(run.train.seed + 1 + engine.global_rank)  # from here on randomness is dropout, and differs
    train_data, val_data = sequences(run, corpus)
    sampler = GlobalBatchSampler(len(train_data), engine.batch.global_batch, run.train.seed)
    first_step = load_start(run, run_dir, engine, sampler, command)
    monitor = build_monitor(run, run_dir, engine, model, corpus)
    timeline = StepTimeline(run, run_dir, engine, first_step)
    if run.train.save_every:
        on_stop_request(engine.request_stop)

    with trace(run.profiler, run_dir, engine.global_rank, engine.ledger.held_now, engine.device) as end_of_step:
        for step in range(first_step, run.train.steps):
            if run.train.eval_every and step % run.train.eval_every == 0:
                monitor.validation(step, validate(engine, val_data, run.train.eval_batches))
            timeline.begin(step + 1)
            started = time.perf_counter()
            for k in range(engine.batch.accumulation):
                mine = sampler.rank_indices(step, k, engine.global_rank, engine.batch.micro_batch, engine.world_size)
                input_ids, labels = (tensor.to(engine.device) for tensor in train_data.batch(mine))
                loss = engine(input_ids, labels)
                if run.debug.inject_overflow_at == step + 1 and engine.global_rank == 0:
                    loss = loss * math.inf
                engine.backward(loss)
                engine.step()
            monitor.step(step_record(run, engine), time.perf_counter() - started)
            timeline.end(step + 1, monitor.line)
            save_if_due(run, run_dir, engine, sampler)
            end_of_step()
            if engine.stopping and engine.global_steps < run.train.steps:
                stop(run, run_dir, engine, monitor, command)

    on_stop_request(None)
    engine.wait_for_checkpoint()
    if run.train.eval_every:
        monitor.validation(run.train.steps, validate(engine, val_data, run.train.eval_batches))
    text = sample(engine, model, corpus, run.train) if run.train.sample_tokens else None
    monitor.finish(final_facts(run, engine, text))
    process_group.shutdown()
    complete_timeline(run, run_dir, engine, monitor.line)


# ---- from Hydra to ranks ---------------------------------------------------------------------------------------------


def main() -> None:
    """Let Hydra compose and call :func:`job`, once or for every job of a sweep; leave with the exit status."""
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # Hydra then raises its errors instead of printing them
    # A launcher plugin's jobs unpickle what is defined here, in processes that start elsewhere.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")]))
    # Our preset has the name of the plugin's own; Hydra merges them, and says that it will not always do so.
    warnings.filterwarnings("ignore", r"\s*'hydra/launcher/submitit_slurm' is validated against ConfigStore schema")
    try:
        check_words(sys.argv[1:], CONFIGS)
        if "plan=true" in map(str.lower, sys.argv[1:]) and not {"-m", "--multirun"} & set(sys.argv[1:]):
            sys.argv += ["hydra.run.dir=.", "hydra.output_subdir=null"]  # nothing is run, and no folder made
        if under_launcher():
            _share_one_run_folder()
        hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name="train")(job)()
    except (HydraException, OmegaConfBaseException, ConfigError) as error:
        problem = ConfigError(explain(error, CONFIGS, valid_keys))
        if under_launcher():
            fail_as_rank(problem)
        say(plain_names(str(problem)))
        STATUS[0] = CONFIG_ERROR_EXIT
    except OSError as error:  # Hydra's: those of a run have been told
        problem = cannot_write(Path(), error)
        if under_launcher():
            fail_as_rank(problem)
        say(str(problem))
        STATUS[0] = CONFIG_ERROR_EXIT
    except RuntimeError as error:
        # Of a launcher plugin: not installed, no Slurm here, or a job that failed elsewhere.
        missing = "Unknown plugin class" in str(error)
        if not (missing or '"srun"' in str(error) or type(error).__module__.startswith("submitit.")):
            raise
        say(f"{error}; pip install 'deepzero[slurm]'" if missing else str(error))
        STATUS[0] = CONFIG_ERROR_EXIT if missing else FAILURE_EXIT
    except (KeyboardInterrupt, SystemExit) as error:  # a signal has ended the run, and with it the sweep
        STATUS[0] = int(error.code or 0) if isinstance(error, SystemExit) else 128 + signal.SIGINT
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # nothing is left to interrupt
    if (folder := sweep_folder()) is not None and (runs := runs_in(folder)):
        say("\n" + text_table(runs), sys.stdout)
    remove_unused()
    if under_launcher():
        leave(STATUS[0])
    sys.exit(STATUS[0])


def _share_one_run_folder() -> None:
    """Under torchrun rank 0's Hydra makes the run folder; the others' Hydra must not make more of them."""
    if {"-m", "--multirun"} & set(sys.argv[1:]):
        raise ConfigError("a sweep (-m) starts the ranks of each job itself: run it with python, not with torchrun")
    earlier = elastic.recall(RUN_FOLDER_NOTE)
    if os.environ["RANK"] != "0":
        sys.argv += ["hydra.run.dir=.", "hydra.output_subdir=null"]
    elif earlier is not None:
        sys.argv += [f"hydra.run.dir={earlier}"]  # its name was made of the time of the first start


def job(cfg: DictConfig) -> None:
    """One job: a run, or one point of a sweep."""
    run_dir, command = Path(HydraConfig.get().runtime.output_dir), typed(cfg)
    if under_launcher():
        started = time.time()

        def on_failure(reason: str) -> None:
            if holds(run_dir):  # else it is another run's folder, or no run has begun
                write_failed_summary(run_dir, reason, settings_for_summary(cfg), time.time() - started)
                write_report_or_tell(run_dir, say)
                say(command.way_on(run_dir, cfg.train.steps))

        run_here(_checked_train, cfg, str(run_dir), command, on_failure=on_failure)
        return
    try:
        run = read_config(cfg)
        if run.plan:
            print_plan(run)
            return
        start_ranks(run, run_dir, command)
        if HydraConfig.get().mode != RunMode.MULTIRUN:
            say(command.way_on(run_dir, run.train.steps), sys.stdout)
    except (ConfigError, RankFailed, OSError) as error:
        say(plain_names(str(error)) if not isinstance(error, OSError) else f"the run could not be started: {error}")
        STATUS[0] = CONFIG_ERROR_EXIT if isinstance(error, ConfigError) else FAILURE_EXIT
        if isinstance(error, RankFailed):
            say(command.way_on(run_dir, run.train.steps))
        if os.getpid() != MAIN_PROCESS:  # a launcher plugin runs jobs elsewhere and must hear of it
            raise
    except Interrupted as error:
        say(f"{error}; what there is lies in {run_dir}")
        say(command.way_on(run_dir, run.train.steps))
        # Not an Exception for Hydra to collect: it ends a sweep, too.
        raise SystemExit(128 + error.signum) from None
    finally:
        remove_unused(run_dir)
        release(run_dir)


def typed(cfg: DictConfig) -> Command:
    """The command of this job, to be kept and to be said again."""
    hydra_cfg, words = HydraConfig.get(), sys.argv[1:]
    if hydra_cfg.mode == RunMode.MULTIRUN:  # one run of the sweep is gone on with by itself
        words = list(hydra_cfg.overrides.task)
    start = torchrun_words(sys.argv[0]) if under_launcher() else (interpreter(),)
    program = sys.argv[0] if Path(sys.argv[0]).name == HERE.name else str(HERE)
    parts = {"config": cfg, "hydra": HydraConfig.instance().cfg, "overrides": hydra_cfg.overrides.task}
    files = {f"{name}.yaml": OmegaConf.to_yaml(part) for name, part in parts.items()}
    return Command((*start, program), words, files, under_launcher())


def _checked_train(cfg: DictConfig, run_dir: str, command: Command) -> None:
    """A rank that torchrun has started: what the launching process would have checked, then the program."""
    first, started, folder = os.environ["RANK"] == "0", time.time(), Path(run_dir).resolve()
    try:
        run = read_config(cfg)
        if run.plan:
            raise ConfigError("plan=true starts nothing: run it with python, not with torchrun")
        nproc = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if run.launch.nproc not in (None, nproc):
            raise ConfigError(
                f"launch.nproc={run.launch.nproc}, but torchrun has started {nproc} ranks here; leave it out"
            )
        device = choose_device(run, nproc)
        os.environ["DEEPZERO_DEVICE"] = device
        if run.launch.threads_per_rank is not None:
            torch.set_num_threads(run.launch.threads_per_rank)
        folder = join(run, run_dir)
        if first:
            take(folder)
        run = at_its_start(run, folder, int(os.environ["WORLD_SIZE"]))
        preflight(run, int(os.environ["WORLD_SIZE"]), device)
        train(run, run_dir, command)
    except ConfigError:
        if not has_begun(folder, started):
            remove_unused()
            release(folder)
        raise
    if first:
        say(command.way_on(folder, run.train.steps), sys.stdout)


def read_config(cfg: DictConfig) -> RunConfig:
    """Hydra's mapping to the typed settings; everything after this is plain dataclasses."""
    run = with_fallback_batch(RunConfig.from_mapping(settings_of(cfg)))
    if HydraConfig.initialized():  # not where a test composes
        hydra_cfg = HydraConfig.get()
        sweep_dir = hydra_cfg.sweep.dir if hydra_cfg.mode == RunMode.MULTIRUN else None
        run = dataclasses.replace(run, logger=named(run.logger, list(hydra_cfg.overrides.task), sweep_dir))
    return run


def with_fallback_batch(run: RunConfig) -> RunConfig:
    """``train.fallback_batch_size`` where nothing else says how large a batch is."""
    engine = run.engine
    if engine.train_batch_size is None and engine.train_micro_batch_size_per_gpu is None:
        engine = dataclasses.replace(engine, train_batch_size=run.train.fallback_batch_size)
    return dataclasses.replace(run, engine=engine)


def settings_of(cfg: DictConfig) -> dict[str, Any]:
    """The composed config as plain dictionaries, interpolations resolved."""
    settings = OmegaConf.to_container(cfg, resolve=True)
    if not isinstance(settings, dict):
        raise ConfigError("the composed config is not a mapping")
    return {str(key): value for key, value in settings.items()}


def settings_for_summary(cfg: DictConfig) -> dict[str, Any]:
    """All settings with their defaults; where they cannot be read, what was composed."""
    try:
        return dataclasses.asdict(read_config(cfg))
    except ConfigError:
        return settings_of(cfg)


def start_ranks(run: RunConfig, run_dir: Path, command: Command) -> None:
    """Check what can be checked, start the ranks on this machine, wait for them."""
    nproc = run.launch.nproc or default_nproc()
    device = choose_device(run, nproc)
    take(run_dir)
    run = at_its_start(run, run_dir, nproc)
    preflight(run, nproc, device)
    threads = run.launch.threads_per_rank or os.environ.get("OMP_NUM_THREADS") or default_threads(nproc)
    environment = {"DEEPZERO_DEVICE": device, "OMP_NUM_THREADS": str(threads)}
    started = time.time()
    arguments, restarts = (run, str(run_dir), command), run.launch.max_restarts
    try:
        launch(str(HERE), "train", arguments, nproc=nproc, environment=environment, max_restarts=restarts)
    except (ConfigError, RankFailed, Interrupted) as error:
        if isinstance(error, ConfigError) and not has_begun(run_dir, started):
            raise
        if sys.stdout.isatty():
            print()  # below the bar
        failure = error.__cause__ if isinstance(error, Interrupted) else error
        headline = failure.headline if isinstance(failure, RankFailed) else str(error)
        write_failed_summary(run_dir, headline, dataclasses.asdict(run), time.time() - started)
        write_report_or_tell(run_dir, say)
        if isinstance(failure, RankFailed) and failure.full:
            where = write_error(run_dir, failure.full)
            told = RankFailed(failure.headline, f"{failure.frames}\n{where}".lstrip("\n"))
            if failure is error:
                raise told from None
            say(str(told))  # it failed before it was interrupted
        raise


def choose_device(run: RunConfig, nproc: int) -> str:
    """``cuda`` or ``cpu`` for ``nproc`` ranks on this machine."""
    return launcher.choose_device(run.launch.device, nproc)


def compose(overrides: Sequence[str]) -> RunConfig:
    """What ``train.py`` would run with these words on its command line, for tools.

    Raises:
        ConfigError: as there.
    """
    check_words(overrides, CONFIGS)
    try:
        with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
            return RunConfig.from_mapping(settings_of(hydra.compose("train", overrides=list(overrides))))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(explain(error, CONFIGS, valid_keys)) from None


def print_plan(run: RunConfig) -> None:
    """``plan=true``: what this run would hold, send and fetch on this machine, in order."""
    nproc = run.launch.nproc or default_nproc()
    kind: Any = choose_device(run, nproc)
    preflight(run, nproc, kind)
    say(plan.text(dry_run(program_of(run, nproc), ClusterShape(nproc, nproc, kind))), sys.stdout)


def valid_keys() -> list[str]:
    """Every key of the default config, dotted, Hydra's own included, and every group."""
    with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
        settings = OmegaConf.to_container(hydra.compose("train", return_hydra_config=True), resolve=False)
    groups = [path.name for path in sorted(CONFIGS.iterdir()) if path.is_dir()]
    return list(dict.fromkeys([*dotted(settings), *groups]))  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
