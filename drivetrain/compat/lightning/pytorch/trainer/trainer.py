"""`Trainer` with the arguments and members that only scripts written for Lightning use."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from drivetrain.callbacks import EarlyStopping
from drivetrain.callbacks.stage import Stage
from drivetrain.compat.lightning.accelerators import Accelerator
from drivetrain.compat.lightning.plugins import Precision, TorchSyncBatchNorm
from drivetrain.compat.lightning.pytorch.loggers.files import CSVLogger, TensorBoardLogger
from drivetrain.compat.lightning.pytorch.profilers.pytorch import PyTorchProfiler
from drivetrain.compat.lightning.pytorch.trainer.states import RunningStage, TrainerFn, TrainerState, TrainerStatus
from drivetrain.compat.lightning.reasons import PLUGIN
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.trainer import Trainer as CoreTrainer
from drivetrain.trainer.loops.run_control import StopReason

__all__ = ["Trainer"]

# What profilers call the parts of a run there.
_WORDS = {
    "Task": "LightningModule",
    "DataModule": "LightningDataModule",
    "Single": "SingleDeviceStrategy",
    "DDP": "DDPStrategy",
    "FSDP": "FSDPStrategy",
    "DeepSpeed": "DeepSpeedStrategy",
}

_CUT_SHORT = (StopReason.INTERRUPTED, StopReason.PREEMPTED, StopReason.FAILED)


class Trainer(CoreTrainer):
    """`drivetrain.Trainer` as Lightning's scripts make and read it.

    Args:
        accelerator: As there, or one of Lightning's objects for a kind of device.
        precision: As there.
        logger: As there; TensorBoard if None or True, where it is installed, else a `CSVLogger`, in `lightning_logs`.
        default_root_dir: As there.
        profiler: As there.
        plugins: Number formats, and `TorchSyncBatchNorm()`.
        enable_autolog_hparams: Whether trackers get the hyper-parameters.
        model_registry: None: checkpoints are in directories.
        **options: As there.

    Raises:
        ConfigurationError: A plugin or a registry was given that is not here.
    """

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
        **options: Any,
    ) -> None:
        if model_registry is not None:
            raise ConfigurationError(f"Trainer(model_registry={model_registry!r}): there is no registry. Leave it out.")
        for plugin in plugins if isinstance(plugins, Sequence) and not isinstance(plugins, str) else [plugins]:
            if isinstance(plugin, TorchSyncBatchNorm):
                options["sync_batchnorm"] = True
            elif isinstance(plugin, Precision):
                precision = plugin.precision
            elif plugin is not None:
                raise ConfigurationError(f"Trainer(plugins={type(plugin).__name__}()) is not taken. {PLUGIN}")
        if logger is None or logger is True:
            logger = _default_logger(default_root_dir) if not options.get("barebones") else None
        super().__init__(
            accelerator=_kind_of(accelerator),
            precision=precision,
            logger=logger,
            default_root_dir=default_root_dir,
            profiler=_profiler_of(profiler),
            **options,
        )
        self.actions.use_words(_WORDS)
        self.tracker_log.shows_hyper_parameters = enable_autolog_hparams
        self._verb: Stage | None = None

    # what runs

    @property
    def state(self) -> TrainerState:
        """What this Trainer does."""
        verb = self.task_run.stage
        if verb is None:
            return TrainerState()
        fn = TrainerFn(verb.verb)
        if self.stage is None:
            cut_short = self.control.reason in _CUT_SHORT and verb is Stage.TRAIN
            return TrainerState(TrainerStatus.INTERRUPTED if cut_short else TrainerStatus.FINISHED, fn)
        stage = RunningStage.SANITY_CHECKING if self.sanity_checking else RunningStage(str(self.stage))
        return TrainerState(TrainerStatus.RUNNING, fn, stage)

    @property
    def evaluating(self) -> bool:
        """Whether `validate` or `test` runs, not a validation in `fit`."""
        return self.task_run.stage in (Stage.VALIDATE, Stage.TEST) and self.stage is not None

    @property
    def enable_validation(self) -> bool:
        """Whether `fit` validates."""
        return self.limit_val_batches != 0 and bool(self.num_val_batches)

    @property
    def received_sigterm(self) -> bool:
        """Whether a scheduler's signal ends the run, or has ended it."""
        return self.preempted

    # what is trained

    @property
    def lightning_module(self) -> Any:
        """The task of the run, or of the last one."""
        return self.task

    @property
    def early_stopping_callbacks(self) -> list[EarlyStopping]:
        """All early-stopping callbacks."""
        return [callback for callback in self.callbacks if isinstance(callback, EarlyStopping)]

    @property
    def ckpt_path(self) -> str | None:
        """The checkpoint that the last verb has taken."""
        return self.task_run.checkpoint_path

    # on what

    @property
    def device_ids(self) -> list[int]:
        """The numbers of this machine's devices in use."""
        return list(range(self.num_devices))

    @property
    def node_rank(self) -> int:
        """The number of this machine."""
        return self.global_rank // self.num_devices

    @property
    def precision_plugin(self) -> Any:
        """The number format."""
        return self.accelerator.precision

    @property
    def scaler(self) -> Any:
        """What scales losses in half precision, if anything does."""
        return self.accelerator.scaler

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int] | None:
        """This process's share of the data; None for one process."""
        shard = self.strategy.topology.data_shard
        return None if self.world_size == 1 else {"num_replicas": shard.count, "rank": shard.index}

    @property
    def num_sanity_val_batches(self) -> list[float]:
        """Batches of each validation loader that are tried before training."""
        most = float("inf") if self.num_sanity_val_steps < 0 else self.num_sanity_val_steps
        return [min(batches, most) for batches in self.num_val_batches]


def _profiler_of(given: Any) -> Any:
    """The profiler that Lightning has under a name; anything else as it is."""
    return PyTorchProfiler() if isinstance(given, str) and given.lower() == "pytorch" else given


def _kind_of(accelerator: Any) -> Any:
    """The name of a kind of device that one of Lightning's objects stands for; anything else as it is."""
    if isinstance(accelerator, Accelerator):
        return accelerator.kind
    return accelerator


def _default_logger(folder: str | os.PathLike[str] | None) -> Any:
    kind = TensorBoardLogger if TensorBoardLogger.is_available() else CSVLogger
    return kind(os.getcwd() if folder is None else folder)
