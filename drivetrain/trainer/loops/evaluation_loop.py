"""Validation, test and prediction loops."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from drivetrain.callbacks.base import Stage
from drivetrain.data import BatchInfo
from drivetrain.runtime.collectives import gather_object
from drivetrain.runtime.errors import DataError, InvalidLoaderError
from drivetrain.runtime.logging import get_logger
from drivetrain.runtime.memory import HostBlocks
from drivetrain.runtime.pytrees import recursively_apply
from drivetrain.runtime.seeds import RandomState, isolated_random_state, kept_generators
from drivetrain.runtime.state import PartialState
from drivetrain.strategies.base import evaluation_context
from drivetrain.strategies.step_module import StepModule
from drivetrain.trainer import task_checks
from drivetrain.trainer.compiling import uncompiled
from drivetrain.trainer.data_module import DataModule
from drivetrain.trainer.hooks import is_overridden
from drivetrain.trainer.loops.batches import LoaderSource, Prepared, limits_of, own_batches
from drivetrain.trainer.loops.run_control import EvaluationEnded, EvaluationWatch
from drivetrain.trainer.loops.step import DataEnded, Feed, adapt_step, bind_evaluation_step, muted_logging
from drivetrain.trainer.metrics.logged_values import (
    PREDICT,
    TEST_EPOCH,
    TEST_STEP,
    VALIDATE_EPOCH,
    VALIDATE_STEP,
    EpochValue,
    LogScope,
)
from drivetrain.trainer.metrics.tracker_log import print_results
from drivetrain.trainer.metrics.transfer import to_numbers
from drivetrain.trainer.options import LimitPerLoader
from drivetrain.trainer.state.saved_run import SavedRun, find_checkpoint
from drivetrain.trainer.task import Task

if TYPE_CHECKING:
    from drivetrain.trainer.trainer import Trainer


_SCOPES: dict[Stage, tuple[LogScope, LogScope]] = {
    Stage.VALIDATE: (VALIDATE_STEP, VALIDATE_EPOCH),
    Stage.TEST: (TEST_STEP, TEST_EPOCH),
}


class EvaluationLoop:
    """Loop that runs a task's `validation_step` or `test_step` on all batches of its loaders."""

    def __init__(
        self,
        trainer: Trainer,
        task: Task,
        model: nn.Module,
        stage: Stage,
        source: LoaderSource,
        limit: LimitPerLoader,
        limit_name: str,
        drawn_from: RandomState | None = None,
    ) -> None:
        self._trainer, self._task, self._stage = trainer, task, stage
        self._hooks = trainer.hooks
        self._source, self._limit, self._limit_name = source, limit, limit_name
        self._loaders: list[Prepared] | None = None
        self._loaded_in: float = -FOREVER  # epoch in which the loaders were made
        self._limits: list[float] = []
        self._drawn_from = drawn_from
        self._strategy, self._model = trainer.strategy, model
        self._step: Callable[..., Any]
        self._feed: Feed
        self._in_step, self._in_epoch = _SCOPES[stage]
        self._watch: Callable[[], EvaluationWatch] | None = None

    def load(self) -> list[Prepared]:
        trainer = self._trainer
        every, epoch = trainer.reload_dataloaders_every_n_epochs, trainer.current_epoch
        stale = every and epoch - self._loaded_in >= every and self._stage is Stage.VALIDATE
        if self._loaders is None or stale or self._source.is_stale:
            # Loaders of the sanity check also serve the first epoch if that epoch validates.
            if not trainer.sanity_checking or (epoch + 1) % (trainer.check_val_every_n_epoch or 1) == 0:
                self._loaded_in = epoch
            self.forget()
            with self._separate_random_state():
                self._loaders = self._source.prepare_evaluation()
            even = self._strategy.needs_even_batches
            self._limits = limits_of(
                self._loaders, self._limit, self._limit_name, even, trainer.current.loaders[self._stage]
            )
            trainer.current.evaluation_batches[self._stage] = own_batches(self._loaders, self._limits)
        return self._loaders

    @contextmanager
    def _separate_random_state(self) -> Iterator[None]:
        # The block runs with the random state from the start of `fit`, so that training draws equal numbers with and
        # without validation.
        state, self._drawn_from = self._drawn_from, None
        if state is None:
            yield
            return
        with isolated_random_state(devices=True), kept_generators(self._task, self._trainer.datamodule):
            state.restore()
            yield

    @contextmanager
    def preserve_random_state(self) -> Iterator[None]:
        # Training must not draw other random numbers because of the sanity check. The loaders restore their own
        # generators in `run(keep=False)`.
        with isolated_random_state(devices=True), kept_generators(self._task, self._trainer.datamodule):
            yield

    def run(
        self,
        at_most: int | None = None,
        keep: bool = True,
        on_results: Callable[[], None] | None = None,
        watch: Callable[[], EvaluationWatch] | None = None,
    ) -> list[dict[str, float]]:
        # `at_most` limits the batches of each loader. With `keep=False`, as in the sanity check, results are discarded
        # and positions restored. `watch` returns an object for each loader that may end the evaluation after a signal.
        trainer, hooks, stage = self._trainer, self._hooks, self._stage
        self._watch = watch
        loaders = self.load()
        taken = adapt_step(self._task, stage.step_name, lambda: self._feed.following())
        bound = bind_evaluation_step(trainer, self._task, self._model, taken)
        self._step = trainer.actions.watch(trainer.actions.of_strategy(stage.step_name), bound)
        with ExitStack() as stack:
            stack.enter_context(evaluating(self._task, stage, self._model))
            # A sanity check must not move the loaders, or the first validation would see other batches.
            for loader in () if keep else loaders:
                stack.enter_context(loader.preserve_state())
            trainer.logged.enter(self._in_epoch)
            # Within `fit`, inference tensors that a task keeps would fail in a later backward.
            inference = trainer.inference_mode and trainer.task_run.stage is not Stage.TRAIN
            with evaluation_context(self._strategy, inference):
                hooks.call(stage.hook_name("start"))
                hooks.call(stage.hook_name("epoch_start"))
                if self._source.is_stale:  # a hook changed a setting of the loaders
                    loaders = self.load()
                limits = [min(limit, FOREVER if at_most is None else at_most) for limit in self._limits]
                for index, (loader, limit) in enumerate(zip(loaders, limits, strict=True)):
                    self._run_loader(loader, limit, index if len(loaders) > 1 else None, keep)
            with torch.no_grad():  # not inference mode: training uses tensors of these hooks, such as masks
                results = self._finish(keep, on_results)
        return _by_loader(results, len(loaders), trainer.tracker_log.name_of)

    def _finish(self, keep: bool, on_results: Callable[[], None] | None) -> list[EpochValue]:
        trainer, hooks, stage = self._trainer, self._hooks, self._stage
        trainer.logged.enter(self._in_epoch)
        results = trainer.tracker_log.finish_epoch(stage, keep)
        try:
            hooks.call(stage.hook_name("epoch_end"))
        except BaseException:
            if keep:
                trainer.tracker_log.write_in_spite_of_error(partial(trainer.tracker_log.write_epoch_values, results))
            raise
        # A second time, for values that the hooks of the epoch's end have logged.
        results += trainer.tracker_log.finish_epoch(stage, keep)
        trainer.logged.reset_finished()
        if keep:
            trainer.tracker_log.write_epoch_values(results)
        if on_results is not None:
            on_results()
        trainer.logged.enter(LogScope(f"in {stage.hook_name('end')}", None))
        hooks.call(stage.hook_name("end"))
        return results

    def run_alone(self) -> list[dict[str, float]]:
        # `validate` or `test`, not a validation within `fit`.
        if self._limit == 0:
            self._trainer.current.evaluation_batches.pop(self._stage, None)
            return []
        try:
            return self.run()
        finally:
            self.forget()

    def forget(self) -> None:
        for loader in self._loaders or []:
            self._trainer.accelerator.forget_loader(loader)

    def _run_loader(self, loader: Prepared, limit: float, dataloader_idx: int | None, keep: bool) -> None:
        trainer, step, current = self._trainer, self._step, self._trainer.current
        trainer.logged.enter(self._in_step, dataloader_idx)
        extra = loader_argument(getattr(self._task, self._stage.step_name), dataloader_idx)
        on_start = self._hooks.find_of_batch(self._stage.hook_name("batch_start"), dataloader_idx)
        on_end = self._hooks.find_of_batch(self._stage.hook_name("batch_end"), dataloader_idx)
        loader.set_epoch(trainer.current_epoch)
        batches = loader.iterate(limit, together=self._strategy.needs_even_batches)
        watched = trainer.actions.iterate(f"{self._stage.loader}_dataloader_next", batches)
        feed = self._feed = Feed(watched, loader, current, dataloader_idx or 0)
        watch = None if self._watch is None else self._watch()
        with suppress(DataEnded), feed:
            for batch in feed:
                info = current.batch_info
                # A rank that has run out of data joins the collectives of the others with a batch of padding.
                # Hooks do not run for it, and its logged values are discarded.
                if info is not None and info.real_rows == 0:
                    with muted_logging(self._trainer.logged, self._task):
                        self._step(batch, feed.index, *extra)
                else:
                    for hook in on_start:
                        hook(batch, feed.index)
                    outputs = step(batch, feed.index, *extra)
                    for hook in on_end:
                        hook(outputs, feed.batch, feed.index)
                    if keep:
                        trainer.tracker_log.write_evaluation_step()
                if watch is not None:
                    watch.count_batch()
                if feed.index + 1 >= limit:
                    break
        if watch is not None:
            watch.finish()


FOREVER = float("inf")


@contextmanager
def evaluating(task: Task, stage: Stage, model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in task.modules()]
    _call_if_any(task, stage.hook_name("model_eval"))
    if isinstance(model, StepModule):
        modes.append((model, model.training))
        model.training = task.training
    try:
        yield
    finally:
        _call_if_any(task, stage.hook_name("model_train"))
        # One by one: `task.train()` would also set frozen modules that the user keeps in evaluation mode.
        for module, mode in modes:
            module.training = mode


def _call_if_any(task: Task, name: str) -> None:
    hook = getattr(task, name)
    if hook is not None:
        hook()


def loader_argument(step: Callable[..., Any], dataloader_idx: int | None) -> tuple[int, ...]:
    """Return the loader's index as an argument tuple for a step, or () if it takes none."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(step).parameters.values()
    third = [p for p in parameters if p.kind in positional][2:3]
    takes_any = any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters)
    needs_it = bool(third) and third[0].default is inspect.Parameter.empty
    if dataloader_idx is None:
        # A step that requires the index receives 0 even if there is only one loader.
        return (0,) if needs_it else ()
    return (dataloader_idx,) if third or takes_any else ()


def _by_loader(results: list[EpochValue], count: int, name_of: Callable[[EpochValue], str]) -> list[dict[str, float]]:
    numbers = to_numbers({name_of(result): result.value for result in results})
    # Values that belong to the whole epoch, not to one loader, appear in the dict of every loader.
    if not count:
        return [numbers] if numbers else []
    loaders = {name_of(result): result.loader for result in results}
    return [
        {name: value for name, value in numbers.items() if loaders[name] in (None, index)} for index in range(count)
    ]


# Entry points of `validate`, `test` and `predict`, and the validation within `fit`


R = TypeVar("R")


def evaluate(
    trainer: Trainer,
    stage: Stage,
    model: Task | None,
    dataloaders: Any,
    datamodule: DataModule | None,
    ckpt_path: str | os.PathLike[str] | None,
    run: Callable[[Task, nn.Module, LoaderSource], list[R]],
) -> list[R]:
    """Run `validate`, `test` or `predict` on a task, and return the results.

    `run` gets the task, its prepared model and the source of its loaders. Without a `model`, it is the last one of
    `fit`.
    """
    if isinstance(dataloaders, DataModule):
        dataloaders, datamodule = None, dataloaders
    task = task_checks.check_evaluation(trainer.task if model is None else uncompiled(model), stage)
    if datamodule is None and model is None and dataloaders is None:
        datamodule = trainer.datamodule
    task_run = trainer.task_run
    if ckpt_path is None and model is None:
        ckpt_path = _best_of_last_fit(trainer, stage)
    task_run.attach(task, datamodule, stage, {stage: dataloaders})
    source = task_run.sources[stage]
    try:
        task_run.set_up(task, stage)
        if not source.is_defined():
            raise InvalidLoaderError(
                f"An invalid dataloader was passed to `Trainer.{stage.verb}(dataloaders=...)`: {stage.verb}() has no "
                f"data. Pass dataloaders, or define {stage.loader_name}() in the task or a DataModule."
            )
        placed = task_run.place_for_evaluation(task)
        if ckpt_path is not None:
            path = task_run.checkpoint_path = find_checkpoint(trainer, ckpt_path) or ""
            saved = SavedRun(trainer, path)
            saved.restore_for_evaluation()
            trainer.tracker_log.evaluated_step = saved.step
        trainer.current.stage = stage
        return run(task, placed, source)
    except BaseException as error:
        task_run.report_exception(task, error)
        raise
    finally:
        task_run.tear_down(task, stage)
        trainer.tracker_log.evaluated_step = None


def _best_of_last_fit(trainer: Trainer, stage: Stage) -> str | None:
    callback = trainer.checkpoint_callback
    if callback is None or not callback.best_model_path or trainer.control.reason is None:
        return None
    if trainer.is_global_zero:
        warnings.warn(
            f"{stage.verb}() was called without a model. The best model of the previous `fit` call will be used: "
            f"{callback.best_model_path}. To use the current weights, pass the model. To use others, pass ckpt_path.",
            stacklevel=6,
        )
    return callback.best_model_path


def evaluate_logged(
    trainer: Trainer,
    stage: Stage,
    model: Task | None,
    dataloaders: Any,
    datamodule: DataModule | None,
    ckpt_path: str | os.PathLike[str] | None,
    verbose: bool,
) -> list[dict[str, float]]:
    """Run the Trainer's `validate` or `test`, and return a dict of logged values for each loader."""

    def run(task: Task, placed: nn.Module, source: LoaderSource) -> list[dict[str, float]]:
        trainer.logged.start((stage,))
        limit = getattr(trainer, stage.limit_name)
        return EvaluationLoop(trainer, task, placed, stage, source, limit, stage.limit_name).run_alone()

    results = evaluate(trainer, stage, model, dataloaders, datamodule, ckpt_path, run)
    if verbose and trainer.is_global_zero:
        print_results(stage.verb, results)
    return results


def make_validation(trainer: Trainer, task: Task, model: nn.Module, source: LoaderSource) -> EvaluationLoop | None:
    """Create the loop that validates within `fit`, or return None if nothing is to be validated."""
    if trainer.limit_val_batches == 0:
        return None
    if not trainer.barebones:
        task_checks.warn_of_unused_validation(task, source.is_defined())
    if not source.is_defined() or not is_overridden(task, Task, "validation_step"):
        return None
    limit = trainer.overfit_batches or trainer.limit_val_batches
    name = "overfit_batches" if trainer.overfit_batches else Stage.VALIDATE.limit_name
    return EvaluationLoop(trainer, task, model, Stage.VALIDATE, source, limit, name, RandomState.capture())


def run_sanity_check(trainer: Trainer, validation: EvaluationLoop | None) -> None:
    """Run a few validation batches before training, to find errors early.

    The results are discarded. A signal ends the check after the current batch. The training loop then saves before its
    first step.
    """
    steps = trainer.num_sanity_val_steps
    if validation is None or steps == 0:
        return
    with (
        trainer.current.within(Stage.VALIDATE, sanity_checking=True),
        validation.preserve_random_state(),
        suppress(EvaluationEnded),
    ):
        trainer.logged.start((Stage.VALIDATE,))
        trainer.hooks.call("on_sanity_check_start")
        at_most = None if steps < 0 else steps
        try:
            validation.run(at_most, keep=False, watch=trainer.control.watch_evaluation)
        except BaseException:
            validation.forget()
            raise
        trainer.hooks.call("on_sanity_check_end")


# Prediction


logger = get_logger(__name__)


class PredictionLoop:
    """Loop that runs a task's `predict_step` and collects the predictions."""

    def __init__(
        self,
        trainer: Trainer,
        task: Task,
        model: nn.Module,
        source: LoaderSource,
        keep: bool,
        limit: int | None = None,
        gather: bool = True,
    ) -> None:
        self._gather = gather
        self._trainer, self._task, self._source, self._keep = trainer, task, source, keep
        self._limit = trainer.limit_predict_batches if limit is None else limit
        self._strategy, self._model = trainer.strategy, model
        self._step: Callable[..., Any]
        self._feed: Feed

    def run(self) -> list[Any]:
        """Run the prediction loop over all loaders. Return the outputs of `predict_step` in the order of the data."""
        trainer, hooks = self._trainer, self._trainer.hooks
        if self._limit == 0:
            trainer.current.evaluation_batches.pop(Stage.PREDICT, None)
            return []
        loaders, limits = self._load()
        results: list[Any] = []
        taken = adapt_step(self._task, "predict_step", lambda: self._feed.following())
        bound = bind_evaluation_step(trainer, self._task, self._model, taken)
        self._step = trainer.actions.watch(trainer.actions.of_strategy("predict_step"), bound)
        with evaluating(self._task, Stage.PREDICT, self._model):
            trainer.logged.enter(PREDICT)
            with evaluation_context(self._strategy, trainer.inference_mode):
                hooks.call("on_predict_start")
                hooks.call("on_predict_epoch_start")
                if self._source.is_stale:  # a hook changed a setting of the loaders
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
        loaders = self._source.prepare_evaluation()
        limits = limits_of(
            loaders,
            self._limit,
            "limit_predict_batches",
            self._strategy.needs_even_batches,
            self._trainer.current.loaders[Stage.PREDICT],
        )
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
                    logger.warning_once("predict_step returned None for a batch, so this batch has no prediction.")
                for hook in on_end:
                    hook(output, feed.batch, feed.index)
                trainer.logged.evaluated.count(Stage.PREDICT, dataloader_idx or 0)
                if self._keep:
                    # Copied to the CPU asynchronously, so that predictions neither stall nor fill the device.
                    outputs += leaving.add(output, partial(_real_rows, current.batch_info))
                if feed.index + 1 >= limit:
                    break
        outputs += leaving.take()
        if trainer.world_size == 1 or not self._keep:
            return outputs
        if not self._gather:
            return [each for each in outputs if each is not None]
        everyone = self._strategy.topology.select(self._gathered(outputs), rows=True)
        # Batches are distributed over the ranks in turn, so taking one per rank restores the order of the data.
        longest = max(len(each) for each in everyone)
        return [
            each[turn] for turn in range(longest) for each in everyone if turn < len(each) and each[turn] is not None
        ]

    def _gathered(self, outputs: list[Any]) -> list[list[Any]]:
        try:
            return gather_object([outputs])
        except DataError as error:
            raise DataError(
                f"predict() collects the predictions of all processes, but those of {type(self._task).__name__} cannot "
                "be sent between processes. Return tensors or containers of tensors from predict_step, or write "
                f"the predictions with a PredictionWriter and call predict(return_predictions=False). {error}"
            ) from error


def _real_rows(info: BatchInfo | None, output: Any) -> Any:
    if info is None or not info.padding:
        return output
    if info.real_rows == 0:
        return None
    keep, rows = info.real_rows, info.rows
    return recursively_apply(lambda t: t[:keep] if t.dim() and t.shape[0] == rows else t, output)
