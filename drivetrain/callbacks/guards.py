"""Act when the loss or the gradients are no longer finite."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from drivetrain import checkpoint
from drivetrain.callbacks.base import Callback
from drivetrain.callbacks.model_checkpoint import ModelCheckpoint
from drivetrain.callbacks.step_schedule import StepInterval, decide_on_main_process, missing_metric_message
from drivetrain.runtime.collectives import gather_object, reduce
from drivetrain.runtime.durations import Duration, interval_of
from drivetrain.runtime.errors import CheckpointError, ConfigurationError, DrivetrainError, nearest
from drivetrain.runtime.logging import get_logger
from drivetrain.strategies.base import local_part
from drivetrain.strategies.precision import overrides

if TYPE_CHECKING:
    from drivetrain.trainer.task import Task
    from drivetrain.trainer.trainer import Trainer


# The checkpoint that a run goes back to


def check_can_roll_back(trainer: Trainer, owner: str) -> None:
    """Refuse a run that saves nothing it could go back to."""
    if not _savers(trainer):
        raise ConfigurationError(
            f"{owner}(action='rollback') needs a ModelCheckpoint that saves more than weights, to go back to. Add one, "
            "such as ModelCheckpoint(every_n_train_steps=1000), or choose 'stop' or 'skip'.",
        )


def newest_good_checkpoint(trainer: Trainer) -> str | None:
    """The newest checkpoint of this run that a run can resume from, or None; called by all processes.

    All that the run has saved are good: nothing is saved while a callback finds the state unsound.
    """
    savers = _savers(trainer)
    for saver in savers:
        saver.settle()
    return decide_on_main_process(lambda: _newest(savers))


def _savers(trainer: Trainer) -> list[ModelCheckpoint]:
    return [callback for callback in trainer.checkpoint_callbacks if not callback.save_weights_only]


def _newest(savers: list[ModelCheckpoint]) -> str | None:
    known = {saver.newest_model_path for saver in savers} | {saver.last_model_path for saver in savers}
    known.update(path for saver in savers for path in saver.kept_scores)
    found = []
    for path in known - {""}:
        try:
            one = checkpoint.checkpoint_at(path)
            found.append((one.finite_loss, one.step or 0, path))
        except CheckpointError:
            continue  # removed by hand, or damaged: another one will do
    return max(found)[2] if found else None


# What guards have in common: they watch a value of each step, agree about it, and stop, skip or go back


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
        self._rhythm: StepInterval | None = None
        if action not in ACTIONS:
            raise ConfigurationError(
                f"{name}(action={action!r}): give one of {', '.join(map(repr, ACTIONS))}."
                f"{nearest(str(action), ACTIONS)}",
            )
        for key, number, least in (
            ("max_rollbacks", max_rollbacks, 0),
            ("max_skips", max_skips, 0),
            ("every_n_steps", every_n_steps if self.rhythm is None else 1, 1),
        ):
            if not isinstance(number, int) or number < least:
                raise ConfigurationError(f"{name}({key}={number!r}): give {least} or more.")
        if action == "skip" and every_n_steps != 1:
            raise ConfigurationError(
                f"{name}(action='skip', every_n_steps={every_n_steps}): whether a step is left out must be known "
                "before it is taken, so each one is read. Leave every_n_steps=1, or choose 'stop' or 'rollback'.",
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
            )
        if self.action == "rollback" and not trainer.fast_dev_run:
            check_can_roll_back(trainer, name)
        self._rescales = overrides(trainer.accelerator.precision, "scale")
        self._forget_step()
        self._watched.clear()
        self._is_tripped = False
        self._skips_in_a_row = 0
        if self.rhythm is not None:
            self._rhythm = StepInterval(trainer, self.rhythm, f"{name}.every_n_steps")
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
            raise ConfigurationError(missing_metric_message(metrics, self.monitor, type(self).__name__))
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


class NaNGuard(Guard):
    """Stops, skips or goes back when the loss or a gradient is infinite or NaN.

    All processes act together, whichever of them met it. With `every_n_steps=1` one number is read from the device
    in each step, before the optimizers step, so the weights are never spoilt. With `every_n_steps=100` nothing
    is read in between: the weights may be spoilt by the time it is seen, and `"stop"` or `"rollback"` deals
    with that. No checkpoint with weights that are not finite is saved while this guard is there.

    Under a precision that scales the loss (fp16), gradients that overflow are the scaler's business, which leaves
    the step out and lowers the scale: `check_gradients` then does nothing, the loss is still watched.

    Args:
        monitor: `"loss"` for what `training_step` returns, or the name of a metric that it logs.
        action: `"stop"` ends the run with an error that names the step, the batches and the rank. `"skip"` leaves
            the optimizer step out: parameters, optimizers and schedulers stay as they are (statistics that the
            forward updates, such as those of BatchNorm, have seen the batches). `"rollback"` returns to the newest
            checkpoint and leaves the batches out from then on.
        max_rollbacks: After so many of them the run ends with an error.
        check_gradients: Watch the gradients as well: one pass over them in each step. Automatic optimization only.
        every_n_steps: Read what was watched every so many steps, or in another unit: `"1M samples"`, `"1 min"`; 1 for
            `"skip"`.
        max_skips: After so many steps in a row that were left out the run ends with an error.

    Attributes:
        rollbacks: How often the run went back.
        skipped: The batches that were left out: (epoch, index in the epoch).

    Raises:
        ConfigurationError: If an argument is out of range, or cannot go with the run.
        DrivetrainError: During the run, by `action`.

    Example:
        ```python
        from drivetrain import ModelCheckpoint, NaNGuard, Trainer

        trainer = Trainer(callbacks=[NaNGuard(action="rollback"), ModelCheckpoint(every_n_train_steps=1000)])
        ```
    """

    def __init__(
        self,
        monitor: str = "loss",
        action: str = "stop",
        max_rollbacks: int = 3,
        check_gradients: bool = False,
        every_n_steps: int | str | Duration = 1,
        max_skips: int = 20,
    ) -> None:
        super().__init__(monitor, action, max_rollbacks, max_skips, every_n_steps)
        self.check_gradients = check_gradients

    def on_train_start(self, trainer: Trainer, task: Task) -> None:
        super().on_train_start(trainer, task)
        if self.check_gradients and self._is_manual:
            raise ConfigurationError(
                f"NaNGuard(check_gradients=True): {type(task).__name__} steps its optimizers by hand, so there is no "
                "moment to look at its gradients. Leave it False: the loss is watched.",
            )

    def measure(self, trainer: Trainer, value: Tensor) -> Tensor:
        finite = torch.isfinite(value)
        if self.check_gradients and not self._rescales and trainer.task is not None:
            finite = finite & _are_finite([p.grad for p in trainer.task.parameters() if p.grad is not None], value)
        return 1.0 - finite.float()

    def judge(self, value: float) -> str | None:
        if value == 0.0:
            return None
        what = "the loss" if self.monitor == "loss" else self.monitor
        return f"{what} or a gradient is not finite" if self.check_gradients else f"{what} is not finite"

    def is_state_sound(self, trainer: Trainer, task: Task) -> bool:
        if not super().is_state_sound(trainer, task):
            return False
        like = torch.zeros((), device=trainer.strategy.topology.device)
        trained = [parameter for parameter in task.parameters() if parameter.requires_grad]
        statistics = [buffer for buffer in task.buffers() if buffer.is_floating_point()]
        # A buffer may hold infinities by intent, as attention masks do; NaN never is.
        sound = _are_finite(trained, like) & ~_have_nan(statistics, like)
        if float(reduce(sound.float(), "min")) == 1.0:
            return True
        logger.warning(
            f"NaNGuard: the model has parameters that are not finite after {trainer.global_step} steps, so nothing is "
            "saved."
        )
        return False


def _are_finite(tensors: Sequence[Tensor], like: Tensor) -> Tensor:
    """Whether this process's parts of tensors are finite, as a scalar on the device of `like`; nothing is read."""
    parts = [part for part in map(_local, tensors) if part.numel()]
    largest = [torch.linalg.vector_norm(part, math.inf) for part in parts]
    if not largest:
        return torch.ones((), dtype=torch.bool, device=like.device)
    return torch.isfinite(torch.stack([each.float().to(like.device) for each in largest])).all()


def _have_nan(tensors: Sequence[Tensor], like: Tensor) -> Tensor:
    found = [torch.isnan(_local(tensor)).any().to(like.device) for tensor in tensors]
    return torch.stack(found).any() if found else torch.zeros((), dtype=torch.bool, device=like.device)


def _local(tensor: Tensor) -> Tensor:
    """Return this process's part of a tensor that may be sharded."""
    local = local_part(tensor.detach())
    return local.coalesce().values() if local.is_sparse else local


# Act when the loss jumps far above what it was


NORMAL_MAD = 0.6745
"""The median absolute deviation of a normal distribution, in standard deviations."""

SMALLEST_SPREAD = 1e-3
"""The least spread, as a share of the median: where a loss stands still, noise is no spike."""


class LossSpikeGuard(Guard):
    """Stops, skips or goes back when the loss is far above its last values.

    How far is measured by the modified z-score of Iglewicz and Hoaglin (How to Detect and Handle Outliers, ASQC, 1993),
    `0.6745 * (x - median) / MAD`, where MAD is the median absolute deviation from the median. Neither is moved by
    a few outliers, as mean and standard deviation would be. Only values above the median count, and spikes do not
    enter the window. All processes judge the mean over all of them.

    Values that are not finite are left to `NaNGuard`.

    Args:
        monitor: `"loss"` for what `training_step` returns, or the name of a metric that it logs.
        window: How many of the last values to compare with. Nothing is judged before half of them are there.
        threshold: The score from which on a value is a spike. The book calls 3.5 an outlier; losses have longer
            tails.
        action: `"stop"`, `"skip"` or `"rollback"`, see `NaNGuard`.
        max_rollbacks: After so many of them the run ends with an error.
        every_n_steps: Read the values every so many steps, or in another unit: `"1M samples"`, `"1 min"`; 1 for
            `"skip"`.
        max_skips: After so many steps in a row that were left out the run ends with an error.

    Attributes:
        rollbacks: How often the run went back.
        skipped: The batches that were left out: (epoch, index in the epoch).

    Raises:
        ConfigurationError: If an argument is out of range, or cannot go with the run.
        DrivetrainError: During the run, by `action`.

    Example:
        ```python
        from drivetrain import LossSpikeGuard, Trainer

        trainer = Trainer(callbacks=[LossSpikeGuard(window=200, action="skip")])
        ```
    """

    def __init__(
        self,
        monitor: str = "loss",
        window: int = 100,
        threshold: float = 6.0,
        action: str = "stop",
        max_rollbacks: int = 3,
        every_n_steps: int | str | Duration = 1,
        max_skips: int = 20,
    ) -> None:
        self.window = window
        super().__init__(monitor, action, max_rollbacks, max_skips, every_n_steps)
        if not isinstance(window, int) or window < 4:
            raise ConfigurationError(
                f"LossSpikeGuard(window={window!r}): give how many values to compare with, 4 or more."
            )
        if not threshold > 0:
            raise ConfigurationError(f"LossSpikeGuard(threshold={threshold!r}): give a score above 0, such as 6.")
        self.threshold = threshold

    def forget_run(self) -> None:
        super().forget_run()
        self._values: deque[float] = deque(maxlen=self.window)

    def measure(self, trainer: Trainer, value: Tensor) -> Tensor:
        return value

    def judge(self, value: float) -> str | None:
        if not math.isfinite(value):
            return None
        if len(self._values) >= self.window // 2:
            score, median = modified_z_score(value, self._values)
            if score > self.threshold:
                what = "the loss" if self.monitor == "loss" else self.monitor
                return f"{what} is {value:.6g}, {score:.1f} robust deviations above the median {median:.6g}"
        self._values.append(value)
        return None

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "values": list(self._values)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._values = deque(state_dict["values"], maxlen=self.window)


def modified_z_score(value: float, values: Any) -> tuple[float, float]:
    """Return the modified z-score of a value among others, and their median (Iglewicz and Hoaglin, 1993)."""
    import statistics  # here: it imports fractions and decimals, which no other part needs

    median = statistics.median(values)
    deviation = statistics.median(abs(each - median) for each in values)
    spread = max(deviation / NORMAL_MAD, SMALLEST_SPREAD * abs(median), 1e-12)
    return (value - median) / spread, median
