"""Average the weights while training, and evaluate and save with the average."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import get_ema_multi_avg_fn

from drivetrain.callbacks.base import Callback
from drivetrain.callbacks.step_schedule import RunPoint, StepInterval
from drivetrain.runtime.collectives import broadcast
from drivetrain.runtime.durations import Duration, Unit, count_of, interval_of
from drivetrain.runtime.errors import ConfigurationError, nearest
from drivetrain.runtime.logging import get_logger
from drivetrain.strategies.base import local_part

if TYPE_CHECKING:
    from drivetrain.strategies import Strategy
    from drivetrain.trainer.task import Task
    from drivetrain.trainer.trainer import Trainer


# A running average of what a model computes with, in this process's part of it


AvgFn = Callable[[Tensor, Tensor, Any], Tensor]
MultiAvgFn = Callable[[Any, Any, Any], None]


class AveragedTensors:
    """The average of a model's parameters, and of its saved buffers if wanted, over the moments of `update`.

    Every process averages what it holds: the whole model, or its shards.

    Attributes:
        count: How many moments were averaged.
        swapped: Whether the model has the average, and this the model's own values.
    """

    def __init__(
        self,
        strategy: Strategy,
        model: nn.Module,
        use_buffers: bool = True,
        device: torch.device | str | int | None = None,
        avg_fn: AvgFn | None = None,
        multi_avg_fn: MultiAvgFn | None = None,
    ) -> None:
        self.count = 0
        self.swapped = False
        self._strategy, self._model, self._use_buffers = strategy, model, use_buffers
        self._device = None if device is None else torch.device(device)
        self._avg_fn, self._multi_avg_fn = avg_fn, multi_avg_fn
        self._average: list[Tensor] = []
        self._weights: list[Tensor] = []
        self.refresh()

    def refresh(self) -> None:
        """Find the model's parameters again, and let its next forward see what was written to them."""
        found = self._strategy.state.parameters_in_place(self._model).values()
        self._weights = [local_part(each.detach()) for each in found if not each.is_meta]

    @torch.no_grad()
    def update(self) -> None:
        """Take the model's present values into the average; the first ones become the average."""
        live = self._live()
        if not self._average:
            self._average = [each.to(self._device or each.device, copy=True) for each in live]
        elif self._avg_fn is not None and self._multi_avg_fn is None:
            for average, value in zip(self._average, live, strict=True):
                count = torch.tensor(self.count, device=average.device)
                average.copy_(self._avg_fn(average, value.to(average.device), count))
        else:
            self._update_together(live)
        self.count += 1

    @torch.inference_mode(mode=False)  # that of a validation, in which torch cannot detach a shard
    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the model's values and the average; call it on all processes. Nothing to do before an average."""
        if not self._average:
            return
        self.refresh()
        for value, average in zip(self._live(), self._average, strict=True):
            kept = value.to(average.device, copy=True)
            value.copy_(average)
            average.copy_(kept)
        self.swapped = not self.swapped

    def share_buffers(self) -> None:
        """Give all processes rank 0's values of what is averaged but differs among them: call it on all."""
        buffers = self._own_buffers()
        if buffers and self._strategy.topology.environment.is_distributed:
            broadcast(buffers)

    def states(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return copies of the model's own state and of that with the average in it; call it on all processes."""
        if self.swapped:
            self.swap()
            own, averaged = self._state(), self._swapped_state()
            self.swap()
            return own, averaged
        return self._state(), self._swapped_state()

    @torch.no_grad()
    def load(self, averaged: dict[str, Any], count: int) -> None:
        """Take back an average; call it on all processes."""
        own = self._live()
        kept = [each.clone() for each in own]
        self._strategy.state.load_model(self._model, averaged)
        self.refresh()
        self._average = [each.to(self._device or each.device, copy=True) for each in self._live()]
        for value, before in zip(self._live(), kept, strict=True):
            value.copy_(before)
        self.count = count

    def _live(self) -> list[Tensor]:
        return [*self._weights, *self._own_buffers()]

    def _own_buffers(self) -> list[Tensor]:
        """The saved buffers, looked up each time: a module may put another in place of one."""
        if not self._use_buffers:
            return []
        return [
            local_part(buffer.detach())
            for module in self._strategy.unwrap(self._model).modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and not buffer.is_meta and name not in module._non_persistent_buffers_set
        ]

    def _update_together(self, live: Sequence[Tensor]) -> None:
        groups: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
        for average, value in zip(self._average, live, strict=True):
            averages, values = groups.setdefault((average.device, average.dtype), ([], []))
            averages.append(average)
            values.append(value.to(average.device))
        for (device, _), (averages, values) in groups.items():
            if self._multi_avg_fn is not None:
                self._multi_avg_fn(averages, values, torch.tensor(self.count, device=device))
            elif averages[0].is_floating_point():
                torch._foreach_lerp_(averages, values, 1.0 / (self.count + 1))
            else:
                for average, value in zip(averages, values, strict=True):
                    average.copy_(average + (value - average) / (self.count + 1))

    def _state(self) -> dict[str, Any]:
        state = self._strategy.state.model(self._model)
        return {name: value.detach().clone() if isinstance(value, Tensor) else value for name, value in state.items()}

    def _swapped_state(self) -> dict[str, Any]:
        self.swap()
        state = self._state()
        self.swap()
        return state


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
            raise ConfigurationError(f"{type(self).__name__}(avg_fn=..., multi_avg_fn=...): give one of the two.")
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
        trainer.loop.batches.snapshot.mark_buffers()


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
            raise ConfigurationError(f"EMAWeightAveraging(decay={decay}): give a number from 0 to 1, such as 0.999.")
        every, start, name = update_every_n_steps, update_starting_at_step, type(self).__name__
        every = interval_of(every, f"{name}.update_every_n_steps")
        if start is not None:
            start = interval_of(start, f"{name}.update_starting_at_step")
        if isinstance(every, int) and every < 1:
            raise ConfigurationError(
                f"EMAWeightAveraging(update_every_n_steps={update_every_n_steps}): give a whole number from 1 on.",
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
        self._rhythm: StepInterval | None = None
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
            self._rhythm = StepInterval(trainer, self.update_every_n_steps, f"{name}.update_every_n_steps")
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


# Average the weights of the last epochs, at a learning rate of their own


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
                )
        if annealing_strategy not in _ANNEALING:
            raise ConfigurationError(
                f"StochasticWeightAveraging(annealing_strategy={annealing_strategy!r}): give 'cos' or 'linear'."
                f"{nearest(str(annealing_strategy), _ANNEALING)}",
            )
        if annealing < 0:
            raise ConfigurationError(f"StochasticWeightAveraging(annealing_epochs={annealing_epochs}): give 0 or more.")
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
            )
        if not task.automatic_optimization:
            raise ConfigurationError(
                f"StochasticWeightAveraging cannot change when {type(task).__name__} steps its optimizer, which it "
                "does by hand (automatic_optimization = False). Use WeightAveraging, or torch.optim.swa_utils.",
            )
        self._begin()
        self._epochs = ENDLESS if is_endless else trainer.max_epochs

    def on_fit_start(self, trainer: Trainer, task: Task) -> None:
        assert trainer.model is not None
        if len(trainer.optimizers) != 1:
            raise ConfigurationError(
                f"StochasticWeightAveraging takes one optimizer, and {type(task).__name__} has "
                f"{len(trainer.optimizers)}. Use WeightAveraging, which leaves learning rates alone.",
            )
        groups = len(trainer.optimizers[0].param_groups)
        if isinstance(self.swa_lrs, Sequence) and len(self.swa_lrs) != groups:
            raise ConfigurationError(
                f"StochasticWeightAveraging(swa_lrs=...) has {len(self.swa_lrs)} learning rates, and the optimizer "
                f"{groups} parameter group(s). Give as many, or one for all.",
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
        )
    return start  # type: ignore[no-any-return]
