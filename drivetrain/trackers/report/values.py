"""The values of a run, read from what its trackers have written: a CSV table or TensorBoard's event files."""

from __future__ import annotations

import csv
import math
import operator
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

from drivetrain.runtime.errors import ConfigurationError

TABLE = "metrics.csv"
EVENTS = "*tfevents*"

_STEPS = ("step", "global_step", "_step", "steps", "iteration")
_NOT_VALUES = {*_STEPS, "epoch", "time", "wall_time", "_timestamp", "_runtime", "created_at"}
_MOST_POINTS = 1500
"""Points of a curve beyond which only the extremes of each stretch are kept."""


@dataclass
class Curve:
    """The values of one name.

    Attributes:
        steps: The step of each.
        values: The values, finite or not.
    """

    steps: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def last(self) -> float:
        """The last value."""
        return self.values[-1]

    def best(self, highest: bool) -> tuple[float, float]:
        """The best finite value and its step; of several the first.

        Args:
            highest: Whether a higher value is better.
        """
        pairs = [(value, step) for step, value in zip(self.steps, self.values, strict=True) if math.isfinite(value)]
        if not pairs:
            return math.nan, math.nan
        value = (max if highest else min)(value for value, _ in pairs)
        return value, next(step for each, step in pairs if each == value)

    def thinned(self, most: int = _MOST_POINTS) -> Curve:
        """The curve with at most about so many points: of each stretch the lowest and the highest value.

        Args:
            most: How many.
        """
        if len(self) <= most:
            return self
        width = len(self) / (most // 2)
        kept = {0, len(self) - 1}
        for part in range(most // 2):
            first = int(part * width)
            stretch = self.values[first : int((part + 1) * width)]
            kept |= {first + stretch.index(min(stretch)), first + stretch.index(max(stretch))}
        indices = sorted(kept)
        return Curve([self.steps[index] for index in indices], [self.values[index] for index in indices])


@dataclass
class RunValues:
    """All values of a run.

    Attributes:
        curves: The curves by name, in the order in which they first appeared.
        epochs: The epoch of each step of which it is known.
    """

    curves: dict[str, Curve] = field(default_factory=dict)
    epochs: dict[float, float] = field(default_factory=dict)

    def add(self, name: str, step: float, value: float) -> None:
        """Add one value; one of the same step as the last takes its place."""
        curve = self.curves.setdefault(name, Curve())
        if curve.steps and curve.steps[-1] == step:
            curve.values[-1] = value
        else:
            curve.steps.append(step)
            curve.values.append(value)

    def put_in_order(self) -> RunValues:
        """Put every curve into the order of its steps, each of which it has once: of several values the last counts."""
        for curve in self.curves.values():
            if any(map(operator.ge, curve.steps, curve.steps[1:])):
                pairs = sorted(dict(zip(curve.steps, curve.values, strict=True)).items())
                curve.steps, curve.values = [step for step, _ in pairs], [value for _, value in pairs]
        return self


def read_values(place: str | os.PathLike[str]) -> RunValues:
    """The values in a run's folder, or in one file: those of its table, else those of TensorBoard's event files.

    Args:
        place: The folder, a table or an event file.

    Raises:
        ConfigurationError: There is neither, or TensorBoard is not installed and only event files are there.
    """
    path = Path(place)
    if path.is_file():
        return read_table(path) if "tfevents" not in path.name else read_events(path)
    if (path / TABLE).is_file():
        return read_table(path / TABLE)
    if any(path.glob(EVENTS)):
        return read_events(path)
    tables = sorted(path.glob("*.csv"))
    if len(tables) == 1:
        return read_table(tables[0])
    raise ConfigurationError(
        f"{os.fspath(place)!r} holds no values of a run. Give the folder of a run, with a {TABLE} or TensorBoard's "
        "event files in it, or one such file.",
        code="DT-121",
    )


def has_values(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder holds what `read_values` reads."""
    path = Path(folder)
    return (path / TABLE).is_file() or any(path.glob(EVENTS))


def read_table(path: str | os.PathLike[str]) -> RunValues:
    """The values of a CSV table with a row for each step, as `CSVLogger` and others write them.

    The step of a row is in its column `step`, else it is the row's number. Cells that are no numbers are left out.

    Args:
        path: The table.
    """
    with open(path, newline="", encoding="utf-8", errors="replace") as file:
        rows = csv.reader(file)
        header = next(rows, [])
        columns = list(zip_longest(*rows, fillvalue=""))  # by column, which takes less time than row by row
    cells = dict(zip(header, columns, strict=False))
    named = next((name for name in _STEPS if name in cells), None)
    count = len(columns[0]) if columns else 0
    steps: list[float | None] = [float(row) for row in range(count)] if named is None else _numbers(cells[named])
    found, first = RunValues(), {}
    if "epoch" in cells:
        epochs = _curve(steps, _numbers(cells["epoch"]))
        for step, epoch in zip(epochs.steps, epochs.values, strict=True):
            found.epochs.setdefault(step, epoch)
    for name in cells.keys() - _NOT_VALUES - {""}:
        curve = _curve(steps, _numbers(cells[name]))
        if len(curve):
            found.curves[name] = curve
            first[name] = next(row for row, cell in enumerate(cells[name]) if cell)
    names = sorted(found.curves, key=lambda name: (first[name], header.index(name)))
    found.curves = {name: found.curves[name] for name in names}
    return found.put_in_order()


def _curve(steps: Sequence[float | None], values: Sequence[float | None]) -> Curve:
    """The values that are there, at steps that are there."""
    pairs = zip(steps, values, strict=True)
    kept = [(step, value) for step, value in pairs if step is not None and value is not None]
    return Curve([step for step, _ in kept], [value for _, value in kept])


def _numbers(cells: Sequence[str]) -> list[float | None]:
    """The numbers of a column, None where there is none; a killed run may leave a row cut short."""
    try:
        return [float(cell) if cell else None for cell in cells]
    except ValueError:
        return [_number(cell) for cell in cells]


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None


def read_events(place: str | os.PathLike[str]) -> RunValues:
    """The scalars in TensorBoard's event files.

    Args:
        place: One file, or a folder of them.

    Raises:
        ConfigurationError: TensorBoard is not installed.
    """
    try:
        from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator
    except ImportError as error:
        raise ConfigurationError(
            f"{os.fspath(place)!r} holds TensorBoard's event files, and TensorBoard is not installed. Install it with "
            '`pip install "drivetrain[tensorboard]"`.',
            code="DT-013",
        ) from error
    events = EventAccumulator(os.fspath(place), size_guidance={SCALARS: 0})
    events.Reload()
    found = RunValues()
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            if name == "epoch":
                found.epochs.setdefault(float(event.step), event.value)
            elif name not in _NOT_VALUES:
                found.add(name, float(event.step), event.value)
    return found.put_in_order()
