"""Progress bar and model summary drawn with rich."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar, TextIO

from drivetrain.callbacks.base import Callback
from drivetrain.callbacks.model_summary import ModelSummary, shown_columns, total_lines
from drivetrain.callbacks.progress_bar import Display, LineDisplay, Stage, TQDMProgressBar, fit_line, listed
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.terminal import Lenient, print_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress


# Optional import of rich


def require_rich(owner: str) -> None:
    if find_spec("rich") is None:
        raise ConfigurationError(f'{owner} needs rich, which is not installed. Run: pip install "drivetrain[rich]".')
    # The import draws a random number.
    state = random.getstate()
    import_module("rich.style")
    random.setstate(state)


def make_console(**options: Any) -> Console:
    """Return a rich console that replaces characters it cannot encode."""
    from rich.console import Console

    return Console(**{"file": Lenient(sys.stderr if options.get("stderr") else sys.stdout), **options})


# Model summary


class RichModelSummary(ModelSummary):
    """Callback that prints the table of `ModelSummary` with rich, in colors if the terminal supports them.

    Args:
        max_depth: The depth of the table: 1 for the task's direct submodules, -1 for all, or 0 for the totals only.
        **summarize_kwargs: Keyword arguments of `rich.table.Table`, such as `header_style`.

    Raises:
        ConfigurationError: If rich is not installed, or if `max_depth` is not an int of at least -1.

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
    """Styles for the parts of a `RichProgressBar`, given as rich style definitions such as `"bold red"`.

    Attributes:
        description: The style of the title.
        progress_bar: The style of the bar.
        progress_bar_finished: The style of a finished bar.
        progress_bar_pulse: The style of a bar of unknown length.
        batch_progress: The style of the number of batches.
        time: The style of the elapsed and the remaining time.
        processing_speed: The style of the batches per second.
        metrics: The style of the logged values.
        metrics_text_delimiter: The text between two logged values.
        metrics_format: The format of a logged value. If empty, that of `TQDMProgressBar`.
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
    """Callback that shows epoch, batches, speed and logged values with rich, on the main process.

    If the output is not a terminal, it prints one line per epoch, as `TQDMProgressBar` does. If the Trainer adds a
    model summary by default, it is then a `RichModelSummary`.

    Args:
        refresh_rate: The maximum number of redraws per second, at most ten. 0 turns the bar off.
        leave: Keep the bar of each epoch on the screen and start a new one.
        theme: The styles of the bar.
        console_kwargs: Keyword arguments of `rich.console.Console`.

    Raises:
        ConfigurationError: If rich is not installed, or if the rate is negative.

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
        # Unlike the base class, `refresh_rate` is a number of redraws per second.
        self._batches_between = 1
        self.theme = theme
        self.console_kwargs = dict(console_kwargs or {})

    def _make_display(self) -> Display:
        console = make_console(**self.console_kwargs)
        if not (console.is_terminal or console.is_jupyter):
            return LineDisplay()
        return RichDisplay(console, self.theme, self.refresh_seconds)


class _Row:
    def __init__(self, number: Any) -> None:
        self.number = number
        # Shared code sets these attributes of tqdm bars. They have no effect here, since rich measures the time itself.
        self.start_t = self.last_print_t = 0.0


_LEAST_BAR = 10
"""The columns of the bar in a narrow terminal."""


class RichDisplay:
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
                self._progress.add_task(
                    stage.title, total=stage.total, completed=stage.before, speed="", values="", parts=3
                )
            )
        else:
            self._progress.reset(
                stage.bar.number,
                description=stage.title,
                total=stage.total,
                completed=stage.before,
                speed="",
                values="",
                parts=3,
            )
        self._progress.refresh()

    def draw(self, stage: Stage, values: Mapping[str, float]) -> None:
        if self._progress is None:
            return
        elapsed = stage.elapsed
        speed = f"{stage.rate:.2f} it/s" if elapsed > 0 else ""
        speed = ", ".join([*filter(None, [speed]), *stage.left_in_all])
        counted = f"{stage.title} {stage.all_done}/{stage.total or '?'} "
        optional = (_LEAST_BAR + 1, len("0:00:00 0:00:00 "), len(speed) + 1)
        parts, shown = fit_line(self._console.width, len(counted) + 4, values, optional)
        shown = shown if len(shown) < len(listed(values)) else self._shown(values)
        self._progress.update(stage.bar.number, completed=stage.all_done, speed=speed, values=shown, parts=parts)
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

    def hidden(self) -> AbstractContextManager[Any]:
        return nullcontext()  # rich redirects both streams while it shows a bar

    def _shown(self, values: Mapping[str, float]) -> str:
        theme = self._theme
        if not theme.metrics_format:
            return listed(values)
        shown = (f"{key}: {value:{theme.metrics_format}}" for key, value in values.items())
        return theme.metrics_text_delimiter.join(shown)

    def _make(self) -> Progress:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
        from rich.progress import TimeElapsedColumn as Elapsed
        from rich.progress import TimeRemainingColumn as Remaining
        from rich.style import Style
        from rich.table import Column
        from rich.text import Text

        class Part(ProgressColumn):
            def __init__(self, column: ProgressColumn, number: int) -> None:
                super().__init__(Column(no_wrap=True))
                self._column, self._number = column, number

            def render(self, task: Task) -> Any:
                # only if the terminal has room for this column
                return self._column.render(task) if task.fields["parts"] >= self._number else Text("")

        theme, whole = self._theme, Column(no_wrap=True, overflow="ignore")
        bar = BarColumn(
            # As wide as the narrowest terminal with room for it allows.
            _LEAST_BAR if self._console.width < 120 else 40,
            complete_style=theme.progress_bar,
            finished_style=theme.progress_bar_finished,
            pulse_style=theme.progress_bar_pulse,
        )
        speed = TextColumn("{task.fields[speed]}", style=Style.parse(theme.processing_speed), markup=False)
        values = Style.parse(theme.metrics)
        columns = (
            TextColumn("{task.description}", style=theme.description or "none", markup=False, table_column=whole),
            Part(bar, 1),
            MofNCompleteColumn(table_column=whole.copy()),
            Part(Elapsed(), 2),
            Part(Remaining(), 2),
            Part(speed, 3),
            TextColumn("{task.fields[values]}", style=values, markup=False, table_column=whole.copy()),
        )
        # The callback redraws the bars itself, so rich needs no thread.
        return Progress(*columns, console=self._console, auto_refresh=False)
