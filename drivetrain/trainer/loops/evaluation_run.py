"""`validate`, `test` and `predict`, and the validation that `fit` runs within."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

from drivetrain.callbacks.stage import Stage
from drivetrain.runtime.errors import InvalidLoaderError
from drivetrain.runtime.seeds import RandomState
from drivetrain.trainer import task_checks
from drivetrain.trainer.compiled_task import uncompiled
from drivetrain.trainer.data_module import DataModule
from drivetrain.trainer.hooks import is_overridden
from drivetrain.trainer.loops.evaluation_loop import EvaluationLoop
from drivetrain.trainer.loops.interruption import EvaluationEnded
from drivetrain.trainer.loops.loader_source import LoaderSource
from drivetrain.trainer.metrics.results_table import print_results
from drivetrain.trainer.state.resume import find_checkpoint
from drivetrain.trainer.state.saved_run import SavedRun
from drivetrain.trainer.task import Task

if TYPE_CHECKING:
    from drivetrain.trainer.trainer import Trainer

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
    """Set up and place a task, run a loop over its data, and tear down.

    Args:
        trainer: The trainer.
        stage: Validating, testing or predicting.
        model: The task; that of the last run if None.
        dataloaders: One loader or several, or a `DataModule`.
        datamodule: Where loaders come from instead.
        ckpt_path: A checkpoint whose weights to use.
        run: Runs the loop over the task, the placed model and the source of its loaders.

    Returns:
        What `run` returned.
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
                f"data. Pass dataloaders, or give the task or a DataModule a {stage.loader_name}()."
            )
        placed = task_run.place_for_evaluation(task)
        if ckpt_path is not None:
            path = task_run.checkpoint_path = find_checkpoint(trainer, ckpt_path) or ""
            saved = SavedRun(trainer, path)
            saved.restore_for_evaluation()
            trainer.tracker_log.evaluated_step = saved.step
        trainer.on_task_placed(task)
        trainer.current.stage = stage
        return run(task, placed, source)
    except BaseException as error:
        task_run.report_exception(task, error)
        raise
    finally:
        task_run.tear_down(task, stage)
        trainer.tracker_log.evaluated_step = None


def _best_of_last_fit(trainer: Trainer, stage: Stage) -> str | None:
    """The checkpoint that a verb without a model takes: the best of the last `fit`, if it has saved one."""
    callback = trainer.checkpoint_callback
    if callback is None or not callback.best_model_path or trainer.control.reason is None:
        return None
    if trainer.is_global_zero:
        warnings.warn(
            f"{stage.verb}() was called without a model. The best model of the previous `fit` call will be used: "
            f"{callback.best_model_path}. Pass the model to take its weights as they are, or another ckpt_path.",
            stacklevel=5,
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
    """Validate or test; returns for each loader what was logged.

    Args:
        trainer: The trainer.
        stage: Validating or testing.
        model: The task; that of the last run if None.
        dataloaders: One loader or several, or a `DataModule`.
        datamodule: Where loaders come from instead.
        ckpt_path: A checkpoint whose weights to use.
        verbose: Whether to print the results.
    """

    def run(task: Task, placed: nn.Module, source: LoaderSource) -> list[dict[str, float]]:
        trainer.logged.start((stage,))
        limit = getattr(trainer, stage.limit_name)
        return EvaluationLoop(trainer, task, placed, stage, source, limit, stage.limit_name).run_alone()

    results = evaluate(trainer, stage, model, dataloaders, datamodule, ckpt_path, run)
    if verbose and trainer.is_global_zero:
        print_results(stage.verb, results)
    return results


def make_validation(trainer: Trainer, task: Task, model: nn.Module, source: LoaderSource) -> EvaluationLoop | None:
    """The validation within `fit`, or None where there is nothing to validate.

    Args:
        trainer: The trainer.
        task: Its task.
        model: What the strategy made of the task.
        source: Where the loaders come from.
    """
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
    """Try a few batches of the validation before training; nothing of it counts.

    A signal ends it after the batch under way. The training loop then saves before its first step.

    Args:
        trainer: The trainer.
        validation: The validation, if there is one.
    """
    steps = trainer.num_sanity_val_steps
    if validation is None or steps == 0:
        return
    with trainer.current.within(Stage.VALIDATE, sanity_checking=True), validation.undone(), suppress(EvaluationEnded):
        trainer.logged.start((Stage.VALIDATE,))
        trainer.hooks.call("on_sanity_check_start")
        at_most = None if steps < 0 else steps
        try:
            validation.run(at_most, keep=False, watch=trainer.control.watch_evaluation)
        except BaseException:
            validation.forget()
            raise
        trainer.hooks.call("on_sanity_check_end")
