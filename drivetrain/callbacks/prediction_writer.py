"""Write predictions to files, while predicting or afterwards."""

from __future__ import annotations

import importlib
import json
import math
import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from drivetrain.callbacks.base import Callback
from drivetrain.runtime.errors import ConfigurationError, DataError, nearest
from drivetrain.runtime.memory import HostBlocks
from drivetrain.runtime.nested import recursively_apply
from drivetrain.runtime.state import PartialState

if TYPE_CHECKING:
    from drivetrain.trainer.task import Task
    from drivetrain.trainer.trainer import Trainer


# Files of predictions: columns of tensors, with the place of each row in the data


FORMATS = ("parquet", "safetensors")
_PATTERNS = ("predictions-*-of-*", "batch-*")


def check_format(name: str | None) -> str:
    """Return the format to write: the one given, or parquet where pyarrow is installed."""
    installed = find_spec("pyarrow") is not None
    if name is None:
        return "parquet" if installed else "safetensors"
    if name not in FORMATS:
        raise ConfigurationError(
            f"PredictionWriter(file_format={name!r}): give 'parquet' or 'safetensors'.{nearest(str(name), FORMATS)}",
        )
    if name == "parquet" and not installed:
        raise ConfigurationError(
            "PredictionWriter(file_format='parquet') needs pyarrow: pip install \"drivetrain[parquet]\". Without it "
            "there is 'safetensors'.",
        )
    return name


def remove_old(folder: Path) -> None:
    """Remove the predictions of a run before."""
    for found in _found(folder) + [each for sub in folder.glob("loader-*") for each in _found(sub)]:
        found.unlink()


def write(columns: dict[str, Tensor], path: Path, file_format: str) -> None:
    """Write columns to a file that appears complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    final = path.with_name(f"{path.name}.{file_format}")
    beside = path.with_name(f".{os.getpid()}-{final.name}")
    if file_format == "parquet":
        _write_parquet(columns, beside)
    else:
        from safetensors.torch import save_file

        save_file(columns, beside)
    os.replace(beside, final)


def read(folder: Path) -> dict[str, Tensor]:
    """Return the columns of a directory's files, in the order of the data, each row once."""
    found = _found(folder)
    whole = [each for each in found if each.name.startswith("predictions-")]
    parts = [_read(each) for each in whole or found]
    if not parts:
        raise DataError(f"There are no predictions in {folder}. Give the directory that PredictionWriter wrote.")
    columns = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    order = torch.argsort(columns["index"])
    return {name: value[order] for name, value in columns.items()}


def _found(folder: Path) -> list[Path]:
    return sorted(p for pattern in _PATTERNS for suffix in FORMATS for p in folder.glob(f"{pattern}.{suffix}"))


def _write_parquet(columns: dict[str, Tensor], path: Path) -> None:
    arrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    arrays: list[Any] = []
    shapes: dict[str, list[int]] = {}
    for name, value in columns.items():
        # Arrow has no bfloat16.
        flat = arrow.array((value.float() if value.dtype is torch.bfloat16 else value).reshape(-1).numpy())
        shapes[name] = list(value.shape[1:])
        arrays.append(arrow.FixedSizeListArray.from_arrays(flat, math.prod(shapes[name])) if value.dim() > 1 else flat)
    table = arrow.table(arrays, names=list(columns))
    parquet.write_table(table.replace_schema_metadata({"drivetrain.shapes": json.dumps(shapes)}), path)


def _read(path: Path) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    table = importlib.import_module("pyarrow.parquet").read_table(path)
    shapes = json.loads(table.schema.metadata[b"drivetrain.shapes"])
    columns = {}
    for name in table.column_names:
        array = table[name].combine_chunks()
        values = array.flatten() if shapes[name] else array
        columns[name] = torch.tensor(values.to_numpy(zero_copy_only=False)).reshape(len(table), *shapes[name])
    return columns


INTERVALS = ("batch", "epoch", "batch_and_epoch")


class BasePredictionWriter(Callback):
    """The base of callbacks that write what `predict_step` returns: override one of the two methods, or both.

    Each process writes the predictions of its own batches, without rows that only pad them. Give
    `trainer.predict(return_predictions=False)` where they need not be kept for the caller.

    Args:
        write_interval: `"batch"` to call `write_on_batch_end`, `"epoch"` to call `write_on_epoch_end`, or
            `"batch_and_epoch"`.

    Raises:
        ConfigurationError: If the interval is unknown.

    Example:
        ```python
        import torch

        from drivetrain import BasePredictionWriter

        class Writer(BasePredictionWriter):
            def write_on_batch_end(self, trainer, task, prediction, batch_indices, batch, batch_idx, dataloader_idx):
                torch.save(prediction, f"{dataloader_idx}-{trainer.global_rank}-{batch_idx}.pt")
        ```
    """

    def __init__(self, write_interval: str = "batch") -> None:
        if write_interval not in INTERVALS:
            raise ConfigurationError(
                f"{type(self).__name__}(write_interval={write_interval!r}): `write_interval` should be one of "
                f"{list(INTERVALS)}.{nearest(str(write_interval), INTERVALS)}",
            )
        self.interval = write_interval
        self._predictions: list[list[Any]] = []  # of each loader
        self._indices: list[list[list[int] | None]] = []
        self._leaving: HostBlocks | None = None

    def write_on_batch_end(
        self,
        trainer: Trainer,
        task: Task,
        prediction: Any,
        batch_indices: Sequence[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Write the prediction of one batch of this process.

        Args:
            trainer: The Trainer that runs.
            task: The task that it runs.
            prediction: What `predict_step` returned.
            batch_indices: Where its samples are in the order of the loader; None if unknown.
            batch: The batch.
            batch_idx: Its number in this process's loader.
            dataloader_idx: The number of the loader.
        """
        raise NotImplementedError

    def write_on_epoch_end(
        self, trainer: Trainer, task: Task, predictions: Sequence[Any], batch_indices: Sequence[Any]
    ) -> None:
        """Write the predictions of all batches of this process.

        Args:
            trainer: The Trainer that runs.
            task: The task that it runs.
            predictions: What `predict_step` returned for each batch, on the CPU; where there are several loaders, such
                a list for each.
            batch_indices: For each loader, for each batch, where its samples are in the order of the loader.
        """
        raise NotImplementedError

    def indices_of_batch(self, trainer: Trainer, dataloader_idx: int) -> list[int] | None:
        """Where the samples of the batch under way are in the order of the loader, padding left out; None if unknown.

        Args:
            trainer: The Trainer that runs.
            dataloader_idx: The number of the loader.
        """
        info = trainer.batch_info
        if info is None or info.start is None or info.real_rows is None:
            return None
        return list(range(info.start, info.start + info.real_rows))

    def on_predict_epoch_start(self, trainer: Trainer, task: Task) -> None:
        self._predictions, self._indices = [], []
        self._leaving = HostBlocks(PartialState())

    def on_predict_batch_end(
        self, trainer: Trainer, task: Task, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        info, indices = trainer.batch_info, self.indices_of_batch(trainer, dataloader_idx)
        if info is not None and info.padding:
            if info.is_padding:
                return
            rows, keep = info.rows, info.real_rows
            outputs = recursively_apply(lambda t: t[:keep] if t.dim() and t.shape[0] == rows else t, outputs)
        if self.interval != "epoch":
            self.write_on_batch_end(trainer, task, outputs, indices, batch, batch_idx, dataloader_idx)
        if self.interval != "batch":
            kept = recursively_apply(lambda t: t.detach().clone() if t.device.type == "cpu" else t.detach(), outputs)
            assert self._leaving is not None
            self._keep(self._leaving.add((dataloader_idx, kept, indices)))

    def _keep(self, block: Sequence[tuple[int, Any, list[int] | None]]) -> None:
        """Take batches that have left the device: of each its loader, its predictions and their indices."""
        for loader, prediction, indices in block:
            while len(self._predictions) <= loader:
                self._predictions.append([])
                self._indices.append([])
            self._predictions[loader].append(prediction)
            self._indices[loader].append(indices)

    def on_predict_epoch_end(self, trainer: Trainer, task: Task) -> None:
        if self.interval == "batch":
            return
        assert self._leaving is not None
        self._keep(self._leaving.take())
        predictions, indices = self._predictions, self._indices
        self._predictions, self._indices, self._leaving = [], [], None
        several = len(trainer.num_predict_batches) > 1
        given = predictions if several else [each for loader in predictions for each in loader]
        self.write_on_epoch_end(trainer, task, given, indices)


class PredictionWriter(BasePredictionWriter):
    """Writes predictions to files with a row for each sample, each process its own, with their place in the data.

    `predict_step` returns a tensor with a row for each sample of the batch, or a dict of such tensors: the columns.
    Beside them there is a column `index`, the sample's place in the order of the loader. By epoch each process writes
    `predictions-<process>-of-<processes>`, by batch each batch `batch-<first index>`; of several loaders each has a
    directory `loader-<number>`. `PredictionWriter.read` puts all of them together in that order. Files of a run before
    are removed from the directory when prediction begins.

    Args:
        output_dir: The directory that is written.
        write_interval: `"batch"`, `"epoch"` or `"batch_and_epoch"`.
        file_format: `"parquet"` or `"safetensors"`; parquet where pyarrow is installed if None.

    Raises:
        ConfigurationError: If the interval or the format is unknown, or pyarrow is missing.
        DataError: During the run, if predictions are no tensors with a row for each sample, or their place in the
            data is not known.

    Example:
        ```python
        from drivetrain import PredictionWriter, Trainer

        trainer = Trainer(callbacks=[PredictionWriter("predictions")], logger=False)
        # trainer.predict(task, loader, return_predictions=False)
        # columns = PredictionWriter.read("predictions")
        ```
    """

    def __init__(
        self, output_dir: str | os.PathLike[str], write_interval: str = "epoch", file_format: str | None = None
    ) -> None:
        super().__init__(write_interval)
        self.output_dir = Path(output_dir)
        self.file_format = check_format(file_format)

    def on_predict_epoch_start(self, trainer: Trainer, task: Task) -> None:
        super().on_predict_epoch_start(trainer, task)
        if trainer.is_global_zero:
            remove_old(self.output_dir)
        trainer.accelerator.wait_for_everyone()

    def write_on_batch_end(
        self,
        trainer: Trainer,
        task: Task,
        prediction: Any,
        batch_indices: Sequence[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        if trainer.strategy.topology.counts_rows:
            columns = _columns(prediction, batch_indices)
            first = int(columns["index"][0])
            name = f"batch-{first:012d}"
            write(columns, self._folder(trainer, dataloader_idx) / name, self.file_format)

    def write_on_epoch_end(
        self, trainer: Trainer, task: Task, predictions: Sequence[Any], batch_indices: Sequence[Any]
    ) -> None:
        topology = trainer.strategy.topology
        if not topology.counts_rows:
            return
        by_loader = predictions if len(trainer.num_predict_batches) > 1 else [predictions]
        name = f"predictions-{topology.data_shard.index:05d}-of-{topology.data_shard.count:05d}"
        for number, (batches, indices) in enumerate(zip(by_loader, batch_indices, strict=False)):
            parts = [_columns(one, places) for one, places in zip(batches, indices, strict=True)]
            columns = {key: torch.cat([part[key] for part in parts]) for key in parts[0]} if parts else {}
            if columns:
                write(columns, self._folder(trainer, number) / name, self.file_format)

    @staticmethod
    def read(output_dir: str | os.PathLike[str]) -> dict[str, Tensor]:
        """Return the columns of all files of a directory, by name, in the order of the data.

        Args:
            output_dir: The directory; of several loaders, that of one of them.

        Raises:
            DataError: There are no predictions in it.
        """
        return read(Path(output_dir))

    def _folder(self, trainer: Trainer, loader: int) -> Path:
        return self.output_dir / f"loader-{loader}" if len(trainer.num_predict_batches) > 1 else self.output_dir


def _columns(prediction: Any, indices: Sequence[int] | None) -> dict[str, Tensor]:
    """The columns of one batch."""
    if indices is None:
        raise DataError(
            "PredictionWriter does not know the place of a batch in the data: its loader does not tell how many rows "
            "other processes have. Give a map-style dataset, or subclass BasePredictionWriter."
        )
    named = prediction if isinstance(prediction, dict) else {"prediction": prediction}
    columns = {"index": torch.tensor(indices, dtype=torch.int64)}
    for name, value in named.items():
        if not isinstance(value, Tensor) or not value.dim() or len(value) != len(indices):
            found = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise DataError(
                f"PredictionWriter: predict_step returned {name!r} {found} for a batch of {len(indices)} samples. "
                "Return a tensor with a row for each sample, or a dict of them; subclass BasePredictionWriter for "
                "anything else."
            )
        columns[str(name)] = value.detach().cpu().contiguous()
    return columns
