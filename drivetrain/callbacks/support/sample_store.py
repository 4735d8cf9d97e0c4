"""Predictions and targets of all processes, in the order of the data set."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drivetrain.runtime.block_gather import BlockGather
from drivetrain.runtime.errors import ConfigurationError, DataError
from drivetrain.runtime.host_blocks import HostBlocks
from drivetrain.runtime.logging import get_logger
from drivetrain.runtime.nested import recursively_apply
from drivetrain.runtime.state import PartialState

logger = get_logger(__name__)


@dataclass(frozen=True)
class Part:
    """What one process kept of one batch.

    Attributes:
        loader: The number of the loader.
        step: The number of the batch in its loader, on this process.
        shard: Which of the data's shards this process has; several processes may have the same.
        values: Predictions and targets of the batch's real rows; targets may be None.
        others: The same rows of what else the step returned, by key.
    """

    loader: int
    step: int
    shard: int
    values: tuple[Any, Any]
    others: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Samples:
    """Predictions and targets of one loader, each sample once, in the order of the data set.

    Attributes:
        predictions: A tensor with a row for each sample, or a list with an item for each.
        targets: The same for targets; None where there are none.
        others: The same for what else the steps returned, by key.
    """

    predictions: Any
    targets: Any
    others: Mapping[str, Any] = field(default_factory=dict)


def real_rows(values: Any, rows: int | None, keep: int | None, what: str) -> Any:
    """Return the real rows of a batch's predictions or targets, detached, where they are.

    Args:
        values: A tensor or array with a row for each sample, or a list with an item for each.
        rows: The rows of the batch, padding included; None if unknown.
        keep: The real ones among them; None for all.
        what: What the values are, for the message.

    Raises:
        DataError: If there are not as many values as rows.
    """
    if hasattr(values, "__array__") and not isinstance(values, Tensor):
        values = torch.as_tensor(values)
    if isinstance(values, Tensor) and values.dim() == 0:
        raise DataError(
            f"EvaluationGather got {what} without a dimension for the samples, such as a mean over the batch. "
            "Return one row for each sample of the batch."
        )
    if not isinstance(values, (Tensor, list, tuple)):
        raise DataError(
            f"EvaluationGather got {what} of type {type(values).__name__}. Return a tensor with a row, or a list "
            "with an item, for each sample of the batch."
        )
    if rows is not None and len(values) != rows:
        raise DataError(
            f"EvaluationGather got {what} with {len(values)} rows for a batch of {rows}. Return one row for each "
            "sample of the batch."
        )
    kept = values if keep is None else values[:keep]
    if isinstance(kept, Tensor):
        kept = kept.detach()
        # A slice would keep the whole batch alive, and be sent as a whole.
        return kept.clone() if kept.device.type == "cpu" else kept
    return recursively_apply(lambda leaf: leaf.detach(), list(kept))


def has_rows(values: Any, rows: int) -> bool:
    """Return whether values hold one row, or one item, for each of so many samples."""
    if hasattr(values, "__array__") or isinstance(values, Tensor):
        return len(values.shape) > 0 and len(values) == rows
    return isinstance(values, (list, tuple)) and len(values) == rows


class SampleGather:
    """Brings the parts of all processes to the main process, while they compute further batches.

    Make it on all processes at once, and end it with `finish` or `abandon`.

    Args:
        state: This process among its peers.
    """

    def __init__(self, state: PartialState) -> None:
        self._leaving, self._gather = HostBlocks(state), BlockGather(state)

    def add(self, part: Part) -> None:
        """Take what this process keeps of a batch.

        Args:
            part: Its values may be on the device.
        """
        block = self._leaving.add(part)
        if block:
            self._gather.add(block)

    def finish(self) -> list[Samples]:
        """Wait until all have come.

        Returns:
            The samples of each loader on the main process, nothing on the others.
        """
        block = self._leaving.take()
        if block:
            self._gather.add(block)
        kept: dict[tuple[int, int, int], Part] = {}
        parts: list[Part] = [part for block in self._gather.finish() for part in block]
        for part in parts:
            # Processes that share a shard have the same samples: one of them counts.
            kept.setdefault((part.loader, part.step, part.shard), part)
        # Batch by batch the shards took turns in the order of the data set.
        loaders: dict[int, list[Part]] = {}
        for key in sorted(kept):
            loaders.setdefault(key[0], []).append(kept[key])
        return [_samples_of(parts) for parts in loaders.values()]

    def abandon(self) -> None:
        """Leave without waiting, after an error."""
        self._gather.abandon()


def _samples_of(parts: Sequence[Part]) -> Samples:
    """Join the parts of one loader; a key that some of them lack is left out."""
    every = dict.fromkeys(name for part in parts for name in part.others)
    names = [name for name in every if all(name in part.others for part in parts)]
    if missing := [name for name in every if name not in names]:
        logger.warning("EvaluationGather leaves %s out of the file: not every batch has them.", missing)
    others = {name: _joined([part.others[name] for part in parts]) for name in names}
    return Samples(_joined([part.values[0] for part in parts]), _joined([part.values[1] for part in parts]), others)


def _joined(values: Sequence[Any]) -> Any:
    """Return the values of all batches as one tensor where that is possible, else as one list."""
    if any(each is None for each in values):
        return None
    if all(isinstance(each, Tensor) for each in values):
        filled = [each for each in values if len(each)] or list(values[:1])
        if len({(each.shape[1:], each.dtype) for each in filled}) == 1:
            return torch.cat(filled)
    return [row for each in values for row in each]


def write_samples(samples: Samples, path: str | os.PathLike[str]) -> None:
    """Write samples to a file, in the format of its extension.

    Args:
        samples: The samples.
        path: A file `.pt`, `.npz`, `.csv` or `.jsonl`. Its directory is made. It appears complete.

    Raises:
        ConfigurationError: If the extension is unknown.
    """
    path = Path(path)
    writer = writer_for(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{os.getpid()}-{path.name}")
    writer(samples, beside)
    os.replace(beside, path)


def writer_for(path: str | os.PathLike[str]) -> Callable[[Samples, Path], None]:
    """Return the function that writes files of this extension.

    Raises:
        ConfigurationError: If the extension is unknown.
    """
    extension = Path(path).suffix
    if extension not in _WRITERS:
        raise ConfigurationError(
            f"EvaluationGather(path={os.fspath(path)!r}): a file {extension or 'without extension'} cannot be "
            f"written. The extension chooses the format: {', '.join(_WRITERS)}.",
            code="DT-001",
        )
    return _WRITERS[extension]


def _named(samples: Samples, *names: str) -> dict[str, Any]:
    """Return the columns of a file by name: those of predictions and targets, whose names are given, and the others."""
    prediction, target = names or ("predictions", "targets")
    named = {prediction: samples.predictions, target: samples.targets}
    named = {name: values for name, values in named.items() if values is not None}
    taken = {"index", prediction, target}
    return named | {f"output_{name}" if name in taken else name: values for name, values in samples.others.items()}


def _write_pt(samples: Samples, path: Path) -> None:
    torch.save(_named(samples), path)


def _write_npz(samples: Samples, path: Path) -> None:
    import numpy as np

    arrays = {
        name: (values.float() if values.dtype is torch.bfloat16 else values).numpy()
        if isinstance(values, Tensor)
        else np.asarray(values)
        for name, values in _named(samples).items()
    }
    with path.open("wb") as file:  # a name would be given the extension once more
        np.savez(file, allow_pickle=True, **arrays)


def _write_csv(samples: Samples, path: Path) -> None:
    columns: list[str] = ["index"]
    cells: list[list[Any]] = []
    for name, values in _named(samples, "prediction", "target").items():
        rows = [_flat(row) for row in _rows(values)]
        width = max((len(row) for row in rows), default=1)
        columns += [name] if width == 1 else [f"{name}_{number}" for number in range(width)]
        cells = [old + row for old, row in zip(cells or [[] for _ in rows], rows, strict=True)]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows([index, *row] for index, row in enumerate(cells))


def _write_jsonl(samples: Samples, path: Path) -> None:
    columns = {name: _rows(values) for name, values in _named(samples, "prediction", "target").items()}
    with path.open("w", encoding="utf-8") as file:
        for index, row in enumerate(zip(*columns.values(), strict=True)):
            cells = {"index": index, **dict(zip(columns, row, strict=True))}
            file.write(json.dumps(cells, ensure_ascii=False) + "\n")


_WRITERS: dict[str, Callable[[Samples, Path], None]] = {
    ".pt": _write_pt,
    ".npz": _write_npz,
    ".csv": _write_csv,
    ".jsonl": _write_jsonl,
}


def _rows(values: Any) -> Iterable[Any]:
    """Return the rows as Python values."""
    if isinstance(values, Tensor):
        return list(values.tolist())
    return [row.tolist() if isinstance(row, Tensor) else row for row in values]


def _flat(row: Any) -> list[Any]:
    if isinstance(row, (list, tuple)):
        return [cell for item in row for cell in _flat(item)]
    return [row]
