"""How progress looks: bars on a terminal, lines in a file."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TextIO

import torch

from drivetrain.runtime.terminal import encodable, is_terminal, say

if TYPE_CHECKING:
    from tqdm import tqdm


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
    """Bars that are drawn over and over, for terminals and notebooks.

    Args:
        refresh_seconds: The time between two redraws, in seconds.
        position: Lines to leave free above the first bar.
    """

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
    """A line at the end of each stage and, in a long one, every so often; for files and pipes.

    Args:
        refresh_seconds: The time between two lines of a long stage, in seconds.
    """

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
        say(text, end="", file=file)

    def _print(self, title: str, parts: Sequence[str], values: Mapping[str, float]) -> None:
        say(f"{title}: {', '.join([*parts, listed(values)] if values else parts)}")
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
