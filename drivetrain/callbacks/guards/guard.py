"""What guards have in common: they watch a value of each step, agree about it, and stop, skip or go back."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from drivetrain.callbacks.base import Callback
from drivetrain.callbacks.guards.rollback import check_can_roll_back, newest_good_checkpoint
from drivetrain.callbacks.support.monitored_metric import missing_metric_message
from drivetrain.callbacks.support.rhythm import StepRhythm
from drivetrain.runtime.collectives import gather_object, reduce
from drivetrain.runtime.durations import Duration, interval_of
from drivetrain.runtime.errors import ConfigurationError, DrivetrainError, nearest
from drivetrain.runtime.logging import get_logger
from drivetrain.strategies.precision import overrides

if TYPE_CHECKING:
    from drivetrain.trainer.task import Task
    from drivetrain.trainer.trainer import Trainer

logger = get_logger(__name__)

ACTIONS = ("stop", "skip", "rollback")
LOSS = "loss"


@dataclass
class Watched:
    """What was watched in one step.

    Attributes:
        step: Optimizer steps before it.
        epoch: The epoch.
        batches: The indices of its batches.
        value: What all processes judge together, a scalar on the device.
        shown: This process's own value, for messages.
    """

    step: int
    epoch: int
    batches: tuple[int, ...]
    value: Tensor
    shown: Tensor

    def __str__(self) -> str:
        batches = f"batch {self.batches[0]}" if len(self.batches) == 1 else f"batches {list(self.batches)}"
        return f"step {self.step}, epoch {self.epoch}, {batches}"


class Guard(Callback):
    """Watches a value of each step; all processes judge it alike, and act together.

    Args:
        monitor: `"loss"` for what `training_step` returns, over the batches of a step, or the name of a logged
            metric.
        action: `"stop"` ends the run with an error, `"skip"` leaves the optimizer step out, `"rollback"` returns
            to the newest checkpoint and leaves out the batches of the step from then on.
        max_rollbacks: After so many of them the run ends with an error.
        max_skips: After so many steps in a row that were left out the run ends with an error.
        every_n_steps: Read the values only every so many steps, or in another unit: until then they stay on the device.
    """

    runs_last_at_epoch_end: ClassVar[bool] = True
    guards_values: ClassVar[bool] = True
    saves_within_steps = False

    def __init__(
        self, monitor: str, action: str, max_rollbacks: int, max_skips: int, every_n_steps: int | str | Duration
    ) -> None:
        name = type(self).__name__
        if isinstance(every_n_steps, str | Duration):
            every_n_steps = interval_of(every_n_steps, f"{name}.every_n_steps")
        self.rhythm: Duration | None = every_n_steps if isinstance(every_n_steps, Duration) else None
        self._rhythm: StepRhythm | None = None
        if action not in ACTIONS:
            raise ConfigurationError(
                f"{name}(action={action!r}): give one of {', '.join(map(repr, ACTIONS))}."
                f"{nearest(str(action), ACTIONS)}",
                code="DT-001",
            )
        for key, number, least in (
            ("max_rollbacks", max_rollbacks, 0),
            ("max_skips", max_skips, 0),
            ("every_n_steps", every_n_steps if self.rhythm is None else 1, 1),
        ):
            if not isinstance(number, int) or number < least:
                raise ConfigurationError(f"{name}({key}={number!r}): give {least} or more.", code="DT-002")
        if action == "skip" and every_n_steps != 1:
            raise ConfigurationError(
                f"{name}(action='skip', every_n_steps={every_n_steps}): whether a step is left out must be known "
                "before it is taken, so each one is read. Leave every_n_steps=1, or choose 'stop' or 'rollback'.",
                code="DT-004",
            )
        self.monitor = monitor
        self.action = action
        self.max_rollbacks = max_rollbacks
        self.max_skips = max_skips
        self.every_n_steps = every_n_steps
        self.forget_run()
        self._skips_in_a_row = 0
        self._losses: list[Tensor] = []  # of the step under way, weighed so that their sum is the step's loss
        self._batches: list[int] = []  # of the step under way
        self._watched: list[Watched] = []  # steps that were not judged yet
        self._rescales = False
        self._is_manual = False
        self._is_tripped = False  # what is there now is not worth saving

    def forget_run(self) -> None:
        self.rollbacks = 0
        self.skipped: list[tuple[int, int]] = []  # (epoch, batch index)

    @abstractmethod
    def measure(self, trainer: Trainer, value: Tensor) -> Tensor:
        """Return what is to be judged, from this process's value: a scalar on the device."""

    @abstractmethod
    def judge(self, value: float) -> str | None:
        """Return what is wrong with a value, the mean over all processes, or None."""

    # what is watched

    @property
    def state_key(self) -> str:
        return self.build_state_key(monitor=self.monitor, action=self.action)

    def state_dict(self) -> dict[str, Any]:
        return {"rollbacks": self.rollbacks, "skipped": [list(each) for each in self.skipped]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # Also called by a rollback, to a checkpoint from before it.
        self.rollbacks = max(self.rollbacks, state_dict["rollbacks"])
        saved = [(epoch, batch) for epoch, batch in state_dict["skipped"]]
        self.skipped = list(dict.fromkeys([*saved, *self.skipped]))

    def on_load_checkpoint(self, trainer: Trainer, task: Task, checkpoint: dict[str, Any]) -> None:
        self._forget_step()
        self._watched.clear()
        self._is_tripped = False

    def on_train_start(self, trainer: Trainer, task: Task) -> None:
        name = type(self).__name__
        self._is_manual = not task.automatic_optimization
        if self._is_manual and self.action == "skip":
            raise ConfigurationError(
                f"{name}(action='skip'): {type(task).__name__} steps its optimizers by hand, so no step can be left "
                "out for it. Choose 'stop' or 'rollback', or check the loss in training_step.",
                code="DT-092",
            )
        if self.action == "rollback" and not trainer.fast_dev_run:
            check_can_roll_back(trainer, name)
        self._rescales = overrides(trainer.accelerator.precision, "scale")
        self._forget_step()
        self._watched.clear()
        self._is_tripped = False
        self._skips_in_a_row = 0
        if self.rhythm is not None:
            self._rhythm = StepRhythm(trainer, self.rhythm, f"{name}.every_n_steps")
        trainer.skip_batches(self.skipped)

    def on_train_batch_start(self, trainer: Trainer, task: Task, batch: Any, batch_idx: int) -> None:
        self._batches.append(batch_idx)

    def on_before_backward(self, trainer: Trainer, task: Task, loss: Tensor) -> None:
        if self.monitor == LOSS:
            loss = loss.detach()
            if self._rescales:
                loss = loss / trainer.accelerator.precision.scale(torch.ones_like(loss))
            self._losses.append(loss)

    def on_gradients_ready(self, trainer: Trainer, task: Task) -> bool | None:
        self._watch(trainer, task)
        if self.every_n_steps != 1:
            return None
        # Known before the step, so that no parameter is spoilt whatever is done about it.
        return False if self._poll(trainer) else None

    def on_train_batch_end(self, trainer: Trainer, task: Task, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.progress.batches_in_epoch <= batch_idx:
            return  # within a step
        if self._is_manual and self._batches:
            self._watch(trainer, task)
        self._forget_step()
        if self._rhythm is not None:
            is_due = self._rhythm.is_due(trainer.global_step)
        else:
            is_due = len(self._watched) >= self.every_n_steps  # type: ignore[operator]
        if is_due:
            self._poll(trainer)

    def on_train_epoch_end(self, trainer: Trainer, task: Task) -> None:
        self._poll(trainer)

    def is_state_sound(self, trainer: Trainer, task: Task) -> bool:
        if not self._is_tripped:
            self._poll(trainer)
        return not self._is_tripped

    def _watch(self, trainer: Trainer, task: Task) -> None:
        """Take down the step under way; nothing is read from the device."""
        value = self._value(trainer)
        watched = Watched(
            trainer.global_step, trainer.current_epoch, tuple(self._batches), self.measure(trainer, value), value
        )
        self._watched.append(watched)

    def _value(self, trainer: Trainer) -> Tensor:
        if self.monitor == LOSS:
            if not self._losses:
                return torch.zeros(
                    (), device=trainer.strategy.topology.device
                )  # this process had nothing to learn from
            # An optimizer may ask for the gradients of a step several times.
            losses = self._losses if self._is_manual else self._losses[-len(self._batches) :]
            return losses[0].float() if len(losses) == 1 else torch.stack(losses).float().sum()
        metrics = trainer.callback_metrics
        if self.monitor not in metrics:
            raise ConfigurationError(missing_metric_message(metrics, self.monitor, type(self).__name__), code="DT-089")
        return torch.as_tensor(metrics[self.monitor], dtype=torch.float32, device=trainer.strategy.topology.device)

    def _forget_step(self) -> None:
        self._losses.clear()
        self._batches.clear()

    # what is done about it

    def _poll(self, trainer: Trainer) -> bool:
        """Read what was taken down, on all processes, and act. Returns whether anything was wrong."""
        watched, self._watched = self._watched, []
        if not watched or self._is_tripped:
            return False
        values = torch.stack([one.value for one in watched])
        for one, value in zip(watched, reduce(values, "mean").tolist(), strict=True):
            wrong = self.judge(value)
            if wrong is not None:
                self._act(trainer, one, wrong)
                return True
        self._skips_in_a_row = 0
        return False

    def _act(self, trainer: Trainer, one: Watched, wrong: str) -> None:
        name = type(self).__name__
        shown = gather_object([one.shown.item()])
        on = "" if len(shown) == 1 else f" By rank: {', '.join(f'{rank}: {v:.6g}' for rank, v in enumerate(shown))}."
        message = f"{name}: {wrong} ({one}).{on}"
        if self.action == "skip":
            self._skips_in_a_row += 1
            if self._skips_in_a_row > self.max_skips:
                self._is_tripped = True
                raise DrivetrainError(
                    f"{message} {self.max_skips} steps in a row have been left out before it, so the run ends. Its "
                    "weights are those before the first of them. Resume from a checkpoint with a lower learning rate."
                )
            self.skipped += [(one.epoch, batch) for batch in one.batches]
            logger.warning(f"{message} The step is left out.")
            return
        self._is_tripped = True
        if self.action == "stop":
            raise DrivetrainError(f"{message} The run ends, as action='stop' asks for.")
        if trainer.rollback_requested:
            return  # by another guard, which has counted it
        if self.rollbacks >= self.max_rollbacks:
            raise DrivetrainError(
                f"{message} The run has gone back to a checkpoint {self.rollbacks} times already, and max_rollbacks="
                f"{self.max_rollbacks}. Lower the learning rate, clip gradients, or inspect these batches."
            )
        path = newest_good_checkpoint(trainer)
        if path is None:
            raise DrivetrainError(
                f"{message} There is no checkpoint to go back to yet. Save earlier, such as with "
                "ModelCheckpoint(every_n_train_steps=...)."
            )
        self.rollbacks += 1
        batches = [(one.epoch, batch) for batch in one.batches]
        self.skipped += batches
        logger.warning(
            f"{message} Going back to {path}, without these batches. This is rollback {self.rollbacks} of "
            f"{self.max_rollbacks}."
        )
        trainer.request_rollback(path, batches)
