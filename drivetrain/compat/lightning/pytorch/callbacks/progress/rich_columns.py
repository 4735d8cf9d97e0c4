"""What a row of `RichProgressBar` is made of."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID
from rich.text import Text


class CustomProgress(Progress):
    """Rich's progress, drawn when it is asked to."""


class CustomBarColumn(BarColumn):
    """The bar itself; it pulses where the end is not known."""


class StyledColumn(ProgressColumn):
    """Text in one style."""

    def __init__(self, style: Any) -> None:
        self.style = style
        super().__init__()

    def words(self, task: Task) -> str:
        """Return the text."""
        raise NotImplementedError

    def render(self, task: Task) -> Text:
        """Return the text in its style."""
        return Text(self.words(task), style=self.style)


class BatchesProcessedColumn(StyledColumn):
    """How many batches are done, of how many."""

    def words(self, task: Task) -> str:
        return f"{task.completed:g}/{'--' if task.total is None else format(task.total, 'g')}"


class CustomTimeColumn(StyledColumn):
    """The time that has passed, and the time that is left."""

    def words(self, task: Task) -> str:
        passed = task.finished_time if task.finished else task.elapsed
        return f"{_clock(passed)} • {_clock(task.time_remaining)}"


class ProcessingSpeedColumn(StyledColumn):
    """Batches per second."""

    def words(self, task: Task) -> str:
        return f"{task.finished_speed or task.speed or 0.0:.2f}it/s"


class MetricsTextColumn(StyledColumn):
    """The values of the row that shows training.

    Attributes:
        task_id: The row.
        values: What it shows.
    """

    def __init__(self, style: Any, delimiter: str, number_format: str) -> None:
        super().__init__(style)
        self.task_id: TaskID | None = None
        self.values: Mapping[str, Any] = {}
        self._delimiter, self._format = delimiter, number_format

    def update(self, metrics: Mapping[str, Any]) -> None:
        """Show other values."""
        self.values = metrics

    def words(self, task: Task) -> str:
        if task.id != self.task_id:
            return ""
        return self._delimiter.join(f"{name}: {self._number(value)}" for name, value in self.values.items())

    def _number(self, value: Any) -> str:
        return format(value, self._format) if isinstance(value, float) else str(value)


def _clock(seconds: float | None) -> str:
    return "-:--:--" if seconds is None else str(timedelta(seconds=int(seconds)))
