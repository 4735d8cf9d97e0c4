"""Checking the Trainer's arguments, and building what they ask for."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch

from drivetrain.accelerator import Accelerator
from drivetrain.callbacks import Callback, ModelCheckpoint, ModelSummary, TQDMProgressBar
from drivetrain.launch import already_launched, relaunch_script
from drivetrain.runtime.devices import detect_device_kind, get_device_kind
from drivetrain.runtime.durations import parse_duration
from drivetrain.runtime.environment import ProcessEnvironment
from drivetrain.runtime.errors import ConfigurationError, LaunchError, nearest
from drivetrain.runtime.seeds import make_deterministic
from drivetrain.strategies import Strategy, resolve_ddp
from drivetrain.strategies.precision import Precision
from drivetrain.trackers import CSVLogger, Tracker, resolve_trackers
from drivetrain.trainer.data_module import DataModule
from drivetrain.trainer.task import Task

CLIPPING = ("norm", "value")


def check_limits(**limits: int | float | None) -> None:
    """Raise unless every limit is a whole number of batches or a fraction."""
    for name, value in limits.items():
        if value is None:
            continue
        whole = isinstance(value, int) and not isinstance(value, bool) and value >= 0
        fraction = isinstance(value, float) and 0.0 <= value <= 1.0
        if not (whole or fraction):
            raise ConfigurationError(
                f"{name}={value!r}: give a whole number of batches (10), or a fraction from 0.0 to 1.0 (0.25)."
            )


def check_counts(**counts: tuple[int | None, int]) -> None:
    """Raise unless every count is None or a whole number of at least its bound."""
    for name, (value, least) in counts.items():
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigurationError(f"{name}={value!r}: give a whole number of at least {least}.")


def check_clipping(value: float | None, algorithm: str | None) -> str | None:
    """Raise unless clipping makes sense; returns the algorithm."""
    if algorithm is not None and algorithm not in CLIPPING:
        raise ConfigurationError(
            f"gradient_clip_algorithm={algorithm!r}: allowed are {', '.join(CLIPPING)}."
            f"{nearest(str(algorithm), CLIPPING)}"
        )
    if value is not None and (not isinstance(value, int | float) or math.isnan(value) or value < 0):
        raise ConfigurationError(f"gradient_clip_val={value!r}: give a number of at least 0, or None.")
    return algorithm


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
    if not task.automatic_optimization and type(task).optimizer_step is not Task.optimizer_step:
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


def check_evaluation(task: Any, stage: str, verb: str) -> Task:
    """Raise unless a task can be evaluated; returns it."""
    if task is None:
        raise ConfigurationError(f"{verb}() without a model needs a fit() before it. Pass the task.")
    if not isinstance(task, Task):
        raise ConfigurationError(f"Trainer.{verb} takes a Task, got a {type(task).__name__}.")
    step = f"{stage}_step"
    if stage != "predict" and getattr(type(task), step) is getattr(Task, step):
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
    """The engine to run on: the one given, or a new one, after starting the script anew where processes are missing."""
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
        strategy = resolve_ddp(strategy, ProcessEnvironment.detect(), "sync_batchnorm=True", sync_batchnorm=True)
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


def set_determinism(deterministic: bool | str | None, benchmark: bool | None) -> None:
    """Set torch's switches as asked."""
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
    given: Callback | Sequence[Callback] | None,
    checkpointing: bool | None,
    progress_bar: bool | None,
    summary: bool | None,
    quiet: bool,
) -> list[Callback]:
    """The callbacks given and the usual ones beside them; those that write checkpoints come last."""
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
