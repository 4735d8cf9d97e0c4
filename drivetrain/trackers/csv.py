"""Tracker that writes a CSV table with one row per step and one column per name."""

from __future__ import annotations

import csv
import os
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, TextIO

from drivetrain.runtime.logging import get_logger
from drivetrain.trackers.base import as_images, as_png, as_rows
from drivetrain.trackers.directory import DirectoryTracker

logger = get_logger(__name__)

Row = dict[str, Any]

_FIRST_COLUMNS = ("epoch", "step")
_FLUSH_SECONDS = 10.0


class CSVLogger(DirectoryTracker):
    """Tracker that writes `metrics.csv` and `hparams.yaml` into `<save_dir>/<name>/version_<n>`.

    All values of one step share a row, even if several calls log them. A name that first appears later adds a column,
    for which the file is rewritten. An existing version is continued. A resumed run continues the version of the
    earlier run, and removes the rows after the checkpoint.

    Args:
        save_dir: The root directory of all runs.
        name: The name of the experiment, a directory in `save_dir`.
        version: The number of the run, for a directory `version_<n>`, or the name of its directory. If None, the next
            free number.
        prefix: A prefix for the names of all values, joined by `-`.
        flush_logs_every_n_steps: The maximum number of rows to hold in memory. While values are logged, rows wait at
            most 10 seconds.

    Example:
        ```python
        from drivetrain import CSVLogger, Trainer

        trainer = Trainer(logger=CSVLogger("logs", name="digits"))
        ```
    """

    name: ClassVar[str] = "csv"

    def __init__(
        self,
        save_dir: str | os.PathLike[str],
        name: str | None = "drivetrain_logs",
        version: int | str | None = None,
        prefix: str = "",
        flush_logs_every_n_steps: int = 100,
    ) -> None:
        super().__init__(save_dir, name, version, prefix)
        self._flush_rows = max(1, flush_logs_every_n_steps)
        self._table: _Table | None = None
        self._rows: list[Row] = []  # the last row may still receive values
        self._last_is_written = False
        self._last_has_grown = False  # since the last write
        self._written_at = 0.0

    def start(self) -> None:
        if self._table is None:
            self._table = _Table(self.run_directory.create() / "metrics.csv")
            self._written_at = time.monotonic()

    def __getstate__(self) -> dict[str, Any]:
        # File handles cannot be copied. The copy opens the file again.
        self.save()
        return {**self.__dict__, "_table": None, "_rows": [], "_last_is_written": False}

    @property
    def waiting(self) -> list[Row]:
        return self._rows[self._last_is_written and not self._last_has_grown :]

    @property
    def tracker(self) -> Path:
        """The path of `metrics.csv`, the file to which this tracker writes.

        Reading this property creates the run's directory.
        """
        self.start()
        return self.run_directory.path / "metrics.csv"

    def log(self, values: Mapping[str, float | int | str], step: int | None = None) -> None:
        self.start()
        row: Row = {} if step is None else {"step": step}
        for key, value in self._without_arrays(values).items():
            row[key if key in _FIRST_COLUMNS else self._prefix + key] = value
        if self._rows and _same_step(self._rows[-1], row):
            # The row keeps its first epoch, see `_same_step`.
            self._rows[-1].update({**row, "epoch": self._rows[-1]["epoch"]} if "epoch" in self._rows[-1] else row)
            self._last_has_grown = True
            return
        waiting = len(self._rows) >= self._flush_rows or time.monotonic() - self._written_at > _FLUSH_SECONDS
        if waiting or (self._last_is_written and self._last_has_grown):
            self.save()
        if self._last_is_written:
            self._rows, self._last_is_written = [], False
        self._rows.append(row)

    def log_images(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Write images to PNG files, `images/<name>/<step>.png` in the run directory.

        Several images are numbered.
        """
        for name, images in as_images(values).items():
            folder = self.run_directory.create() / "images" / _file_name(self._prefix + name)
            folder.mkdir(parents=True, exist_ok=True)
            for number, image in enumerate(images):
                parts = [] if step is None else [str(step)]
                parts += [str(number)] if len(images) > 1 else []
                (folder / f"{'-'.join(parts) or 'image'}.png").write_bytes(as_png(image))

    def log_table(
        self, name: str, columns: Sequence[str] | None = None, data: Any = None, step: int | None = None
    ) -> None:
        """Write a table to a CSV file of its own, `tables/<name>-<step>.csv` in the run directory."""
        titles, rows = as_rows(columns, data)
        file_name = _file_name(name if step is None else f"{name}-{step}")
        path = self.run_directory.create() / "tables" / f"{file_name}.csv"
        path.parent.mkdir(exist_ok=True)
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows([titles, *rows])

    def save(self) -> None:
        if self._table is not None and self._rows:
            self._table.write(self._rows, replace_last=self._last_is_written)
            self._rows, self._last_is_written, self._last_has_grown = self._rows[-1:], True, False
        self._written_at = time.monotonic()

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        if self._table is None and not self.run_directory.path.joinpath("metrics.csv").is_file():
            return {**state, "rows": 0, "columns": [], "last_row": None}
        self.start()
        assert self._table is not None
        # The last row may still receive values, in this run and in a resumed one.
        last_row = dict(self._rows[-1]) if self._rows else None
        return {**state, "rows": self._table.rows, "columns": list(self._table.columns), "last_row": last_row}

    def _resume_from(self, state: Mapping[str, Any]) -> None:
        rows, columns = self._checked(state, "rows", int), self._checked(state, "columns", list)
        last_row = None if state.get("last_row") is None else self._checked(state, "last_row", dict)
        # The last row may have received values after the checkpoint, so it is written anew.
        complete = max(0, rows - (last_row is not None))
        path = self.run_directory.path / "metrics.csv"
        there = _cut_table(path, [str(column) for column in columns], complete)
        if there < complete:
            logger.warning(
                f"{path} contains only {there} of the {rows} rows that it had at the checkpoint. The missing rows are "
                "lost, and the run continues after the remaining rows."
            )
        self._rows, self._last_is_written = [], False
        if last_row is not None:
            self.start()
            self._rows = [dict(last_row)]
            self.save()

    def finish(self) -> None:
        if self._table is not None:
            try:
                self.save()
            finally:
                self._table.close()
                self._table = None
                self._rows, self._last_is_written = [], False
        self.run_directory.release()


def _file_name(name: str) -> str:
    # A name of dots only would be another directory.
    return re.sub(r"[^\w.-]|^\.", "_", name)


def _same_step(last: Row, new: Row) -> bool:
    if "step" not in new or last.get("step") != new["step"]:
        return False
    # The epoch may differ, since values logged at the start of an epoch have the last step of the previous epoch.
    return all(last[key] == value for key, value in new.items() if key in last and key != "epoch")


class _Table:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.columns: list[str] = []
        self.rows = 0
        if path.exists() and path.stat().st_size:
            _cut_broken_line(path)
            with path.open(newline="", encoding="utf-8") as file:
                lines = csv.reader(file)
                self.columns = next(lines, [])
                self.rows = sum(1 for _ in lines)
        self._file: TextIO = path.open("a", newline="", encoding="utf-8")
        self._last_row = os.fstat(self._file.fileno()).st_size  # file offset of the last row

    def write(self, rows: list[Row], *, replace_last: bool = False) -> None:
        if replace_last:
            # The last row may have received more values since it was written.
            os.ftruncate(self._file.fileno(), self._last_row)
        self._last_row = os.fstat(self._file.fileno()).st_size
        try:
            self._append(rows)
        except OSError:
            # Restore the file, so that the rows can be written again.
            with suppress(OSError):
                self._file.close()  # discards buffered rows
            with suppress(OSError):
                os.truncate(self.path, self._last_row)
            self._file = self.path.open("a", newline="", encoding="utf-8")
            raise
        self.rows += len(rows) - replace_last

    def _append(self, rows: list[Row]) -> None:
        new = dict.fromkeys(key for row in rows for key in row if key not in self.columns)
        if new:
            first = [key for key in _FIRST_COLUMNS if key in new or key in self.columns]
            rest = [key for key in (*self.columns, *new) if key not in _FIRST_COLUMNS]
            # The header is the first line of the file, so new columns need a new file.
            self._widen([*first, *rest])
        writer = csv.DictWriter(self._file, self.columns, restval="", lineterminator="\n")
        # The last row is written on its own, so that the offset of its start is known.
        writer.writerows(rows[:-1])
        self._file.flush()
        last_row = os.fstat(self._file.fileno()).st_size
        writer.writerow(rows[-1])
        self._file.flush()
        self._last_row = last_row

    def close(self) -> None:
        self._file.close()

    def _widen(self, columns: list[str]) -> None:
        self._file.close()
        _rewrite(self.path, columns)
        self.columns = columns
        self._file = self.path.open("a", newline="", encoding="utf-8")
        self._last_row = os.fstat(self._file.fileno()).st_size


def _rewrite(path: Path, columns: list[str], limit: int | None = None) -> int:
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    written = 0
    try:
        with path.open(newline="", encoding="utf-8") as old, beside.open("w", newline="", encoding="utf-8") as new:
            writer = csv.DictWriter(new, columns, restval="", extrasaction="ignore", lineterminator="\n")
            writer.writeheader()
            for row in islice(csv.DictReader(old), limit):
                writer.writerow(row)
                written += 1
        os.replace(beside, path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
    return written


def _cut_table(path: Path, columns: list[str], limit: int) -> int:
    if not columns:
        path.unlink(missing_ok=True)
        return 0
    if not path.is_file():
        return 0
    _cut_broken_line(path)
    return _rewrite(path, columns, limit)


def _cut_broken_line(path: Path) -> None:
    """Remove an incomplete last line, which a killed run may leave in a CSV file."""
    with path.open("rb+") as file:
        content = file.read()
        if not content.endswith(b"\n"):
            file.truncate(content.rfind(b"\n") + 1)
