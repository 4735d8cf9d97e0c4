"""The Trainer's options: checked, and what they ask for built."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

import torch

from drivetrain.accelerator import Accelerator
from drivetrain.callbacks import Callback, ModelCheckpoint, ModelSummary, TQDMProgressBar
from drivetrain.callbacks.stage import Stage
from drivetrain.launch import already_launched, relaunch_script
from drivetrain.runtime.devices import detect_device_kind, get_device_kind
from drivetrain.runtime.durations import parse_duration
from drivetrain.runtime.environment import ProcessEnvironment
from drivetrain.runtime.errors import ConfigurationError, LaunchError, nearest
from drivetrain.runtime.seeds import make_deterministic, set_seed
from drivetrain.strategies import DDP, Strategy
from drivetrain.strategies.precision import Precision
from drivetrain.trackers import CSVLogger, Tracker, resolve_trackers
from drivetrain.trainer.data_module import DataModule
from drivetrain.trainer.optimizers import has_own_optimizer_step
from drivetrain.trainer.task import Task

if TYPE_CHECKING:
    from drivetrain.trainer.trainer import Trainer

T = TypeVar("T")

CLIPPING = ("norm", "value")
ON_INTERRUPT = ("raise", "return")


@dataclass(frozen=True)
class TrainerOptions:
    """How long, how much and how often a Trainer trains; see `Trainer` for each. All are checked here.

    Raises:
        ConfigurationError: an option cannot be; the message says what can.
    """

    max_epochs: int = 1000
    min_epochs: int | None = None
    max_steps: int = -1
    min_steps: int | None = None
    max_time: timedelta | None = None
    limit_train_batches: int | float | None = None
    limit_val_batches: int | float | None = None
    limit_test_batches: int | float | None = None
    limit_predict_batches: int | float | None = None
    overfit_batches: int | float = 0.0
    val_check_interval: int | float | timedelta | None = None
    check_val_every_n_epoch: int | None = 1
    num_sanity_val_steps: int = 2
    log_every_n_steps: int = 50
    accumulate_grad_batches: int = 1
    gradient_clip_val: int | float | None = None
    gradient_clip_algorithm: str | None = None
    inference_mode: bool = True
    use_distributed_sampler: bool = True
    detect_anomaly: bool = False
    barebones: bool = False
    fast_dev_run: int | bool = False
    reload_dataloaders_every_n_epochs: int = 0
    default_root_dir: str = "."
    on_interrupt: str = "raise"

    def __post_init__(self) -> None:
        for name in _LIMITS:
            _check_limit(name, getattr(self, name))
        for name, least in _COUNTS.items():
            _check_count(name, getattr(self, name), least)
        check_clipping(self.gradient_clip_val, self.gradient_clip_algorithm)
        check_validation_interval(self.val_check_interval)
        if self.on_interrupt not in ON_INTERRUPT:
            raise ConfigurationError(
                f"on_interrupt={self.on_interrupt!r}: give 'raise' to end the script at Ctrl-C once the run has saved, "
                f"or 'return' to return from fit().{nearest(str(self.on_interrupt), ON_INTERRUPT)}"
            )

    @classmethod
    def from_arguments(cls, given: Mapping[str, Any]) -> TrainerOptions:
        """The options that the Trainer's arguments mean.

        Args:
            given: the arguments by name, others among them.
        """
        chosen = {each.name: given[each.name] for each in fields(cls) if given[each.name] is not None}
        chosen["val_check_interval"] = check_validation_interval(given["val_check_interval"])
        chosen["check_val_every_n_epoch"] = given["check_val_every_n_epoch"]
        chosen["max_time"] = parse_duration(given["max_time"], "max_time")
        chosen["default_root_dir"] = os.fspath(given["default_root_dir"] or Path.cwd())
        options = cls(**chosen)
        if given["max_epochs"] is None and (options.max_steps >= 0 or options.max_time is not None):
            options = replace(options, max_epochs=-1)
        if given["barebones"]:
            options = replace(options, num_sanity_val_steps=0, log_every_n_steps=0)
        return options._for_development(int(given["fast_dev_run"])) if given["fast_dev_run"] else options

    def _for_development(self, runs: int) -> TrainerOptions:
        """The same, for so many batches of everything."""
        limits = dict.fromkeys(_LIMITS[:4], runs)
        return replace(
            self,
            max_epochs=1,
            max_steps=runs,
            num_sanity_val_steps=0,
            log_every_n_steps=0 if self.barebones else 1,
            val_check_interval=None,
            check_val_every_n_epoch=1,
            **limits,  # type: ignore[arg-type]
        )

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is written: no trackers, no checkpoints."""
        return bool(self.fast_dev_run) or self.barebones


_LIMITS = ("limit_train_batches", "limit_val_batches", "limit_test_batches", "limit_predict_batches", "overfit_batches")
_COUNTS = {
    "max_epochs": -1,
    "min_epochs": 0,
    "max_steps": -1,
    "min_steps": 0,
    "check_val_every_n_epoch": 1,
    "num_sanity_val_steps": -1,
    "log_every_n_steps": 0,
    "accumulate_grad_batches": 1,
    "reload_dataloaders_every_n_epochs": 0,
}


class Option(Generic[T]):
    """An attribute of the Trainer that is one of its options; what is written to it is checked."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, trainer: None, owner: type) -> Option[T]: ...
    @overload
    def __get__(self, trainer: Trainer, owner: type) -> T: ...
    def __get__(self, trainer: Trainer | None, owner: type) -> Option[T] | T:
        if trainer is None:
            return self
        value: T = getattr(trainer.options, self._name)
        return value

    def __set__(self, trainer: Trainer, value: T) -> None:
        trainer.change_options(**{self._name: value})


def _check_limit(name: str, value: Any) -> None:
    """Raise unless a limit is a whole number of batches or a fraction."""
    if value is None:
        return
    whole = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    fraction = isinstance(value, float) and 0.0 <= value <= 1.0
    if not (whole or fraction):
        raise ConfigurationError(
            f"{name}={value!r}: give a whole number of batches (10), or a fraction from 0.0 to 1.0 (0.25)."
        )


def _check_count(name: str, value: Any, least: int) -> None:
    """Raise unless a count is None or a whole number of at least its bound."""
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigurationError(f"{name}={value!r}: give a whole number of at least {least}.")


def check_clipping(value: float | None, algorithm: str | None) -> None:
    """Raise unless clipping makes sense."""
    if algorithm is not None and algorithm not in CLIPPING:
        raise ConfigurationError(
            f"gradient_clip_algorithm={algorithm!r}: allowed are {', '.join(CLIPPING)}."
            f"{nearest(str(algorithm), CLIPPING)}"
        )
    if value is not None and (not isinstance(value, int | float) or math.isnan(value) or value < 0):
        raise ConfigurationError(f"gradient_clip_val={value!r}: give a number of at least 0, or None.")


def check_validation_interval(interval: Any) -> int | float | timedelta | None:
    """Raise unless the interval is a number of batches, a fraction of an epoch, or a time."""
    if interval is None or isinstance(interval, timedelta):
        return interval
    if isinstance(interval, dict | str):
        return parse_duration(interval, "val_check_interval")
    whole = isinstance(interval, int) and not isinstance(interval, bool) and interval >= 1
    fraction = isinstance(interval, float) and 0.0 < interval <= 1.0
    if not (whole or fraction):
        raise ConfigurationError(
            f"val_check_interval={interval!r}: give a whole number of batches, a fraction of an epoch (0.25), or a "
            "time ('00:01:00:00')."
        )
    return interval  # type: ignore[no-any-return]


def check_task(task: Any, train: Any, val: Any, data: Any) -> None:
    """Raise unless a task can be fitted."""
    if not isinstance(task, Task):
        raise ConfigurationError(
            f"Trainer.fit takes a Task, got {_named(task)}. Subclass drivetrain.Task and pass an instance."
        )
    if data is not None and not isinstance(data, DataModule):
        raise ConfigurationError(f"datamodule must be a DataModule, got a {type(data).__name__}.")
    if data is not None and (train is not None or val is not None):
        raise ConfigurationError("Give loaders or a datamodule, not both.")


def check_training_step(task: Task, accumulate: int, clip: float | None) -> None:
    """Raise where a task cannot train, or not with these arguments of the Trainer."""
    if type(task).training_step is Task.training_step:
        raise ConfigurationError(
            f"{type(task).__name__} has no training_step. Define training_step(self, batch, batch_idx) and return "
            "the loss."
        )
    if not task.automatic_optimization and has_own_optimizer_step(task):
        raise ConfigurationError(
            f"{type(task).__name__} overrides optimizer_step but has automatic_optimization = False, so it would never "
            "be called. Step the optimizers in training_step."
        )
    if not task.automatic_optimization and (accumulate > 1 or clip):
        given = f"accumulate_grad_batches={accumulate}" if accumulate > 1 else f"gradient_clip_val={clip}"
        raise ConfigurationError(
            f"Trainer({given}) has no effect on {type(task).__name__}, which optimizes by hand "
            "(automatic_optimization = False). Step every so many batches, or call self.clip_gradients, in "
            "training_step."
        )


def check_evaluation(task: Any, stage: Stage) -> Task:
    """Raise unless a task can be evaluated; returns it."""
    if task is None:
        raise ConfigurationError(f"{stage.verb}() without a model needs a fit() before it. Pass the task.")
    if not isinstance(task, Task):
        raise ConfigurationError(f"Trainer.{stage.verb} takes a Task, got a {type(task).__name__}.")
    step = stage.step_name
    if stage is not Stage.PREDICT and getattr(type(task), step) is getattr(Task, step):
        raise ConfigurationError(f"{type(task).__name__} has no {step}. Define {step}(self, batch, batch_idx).")
    return task


def make_accelerator(
    accelerator: str | Accelerator,
    strategy: str | Strategy,
    devices: int | str,
    num_nodes: int,
    precision: str | int | Precision | None,
    accumulate: int,
    sync_batchnorm: bool,
) -> Accelerator:
    """The engine to run on: the one given, or a new one, after starting the script again where processes are missing."""
    if isinstance(accelerator, Accelerator):
        changed = [
            name
            for name, value, default in (
                ("strategy", strategy, "auto"),
                ("devices", devices, "auto"),
                ("precision", precision, None),
                ("sync_batchnorm", sync_batchnorm, False),
            )
            if value != default
        ]
        if changed:
            raise ConfigurationError(
                f"Trainer(accelerator=<Accelerator>) runs on what that Accelerator is, so {', '.join(changed)} cannot "
                "be given too. Give them to the Accelerator."
            )
        return accelerator
    kind = None if accelerator == "auto" else get_device_kind(accelerator)
    _start_processes(kind.name if kind else None, devices, num_nodes)
    if sync_batchnorm:
        if strategy not in ("auto", "ddp"):
            raise ConfigurationError(f"sync_batchnorm=True goes with strategy='ddp', not with {strategy!r}.")
        strategy = DDP(sync_batchnorm=True) if ProcessEnvironment.detect().is_distributed else strategy
    return Accelerator(
        strategy=strategy,
        mixed_precision=str(precision) if isinstance(precision, int) else precision,
        gradient_accumulation_steps=accumulate,
        device=kind.name if kind else None,
    )


def _start_processes(kind: str | None, devices: int | str, num_nodes: int) -> None:
    """Make sure that there are as many processes as were asked for."""
    if isinstance(devices, str) and devices.isdigit():
        devices = int(devices)
    if devices != "auto" and (
        not isinstance(devices, int) or isinstance(devices, bool) or (devices < 1 and devices != -1)
    ):
        raise ConfigurationError(
            f"devices={devices!r}: give the number of processes on this machine, -1 for all, or 'auto'."
        )
    environment = ProcessEnvironment.detect()
    if already_launched():
        here = environment.local_world_size
        if isinstance(devices, int) and devices not in (here, -1):
            raise ConfigurationError(
                f"devices={devices}, but the launcher ({environment.source}) started {here} process(es) on this "
                f"machine. Leave devices='auto', or start {devices}: "
                f"drivetrain launch --num_processes {devices} script.py."
            )
        if num_nodes not in (1, environment.num_nodes):
            raise ConfigurationError(
                f"num_nodes={num_nodes}, but the launcher ({environment.source}) started {environment.num_nodes}."
            )
        return
    if num_nodes > 1:
        raise ConfigurationError(
            f"num_nodes={num_nodes} needs a launcher on every machine: drivetrain launch --num_machines {num_nodes} "
            "--machine_rank <0…> --main_process_ip <address> script.py, or srun."
        )
    found = detect_device_kind() if kind is None else get_device_kind(kind)
    wanted = found.count() if devices in ("auto", -1) else devices
    if not isinstance(wanted, int) or wanted <= 1:
        return
    try:
        relaunch_script(wanted, cpu=found.name == "cpu")
    except LaunchError:
        if devices != "auto":
            raise
        warnings.warn(
            f"This machine has {wanted} {found.name} devices, but an interactive session cannot start processes for "
            "them, so one is used. drivetrain.notebook_launcher uses them all.",
            stacklevel=4,
        )


def set_randomness(seed: int | None, deterministic: bool | str | None, benchmark: bool | None) -> None:
    """Seed everything, and set torch's switches, as asked."""
    if seed is not None:
        set_seed(seed)
    if deterministic not in (None, True, False, "warn"):
        raise ConfigurationError(f"deterministic={deterministic!r}: allowed are True, False and 'warn'.")
    if deterministic:
        make_deterministic(deterministic)
    if benchmark is not None:
        torch.backends.cudnn.benchmark = benchmark


def make_loggers(given: Tracker | Iterable[Tracker] | bool | None, root: str) -> list[Tracker]:
    """The trackers asked for; a `CSVLogger` by default."""
    if given is False:
        return []
    if given is None or given is True:
        return [CSVLogger(root)]
    found: list[Tracker] = resolve_trackers(given, save_dir=root)
    return found


def make_callbacks(
    given: Callback | Sequence[Callback] | None, arguments: Mapping[str, Any], options: TrainerOptions
) -> list[Callback]:
    """The callbacks given and the usual ones beside them; those that write checkpoints come last.

    Args:
        given: the callbacks.
        arguments: the Trainer's arguments, which say what is added.
        options: the Trainer's options.
    """
    quiet = options.is_quiet
    checkpointing = False if quiet else arguments["enable_checkpointing"]
    progress_bar = False if options.barebones else arguments["enable_progress_bar"]
    summary = False if options.barebones else arguments["enable_model_summary"]
    callbacks = [given] if isinstance(given, Callback) else list(given or [])
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise ConfigurationError(f"callbacks holds {_named(callback)}; give instances of drivetrain.Callback.")
    saving = [callback for callback in callbacks if callback.saves_checkpoints]
    if saving and checkpointing is False and not quiet:
        raise ConfigurationError(
            f"enable_checkpointing=False, but callbacks holds {_named(saving[0])}. Remove one of the two."
        )
    if quiet:
        callbacks = [callback for callback in callbacks if not callback.saves_checkpoints]
    elif checkpointing is not False and not saving:
        callbacks.append(ModelCheckpoint())
    if progress_bar is not False and not any(callback.is_progress_bar for callback in callbacks):
        callbacks.append(TQDMProgressBar())
    if summary is not False and not any(isinstance(callback, ModelSummary) for callback in callbacks):
        callbacks.append(ModelSummary())
    _refuse_twins(callbacks)
    return checkpoints_last(callbacks)


def with_task_callbacks(callbacks: list[Callback], added: Any) -> list[Callback]:
    """The callbacks with a task's own, which replace those of the same type."""
    own = [added] if isinstance(added, Callback) else list(added or [])
    if not own:
        return callbacks
    kinds = {type(callback) for callback in own}
    return checkpoints_last([callback for callback in callbacks if type(callback) not in kinds] + own)


def checkpoints_last(callbacks: list[Callback]) -> list[Callback]:
    """Callbacks in order, those that write checkpoints last, so that they save what the others have become."""
    return sorted(callbacks, key=lambda callback: callback.saves_checkpoints)


def _refuse_twins(callbacks: list[Callback]) -> None:
    keys = [callback.state_key for callback in callbacks if type(callback).state_dict is not Callback.state_dict]
    twins = {key for key in keys if keys.count(key) > 1}
    if twins:
        raise ConfigurationError(
            f"Two callbacks have the same state_key {sorted(twins)}, so a checkpoint could not tell them apart. "
            "Give them different arguments, or override state_key."
        )


def _named(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"
