"""`trainer.callback_metrics` and its like as Lightning's scripts read them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from drivetrain.callbacks.base import Stage
from drivetrain.compat.lightning.pytorch.utilities.parsing import clean_namespace
from drivetrain.trainer.given_hyper_parameters import CLASS_PATH
from drivetrain.trainer.hyper_parameters import without_modules
from drivetrain.trainer.metrics.logged_values import EpochValue, to_numbers
from drivetrain.trainer.metrics.tracker_log import TrackerLog

if TYPE_CHECKING:
    from drivetrain.compat.lightning.pytorch.trainer.trainer import Trainer


class CallbackMetrics(dict[str, Tensor]):
    """The values that callbacks see; what is written into it, they see too.

    Args:
        trainer: The trainer.
        values: The values now.
    """

    def __init__(self, trainer: Trainer, values: Mapping[str, Any]) -> None:
        super().__init__({name: as_tensor(value) for name, value in values.items()})
        self._trainer = trainer

    def __setitem__(self, name: str, value: Any) -> None:
        self._trainer.logged.remember({name: float(value)})
        super().__setitem__(name, as_tensor(value))

    def update(self, *args: Any, **values: Any) -> None:
        """Write several values."""
        for name, value in dict(*args, **values).items():
            self[name] = value


def as_tensor(value: Any) -> Tensor:
    """A value as a scalar of the usual kind of float."""
    if not isinstance(value, Tensor):
        return torch.tensor(float(value))
    return value.to(torch.get_default_dtype()) if value.dtype is torch.float64 else value


def _check_same(task: Any, data: Any) -> None:
    """Refuse a task and a data module that both log a hyper-parameter of one name, with different values."""
    if data is None or not all(each.__dict__.get("_log_hyperparams", True) for each in (task, data)):
        return
    both = [name for name in task.hparams.keys() & data.hparams.keys() if name != CLASS_PATH]
    different = sorted(str(name) for name in both if not _is_equal(task.hparams[name], data.hparams[name]))
    if different:
        raise RuntimeError(
            f"Error while merging hparams: {', '.join(different)} are hyper-parameters of {type(task).__name__} and of "
            f"{type(data).__name__}, with different values. Give one of them another name, or "
            "save_hyperparameters(logger=False)."
        )


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    return one is other or bool(one == other)


class LightningTrackerLog(TrackerLog):
    """Counts optimizer steps from 0 for loggers, as Lightning does; an evaluation step's values come without epoch."""

    _is_evaluation_step = False

    def write_evaluation_step(self) -> None:
        self._is_evaluation_step = True
        try:
            super().write_evaluation_step()
        finally:
            self._is_evaluation_step = False

    def finish_epoch(self, stage: Stage, keep: bool = True) -> list[EpochValue]:
        """Count an epoch's values as written: the hooks of its end, which come before, read them there."""
        results = super().finish_epoch(stage, keep)
        if keep:
            self.written.update(to_numbers({each.epoch_name: each.value for each in results if each.logger}))
        return results

    def begin_run(self, task: Any) -> None:
        data = self.trainer.datamodule
        for owner in (task, data):
            clean_namespace({} if owner is None else owner.hparams)
        _check_same(task, data)
        super().begin_run(task)

    @staticmethod
    def hyper_parameters_of(owner: Any) -> Mapping[str, Any]:
        return without_modules(owner.hparams_initial)

    @staticmethod
    def name_of(result: EpochValue) -> str:
        return result.epoch_name

    def write(self, values: Mapping[str, float], step: int) -> None:
        group = self.trainer.tracker_group
        if not self._is_evaluation_step:
            fits = self.trainer.task_run.stage is Stage.TRAIN
            super().write(values, max(step - 1, 0) if fits else step)
        elif group.writes_here:
            self.written.update(values)
            group.log(values, step)
