"""What this process's state was when its last step was finished, while a step or a validation is under way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from drivetrain.callbacks import Callback
from drivetrain.runtime.seeds import RandomState
from drivetrain.trainer.hooks import is_overridden
from drivetrain.trainer.metrics.logged_values import LoggedValues
from drivetrain.trainer.metrics.metric_states import find_metrics, metric_states
from drivetrain.trainer.state.progress import Progress
from drivetrain.trainer.task import Task

if TYPE_CHECKING:
    from drivetrain.trainer.trainer import Trainer

_WITHIN_STEPS = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_gradients_ready",
    "on_before_optimizer_step",
    "on_exception",
)


class Committed:
    """Gives a save the state of the last finished step, also where it is made within the next one or a validation.

    What the open step has drawn, logged, given to metrics and written to buffers is so never saved: a resumed run does
    that step again. The start is marked by the loop. A mark costs next to nothing for logged values, and copies the
    states of the random generators, the metrics and the buffers.

    Args:
        task: The task, whose metrics are found.
        logged: The logged values.
        progress: The counters: a mark holds until they show that the step or the validation is finished.
    """

    def __init__(self, task: nn.Module, logged: LoggedValues, progress: Progress) -> None:
        self._task, self._logged, self._progress = task, logged, progress
        self._metrics = find_metrics(task)
        self._kept_buffers = _saved_buffers(task)
        self._marked: tuple[int, int] | None = None
        self._random: RandomState | None = None
        self._logged_mark: Any = None
        self._metric_states: dict[str, Any] = {}
        self._buffer_values: list[Tensor] = []

    def mark(self) -> None:
        """Remember the present state: a step or a validation begins."""
        progress = self._progress
        self._marked = progress.total_batches, progress.validations
        self._random = RandomState.capture()
        self._logged_mark = self._logged.mark()
        self._metric_states = metric_states(self._metrics)
        self.mark_buffers()

    def mark_buffers(self) -> None:
        """Remember the buffers again, after a callback has exchanged them together with the weights."""
        if self.is_open:
            self._buffer_values = [buffer.detach().clone() for buffer in self._kept_buffers]

    def release(self) -> None:
        """Forget the mark: the present state is that of a finished step."""
        self._marked = self._random = self._logged_mark = None
        self._metric_states, self._buffer_values = {}, []

    @property
    def is_open(self) -> bool:
        """Whether the step or validation that was marked is not finished yet."""
        progress = self._progress
        return self._marked == (progress.total_batches, progress.validations)

    @property
    def random(self) -> RandomState | None:
        """The random state of the last finished step; None where that is the present one."""
        return self._random if self.is_open else None

    @contextmanager
    def buffers_restored(self) -> Iterator[None]:
        """Give the task's buffers, such as batch statistics, the values of the last finished step in the body."""
        if not self.is_open:
            yield
            return
        present = [buffer.detach().clone() for buffer in self._kept_buffers]
        self._fill_buffers(self._buffer_values)
        try:
            yield
        finally:
            self._fill_buffers(present)

    def _fill_buffers(self, values: list[Tensor]) -> None:
        for buffer, value in zip(self._kept_buffers, values, strict=True):
            buffer.data.copy_(value)  # by .data: the backward under way must not take them for changed

    def state_dict(self) -> dict[str, Any]:
        """What this process had logged, and what its metrics had seen."""
        if self.is_open:
            return {"logged": self._logged.state_dict(self._logged_mark), "metrics": self._metric_states}
        return {
            "logged": self._logged.state_dict(),
            "metrics": metric_states(find_metrics(self._task)),
            "finished_metrics": self._logged.finished_metrics(self._task),
        }


def _saved_buffers(task: nn.Module) -> list[Tensor]:
    """The buffers of a task that are part of its state dict."""
    return [
        buffer
        for module in task.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    ]


def saves_within_steps(trainer: Trainer) -> bool:
    """Whether a hook that runs between the start of a step and its end may save a checkpoint.

    Args:
        trainer: The trainer, with its task and callbacks.
    """
    owners: list[tuple[Any, type]] = [(one, Callback) for one in trainer.callbacks if one.saves_within_steps]
    owners.append((trainer.task, Task))
    return any(
        is_overridden(owner, base, name) for owner, base in owners for name in _WITHIN_STEPS if hasattr(base, name)
    )
