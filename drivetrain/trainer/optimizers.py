"""Parsing of the result of `configure_optimizers`, and stepping of learning-rate schedulers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau

from drivetrain.accelerator.prepared import cover_new_groups
from drivetrain.callbacks.step_schedule import StepInterval
from drivetrain.runtime.durations import Duration, Unit, interval_of
from drivetrain.runtime.errors import ArgumentTypeError, ConfigurationError, nearest
from drivetrain.trainer.loops.progress import Phase

if TYPE_CHECKING:
    from drivetrain.trainer.trainer import Trainer


_ALLOWED = (
    "an optimizer; a list of optimizers; a pair of lists (optimizers, schedulers), or of a list and one scheduler; "
    "a dict with 'optimizer' and perhaps 'lr_scheduler'; a list of such dicts; a dict of optimizers, or of such dicts, "
    "by name; or None to train without an optimizer or to update parameters yourself"
)


@dataclass
class SchedulerConfig:
    """Learning-rate scheduler and the interval at which it steps.

    Attributes:
        scheduler: The learning-rate scheduler.
        interval: `"epoch"` or `"step"`.
        frequency: The number of epochs or steps between two scheduler steps, or a duration independent of `interval`:
            `"500 steps"`, `"2 epochs"`, `"1M samples"`, `"50M tokens"`, `"10%"`.
        monitor: The logged value that a `ReduceLROnPlateau` monitors.
        strict: True to raise an error if the monitored value is missing, False to warn.
        name: The name that `LearningRateMonitor` uses.
        reduce_on_plateau: True if the scheduler's `step` takes a value.
        step_interval: The interval in samples, tokens or fractions of the run, if `frequency` is one.
    """

    scheduler: Any
    interval: str = "epoch"
    frequency: int | str | Duration = 1
    monitor: str | None = None
    strict: bool = True
    name: str | None = None
    reduce_on_plateau: bool = False
    step_interval: StepInterval | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.interval not in ("epoch", "step"):
            raise ConfigurationError(
                f"The \"interval\" key in lr scheduler dict must be 'epoch' or 'step', got {self.interval!r}."
                f"{nearest(str(self.interval), ('epoch', 'step'))}",
            )
        # A duration has its own unit and replaces `interval`.
        if isinstance(self.frequency, str | Duration):
            self._read_frequency(self.frequency)
        elif not isinstance(self.frequency, int) or self.frequency < 1:
            raise ConfigurationError(
                f"A scheduler's frequency must be a whole number of at least 1, got {self.frequency!r}."
            )
        # Torch's class takes a value in `step`; other classes must say so with the key.
        self.reduce_on_plateau = self.reduce_on_plateau or isinstance(self.scheduler, ReduceLROnPlateau)
        if isinstance(self.scheduler, OneCycleLR) and self.interval == "epoch":
            warnings.warn(
                "A `OneCycleLR` scheduler counts steps, but steps once per epoch. Are you sure you didn't mean "
                "'interval': 'step'?",
                RuntimeWarning,
                stacklevel=2,
            )

    def _read_frequency(self, given: str | Duration) -> None:
        frequency = interval_of(given, "frequency")
        if isinstance(frequency, Duration) and frequency.unit is Unit.SECONDS:
            raise ConfigurationError(
                f"The frequency of a scheduler cannot be a time such as {given!r}, because learning rates would differ "
                "between runs. Use steps, epochs, samples, tokens or a fraction of the run.",
            )
        self.interval = "step"
        self.frequency = frequency
        if isinstance(frequency, Duration) and frequency.unit is Unit.EPOCHS:
            self.interval, self.frequency = "epoch", int(frequency.amount)


_OF_AUTOMATIC_STEPS = ("monitor", "strict", "reduce_on_plateau")
_KEYS = ("optimizer", "lr_scheduler", "monitor")


def names_of(configured: Any) -> tuple[str, ...]:
    """Return the optimizers' names if `configure_optimizers` returned a dict of named optimizers, else `()`."""
    # A dict with the key 'optimizer' describes a single optimizer, not optimizers by name.
    if not isinstance(configured, Mapping) or "optimizer" in configured or not configured:
        return ()
    kinds = [
        isinstance(each, Optimizer) or (isinstance(each, Mapping) and "optimizer" in each)
        for each in configured.values()
    ]
    # A name close to a key, such as 'optimiser', is more likely a misspelled key, which the parser reports.
    if not all(kinds) or any(nearest(str(name), _KEYS) for name in configured):
        return ()
    for name in configured:
        if not isinstance(name, str) or name in ("loss", "weight"):
            raise ConfigurationError(
                f"configure_optimizers returned an optimizer with the name {name!r}. Names must be strings other than "
                "'loss' and 'weight', which training_step uses to return a single loss.",
            )
    # By id, because tensors compare element by element.
    owners: dict[int, str] = {}
    for name, item in configured.items():
        for group in (item if isinstance(item, Optimizer) else item["optimizer"]).param_groups:
            for parameter in group["params"]:
                if owners.setdefault(id(parameter), name) != name:
                    raise ConfigurationError(
                        f"The optimizers {owners[id(parameter)]!r} and {name!r} have a parameter in common, which "
                        "would be updated twice in each step. Pass each parameter to only one of them.",
                    )
    return tuple(configured)


def parse_configured_optimizers(
    configured: Any, read: Callable[..., SchedulerConfig], by_hand: bool = False
) -> tuple[list[Optimizer], list[SchedulerConfig]]:
    optimizers, schedulers = _parse(configured, partial(read, by_hand=by_hand))
    for config in schedulers:
        if not by_hand and not callable(getattr(config.scheduler, "step", None)):
            raise ArgumentTypeError(
                f"The provided lr scheduler `{type(config.scheduler).__name__}` is invalid: it doesn't follow "
                "PyTorch's LRScheduler, which has a step() method.",
            )
        if config.reduce_on_plateau and config.monitor is None and not by_hand:
            raise ConfigurationError(
                "`configure_optimizers` must include a monitor when a `ReduceLROnPlateau` scheduler is used: the name "
                "of a logged value. For example, return "
                "{'optimizer': ..., 'lr_scheduler': {'scheduler': ..., 'monitor': 'val_loss'}}.",
            )
        # A scheduler of another optimizer would step without any effect on training.
        owner = getattr(config.scheduler, "optimizer", None)
        if isinstance(owner, Optimizer) and not any(owner is each for each in optimizers):
            raise ConfigurationError(
                f"The scheduler {type(config.scheduler).__name__} is attached with an optimizer that wasn't returned "
                "from configure_optimizers. Return that optimizer too.",
            )
    return optimizers, schedulers


def _parse(configured: Any, config: Callable[..., SchedulerConfig]) -> tuple[list[Optimizer], list[SchedulerConfig]]:
    if configured is None:
        return [], []
    if isinstance(configured, Optimizer):
        return _checked([configured]), []
    # Before the general case, since both are mappings.
    if names_of(configured):
        items = [{"optimizer": each} if isinstance(each, Optimizer) else each for each in configured.values()]
        return _from_dicts(items, config)
    if isinstance(configured, Mapping):
        return _from_dicts([configured], config)
    if isinstance(configured, Sequence) and configured:
        items = list(configured)
        if all(isinstance(item, Optimizer) for item in items):
            return _checked(items), []
        if all(isinstance(item, Mapping) for item in items):
            return _from_dicts(items, config)
        # The usual pair `return [optimizer], [scheduler]`.
        if len(items) == 2 and isinstance(items[0], list | tuple) and isinstance(items[1], list | tuple):
            return _checked(list(items[0])), [config(item) for item in items[1]]
        if len(items) == 2 and isinstance(items[0], list | tuple) and _may_be_scheduler(items[1]):
            return _checked(list(items[0])), [config(items[1])]
        if len(items) == 2 and isinstance(items[0], Optimizer) and _may_be_scheduler(items[1]):
            return _checked([items[0]]), [config(items[1])]
    raise ConfigurationError(
        f"Unknown configuration for model optimizers: configure_optimizers returned {_describe(configured)}. Return "
        f"{_ALLOWED}.",
    )


def _may_be_scheduler(item: Any) -> bool:
    return isinstance(item, SchedulerConfig | Mapping) or callable(getattr(item, "step", None))


def _from_dicts(
    items: Sequence[Mapping[str, Any]], config: Callable[..., SchedulerConfig]
) -> tuple[list[Optimizer], list[SchedulerConfig]]:
    optimizers: list[Optimizer] = []
    schedulers: list[SchedulerConfig] = []
    allowed = _KEYS
    for item in items:
        for key in item:
            if key not in allowed:
                raise ConfigurationError(
                    f"configure_optimizers returned a dict with the unknown key {key!r}. "
                    f"Allowed keys: {', '.join(allowed)}.{nearest(str(key), allowed)}",
                )
        if "optimizer" not in item:
            raise ConfigurationError("configure_optimizers returned a dict without the key 'optimizer'.")
        optimizers.append(item["optimizer"])
        if item.get("lr_scheduler") is not None:
            schedulers.append(config(item["lr_scheduler"], item.get("monitor")))
    return _checked(optimizers), schedulers


SCHEDULER_KEYS = tuple(each.name for each in fields(SchedulerConfig) if each.init)
"""Allowed keys in the dict of a scheduler."""


def read_scheduler(item: Any, monitor: str | None = None, by_hand: bool = False) -> SchedulerConfig:
    if isinstance(item, SchedulerConfig):
        return item
    if not isinstance(item, Mapping):
        return SchedulerConfig(item, monitor=monitor)
    unknown = sorted(str(key) for key in item if key not in SCHEDULER_KEYS)
    if unknown:
        raise ConfigurationError(
            f"The dict of a scheduler has the unknown key {unknown[0]!r}. Allowed keys: {', '.join(SCHEDULER_KEYS)}."
            f"{nearest(unknown[0], SCHEDULER_KEYS)}",
        )
    without_effect = [key for key in item if key in _OF_AUTOMATIC_STEPS]
    if by_hand and without_effect:
        warnings.warn(
            f"The lr scheduler dict contains the key(s) {without_effect}, but the keys will be ignored: with "
            "automatic_optimization = False, you step schedulers yourself in training_step.",
            RuntimeWarning,
            stacklevel=2,
        )
    if "scheduler" not in item:
        raise ConfigurationError(
            'The lr scheduler dict must have the key "scheduler", with the learning-rate scheduler as its value.',
        )
    # The scheduler's own monitor wins over that of the optimizer's dict.
    return SchedulerConfig(**{"monitor": monitor, **item})


def _checked(optimizers: list[Any]) -> list[Optimizer]:
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise ConfigurationError(
                f"Unknown configuration for model optimizers: configure_optimizers returned {_describe(optimizer)} "
                f"where an optimizer was expected. Return {_ALLOWED}.",
            )
        # An optimizer with empty groups would run without changing anything.
        if not any(group["params"] for group in optimizer.param_groups):
            raise ConfigurationError(
                f"{type(optimizer).__name__} has no parameters to optimize. Pass it the parameters of the task, for "
                "example torch.optim.SGD(self.parameters(), lr=...).",
            )
    return optimizers


def _describe(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"a {type(value).__name__} of {[type(item).__name__ for item in value]}"
    return f"a {type(value).__name__}"


# Stepping of learning-rate schedulers: once per optimizer step or epoch, on any number of processes


def begin_schedules(trainer: Trainer) -> None:
    for config in trainer.lr_scheduler_configs:
        every: Any = config.frequency
        is_counted = isinstance(every, Duration)
        config.step_interval = StepInterval(trainer, every, "frequency of a scheduler") if is_counted else None


def step_step_schedulers(trainer: Trainer) -> None:
    """Step the schedulers with `interval="step"` that are due after an optimizer step."""
    step = trainer.global_step
    for config in trainer.lr_scheduler_configs:
        if config.interval != "step":
            continue
        if step % config.frequency == 0 if config.step_interval is None else config.step_interval.is_due(step):  # type: ignore[operator]
            _step(trainer, config)


def step_epoch_schedulers(trainer: Trainer, plateau: bool) -> None:
    # `plateau` selects those that monitor a value, such as `ReduceLROnPlateau`, or else all others.
    if trainer.task is None or not trainer.task.automatic_optimization:
        return  # with manual optimization, the task steps schedulers itself
    # The current epoch is complete, but not yet counted.
    epoch = trainer.current_epoch + 1
    for config in trainer.lr_scheduler_configs:
        if config.interval == "epoch" and config.reduce_on_plateau is plateau and epoch % config.frequency == 0:  # type: ignore[operator]
            _step(trainer, config)


def end_epoch_of_schedulers(trainer: Trainer) -> None:
    """Step the learning rate schedulers that step once per epoch and do not monitor a metric.

    The progress records this, so that a run resumed at this point does not step them twice.
    """
    # A run resumed from a checkpoint at this point has already stepped them.
    if trainer.progress.phase < Phase.SCHEDULED:
        trainer.progress.phase = Phase.SCHEDULED
        step_epoch_schedulers(trainer, plateau=False)


def _step(trainer: Trainer, config: SchedulerConfig) -> None:
    assert trainer.task is not None
    value: Any = None
    if config.reduce_on_plateau:
        value = trainer.callback_metrics.get(config.monitor or "")
        if value is None:
            known = sorted(trainer.callback_metrics)
            message = f"ReduceLROnPlateau conditioned on metric {config.monitor!r} which is not available"
            if config.strict:
                raise ConfigurationError(
                    f"{message}. Available metrics are: {', '.join(known) or 'none'}."
                    f"{nearest(config.monitor or '', known)} Log it, or set strict=False in the scheduler's dict.",
                )
            warnings.warn(
                f"{message} but strict is `False`. The learning rate does not change.", RuntimeWarning, stacklevel=2
            )
            return
    # Parameter groups may have been added since the scheduler was created, for example by finetuning.
    cover_new_groups(config.scheduler)
    trainer.task.lr_scheduler_step(config.scheduler, value)
