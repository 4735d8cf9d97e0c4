"""Show how far a run is, with rich."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar, TextIO

from drivetrain.callbacks.base import Callback
from drivetrain.callbacks.model_summary import ModelSummary, shown_columns, total_lines
from drivetrain.callbacks.progress_bar import Display, LineDisplay, Stage, TQDMProgressBar, listed
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.terminal import Lenient, print_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress


# The package rich, which is installed on wish


def require_rich(owner: str) -> None:
    """Import rich, which draws a random number as it is imported: Python's generator is put back to where it was."""
    if find_spec("rich") is None:
        raise ConfigurationError(f'{owner} needs rich, which is not installed: pip install "drivetrain[rich]".')
    state = random.getstate()
    import_module("rich.style")
    random.setstate(state)


def make_console(**options: Any) -> Console:
    """Return rich's console for the standard output or error, which loses what cannot be written instead of raising."""
    from rich.console import Console

    return Console(**{"file": Lenient(sys.stderr if options.get("stderr") else sys.stdout), **options})


# Print what a task is made of, with rich


class RichModelSummary(ModelSummary):
    """Prints `ModelSummary`'s table with rich, in colours where the terminal has them.

    Args:
        max_depth: How deep to look: 1 for the task's own modules; -1 for all, 0 for the totals only.
        **summarize_kwargs: Arguments of `rich.table.Table`, such as `header_style`.

    Raises:
        ConfigurationError: If rich is not installed, or `max_depth` is no whole number of at least -1.

    Example:
        ```python
        from drivetrain import RichModelSummary, Trainer

        trainer = Trainer(callbacks=[RichModelSummary(max_depth=2)], logger=False)
        ```
    """

    def __init__(self, max_depth: int = 1, **summarize_kwargs: Any) -> None:
        require_rich("RichModelSummary")
        super().__init__(max_depth, **summarize_kwargs)

    @staticmethod
    def summarize(
        summary_data: Any,
        total_parameters: Any,
        trainable_parameters: Any,
        model_size: Any,
        total_training_modes: Any,
        total_flops: Any = 0,
        **summarize_kwargs: Any,
    ) -> None:
        from rich.table import Table
        from rich.text import Text

        console = make_console()
        numbers, *_ = summary_data
        if numbers[1]:
            table = Table(**{"header_style": "bold magenta", **summarize_kwargs})
            shown = shown_columns(summary_data)
            table.add_column("", style="dim")
            for title, _ in shown:
                is_count = title in ("Params", "FLOPs")
                style = {"justify": "right", "style": "cyan"} if is_count else {"no_wrap": title == "Name"}
                table.add_column(title.lower(), **style)
            for number, *row in zip(numbers[1], *(cells for _, cells in shown), strict=True):
                table.add_row(number, *(Text(cell) for cell in row))
            console.print(table)
        totals = (total_parameters, trainable_parameters, model_size, total_training_modes, total_flops)
        for line in total_lines(*totals):
            console.print(Text(line))


@dataclass
class RichProgressBarTheme:
    """Styles of the parts of a `RichProgressBar`, in rich's words.

    Attributes:
        description: The title.
        progress_bar: The bar.
        progress_bar_finished: A bar that has reached its end.
        progress_bar_pulse: A bar without a known end.
        batch_progress: How many batches are done.
        time: The time that has passed and the time that is left.
        processing_speed: Batches per second.
        metrics: The logged values.
        metrics_text_delimiter: What stands between two of them.
        metrics_format: The format of each; the bar's own if empty.
    """

    description: str = ""
    progress_bar: str = "#6206E0"
    progress_bar_finished: str = "#6206E0"
    progress_bar_pulse: str = "#6206E0"
    batch_progress: str = ""
    time: str = "dim"
    processing_speed: str = "dim underline"
    metrics: str = "italic"
    metrics_text_delimiter: str = " "
    metrics_format: str = ".3f"


class RichProgressBar(TQDMProgressBar):
    """Shows epoch, batches, speed and the values logged with `prog_bar=True` by rich, on the main process.

    Where the output is no terminal it prints a line for each epoch, as `TQDMProgressBar` does. The Trainer's own model
    summary is then a `RichModelSummary`.

    Args:
        refresh_rate: Redraw at most so often a second, and no more than ten times; 0 turns the bar off.
        leave: Leave the bar of each epoch on the screen and begin a new one.
        theme: The styles.
        console_kwargs: Arguments of `rich.console.Console`.

    Raises:
        ConfigurationError: If rich is not installed, or the rate is negative.

    Example:
        ```python
        from drivetrain import RichProgressBar, Trainer

        trainer = Trainer(callbacks=[RichProgressBar(leave=True)], logger=False)
        ```
    """

    summary_type: ClassVar[type[Callback]] = RichModelSummary

    def __init__(
        self,
        refresh_rate: int = 100,
        leave: bool = False,
        theme: RichProgressBarTheme = RichProgressBarTheme(),  # noqa: B008
        console_kwargs: dict[str, Any] | None = None,
    ) -> None:
        require_rich("RichProgressBar")
        super().__init__(
            refresh_rate, leave=leave, refresh_seconds=max(0.1, 1 / refresh_rate if refresh_rate > 0 else 0)
        )
        self._batches_between = 1
        self.theme = theme
        self.console_kwargs = dict(console_kwargs or {})

    def _make_display(self) -> Display:
        console = make_console(**self.console_kwargs)
        if not (console.is_terminal or console.is_jupyter):
            return LineDisplay()
        return RichDisplay(console, self.theme, self.refresh_seconds)


class _Row:
    """A bar on the screen. The clock of rich counts by itself, so what is left out of a stage's time is not known.

    Attributes:
        number: Rich's number of it.
        start_t: Written where a stage's time is left out.
        last_print_t: The same.
    """

    def __init__(self, number: Any) -> None:
        self.number = number
        self.start_t = self.last_print_t = 0.0


class RichDisplay:
    """Bars drawn by rich."""

    def __init__(self, console: Console, theme: RichProgressBarTheme, refresh_seconds: float) -> None:
        self.refresh_seconds = refresh_seconds
        self._console, self._theme = console, theme
        self._progress: Progress | None = None
        self._open = 0

    def open(self, stage: Stage) -> None:
        if self._progress is None:
            self._progress = self._make()
            self._progress.start()
        if stage.bar is None:
            self._open += 1
            stage.bar = _Row(
                self._progress.add_task(stage.title, total=stage.total, completed=stage.before, speed="", values="")
            )
        else:
            self._progress.reset(
                stage.bar.number,
                description=stage.title,
                total=stage.total,
                completed=stage.before,
                speed="",
                values="",
            )
        self._progress.refresh()

    def draw(self, stage: Stage, values: Mapping[str, float]) -> None:
        if self._progress is None:
            return
        elapsed = stage.elapsed
        speed = f"{stage.rate:.2f} it/s" if elapsed > 0 else ""
        speed = ", ".join([*filter(None, [speed]), *stage.left_in_all])
        self._progress.update(stage.bar.number, completed=stage.all_done, speed=speed, values=self._shown(values))
        self._progress.refresh()

    def finish(self, stage: Stage, values: Mapping[str, float]) -> None:
        if not stage.passing:
            self.draw(stage, values)

    def close(self, stage: Stage) -> None:
        if stage.bar is None or self._progress is None:
            return
        if stage.passing:
            self._progress.remove_task(stage.bar.number)
        else:
            self._progress.stop_task(stage.bar.number)
        stage.bar = None
        self._open -= 1
        if not self._open:
            self._progress.stop()
            self._progress = None

    def write(self, text: str, file: TextIO | None = None) -> None:
        if file is None:
            self._console.print(text, end="", markup=False, highlight=False)
        else:
            print_text(text, end="", file=file)

    def _shown(self, values: Mapping[str, float]) -> str:
        theme = self._theme
        if not theme.metrics_format:
            return listed(values)
        shown = (f"{key}: {value:{theme.metrics_format}}" for key, value in values.items())
        return theme.metrics_text_delimiter.join(shown)

    def _make(self) -> Progress:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
        from rich.progress import TimeRemainingColumn as Remaining
        from rich.style import Style

        theme = self._theme
        columns = (
            TextColumn("{task.description}", style=theme.description or "none", markup=False),
            BarColumn(
                complete_style=theme.progress_bar,
                finished_style=theme.progress_bar_finished,
                pulse_style=theme.progress_bar_pulse,
            ),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            Remaining(),
            TextColumn("{task.fields[speed]}", style=Style.parse(theme.processing_speed), markup=False),
            TextColumn("{task.fields[values]}", style=Style.parse(theme.metrics), markup=False),
        )
        return Progress(*columns, console=self._console, auto_refresh=False)
