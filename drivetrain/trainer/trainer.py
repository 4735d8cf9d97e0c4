"""`Trainer`: owns the loop, and delegates placement, number formats and everything around the loop."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from drivetrain import checkpoint
from drivetrain.accelerator import Accelerator
from drivetrain.accelerator.preparation import FUSED_HINT
from drivetrain.callbacks.base import Callback, Stage
from drivetrain.callbacks.early_stopping import EarlyStopping
from drivetrain.callbacks.model_checkpoint import ModelCheckpoint
from drivetrain.data import BatchInfo, CombinedLoader, DataShard, PendingBatch, is_split_already
from drivetrain.data.configuration import warn_of_workers
from drivetrain.runtime.durations import Duration
from drivetrain.runtime.errors import CheckpointError, ConfigurationError, MadeAgain, known_keywords, warn_ignored
from drivetrain.runtime.exit_codes import RESUME_EXIT_CODE
from drivetrain.runtime.terminal import print_all
from drivetrain.runtime.timing import CHECKPOINT, Timing
from drivetrain.strategies import Strategy
from drivetrain.strategies.base import StartsProcesses
from drivetrain.strategies.precision import Precision
from drivetrain.trackers import Tracker, TrackerGroup
from drivetrain.trainer import setup, task_checks
from drivetrain.trainer.compiling import compilations_watched, compile_plugin, uncompiled
from drivetrain.trainer.data_module import DataModule
from drivetrain.trainer.hyper_parameters import storable, without_modules
from drivetrain.trainer.loops.batches import LoaderSource, TrainingBatches, are_several, epoch_length, estimate_steps
from drivetrain.trainer.loops.evaluation_loop import (
    PredictionLoop,
    evaluate,
    evaluate_logged,
    make_validation,
    run_sanity_check,
)
from drivetrain.trainer.loops.fit_loop import FitLoop
from drivetrain.trainer.loops.progress import CurrentRun, Progress, duration_in_run
from drivetrain.trainer.loops.run_control import (
    EpochHealth,
    Finiteness,
    RunControl,
    calling_function,
    last_line,
    print_first_line,
)
from drivetrain.trainer.loops.special_steps import choose_step
from drivetrain.trainer.metrics.logged_values import SAVING, LoggedValues, Value
from drivetrain.trainer.metrics.tracker_log import TrackerLog
from drivetrain.trainer.optimizers import SchedulerConfig, read_scheduler
from drivetrain.trainer.options import OptionAttributes, TrainerOptions
from drivetrain.trainer.prepared_task import TaskRun
from drivetrain.trainer.profilers.actions import Actions
from drivetrain.trainer.profilers.base import SAVE, Profiler
from drivetrain.trainer.setup import init_module
from drivetrain.trainer.state.saved_run import DIRECTORIES, SavedRun, asked_to_resume, find_checkpoint, moment_of
from drivetrain.trainer.task import Task
from drivetrain.trainer.tuning.tuner import Tuning

if TYPE_CHECKING:
    from drivetrain.accelerator import PreparedOptimizer
    from drivetrain.trainer.hooks import Hooks
    from drivetrain.trainer.loops.run_control import StopReason


# The read-only face of the Trainer: where it is, what it has logged, what it is made of


class TrainerStatus:
    """What can be read from a `Trainer`: properties over its parts, which hold all state."""

    accelerator: Accelerator
    callbacks: list[Callback]
    tracker_group: TrackerGroup
    logged: LoggedValues
    progress: Progress
    task_run: TaskRun
    control: RunControl
    current: CurrentRun
    tracker_log: TrackerLog
    finiteness: Finiteness
    loop: FitLoop | None
    default_root_dir: str
    actions: Actions

    @property
    def strategy(self) -> Strategy:
        """The strategy."""
        return self.accelerator.strategy

    @property
    def precision(self) -> str:
        """Name of the precision."""
        return self.accelerator.precision.name

    @property
    def current_epoch(self) -> int:
        """Epochs finished so far."""
        return self.progress.epoch

    @property
    def global_step(self) -> int:
        """Optimizer steps taken so far."""
        return self.progress.global_step

    @property
    def profiler(self) -> Profiler:
        """What measures where the time goes; a `PassThroughProfiler` where none was given."""
        return self.actions.profiler

    @property
    def timing(self) -> Timing:
        """What `fit` spends its time with, so far, or has spent: of this process, in parts; `print` shows a table."""
        return self.accelerator.optimizer_step.timing

    # the task

    @property
    def task(self) -> Task | None:
        """The task of the run, or of the last one."""
        return self.task_run.task

    @property
    def datamodule(self) -> DataModule | None:
        """The data module of the run, or of the last one."""
        return self.task_run.datamodule

    @property
    def model(self) -> nn.Module | None:
        """What the strategy made of the task; the task itself until it is placed."""
        model, task = self.task_run.model, self.task_run.task
        return model if model is not None and self.strategy.unwrap(model) is task else task

    @property
    def hooks(self) -> Hooks:
        """The overridden hooks of the callbacks and the task."""
        assert self.task_run.hooks is not None
        return self.task_run.hooks

    @property
    def task_optimizers(self) -> list[PreparedOptimizer]:
        """The optimizers as the engine has prepared them, which a task steps."""
        return self.task_run.optimizers

    @property
    def lr_scheduler_configs(self) -> list[SchedulerConfig]:
        """The learning-rate schedulers, and when each steps."""
        return self.task_run.schedulers

    @property
    def optimizers(self) -> list[Any]:
        """The optimizers."""
        return [optimizer.optimizer for optimizer in self.task_optimizers]

    @property
    def loggers(self) -> list[Tracker]:
        """All trackers."""
        return self.tracker_group.trackers

    @property
    def logger(self) -> Tracker | None:
        """The first tracker."""
        return self.loggers[0] if self.loggers else None

    @property
    def log_dir(self) -> str:
        """Where the first tracker writes; the default directory where none writes files."""
        for tracker in self.tracker_group.trackers:
            if tracker.log_dir is not None:
                return tracker.log_dir
        return self.default_root_dir

    @property
    def local_dir(self) -> str:
        """Where callbacks and profilers write files of this machine: `log_dir`, or the current one if that is a URL."""
        return self.log_dir if "://" not in self.log_dir else "."

    # processes

    @property
    def spawning(self) -> StartsProcesses | None:
        """What starts processes for each verb, where the strategy does that and this is not one of them."""
        strategy = self.accelerator.strategy
        return strategy if isinstance(strategy, StartsProcesses) else None

    @property
    def world_size(self) -> int:
        """Number of processes of a run; all of the verb's where each verb starts some."""
        spawning = self.spawning
        return self.accelerator.num_processes if spawning is None else spawning.num_processes

    @property
    def num_devices(self) -> int:
        """Number of processes on this machine, as `world_size`."""
        spawning = self.spawning
        if spawning is not None:
            return spawning.num_processes
        return self.accelerator.strategy.topology.environment.local_world_size

    @property
    def num_nodes(self) -> int:
        """Number of machines."""
        return self.strategy.topology.environment.num_nodes

    @property
    def global_rank(self) -> int:
        """Global rank of this process."""
        return self.accelerator.process_index

    @property
    def local_rank(self) -> int:
        """Rank of this process on its machine."""
        return self.accelerator.local_process_index

    @property
    def is_global_zero(self) -> bool:
        """Whether this is the main process."""
        return self.accelerator.is_main_process

    @property
    def checkpoint_format(self) -> checkpoint.CheckpointFormat:
        """How the checkpoints of runs are kept: as directories. Override it to keep them in another way."""
        return DIRECTORIES

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on the main process, through the progress bar if there is one."""
        if not self.is_global_zero:
            return
        bar = self.progress_bar_callback
        if bar is not None:
            bar.print(*args, **kwargs)
        else:
            print_all(*args, **kwargs)

    # values

    @property
    def callback_metrics(self) -> dict[str, Value]:
        """All logged values by name, not yet turned into numbers: the latest of a step, the last of an epoch."""
        values = self.logged.callback_values()
        return {
            name: value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
            for name, value in values.items()
        }

    @property
    def progress_bar_metrics(self) -> dict[str, Value]:
        """What the progress bar shows, not yet turned into numbers."""
        return self.logged.bar_values()

    @property
    def logged_metrics(self) -> dict[str, float]:
        """What the trackers got, the latest of each name."""
        return dict(self.tracker_log.written)

    @property
    def num_val_batches(self) -> list[float]:
        """Batches of each validation loader."""
        return self.current.evaluation_batches.get(Stage.VALIDATE, [])

    @property
    def num_test_batches(self) -> list[float]:
        """Batches of each test loader."""
        return self.current.evaluation_batches.get(Stage.TEST, [])

    @property
    def num_predict_batches(self) -> list[float]:
        """Batches of each loader to predict."""
        return self.current.evaluation_batches.get(Stage.PREDICT, [])

    @property
    def num_training_batches(self) -> float:
        """Batches of this process in a training epoch; infinite where this is not known."""
        return self.current.training_batches

    @property
    def is_last_batch(self) -> bool:
        """Whether the batch under way is the last one of its training epoch."""
        info = self.current.batch_info
        return info is not None and (info.last or info.index + 1 >= self.current.training_batches)

    # the user's loaders

    @property
    def train_dataloader(self) -> Any:
        """The loader or loaders that the last `fit` was given; None before it has asked for them."""
        return self.current.loaders.get(Stage.TRAIN)

    @property
    def val_dataloaders(self) -> Any:
        """The loader or loaders that the last validation was given."""
        return self.current.loaders.get(Stage.VALIDATE)

    @property
    def test_dataloaders(self) -> Any:
        """The loader or loaders that the last `test` was given."""
        return self.current.loaders.get(Stage.TEST)

    @property
    def predict_dataloaders(self) -> Any:
        """The loader or loaders that the last `predict` was given."""
        return self.current.loaders.get(Stage.PREDICT)

    @property
    def is_finite(self) -> bool:
        """Whether the training values that were written, and the weights at the ends of epochs, are finite."""
        return self.finiteness.is_finite

    # stages

    @property
    def stage(self) -> Stage | None:
        """What runs now: `"train"`, `"validate"`, `"test"`, `"predict"`; None between two runs."""
        return self.current.stage

    @property
    def sanity_checking(self) -> bool:
        """Whether the validation before training runs."""
        return self.current.sanity_checking

    @property
    def batch(self) -> Any:
        """The batch under way."""
        return self.current.batch

    @property
    def batch_info(self) -> BatchInfo | None:
        """What the loader recorded about the batch under way, such as the number of its real rows."""
        return self.current.batch_info

    @property
    def training(self) -> bool:
        """Whether `fit` is training, not in a validation within."""
        return self.stage is Stage.TRAIN

    @property
    def validating(self) -> bool:
        """Whether a validation runs, in `fit` or in `validate`; not in the sanity check."""
        return self.stage is Stage.VALIDATE and not self.sanity_checking

    @property
    def testing(self) -> bool:
        """Whether `test` runs."""
        return self.stage is Stage.TEST

    @property
    def predicting(self) -> bool:
        """Whether `predict` runs."""
        return self.stage is Stage.PREDICT

    @property
    def validates(self) -> bool:
        """Whether the run has anything to validate on."""
        return self.loop is not None and self.loop.validates

    @property
    def validation_follows(self) -> bool:
        """Whether the run validates after the step that is being ended."""
        return self.loop is not None and self.loop.validation_follows

    # the end

    @property
    def stop_reason(self) -> StopReason | None:
        """Why the last `fit` ended: `"max_epochs"`, `"requested"`, `"interrupted"`, ...; None while it runs."""
        return self.control.reason

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C ends the last `fit`, or has ended it."""
        return self.control.interrupted

    @property
    def preempted(self) -> bool:
        """Whether a scheduler's signal ends the last `fit`, or has ended it."""
        return self.control.preempted

    @property
    def rollback_requested(self) -> bool:
        """Whether the run goes back to a checkpoint after this step."""
        return self.control.rollback_path is not None

    # callbacks

    def _first_callback(self, kind: type[Any]) -> Any:
        return next((callback for callback in self.callbacks if isinstance(callback, kind)), None)

    @property
    def checkpoint_callback(self) -> ModelCheckpoint | None:
        """The first checkpoint callback."""
        found: ModelCheckpoint | None = self._first_callback(ModelCheckpoint)
        return found

    @property
    def checkpoint_callbacks(self) -> list[ModelCheckpoint]:
        """All checkpoint callbacks."""
        return [callback for callback in self.callbacks if isinstance(callback, ModelCheckpoint)]

    @property
    def early_stopping_callback(self) -> EarlyStopping | None:
        """The first early-stopping callback."""
        found: EarlyStopping | None = self._first_callback(EarlyStopping)
        return found

    @property
    def progress_bar_callback(self) -> Callback | None:
        """The first callback that is a progress bar."""
        return next((callback for callback in self.callbacks if callback.is_progress_bar), None)


R = TypeVar("R")

_WITHOUT_EFFECT = {
    "fused_optimizer": FUSED_HINT,
    "optimizer_in_backward": "Each step has the same numbers without it; FSDP and cpu_offload save memory.",
    "advise": "Run drivetrain tune script.py, which shows what makes steps faster.",
}
"""Arguments of the Trainer that are taken and ignored, with what to do instead."""


class Trainer(MadeAgain, OptionAttributes, TrainerStatus):
    """Runs a `Task` on any hardware.

    Args:
        accelerator: `"auto"`, `"cpu"`, `"gpu"` or another kind of device; or a live `Accelerator` to run on.
        strategy: `"auto"`, `"single"`, `"ddp"`, another registered name, or a `Strategy`. With `"ddp_spawn"` and
            `"ddp_fork"` each verb runs in processes of its own, and this one has its outcome.
        devices: How many processes to use on this machine: `"auto"`, a number, or the numbers of its devices (`[0, 1]`,
            `"0,1"`). Where the script was started without a launcher and more than one is asked for, it is started
            again under one.
        num_nodes: Number of machines; the launcher decides, this is checked.
        precision: `"32"`, `"bf16"`, `"fp16"`, …, other spellings of these, or a `Precision`.
        logger: Trackers: names, objects or several of them; True for a `CSVLogger`, False for none. If None, those of
            the given `Accelerator`, else a `CSVLogger`.
        callbacks: One or several callbacks.
        fast_dev_run: Run this many batches (1 for True) of everything, without loggers and checkpoints.
        max_epochs: Epochs to train; 1000 where nothing else ends the run, -1 for no end.
        min_epochs: Epochs that no wish to stop cuts short.
        max_steps: Optimizer steps to train; -1 for no limit.
        min_steps: Optimizer steps that no wish to stop cuts short.
        max_time: How long to train: `"10 min"`, a timedelta, a dict of its arguments, or `"DD:HH:MM:SS"`.
        max_duration: How long to train, in any unit: `"500 steps"`, `"2 epochs"`, `"1M samples"`, `"50M tokens"`,
            `"10 min"`. Samples and tokens are counted over all processes.
        limit_train_batches: Batches of an epoch to train on: a number, or a fraction.
        limit_val_batches: The same for validation; 0 leaves it out.
        limit_test_batches: The same for testing.
        limit_predict_batches: The same for predicting.
        overfit_batches: Train and validate on so many of the same batches, unshuffled.
        val_check_interval: Validate after so many batches, such a fraction of an epoch, or such a duration:
            `"1000 steps"`, `"2 epochs"`, `"1M samples"`, `"10 min"`, `"10%"` of the run.
        check_val_every_n_epoch: Validate every so many epochs; None counts `val_check_interval` across epochs.
        num_sanity_val_steps: Validation batches to try before training; -1 for all.
        log_every_n_steps: Trackers get step values every so many steps, or in another unit: `"1M samples"`, `"30 s"`,
            `"1%"` of the run.
        enable_checkpointing: Whether a `ModelCheckpoint` is added where none is given.
        enable_progress_bar: Whether a progress bar is added where none is given.
        enable_model_summary: Whether a summary of the model is printed.
        enable_run_report: Whether a `RunReport` is added where none is given. By default where there is a tracker, or
            checkpoints are saved; True adds it to a run that keeps nothing else.
        accumulate_grad_batches: Micro-batches per optimizer step; if None those of the given `Accelerator`, else the
            launcher's, else 1.
        gradient_clip_val: Bound of the gradients; 0 and None clip nothing.
        gradient_clip_algorithm: `"norm"` or `"value"`.
        deterministic: Whether only deterministic algorithms may run; `"warn"` warns instead.
        benchmark: Let cuDNN try algorithms.
        inference_mode: Run `validate`, `test` and `predict` under `torch.inference_mode` rather than `torch.no_grad`;
            a validation within `fit` always runs under `torch.no_grad`.
        use_distributed_sampler: Whether loaders are sharded over processes; else each process takes all of its own.
        num_workers: Deprecated, without effect: each loader keeps its own number of workers.
        profiler: What measures where the time goes: `"simple"`, `"advanced"`, `"pytorch"`, `"xla"`, or a `Profiler`.
        detect_anomaly: Raise where a backward computes NaN, naming the forward that led to it.
        barebones: Nothing around the loop: no logger, checkpoint, bar, summary or sanity check.
        sync_batchnorm: Batch statistics over all processes (DDP on GPUs).
        reload_dataloaders_every_n_epochs: Make the loaders again every so many epochs.
        auto_micro_batch: Where memory lacks for a step, run it again in parts of its batches, with the same numbers;
            with the strategies `single` and `ddp`.
        optimizer_in_backward: Deprecated, without effect: parameters are stepped once the backward is over.
        fused_optimizer: Deprecated, without effect. Give `fused=True` to the optimizer itself.
        default_root_dir: Where everything is written by default.
        compile: Compile the modules of the task with `torch.compile`: True for each as a whole, `"blocks"` for the
            repeated blocks in them, or a dict of `torch.compile`'s options and `"blocks": True`; False for none, None
            for what the launcher was asked for.
        on_interrupt: What `fit` does at Ctrl-C once it has finished the step and saved: `"raise"` a
            `KeyboardInterrupt`, so that the script ends too, or `"return"`.
        seed: Seed everything with this, samples included, before anything else.
        advise: Deprecated, without effect. Run `drivetrain tune script.py`.

    Raises:
        ConfigurationError: An argument cannot be; the message names what can.
    """

    accelerator: Accelerator
    """The engine that the Trainer runs on: placement, precision, collectives and checkpoints of its run."""

    callbacks: list[Callback]
    """The callbacks, in the order in which their hooks are called."""

    progress: Progress
    """How far the run is: epochs, batches and steps; `progress.count` has other units."""

    advice: Sequence[Any] = ()
    """Deprecated, empty: `drivetrain tune` shows what makes steps faster."""

    @known_keywords
    def __init__(
        self,
        *,
        accelerator: str | Accelerator = "auto",
        strategy: str | Strategy = "auto",
        devices: int | str | Sequence[int] = "auto",
        num_nodes: int = 1,
        precision: str | int | Precision | None = None,
        logger: bool | str | Tracker | Iterable[str | Tracker] | None = None,  # bool first, for the command line
        callbacks: Callback | Sequence[Callback] | None = None,
        fast_dev_run: int | bool = False,
        max_epochs: int | None = None,
        min_epochs: int | None = None,
        max_steps: int = -1,
        min_steps: int | None = None,
        max_time: str | timedelta | dict[str, int] | None = None,
        max_duration: str | Duration | None = None,
        limit_train_batches: int | float | None = None,
        limit_val_batches: int | float | None = None,
        limit_test_batches: int | float | None = None,
        limit_predict_batches: int | float | None = None,
        overfit_batches: int | float = 0.0,
        val_check_interval: int | float | str | timedelta | dict[str, int] | Duration | None = None,
        check_val_every_n_epoch: int | str | Duration | None = 1,
        num_sanity_val_steps: int | None = None,
        log_every_n_steps: int | str | timedelta | dict[str, int] | Duration | None = None,
        enable_checkpointing: bool | None = None,
        enable_progress_bar: bool | None = None,
        enable_model_summary: bool | None = None,
        enable_run_report: bool | None = None,
        accumulate_grad_batches: int | None = None,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
        deterministic: bool | str | None = None,
        benchmark: bool | None = None,
        inference_mode: bool = True,
        use_distributed_sampler: bool = True,
        num_workers: str | None = None,
        profiler: Profiler | str | None = None,
        detect_anomaly: bool = False,
        barebones: bool = False,
        sync_batchnorm: bool = False,
        reload_dataloaders_every_n_epochs: int | str | Duration = 0,
        auto_micro_batch: bool = False,
        optimizer_in_backward: bool | None = None,
        fused_optimizer: bool | None = None,
        default_root_dir: str | os.PathLike[str] | None = None,
        compile: bool | str | Mapping[str, Any] | None = None,
        on_interrupt: str = "raise",
        seed: int | None = None,
        advise: bool | None = None,
    ) -> None:
        given = dict(locals())
        if num_workers is not None:
            warn_of_workers("Trainer", num_workers)
        for name, hint in _WITHOUT_EFFECT.items():
            if given[name] is not None:
                warn_ignored("Trainer", name, given[name], hint, since="0.1.0", removed_in="0.3.0", stacklevel=5)
        self.options = TrainerOptions.from_arguments(given)
        engine = (accelerator, strategy, devices, num_nodes, precision, accumulate_grad_batches, sync_batchnorm)
        compilation = None if compile is None else compile_plugin(compile)
        self.accelerator = setup.make_accelerator(*engine, compilation)
        self.options = setup.settle(accumulate_grad_batches, self.accelerator, self.options)
        setup.set_randomness(seed, deterministic, benchmark)
        self.tracker_group = setup.make_trackers(logger, self.accelerator, self.options)
        self.callbacks = setup.make_callbacks(callbacks, given, self.options, self.tracker_group.trackers)
        self.actions = Actions(self, profiler, barebones)
        self.progress = Progress()
        self.current = CurrentRun()
        topology = self.accelerator.strategy.topology
        self.control = RunControl(self.progress, self.options, topology.environment.world_size)
        self.logged = LoggedValues(self.current.find_batch_size, topology, lambda: bool(self.loggers))
        self.tracker_log = TrackerLog(self)
        self.finiteness = Finiteness(is_watched=False)
        self.task_run = TaskRun(self)
        self.loop: FitLoop | None = None
        self.saves: checkpoint.SaveQueue | None = None

    @property
    def tuning(self) -> Tuning:
        """The searches of this Trainer, for callbacks that search within a run."""
        return Tuning(self)

    def change_options(self, **changed: Any) -> None:
        super().change_options(**changed)
        self.control.options = self.options

    # the four verbs

    @known_keywords
    def fit(
        self,
        model: Task,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | os.PathLike[str] | None = None,
        resume: str | os.PathLike[str] | None = None,
        weights_only: bool | None = None,
    ) -> None:
        """Train a task.

        Args:
            model: The task.
            train_dataloaders: A loader; several, as a list or dict, are combined; or a `DataModule`.
            val_dataloaders: One loader or several, each validated on its own.
            datamodule: Where loaders come from instead.
            ckpt_path: Another name of `resume`.
            resume: A checkpoint to resume, exactly: the same batches, random numbers and values as without the
                break; or a `.ckpt` of another tool, which has no random state. `"auto"` takes the newest complete one
                and starts from the beginning where there is none; `"last"` or `"best"` takes the checkpoint callback's.
            weights_only: Without effect: nothing in a checkpoint is ever unpickled into objects.

        Raises:
            SystemExit: The run was preempted (SIGTERM, SIGUSR1), has saved a checkpoint, and should be started again.
            KeyboardInterrupt: The run was interrupted (Ctrl-C) and has saved a checkpoint; not with
                `on_interrupt="return"`.
            CheckpointError: The checkpoint is missing, damaged or that of another run.
            ConfigurationError: The task or its optimizers cannot be trained so.
            LaunchError: A process has failed that was started for this verb, as by `strategy="ddp_spawn"`.
            DataError: A loader is missing or empty.
        """
        model = uncompiled(model)
        if isinstance(train_dataloaders, DataModule):
            train_dataloaders, datamodule = None, train_dataloaders
        task_checks.check_task(model, train_dataloaders, val_dataloaders, datamodule)
        if resume is not None and ckpt_path is not None:
            raise ConfigurationError(f"resume={resume!r} and ckpt_path={ckpt_path!r} mean the same; give one.")
        if self.spawning is not None:
            asked = asked_to_resume(ckpt_path if resume is None else resume)
            self._spawned(Stage.TRAIN, model, train_dataloaders, val_dataloaders, datamodule, asked, None, weights_only)
            return
        loaders = {Stage.TRAIN: train_dataloaders, Stage.VALIDATE: val_dataloaders}
        self.task_run.attach(model, datamodule, Stage.TRAIN, loaders)
        self.control.begin()
        try:
            with (
                self.control.signals_watched(),
                compilations_watched(self),
                torch.autograd.set_detect_anomaly(self.detect_anomaly),
            ):
                loop = self._begin_fit(model, ckpt_path if resume is None else resume)
                with self.timing.run(sees_sync=self.world_size > 1):
                    loop.run()
                    if self.saves is not None:
                        with self.timing.span(CHECKPOINT):
                            self.saves.finish()
                if not self.preempted:
                    self.hooks.call("on_fit_end")
        except BaseException as error:
            self.control.record_exception(error)
            self.tracker_log.write_last_step()
            self.task_run.report_exception(model, error)
            self.tracker_log.write_last_step(though_not_due=True)
            if not self.interrupted:
                raise
        finally:
            self.task_run.tear_down(model, Stage.TRAIN)
            if self.is_global_zero and not self.barebones:
                self.print(last_line(self))
        if self.preempted:
            sys.exit(RESUME_EXIT_CODE)
        if self.interrupted and self.on_interrupt == "raise":
            raise KeyboardInterrupt

    def _begin_fit(self, task: Task, resume: Any) -> FitLoop:
        """Return the loop of a `fit`, with everything placed and restored, in the documented order of hooks."""
        self.task_run.set_up(task, Stage.TRAIN)
        task_checks.check_hooks(self, task, self.datamodule)
        if self.checkpoint_callbacks:
            keeps_objects = self.checkpoint_format.keeps_objects
            for owner in filter(None, (task, self.datamodule)):
                storable(without_modules(owner.hparams), keeps_objects)  # raises here rather than at the first save
        guarded = any(callback.guards_values for callback in self.callbacks)
        self.finiteness = Finiteness(is_watched=not (guarded or self.barebones))
        with self.accelerator.precision.init_context(), self.strategy.init_context():
            task.configure_model()
        task_checks.check_training_step(task, self.accumulate_grad_batches, self.gradient_clip_val)
        directory = self.task_run.checkpoint_path = find_checkpoint(self, asked_to_resume(resume))
        saved = None if directory is None else SavedRun(self, directory)
        if saved is not None:
            saved.restore_early()
        model = self.task_run.place(task, self.task_run.configure_optimizers(task))
        if saved is not None:
            saved.restore_weights()
        self.progress.begin_epoch(self.progress.epoch)
        self.hooks.call("on_fit_start")
        if saved is not None:
            saved.restore_training()
        self.tracker_log.begin_run(task)
        print_first_line(self, task)
        training_model = self.strategy.view(model, "train" if task.automatic_optimization else "manual")
        step = choose_step(self, task, training_model)
        sources = self.task_run.sources
        validation = make_validation(self, task, model, sources[Stage.VALIDATE])
        if saved is None:
            run_sanity_check(self, validation)
        self.logged.start((Stage.TRAIN, Stage.VALIDATE))
        task_checks.warn_of_evaluation_mode(task)
        self.current.stage = Stage.TRAIN
        batches = TrainingBatches(self, sources[Stage.TRAIN])
        task_checks.warn_of_rare_logging(self, self.estimated_stepping_batches)
        loop = self.loop = self.make_fit_loop(step, batches, validation, EpochHealth(self, task))
        self.accelerator.run_state.moment = partial(moment_of, self)
        if saved is not None:
            loop.resume_from(saved)
        task_checks.check_saved_states(self)
        return loop

    @known_keywords
    def validate(
        self,
        model: Task | None = None,
        dataloaders: DataModule | Any = None,
        ckpt_path: str | os.PathLike[str] | None = None,
        verbose: bool = True,
        datamodule: DataModule | None = None,
        weights_only: bool | None = None,
    ) -> list[dict[str, float]]:
        """Evaluate on the validation data: every sample once, over all processes.

        Args:
            model: The task; that of the last `fit` if None.
            dataloaders: One loader or several, or a `DataModule`.
            ckpt_path: A checkpoint whose weights to use; `"best"` or `"last"` takes the checkpoint callback's. If this
                and the model are None, the best checkpoint of the last `fit`, if it has saved one.
            verbose: Whether to print the results.
            datamodule: Where loaders come from instead.
            weights_only: Without effect.

        Returns:
            For each loader, its logged values by name.
        """
        if self.spawning is not None:
            given = (dataloaders, ckpt_path, verbose, datamodule, weights_only)
            return self._spawned(Stage.VALIDATE, model, *given)  # type: ignore[no-any-return]
        return evaluate_logged(self, Stage.VALIDATE, model, dataloaders, datamodule, ckpt_path, verbose)

    @known_keywords
    def test(
        self,
        model: Task | None = None,
        dataloaders: Any = None,
        ckpt_path: str | os.PathLike[str] | None = None,
        verbose: bool = True,
        datamodule: DataModule | None = None,
        weights_only: bool | None = None,
    ) -> list[dict[str, float]]:
        """Evaluate on the test data; see `validate`."""
        if self.spawning is not None:
            given = (dataloaders, ckpt_path, verbose, datamodule, weights_only)
            return self._spawned(Stage.TEST, model, *given)  # type: ignore[no-any-return]
        return evaluate_logged(self, Stage.TEST, model, dataloaders, datamodule, ckpt_path, verbose)

    @known_keywords
    def predict(
        self,
        model: Task | None = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        return_predictions: bool = True,
        ckpt_path: str | os.PathLike[str] | None = None,
        weights_only: bool | None = None,
        gather: bool = True,
    ) -> list[Any]:
        """Predict: run `predict_step` on every sample once, over all processes.

        Args:
            model: The task; that of the last `fit` if None.
            dataloaders: One loader or several, or a `DataModule`.
            datamodule: Where loaders come from instead.
            return_predictions: Whether to return them; with False they are gone once callbacks have seen them.
            ckpt_path: A checkpoint whose weights to use.
            weights_only: Without effect.
            gather: Whether each process returns the predictions of all; else those of its own batches.

        Returns:
            What `predict_step` returned for each batch, in the order of the data, on the CPU.
        """
        if self.spawning is not None:
            given = (dataloaders, datamodule, return_predictions, ckpt_path, weights_only, gather)
            return self._spawned(Stage.PREDICT, model, *given)  # type: ignore[no-any-return]

        def predict(task: Task, placed: nn.Module, source: LoaderSource) -> list[Any]:
            return PredictionLoop(self, task, placed, source, return_predictions, gather=gather).run()

        return evaluate(self, Stage.PREDICT, model, dataloaders, datamodule, ckpt_path, predict)

    def _spawned(self, stage: Stage, model: Task | None, *given: Any) -> Any:
        """Run a verb in processes that are started for it. Returns what it returned in the first one."""
        from drivetrain.trainer.spawning import run_spawned  # here: few Trainers start processes

        names = tuple(inspect.signature(getattr(Trainer, stage.verb)).parameters)[2:]
        return run_spawned(self, stage, model, dict(zip(names, given, strict=False)))

    def adapt_loader(self, loader: Any, stage: Stage) -> Any:
        """Return the loader to prepare; override it to warn of loaders, or to give all of them another order.

        Args:
            loader: What was given or made; each one alone if there are several.
            stage: What it is for.
        """
        return loader

    def combine_loaders(self, given: Any, stage: Stage) -> Any:
        """Combine several loaders into one `CombinedLoader`. Returns a single loader as it is.

        A dict and a list of `DataLoader` objects are several loaders. Another list is one loader: it holds batches.

        Args:
            given: What was given or made.
            stage: What it is for: training loaders run side by side, others after each other.
        """
        mode = "max_size_cycle" if stage is Stage.TRAIN else "sequential"
        return CombinedLoader(given, mode) if are_several(given) else given

    def shard_of(self, loader: Any) -> DataShard | None:
        """This process's share of a loader; None for the one that the strategy gives it.

        Args:
            loader: The loader.
        """
        shares = self.use_distributed_sampler and not (self.world_size > 1 and is_split_already(loader))
        return None if shares else DataShard()

    def read_scheduler(self, given: Any, monitor: str | None = None, by_hand: bool = False) -> SchedulerConfig:
        """Return what one scheduler among the results of `configure_optimizers` means.

        Args:
            given: The scheduler, or a dict of it and when it steps.
            monitor: The logged value to watch if `given` names none.
            by_hand: Whether the task steps it by itself.

        Raises:
            ConfigurationError: A key or a value of the dict cannot be.
        """
        return read_scheduler(given, monitor, by_hand)

    def steps_without_loss(self, window: Sequence[PendingBatch]) -> int:
        """Return how many optimizer steps a window counts as if `training_step` left out all its batches: none.

        Args:
            window: The micro-batches.
        """
        return 0

    def make_fit_loop(self, *parts: Any) -> FitLoop:
        """Make the loop of a `fit`; override it to train with another `FitLoop`.

        Args:
            parts: The arguments of `FitLoop` after the Trainer.
        """
        return FitLoop(self, *parts)

    def adopt_callbacks(self, added: Any) -> None:
        """Take a task's callbacks, which replace those of the same class, or of one that theirs is derived from.

        Args:
            added: One or several callbacks.
        """
        self.callbacks = setup.with_task_callbacks(self.callbacks, added)

    def log_metrics(self, values: Mapping[str, float], step: int | None = None) -> None:
        """Give numbers to the trackers, and to the callbacks that watch one; call it on all processes.

        Args:
            values: Names and numbers.
            step: The optimizer step; the current one if None.
        """
        self.logged.remember(values)
        self.tracker_log.write(values, self.global_step if step is None else step)

    def init_module(self, empty_init: bool | None = None) -> AbstractContextManager[None]:
        """Make modules in a `with` block where and as they will be trained.

        They get the device and the dtype of the run; under a strategy that shards, no values where it fills them later.

        Args:
            empty_init: Leave parameters without initial values, where a checkpoint follows that has them.
        """
        return init_module(self, empty_init)

    # checkpoints

    @known_keywords
    def save_checkpoint(
        self,
        filepath: str | os.PathLike[str],
        weights_only: bool = False,
        block: bool = True,
        format: str | None = None,
    ) -> checkpoint.PendingSave:
        """Write a checkpoint; call it on all processes.

        Args:
            filepath: The checkpoint's directory, or a URL; it appears complete or not at all.
            weights_only: Leave out everything but the weights and hyper-parameters.
            block: Whether to return only when it is durable. Else training continues while a copy is written; an error
                is raised at the next step, by several processes at the one that they agree on within about a second;
                `fit` waits for it at its end.
            format: `"drivetrain"` writes a directory, and `"lightning"` a `.ckpt` file of that format, also
                if the weights are sharded; `checkpoint_format` decides if None.

        Returns:
            The save; done already where `block` is set.

        Raises:
            CheckpointError: A process could not write; what was there before is intact.
        """
        step = self.accelerator.optimizer_step
        if step.is_torn:
            raise CheckpointError(
                "No checkpoint is written within a step that has begun to change parameters: between the steps of two "
                "optimizers, in the closure of an optimizer such as L-BFGS, or in a backward that steps parameters. "
                "Save in on_train_batch_end, or resume from the last checkpoint."
            )
        if self.loop is not None and self.current.stage in (Stage.TRAIN, Stage.VALIDATE):
            self.tracker_log.write_due_values()
        known = (self.checkpoint_format, DIRECTORIES)
        chosen = next((each for each in known if format in (None, each.name)), None)
        save = (chosen or checkpoint.find_format(str(format))).save
        if self.actions.measures:
            save = self.actions.watch(SAVE, save)
        with step.timing.span(CHECKPOINT), self.logged.forbidden(SAVING):
            if not block:
                self.saves = self.accelerator.save_queue
            saving: checkpoint.PendingSave = save(self, filepath, weights_only, block)
            return saving

    @property
    def estimated_stepping_batches(self) -> float:
        """Optimizer steps that `fit` will take, for schedules in `configure_optimizers`; infinite if not known.

        Raises:
            ConfigurationError: No `fit` is under way.
        """
        training = self.task_run.sources.get(Stage.TRAIN)
        if training is None:
            raise ConfigurationError("estimated_stepping_batches is known within fit() only.")
        loader = training.prepare_training()
        self.current.training_batches = epoch_length(self, loader)
        return estimate_steps(self, loader)

    def resolve_duration(self, duration: Duration, name: str = "duration") -> Duration:
        """A duration in steps, epochs, samples, tokens or seconds; a part of the run in what its end is given in.

        Args:
            duration: The duration.
            name: What it was given as, for errors.

        Raises:
            ConfigurationError: It is a part of a run whose length is not known.
        """
        return duration_in_run(self, duration, name)

    # ending and rolling back

    @property
    def should_stop(self) -> bool:
        """Whether the run is to stop after this step; setting it asks for that, as `request_stop` does."""
        return self.control.stop_requested

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        if not value:
            self.control.withdraw_stop()
        elif not self.control.stop_requested:
            self.control.request_stop(f"trainer.should_stop was set in {calling_function()}")

    def request_stop(self, reason: str, asker: str = "") -> None:
        """Ask for the end of `fit` after this step, on all processes, once `min_epochs` and `min_steps` are reached.

        Args:
            reason: Who asks and why, for the line with which the run ends.
            asker: A name under which `withdraw_stop` takes the request back.
        """
        self.control.request_stop(reason, asker)

    def withdraw_stop(self, asker: str) -> None:
        """Take back a request to stop whose reason has passed, if the run continues for `min_epochs` or `min_steps`.

        Call it on all processes. Requests of others hold. `trainer.should_stop = False` takes all of them back.

        Args:
            asker: The name that `request_stop` was given.
        """
        self.control.withdraw_request(asker)

    def request_rollback(self, path: str, skip_batches: Collection[tuple[int, int]] = ()) -> None:
        """Go back to a checkpoint after this step, and leave some batches out from then on; call it on all processes.

        Args:
            path: The checkpoint.
            skip_batches: (epoch, batch index) of this process's batches to leave out.
        """
        self.control.request_rollback(path, skip_batches)

    def skip_batches(self, batches: Collection[tuple[int, int]]) -> None:
        """Leave some of this process's batches out.

        Args:
            batches: (epoch, batch index) of each.
        """
        self.control.skip_batches(batches)
