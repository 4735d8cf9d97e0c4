"""The read-only face of the Trainer: where it is, what it has logged, what it is made of."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from drivetrain import checkpoint
from drivetrain.accelerator import Accelerator
from drivetrain.callbacks import Callback, EarlyStopping, ModelCheckpoint
from drivetrain.callbacks.stage import Stage
from drivetrain.data import BatchInfo
from drivetrain.runtime.keywords import made_again
from drivetrain.runtime.terminal import print_all
from drivetrain.runtime.timing import Timing
from drivetrain.strategies import Strategy
from drivetrain.strategies.capabilities import StartsProcesses
from drivetrain.trackers import Tracker, TrackerGroup
from drivetrain.trainer.metrics.logged_value import Value
from drivetrain.trainer.metrics.logged_values import LoggedValues
from drivetrain.trainer.state.progress import Progress

if TYPE_CHECKING:
    from drivetrain.accelerator import PreparedOptimizer
    from drivetrain.trainer.data_module import DataModule
    from drivetrain.trainer.hooks import Hooks
    from drivetrain.trainer.loops.current_run import CurrentRun
    from drivetrain.trainer.loops.fit_loop import FitLoop
    from drivetrain.trainer.loops.health import Finiteness
    from drivetrain.trainer.loops.run_control import RunControl, StopReason
    from drivetrain.trainer.metrics.tracker_log import TrackerLog
    from drivetrain.trainer.optimizers import SchedulerConfig
    from drivetrain.trainer.profilers import Profiler
    from drivetrain.trainer.profilers.actions import Actions
    from drivetrain.trainer.task import Task
    from drivetrain.trainer.task_run import TaskRun


class TrainerStatus:
    """What can be read from a `Trainer`, in Lightning's words: properties over its parts, which hold all state."""

    accelerator: Accelerator
    callbacks: list[Callback]
    tracker_group: TrackerGroup
    logged: LoggedValues
    progress: Progress
    """How far the run is: epochs, batches and steps; `progress.count` has other units."""

    task_run: TaskRun
    control: RunControl
    current: CurrentRun
    tracker_log: TrackerLog
    finiteness: Finiteness
    loop: FitLoop | None
    default_root_dir: str
    made_with: tuple[tuple[Any, ...], dict[str, Any]]
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
        return self.task_run.model if self.task_run.is_placed else self.task_run.task

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

    def __reduce__(self) -> tuple[Any, ...]:
        """A Trainer's pickle holds what it was made with: the copy is a new one, that has trained nothing."""
        return made_again, (type(self), *self.made_with)

    # processes

    @property
    def spawning(self) -> StartsProcesses | None:
        """What starts processes for each verb, where the strategy does that and this is not one of them."""
        return self.accelerator.strategy.capability(StartsProcesses)

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

    def format_of_checkpoint(self, filepath: str | os.PathLike[str], block: bool = True) -> str:
        """The format in which `save_checkpoint` writes where none is given: `"drivetrain"`.

        Args:
            filepath: Where to.
            block: Whether it is written at once.
        """
        return "drivetrain"

    @property
    def checkpoint_files(self) -> checkpoint.CheckpointFiles:
        """How checkpoints in Lightning's format are written, read and removed."""
        return checkpoint.CheckpointFiles()

    @property
    def refuses_unknown_keys(self) -> bool:
        """Whether a key that a scheduler's dict cannot have is an error; else a warning."""
        return True

    @property
    def validates_when_stopped(self) -> bool:
        """Whether a run that is asked to stop within an epoch validates before it ends."""
        return False

    @property
    def leaves_out_missing_batches(self) -> bool:
        """Whether a training batch that is None is left out; else the step gets it."""
        return False

    @property
    def counts_steps_without_loss(self) -> bool:
        """Whether a step counts, and schedulers step, whose batches have all been left out by `training_step`."""
        return False

    @property
    def repeats_epoch_start(self) -> bool:
        """Whether `on_train_epoch_start` is called once more for an epoch that a checkpoint was written within."""
        return True

    @property
    def gathers_predictions(self) -> bool:
        """Whether `predict` returns the predictions of all processes; else each gets those of its own batches."""
        return True

    @property
    def pickles(self) -> bool:
        """Whether objects that hooks add to a checkpoint are pickled into a file of Lightning's; else refused."""
        return False

    @property
    def unpickles(self) -> bool:
        """Whether objects in a file of Lightning's are unpickled; else it is refused."""
        return False

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
