"""Average the weights while training, and evaluate and save with the average."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn

from drivetrain.callbacks.base import Callback
from drivetrain.callbacks.support.averaged_tensors import AveragedTensors, AvgFn, MultiAvgFn
from drivetrain.callbacks.support.rhythm import RunPoint, StepRhythm
from drivetrain.runtime.durations import Duration, Unit, count_of, interval_of
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.logging import get_logger

if TYPE_CHECKING:
    from drivetrain.trainer.task import Task
    from drivetrain.trainer.trainer import Trainer

logger = get_logger(__name__)

OWN_STATE = "current_model_state"
"""The entry of a checkpoint that holds the weights which are trained; its `state_dict` holds the average."""


class WeightAveraging(Callback):
    """Averages the weights while training. Validation, checkpoints and the model after `fit` have the average.

    Without a function the average is the mean of all weights that were seen. Until the first of them there is no
    average, and nothing is exchanged. A checkpoint holds both: the average as the model's weights, so that
    `test(ckpt_path=...)` and exports use it, and the weights that are trained beside it, so that a resumed run
    continues exactly. Shards are averaged where they are; strategies that keep weights in an engine of their own
    (DeepSpeed, Megatron) are refused.

    Args:
        device: Where the average is kept, such as `"cpu"`; beside the model if None.
        use_buffers: Average buffers as well, such as the statistics of batch norms; else the average has the model's.
        avg_fn: The new average of a tensor, from the average, the tensor and the number averaged before.
        multi_avg_fn: The same for lists of tensors, in place, as `torch.optim.swa_utils.get_ema_multi_avg_fn()` makes.

    Raises:
        ConfigurationError: If both functions are given, or the strategy keeps weights elsewhere.

    Example:
        ```python
        from torch.optim.swa_utils import get_ema_multi_avg_fn

        from drivetrain import Trainer, WeightAveraging


        class AfterWarmup(WeightAveraging):
            def should_update(self, step_idx=None, epoch_idx=None):
                return step_idx is not None and step_idx >= 100


        trainer = Trainer(callbacks=[AfterWarmup(multi_avg_fn=get_ema_multi_avg_fn(0.99))], logger=False)
        ```
    """

    saves_within_steps = False
    further_weights = OWN_STATE

    def __init__(
        self,
        device: torch.device | str | int | None = None,
        use_buffers: bool = True,
        avg_fn: AvgFn | None = None,
        multi_avg_fn: MultiAvgFn | None = None,
    ) -> None:
        if avg_fn is not None and multi_avg_fn is not None:
            raise ConfigurationError(
                f"{type(self).__name__}(avg_fn=..., multi_avg_fn=...): give one of the two.", code="DT-004"
            )
        self.device, self.use_buffers = device, use_buffers
        self.avg_fn, self.multi_avg_fn = avg_fn, multi_avg_fn
        self._average: AveragedTensors | None = None
        self._latest_step = 0
        self._restored: dict[str, Any] | None = None
        self._restored_count = 0
        self._validating = False

    @property
    def n_averaged(self) -> int:
        """How many moments were averaged."""
        return 0 if self._average is None else self._average.count

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Return whether the weights are taken into the average now; asked after every step and every epoch.

        Args:
            step_idx: The optimizer step that was taken, from 0; None at the end of an epoch.
            epoch_idx: The epoch that ended, from 0; None after a step.
        """
        return step_idx is not None

    # the state

    def state_dict(self) -> dict[str, Any]:
        return {"n_averaged": self.n_averaged, "latest_step": self._latest_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._restored_count = state_dict["n_averaged"]
        self._latest_step = state_dict["latest_step"]

    def on_save_checkpoint(self, trainer: Trainer, task: Task, checkpoint: dict[str, Any]) -> None:
        if self._average is None or not self._average.count:
            return
        own, checkpoint["state_dict"] = self._average.states()
        if "optimizer_states" in checkpoint:  # else the weights alone are saved
            checkpoint[OWN_STATE] = own

    def on_load_checkpoint(self, trainer: Trainer, task: Task, checkpoint: dict[str, Any]) -> None:
        self._restored = None
        if OWN_STATE in checkpoint:
            self._restored, checkpoint["state_dict"] = checkpoint["state_dict"], checkpoint.pop(OWN_STATE)
        else:
            logger.warning(f"{type(self).__name__}: the checkpoint holds no average, so averaging begins again.")

    # around the loop

    def setup(self, trainer: Trainer, task: Task, stage: str) -> None:
        if stage == "fit":
            self._average = self._restored = None
            self._latest_step = self._restored_count = 0
            self._validating = False

    def on_fit_start(self, trainer: Trainer, task: Task) -> None:
        assert trainer.model is not None
        self._average = AveragedTensors(
            trainer.strategy, trainer.model, self.use_buffers, self.device, self.avg_fn, self.multi_avg_fn
        )
        self._take_restored()

    def on_train_epoch_start(self, trainer: Trainer, task: Task) -> None:
        if self._restored is not None:  # after a rollback
            self._take_restored()
        elif self._average is not None:
            self._average.refresh()

    def on_train_batch_end(self, trainer: Trainer, task: Task, outputs: Any, batch: Any, batch_idx: int) -> None:
        step = trainer.global_step
        if step > self._latest_step and self._average is not None and self.should_update(step_idx=step - 1):
            self._average.update()
            self._latest_step = step

    def on_train_epoch_end(self, trainer: Trainer, task: Task) -> None:
        if self._average is not None and self.should_update(epoch_idx=trainer.current_epoch):
            self._average.update()

    def on_validation_epoch_start(self, trainer: Trainer, task: Task) -> None:
        if self._average is not None and self._average.count and not self._average.swapped:
            self._validating = True
            self._average.swap()
            self._average.share_buffers()
            _mark_buffers(trainer)

    def on_validation_epoch_end(self, trainer: Trainer, task: Task) -> None:
        if self._validating and self._average is not None:
            self._validating = False
            self._average.swap()
            _mark_buffers(trainer)

    def on_train_end(self, trainer: Trainer, task: Task) -> None:
        self.on_validation_epoch_end(trainer, task)  # if a signal has ended a validation
        if self._average is not None and self._average.count:
            self._average.swap()  # what is saved from now on still has both

    def on_exception(self, trainer: Trainer, task: Task, exception: BaseException) -> None:
        self.on_validation_epoch_end(trainer, task)

    def teardown(self, trainer: Trainer, task: Task, stage: str) -> None:
        self.on_validation_epoch_end(trainer, task)

    def _take_restored(self) -> None:
        if self._restored is not None and self._average is not None:
            self._average.load(self._restored, self._restored_count)
            self._restored = None


def _mark_buffers(trainer: Trainer) -> None:
    """Let a save within the validation describe the buffers that belong to the weights the model has now."""
    if trainer.loop is not None:
        trainer.loop.batches.committed.mark_buffers()


class EMAWeightAveraging(WeightAveraging):
    """Averages the weights exponentially: each update keeps `decay` of the average and adds the rest of the weights.

    Args:
        device: Where the average is kept, such as `"cpu"`; beside the model if None.
        use_buffers: Average buffers as well; else the average has the model's.
        decay: What an update keeps of the average, from 0 to 1.
        update_every_n_steps: Update after every so many optimizer steps, or in another unit: `"1M samples"`, `"1 min"`,
            `"1%"` of the run. The first step that is averaged begins the first interval.
        update_starting_at_step: The first step, from 0, that is averaged; or what comes before it, in another unit:
            `"10%"` of the run.
        update_starting_at_epoch: The first epoch, from 0, at whose end the weights are averaged as well.

    Raises:
        ConfigurationError: If `decay` or `update_every_n_steps` is out of range, or the strategy keeps weights
            elsewhere.

    Example:
        ```python
        from drivetrain import EMAWeightAveraging, Trainer

        trainer = Trainer(callbacks=[EMAWeightAveraging(decay=0.9999, update_starting_at_step=1000)], logger=False)
        ```
    """

    def __init__(
        self,
        device: torch.device | str | int | None = None,
        use_buffers: bool = True,
        decay: float = 0.999,
        update_every_n_steps: int | str | Duration = 1,
        update_starting_at_step: int | str | Duration | None = None,
        update_starting_at_epoch: int | str | Duration | None = None,
    ) -> None:
        if not 0.0 <= decay <= 1.0:
            raise ConfigurationError(
                f"EMAWeightAveraging(decay={decay}): give a number from 0 to 1, such as 0.999.", code="DT-002"
            )
        every, start, name = update_every_n_steps, update_starting_at_step, type(self).__name__
        every = interval_of(every, f"{name}.update_every_n_steps")
        if start is not None:
            start = interval_of(start, f"{name}.update_starting_at_step")
        if isinstance(every, int) and every < 1:
            raise ConfigurationError(
                f"EMAWeightAveraging(update_every_n_steps={update_every_n_steps}): give a whole number from 1 on.",
                code="DT-002",
            )
        super().__init__(device, use_buffers, multi_avg_fn=get_ema_multi_avg_fn(decay))  # type: ignore[no-untyped-call]
        self.decay = decay
        self.update_every_n_steps = every
        self.update_starting_at_step = start
        self.update_starting_at_epoch = count_of(
            update_starting_at_epoch,
            f"{name}.update_starting_at_epoch",
            Unit.EPOCHS,
            " update_starting_at_step takes the other units.",
        )
        self.rhythm = tuple(each for each in (every, start) if isinstance(each, Duration)) or None
        self._forget()

    def _forget(self) -> None:
        self._rhythm: StepRhythm | None = None
        self._start: RunPoint | None = None
        self._elapsed = 0.0  # of what `_start` waits for, in the run before
        self._asked, self._answer = -1, False
        self._follows_interval = True  # whether the next step begins an interval
        self._has_started = False

    def state_dict(self) -> dict[str, Any]:
        if self.rhythm is None:
            return super().state_dict()
        elapsed = self._elapsed if self._start is None else self._start.elapsed
        own = {"follows_interval": self._follows_interval, "elapsed": elapsed, "asked": self._asked}
        return {**super().state_dict(), **own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._follows_interval = state_dict.get("follows_interval", True)
        self._elapsed, self._asked = state_dict.get("elapsed", 0.0), state_dict.get("asked", -1)
        self._answer = False

    def setup(self, trainer: Trainer, task: Task, stage: str) -> None:
        super().setup(trainer, task, stage)
        if stage == "fit":
            self._forget()

    def on_train_start(self, trainer: Trainer, task: Task) -> None:
        name, start = type(self).__name__, self.update_starting_at_step
        if isinstance(self.update_every_n_steps, Duration):
            self._rhythm = StepRhythm(trainer, self.update_every_n_steps, f"{name}.update_every_n_steps")
        if isinstance(start, Duration):
            self._start = RunPoint(trainer, start, f"{name}.update_starting_at_step", self._elapsed)
            self._has_started = self._start.has_come()

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        if step_idx is not None and self.rhythm is not None:
            if step_idx != self._asked:
                self._asked, self._answer = step_idx, self._decide(step_idx)
            return self._answer
        if step_idx is not None:
            first = self.update_starting_at_step or 0
            return step_idx >= first and step_idx % self.update_every_n_steps == 0  # type: ignore[operator]
        first_epoch = self.update_starting_at_epoch
        return first_epoch is not None and epoch_idx is not None and epoch_idx >= first_epoch

    def _decide(self, step_idx: int) -> bool:
        """Whether a step is averaged where something is not counted in steps; asked once for each."""
        every, first = self.update_every_n_steps, self.update_starting_at_step
        if isinstance(every, int):
            is_due = step_idx % every == 0
        else:
            is_due = self._follows_interval
            self._follows_interval = self._rhythm is not None and self._rhythm.is_due(step_idx + 1)
        if not isinstance(first, Duration):
            return is_due and step_idx >= (first or 0)
        has_started, self._has_started = self._has_started, self._start is not None and self._start.has_come()
        return is_due and has_started
