"""Callbacks that act when the loss or the gradients become NaN, infinite or unusually large."""

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


# Rollback checkpoint


def _savers(trainer: Trainer) -> list[ModelCheckpoint]:
    return [callback for callback in trainer.checkpoint_callbacks if not callback.save_weights_only]


def _newest(savers: list[ModelCheckpoint]) -> str | None:
    known = {saver.newest_model_path for saver in savers} | {saver.last_model_path for saver in savers}
    known.update(path for saver in savers for path in saver.kept_scores)
    found = []
    for path in known - {""}:
        try:
            one = checkpoint.checkpoint_at(path)
            # Checkpoints saved with a finite loss rank before all others, then those with more steps.
            found.append((one.finite_loss, one.step or 0, path))
        except CheckpointError:
            continue  # removed by the user, or damaged
    return max(found)[2] if found else None


# Guards


logger = get_logger(__name__)

ACTIONS = ("stop", "skip", "rollback")
LOSS = "loss"


@dataclass
class Watched:
    step: int  # optimizer steps before this one
    epoch: int
    batches: tuple[int, ...]
    value: Tensor  # judged by all processes together, on the device
    shown: Tensor  # this process's own value, for messages

    def __str__(self) -> str:
        batches = f"batch {self.batches[0]}" if len(self.batches) == 1 else f"batches {list(self.batches)}"
        return f"step {self.step}, epoch {self.epoch}, {batches}"


class Guard(Callback):
    """Base class of callbacks that check a value in every step and react to bad values on all processes together.

    Args:
        monitor: `"loss"` for the value that `training_step` returns, summed over the batches of a step, or the name of
            a logged metric.
        action: `"stop"` ends the run with an error. `"skip"` skips the optimizer step. `"rollback"` returns to the
            newest checkpoint and excludes the batches of the step from then on.
        max_rollbacks: The maximum number of rollbacks. The next one ends the run with an error.
        max_skips: The maximum number of skipped steps in a row. The next one ends the run with an error.
        every_n_steps: The number of steps, or a duration, between checks. Values stay on the device until then.
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
        self.schedule: Duration | None = every_n_steps if isinstance(every_n_steps, Duration) else None
        self._interval: StepInterval | None = None
        if action not in ACTIONS:
            raise ConfigurationError(
                f"{name}(action={action!r}): action must be one of {', '.join(map(repr, ACTIONS))}."
                f"{nearest(str(action), ACTIONS)}",
            )
        for key, number, least in (
            ("max_rollbacks", max_rollbacks, 0),
            ("max_skips", max_skips, 0),
            ("every_n_steps", every_n_steps if self.schedule is None else 1, 1),
        ):
            if not isinstance(number, int) or number < least:
                raise ConfigurationError(f"{name}({key}={number!r}): {key} must be at least {least}.")
        if action == "skip" and every_n_steps != 1:
            raise ConfigurationError(
                f"{name}(action='skip', every_n_steps={every_n_steps}): steps can only be skipped if every step is "
                "checked. Set every_n_steps=1, or use action='stop' or 'rollback'.",
            )
        self.monitor = monitor
        self.action = action
        self.max_rollbacks = max_rollbacks
        self.max_skips = max_skips
        self.every_n_steps = every_n_steps
        self.forget_run()
        self._skips_in_a_row = 0
        self._losses: list[Tensor] = []  # losses of the current step, scaled so that their sum is its loss
        self._batches: list[int] = []  # batch indices of the current step
        self._watched: list[Watched] = []  # recorded steps that have not been judged
        self._rescales = False
        self._is_manual = False
        self._is_tripped = False  # the current state must not be saved

    def forget_run(self) -> None:
        self.rollbacks = 0
        self.skipped: list[tuple[int, int]] = []  # (epoch, batch index)

    @abstractmethod
    def measure(self, trainer: Trainer, value: Tensor) -> Tensor:
        # The average of the returned scalar over all processes is passed to `judge`.
        ...

    @abstractmethod
    def judge(self, value: float) -> str | None:
        # The result is a message if `value` is bad, otherwise None.
        ...

    # hooks

    @property
    def state_key(self) -> str:
        return self.build_state_key(monitor=self.monitor, action=self.action)

    def state_dict(self) -> dict[str, Any]:
        return {"rollbacks": self.rollbacks, "skipped": [list(each) for each in self.skipped]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # A rollback loads an older checkpoint: its counts must not replace the current ones.
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
                f"{name}(action='skip'): {type(task).__name__} steps its optimizers by hand, so no step can be "
                "skipped. Choose 'stop' or 'rollback', or check the loss in training_step.",
            )
        if self.action == "rollback" and not trainer.fast_dev_run and not _savers(trainer):
            raise ConfigurationError(
                f"{name}(action='rollback') needs a ModelCheckpoint that saves more than weights. Add one, "
                "such as ModelCheckpoint(every_n_train_steps=1000), or choose 'stop' or 'skip'.",
            )
        self._rescales = overrides(trainer.accelerator.precision, "scale")
        self._forget_step()
        self._watched.clear()
        self._is_tripped = False
        self._skips_in_a_row = 0
        if self.schedule is not None:
            self._interval = StepInterval(trainer, self.schedule, f"{name}.every_n_steps")
        trainer.skip_batches(self.skipped)

    def on_train_batch_start(self, trainer: Trainer, task: Task, batch: Any, batch_idx: int) -> None:
        self._batches.append(batch_idx)

    def on_before_backward(self, trainer: Trainer, task: Task, loss: Tensor) -> None:
        if self.monitor == LOSS:
            loss = loss.detach()
            if self._rescales:
                # Undo the fp16 loss scale, which changes during training.
                loss = loss / trainer.accelerator.precision.scale(torch.ones_like(loss))
            self._losses.append(loss)

    def on_gradients_ready(self, trainer: Trainer, task: Task) -> bool | None:
        self._watch(trainer, task)
        if self.every_n_steps != 1:
            return None
        # Judge before the step, so that bad gradients never reach the parameters.
        return False if self._poll(trainer) else None

    def on_train_batch_end(self, trainer: Trainer, task: Task, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.progress.batches_in_epoch <= batch_idx:
            return  # the batch does not complete an optimizer step
        if self._is_manual and self._batches:
            self._watch(trainer, task)
        self._forget_step()
        if self._interval is not None:
            is_due = self._interval.is_due(trainer.global_step)
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
        # The value stays on the device: reading it in each step would make the CPU wait.
        value = self._value(trainer)
        watched = Watched(
            trainer.global_step, trainer.current_epoch, tuple(self._batches), self.measure(trainer, value), value
        )
        self._watched.append(watched)

    def _value(self, trainer: Trainer) -> Tensor:
        if self.monitor == LOSS:
            if not self._losses:
                return torch.zeros((), device=trainer.strategy.topology.device)  # this process had no loss in this step
            # An optimizer such as LBFGS calls the closure several times per step: take the last losses.
            losses = self._losses if self._is_manual else self._losses[-len(self._batches) :]
            return losses[0].float() if len(losses) == 1 else torch.stack(losses).float().sum()
        metrics = trainer.callback_metrics
        if self.monitor not in metrics:
            raise ConfigurationError(missing_metric_message(metrics, self.monitor, type(self).__name__))
        value, device = metrics[self.monitor], trainer.strategy.topology.device
        if isinstance(value, Tensor):
            return value.to(device=device, dtype=torch.float32)
        return torch.full((), value, dtype=torch.float32, device=device)  # a copy from the host would wait

    def _forget_step(self) -> None:
        self._losses.clear()
        self._batches.clear()

    # actions

    def _poll(self, trainer: Trainer) -> bool:
        watched, self._watched = self._watched, []
        if not watched or self._is_tripped:
            return False
        # One collective for all recorded steps. All processes then see the same values and react alike.
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
                    f"{message} {self.max_skips} steps in a row have been skipped before this one, so the run ends. "
                    "The weights are those before the first skipped step. Resume from a checkpoint with a lower "
                    "learning rate."
                )
            self.skipped += [(one.epoch, batch) for batch in one.batches]
            logger.warning(f"{message} The step is skipped.")
            return
        self._is_tripped = True
        if self.action == "stop":
            raise DrivetrainError(f"{message} The run ends because of action='stop'.")
        if trainer.rollback_requested:
            return  # another guard has requested and counted this rollback
        if self.rollbacks >= self.max_rollbacks:
            raise DrivetrainError(
                f"{message} The run has rolled back {self.rollbacks} times already, and max_rollbacks="
                f"{self.max_rollbacks}. Lower the learning rate, clip gradients, or inspect these batches."
            )
        # All saved checkpoints are good, since nothing is saved while a guard finds the state unsound.
        savers = _savers(trainer)
        for saver in savers:
            saver.settle()
        path = decide_on_main_process(lambda: _newest(savers))
        if path is None:
            raise DrivetrainError(
                f"{message} There is no checkpoint to roll back to yet. Save earlier, for example with "
                "ModelCheckpoint(every_n_train_steps=...)."
            )
        self.rollbacks += 1
        batches = [(one.epoch, batch) for batch in one.batches]
        self.skipped += batches
        logger.warning(
            f"{message} The run rolls back to {path} and skips these batches. This is rollback {self.rollbacks} of "
            f"{self.max_rollbacks}."
        )
        trainer.request_rollback(path, batches)


class NaNGuard(Guard):
    """Callback that stops the run, skips the step or returns to a checkpoint if the loss or a gradient is not finite.

    If any process has such a value, all processes act together. With `every_n_steps=1`, one number is read from the
    device before each optimizer step, so a bad value never reaches the weights. With larger values nothing is read in
    between, and the weights may be bad when the check runs. Use `"stop"` or `"rollback"` then. While the callback is
    used, no checkpoint with NaN or infinite weights is saved.

    With fp16 mixed precision, the gradient scaler handles gradients that overflow: it skips the step and lowers the
    scale. `check_gradients` then has no effect, but the loss is still checked.

    Cost on a device: seven small kernels per step, and one wait of the host per check. `check_gradients` adds a kernel
    per parameter, fewer on CUDA, and seven small ones.

    Args:
        monitor: `"loss"` for the value that `training_step` returns, or the name of a logged metric.
        action: `"stop"` ends the run with an error that names the step, the batches and the rank. `"skip"` skips the
            optimizer step: parameters, optimizers and schedulers stay unchanged, but running statistics such as those
            of BatchNorm include the batches. `"rollback"` returns to the newest checkpoint and excludes the batches
            from then on.
        max_rollbacks: The maximum number of rollbacks. The next one ends the run with an error.
        check_gradients: Also check the gradients, which costs one pass over them per step. Only in automatic
            optimization.
        every_n_steps: The number of steps between checks, or a duration such as `"1M samples"` or `"1 min"`. It must
            be 1 for `"skip"`.
        max_skips: The maximum number of skipped steps in a row. The next one ends the run with an error.

    Attributes:
        rollbacks: The number of rollbacks so far.
        skipped: A list of the excluded batches, as pairs (epoch, batch index).

    Raises:
        ConfigurationError: If an argument is out of range or does not fit the run.
        DrivetrainError: During the run, if `action` or one of the limits ends it.

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
                f"NaNGuard(check_gradients=True): {type(task).__name__} steps its optimizers by hand, so its gradients "
                "cannot be checked before a step. Set check_gradients=False: the loss is still checked.",
            )

    def measure(self, trainer: Trainer, value: Tensor) -> Tensor:
        finite = torch.isfinite(value)
        # With an fp16 loss scale, overflowing gradients are normal, and the scaler skips the step.
        if self.check_gradients and not self._rescales and trainer.task is not None:
            finite = finite & _are_finite([p.grad for p in trainer.task.parameters() if p.grad is not None], value)
        # 1 for a bad value, so that the mean over processes is above 0 if any process has one.
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
        # Buffers such as attention masks hold infinities on purpose, so only NaN counts for them.
        sound = _are_finite(trained, like) & ~_have_nan(statistics, like)
        if float(reduce(sound.float(), "min")) == 1.0:
            return True
        logger.warning(
            f"NaNGuard: the model has parameters that are not finite after {trainer.global_step} steps, so no "
            "checkpoint is saved."
        )
        return False


def _are_finite(tensors: Sequence[Tensor], like: Tensor) -> Tensor:
    parts = [part for part in map(_local, tensors) if part.numel()]
    # The infinity norm is NaN or infinite if any element is, and needs no boolean copy of the tensor.
    largest = [torch.linalg.vector_norm(part, math.inf) for part in parts]
    if not largest:
        return torch.ones((), dtype=torch.bool, device=like.device)
    return torch.isfinite(torch.stack([each.float().to(like.device) for each in largest])).all()


def _have_nan(tensors: Sequence[Tensor], like: Tensor) -> Tensor:
    found = [torch.isnan(_local(tensor)).any().to(like.device) for tensor in tensors]
    return torch.stack(found).any() if found else torch.zeros((), dtype=torch.bool, device=like.device)


def _local(tensor: Tensor) -> Tensor:
    local = local_part(tensor.detach())
    return local.coalesce().values() if local.is_sparse else local


# Loss spikes


NORMAL_MAD = 0.6745
"""The median absolute deviation of a normal distribution, in standard deviations."""

SMALLEST_SPREAD = 1e-3
"""The smallest spread, as a fraction of the median. Without it, noise around a constant loss would count as spikes."""


class LossSpikeGuard(Guard):
    """Callback that stops the run, skips the step or returns to a checkpoint if the loss is far above recent values.

    The distance is the modified z-score of Iglewicz and Hoaglin (How to Detect and Handle Outliers, ASQC, 1993),
    `0.6745 * (x - median) / MAD`. MAD is the median absolute deviation from the median. Unlike mean and standard
    deviation, neither is affected by a few outliers. Only values above the median count, and spikes are not added to
    the recent values. All processes judge the mean over all of them.

    NaN and infinite values are ignored. Use `NaNGuard` for them.

    Cost on a device: one kernel and one wait of the host per check.

    Args:
        monitor: `"loss"` for the value that `training_step` returns, or the name of a logged metric.
        window: The number of recent values to compare with. Checks begin once half of them have been recorded.
        threshold: The score above which a value is a spike. Iglewicz and Hoaglin suggest 3.5, but losses have longer
            tails than a normal distribution.
        action: `"stop"`, `"skip"` or `"rollback"`, as for `NaNGuard`.
        max_rollbacks: The maximum number of rollbacks. The next one ends the run with an error.
        every_n_steps: The number of steps between checks, or a duration such as `"1M samples"` or `"1 min"`. It must
            be 1 for `"skip"`.
        max_skips: The maximum number of skipped steps in a row. The next one ends the run with an error.

    Attributes:
        rollbacks: The number of rollbacks so far.
        skipped: A list of the excluded batches, as pairs (epoch, batch index).

    Raises:
        ConfigurationError: If an argument is out of range or does not fit the run.
        DrivetrainError: During the run, if `action` or one of the limits ends it.

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
                f"LossSpikeGuard(window={window!r}): window, the number of losses to compare, must be at least 4."
            )
        if not threshold > 0:
            raise ConfigurationError(f"LossSpikeGuard(threshold={threshold!r}): use a positive score, such as 6.")
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
        # Spikes return above, so they do not raise the median for later values.
        self._values.append(value)
        return None

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "values": list(self._values)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._values = deque(state_dict["values"], maxlen=self.window)


def modified_z_score(value: float, values: Any) -> tuple[float, float]:
    """Return the modified z-score of a value among `values`, and their median."""
    import statistics  # imported late: it loads fractions and decimal

    median = statistics.median(values)
    deviation = statistics.median(abs(each - median) for each in values)
    spread = max(deviation / NORMAL_MAD, SMALLEST_SPREAD * abs(median), 1e-12)
    return (value - median) / spread, median
