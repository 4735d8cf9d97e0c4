"""Callback that logs the learning rates."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from drivetrain.callbacks.base import Callback
from drivetrain.callbacks.step_schedule import StepInterval, checked_every
from drivetrain.runtime.durations import Duration
from drivetrain.runtime.errors import ConfigurationError, nearest
from drivetrain.runtime.logging import get_logger

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from drivetrain.trainer.task import Task
    from drivetrain.trainer.trainer import Trainer

logger = get_logger(__name__)


class LearningRateMonitor(Callback):
    """Callback that logs the learning rate of every parameter group of every optimizer.

    The name of a value is `lr-<optimizer class>`. The second optimizer of a class is `lr-Adam-1`. With several
    parameter groups, the names are `lr-Adam/pg1` and so on, or `lr-Adam/<name>` if a group has a `"name"`. The
    `"name"` in a scheduler's configuration replaces `lr-Adam`.

    Cost on a device: no kernel, and no wait of the host.

    Args:
        logging_interval: `"step"` logs whenever the Trainer logs, every `log_every_n_steps` steps. `"epoch"` logs at
            the start of each epoch. None uses the interval of each scheduler, and both for an optimizer without a
            scheduler. A number of steps or a duration such as `"500 steps"`, `"1M samples"` or `"10%"` logs all rates
            at that interval.
        log_momentum: Also log the momentum, or Adam's first beta, as `<name>-momentum`.
        log_weight_decay: Also log the weight decay, as `<name>-weight_decay`.
        log_key_prefix: A prefix for every name.

    Attributes:
        lrs: A dict from name to the list of logged learning rates. Callbacks can monitor these names.
        last_momentum_values: A dict from name to the last logged momentum, or None if momentum is not logged.
        last_weight_decay_values: A dict from name to the last logged weight decay, or None if it is not logged.

    Raises:
        ConfigurationError: If the interval is unknown, if two schedulers or two parameter groups of an optimizer have
            the same name, or if the Trainer has no logger.

    Example:
        ```python
        from drivetrain import LearningRateMonitor, Trainer

        trainer = Trainer(callbacks=[LearningRateMonitor("step")])
        ```
    """

    saves_within_steps = False

    def __init__(
        self,
        logging_interval: int | str | Duration | None = None,
        log_momentum: bool = False,
        log_weight_decay: bool = False,
        log_key_prefix: str | None = None,
    ) -> None:
        self.logging_interval = logging_interval
        self._every: int | Duration | None = None
        if logging_interval not in (None, "step", "epoch"):
            self._every = self._read(logging_interval)
        self.schedule = self._every if isinstance(self._every, Duration) else None
        self.log_momentum = log_momentum
        self.log_weight_decay = log_weight_decay
        self.log_key_prefix = log_key_prefix
        self._forget()

    @staticmethod
    def _read(interval: Any) -> int | Duration:
        try:
            every = checked_every(interval, "LearningRateMonitor")
            assert every is not None
            return every
        except ConfigurationError as error:
            raise ConfigurationError(
                f"LearningRateMonitor(logging_interval={interval!r}): logging_interval should be `step`, "
                f"`epoch` or `None`.{nearest(str(interval), ('step', 'epoch'))} It may also be a number of steps, or a "
                "duration such as '500 steps'.",
            ) from error

    def _forget(self) -> None:
        self.lrs: dict[str, list[float]] = {}
        self.last_momentum_values: dict[str, float | None] = {}
        self.last_weight_decay_values: dict[str, float | None] = {}
        self._rates: list[_Rates] = []
        self._logs_steps = False
        self._next_step = -1
        self._windows = self._steps = 0
        self._interval: StepInterval | None = None

    @property
    def state_key(self) -> str:
        return self.build_state_key(logging_interval=self.logging_interval)

    def on_train_start(self, trainer: Trainer, task: Task) -> None:
        if not (trainer.loggers or trainer.barebones):
            raise ConfigurationError(
                "Cannot use LearningRateMonitor with a `Trainer` that has no logger. Set one, such as "
                "Trainer(logger='csv'), or remove this callback.",
            )
        self._forget()
        self._rates = self._find(trainer.optimizers, trainer.lr_scheduler_configs)
        if self.log_momentum and any(not each.has_momentum for each in self._rates):
            warnings.warn(
                "LearningRateMonitor(log_momentum=True): some optimizers do not have momentum. For these, 0 is logged.",
                RuntimeWarning,
                stacklevel=2,
            )
        self._windows = trainer.global_step
        every = trainer.log_every_n_steps if self._every is None else self._every
        self._logs_steps = bool(every) and any(self._is_due(each, "step") for each in self._rates)
        self._steps = every if isinstance(every, int) else 0
        self._interval = (
            StepInterval(trainer, every, "LearningRateMonitor.logging_interval") if not self._steps else None
        )
        if self._every is None:
            self._interval = trainer.tracker_log.step_interval
        for each in self._rates:
            each.align(self)

    def on_train_batch_start(self, trainer: Trainer, task: Task, batch: Any, batch_idx: int) -> None:
        if not self._logs_steps:
            return
        # The step of this batch, so that the values share a row with the step's other metrics.
        step = trainer.global_step + 1
        if step == self._next_step:
            return
        # Count windows, not steps: in manual optimization one batch may take several optimizer steps.
        self._next_step = step
        self._windows += 1
        is_due = self._interval.is_due(step) if self._interval is not None else self._windows % self._steps == 0
        if is_due:
            self._log(trainer, "step", step)

    def on_train_epoch_start(self, trainer: Trainer, task: Task) -> None:
        self._log(trainer, "epoch", trainer.global_step)

    def _is_due(self, rates: _Rates, interval: str) -> bool:
        if self._every is not None:
            return interval == "step"
        return interval == self.logging_interval if self.logging_interval else rates.interval in (interval, None)

    def _log(self, trainer: Trainer, interval: str, step: int) -> None:
        values: dict[str, float] = {}
        for each in self._rates:
            if self._is_due(each, interval):
                each.align(self)
                values.update(each.read(self))
        if values:
            trainer.log_metrics(values, step)

    def _find(self, optimizers: Sequence[Optimizer], configs: Sequence[Any]) -> list[_Rates]:
        scheduled = {id(config.scheduler.optimizer): config for config in configs}
        given = Counter(config.name for config in configs if config.name)
        twice = [name for name, count in given.items() if count > 1]
        if twice:
            raise ConfigurationError(
                f"Two learning-rate schedulers have the name {twice[0]!r}. LearningRateMonitor logs under these "
                "names. Set a different name for each scheduler, or no name.",
            )
        classes: Counter[str] = Counter()
        found = []
        for optimizer in optimizers:
            config = scheduled.get(id(optimizer))
            name = config.name if config is not None else None
            if not name:
                kind = f"lr-{type(optimizer).__name__}"
                name = f"{kind}-{classes[kind]}" if classes[kind] else kind
                classes[kind] += 1
            prefixed = f"{self.log_key_prefix or ''}{name}"
            found.append(_Rates(prefixed, optimizer, config.interval if config is not None else None))
        return found


class _Rates:
    def __init__(self, name: str, optimizer: Optimizer, interval: str | None) -> None:
        self.name = name
        self.interval = interval
        self._optimizer = optimizer
        self._known: list[str] = []

    @property
    def has_momentum(self) -> bool:
        return "momentum" in self._optimizer.defaults or "betas" in self._optimizer.defaults

    def align(self, monitor: LearningRateMonitor) -> None:
        groups = self._optimizer.param_groups
        # no parameter group was added
        if len(self._known) == len(groups):
            return
        names = [self._name(number, group, len(groups)) for number, group in enumerate(groups, start=1)]
        twice = [name for name, count in Counter(names).items() if count > 1]
        if twice:
            raise ConfigurationError(
                "A single `Optimizer` cannot have multiple parameter groups with identical names, since the names "
                f"label the logged rates: {twice[0]!r}. Set a different `name` for each group, or no name.",
            )
        # A second group renames the first one: `lr-Adam` becomes `lr-Adam/pg1`, and its history moves along.
        moved = [monitor.lrs.pop(name, []) for name in self._known]
        for kept in (monitor.last_momentum_values, monitor.last_weight_decay_values):
            for name in [each for each in kept if each.rpartition("-")[0] in self._known]:
                del kept[name]
        for number, name in enumerate(names):
            monitor.lrs[name] = moved[number] if number < len(moved) else []
        self._known = names

    def read(self, monitor: LearningRateMonitor) -> dict[str, float]:
        values: dict[str, float] = {}
        for name, group in zip(self._known, self._optimizer.param_groups, strict=True):
            values[name] = rate = float(group["lr"])
            monitor.lrs[name].append(rate)
            decay, momentum = f"{name}-weight_decay", f"{name}-momentum"
            if monitor.log_momentum:
                values[momentum] = float(group["betas"][0] if "betas" in group else group.get("momentum", 0.0))
            if monitor.log_weight_decay:
                values[decay] = float(group.get("weight_decay", 0.0))
            monitor.last_momentum_values[momentum] = values.get(momentum)
            monitor.last_weight_decay_values[decay] = values.get(decay)
        return values

    def _name(self, number: int, group: Mapping[str, Any], groups: int) -> str:
        if "name" in group:
            return f"{self.name}/{group['name']}"
        return f"{self.name}/pg{number}" if groups > 1 else self.name
