"""Evaluate on all samples together, wherever they were computed."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from drivetrain.callbacks.base import Callback
from drivetrain.callbacks.support.agreement import decide_on_main_process
from drivetrain.callbacks.support.sample_store import (
    Part,
    SampleGather,
    Samples,
    has_rows,
    real_rows,
    write_samples,
    writer_for,
)
from drivetrain.runtime.errors import ConfigurationError, DataError, nearest
from drivetrain.runtime.logging import get_logger
from drivetrain.runtime.state import PartialState

if TYPE_CHECKING:
    from drivetrain.trainer.task import Task
    from drivetrain.trainer.trainer import Trainer

logger = get_logger(__name__)

Select = Callable[[Any, Any], tuple[Any, Any]]

_STAGES = {"validate": "val", "test": "test", "predict": "predict"}


class EvaluationGather(Callback):
    """Gathers predictions and targets of every process, each sample once and in the order of the data set.

    What the evaluation steps return leaves the device some batches at a time, without the rows that only pad a
    batch, and is sent to the main process while further batches are computed. At the end of the pass it computes
    metrics over all samples and writes a file. The
    results are those of a run on one process, also for metrics that are no means, such as AUROC.

    Args:
        predictions: The key of the predictions in the dict that `validation_step` and the like return. Where
            they return something else than a dict, that is the predictions.
        targets: The key of the targets. They may be missing where there are no `metrics`.
        metrics: Names and what is logged under them: torchmetrics objects, or functions of all predictions and
            all targets that return a number. A `MetricCollection` logs under its own names.
        path: The file to write; its extension chooses the format: `.pt`, `.npz`, `.csv` or `.jsonl`. A relative
            path is taken from the Trainer's `log_dir` or `default_root_dir`. What else a step's dict holds for each
            sample, such as an id, is a column under its key.
        select: A function of a step's outputs and its batch that returns predictions and targets, for tasks
            that return neither.
        stages: In which runs to gather: `"validate"` (in fit as well), `"test"` and `"predict"`.
        prog_bar: Show the metrics in the progress bar.

    In names and in `path`, `{stage}` stands for `val`, `test` or `predict`, and in `path` `{epoch}`
    for the epoch. With several loaders `/dataloader_idx_<n>` is added to names and `-dataloader_idx_<n>` to
    the file's name.

    Raises:
        ConfigurationError: If there is neither `metrics` nor `path`, or a stage or the extension is unknown.
        DataError: During the run, if outputs hold no predictions or not one for each sample.

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
                "EvaluationGather has nothing to do: give metrics= to compute, path= to write to, or both.",
                code="DT-005",
            )
        if metrics is not None and not isinstance(metrics, Mapping) and not _is_metric(metrics):
            raise ConfigurationError(
                f"EvaluationGather(metrics={metrics!r}): give a dict of names and metrics, "
                "such as {'val_auroc': metric}, or a torchmetrics.MetricCollection.",
                code="DT-003",
            )
        for stage in stages:
            if stage not in _STAGES:
                raise ConfigurationError(
                    f"EvaluationGather(stages={stages!r}): there is no {stage!r}.{nearest(stage, _STAGES)} "
                    f"Stages are {', '.join(map(repr, _STAGES))}.",
                    code="DT-001",
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
        self._gather: SampleGather | None = None

    @property
    def state_key(self) -> str:
        return self.build_state_key(predictions=self.predictions, targets=self.targets)

    # the same three moments in each stage

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
            self._gather = SampleGather(PartialState())

    def _leave(self) -> None:
        """Let the other processes not wait for the samples of a pass that was interrupted."""
        if self._gather is not None:
            self._gather.abandon()
            self._gather = None

    def _keep(
        self, trainer: Trainer, stage: str, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int
    ) -> None:
        """Keep the real rows of one batch."""
        if self._gather is None:
            return
        info = trainer.batch_info
        rows, keep = (None, None) if info is None else (info.rows, info.real_rows)
        predictions, targets = self._pick(outputs, batch, stage)
        kept = (
            real_rows(predictions, rows, keep, "predictions"),
            None if targets is None else real_rows(targets, rows, keep, "targets"),
        )
        shard = trainer.strategy.topology.data_shard.index
        self._gather.add(Part(dataloader_idx, batch_idx, shard, kept, self._others(outputs, predictions, keep)))

    def _others(self, outputs: Any, predictions: Any, keep: int | None) -> dict[str, Any]:
        """Return the real rows of the other values in a step's dict, for the file."""
        if self.path is None or self.select is not None or not isinstance(outputs, Mapping):
            return {}
        others: dict[str, Any] = {}
        for key, values in outputs.items():
            if key in (self.predictions, self.targets):
                continue
            if has_rows(values, len(predictions)):
                others[str(key)] = real_rows(values, len(predictions), keep, str(key))
            elif key != "loss":
                logger.warning_once(
                    "EvaluationGather leaves %r out of the file: it does not hold one row for each sample.", key
                )
        return others

    def _pick(self, outputs: Any, batch: Any, stage: str) -> tuple[Any, Any]:
        """Return predictions and targets out of what a step returned."""
        if self.select is not None:
            predictions, targets = self.select(outputs, batch)
            return predictions, targets
        step = {"validate": "validation_step", "test": "test_step", "predict": "predict_step"}[stage]
        if isinstance(outputs, Mapping):
            if self.predictions not in outputs:
                raise DataError(
                    f"EvaluationGather(predictions={self.predictions!r}): {step} returned a dict with "
                    f"{', '.join(map(repr, outputs)) or 'nothing'}.{nearest(self.predictions, map(str, outputs))} "
                    "Return the predictions under that key, name another key, or give select=."
                )
            return outputs[self.predictions], outputs.get(self.targets)
        if outputs is None:
            raise DataError(
                f"EvaluationGather needs what {step} returns, and it returned None. Return a dict such as "
                f"{{{self.predictions!r}: ..., {self.targets!r}: ...}}, or give select=."
            )
        return outputs, None

    def _finish(self, trainer: Trainer, task: Task, stage: str) -> None:
        """Bring the samples together, log the metrics and write the file."""
        if self._gather is None:
            return
        loaders = self._gather.finish()
        self._gather = None

        def evaluate() -> dict[str, float]:
            values: dict[str, float] = {}
            for number, samples in enumerate(loaders):
                several = len(loaders) > 1
                if self.metrics is not None and stage != "predict":
                    suffix = f"/dataloader_idx_{number}" if several else ""
                    results = _compute(self.metrics, samples)
                    values.update({self._name(key, stage) + suffix: value for key, value in results.items()})
                if self.path is not None and not trainer.sanity_checking:
                    root = trainer.local_dir
                    suffix = f"-dataloader_idx_{number}" if several else ""
                    write_samples(samples, self._file(root, stage, trainer.current_epoch, suffix))
            return values

        for name, value in decide_on_main_process(evaluate).items():
            # The same value on all processes, and of the whole pass.
            task.log(name, value, prog_bar=self.prog_bar, on_step=False, on_epoch=True, batch_size=1)

    def _name(self, name: str, stage: str) -> str:
        return name.replace("{stage}", _STAGES[stage])

    def _file(self, root: str, stage: str, epoch: int, suffix: str) -> Path:
        assert self.path is not None
        name = self._name(os.fspath(self.path), stage).replace("{epoch}", str(epoch))
        path = Path(root, name)
        return path.with_name(f"{path.stem}{suffix}{path.suffix}")


def _is_metric(metric: Any) -> bool:
    """Whether this is a torchmetrics object; asked so that torchmetrics need not be imported."""
    return hasattr(metric, "update") and hasattr(metric, "compute") and hasattr(metric, "reset")


def _compute(metrics: Mapping[str, Callable[..., Any]] | Callable[..., Any], samples: Samples) -> dict[str, float]:
    """Return the values of all metrics over all samples."""
    if samples.targets is None:
        raise DataError(
            "EvaluationGather has metrics to compute, but the outputs hold no targets. Return them with the "
            "predictions, name their key with targets=, or give select=."
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
    fresh: Any = copy.deepcopy(metric)
    fresh = fresh.to("cpu")
    for module in fresh.modules():
        if hasattr(module, "distributed_available_fn"):
            module.distributed_available_fn = _alone  # it has all samples; the other processes compute nothing
    fresh.reset()
    fresh.update(samples.predictions, samples.targets)
    return fresh.compute()


def _alone() -> bool:
    """What a metric asks that would otherwise wait for the other processes."""
    return False


def _scalar(name: str, value: Any) -> float:
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        raise DataError(
            f"The metric {name!r} is a tensor of shape {tuple(value.shape)}, and only a single number can be "
            "logged. Average it, or let a function return the number that you want."
        )
    return float(value)
