"""Callbacks that average the weights during training, and use the average for validation and checkpoints."""

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


# Running average


AvgFn = Callable[[Tensor, Tensor, Any], Tensor]
MultiAvgFn = Callable[[Any, Any, Any], None]


class AveragedTensors:
    """Running average of a model's parameters, and optionally of its buffers, such as batch norm statistics.

    Every process averages the tensors that it holds: the whole model, or its shards.
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
        # This also releases copies that a forward pass has gathered.
        found = self._strategy.state.parameters_in_place(self._model).values()
        self._weights = [local_part(each.detach()) for each in found if not each.is_meta]

    @torch.no_grad()
    def update(self) -> None:
        """Add the model's current weights to the running average."""
        live = self._live()
        if not self._average:
            self._average = [each.to(self._device or each.device, copy=True) for each in live]
        elif self._avg_fn is not None and self._multi_avg_fn is None:
            for average, value in zip(self._average, live, strict=True):
                # The function receives the count as a tensor, as in `torch.optim.swa_utils.AveragedModel`. It is filled
                # on the device, because a copy from the host would wait for all queued kernels.
                count = torch.full((), self.count, device=average.device)
                average.copy_(self._avg_fn(average, value.to(average.device), count))
        else:
            self._update_together(live)
        self.count += 1

    @torch.inference_mode(mode=False)  # in the inference mode of a validation, torch cannot detach a shard
    @torch.no_grad()
    def swap(self) -> None:
        if not self._average:
            return
        self.refresh()
        for value, average in zip(self._live(), self._average, strict=True):
            kept = value.to(average.device, copy=True)
            value.copy_(average)
            average.copy_(kept)
        self.swapped = not self.swapped

    def share_buffers(self) -> None:
        """Broadcast rank 0's buffers, such as batch norm statistics."""
        buffers = self._own_buffers()
        if buffers and self._strategy.topology.environment.is_distributed:
            broadcast(buffers)

    def states(self) -> tuple[dict[str, Any], dict[str, Any]]:
        if self.swapped:
            self.swap()
            own, averaged = self._state(), self._swapped_state()
            self.swap()
            return own, averaged
        return self._state(), self._swapped_state()

    @torch.no_grad()
    def load(self, averaged: dict[str, Any], count: int) -> None:
        own = self._live()
        # The model itself loads the average, since this also splits it into shards. Its weights are restored below.
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
        if not self._use_buffers:
            return []
        return [
            local_part(buffer.detach())
            # Looked up each time, since a module may assign a new tensor to its buffer.
            for module in self._strategy.unwrap(self._model).modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and not buffer.is_meta and name not in module._non_persistent_buffers_set
        ]

    def _update_together(self, live: Sequence[Tensor]) -> None:
        # Tensors of one device and dtype are averaged by a few fused operations.
        groups: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
        for average, value in zip(self._average, live, strict=True):
            averages, values = groups.setdefault((average.device, average.dtype), ([], []))
            averages.append(average)
            values.append(value.to(average.device))
        for (device, _), (averages, values) in groups.items():
            if self._multi_avg_fn is not None:
                self._multi_avg_fn(averages, values, torch.full((), self.count, device=device))
            elif averages[0].is_floating_point():
                # avg + (value - avg) / (n + 1) is the mean of n + 1 values.
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
"""The key of a checkpoint for the trained weights. The checkpoint's `state_dict` holds the average."""


class WeightAveraging(Callback):
    """Callback that averages the weights during training, and uses the average for validation and checkpoints.

    After `fit` the model holds the average. Without `avg_fn` and `multi_avg_fn` the average is the mean of all weights
    at the updates. Before the first update, the trained weights are used. A checkpoint holds both: the average as the
    model's state dict, which `test(ckpt_path=...)` and exports use, and the trained weights, from which a resumed run
    continues exactly. Shards are averaged on each process. Strategies whose engine holds the weights (DeepSpeed,
    Megatron) raise an error.

    Cost on a device: one kernel per parameter in a step that updates the average, fewer on CUDA, and no wait of the
    host. Functions of your own cost what they do.

    Args:
        device: The device of the average, such as `"cpu"`. If None, that of the model.
        use_buffers: Also average buffers such as the statistics of batch norms. If False, the model's current buffers
            are used.
        avg_fn: A function from the average of a tensor, its current value and the number of updates so far to the new
            average.
        multi_avg_fn: A function like `avg_fn` that takes lists of tensors and changes the averages in place, such as
            `torch.optim.swa_utils.get_ema_multi_avg_fn()`.

    Raises:
        ConfigurationError: If both functions are given, or if the strategy's engine holds the weights.

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
            raise ConfigurationError(f"{type(self).__name__}(avg_fn=..., multi_avg_fn=...): pass only one of these.")
        self.device, self.use_buffers = device, use_buffers
        self.avg_fn, self.multi_avg_fn = avg_fn, multi_avg_fn
        self._average: AveragedTensors | None = None
        self._latest_step = 0
        self._restored: dict[str, Any] | None = None
        self._restored_count = 0
        self._validating = False

    @property
    def n_averaged(self) -> int:
        """The number of times that this callback has added the model's weights to their running average."""
        return 0 if self._average is None else self._average.count

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Return True if the current weights should be added to the average.

        Override this method for another rule. It is called after every optimizer step and after every epoch. The
        default updates after every step.

        Args:
            step_idx: The index of the finished optimizer step, from 0, or None at the end of an epoch.
            epoch_idx: The index of the finished epoch, from 0, or None after a step.
        """
        return step_idx is not None

    # state

    def state_dict(self) -> dict[str, Any]:
        return {"n_averaged": self.n_averaged, "latest_step": self._latest_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._restored_count = state_dict["n_averaged"]
        self._latest_step = state_dict["latest_step"]

    def on_save_checkpoint(self, trainer: Trainer, task: Task, checkpoint: dict[str, Any]) -> None:
        if self._average is None or not self._average.count:
            return
        own, checkpoint["state_dict"] = self._average.states()
        if "optimizer_states" in checkpoint:  # absent if only weights are saved
            checkpoint[OWN_STATE] = own

    def on_load_checkpoint(self, trainer: Trainer, task: Task, checkpoint: dict[str, Any]) -> None:
        self._restored = None
        if OWN_STATE in checkpoint:
            # Training continues from the trained weights. `on_fit_start` restores the average.
            self._restored, checkpoint["state_dict"] = checkpoint["state_dict"], checkpoint.pop(OWN_STATE)
        else:
            logger.warning(f"{type(self).__name__}: the checkpoint contains no average, so averaging starts again.")

    # hooks

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
        self.on_validation_epoch_end(trainer, task)  # a signal may have ended a validation early
        if self._average is not None and self._average.count:
            self._average.swap()  # later checkpoints still hold both

    def on_exception(self, trainer: Trainer, task: Task, exception: BaseException) -> None:
        self.on_validation_epoch_end(trainer, task)

    def teardown(self, trainer: Trainer, task: Task, stage: str) -> None:
        self.on_validation_epoch_end(trainer, task)

    def _take_restored(self) -> None:
        if self._restored is not None and self._average is not None:
            self._average.load(self._restored, self._restored_count)
            self._restored = None


def _mark_buffers(trainer: Trainer) -> None:
    if trainer.loop is not None:
        # A checkpoint saved during the validation must hold the buffers that match its weights.
        trainer.loop.batches.snapshot.mark_buffers()


class EMAWeightAveraging(WeightAveraging):
    """Callback that keeps an exponential moving average of the weights.

    Each update computes `decay * average + (1 - decay) * weights`.

    Cost on a device: one kernel per parameter in a step that updates the average, fewer on CUDA, and no wait of the
    host.

    Args:
        device: The device of the average, such as `"cpu"`. If None, that of the model.
        use_buffers: Also average buffers. If False, the model's current buffers are used.
        decay: The weight of the previous average in an update, from 0 to 1.
        update_every_n_steps: The number of optimizer steps between updates, or a duration such as `"1M samples"`, `"1
            min"` or `"1%"` of the run. The first averaged step begins the first interval.
        update_starting_at_step: The first step, from 0, that is averaged, or the duration before it, such as `"10%"`
            of the run.
        update_starting_at_epoch: The first epoch, from 0, at whose end the weights are averaged too.

    Raises:
        ConfigurationError: If `decay` or `update_every_n_steps` is out of range, or if the strategy's engine holds the
            weights.

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
            raise ConfigurationError(f"EMAWeightAveraging(decay={decay}): use a number from 0 to 1, such as 0.999.")
        every, start, name = update_every_n_steps, update_starting_at_step, type(self).__name__
        every = interval_of(every, f"{name}.update_every_n_steps")
        if start is not None:
            start = interval_of(start, f"{name}.update_starting_at_step")
        if isinstance(every, int) and every < 1:
            raise ConfigurationError(
                f"EMAWeightAveraging(update_every_n_steps={update_every_n_steps}): use an integer of at least 1.",
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
        self.schedule = tuple(each for each in (every, start) if isinstance(each, Duration)) or None
        self._forget()

    def _forget(self) -> None:
        self._interval: StepInterval | None = None
        self._start: RunPoint | None = None
        self._elapsed = 0.0  # the part of `update_starting_at_step` that passed in the resumed run
        self._asked, self._answer = -1, False
        self._follows_interval = True  # True if the next step begins an interval
        self._has_started = False

    def state_dict(self) -> dict[str, Any]:
        if self.schedule is None:
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
            self._interval = StepInterval(trainer, self.update_every_n_steps, f"{name}.update_every_n_steps")
        if isinstance(start, Duration):
            self._start = RunPoint(trainer, start, f"{name}.update_starting_at_step", self._elapsed)
            self._has_started = self._start.has_come()

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        if step_idx is not None and self.schedule is not None:
            # Decide once per step, since the intervals count their calls.
            if step_idx != self._asked:
                self._asked, self._answer = step_idx, self._decide(step_idx)
            return self._answer
        if step_idx is not None:
            first = self.update_starting_at_step or 0
            return step_idx >= first and step_idx % self.update_every_n_steps == 0  # type: ignore[operator]
        first_epoch = self.update_starting_at_epoch
        return first_epoch is not None and epoch_idx is not None and epoch_idx >= first_epoch

    def _decide(self, step_idx: int) -> bool:
        every, first = self.update_every_n_steps, self.update_starting_at_step
        if isinstance(every, int):
            is_due = step_idx % every == 0
        else:
            # The step after an interval's end is averaged, so the first step begins the first interval.
            is_due = self._follows_interval
            self._follows_interval = self._interval is not None and self._interval.is_due(step_idx + 1)
        if not isinstance(first, Duration):
            return is_due and step_idx >= (first or 0)
        has_started, self._has_started = self._has_started, self._start is not None and self._start.has_come()
        return is_due and has_started


# Stochastic weight averaging


AVERAGE = "average_model_state"
"""The key of a checkpoint for the averaged weights."""

ENDLESS = sys.maxsize
"""The number of epochs of a run without `max_epochs`."""

_ANNEALING: dict[str, Callable[[float], float]] = {
    "cos": lambda part: (1 - math.cos(math.pi * part)) / 2,
    "linear": lambda part: part,
}


class StochasticWeightAveraging(Callback):
    """Callback that averages the weights of the last epochs, known as stochastic weight averaging (SWA).

    The method is that of Izmailov et al. (2018), https://arxiv.org/abs/1803.05407.

    From the first averaged epoch on, the learning rate is annealed to `swa_lrs` and stays there, and the task's
    schedulers do not step. The weights at the start of each of these epochs are averaged, and become the model's
    weights when training ends. If the model has batch norms, one more epoch without optimizer steps computes their
    statistics for the average. A run without a last epoch (`max_epochs=-1`) has no such epoch: a model with batch
    norms then keeps its trained weights, with a warning, and any other model gets the average.

    Args:
        swa_lrs: The learning rate after the annealing: one value, or one for each parameter group.
        swa_epoch_start: The first averaged epoch, counted from 1, or a fraction of `max_epochs`. A duration is also
            allowed: `"60 epochs"` is 60 and `"80%"` is 0.8. In another unit, such as `"1M samples"` or `"2 h"`, it is
            the first epoch that begins after that part of the run.
        annealing_epochs: The number of epochs over which the learning rate is annealed, also as `"10 epochs"`.
        annealing_strategy: The shape of the annealing: `"cos"` or `"linear"`.
        avg_fn: A function from the average of a tensor, its current value and the number of updates so far to the new
            average. If None, the mean.
        device: The device of the average. If None, that of the model.

    Raises:
        ConfigurationError: If an argument is out of range, if the run has no last epoch, if the task does not have
            exactly one optimizer or optimizes manually, or if the strategy's engine holds the weights.

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
                f"StochasticWeightAveraging(annealing_strategy={annealing_strategy!r}): use 'cos' or 'linear'."
                f"{nearest(str(annealing_strategy), _ANNEALING)}",
            )
        if annealing < 0:
            raise ConfigurationError(f"StochasticWeightAveraging(annealing_epochs={annealing_epochs}): use 0 or more.")
        self.swa_lrs, self.swa_epoch_start = swa_lrs, swa_epoch_start
        self.schedule = swa_epoch_start if isinstance(swa_epoch_start, Duration) else None
        self.annealing_epochs, self.annealing_strategy = annealing, annealing_strategy
        self.avg_fn, self.device = avg_fn, device
        self._begin()

    def _begin(self) -> None:
        self._average: AveragedTensors | None = None
        self._epochs = 0  # `max_epochs` before one is added
        self._latest_epoch = -1
        self._initial_lrs: list[float] = []  # at the start of averaging
        self._schedulers: list[Any] = []  # the task's schedulers, while they do not step
        self._momenta: dict[_BatchNorm, float | None] = {}  # momenta to restore after the statistics epoch
        self._has_average = False  # True once the model holds the average
        self._restored: dict[str, Any] | None = None
        self._restored_count = 0
        self._start: RunPoint | None = None
        self._start_epoch: int | None = None  # set when `_start` is reached
        self._elapsed = 0.0  # the part of that duration that passed in the resumed run

    @property
    def n_averaged(self) -> int:
        """The number of epochs whose weights have been added to the average."""
        return 0 if self._average is None else self._average.count

    @property
    def swa_start(self) -> int:
        """Zero-based index of the first epoch that is averaged, or `sys.maxsize` if it is not known yet."""
        start = self.swa_epoch_start
        if isinstance(start, Duration):
            return ENDLESS if self._start_epoch is None else self._start_epoch
        # The argument counts epochs from 1, the result from 0.
        return max((int(self._epochs * start) if isinstance(start, float) else start) - 1, 0)

    @property
    def swa_end(self) -> int:
        """Zero-based index of the last epoch that is averaged.

        In a run without `max_epochs`, it is never reached.
        """
        return self._epochs - 1

    # state

    def state_dict(self) -> dict[str, Any]:
        return {
            "n_averaged": self.n_averaged,
            "latest_epoch": self._latest_epoch,
            "initial_lrs": self._initial_lrs,
            "has_average": self._has_average,
            **self._state_of_start(),
        }

    def _state_of_start(self) -> dict[str, Any]:
        if self.schedule is None:
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

    # hooks

    def setup(self, trainer: Trainer, task: Task, stage: str) -> None:
        if stage != "fit":
            return
        is_endless = trainer.max_epochs < 0
        if trainer.max_epochs == 0 or (is_endless and isinstance(self.swa_epoch_start, float)):
            raise ConfigurationError(
                "StochasticWeightAveraging averages the last epochs, but this run has no last epoch. Set "
                "max_epochs, or set swa_epoch_start to an integer.",
            )
        if not task.automatic_optimization:
            raise ConfigurationError(
                f"StochasticWeightAveraging does not support manual optimization, which {type(task).__name__} uses "
                "(automatic_optimization = False). Use WeightAveraging, or torch.optim.swa_utils.",
            )
        self._begin()
        self._epochs = ENDLESS if is_endless else trainer.max_epochs

    def on_fit_start(self, trainer: Trainer, task: Task) -> None:
        assert trainer.model is not None
        if len(trainer.optimizers) != 1:
            raise ConfigurationError(
                f"StochasticWeightAveraging takes one optimizer, but {type(task).__name__} has "
                f"{len(trainer.optimizers)}. Use WeightAveraging, which does not change learning rates.",
            )
        groups = len(trainer.optimizers[0].param_groups)
        if isinstance(self.swa_lrs, Sequence) and len(self.swa_lrs) != groups:
            raise ConfigurationError(
                f"StochasticWeightAveraging(swa_lrs=...) has {len(self.swa_lrs)} learning rates, but the optimizer has "
                f"{groups} parameter group(s). Pass one rate for each group, or one for all.",
            )
        self._average = AveragedTensors(
            trainer.strategy, trainer.model, use_buffers=False, device=self.device, avg_fn=self.avg_fn
        )
        if _batch_norms(task) and self._epochs != ENDLESS:
            # One more epoch computes the batch norm statistics of the averaged weights.
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
            if self._schedulers:  # after a rollback
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
        # The epoch that computes batch norm statistics must not change the weights: False skips the optimizer step.
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
                "StochasticWeightAveraging: the run ended before the epoch that computes batch norm statistics for "
                "the average, so the model keeps its trained weights."
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
        groups = trainer.optimizers[0].param_groups
        if not self._initial_lrs:
            self._initial_lrs = [float(group["lr"]) for group in groups]
        if trainer.lr_scheduler_configs:
            self._schedulers = list(trainer.lr_scheduler_configs)
            # A scheduler step would overwrite the annealed learning rate.
            trainer.lr_scheduler_configs.clear()
        done = epoch - self.swa_start
        part = min(1.0, done / self.annealing_epochs) if self.annealing_epochs else min(1.0, float(done))
        weight = _ANNEALING[self.annealing_strategy](part)
        last = list(self.swa_lrs) if isinstance(self.swa_lrs, Sequence) else [self.swa_lrs] * len(groups)
        for group, before, after in zip(groups, self._initial_lrs, last, strict=True):
            group["lr"] = after * weight + before * (1 - weight)

    def _begin_statistics(self, task: nn.Module, average: AveragedTensors) -> None:
        norms = _batch_norms(task)
        if not self._has_average:
            self._has_average = True
            average.swap()
            for norm in norms:
                # The epoch that begins recomputes them.
                norm.reset_running_stats()
        self._momenta = {norm: norm.momentum for norm in norms}
        for norm in norms:
            norm.momentum = None  # cumulative mean over all batches


def _batch_norms(task: nn.Module) -> list[_BatchNorm]:
    return [module for module in task.modules() if isinstance(module, _BatchNorm) and module.track_running_stats]


def _start_of(start: Any) -> int | float | Duration:
    if isinstance(start, str | Duration):
        read = interval_of(start, "StochasticWeightAveraging.swa_epoch_start")
        if isinstance(read, int):
            return Duration(read, Unit.STEPS)  # "60 steps" is read as an int, which would mean an epoch
        if read.unit not in (Unit.EPOCHS, Unit.RUN):
            return read
        start = read.amount
    whole = isinstance(start, int) and not isinstance(start, bool) and start >= 1
    if not whole and not (isinstance(start, float) and 0.0 <= start <= 1.0):
        raise ConfigurationError(
            f"StochasticWeightAveraging(swa_epoch_start={start!r}): use a >0 integer or a float between 0 and 1: an "
            "epoch (60) or a fraction of all epochs (0.8). A duration ('1M samples') is also allowed.",
        )
    return start  # type: ignore[no-any-return]
