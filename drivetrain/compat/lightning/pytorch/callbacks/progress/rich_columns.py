"""Columns of `RichProgressBar`."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID
from rich.text import Text


class CustomProgress(Progress):
    """`rich.progress.Progress` that refreshes only on request."""


class CustomBarColumn(BarColumn):
    """Column with the bar, which pulses if the total is unknown."""


class StyledColumn(ProgressColumn):
    """Column with text in one style."""

    def __init__(self, style: Any) -> None:
        self.style = style
        super().__init__()

    def words(self, task: Task) -> str:
        """Return the column's text."""
        raise NotImplementedError

    def render(self, task: Task) -> Text:
        """Return the text in the column's style."""
        return Text(self.words(task), style=self.style)


class BatchesProcessedColumn(StyledColumn):
    """Column with the number of completed batches and the total."""

    def words(self, task: Task) -> str:
        return f"{task.completed:g}/{'--' if task.total is None else format(task.total, 'g')}"


class CustomTimeColumn(StyledColumn):
    """Column with the elapsed and the remaining time."""

    def words(self, task: Task) -> str:
        passed = task.finished_time if task.finished else task.elapsed
        return f"{_clock(passed)} • {_clock(task.time_remaining)}"


class ProcessingSpeedColumn(StyledColumn):
    """Column with the speed in batches per second."""

    def words(self, task: Task) -> str:
        return f"{task.finished_speed or task.speed or 0.0:.2f}it/s"


class MetricsTextColumn(StyledColumn):
    """Column with the metrics of the training row.

    Attributes:
        task_id: Row that shows the metrics. values: Metrics to show.
    """

    def __init__(self, style: Any, delimiter: str, number_format: str) -> None:
        super().__init__(style)
        self.task_id: TaskID | None = None
        self.values: Mapping[str, Any] = {}
        self._delimiter, self._format = delimiter, number_format

    def update(self, metrics: Mapping[str, Any]) -> None:
        """Replace the metrics to show."""
        self.values = metrics

    def words(self, task: Task) -> str:
        if task.id != self.task_id:
            return ""
        return self._delimiter.join(f"{name}: {self._number(value)}" for name, value in self.values.items())

    def _number(self, value: Any) -> str:
        return format(value, self._format) if isinstance(value, float) else str(value)


def _clock(seconds: float | None) -> str:
    return "-:--:--" if seconds is None else str(timedelta(seconds=int(seconds)))
