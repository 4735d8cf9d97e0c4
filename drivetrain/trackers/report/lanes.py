"""What each process of a run measured of itself, one small table a rank: `ranks/rank_<n>.csv` in the run's folder."""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TextIO

FOLDER = "ranks"


@dataclass
class Sample:
    """What a process did in a stretch of time.

    Attributes:
        time: When it ended, in seconds since 1970.
        seconds: How long it was.
        step: Optimizer steps taken when it ended.
        steps_per_sec: Optimizer steps in a second of training.
        samples_per_sec: Samples of this process in a second of training; nan where they are not counted.
        data: The share of the time in which it waited for its loader; see `Timing` for this and the following.
        forward: The share of forwards.
        backward: The share of backwards.
        optimizer: The share of optimizers.
        sync: The share in which it waited for other processes.
        logging: The share of logging.
        callbacks: The share of callbacks.
        checkpoint: The share in which it wrote checkpoints.
        evaluation: The share in which it validated.
        idle: The share of everything else.
        memory: Bytes in use: of the device, or of the process where the device is the CPU.
        lr: The learning rate of the first optimizer's first group.
    """

    time: float
    seconds: float
    step: float
    steps_per_sec: float
    samples_per_sec: float
    data: float
    forward: float
    backward: float
    optimizer: float
    sync: float
    logging: float
    callbacks: float
    checkpoint: float
    evaluation: float
    idle: float
    memory: float
    lr: float

    @property
    def busy(self) -> float:
        """The share of the time in which it trained, without waiting for its loader."""
        return 1.0 - self.data - self.checkpoint - self.evaluation


COLUMNS = tuple(each.name for each in fields(Sample))


class Lane:
    """Writes the samples of one process.

    Args:
        folder: The run's folder.
        rank: The process's rank.
        about: What the process runs on, such as its host and its device.
    """

    def __init__(self, folder: str | os.PathLike[str], rank: int, about: Mapping[str, str]) -> None:
        self._path = Path(folder, FOLDER, f"rank_{rank}.csv")
        self._about = " ".join(f"{name}={value}" for name, value in about.items())
        self._file: TextIO | None = None

    @property
    def is_open(self) -> bool:
        """Whether a sample was written."""
        return self._file is not None

    def write(self, sample: Sample) -> None:
        """Append a sample; it is in the file when this returns."""
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            is_new = not self._path.exists()
            self._file = self._path.open("a", encoding="utf-8", buffering=1)
            if is_new:
                self._file.write(f"# {self._about}\n{','.join(COLUMNS)}\n")
        self._file.write(",".join(f"{getattr(sample, name):.15g}" for name in COLUMNS) + "\n")

    def close(self) -> None:
        """Close the file; what waits in it is lost if it cannot be written."""
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                file.close()


def read_lanes(folder: str | os.PathLike[str]) -> dict[int, tuple[str, list[Sample]]]:
    """What each rank runs on, and its samples in the order of time.

    Args:
        folder: The run's folder.
    """
    found: dict[int, tuple[str, list[Sample]]] = {}
    for path in Path(folder, FOLDER).glob("rank_*.csv"):
        match = re.fullmatch(r"rank_(\d+)\.csv", path.name)
        if match:
            found[int(match[1])] = _read(path)
    return dict(sorted(found.items()))


def _read(path: Path) -> tuple[str, list[Sample]]:
    about, samples = "", []
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        for row in csv.reader(file):
            if row and row[0].startswith("#"):
                about = ",".join(row)[1:].strip()
            elif len(row) == len(COLUMNS) and row[0] != COLUMNS[0]:
                try:
                    samples.append(Sample(*map(float, row)))
                except ValueError:
                    continue  # a line that a killed process has cut short
    return about, samples
