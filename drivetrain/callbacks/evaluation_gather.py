"""Callback that computes metrics over the samples of all processes, and writes predictions to a file."""

from __future__ import annotations

import copy
import csv
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from drivetrain.callbacks.base import Callback
from drivetrain.callbacks.step_schedule import decide_on_main_process
from drivetrain.runtime.collectives import gather_on_main
from drivetrain.runtime.errors import ConfigurationError, DataError, nearest
from drivetrain.runtime.logging import get_logger
from drivetrain.runtime.memory import HostBlocks
from drivetrain.runtime.pytrees import recursively_apply
from drivetrain.runtime.state import PartialState

if TYPE_CHECKING:
    from drivetrain.trainer.task import Task
    from drivetrain.trainer.trainer import Trainer


logger = get_logger(__name__)


@dataclass(frozen=True)
class Part:
    loader: int
    step: int
    shard: int  # index of this process's data shard, which several processes may share
    values: tuple[Any, Any]  # without padded rows
    others: Mapping[str, Any] = field(default_factory=dict)  # other per-sample outputs of the step


@dataclass(frozen=True)
class Samples:
    """Predictions and targets of a whole dataset, with each sample once and in the dataset's order.

    Attributes:
        predictions: A tensor with one row per sample, or a list with one item per sample.
        targets: A tensor or list like `predictions`, or None if there are no targets.
        others: A dict from output names to tensors or lists like `predictions`.
    """

    predictions: Any
    targets: Any
    others: Mapping[str, Any] = field(default_factory=dict)


def real_rows(values: Any, rows: int | None, keep: int | None, what: str) -> Any:
    values = as_rows(values)
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
        # A slice is a view: it would keep the whole batch in memory, and pickling would send all of it.
        return kept.clone() if kept.device.type == "cpu" else kept
    return recursively_apply(lambda leaf: leaf.detach(), list(kept))


def as_rows(values: Any) -> Any:
    if isinstance(values, Tensor) or not hasattr(values, "__array__"):
        return values
    array = np.asarray(values)
    try:
        return torch.as_tensor(array)
    except TypeError:  # texts, dates and objects
        return array.tolist()


def flat_columns(outputs: Mapping[Any, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in outputs.items():
        if isinstance(value, Mapping):
            # named `"outer.inner"`
            flat.update({f"{key}.{name}": inner for name, inner in flat_columns(value).items()})
        else:
            flat[str(key)] = as_rows(value)
    return flat


def has_rows(values: Any, rows: int | None) -> bool:
    if isinstance(values, Tensor):
        return values.dim() > 0 and len(values) == rows
    return isinstance(values, (list, tuple)) and len(values) == rows


def gather_samples(blocks: Sequence[Sequence[Part]]) -> list[Samples]:
    kept: dict[tuple[int, int, int], Part] = {}
    for block in gather_on_main(blocks):
        for part in block:
            # Processes that share a shard hold the same samples.
            kept.setdefault((part.loader, part.step, part.shard), part)
    # The sampler deals batches to the shards in turn, so (step, shard) is the order of the dataset.
    loaders: dict[int, list[Part]] = {}
    for key in sorted(kept):
        loaders.setdefault(key[0], []).append(kept[key])
    return [_samples_of(parts) for parts in loaders.values()]


def _samples_of(parts: Sequence[Part]) -> Samples:
    every = dict.fromkeys(name for part in parts for name in part.others)
    names = [name for name in every if all(name in part.others for part in parts)]
    if missing := [name for name in every if name not in names]:
        logger.warning("EvaluationGather omits %s from the file: not every batch returned these values.", missing)
    others = {name: joined([part.others[name] for part in parts]) for name in names}
    return Samples(joined([part.values[0] for part in parts]), joined([part.values[1] for part in parts]), others)


def joined(values: Sequence[Any]) -> Any:
    if any(each is None for each in values):
        return None
    if all(isinstance(each, Tensor) for each in values):
        # An empty last batch may have another shape or dtype.
        filled = [each for each in values if len(each)] or list(values[:1])
        if len({(each.shape[1:], each.dtype) for each in filled}) == 1:
            return torch.cat(filled)
    return [row for each in values for row in each]


def write_samples(samples: Samples, path: str | os.PathLike[str]) -> None:
    """Write predictions and targets to a file, in the format of its extension."""
    path = Path(path)
    writer = writer_for(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{os.getpid()}-{path.name}")
    writer(samples, beside)
    os.replace(beside, path)


def writer_for(path: str | os.PathLike[str]) -> Callable[[Samples, Path], None]:
    """Return the function that writes files with the extension of `path`."""
    extension = Path(path).suffix
    if extension not in _WRITERS:
        raise ConfigurationError(
            f"EvaluationGather(path={os.fspath(path)!r}): the file extension {extension!r} is not supported. "
            f"Use one of {', '.join(_WRITERS)}.",
        )
    return _WRITERS[extension]


def _named(samples: Samples, *names: str) -> dict[str, Any]:
    prediction, target = names or ("predictions", "targets")
    named = {prediction: samples.predictions, target: samples.targets}
    named = {name: values for name, values in named.items() if values is not None}
    taken = {"index", prediction, target}
    # A further output must not replace the index, predictions or targets.
    return named | {f"output_{name}" if name in taken else name: values for name, values in samples.others.items()}


def _write_pt(samples: Samples, path: Path) -> None:
    torch.save(_named(samples), path)


def _write_npz(samples: Samples, path: Path) -> None:
    arrays = {
        name: (values.float() if values.dtype is torch.bfloat16 else values).numpy()
        if isinstance(values, Tensor)
        else _array(values)
        for name, values in _named(samples).items()
    }
    with path.open("wb") as file:  # given a file name, numpy would append .npz
        np.savez(file, allow_pickle=True, **arrays)


def _array(values: Sequence[Any]) -> Any:
    rows = plain(values)
    if all(isinstance(row, (str, bool, int, float)) for row in rows):
        return np.asarray(rows)
    array = np.empty(len(rows), dtype=object)
    array[:] = rows
    return array


def _write_csv(samples: Samples, path: Path) -> None:
    columns: list[str] = ["index"]
    cells: list[list[Any]] = []
    for name, values in _named(samples, "prediction", "target").items():
        rows = [_flat(row) for row in plain(values)]
        width = max((len(row) for row in rows), default=1)
        rows = [row + [None] * (width - len(row)) for row in rows]
        columns += [name] if width == 1 else [f"{name}_{number}" for number in range(width)]
        cells = [old + row for old, row in zip(cells or [[] for _ in rows], rows, strict=True)]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows([index, *row] for index, row in enumerate(cells))


def _write_jsonl(samples: Samples, path: Path) -> None:
    columns = {name: plain(values) for name, values in _named(samples, "prediction", "target").items()}
    with path.open("w", encoding="utf-8") as file:
        for index, row in enumerate(zip(*columns.values(), strict=True)):
            cells = {"index": index, **dict(zip(columns, row, strict=True))}
            file.write(json.dumps(cells, ensure_ascii=False, default=str) + "\n")


_WRITERS: dict[str, Callable[[Samples, Path], None]] = {
    ".pt": _write_pt,
    ".npz": _write_npz,
    ".csv": _write_csv,
    ".jsonl": _write_jsonl,
}


def plain(values: Any) -> list[Any]:
    listed: Any = recursively_apply(lambda each: each.tolist(), values, test_type=lambda each: hasattr(each, "tolist"))
    return list(listed)


def _flat(row: Any) -> list[Any]:
    if isinstance(row, (list, tuple)):
        return [cell for item in row for cell in _flat(item)]
    return [row]


Select = Callable[[Any, Any], tuple[Any, Any]]

_STAGES = {"validate": "val", "test": "test", "predict": "predict"}


class EvaluationGather(Callback):
    """Callback that collects predictions from all processes, computes metrics over all samples, and writes a file.

    The outputs of evaluation steps are moved to the CPU a few batches at a time, without padded rows. After the last
    batch they are sent to the main process, which computes metrics over all samples and writes a file. The results
    equal those of a run on one process, even for metrics that are not means over batches, such as AUROC.

    Args:
        predictions: The key of the predictions in the dict that `validation_step`, `test_step` or `predict_step`
            returns. If a step returns anything but a dict, all of it is the predictions.
        targets: The key of the targets. They are only needed for `metrics`.
        metrics: A dict from names to metrics: torchmetrics objects, or functions of all predictions and all targets
            that return a number. A `MetricCollection` logs under its own names.
        path: The file to write. Its extension selects the format: `.pt`, `.npz`, `.csv` or `.jsonl`. A relative path
            starts at the Trainer's `log_dir` or `default_root_dir`. Other per-sample values in a step's dict, such as
            IDs, become columns named after their keys.
        select: A function that takes a step's outputs and its batch and returns predictions and targets. Use it if the
            step does not return them.
        stages: The stages in which to gather: `"validate"` (also in `fit`), `"test"` and `"predict"`.
        prog_bar: Show the metrics in the progress bar.

    In metric names and in `path`, `{stage}` is replaced by `val`, `test` or `predict`. In `path`, `{epoch}` is
    replaced by the epoch. With several loaders, `/dataloader_idx_<n>` is appended to metric names and
    `-dataloader_idx_<n>` to the file name.

    Raises:
        ConfigurationError: If both `metrics` and `path` are missing, or if a stage or the extension is unknown.
        DataError: During the run, if a step returns no predictions or not one per sample.

    Example:
        ```python
        from torchmetrics.classification import MulticlassAUROC

        from drivetrain import EvaluationGather, Trainer

        gather = EvaluationGather(
            predictions="logits",
            metrics={"{stage}_auroc": MulticlassAUROC(num_classes=10)},
            path="predictions-{stage}.csv",
        )
        trainer = Trainer(callbacks=[gather])
        ```
    """

    def __init__(
        self,
        predictions: str = "predictions",
        targets: str = "targets",
        metrics: Mapping[str, Callable[..., Any]] | Callable[..., Any] | None = None,
        path: str | os.PathLike[str] | None = None,
        select: Select | None = None,
        stages: Sequence[str] = ("validate", "test", "predict"),
        prog_bar: bool = False,
    ) -> None:
        if metrics is None and path is None:
            raise ConfigurationError(
                "EvaluationGather has nothing to do: pass metrics= to compute metrics, path= to write a file, or both.",
            )
        if metrics is not None and not isinstance(metrics, Mapping) and not _is_metric(metrics):
            raise ConfigurationError(
                f"EvaluationGather(metrics={metrics!r}): metrics must be a dict of names and metrics, "
                "such as {'val_auroc': metric}, or a torchmetrics.MetricCollection.",
            )
        for stage in stages:
            if stage not in _STAGES:
                raise ConfigurationError(
                    f"EvaluationGather(stages={stages!r}): there is no stage {stage!r}.{nearest(stage, _STAGES)} "
                    f"Use {', '.join(map(repr, _STAGES))}.",
                )
        if path is not None:
            writer_for(path)
        self.predictions = predictions
        self.targets = targets
        self.metrics = metrics
        self.path = path
        self.select = select
        self.stages = tuple(stages)
        self.prog_bar = prog_bar
        self._leaving: HostBlocks | None = None
        self._blocks: list[list[Part]] = []  # on the host

    @property
    def state_key(self) -> str:
        return self.build_state_key(predictions=self.predictions, targets=self.targets)

    # hooks

    def on_validation_epoch_start(self, trainer: Trainer, task: Task) -> None:
        self._begin("validate")

    def on_validation_batch_end(
        self, trainer: Trainer, task: Task, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._keep(trainer, "validate", outputs, batch, batch_idx, dataloader_idx)

    def on_validation_epoch_end(self, trainer: Trainer, task: Task) -> None:
        self._finish(trainer, task, "validate")

    def on_test_epoch_start(self, trainer: Trainer, task: Task) -> None:
        self._begin("test")

    def on_test_batch_end(
        self, trainer: Trainer, task: Task, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._keep(trainer, "test", outputs, batch, batch_idx, dataloader_idx)

    def on_test_epoch_end(self, trainer: Trainer, task: Task) -> None:
        self._finish(trainer, task, "test")

    def on_predict_epoch_start(self, trainer: Trainer, task: Task) -> None:
        self._begin("predict")

    def on_predict_batch_end(
        self, trainer: Trainer, task: Task, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._keep(trainer, "predict", outputs, batch, batch_idx, dataloader_idx)

    def on_predict_epoch_end(self, trainer: Trainer, task: Task) -> None:
        self._finish(trainer, task, "predict")

    def on_exception(self, trainer: Trainer, task: Task, exception: BaseException) -> None:
        self._leave()

    def _begin(self, stage: str) -> None:
        self._leave()
        if stage in self.stages:
            self._leaving = HostBlocks(PartialState())

    def _leave(self) -> None:
        self._leaving, self._blocks = None, []

    def _keep(
        self, trainer: Trainer, stage: str, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int
    ) -> None:
        if self._leaving is None:
            return
        info = trainer.batch_info
        rows, keep = (None, None) if info is None else (info.rows, info.real_rows)
        predictions, targets = self._pick(outputs, batch, stage)
        kept = (
            real_rows(predictions, rows, keep, "predictions"),
            None if targets is None else real_rows(targets, rows, keep, "targets"),
        )
        shard = trainer.strategy.topology.data_shard.index
        part = Part(dataloader_idx, batch_idx, shard, kept, self._other_outputs(outputs, predictions, keep))
        self._blocks.append(self._leaving.add(part))

    def _other_outputs(self, outputs: Any, predictions: Any, keep: int | None) -> dict[str, Any]:
        if self.path is None or self.select is not None or not isinstance(outputs, Mapping):
            return {}
        others: dict[str, Any] = {}  # such as sample IDs
        rest = {key: values for key, values in outputs.items() if key not in (self.predictions, self.targets)}
        for key, values in flat_columns(rest).items():
            if has_rows(values, len(predictions)):
                others[key] = real_rows(values, len(predictions), keep, key)
            elif key != "loss":
                logger.warning_once(
                    "EvaluationGather omits %r from the file: it does not have one row per sample.", key
                )
        return others

    def _pick(self, outputs: Any, batch: Any, stage: str) -> tuple[Any, Any]:
        if self.select is not None:
            predictions, targets = self.select(outputs, batch)
            return predictions, targets
        step = {"validate": "validation_step", "test": "test_step", "predict": "predict_step"}[stage]
        if isinstance(outputs, Mapping):
            if self.predictions not in outputs:
                raise DataError(
                    f"EvaluationGather(predictions={self.predictions!r}): {step} did not return this key, but only: "
                    f"{', '.join(map(repr, outputs)) or 'nothing'}.{nearest(self.predictions, map(str, outputs))} "
                    "Return the predictions under that key, set predictions= to another key, or pass select=."
                )
            return outputs[self.predictions], outputs.get(self.targets)
        if outputs is None:
            raise DataError(
                f"EvaluationGather needs predictions, but {step} returned None. Return a dict such as "
                f"{{{self.predictions!r}: ..., {self.targets!r}: ...}}, or pass select=."
            )
        return outputs, None

    def _finish(self, trainer: Trainer, task: Task, stage: str) -> None:
        if self._leaving is None:
            return
        loaders = gather_samples([*filter(None, self._blocks), self._leaving.take()])
        self._leave()

        def evaluate() -> dict[str, float]:
            values: dict[str, float] = {}
            for number, samples in enumerate(loaders):
                several = len(loaders) > 1
                if self.metrics is not None and stage != "predict":
                    suffix = f"/dataloader_idx_{number}" if several else ""
                    results = _compute(self.metrics, samples)
                    values.update({self._name(key, stage) + suffix: value for key, value in results.items()})
                # The sanity check runs only a few batches, so its file would be incomplete.
                if self.path is not None and not trainer.sanity_checking:
                    root = trainer.local_dir
                    suffix = f"-dataloader_idx_{number}" if several else ""
                    write_samples(samples, self._file(root, stage, trainer.current_epoch, suffix))
            return values

        for name, value in decide_on_main_process(evaluate).items():
            # Every process logs the value of the whole evaluation, so a batch size of 1 keeps the mean unchanged.
            task.log(name, value, prog_bar=self.prog_bar, on_step=False, on_epoch=True, batch_size=1)

    def _name(self, name: str, stage: str) -> str:
        return name.replace("{stage}", _STAGES[stage])

    def _file(self, root: str, stage: str, epoch: int, suffix: str) -> Path:
        assert self.path is not None
        name = self._name(os.fspath(self.path), stage).replace("{epoch}", str(epoch))
        path = Path(root, name)
        return path.with_name(f"{path.stem}{suffix}{path.suffix}")


def _is_metric(metric: Any) -> bool:
    # Duck typing, so that torchmetrics need not be installed.
    return hasattr(metric, "update") and hasattr(metric, "compute") and hasattr(metric, "reset")


def _compute(metrics: Mapping[str, Callable[..., Any]] | Callable[..., Any], samples: Samples) -> dict[str, float]:
    if samples.targets is None:
        raise DataError(
            "EvaluationGather has metrics to compute, but the outputs contain no targets. Return targets with the "
            "predictions, set targets= to the key of the targets, or pass select=."
        )
    named: Mapping[str, Any] = metrics if isinstance(metrics, Mapping) and not _is_metric(metrics) else {"": metrics}
    values: dict[str, float] = {}
    for name, metric in named.items():
        result = _value_of(metric, samples)
        several = result if isinstance(result, Mapping) else {None: result}
        for key, value in several.items():
            label = name if key is None else f"{name}/{key}" if name else str(key)
            values[label] = _scalar(label or type(metric).__name__, value)
    if "" in values:  # a single torchmetrics object
        values[type(metrics).__name__] = values.pop("")
    return values


def _value_of(metric: Callable[..., Any], samples: Samples) -> Any:
    if not _is_metric(metric):
        return metric(samples.predictions, samples.targets)
    # A copy, so that a metric which the task updates too keeps its state.
    fresh: Any = copy.deepcopy(metric)
    fresh = fresh.to("cpu")
    for module in fresh.modules():
        if hasattr(module, "distributed_available_fn"):
            module.distributed_available_fn = _not_distributed  # no sync: this process has all samples
    fresh.reset()
    fresh.update(samples.predictions, samples.targets)
    return fresh.compute()


def _not_distributed() -> bool:
    return False


def _scalar(name: str, value: Any) -> float:
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        raise DataError(
            f"The metric {name!r} is a tensor of shape {tuple(value.shape)}, but only a single number can be "
            "logged. Average the tensor, or pass a function that returns one number."
        )
    return float(value)
