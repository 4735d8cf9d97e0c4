"""`Trainer`: runs training, validation, testing and prediction of a `Task` on any hardware."""

from __future__ import annotations

import inspect
import logging
import os
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from drivetrain import checkpoint
from drivetrain.accelerator import Accelerator
from drivetrain.accelerator.preparation import FUSED_HINT
from drivetrain.callbacks.base import Callback, Stage
from drivetrain.callbacks.early_stopping import EarlyStopping
from drivetrain.callbacks.model_checkpoint import ModelCheckpoint
from drivetrain.callbacks.progress_bar import TQDMProgressBar
from drivetrain.data import BatchInfo, CombinedLoader, DataShard, PendingBatch, is_split_already
from drivetrain.data.configuration import warn_of_workers
from drivetrain.runtime.devices import DeviceName
from drivetrain.runtime.durations import Duration
from drivetrain.runtime.errors import CheckpointError, ConfigurationError, MadeAgain, known_keywords, warn_ignored
from drivetrain.runtime.exit_codes import RESUME_EXIT_CODE
from drivetrain.runtime.logging import collect, is_configured, report
from drivetrain.runtime.terminal import print_all
from drivetrain.runtime.timing import CHECKPOINT, Timing
from drivetrain.strategies import Strategy
from drivetrain.strategies.base import StartsProcesses
from drivetrain.strategies.precision import Precision
from drivetrain.strategies.precision.registry import PrecisionName
from drivetrain.strategies.registry import StrategyName
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
    announce_end,
    announce_start,
    calling_function,
)
from drivetrain.trainer.loops.special_steps import choose_step
from drivetrain.trainer.metrics.logged_values import SAVING, LoggedValues, Value
from drivetrain.trainer.metrics.tracker_log import TrackerLog
from drivetrain.trainer.optimizers import SchedulerConfig, read_scheduler
from drivetrain.trainer.options import LimitPerLoader, OptionAttributes, TrainerOptions
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


# Read-only properties of the Trainer: its parts, the state of the run, and logged values


class TrainerStatus:
    """Read-only properties of a `Trainer` about its configuration and the current run."""

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
        """The strategy of the run, such as DDP, which distributes the model over devices and processes."""
        return self.accelerator.strategy

    @property
    def precision(self) -> str:
        """The name of the precision, such as `"bf16"`."""
        return self.accelerator.precision.name

    @property
    def current_epoch(self) -> int:
        """The index of the current epoch, counted from 0. After training, the number of finished epochs."""
        return self.progress.epoch

    @property
    def global_step(self) -> int:
        """The number of optimizer steps that the run has taken so far."""
        return self.progress.global_step

    @property
    def profiler(self) -> Profiler:
        """The profiler, or a `PassThroughProfiler` if there is none."""
        return self.actions.profiler

    @property
    def timing(self) -> Timing:
        """The time that this process spent in each part of `fit`, such as data loading, as a `Timing`.

        Its method `print` shows a table.
        """
        return self.accelerator.optimizer_step.timing

    # the task

    @property
    def task(self) -> Task | None:
        """The task of the current or last run, or None."""
        return self.task_run.task

    @property
    def datamodule(self) -> DataModule | None:
        """The data module of the current or last run, or None."""
        return self.task_run.datamodule

    @property
    def model(self) -> nn.Module | None:
        """The task, wrapped in the module that the strategy adds, such as torch's `DistributedDataParallel`.

        Before the task is prepared, the task itself.
        """
        model, task = self.task_run.model, self.task_run.task
        # The prepared model may still be that of an earlier task.
        return model if model is not None and self.strategy.unwrap(model) is task else task

    @property
    def hooks(self) -> Hooks:
        assert self.task_run.hooks is not None
        return self.task_run.hooks

    @property
    def task_optimizers(self) -> list[PreparedOptimizer]:
        """The optimizers of the run, each in the wrapper that `Accelerator.prepare` returned."""
        return self.task_run.optimizers

    @property
    def lr_scheduler_configs(self) -> list[SchedulerConfig]:
        """The learning-rate schedulers, each with the interval at which it steps."""
        return self.task_run.schedulers

    @property
    def optimizers(self) -> list[Any]:
        """The run's optimizers, without the wrappers of `Accelerator.prepare`."""
        return [optimizer.optimizer for optimizer in self.task_optimizers]

    @property
    def loggers(self) -> list[Tracker]:
        """All experiment trackers of the Trainer."""
        return self.tracker_group.trackers

    @property
    def logger(self) -> Tracker | None:
        """The first experiment tracker of the Trainer, or None."""
        return self.loggers[0] if self.loggers else None

    @property
    def log_dir(self) -> str:
        """The directory of the first tracker, or the default directory if no tracker writes files."""
        for tracker in self.tracker_group.trackers:
            if tracker.log_dir is not None:
                return tracker.log_dir
        return self.default_root_dir

    @property
    def local_dir(self) -> str:
        """The local directory into which parts of the run, such as profilers, write their files.

        It is `log_dir`, or the working directory if `log_dir` is a URL.
        """
        return self.log_dir if "://" not in self.log_dir else "."

    # processes

    @property
    def spawning(self) -> StartsProcesses | None:
        """The strategy, if it starts the processes of the run itself, as `ddp_spawn` does, otherwise None."""
        strategy = self.accelerator.strategy
        return strategy if isinstance(strategy, StartsProcesses) else None

    @property
    def world_size(self) -> int:
        """The number of processes of the run, also before `fit` starts the processes of `ddp_spawn` or `ddp_fork`."""
        spawning = self.spawning
        return self.accelerator.num_processes if spawning is None else spawning.num_processes

    @property
    def num_devices(self) -> int:
        """The number of devices that the run uses on this machine, one for each process."""
        spawning = self.spawning
        if spawning is not None:
            return spawning.num_processes
        return self.accelerator.strategy.topology.environment.local_world_size

    @property
    def num_nodes(self) -> int:
        """The number of machines."""
        return self.strategy.topology.environment.num_nodes

    @property
    def global_rank(self) -> int:
        """The rank of this process among all processes of the run."""
        return self.accelerator.process_index

    @property
    def local_rank(self) -> int:
        """The rank of this process on its machine."""
        return self.accelerator.local_process_index

    @property
    def is_global_zero(self) -> bool:
        """True if this process has rank 0, which usually writes files and prints."""
        return self.accelerator.is_main_process

    @property
    def checkpoint_format(self) -> checkpoint.CheckpointFormat:
        """The format in which checkpoints are saved, by default a directory.

        Override it to use another format.
        """
        return DIRECTORIES

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on rank 0 only, without breaking the progress bar.

        Takes the arguments of the built-in `print`.
        """
        if self.is_global_zero:
            collect((kwargs.get("sep") or " ").join(map(str, args)))
            self._print(*args, **kwargs)

    def _print(self, *args: Any, **kwargs: Any) -> None:
        bar = self.progress_bar_callback
        if bar is not None:
            bar.print(*args, **kwargs)
        else:
            print_all(*args, **kwargs)

    def announce(self, text: str, level: int = logging.INFO) -> None:
        """Log a line about the run on rank 0.

        It goes to the logger `drivetrain`, or is printed if logging is not configured.

        Args:
            text: The line.
            level: Its level, such as `logging.INFO`.
        """
        if not self.is_global_zero:
            return
        bar = self.progress_bar_callback
        with bar.hidden() if isinstance(bar, TQDMProgressBar) and is_configured() else nullcontext():
            report(text, level, self._print)

    # values

    @property
    def callback_metrics(self) -> dict[str, Value]:
        """The latest logged values by name, as tensors.

        They are the values of the last step and of the last epoch.
        """
        values = self.logged.callback_values()
        return {
            # float64 keeps Python floats exact.
            name: value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
            for name, value in values.items()
        }

    @property
    def progress_bar_metrics(self) -> dict[str, Value]:
        """The values that the progress bar shows, by name, as numbers or tensors."""
        return self.logged.bar_values()

    @property
    def logged_metrics(self) -> dict[str, float]:
        """The latest values that were sent to trackers, by name."""
        return dict(self.tracker_log.written)

    @property
    def num_val_batches(self) -> list[float]:
        """The number of batches of each validation loader, as a list."""
        return self.current.evaluation_batches.get(Stage.VALIDATE, [])

    @property
    def num_test_batches(self) -> list[float]:
        """The number of batches of each test loader, as a list."""
        return self.current.evaluation_batches.get(Stage.TEST, [])

    @property
    def num_predict_batches(self) -> list[float]:
        """The number of batches of each prediction loader, as a list."""
        return self.current.evaluation_batches.get(Stage.PREDICT, [])

    @property
    def num_training_batches(self) -> float:
        """The number of training batches per epoch on this process, or infinity if unknown."""
        return self.current.training_batches

    @property
    def is_last_batch(self) -> bool:
        """True if the current batch is the last of its training epoch."""
        info = self.current.batch_info
        # A limit of batches may end the epoch before the loader does.
        return info is not None and (info.last or info.index + 1 >= self.current.training_batches)

    # the user's loaders

    @property
    def train_dataloader(self) -> Any:
        """The training loader or loaders of the last `fit`, or None before they are created."""
        return self.current.loaders.get(Stage.TRAIN)

    @property
    def val_dataloaders(self) -> Any:
        """The validation loader or loaders of the last validation, or None before they are created."""
        return self.current.loaders.get(Stage.VALIDATE)

    @property
    def test_dataloaders(self) -> Any:
        """The test loader or loaders of the last `test`, or None before they are created."""
        return self.current.loaders.get(Stage.TEST)

    @property
    def predict_dataloaders(self) -> Any:
        """The prediction loader or loaders of the last `predict`, or None before they are created."""
        return self.current.loaders.get(Stage.PREDICT)

    @property
    def is_finite(self) -> bool:
        """True if all values logged in training, and the weights at each epoch's end, have been finite so far."""
        return self.finiteness.is_finite

    # stages

    @property
    def stage(self) -> Stage | None:
        """The current stage: `"train"`, `"validate"`, `"test"` or `"predict"`. None between runs."""
        return self.current.stage

    @property
    def sanity_checking(self) -> bool:
        """True during the sanity check, the short validation before training."""
        return self.current.sanity_checking

    @property
    def batch(self) -> Any:
        """The current batch, or None if no batch is being processed."""
        return self.current.batch

    @property
    def batch_info(self) -> BatchInfo | None:
        """The index and number of rows of the current batch, or None without a batch."""
        return self.current.batch_info

    @property
    def training(self) -> bool:
        """True while `fit` is training, but not during its validation."""
        return self.stage is Stage.TRAIN

    @property
    def validating(self) -> bool:
        """True during `validate` and the validation in `fit`, but not during the sanity check."""
        return self.stage is Stage.VALIDATE and not self.sanity_checking

    @property
    def testing(self) -> bool:
        """True while `test` runs."""
        return self.stage is Stage.TEST

    @property
    def predicting(self) -> bool:
        """True while `predict` runs."""
        return self.stage is Stage.PREDICT

    @property
    def validates(self) -> bool:
        """True if the current `fit` runs validation: there is validation data and a `validation_step`."""
        return self.loop is not None and self.loop.validates

    @property
    def validation_follows(self) -> bool:
        return self.loop is not None and self.loop.validation_follows

    # end of the run

    @property
    def stop_reason(self) -> StopReason | None:
        """The reason why the last `fit` ended, such as `"max_epochs"` or `"interrupted"`.

        None while it runs.
        """
        return self.control.reason

    @property
    def interrupted(self) -> bool:
        """True if Ctrl-C has ended the last `fit`, or is about to end the one that runs."""
        return self.control.interrupted

    @property
    def preempted(self) -> bool:
        """True if a cluster's signal, such as SIGTERM, has ended the last `fit` or will soon end the current one."""
        return self.control.preempted

    @property
    def rollback_requested(self) -> bool:
        """True if training returns to an earlier checkpoint after the current step."""
        return self.control.rollback_path is not None

    # callbacks

    def _first_callback(self, kind: type[Any]) -> Any:
        return next((callback for callback in self.callbacks if isinstance(callback, kind)), None)

    @property
    def checkpoint_callback(self) -> ModelCheckpoint | None:
        """The first `ModelCheckpoint` callback, or None."""
        found: ModelCheckpoint | None = self._first_callback(ModelCheckpoint)
        return found

    @property
    def checkpoint_callbacks(self) -> list[ModelCheckpoint]:
        """All `ModelCheckpoint` callbacks."""
        return [callback for callback in self.callbacks if isinstance(callback, ModelCheckpoint)]

    @property
    def early_stopping_callback(self) -> EarlyStopping | None:
        """The first `EarlyStopping` callback, or None."""
        found: EarlyStopping | None = self._first_callback(EarlyStopping)
        return found

    @property
    def progress_bar_callback(self) -> Callback | None:
        """The first callback that is a progress bar, or None."""
        return next((callback for callback in self.callbacks if callback.is_progress_bar), None)


R = TypeVar("R")

_WITHOUT_EFFECT = {
    "fused_optimizer": FUSED_HINT,
    "optimizer_in_backward": "Results are the same without it. To save memory, use FSDP or cpu_offload.",
    "advise": "Run drivetrain tune script.py, which shows what makes steps faster.",
}
"""Arguments of the Trainer that have no effect, each with advice on what to do instead."""


class Trainer(MadeAgain, OptionAttributes, TrainerStatus):
    """Trains, validates and tests a `Task` on one or many devices, and predicts with it.

    Args:
        accelerator: `"auto"`, `"cpu"`, `"gpu"` or another device type, or an existing `Accelerator`.
        strategy: `"auto"`, `"single"`, `"ddp"`, another registered name, or a `Strategy`. With `"ddp_spawn"` and
            `"ddp_fork"`, each call of `fit` or a similar method starts its own processes and returns their result.
        devices: The number of processes on this machine, `"auto"`, or device indices (`[0, 1]`, `"0,1"`). If the script
            runs without a launcher and needs several processes, it is restarted under one.
        num_nodes: The expected number of machines. The launcher sets the actual number.
        precision: `"32"`, `"bf16"`, `"fp16"` or another name, or a `Precision`.
        logger: The experiment trackers: a name, a tracker, or a list. True for a `CSVLogger`, False for none. None uses
            the trackers of the given `Accelerator`, or else a `CSVLogger`.
        callbacks: One callback or a list.
        fast_dev_run: The number of batches (1 for True) to run of every stage, without loggers and checkpoints, to test
            the code.
        max_epochs: The maximum number of epochs. Defaults to 1000 if no other limit is set. -1 for no limit.
        min_epochs: The minimum number of epochs. Requests to stop wait until then.
        max_steps: The maximum number of optimizer steps. -1 for no limit.
        min_steps: The minimum number of optimizer steps. Requests to stop wait until then.
        max_time: The maximum duration: `"10 min"`, a timedelta, a dict of its arguments, or `"DD:HH:MM:SS"`.
        max_duration: The maximum duration in any unit: `"500 steps"`, `"2 epochs"`, `"1M samples"`, `"50M tokens"`,
            `"10 min"`. Samples and tokens are counted over all processes.
        limit_train_batches: The number, or the fraction, of training batches per epoch.
        limit_val_batches: The number, or the fraction, of validation batches per loader. A list, or a dict with the
            keys of a dict of loaders, limits each loader on its own. 0 disables validation.
        limit_test_batches: The same for test batches.
        limit_predict_batches: The same for prediction batches.
        overfit_batches: The number, or the fraction, of batches to train and validate on, in a fixed order.
        val_check_interval: When to validate: a number of batches, a fraction of an epoch, or a duration such as `"1000
            steps"`, `"1M samples"`, `"10 min"` or `"10%"` of the run.
        check_val_every_n_epoch: The number of epochs between validations. None counts `val_check_interval` across
            epochs.
        num_sanity_val_steps: The number of validation batches to run before training, as a check of the code. -1 runs
            all.
        log_every_n_steps: The number of steps between step values in trackers, or a duration such as `"1M samples"`,
            `"30 s"` or `"1%"` of the run.
        enable_checkpointing: True to add a `ModelCheckpoint` if there is none.
        enable_progress_bar: True to add a progress bar if there is none.
        enable_model_summary: True to print a summary of the model.
        enable_run_report: True to add a `RunReport` if there is none. None adds it if there is a tracker or checkpoints
            are saved.
        accumulate_grad_batches: The number of micro-batches per optimizer step. None uses that of the given
            `Accelerator`, or else the launcher's, or else 1.
        gradient_clip_val: The maximum gradient norm or value. 0 and None disable clipping.
        gradient_clip_algorithm: `"norm"` or `"value"`.
        deterministic: True to allow only deterministic algorithms. `"warn"` warns about others.
        benchmark: True to let cuDNN choose the fastest algorithms by measuring them.
        inference_mode: True to run `validate`, `test` and `predict` under `torch.inference_mode`, False for
            `torch.no_grad`. Validation within `fit` always uses `torch.no_grad`.
        use_distributed_sampler: True to shard loaders over processes. False if each process has its own data.
        num_workers: Deprecated, without effect. Each loader keeps its number of workers.
        profiler: `"simple"`, `"advanced"`, `"pytorch"`, `"xla"`, or a `Profiler`.
        detect_anomaly: True to raise an error if a backward computes NaN, with the forward operation that caused it.
        barebones: True to run without logger, checkpoints, progress bar, summary and sanity check.
        sync_batchnorm: True to compute batch norm statistics over all processes (DDP on GPUs).
        reload_dataloaders_every_n_epochs: The number of epochs after which loaders are created again. 0 for never.
        auto_micro_batch: True to repeat a step that runs out of memory with smaller micro-batches and the same result.
            For the strategies `single` and `ddp`.
        optimizer_in_backward: Deprecated, without effect.
        fused_optimizer: Deprecated, without effect. Pass `fused=True` to the optimizer instead.
        default_root_dir: The default directory for all output.
        compile: True to compile each module of the task with `torch.compile`, `"blocks"` to compile only repeated
            blocks, or a dict of `torch.compile` options, which may contain `"blocks": True`. False for none. None uses
            the launcher's setting.
        on_interrupt: Action of `fit` after Ctrl-C, once it has finished the step and saved: `"raise"` a
            `KeyboardInterrupt`, or `"return"`.
        seed: The seed for all random generators and for sample-level randomness.
        advise: Deprecated, without effect. Run `drivetrain tune script.py`.

    Raises:
        ConfigurationError: An argument is invalid. The message names valid values.
    """

    accelerator: Accelerator
    """The `Accelerator` that the Trainer uses for devices, precision, collectives and checkpoints."""

    callbacks: list[Callback]
    """The callbacks, in the order in which their hooks are called."""

    progress: Progress
    """The counters of the run: epochs, batches and steps. `progress.count` returns other units."""

    advice: Sequence[Any] = ()
    """Deprecated and always empty. `drivetrain tune` shows how to make steps faster."""

    @known_keywords
    def __init__(
        self,
        *,
        accelerator: DeviceName | str | Accelerator = "auto",
        strategy: StrategyName | str | Strategy = "auto",
        devices: int | str | Sequence[int] = "auto",
        num_nodes: int = 1,
        precision: PrecisionName | str | int | Precision | None = None,
        # `bool` first, so that the command line does not read "true" as a name.
        logger: bool | str | Tracker | Iterable[str | Tracker] | None = None,
        callbacks: Callback | Sequence[Callback] | None = None,
        fast_dev_run: int | bool = False,
        max_epochs: int | None = None,
        min_epochs: int | None = None,
        max_steps: int = -1,
        min_steps: int | None = None,
        max_time: str | timedelta | dict[str, int] | None = None,
        max_duration: str | Duration | None = None,
        limit_train_batches: int | float | None = None,
        limit_val_batches: LimitPerLoader = None,
        limit_test_batches: LimitPerLoader = None,
        limit_predict_batches: LimitPerLoader = None,
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
        # First, while the local variables are only the arguments.
        given = dict(locals())
        if num_workers is not None:
            warn_of_workers("Trainer", num_workers)
        for name, hint in _WITHOUT_EFFECT.items():
            if given[name] is not None:
                warn_ignored("Trainer", name, given[name], hint, since="0.1.0", removed_in="0.3.0", stacklevel=5)
        # Options are checked before processes are started, so that errors appear once and at once.
        self.options = TrainerOptions.from_arguments(given)
        engine = (accelerator, strategy, devices, num_nodes, precision, accumulate_grad_batches, sync_batchnorm)
        compilation = None if compile is None else compile_plugin(compile)
        self.accelerator = setup.make_accelerator(*engine, compilation)
        self.options = setup.complete_options(accumulate_grad_batches, self.accelerator, self.options)
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
        """Object with methods that search for a learning rate or a batch size, for use by `Tuner` and callbacks."""
        return Tuning(self)

    def change_options(self, **changed: Any) -> None:
        super().change_options(**changed)
        self.control.options = self.options

    # fit, validate, test and predict

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
        """Train a task, validate it regularly and save checkpoints.

        Can continue an earlier run with `resume`.

        Args:
            model: The task.
            train_dataloaders: The training loader, a list or dict of loaders to combine, or a `DataModule`.
            val_dataloaders: One or several validation loaders. Each is evaluated separately.
            datamodule: The data module that provides the loaders instead.
            ckpt_path: An alias of `resume`.
            resume: The checkpoint to resume from. The run continues with the batches, random numbers and values that it
                would have had without the interruption. `"auto"` uses the newest complete checkpoint, or starts from
                the beginning if there is none. `"last"` and `"best"` use those of the checkpoint callback. A `.ckpt`
                file of another tool is accepted too, but contains no random state.
            weights_only: Accepted without effect. Nothing in a checkpoint is unpickled into objects.

        Raises:
            SystemExit: The run was preempted (SIGTERM, SIGUSR1) and has saved a checkpoint. Start it again to continue.
            KeyboardInterrupt: The run was interrupted (Ctrl-C) and has saved a checkpoint. Not with
                `on_interrupt="return"`.
            CheckpointError: The checkpoint is missing, damaged or belongs to another run.
            ConfigurationError: The task or its optimizers cannot be trained with these options.
            LaunchError: A process that was started for this call failed, for example with `strategy="ddp_spawn"`.
            DataError: A loader is missing or empty.
        """
        model = uncompiled(model)
        if isinstance(train_dataloaders, DataModule):
            train_dataloaders, datamodule = None, train_dataloaders
        # Before processes start and data are loaded: the common mistakes are reported at once.
        task_checks.check_task(model, train_dataloaders, val_dataloaders, datamodule)
        if resume is not None and ckpt_path is not None:
            raise ConfigurationError(f"resume={resume!r} and ckpt_path={ckpt_path!r} have the same meaning. Use one.")
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
                            # A checkpoint that is written in the background must be complete before `fit` returns.
                            self.saves.finish()
                if not self.preempted:
                    self.hooks.call("on_fit_end")
        except BaseException as error:
            self.control.record_exception(error)
            # Due values are written before the `on_exception` hooks, and all others after them.
            self.tracker_log.write_last_step()
            self.task_run.report_exception(model, error)
            self.tracker_log.write_last_step(though_not_due=True)
            # After Ctrl-C, `fit` ends in order, and raises KeyboardInterrupt only after the teardown.
            if not self.interrupted:
                raise
        finally:
            self.task_run.tear_down(model, Stage.TRAIN)
            if not self.barebones:
                announce_end(self)
        # The exit code tells the launcher or the scheduler to start the job again.
        if self.preempted:
            sys.exit(RESUME_EXIT_CODE)
        if self.interrupted and self.on_interrupt == "raise":
            raise KeyboardInterrupt

    def _begin_fit(self, task: Task, resume: Any) -> FitLoop:
        self.task_run.set_up(task, Stage.TRAIN)
        task_checks.check_hooks(self, task, self.datamodule)
        if self.checkpoint_callbacks:
            keeps_objects = self.checkpoint_format.keeps_objects
            for owner in filter(None, (task, self.datamodule)):
                # Raises an error now rather than at the first save.
                storable(without_modules(owner.hparams), keeps_objects)
        # A callback such as NaNGuard checks the values itself.
        guarded = any(callback.guards_values for callback in self.callbacks)
        self.finiteness = Finiteness(is_watched=not (guarded or self.barebones))
        with self.accelerator.precision.init_context(), self.strategy.init_context():
            task.configure_model()
        task_checks.check_training_step(task, self.accumulate_grad_batches, self.gradient_clip_val)
        directory = self.task_run.checkpoint_path = find_checkpoint(self, asked_to_resume(resume))
        saved = None if directory is None else SavedRun(self, directory)
        if saved is not None:
            # Before optimizers exist: `on_load_checkpoint` may still change the model.
            saved.restore_early()
        model = self.task_run.place(task, self.task_run.configure_optimizers(task))
        if saved is not None:
            # After placement, so that each process reads only its own shards.
            saved.restore_weights()
        self.progress.begin_epoch(self.progress.epoch)
        # After the weights are restored: callbacks such as `WeightAveraging` copy them here.
        self.hooks.call("on_fit_start")
        if saved is not None:
            saved.restore_training()
        self.tracker_log.begin_run(task)
        announce_start(self, task)
        training_model = self.strategy.view(model, "train" if task.automatic_optimization else "manual")
        step = choose_step(self, task, training_model)
        sources = self.task_run.sources
        validation = make_validation(self, task, model, sources[Stage.VALIDATE])
        # A resumed run has already passed the sanity check.
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
            # Only stored here: the loop restores the position in the data when its first epoch begins.
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
        """Evaluate a task on the validation data, and return the logged values of each data loader.

        Every sample counts exactly once, on any number of processes.

        Args:
            model: The task. None uses the task of the last `fit`.
            dataloaders: One or several loaders, or a `DataModule`.
            ckpt_path: The checkpoint whose weights to use. `"best"` and `"last"` use those of the checkpoint callback.
                If `ckpt_path` and `model` are None, the best checkpoint of the last `fit` is used if there is one.
            verbose: True to print the results.
            datamodule: The data module that provides the loaders instead.
            weights_only: Accepted without effect.

        Returns:
            For each loader, a dict of its logged values.
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
        """Evaluate a task on the test data, and return the logged values of each loader.

        Arguments and result are the same as for `validate`.
        """
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
        """Run `predict_step` once for every sample of the prediction data, and return the results.

        Args:
            model: The task. None uses the task of the last `fit`.
            dataloaders: One or several loaders, or a `DataModule`.
            datamodule: The data module that provides the loaders instead.
            return_predictions: False to discard predictions after callbacks have processed them.
            ckpt_path: The checkpoint whose weights to use.
            weights_only: Accepted without effect.
            gather: True to return the predictions of all processes, False to return those of this process's batches.

        Returns:
            The results of `predict_step` for each batch, in the order of the data, on the CPU.
        """
        if self.spawning is not None:
            given = (dataloaders, datamodule, return_predictions, ckpt_path, weights_only, gather)
            return self._spawned(Stage.PREDICT, model, *given)  # type: ignore[no-any-return]

        def predict(task: Task, placed: nn.Module, source: LoaderSource) -> list[Any]:
            return PredictionLoop(self, task, placed, source, return_predictions, gather=gather).run()

        return evaluate(self, Stage.PREDICT, model, dataloaders, datamodule, ckpt_path, predict)

    def _spawned(self, stage: Stage, model: Task | None, *given: Any) -> Any:
        from drivetrain.trainer.spawning import run_spawned  # here, because few Trainers start processes

        # Without `self` and `model`.
        names = tuple(inspect.signature(getattr(Trainer, stage.verb)).parameters)[2:]
        return run_spawned(self, stage, model, dict(zip(names, given, strict=False)))

    def adapt_loader(self, loader: Any, stage: Stage) -> Any:
        # A subclass may check or replace the user's loaders, which are passed one by one.
        return loader

    def combine_loaders(self, given: Any, stage: Stage) -> Any:
        """Combine a dict or list of loaders into one `CombinedLoader`.

        A single loader is returned unchanged. A dict, or a list of `DataLoader` objects, stands for several loaders.
        Any other list is a single loader that holds batches.

        Args:
            given: The loader or loaders.
            stage: The stage that uses them. Training loaders are iterated in parallel, others one after another.
        """
        # In training, shorter loaders start again until the longest one ends.
        mode = "max_size_cycle" if stage is Stage.TRAIN else "sequential"
        return CombinedLoader(given, mode) if are_several(given) else given

    def shard_of(self, loader: Any) -> DataShard | None:
        # None lets the strategy divide the data.
        shares = self.use_distributed_sampler and not (self.world_size > 1 and is_split_already(loader))
        return None if shares else DataShard()

    def read_scheduler(self, given: Any, monitor: str | None = None, by_hand: bool = False) -> SchedulerConfig:
        # A subclass may accept or check more formats.
        return read_scheduler(given, monitor, by_hand)

    def steps_without_loss(self, window: Sequence[PendingBatch]) -> int:
        # Called if `training_step` returned None for all micro-batches. A subclass may count such a step.
        return 0

    def make_fit_loop(self, *parts: Any) -> FitLoop:
        """Create the training loop that `fit` runs. Override it to use a subclass of `FitLoop`.

        Args:
            parts: The arguments of `FitLoop` after the Trainer.
        """
        return FitLoop(self, *parts)

    def adopt_callbacks(self, added: Any) -> None:
        # They replace callbacks of the same class or of a base class.
        self.callbacks = setup.with_task_callbacks(self.callbacks, added)

    def log_metrics(self, values: Mapping[str, float], step: int | None = None) -> None:
        """Send values to the experiment trackers and to callbacks that monitor them.

        Call it on all processes.

        Args:
            values: Numbers by name.
            step: The optimizer step. None uses the current one.
        """
        self.logged.remember(values)
        self.tracker_log.write(values, self.global_step if step is None else step)

    def init_module(self, empty_init: bool | None = None) -> AbstractContextManager[None]:
        """Return a context manager that creates modules on the run's device, in its dtype.

        Under a sharding strategy, parameters get their values later, during placement.

        Args:
            empty_init: True to skip the initialization of parameters, for example because a checkpoint is loaded
                afterwards.
        """
        return init_module(self, empty_init)

    def plot(self, *names: str) -> Any:
        """Draw the curves of the last run's logged values, for example at the end of a notebook's cell.

        Metrics that differ in their stage only, such as `train_loss` and `val_loss`, share axes.

        Args:
            *names: Names of the metrics to draw. Without names, all are drawn.

        Returns:
            A matplotlib figure.

        Raises:
            ConfigurationError: matplotlib is not installed, no tracker wrote values to files, or a name is unknown.
        """
        if find_spec("matplotlib") is None:
            raise ConfigurationError(
                'Trainer.plot requires matplotlib. Install it with pip install "drivetrain[plot]".'
            )
        from drivetrain.callbacks.report.charts import figure_of
        from drivetrain.callbacks.report.record import RunValues, read_values

        for tracker in self.loggers:
            tracker.save()
        values = read_values(self.local_dir)
        unknown = [name for name in names if name not in values.curves]
        if unknown or not values.curves:
            logged = ", ".join(values.curves) or "nothing"
            raise ConfigurationError(
                f"Trainer.plot({', '.join(map(repr, unknown))}): no value of this name was logged. Logged: {logged}."
            )
        if names:
            values = RunValues({name: values.curves[name] for name in names}, values.epochs)
        return figure_of(values)

    # checkpoints

    def load_weights(self, filepath: str | os.PathLike[str]) -> None:
        """Load the weights of a checkpoint into the current task, within a run.

        All processes must call it. Optimizers, counters and random state stay as they are.

        Args:
            filepath: The checkpoint's directory, file or URL.

        Raises:
            CheckpointError: There is no complete checkpoint, or it belongs to another model.
        """
        SavedRun(self, os.fspath(filepath)).restore_for_evaluation()

    @known_keywords
    def save_checkpoint(
        self,
        filepath: str | os.PathLike[str],
        weights_only: bool = False,
        block: bool = True,
        format: str | None = None,
    ) -> checkpoint.PendingSave:
        """Save the state of the run, or only its weights, as a checkpoint.

        All processes must call it.

        Args:
            filepath: The checkpoint's directory or URL. It appears only after it is complete.
            weights_only: True to save only weights and hyper-parameters.
            block: True to return after the checkpoint is on disk. False to write a copy while training continues. An
                error is then raised at a later step, and `fit` waits for the save at its end.
            format: `"drivetrain"` for a directory, `"lightning"` for a `.ckpt` file, also if the weights are sharded.
                None uses `checkpoint_format`.

        Returns:
            A handle of the save. It is done if `block` is True.

        Raises:
            CheckpointError: A process could not write. An existing checkpoint stays intact.
        """
        step = self.accelerator.optimizer_step
        # Some parameters are one step ahead of the others, and no resume could repair that.
        if step.is_torn:
            raise CheckpointError(
                "A checkpoint cannot be saved while a step is changing parameters: between the steps of two "
                "optimizers, in the closure of an optimizer such as L-BFGS, or in a backward that updates parameters. "
                "Save it in on_train_batch_end, or resume from the last checkpoint."
            )
        if self.loop is not None and self.current.stage in (Stage.TRAIN, Stage.VALIDATE):
            # A run that resumes from the checkpoint does not log the current step again.
            self.tracker_log.write_due_values()
        # A subclass may have its own format without registering it.
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
        """The number of optimizer steps that `fit` will take, for learning-rate schedules.

        Infinity if unknown.

        Raises:
            ConfigurationError: No `fit` is running.
        """
        training = self.task_run.sources.get(Stage.TRAIN)
        if training is None:
            raise ConfigurationError("estimated_stepping_batches is available only during fit().")
        loader = training.prepare_training()
        # Callers read this before the first epoch, for example to create a schedule.
        self.current.training_batches = epoch_length(self, loader)
        return estimate_steps(self, loader)

    def resolve_duration(self, duration: Duration, name: str = "duration") -> Duration:
        """Convert a fraction of the run, such as `"10%"`, to steps, samples or seconds.

        Other durations are returned unchanged.

        Args:
            duration: The duration.
            name: The name of the option, for error messages.

        Raises:
            ConfigurationError: The length of the run is unknown.
        """
        return duration_in_run(self, duration, name)

    # ending and rolling back

    @property
    def should_stop(self) -> bool:
        """True if `fit` ends after the current step. Set it to True to request that, as with `request_stop`."""
        return self.control.stop_requested

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        if not value:
            self.control.withdraw_stop()
        elif not self.control.stop_requested:
            self.control.request_stop(f"trainer.should_stop was set in {calling_function()}")

    def request_stop(self, reason: str, asker: str = "") -> None:
        """End training on all processes after the current step. A later `withdraw_stop(asker)` cancels this request.

        `min_epochs` and `min_steps` delay the stop.

        Args:
            reason: The source of the request and its reason, for the message at the end of the run.
            asker: A name by which `withdraw_stop` can cancel the request.
        """
        self.control.request_stop(reason, asker)

    def withdraw_stop(self, asker: str) -> None:
        """Cancel the request to stop training that `asker` has made with `request_stop`.

        `min_epochs` and `min_steps` delay a stop. Used when the reason of the request no longer holds. Call it on all
        processes. Requests of others remain. `trainer.should_stop = False` cancels all requests.

        Args:
            asker: The name that was passed to `request_stop`.
        """
        self.control.withdraw_request(asker)

    def request_rollback(self, path: str, skip_batches: Collection[tuple[int, int]] = ()) -> None:
        """Go back to the checkpoint at `path` after the current step, for example because the loss exploded.

        All processes must call this.

        Args:
            path: The checkpoint.
            skip_batches: This process's batches to skip from then on, as (epoch, batch index).
        """
        self.control.request_rollback(path, skip_batches)

    def skip_batches(self, batches: Collection[tuple[int, int]]) -> None:
        """Skip the given training batches of this process, such as those with bad data.

        Args:
            batches: The batches, as (epoch, batch index).
        """
        self.control.skip_batches(batches)
