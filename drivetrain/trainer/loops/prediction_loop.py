"""Prediction: what `predict_step` returns, for every sample once, in the order of the data."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from drivetrain.callbacks.stage import Stage
from drivetrain.data import BatchInfo
from drivetrain.runtime.collectives import gather_object
from drivetrain.runtime.errors import DataError
from drivetrain.runtime.host_blocks import HostBlocks
from drivetrain.runtime.logging import get_logger
from drivetrain.runtime.nested import recursively_apply
from drivetrain.runtime.state import PartialState
from drivetrain.strategies.capabilities import PlainEvaluation, evaluation_context
from drivetrain.trainer.loops.binding import DataEnded, Feed, as_taken, bind_evaluation_step
from drivetrain.trainer.loops.evaluation_loop import evaluating, loader_argument
from drivetrain.trainer.loops.loader_source import LoaderSource, Prepared, limits_of, own_batches
from drivetrain.trainer.metrics.log_scopes import PREDICT
from drivetrain.trainer.task import Task

if TYPE_CHECKING:
    from drivetrain.trainer.trainer import Trainer

logger = get_logger(__name__)


class PredictionLoop:
    """Runs the task's `predict_step` over its loaders.

    Args:
        trainer: The trainer.
        task: Its task.
        model: What the strategy made of the task.
        source: Where the loaders come from.
        keep: Whether to keep what is returned; with False, callbacks see it and it is gone.
        limit: How many batches of each loader; as many as the trainer was asked for if None.
    """

    def __init__(
        self,
        trainer: Trainer,
        task: Task,
        model: nn.Module,
        source: LoaderSource,
        keep: bool,
        limit: int | None = None,
    ) -> None:
        self._trainer, self._task, self._source, self._keep = trainer, task, source, keep
        self._limit = trainer.limit_predict_batches if limit is None else limit
        self._strategy, self._model = trainer.strategy, model
        self._step: Callable[..., Any]
        self._feed: Feed

    def run(self) -> list[Any]:
        """Predict.

        Returns:
            What `predict_step` returned for each batch of all processes, on the CPU and without padding, in the order
            of the loader, or of this process's batches alone where the trainer does not gather; a list of such lists
            where there are several loaders; empty if nothing is kept.
        """
        trainer, hooks = self._trainer, self._trainer.hooks
        if self._limit == 0:
            trainer.current.evaluation_batches.pop(Stage.PREDICT, None)
            return []
        loaders, limits = self._load()
        results: list[Any] = []
        taken = as_taken(self._task, "predict_step", lambda: self._feed.following())
        bound = bind_evaluation_step(trainer, self._task, self._model, taken)
        self._step = trainer.actions.watch(trainer.actions.of_strategy("predict_step"), bound)
        with evaluating(self._task, Stage.PREDICT, self._model):
            trainer.logged.enter(PREDICT)
            with evaluation_context(self._strategy.capability(PlainEvaluation), trainer.inference_mode):
                hooks.call("on_predict_start")
                hooks.call("on_predict_epoch_start")
                if self._source.is_stale:  # a hook has changed what they are made of
                    self._forget(loaders)
                    loaders, limits = self._load()
                for index, (loader, limit) in enumerate(zip(loaders, limits, strict=True)):
                    results.append(self._run_loader(loader, limit, index if len(loaders) > 1 else None))
            with torch.no_grad():
                hooks.call("on_predict_epoch_end")
                hooks.call("on_predict_end")
        self._forget(loaders)
        return results[0] if len(results) == 1 else results

    def _load(self) -> tuple[list[Prepared], list[float]]:
        """Prepare the loaders; returns them, and how many batches of each are run."""
        loaders = self._source.prepare_evaluation()
        limits = limits_of(loaders, self._limit, "limit_predict_batches", self._strategy.needs_even_batches)
        self._trainer.current.evaluation_batches[Stage.PREDICT] = own_batches(loaders, limits)
        return loaders, limits

    def _forget(self, loaders: list[Prepared]) -> None:
        for loader in loaders:
            self._trainer.accelerator.forget_loader(loader)

    def _run_loader(self, loader: Prepared, limit: float, dataloader_idx: int | None) -> list[Any]:
        trainer, hooks, current = self._trainer, self._trainer.hooks, self._trainer.current
        extra = loader_argument(self._task.predict_step, dataloader_idx)
        on_start = hooks.find_of_batch("on_predict_batch_start", dataloader_idx)
        on_end = hooks.find_of_batch("on_predict_batch_end", dataloader_idx)
        outputs: list[Any] = []
        leaving = HostBlocks(PartialState())
        feed = self._feed = Feed(
            trainer.actions.iterate(
                "predict_dataloader_next", loader.iterate(limit, together=self._strategy.needs_even_batches)
            ),
            loader,
            current,
            dataloader_idx or 0,
        )
        with suppress(DataEnded), feed:
            for batch in feed:
                for hook in on_start:
                    hook(batch, feed.index)
                output = self._step(batch, feed.index, *extra)
                if output is None and self._keep:
                    logger.warning_once("predict returned None for a batch: nothing is kept of it.")
                for hook in on_end:
                    hook(output, feed.batch, feed.index)
                trainer.logged.evaluated.count(Stage.PREDICT, dataloader_idx or 0)
                if self._keep:
                    outputs += leaving.add(output, partial(_real_rows, current.batch_info))
                if feed.index + 1 >= limit:
                    break
        outputs += leaving.take()
        if trainer.world_size == 1 or not self._keep:
            return outputs
        if not trainer.gathers_predictions:
            return [each for each in outputs if each is not None]
        everyone = self._strategy.topology.select(self._gathered(outputs), rows=True)
        longest = max(len(each) for each in everyone)
        return [
            each[turn] for turn in range(longest) for each in everyone if turn < len(each) and each[turn] is not None
        ]

    def _gathered(self, outputs: list[Any]) -> list[list[Any]]:
        """The outputs of each process."""
        try:
            return gather_object([outputs])
        except DataError as error:
            raise DataError(
                f"predict() returns the predictions of all processes, and those of {type(self._task).__name__} cannot "
                f"be sent between them. Return tensors, or containers of them, from predict_step; or write them with "
                f"a PredictionWriter and call predict(return_predictions=False). {error}"
            ) from error


def _real_rows(info: BatchInfo | None, output: Any) -> Any:
    """An output without the rows that pad its batch; None where all do."""
    if info is None or not info.padding:
        return output
    if info.real_rows == 0:
        return None
    keep, rows = info.real_rows, info.rows
    return recursively_apply(lambda t: t[:keep] if t.dim() and t.shape[0] == rows else t, output)
