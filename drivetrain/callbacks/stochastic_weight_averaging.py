"""Average the weights of the last epochs, at a learning rate of their own."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from drivetrain.callbacks.base import Callback
from drivetrain.callbacks.support.averaged_tensors import AveragedTensors, AvgFn
from drivetrain.callbacks.support.rhythm import RunPoint
from drivetrain.runtime.durations import Duration, Unit, count_of, interval_of
from drivetrain.runtime.errors import ConfigurationError, nearest
from drivetrain.runtime.logging import get_logger

if TYPE_CHECKING:
    from drivetrain.trainer.task import Task
    from drivetrain.trainer.trainer import Trainer

logger = get_logger(__name__)

AVERAGE = "average_model_state"
"""The entry of a checkpoint that holds the average."""

ENDLESS = sys.maxsize
"""How many epochs a run has that was given no number of them."""

_ANNEALING: dict[str, Callable[[float], float]] = {
    "cos": lambda part: (1 - math.cos(math.pi * part)) / 2,
    "linear": lambda part: part,
}


class StochasticWeightAveraging(Callback):
    """Averages the weights of the last epochs, by Izmailov et al. (2018), https://arxiv.org/abs/1803.05407.

    From the first of these epochs on the learning rate goes to `swa_lrs` and stays there, whatever schedulers the task
    has; the weights that each of them begins with are averaged, and are the model's when training ends. Where the model
    has batch norms one more epoch is run, in which no optimizer steps, for their statistics under the average. A run
    without a last epoch (`max_epochs=-1`) has no such epoch: there a model with batch norms keeps the weights that were
    trained last, with a warning, and any other gets the average.

    Args:
        swa_lrs: The learning rate at the end of the annealing: one, or one for each parameter group.
        swa_epoch_start: The first epoch of the average, counted from 1; or such a share of `max_epochs`. As a duration
            `"60 epochs"` is 60 and `"80%"` is 0.8; in another unit, such as `"1M samples"` or `"2 h"`, it is the first
            epoch that begins once so much of the run is done.
        annealing_epochs: Epochs in which the learning rate goes there, also as `"10 epochs"`.
        annealing_strategy: How it goes there: `"cos"` or `"linear"`.
        avg_fn: The new average of a tensor, from the average, the tensor and the number averaged before; the mean of
            all if None.
        device: Where the average is kept; beside the model if None.

    Raises:
        ConfigurationError: If an argument is out of range, the run has no last epoch, the task has not one optimizer or
            steps it by hand, or the strategy keeps weights elsewhere.

    Example:
        ```python
        from drivetrain import StochasticWeightAveraging, Trainer

        trainer = Trainer(max_epochs=100, callbacks=[StochasticWeightAveraging(swa_lrs=1e-2)], logger=False)
        ```
    """

    saves_within_steps = False
    further_weights = AVERAGE

    def __init__(
        self,
        swa_lrs: float | list[float],
        swa_epoch_start: int | float | str | Duration = 0.8,
        annealing_epochs: int | str | Duration = 10,
        annealing_strategy: str = "cos",
        avg_fn: AvgFn | None = None,
        device: torch.device | str | None = torch.device("cpu"),
    ) -> None:
        swa_epoch_start = _start_of(swa_epoch_start)
        annealing: int = count_of(annealing_epochs, "StochasticWeightAveraging.annealing_epochs", Unit.EPOCHS)
        for rate in swa_lrs if isinstance(swa_lrs, Sequence) else [swa_lrs]:
            if isinstance(rate, bool) or not isinstance(rate, (int, float)) or rate <= 0:
                raise ConfigurationError(
                    f"StochasticWeightAveraging(swa_lrs={swa_lrs!r}): the learning rates should be a positive "
                    "float, or a list of positive floats, one for each parameter group.",
                    code="DT-002",
                )
        if annealing_strategy not in _ANNEALING:
            raise ConfigurationError(
                f"StochasticWeightAveraging(annealing_strategy={annealing_strategy!r}): give 'cos' or 'linear'."
                f"{nearest(str(annealing_strategy), _ANNEALING)}",
                code="DT-001",
            )
        if annealing < 0:
            raise ConfigurationError(
                f"StochasticWeightAveraging(annealing_epochs={annealing_epochs}): give 0 or more.", code="DT-002"
            )
        self.swa_lrs, self.swa_epoch_start = swa_lrs, swa_epoch_start
        self.rhythm = swa_epoch_start if isinstance(swa_epoch_start, Duration) else None
        self.annealing_epochs, self.annealing_strategy = annealing, annealing_strategy
        self.avg_fn, self.device = avg_fn, device
        self._begin()

    def _begin(self) -> None:
        self._average: AveragedTensors | None = None
        self._epochs = 0  # as the Trainer was asked for
        self._latest_epoch = -1
        self._initial_lrs: list[float] = []  # when averaging began
        self._schedulers: list[Any] = []  # the task's, while they do not step
        self._momenta: dict[_BatchNorm, float | None] = {}  # of the batch norms, in the epoch for their statistics
        self._has_average = False  # the model: from that epoch on
        self._restored: dict[str, Any] | None = None
        self._restored_count = 0
        self._start: RunPoint | None = None
        self._start_epoch: int | None = None  # once `_start` has come
        self._elapsed = 0.0  # of what `_start` waits for, in the run before

    @property
    def n_averaged(self) -> int:
        """How many epochs' weights are in the average."""
        return 0 if self._average is None else self._average.count

    @property
    def swa_start(self) -> int:
        """The first epoch of the average, from 0; one that is never reached while it is not known."""
        start = self.swa_epoch_start
        if isinstance(start, Duration):
            return ENDLESS if self._start_epoch is None else self._start_epoch
        return max((int(self._epochs * start) if isinstance(start, float) else start) - 1, 0)

    @property
    def swa_end(self) -> int:
        """The last epoch of the average, from 0; a number that is never reached where there is none."""
        return self._epochs - 1

    # the state

    def state_dict(self) -> dict[str, Any]:
        return {
            "n_averaged": self.n_averaged,
            "latest_epoch": self._latest_epoch,
            "initial_lrs": self._initial_lrs,
            "has_average": self._has_average,
            **self._state_of_start(),
        }

    def _state_of_start(self) -> dict[str, Any]:
        if self.rhythm is None:
            return {}
        elapsed = self._elapsed if self._start is None else self._start.elapsed
        return {"start_epoch": self._start_epoch, "elapsed": elapsed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._restored_count = state_dict["n_averaged"]
        self._latest_epoch = state_dict["latest_epoch"]
        self._initial_lrs = list(state_dict["initial_lrs"])
        self._has_average = state_dict["has_average"]
        self._start_epoch, self._elapsed = state_dict.get("start_epoch"), state_dict.get("elapsed", 0.0)

    def on_save_checkpoint(self, trainer: Trainer, task: Task, checkpoint: dict[str, Any]) -> None:
        average = self._average
        if average is not None and average.count and not average.swapped and "optimizer_states" in checkpoint:
            checkpoint[AVERAGE] = average.states()[1]

    def on_load_checkpoint(self, trainer: Trainer, task: Task, checkpoint: dict[str, Any]) -> None:
        self._restored = checkpoint.pop(AVERAGE, None)

    # around the loop

    def setup(self, trainer: Trainer, task: Task, stage: str) -> None:
        if stage != "fit":
            return
        is_endless = trainer.max_epochs < 0
        if trainer.max_epochs == 0 or (is_endless and isinstance(self.swa_epoch_start, float)):
            raise ConfigurationError(
                "StochasticWeightAveraging averages the last epochs, and this run has none. Give it max_epochs, or "
                "swa_epoch_start as a whole number.",
                code="DT-096",
            )
        if not task.automatic_optimization:
            raise ConfigurationError(
                f"StochasticWeightAveraging cannot change when {type(task).__name__} steps its optimizer, which it "
                "does by hand (automatic_optimization = False). Use WeightAveraging, or torch.optim.swa_utils.",
                code="DT-092",
            )
        self._begin()
        self._epochs = ENDLESS if is_endless else trainer.max_epochs

    def on_fit_start(self, trainer: Trainer, task: Task) -> None:
        assert trainer.model is not None
        if len(trainer.optimizers) != 1:
            raise ConfigurationError(
                f"StochasticWeightAveraging takes one optimizer, and {type(task).__name__} has "
                f"{len(trainer.optimizers)}. Use WeightAveraging, which leaves learning rates alone.",
                code="DT-092",
            )
        groups = len(trainer.optimizers[0].param_groups)
        if isinstance(self.swa_lrs, Sequence) and len(self.swa_lrs) != groups:
            raise ConfigurationError(
                f"StochasticWeightAveraging(swa_lrs=...) has {len(self.swa_lrs)} learning rates, and the optimizer "
                f"{groups} parameter group(s). Give as many, or one for all.",
                code="DT-018",
            )
        self._average = AveragedTensors(
            trainer.strategy, trainer.model, use_buffers=False, device=self.device, avg_fn=self.avg_fn
        )
        if _batch_norms(task) and self._epochs != ENDLESS:
            trainer.change_options(max_epochs=self._epochs + 1)

    def on_train_start(self, trainer: Trainer, task: Task) -> None:
        start, name = self.swa_epoch_start, "StochasticWeightAveraging.swa_epoch_start"
        if isinstance(start, Duration):
            self._start = RunPoint(trainer, start, name, self._elapsed, by_epoch=True)

    def on_train_epoch_start(self, trainer: Trainer, task: Task) -> None:
        average, epoch = self._average, trainer.current_epoch
        if self._start is not None and self._start_epoch is None and self._start.has_come():
            self._start_epoch = epoch
        assert average is not None
        average.refresh()
        if self._restored is not None:
            average.load(self._restored, self._restored_count)
            self._restored = None
        if epoch < self.swa_start:
            if self._schedulers:  # a rollback
                trainer.lr_scheduler_configs[:], self._schedulers = self._schedulers, []
            return
        self._set_learning_rates(trainer, epoch)
        if epoch <= self.swa_end:
            if epoch > self._latest_epoch:
                average.update()
                self._latest_epoch = epoch
        else:
            self._begin_statistics(task, average)

    def on_gradients_ready(self, trainer: Trainer, task: Task) -> bool | None:
        return not self._momenta

    def on_train_end(self, trainer: Trainer, task: Task) -> None:
        for norm, momentum in self._momenta.items():
            norm.momentum = momentum
        self._momenta = {}
        average = self._average
        if average is None or not average.count or self._has_average:
            return
        if _batch_norms(task):
            logger.warning(
                "StochasticWeightAveraging: the run ended before the epoch in which batch norms take their statistics "
                "under the average, so the model has the weights that were trained last."
            )
            return
        average.swap()
        self._has_average = True

    def teardown(self, trainer: Trainer, task: Task, stage: str) -> None:
        for norm, momentum in self._momenta.items():
            norm.momentum = momentum
        self._momenta = {}
        if stage == "fit" and self._epochs not in (0, ENDLESS):
            trainer.change_options(max_epochs=self._epochs)

    def _set_learning_rates(self, trainer: Trainer, epoch: int) -> None:
        """Take the place of the task's schedulers."""
        groups = trainer.optimizers[0].param_groups
        if not self._initial_lrs:
            self._initial_lrs = [float(group["lr"]) for group in groups]
        if trainer.lr_scheduler_configs:
            self._schedulers = list(trainer.lr_scheduler_configs)
            trainer.lr_scheduler_configs.clear()
        done = epoch - self.swa_start
        part = min(1.0, done / self.annealing_epochs) if self.annealing_epochs else min(1.0, float(done))
        weight = _ANNEALING[self.annealing_strategy](part)
        last = list(self.swa_lrs) if isinstance(self.swa_lrs, Sequence) else [self.swa_lrs] * len(groups)
        for group, before, after in zip(groups, self._initial_lrs, last, strict=True):
            group["lr"] = after * weight + before * (1 - weight)

    def _begin_statistics(self, task: nn.Module, average: AveragedTensors) -> None:
        """Give the model the average, and reset the statistics of its batch norms."""
        norms = _batch_norms(task)
        if not self._has_average:
            self._has_average = True
            average.swap()
            for norm in norms:
                norm.reset_running_stats()
        self._momenta = {norm: norm.momentum for norm in norms}
        for norm in norms:
            norm.momentum = None  # the mean of all batches


def _batch_norms(task: nn.Module) -> list[_BatchNorm]:
    return [module for module in task.modules() if isinstance(module, _BatchNorm) and module.track_running_stats]


def _start_of(start: Any) -> int | float | Duration:
    """`swa_epoch_start`, checked; epochs and shares of the run as numbers."""
    if isinstance(start, str | Duration):
        read = interval_of(start, "StochasticWeightAveraging.swa_epoch_start")
        if isinstance(read, int):
            return Duration(read, Unit.STEPS)  # a number alone is an epoch
        if read.unit not in (Unit.EPOCHS, Unit.RUN):
            return read
        start = read.amount
    whole = isinstance(start, int) and not isinstance(start, bool) and start >= 1
    if not whole and not (isinstance(start, float) and 0.0 <= start <= 1.0):
        raise ConfigurationError(
            f"StochasticWeightAveraging(swa_epoch_start={start!r}): give a >0 integer or a float between 0 and 1: an "
            "epoch from 1 on (60), a share of all epochs (0.8), or a duration ('1M samples').",
            code="DT-002",
        )
    return start  # type: ignore[no-any-return]
