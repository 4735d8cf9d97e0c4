"""The runs in a directory of runs, as its index lists them and as their own records describe them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drivetrain.runtime.errors import ConfigurationError, nearest
from drivetrain.runtime.terminal import shown
from drivetrain.trackers.index import DIRECTORY, NAME, read_runs
from drivetrain.trackers.report.record import UNREADABLE, read_record
from drivetrain.trackers.report.words import number


@dataclass(frozen=True)
class KnownRun:
    """A run.

    Attributes:
        when: When it began, as the index has it.
        name: Its name in the index.
        place: Its folder, its file or its address.
        command: The command that began it.
        record: What it has recorded of itself; empty where it has not.
    """

    when: str
    name: str
    place: str
    command: str
    record: dict[str, Any] = field(default_factory=dict)

    @property
    def state(self) -> str:
        """`"running"`, `"finished"`, `"failed"`, `"interrupted"`, `"preempted"`, or an empty text if not known."""
        return str(self.record.get("state", ""))

    @property
    def metric(self) -> str:
        """The best value of the metric that its checkpoints are chosen by; where there is none, a loss, as the last.

        Of a run whose record cannot be read, the reason.
        """
        if self.state == UNREADABLE:
            return str(self.record.get("reason", ""))
        best = self.record.get("best", {})
        if best.get("monitor") and best.get("value") is not None:
            return f"{best['monitor']} {number(best['value'])}"
        metrics = self.record.get("metrics", {})
        for name in ("val_loss", "train_loss", *metrics):
            if name in metrics and "loss" in name:
                return f"{name} {number(metrics[name])} (last)"
        return ""


def list_runs(directory: str | os.PathLike[str]) -> list[KnownRun]:
    """The runs that a directory's index lists, newest first. A run that writes to several folders is there once.

    Args:
        directory: The directory of runs.
    """
    found = [
        KnownRun(each.when, each.name, each.place, each.command, read_record(each.place))
        for each in read_runs(directory)
    ]
    recorded = {(run.when, run.command) for run in found if run.record}
    return [run for run in found if run.record or (run.when, run.command) not in recorded]


def find_run(name: str, directory: str | os.PathLike[str] = ".") -> Path:
    """The folder or file of a run.

    Args:
        name: Its path, or its name in the index.
        directory: The directory of runs whose index is searched.

    Raises:
        ConfigurationError: There is no such run.
    """
    if os.path.exists(name):
        return Path(name)
    known = {each.name: each.place for each in read_runs(directory)}
    if name in known and os.path.exists(known[name]):
        return Path(known[name])
    if name in known:
        raise ConfigurationError(f"The run {name!r} is in the index, but {known[name]} is gone.", code="DT-121")
    raise ConfigurationError(
        f"There is no run {name!r}: it is neither a path nor a name in {Path(directory, DIRECTORY, NAME)}."
        f"{nearest(name, known)} `drivetrain runs --dir {os.fspath(directory)}` lists those that are there.",
        code="DT-121",
    )


def as_table(runs: Sequence[KnownRun], width: int) -> list[str]:
    """Lines that list runs.

    Args:
        runs: The runs.
        width: Columns of the terminal, which the commands are cut to.
    """
    rows: list[tuple[str, ...]] = [("began", "run", "state", "metric", "command")]
    rows += [tuple(map(shown, (run.when, run.name, run.state or "-", run.metric or "-", run.command))) for run in runs]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = ["  ".join([*map(str.ljust, row[:4], widths), row[4]]) for row in rows]
    return [line if len(line) <= width else f"{line[: width - 1]}…" for line in lines]
