"""Log the learning rates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from drivetrain.callbacks.base import Callback
from drivetrain.runtime.errors import ConfigurationError, nearest
from drivetrain.runtime.logging import get_logger

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from drivetrain.trainer.task import Task
    from drivetrain.trainer.trainer import Trainer

logger = get_logger(__name__)


class LearningRateMonitor(Callback):
    """Logs the learning rate of every parameter group of every optimizer.

    A rate is logged as `lr-<optimizer class>`, of several optimizers of one class the second as
    `lr-Adam-1`, of several parameter groups each as `lr-Adam/pg1` or, where a group has a `"name"`, as
    `lr-Adam/<name>`. The `"name"` of a scheduler's configuration stands in place of `lr-Adam`.

    Args:
        logging_interval: `"step"`, `"epoch"`, or None for the interval of each scheduler (of an optimizer
            without one: `"step"`). By step means each time the Trainer logs, every `log_every_n_steps`.
        log_momentum: Log momentum, or Adam's first beta, as `<name>-momentum`.
        log_weight_decay: Log weight decay as `<name>-weight_decay`.

    Raises:
        ConfigurationError: If the interval is unknown, two schedulers have one name, or the Trainer has no
            logger.

    Example:
        ```python
        from drivetrain import LearningRateMonitor, Trainer

        trainer = Trainer(callbacks=[LearningRateMonitor("step")])
        ```
    """

    saves_within_steps = False

    def __init__(
        self, logging_interval: str | None = None, log_momentum: bool = False, log_weight_decay: bool = False
    ) -> None:
        if logging_interval not in (None, "step", "epoch"):
            raise ConfigurationError(
                f"LearningRateMonitor(logging_interval={logging_interval!r}): give 'step', 'epoch' or None."
                f"{nearest(str(logging_interval), ('step', 'epoch'))}"
            )
        self.logging_interval = logging_interval
        self.log_momentum = log_momentum
        self.log_weight_decay = log_weight_decay
        self.lrs: dict[str, float] = {}
        """The values logged last, by name."""
        self._by_step: list[_Rates] = []
        self._by_epoch: list[_Rates] = []
        self._every_n_steps = 0
        self._next_step = 0

    @property
    def state_key(self) -> str:
        return self.build_state_key(logging_interval=self.logging_interval)

    def on_train_start(self, trainer: Trainer, task: Task) -> None:
        if not trainer.loggers:
            raise ConfigurationError(
                "LearningRateMonitor has nowhere to log to: the Trainer has no logger. Give it one, such as "
                "Trainer(logger='csv'), or take this callback out."
            )
        self._by_step, self._by_epoch = [], []
        for rates in self._find(trainer.optimizers, trainer.lr_scheduler_configs):
            interval = self.logging_interval or rates.interval
            (self._by_epoch if interval == "epoch" else self._by_step).append(rates)
        self._every_n_steps = trainer.log_every_n_steps if self._by_step else 0
        self._next_step = -1

    def on_train_batch_start(self, trainer: Trainer, task: Task, batch: Any, batch_idx: int) -> None:
        if not self._every_n_steps:
            return
        # The step that this batch belongs to: its row in the table is that of the step's other values.
        step = trainer.global_step + 1
        if step % self._every_n_steps == 0 and step != self._next_step:
            self._next_step = step
            self._log(trainer, self._by_step, step)

    def on_train_epoch_start(self, trainer: Trainer, task: Task) -> None:
        self._log(trainer, self._by_epoch, trainer.global_step)

    def _log(self, trainer: Trainer, rates: Sequence[_Rates], step: int) -> None:
        values: dict[str, float] = {}
        for each in rates:
            values.update(each.read(self.log_momentum, self.log_weight_decay))
        if values:
            self.lrs.update(values)
            trainer.log_metrics(values, step)

    def _find(self, optimizers: Sequence[Optimizer], configs: Sequence[Any]) -> list[_Rates]:
        """Name every optimizer, by its scheduler's name or by its class."""
        scheduled = {id(config.scheduler.optimizer): config for config in configs}
        given = Counter(config.name for config in configs if config.name)
        twice = [name for name, count in given.items() if count > 1]
        if twice:
            raise ConfigurationError(
                f"Two learning-rate schedulers have the name {twice[0]!r}. LearningRateMonitor logs under these "
                "names: give each scheduler its own, or none."
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
            found.append(_Rates(name, optimizer, config.interval if config is not None else "step"))
        return found


class _Rates:
    """The rates of one optimizer and the names they are logged under."""

    def __init__(self, name: str, optimizer: Optimizer, interval: str) -> None:
        self.name = name
        self.interval = interval
        self._optimizer = optimizer

    def read(self, momentum: bool, weight_decay: bool) -> dict[str, float]:
        values: dict[str, float] = {}
        groups = self._optimizer.param_groups
        for number, group in enumerate(groups, start=1):
            name = self.name
            if "name" in group:
                name = f"{name}/{group['name']}"
            elif len(groups) > 1:
                name = f"{name}/pg{number}"
            values[name] = float(group["lr"])
            if momentum:
                values[f"{name}-momentum"] = _momentum(group)
            if weight_decay:
                values[f"{name}-weight_decay"] = float(group.get("weight_decay", 0.0))
        return values


def _momentum(group: Mapping[str, Any]) -> float:
    return float(group["betas"][0] if "betas" in group else group.get("momentum", 0.0))
