"""Show how far a run is."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TextIO

import torch

from drivetrain.callbacks.base import Callback
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.terminal import encodable, is_terminal, print_text

if TYPE_CHECKING:
    from tqdm import tqdm

    from drivetrain.trainer.task import Task
    from drivetrain.trainer.trainer import Trainer


# How progress looks: bars on a terminal, lines in a file


class Stage:
    """A pass over batches that is shown: an epoch, or a validation within it.

    Attributes:
        title: What is shown before the numbers.
        sizes: How many batches each of its loaders has; infinite where that is not known.
        done: Batches done of the current loader.
        before: Batches of an epoch that the run had done before it was resumed, which rates leave out.
        loader: The number of the current loader.
        passing: Whether it is shown only while it runs, as a part of something larger.
        is_epoch: Whether it is a training epoch, which values are logged in.
        depth: In how many other stages it runs.
        left: Seconds until the whole run ends, where that can be estimated.
    """

    __slots__ = (
        "bar",
        "before",
        "depth",
        "done",
        "is_epoch",
        "left",
        "loader",
        "passing",
        "paused",
        "sizes",
        "started",
        "title",
    )

    def __init__(
        self, title: str, sizes: Sequence[float] = (), passing: bool = False, is_epoch: bool = False, before: int = 0
    ) -> None:
        self.title = title
        self.sizes = sizes
        self.passing = passing
        self.is_epoch = is_epoch
        self.depth = 0
        self.done = self.before = before
        self.loader = 0
        self.started = time.perf_counter()
        self.paused = 0.0
        self.bar: Any = None
        self.left: float | None = None

    @property
    def left_in_all(self) -> list[str]:
        """How long the run still takes, as a part of a line; no part where that is not known, or it is over."""
        return [f"{_duration(self.left)} left in all"] if self.left else []

    @property
    def total(self) -> int | None:
        """Batches of all loaders, or None where that is not known."""
        total = sum(self.sizes)
        return int(total) if math.isfinite(total) else None

    @property
    def all_done(self) -> int:
        """Batches done of all loaders."""
        before = sum(self.sizes[: self.loader])
        return self.done + (int(before) if math.isfinite(before) else 0)

    @property
    def elapsed(self) -> float:
        """Seconds spent in this stage, without those in stages within it."""
        return time.perf_counter() - self.started - self.paused

    @property
    def rate(self) -> float:
        """Batches a second since this run began the stage; 0.0 before the first."""
        elapsed = self.elapsed
        return (self.all_done - self.before) / elapsed if elapsed > 0 else 0.0

    def pause(self, seconds: float) -> None:
        """Leave out time that was spent in a stage within this one."""
        self.paused += seconds
        if self.bar is not None:
            self.bar.start_t += seconds
            self.bar.last_print_t += seconds


class Display(Protocol):
    """Where stages are shown."""

    refresh_seconds: float

    def open(self, stage: Stage) -> None:
        """Show a stage that begins."""

    def draw(self, stage: Stage, values: Mapping[str, float]) -> None:
        """Show how far a stage is."""

    def finish(self, stage: Stage, values: Mapping[str, float]) -> None:
        """Show how a stage ended; it may be opened again under another title."""

    def close(self, stage: Stage) -> None:
        """Show a stage no longer."""

    def write(self, text: str, file: TextIO | None = None) -> None:
        """Print text without breaking what is shown; to the standard output if no file is given."""


class BarDisplay:
    """Bars that are drawn over and over, for terminals and notebooks."""

    def __init__(self, refresh_seconds: float, position: int = 0) -> None:
        self.refresh_seconds = refresh_seconds
        self._position = position
        self._bar_type = _bar_type()

    def open(self, stage: Stage) -> None:
        if stage.bar is not None:
            stage.bar.set_description(stage.title, refresh=False)
            stage.bar.set_postfix_str("", refresh=False)
            stage.bar.reset(stage.total)
            stage.bar.initial = stage.bar.n = stage.before
            return
        stage.bar = self._bar_type(
            desc=stage.title,
            total=stage.total,
            initial=stage.before,
            leave=not stage.passing,
            position=self._position + stage.depth,
            **self._width(),
            mininterval=0,
            miniters=1,
            file=sys.stdout,
        )

    def _width(self) -> dict[str, Any]:
        """Follow the terminal's width, unless it reports none, as in some containers."""
        try:
            known = os.get_terminal_size(sys.stdout.fileno()).columns > 0
        except (AttributeError, OSError, ValueError):
            known = True  # a notebook
        return {"dynamic_ncols": True} if known else {"ncols": 80}

    def draw(self, stage: Stage, values: Mapping[str, float]) -> None:
        shown = [listed(values)] if values else []
        stage.bar.set_postfix_str(", ".join([*shown, *stage.left_in_all]), refresh=False)
        # Draws by itself, unless nothing was added.
        if not stage.bar.update(stage.all_done - stage.bar.n):
            stage.bar.refresh()

    def finish(self, stage: Stage, values: Mapping[str, float]) -> None:
        if not stage.passing:
            self.draw(stage, values)

    def close(self, stage: Stage) -> None:
        if stage.bar is not None:
            stage.bar.close()
            stage.bar = None

    def write(self, text: str, file: TextIO | None = None) -> None:
        stream = file or sys.stdout
        with contextlib.suppress(OSError, ValueError):  # a terminal that is gone
            self._bar_type.write(encodable(text, stream), file=stream, end="")


class LineDisplay:
    """A line at the end of each stage and, in a long one, every so often; for files and pipes."""

    def __init__(self, refresh_seconds: float = 60.0) -> None:
        self.refresh_seconds = refresh_seconds
        self._last_line = time.perf_counter()

    def open(self, stage: Stage) -> None:
        pass

    def draw(self, stage: Stage, values: Mapping[str, float]) -> None:
        if time.perf_counter() - self._last_line < self.refresh_seconds:
            return
        done, total, rate = stage.all_done, stage.total, stage.rate
        parts = [f"{done}/{total} batches" if total else f"{done} batches", f"{rate:.4g} it/s"]
        if total and rate:
            parts.append(f"{_duration((total - done) / rate)} left")
        self._print(stage.title, [*parts, *stage.left_in_all], values)

    def finish(self, stage: Stage, values: Mapping[str, float]) -> None:
        if stage.passing:
            return
        done, total, elapsed = stage.all_done, stage.total, stage.elapsed
        counted = f"{done} batches" if done == total or not total else f"{done}/{total} batches"
        rate = f" ({stage.rate:.4g} it/s)" if elapsed > 0 else ""
        self._print(stage.title, [f"{counted} in {_duration(elapsed)}{rate}", *stage.left_in_all], values)

    def close(self, stage: Stage) -> None:
        pass

    def write(self, text: str, file: TextIO | None = None) -> None:
        print_text(text, end="", file=file)

    def _print(self, title: str, parts: Sequence[str], values: Mapping[str, float]) -> None:
        print_text(f"{title}: {', '.join([*parts, listed(values)] if values else parts)}")
        self._last_line = time.perf_counter()


def make_display(refresh_seconds: float, position: int = 0) -> Display:
    """Return bars where the output is a terminal or a notebook, and lines elsewhere."""
    if is_terminal() or in_notebook():
        return BarDisplay(refresh_seconds, position)
    return LineDisplay()


def to_numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return metrics as numbers, with one transfer for all tensors of a device."""
    numbers: dict[str, Any] = dict(metrics)
    by_device: dict[torch.device, list[str]] = {}
    for name, value in metrics.items():
        if isinstance(value, torch.Tensor):
            by_device.setdefault(value.device, []).append(name)
    for names in by_device.values():
        stacked = torch.stack([metrics[name].detach().reshape(()).float() for name in names])
        numbers.update(zip(names, stacked.tolist(), strict=True))
    return numbers


def listed(values: Mapping[str, float]) -> str:
    """Values as they are shown beside a bar."""
    return ", ".join(f"{name}={_number(value)}" for name, value in values.items())


def _number(value: float) -> str:
    """Write a number in about the same width whatever it is, so that a bar does not dance."""
    if isinstance(value, int) or not isinstance(value, float) or not math.isfinite(value):
        return str(value)
    if value == 0 or 1e-3 <= abs(value) < 1e4:
        return f"{value:.3f}" if abs(value) < 100 else f"{value:.1f}"
    return f"{value:.2e}"


def _duration(seconds: float) -> str:
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d} min"


def in_notebook() -> bool:
    """Whether a notebook shows the output."""
    return "ipykernel" in sys.modules


def _bar_type() -> type[tqdm[Any]]:
    """Return tqdm's bar for this kind of screen, without its thread: this bar has a clock of its own."""
    base: Any
    if in_notebook():
        from tqdm.auto import tqdm as base
    else:
        from tqdm import tqdm as base
    return type("Bar", (base,), {"monitor_interval": 0})


_NEVER = math.inf


class TQDMProgressBar(Callback):
    """Shows epoch, batches, speed, the time left and watched values, on the main process.

    Watched are the values logged with `prog_bar=True` and those that a callback monitors.

    On a terminal or in a notebook a bar is redrawn on a clock: between two redraws a batch reads the clock
    once, and logged tensors are read only when they are shown. Where the output goes to a file or a pipe
    there is one line for each epoch instead, and one a minute within a long one.

    Args:
        refresh_rate: Redraw only after a multiple of so many batches; 0 turns the bar off.
        process_position: Lines to leave free above the bar, for bars of other processes.
        leave: Leave the bar of each epoch on the screen and begin a new one.
        refresh_seconds: The time between two redraws, in seconds.

    Raises:
        ConfigurationError: If a number is negative.

    Example:
        ```python
        from drivetrain import TQDMProgressBar, Trainer

        trainer = Trainer(callbacks=[TQDMProgressBar(leave=True)])
        ```
    """

    saves_within_steps = False

    is_progress_bar: ClassVar[bool] = True
    runs_last_at_epoch_end: ClassVar[bool] = True  # the task may log in its own hook

    def __init__(
        self,
        refresh_rate: int = 1,
        process_position: int = 0,
        leave: bool = False,
        refresh_seconds: float = 0.1,
    ) -> None:
        for name, number in (("refresh_rate", refresh_rate), ("refresh_seconds", refresh_seconds)):
            if number < 0:
                raise ConfigurationError(f"TQDMProgressBar({name}={number}): give 0 or more.")
        self.refresh_rate: float = refresh_rate
        self._batches_between = refresh_rate
        self.process_position = process_position
        self.leave = leave
        self.refresh_seconds = refresh_seconds
        self._enabled = True
        self._display: Display | None = None  # there is none on other processes, nor between runs
        self._due = _NEVER  # when to redraw, by perf_counter
        self._stages: list[Stage] = []
        self._monitored: list[str] = []
        self._began = (0.0, 0.0)  # when training began, and how much of it was done then
        self._stage = Stage("")  # the innermost one; this one where nothing is shown

    # on and off

    @property
    def is_enabled(self) -> bool:
        """Whether progress is shown on the main process."""
        return self._enabled and self.refresh_rate > 0

    @property
    def is_disabled(self) -> bool:
        """Whether nothing is shown."""
        return not self.is_enabled

    def enable(self) -> None:
        """Show progress, beginning with the next call of the Trainer's fit, validate, test or predict."""
        self._enabled = True

    def disable(self) -> None:
        """Show nothing from now on."""
        self._enabled = False
        self._stop()

    def print(self, *args: Any, sep: str = " ", end: str = "\n", file: TextIO | None = None) -> None:
        """Print text above the bar without breaking it.

        Args:
            *args: What to print.
            sep: What stands between them.
            end: What stands after them.
            file: Where to, such as `sys.stderr`; the standard output if None.
        """
        text = sep.join(map(str, args)) + end
        if self._display is not None:
            self._display.write(text, file)
        else:
            print_text(text, end="", file=file)

    def get_metrics(self, trainer: Trainer, task: Any) -> dict[str, Any]:
        """Return the values that are shown beside an epoch's batches; override it to show others.

        It is called when something is drawn, on the main process only.

        Args:
            trainer: The Trainer that runs.
            task: The task that it runs.

        Returns:
            Numbers, tensors or text by name: what was logged with `prog_bar=True`, and what a callback monitors.
        """
        shown = dict(trainer.progress_bar_metrics)
        if self._monitored:
            known = trainer.logged.callback_values()
            shown |= {name: known[name] for name in self._monitored if name in known and name not in shown}
        return shown

    # around everything

    def setup(self, trainer: Trainer, task: Task, stage: str) -> None:
        self._stop()
        if self.is_enabled and trainer.is_global_zero:
            self._display = self._make_display()
            self._due = perf_counter() + self._display.refresh_seconds

    def _make_display(self) -> Display:
        return make_display(self.refresh_seconds, self.process_position)

    def teardown(self, trainer: Trainer, task: Task, stage: str) -> None:
        self._stop()

    def on_exception(self, trainer: Trainer, task: Task, exception: BaseException) -> None:
        self._stop()

    # fit

    def on_train_start(self, trainer: Trainer, task: Task) -> None:
        names = (getattr(callback, "monitor", None) for callback in trainer.callbacks)
        self._monitored = [name for name in dict.fromkeys(names) if isinstance(name, str)]
        batches = trainer.num_training_batches
        of_epoch = trainer.progress.batches_in_epoch / batches if batches else 0.0
        self._began = (perf_counter(), share_done(trainer, of_epoch))

    def on_train_epoch_start(self, trainer: Trainer, task: Task) -> None:
        last = trainer.max_epochs
        of = f"/{last - 1}" if last is not None and last > 0 else ""
        before = trainer.progress.batches_in_epoch
        epoch = Stage(
            f"Epoch {trainer.current_epoch}{of}", [trainer.num_training_batches], is_epoch=True, before=before
        )
        if self._stages and not self.leave:
            epoch.bar = self._stages.pop().bar  # continues in its place
        else:
            self._close_stages()
        self._begin(trainer, epoch)

    def on_train_batch_end(self, trainer: Trainer, task: Task, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._stage.done = batch_idx + 1
        if perf_counter() >= self._due:
            self._draw(trainer)

    def on_train_epoch_end(self, trainer: Trainer, task: Task) -> None:
        if self._display is not None and self._stages:
            self._estimate(trainer)
            self._display.finish(self._stage, self._values(trainer))

    def on_train_end(self, trainer: Trainer, task: Task) -> None:
        self._close_stages()

    # evaluation

    def on_validation_start(self, trainer: Trainer, task: Task) -> None:
        sizes = trainer.num_val_batches
        if trainer.sanity_checking:
            steps = trainer.num_sanity_val_steps
            sizes = sizes if steps < 0 else [min(steps, size) for size in sizes]
            self._begin(trainer, Stage("Sanity check", sizes, passing=True))
        else:
            self._begin(trainer, Stage("Validation", sizes, passing=bool(self._stages)))

    def on_validation_batch_end(
        self, trainer: Trainer, task: Task, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._evaluated(trainer, batch_idx, dataloader_idx)

    def on_validation_end(self, trainer: Trainer, task: Task) -> None:
        self._end(trainer)

    def on_test_start(self, trainer: Trainer, task: Task) -> None:
        self._begin(trainer, Stage("Test", trainer.num_test_batches))

    def on_test_batch_end(
        self, trainer: Trainer, task: Task, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._evaluated(trainer, batch_idx, dataloader_idx)

    def on_test_end(self, trainer: Trainer, task: Task) -> None:
        self._end(trainer)

    def on_predict_start(self, trainer: Trainer, task: Task) -> None:
        self._begin(trainer, Stage("Predict", trainer.num_predict_batches))

    def on_predict_batch_end(
        self, trainer: Trainer, task: Task, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._evaluated(trainer, batch_idx, dataloader_idx)

    def on_predict_end(self, trainer: Trainer, task: Task) -> None:
        self._end(trainer)

    # what the hooks have in common

    def _begin(self, trainer: Trainer, stage: Stage) -> None:
        if self._display is None:
            return
        if self._stages:
            self._draw_now(trainer)  # as far as it is now: it stands still for a while
        stage.depth = len(self._stages)
        self._stages.append(stage)
        self._stage = stage
        self._display.open(stage)

    def _evaluated(self, trainer: Trainer, batch_idx: int, dataloader_idx: int) -> None:
        stage = self._stage
        stage.done, stage.loader = batch_idx + 1, dataloader_idx
        if perf_counter() >= self._due:
            self._draw(trainer)

    def _draw(self, trainer: Trainer) -> None:
        """Show how far the innermost stage is; it is due."""
        stage = self._stage
        if self._display is None or stage.done % self._batches_between:
            return
        self._draw_now(trainer)

    def _draw_now(self, trainer: Trainer) -> None:
        assert self._display is not None
        self._estimate(trainer)
        self._display.draw(self._stage, self._values(trainer))
        self._due = perf_counter() + self._display.refresh_seconds

    def _values(self, trainer: Trainer) -> dict[str, float]:
        if not self._stage.is_epoch:
            return {}  # in an evaluation they would be those of the training before it
        return to_numbers(self.get_metrics(trainer, trainer.task))

    def _estimate(self, trainer: Trainer) -> None:
        """Estimate when the run ends from the time that it has taken so far, validations and all."""
        stage, (began, share) = self._stage, self._began
        if not stage.is_epoch or not began:
            return
        total = stage.total
        now = share_done(trainer, stage.all_done / total if total else 0.0)
        taken = perf_counter() - began
        stage.left = taken / (now - share) * (1 - now) if share < now < 1 else None

    def _end(self, trainer: Trainer) -> None:
        """Show how the innermost stage ended, and return to the one around it."""
        if self._display is None or not self._stages:
            return
        self._display.finish(self._stage, self._values(trainer))
        stage = self._stages.pop()
        self._display.close(stage)
        if self._stages:
            self._stage = self._stages[-1]
            self._stage.pause(time.perf_counter() - stage.started)

    def _close_stages(self) -> None:
        while self._stages:
            stage = self._stages.pop()
            if self._display is not None:
                self._display.close(stage)

    def _stop(self) -> None:
        self._close_stages()
        self._display = None
        self._due = _NEVER


def share_done(trainer: Trainer, of_epoch: float) -> float:
    """The share of a run that is done, from 0 to 1: by the nearest of its limits."""
    shares = [trainer.control.share_of_duration]
    if trainer.max_epochs is not None and trainer.max_epochs > 0:
        shares.append((trainer.current_epoch + of_epoch) / trainer.max_epochs)
    if trainer.max_steps > 0:
        shares.append(trainer.global_step / trainer.max_steps)
    return min(1.0, max(shares))
