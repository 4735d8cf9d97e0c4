"""Callbacks that write predictions to files."""

from __future__ import annotations

import importlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from drivetrain.callbacks.base import Callback
from drivetrain.callbacks.evaluation_gather import flat_columns, has_rows, joined, plain
from drivetrain.runtime.errors import ConfigurationError, DataError, nearest
from drivetrain.runtime.memory import HostBlocks
from drivetrain.runtime.pytrees import recursively_apply
from drivetrain.runtime.state import PartialState

if TYPE_CHECKING:
    from drivetrain.trainer.task import Task
    from drivetrain.trainer.trainer import Trainer


# Prediction files


FORMATS = ("parquet", "safetensors")
_PATTERNS = ("predictions-*-of-*", "batch-*")


def check_format(name: str | None) -> str:
    """Check that prediction files can be written in the format `name`. Return a default if it is None."""
    installed = find_spec("pyarrow") is not None
    if name is None:
        return "parquet" if installed else "safetensors"
    if name not in FORMATS:
        raise ConfigurationError(
            f"PredictionWriter(file_format={name!r}): use 'parquet' or 'safetensors'.{nearest(str(name), FORMATS)}",
        )
    if name == "parquet" and not installed:
        raise ConfigurationError(
            "PredictionWriter(file_format='parquet') needs pyarrow: pip install \"drivetrain[parquet]\". Or use "
            "'safetensors', which needs no further package.",
        )
    return name


def remove_old(folder: Path) -> None:
    """Delete the prediction files that an earlier run left in a folder."""
    for found in _found(folder) + [each for sub in folder.glob("loader-*") for each in _found(sub)]:
        found.unlink()


def write(columns: Mapping[str, Any], path: Path, file_format: str) -> None:
    """Write predictions to a Parquet or safetensors file, whose extension this function appends to `path`.

    Args:
        columns: The columns by name: tensors with a row, or lists with an item, for each sample.
        path: The file without its extension.
        file_format: `"parquet"` or `"safetensors"`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    final = path.with_name(f"{path.name}.{file_format}")
    beside = path.with_name(f".{os.getpid()}-{final.name}")
    # Batches whose tensors differ in shape or dtype become a list of tensors.
    columns = {name: value if isinstance(value, Tensor) else plain(value) for name, value in columns.items()}
    (_write_parquet if file_format == "parquet" else _write_safetensors)(columns, beside)
    os.replace(beside, final)


def read(folder: Path) -> dict[str, Any]:
    """Return the columns of all prediction files in a folder, sorted by sample index."""
    found = _found(folder)
    whole = [each for each in found if each.name.startswith("predictions-")]
    # Interval "batch_and_epoch" writes every row twice, so read only one kind of file.
    parts = [_read(each) for each in whole or found]
    if not parts:
        raise DataError(f"There are no predictions in {folder}. Pass the directory that PredictionWriter wrote.")
    columns = {name: joined([part[name] for part in parts]) for name in parts[0]}
    order = torch.argsort(columns["index"])
    return {
        name: values[order] if isinstance(values, Tensor) else [values[row] for row in order.tolist()]
        for name, values in columns.items()
    }


def _found(folder: Path) -> list[Path]:
    return sorted(p for pattern in _PATTERNS for suffix in FORMATS for p in folder.glob(f"{pattern}.{suffix}"))


# Lists in safetensors are JSON texts, stored as bytes. In parquet they are columns of texts, or of JSON texts if an
# item is anything else.


def _write_safetensors(columns: Mapping[str, Any], path: Path) -> None:
    from safetensors.torch import save_file

    lists = {name: _json(values) for name, values in columns.items() if not isinstance(values, Tensor)}
    tensors = {name: values for name, values in columns.items() if isinstance(values, Tensor)}
    tensors |= {name: torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8) for name, text in lists.items()}
    save_file(tensors, path, metadata={"drivetrain.lists": json.dumps(list(lists))})


def _write_parquet(columns: Mapping[str, Any], path: Path) -> None:
    arrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    arrays: list[Any] = []
    shapes: dict[str, list[int]] = {}
    texts: list[str] = []
    for name, value in columns.items():
        if not isinstance(value, Tensor):
            if all(isinstance(item, str) for item in value):
                texts.append(name)
            arrays.append(arrow.array(value if name in texts else [_json(item) for item in value], arrow.string()))
            continue
        # Arrow has no bfloat16 type.
        flat = arrow.array((value.float() if value.dtype is torch.bfloat16 else value).reshape(-1).numpy())
        # An Arrow list has one dimension, so the metadata of the file store the shape of a row.
        shapes[name] = list(value.shape[1:])
        arrays.append(arrow.FixedSizeListArray.from_arrays(flat, math.prod(shapes[name])) if value.dim() > 1 else flat)
    table = arrow.table(arrays, names=list(columns))
    metadata = {"drivetrain.shapes": json.dumps(shapes), "drivetrain.texts": json.dumps(texts)}
    parquet.write_table(table.replace_schema_metadata(metadata), path)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _from_json(text: str | bytes) -> Any:
    return _with_tuples(json.loads(text))


def _with_tuples(value: Any) -> Any:
    """Replace lists by tuples, so that a value can be the key of a dict."""
    if isinstance(value, dict):
        return {key: _with_tuples(item) for key, item in value.items()}
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value


def _read(path: Path) -> dict[str, Any]:
    if path.suffix == ".safetensors":
        from safetensors import safe_open

        with safe_open(path, "pt") as file:
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it has no __iter__
            lists = json.loads((file.metadata() or {}).get("drivetrain.lists", "[]"))
        return found | {name: list(_from_json(found[name].numpy().tobytes())) for name in lists}
    table = importlib.import_module("pyarrow.parquet").read_table(path)
    shapes = json.loads(table.schema.metadata[b"drivetrain.shapes"])
    texts = json.loads(table.schema.metadata.get(b"drivetrain.texts", "[]"))
    columns: dict[str, Any] = {}
    for name in table.column_names:
        if name not in shapes:
            columns[name] = [item if name in texts else _from_json(item) for item in table[name].to_pylist()]
            continue
        array = table[name].combine_chunks()
        values = array.flatten() if shapes[name] else array
        columns[name] = torch.tensor(values.to_numpy(zero_copy_only=False)).reshape(len(table), *shapes[name])
    return columns


INTERVALS = ("batch", "epoch", "batch_and_epoch")


class BasePredictionWriter(Callback):
    """Base class of callbacks that store the outputs of `predict_step`.

    Override at least one write method. Each process writes the predictions of its own batches, without padded rows.
    Pass `return_predictions=False` to `trainer.predict` if the predictions need not be returned.

    Args:
        write_interval: `"batch"` to call `write_on_batch_end`, `"epoch"` to call `write_on_epoch_end`, or
            `"batch_and_epoch"` for both.

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
        self._predictions: list[list[Any]] = []  # by loader
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
        """Write what `predict_step` returned for one batch.

        Called on each process for its own batches.

        Args:
            trainer: The running Trainer.
            task: The task that the Trainer runs.
            prediction: The value that `predict_step` returned.
            batch_indices: The positions of the batch's samples in the dataset, in the order of the loader, or None if
                unknown.
            batch: The batch.
            batch_idx: The index of the batch in this process's loader.
            dataloader_idx: The index of the loader.
        """
        raise NotImplementedError

    def write_on_epoch_end(
        self, trainer: Trainer, task: Task, predictions: Sequence[Any], batch_indices: Sequence[Any]
    ) -> None:
        """Write the predictions of all batches.

        Called once on each process, with the process's own batches.

        Args:
            trainer: The running Trainer.
            task: The task that the Trainer runs.
            predictions: The values that `predict_step` returned, on the CPU: one item per batch. With several loaders,
                one such list per loader.
            batch_indices: For each loader and each batch, the positions of its samples in the dataset, or None if
                unknown.
        """
        raise NotImplementedError

    def indices_of_batch(self, trainer: Trainer, dataloader_idx: int) -> list[int] | None:
        """Return the positions of the current batch's samples in the dataset, or None if they are unknown.

        Return None if the positions are unknown.

        Args:
            trainer: The running Trainer.
            dataloader_idx: The index of the loader.
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
            outputs = _without_padding(outputs, info.rows, info.real_rows)
        if self.interval != "epoch":
            self.write_on_batch_end(trainer, task, outputs, indices, batch, batch_idx, dataloader_idx)
        if self.interval != "batch":
            # A slice is a view, so cloning frees the padded rows of the batch.
            kept = recursively_apply(lambda t: t.detach().clone() if t.device.type == "cpu" else t.detach(), outputs)
            assert self._leaving is not None
            self._keep(self._leaving.add((dataloader_idx, kept, indices)))

    def _keep(self, block: Sequence[tuple[int, Any, list[int] | None]]) -> None:
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
    """Callback that writes predictions to files with one row per sample.

    Each process writes files of its own. `predict_step` must return one row per sample, or a dict of such values, which
    become the columns. A value is a tensor or an array with a row, or a list with an item, for each sample. Items may
    be texts, numbers and tuples. A column `index` holds the position of each sample in the order of the loader. With
    interval `"epoch"`, each process writes `predictions-<shard>-of-<shards>`. With `"batch"`, each batch is a file
    `batch-<first index>`. With several loaders, each has a subfolder `loader-<index>`. `PredictionWriter.read` loads
    all rows in order. When prediction begins, the files of an earlier run are deleted from the folder.

    Args:
        output_dir: The folder to write to.
        write_interval: `"batch"`, `"epoch"` or `"batch_and_epoch"`.
        file_format: `"parquet"` or `"safetensors"`. If None, parquet if pyarrow is installed, else safetensors.

    Raises:
        ConfigurationError: If the interval or the format is unknown, or if pyarrow is missing.
        DataError: During the run, if predictions do not have one row per sample, or if the positions of the samples are
            unknown.

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
        # No process may write before old files are deleted.
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
        # Processes that share a batch, as in tensor parallelism, must write it only once.
        if trainer.strategy.topology.counts_rows:
            columns = _columns(prediction, batch_indices)
            first = int(columns["index"][0])
            # Leading zeros, so that sorting by name sorts by index.
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
            columns = {key: joined([part[key] for part in parts]) for key in parts[0]} if parts else {}
            if columns:
                write(columns, self._folder(trainer, number) / name, self.file_format)

    @staticmethod
    def read(output_dir: str | os.PathLike[str]) -> dict[str, Any]:
        """Read all prediction files of a folder. Return a dict from column names to columns, sorted by sample index.

        A column is a tensor, or a list if `predict_step` returned a list. Lists inside it are read as tuples.

        Args:
            output_dir: The folder, or with several loaders the subfolder of one of them.

        Raises:
            DataError: If the folder holds no predictions.
        """
        return read(Path(output_dir))

    def _folder(self, trainer: Trainer, loader: int) -> Path:
        return self.output_dir / f"loader-{loader}" if len(trainer.num_predict_batches) > 1 else self.output_dir


def _columns(prediction: Any, indices: Sequence[int] | None) -> dict[str, Tensor]:
    if indices is None:
        raise DataError(
            "PredictionWriter: the position of a batch in the dataset is unknown, because its loader does not provide "
            "the batch sizes of other processes. Use a map-style dataset, or subclass BasePredictionWriter."
        )
    named = flat_columns(prediction if isinstance(prediction, Mapping) else {"prediction": prediction})
    columns: dict[str, Any] = {}
    for name, value in named.items():
        if not has_rows(value, len(indices)):
            found = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise DataError(
                f"PredictionWriter: predict_step returned {name!r} {found} for a batch of {len(indices)} samples. "
                "Return a tensor with a row, or a list with an item, for each sample, or a dict of them. Subclass "
                "BasePredictionWriter for anything else."
            )
        # The rows' positions have this name.
        name = "output_index" if name == "index" else name
        columns[name] = value.detach().cpu().contiguous() if isinstance(value, Tensor) else list(value)
    return {"index": torch.tensor(indices, dtype=torch.int64), **columns}


def _without_padding(outputs: Any, rows: int | None, keep: int | None) -> Any:
    def is_list_of_rows(value: Any) -> bool:
        # A list of as many tensors may be several outputs instead.
        return isinstance(value, (list, tuple)) and has_rows(value, rows) and not any(map(is_tensor_of_rows, value))

    def is_tensor_of_rows(value: Any) -> bool:
        return isinstance(value, Tensor) and has_rows(value, rows)

    return recursively_apply(
        lambda value: value[:keep], outputs, test_type=lambda each: is_tensor_of_rows(each) or is_list_of_rows(each)
    )
