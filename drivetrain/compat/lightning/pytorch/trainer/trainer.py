"""`Trainer` with the additional arguments and members of Lightning's."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from drivetrain.callbacks import EarlyStopping
from drivetrain.callbacks.base import Stage
from drivetrain.compat.lightning.fabric.utilities.rank_zero import rank_zero_warn
from drivetrain.compat.lightning.fabric.utilities.warnings import PossibleUserWarning, warn_by_warnings
from drivetrain.compat.lightning.plugins import Precision, plugin_of, shown_as, usable_on
from drivetrain.compat.lightning.pytorch.loggers.duck import as_loggers, given_as
from drivetrain.compat.lightning.pytorch.loggers.files import CSVLogger, TensorBoardLogger
from drivetrain.compat.lightning.pytorch.loggers.logger import DummyLogger
from drivetrain.compat.lightning.pytorch.profilers.pytorch import PyTorchProfiler
from drivetrain.compat.lightning.pytorch.trainer.arguments import (
    Shown,
    as_there,
    check_barebones,
    check_hardware,
    check_precision,
    explain_ones,
    from_environment,
    give_checkpoint_io,
    kind_of,
    log_nothing,
    refuse_removed,
    spell,
    taken_from,
    with_external,
)
from drivetrain.compat.lightning.pytorch.trainer.conventions import (
    LightningTaskRun,
    draw_seed_of,
    interleaved,
    warn_of_loader,
    with_batch_for_each,
)
from drivetrain.compat.lightning.pytorch.trainer.saving import LightningSaving
from drivetrain.compat.lightning.pytorch.trainer.states import TrainerState, state_of
from drivetrain.compat.lightning.pytorch.trainer.verbs import lightning_verb
from drivetrain.compat.lightning.pytorch.trainer.views import (
    CallbackMetrics,
    ConnectorView,
    EvaluationLoopView,
    FitLoopView,
    LightningLoggedValues,
    LightningTrackerLog,
    as_tensor,
    is_logging_due,
)
from drivetrain.compat.lightning.strategy_members import record_driver, with_members
from drivetrain.data import CombinedLoader, DataShard
from drivetrain.runtime import observer
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.strategies import started_by_verbs
from drivetrain.trackers import TrackerGroup
from drivetrain.trackers.directory import DirectoryTracker
from drivetrain.trainer import Trainer as CoreTrainer
from drivetrain.trainer.loops.batches import limits_of
from drivetrain.trainer.loops.progress import Phase
from drivetrain.trainer.metrics.transfer import to_numbers

__all__ = ["Trainer"]

# Lightning's names of profiled actions
_WORDS = {
    "Task": "LightningModule",
    "DataModule": "LightningDataModule",
    "Single": "SingleDeviceStrategy",
    "DDP": "DDPStrategy",
    "FSDP": "FSDPStrategy",
    "DeepSpeed": "DeepSpeedStrategy",
}


class Trainer(LightningSaving):
    """`drivetrain.Trainer` with the arguments and members that Lightning's scripts use."""

    limit_train_batches = Shown(1.0)
    limit_val_batches = Shown(1.0)
    limit_test_batches = Shown(1.0)
    limit_predict_batches = Shown(1.0)
    val_check_interval = Shown(1.0)
    num_sanity_val_steps = Shown(float("inf"), -1)
    _was_cut_short = False
    _chosen_path: Any = None

    @from_environment
    def __init__(
        self,
        *,
        accelerator: Any = "auto",
        precision: Any = None,
        logger: Any = None,
        default_root_dir: str | os.PathLike[str] | None = None,
        profiler: Any = None,
        plugins: Any = None,
        enable_autolog_hparams: bool = True,
        model_registry: str | None = None,
        suggest_integrations: bool = True,
        **options: Any,
    ) -> None:
        refuse_removed(options)
        given = {**options, "logger": logger, "profiler": profiler}
        if options.get("barebones"):
            check_barebones(given)
        else:
            explain_ones(given)
        _refuse_registry(model_registry)
        spell(options)
        accelerator = kind_of(accelerator)
        precision = taken_from(plugins, usable_on(accelerator, precision), options)
        if logger is None or logger is True:
            logger = _default_logger(default_root_dir) if not options.get("barebones") else None
        check_hardware(accelerator, options.get("devices"))
        check_precision(precision)
        self._spawns = _starts_interpreters(options.get("strategy"))
        loggers = as_loggers(logger)
        _leave_no_report(options, loggers)
        callbacks = options["callbacks"] = with_external(options.get("callbacks"))
        super().__init__(
            accelerator=accelerator,
            precision=precision,
            logger=loggers,
            default_root_dir=default_root_dir,
            profiler=_profiler_of(profiler),
            **options,
        )
        give_checkpoint_io(plugins, self.strategy)
        record_driver(self.strategy, self)
        self.callbacks = as_there(self.callbacks, callbacks)
        # Augmentations and iterable datasets use the random generators of the process or of loader workers.
        self.accelerator.dataloader_config.seed_samples = False
        self._running: Stage | None = None
        self._was_cut_short = False
        topology = self.accelerator.strategy.topology
        self.logged = LightningLoggedValues(self.current.find_batch_size, topology, lambda: bool(self.loggers))
        if options.get("barebones"):
            vars(self.logged)["log"] = log_nothing
        self.tracker_log = LightningTrackerLog(self, enable_autolog_hparams)
        self.task_run = LightningTaskRun(self)
        self.actions.use_words(_WORDS)
        if self.fast_dev_run and given["logger"] is not False:
            self.logger = DummyLogger()
        self.predictions: list[Any] = []
        self.keeps_predictions = False
        self._leaves_epochs_open = options.get("max_epochs") is None and not self.fast_dev_run
        self._fit_loop = FitLoopView(self)

    # fit, validate, test, predict

    fit = lightning_verb(CoreTrainer.fit)
    validate = lightning_verb(CoreTrainer.validate)
    test = lightning_verb(CoreTrainer.test)
    predict = lightning_verb(CoreTrainer.predict)

    def adapt_loader(self, loader: Any, stage: Stage) -> Any:
        """Warn of a slow loader, and divide its samples as Lightning does unless `use_distributed_sampler` is False."""
        warn_of_loader(loader, stage, self.num_devices, self._spawns)
        if not self.use_distributed_sampler:
            return loader
        shard = self.strategy.topology.data_shard
        if stage is not Stage.TRAIN:
            return with_batch_for_each(loader, shard)
        if self.current_epoch > 0:
            draw_seed_of(loader)
        return interleaved(loader, shard, shuffle=not self.overfit_batches)

    def shard_of(self, loader: Any) -> DataShard | None:
        """Return this rank's share of the data. Streams and iterables that are no `DataLoader` are not sharded."""
        is_stream = isinstance(getattr(loader, "dataset", None), IterableDataset)
        return DataShard() if is_stream or not isinstance(loader, DataLoader) else super().shard_of(loader)

    def choose_checkpoint(self, given: Any) -> Any:
        """Return the given checkpoint, or the one assigned to `ckpt_path`."""
        chosen = self._chosen_path
        if chosen is None or given is None:
            return chosen if given is None else given
        rank_zero_warn(
            f"`trainer.ckpt_path = {os.fspath(chosen)!r}` was set, but then you passed `ckpt_path={given!r}`, which is "
            "taken from now on. Set one of the two."
        )
        self._chosen_path = None
        return given

    def settle_epochs(self) -> None:
        """Set the default number of epochs at the start of `fit` if the user gave no limit."""
        if not self._leaves_epochs_open:
            return
        self._leaves_epochs_open = False
        if self.max_steps == -1 and self.max_time is None and self.max_epochs is not None and self.max_epochs > 0:
            rank_zero_warn(
                f"`max_epochs` was not set. Setting it to {self.max_epochs} epochs. Set `max_epochs=-1` to train "
                "without a limit.",
                category=PossibleUserWarning,
            )

    @contextmanager
    def running(self, stage: Stage, weights_only: bool | None = None) -> Iterator[None]:
        """Mark a method such as `fit` as running in the `with` body, also before its first batch."""
        self._running, self._weights_only = stage, weights_only
        if stage is Stage.TRAIN:
            self._was_cut_short = False
        try:
            with warn_by_warnings(), self.closing_checkpoints():
                yield
        except BaseException as error:
            self.strategy.on_exception(error)
            raise
        finally:
            self._running = self._weights_only = None
        if stage is Stage.TRAIN:
            self._was_cut_short = self.progress.batches_in_epoch > 0

    def keep_predictions(self, predictions: list[Any], keeps: bool) -> list[Any] | None:
        """Store the results of `predict`. Return them, or None if `keeps` is False."""
        self.predictions, self.keeps_predictions = predictions, keeps
        return predictions if keeps else None

    # values

    @property
    def logger(self) -> Any:
        """The first logger. Assigning replaces all loggers."""
        return given_as(super().logger)

    @logger.setter
    def logger(self, logger: Any) -> None:
        self.loggers = [] if logger is None else [logger]

    @property
    def loggers(self) -> list[Any]:
        """All loggers. They can be assigned between two runs."""
        return [given_as(each) for each in super().loggers]

    @loggers.setter
    def loggers(self, loggers: Sequence[Any] | None) -> None:
        self.tracker_group = TrackerGroup(observer.observed(as_loggers(list(loggers or []))), self.is_global_zero)

    @property
    def callback_metrics(self) -> dict[str, Any]:
        """Metrics for callbacks: the latest value of each training step and the last of each epoch."""
        return CallbackMetrics(self, self.logged.callback_values(with_evaluation_steps=False, newest=True))

    @property
    def logged_metrics(self) -> dict[str, Any]:
        """Latest value of each logged metric, including steps between two writes to the loggers."""
        values = {**self.tracker_log.written, **self.logged.step_values(for_logger=True)}
        return {name: as_tensor(value) for name, value in values.items()}

    @property
    def progress_bar_metrics(self) -> dict[str, Any]:
        """Metrics that the progress bar shows."""
        shown = self.logged.bar_values(with_evaluation_steps=True)
        return {name: float(value) for name, value in to_numbers(shown).items()}

    # how long

    @property
    def current_epoch(self) -> int:
        """Number of finished epochs. A `fit` that stopped mid-epoch counts that epoch."""
        is_over = self.progress.phase is Phase.CLOSING and self.loop is not None and self.loop.is_resuming
        return self.progress.epoch + (self._was_cut_short or is_over)

    @property  # type: ignore[override]
    def max_epochs(self) -> int | None:
        """Maximum number of epochs, -1 for no limit, or None before the first `fit` if none was given."""
        return None if self._leaves_epochs_open else self.options.max_epochs

    @max_epochs.setter
    def max_epochs(self, value: int | None) -> None:
        self.limit_epochs(value)

    def limit_epochs(self, value: int | None) -> None:
        """Set the maximum number of epochs."""
        self._leaves_epochs_open = value is None
        self.change_options(max_epochs=1000 if value is None else value)

    @property
    def fit_loop(self) -> FitLoopView:
        """The training loop with its counters."""
        return self._fit_loop

    @property
    def validate_loop(self) -> EvaluationLoopView:
        """The loop of `validate`."""
        return EvaluationLoopView(self, Stage.VALIDATE)

    @property
    def test_loop(self) -> EvaluationLoopView:
        """The loop of `test`."""
        return EvaluationLoopView(self, Stage.TEST)

    @property
    def predict_loop(self) -> EvaluationLoopView:
        """The loop of `predict`."""
        return EvaluationLoopView(self, Stage.PREDICT)

    @property
    def num_training_batches(self) -> float:
        """Number of batches in a training epoch, infinite before the loader is created."""
        return float("inf") if self.train_dataloader is None else super().num_training_batches

    @property
    def num_val_batches(self) -> list[float]:
        """Number of batches of each validation loader."""
        return self._batches_of_each(Stage.VALIDATE, super().num_val_batches)

    @property
    def num_test_batches(self) -> list[float]:
        """Number of batches of each test loader."""
        return self._batches_of_each(Stage.TEST, super().num_test_batches)

    def _batches_of_each(self, stage: Stage, batches: list[float]) -> list[float]:
        given = self.current.loaders.get(stage)
        if not isinstance(given, CombinedLoader) or given.mode == "sequential" or not batches:
            return batches
        return limits_of(given.loaders, getattr(self.options, stage.limit_name), stage.limit_name)

    # what runs

    @property
    def state(self) -> TrainerState:
        """State of the Trainer: method, stage and status."""
        return state_of(self, self._running)

    @property
    def _logger_connector(self) -> ConnectorView:
        return ConnectorView(
            "_logger_connector",
            should_update_logs=lambda: is_logging_due(self),
            callback_metrics=lambda: self.callback_metrics,
            logged_metrics=lambda: self.logged_metrics,
            progress_bar_metrics=lambda: self.progress_bar_metrics,
        )

    @property
    def _accelerator_connector(self) -> ConnectorView:
        return ConnectorView(
            "_accelerator_connector",
            is_distributed=lambda: self.world_size > 1,
            _parallel_devices=self._devices_of_machine,
            use_distributed_sampler=lambda: self.use_distributed_sampler,
            cluster_environment=lambda: self.strategy.cluster_environment,
            strategy=lambda: self.strategy,
            accelerator=lambda: self.accelerator,
            precision_plugin=lambda: self.precision_plugin,
        )

    @property
    def evaluating(self) -> bool:
        """True during `validate` and `test`, but not during a validation inside `fit`."""
        return self.task_run.stage in (Stage.VALIDATE, Stage.TEST) and self.stage is not None

    @property
    def val_check_batch(self) -> float | None:
        """Number of batches between two validations, or None if the interval is in another unit."""
        interval, batches = self.val_check_interval, self.num_training_batches
        if isinstance(interval, float) and self.check_val_every_n_epoch is not None:
            return max(1, int(batches * interval)) if batches != float("inf") else batches
        return interval if isinstance(interval, int) else None

    @property
    def enable_validation(self) -> bool:
        """True if `fit` validates."""
        return self.limit_val_batches != 0 and bool(self.num_val_batches)

    @property
    def received_sigterm(self) -> bool:
        """True if a scheduler's signal has stopped the run."""
        return self.preempted

    # what is trained

    @property
    def datamodule(self) -> Any:
        """Data module of the current or last run. It can be assigned between two runs."""
        return super().datamodule

    @datamodule.setter
    def datamodule(self, datamodule: Any) -> None:
        self.task_run.datamodule = datamodule

    @property
    def lightning_module(self) -> Any:
        """Module of the current or last run."""
        return self.task

    @property
    def early_stopping_callbacks(self) -> list[EarlyStopping]:
        """All `EarlyStopping` callbacks."""
        return [callback for callback in self.callbacks if isinstance(callback, EarlyStopping)]

    @property
    def ckpt_path(self) -> Any:
        """Checkpoint of the last run. An assigned path is used by every run until it is set to None."""
        return self.task_run.checkpoint_path if self._chosen_path is None else self._chosen_path

    @ckpt_path.setter
    def ckpt_path(self, path: str | os.PathLike[str] | None) -> None:
        self._chosen_path = path
        self.task_run.checkpoint_path = None if path is None else os.fspath(path)

    @property
    def optimizers(self) -> list[Any]:
        """The run's optimizers. They can be assigned during `fit`."""
        return super().optimizers

    @optimizers.setter
    def optimizers(self, optimizers: Sequence[Any]) -> None:
        self.replace_optimizers(optimizers)

    # on what

    @property
    def strategy(self) -> Any:
        """The strategy, with Lightning's members in addition to its own."""
        return with_members(super().strategy, super().precision)

    @property
    def device_ids(self) -> list[int]:
        """Indices of this machine's devices in use."""
        index = self.strategy.root_device.index
        return [index] if self.num_devices == 1 and index is not None else list(range(self.num_devices))

    def _devices_of_machine(self) -> list[torch.device]:
        root = self.strategy.root_device
        return [root if root.type == "cpu" else torch.device(root.type, number) for number in self.device_ids]

    @property
    def node_rank(self) -> int:
        """Index of this machine."""
        return self.global_rank // self.num_devices

    @property
    def precision(self) -> str:
        """Name of the precision in Lightning's spelling."""
        return shown_as(super().precision)

    @property
    def precision_plugin(self) -> Precision:
        """Precision plugin of the run."""
        return plugin_of(self.precision, self.strategy.topology.device.type, self.scaler)

    @property
    def scaler(self) -> Any:
        """Gradient scaler for fp16, or None."""
        return self.accelerator.scaler

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int] | None:
        """Arguments of `DistributedSampler` for this rank, or None with one process."""
        shard = self.strategy.topology.data_shard
        return None if self.world_size == 1 else {"num_replicas": shard.count, "rank": shard.index}

    @property
    def num_sanity_val_batches(self) -> list[float]:
        """Number of sanity-check batches of each validation loader. Empty outside `fit`."""
        if self.task_run.stage is not Stage.TRAIN:
            return []
        return [min(batches, self.num_sanity_val_steps) for batches in self.num_val_batches]


def _starts_interpreters(strategy: Any) -> bool:
    spawned = started_by_verbs(strategy)
    return spawned is not None and spawned.start_method == "spawn"


def _leave_no_report(options: dict[str, Any], loggers: Any) -> None:
    """Disable the run report if no logger writes files, as scripts expect only Lightning's files."""
    given = loggers if isinstance(loggers, list | tuple) else [loggers]
    if options.get("enable_run_report") is None and not any(isinstance(each, DirectoryTracker | str) for each in given):
        options["enable_run_report"] = False


def _refuse_registry(model_registry: str | None) -> None:
    if model_registry is not None:
        raise ConfigurationError(f"Trainer(model_registry={model_registry!r}): there is no registry. Leave it out.")


def _profiler_of(given: Any) -> Any:
    """Return the profiler that Lightning has under a name. Other values are returned unchanged."""
    return PyTorchProfiler() if isinstance(given, str) and given.lower() == "pytorch" else given


def _default_logger(folder: str | os.PathLike[str] | None) -> Any:
    kind = TensorBoardLogger if TensorBoardLogger.is_available() else CSVLogger
    return kind(os.getcwd() if folder is None else folder)
