"""Steps and batches that are run for what can be seen of them, within `undone`."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import TYPE_CHECKING

from drivetrain.callbacks import Callback
from drivetrain.callbacks.stage import Stage
from drivetrain.data import CombinedLoader, PendingBatch, PreparedLoader
from drivetrain.runtime.errors import DataError
from drivetrain.trainer.loops.choose_step import choose_step
from drivetrain.trainer.loops.evaluation_loop import EvaluationLoop
from drivetrain.trainer.loops.loader_source import LoaderSource
from drivetrain.trainer.loops.prediction_loop import PredictionLoop
from drivetrain.trainer.loops.training_batches import epoch_length
from drivetrain.trainer.metrics.log_scopes import TRAIN_END, TRAIN_EPOCH, TRAIN_STEP
from drivetrain.trainer.task import Task

if TYPE_CHECKING:
    from drivetrain.trainer.trainer import Trainer


class TrainingRehearsal:
    """Optimizer steps of a task, on its own training data, with no other callback than those given.

    Args:
        trainer: The trainer, which has placed the task.
        task: The task.
        callbacks: What watches the steps.
        splits: Whether a step that lacks memory may be cut, where the trainer was asked for that.
    """

    def __init__(self, trainer: Trainer, task: Task, callbacks: Sequence[Callback] = (), splits: bool = True) -> None:
        self._trainer, self._task = trainer, task
        assert trainer.task_run.model is not None
        with trainer.task_run.with_callbacks(callbacks):
            self._hooks = trainer.hooks
            view = trainer.strategy.view(trainer.task_run.model, "train" if task.automatic_optimization else "manual")
            self._step = choose_step(trainer, task, view, splits)

    def run(
        self,
        source: LoaderSource,
        steps: int,
        run_window: Callable[[int, list[PendingBatch]], bool],
        within_limits: bool = False,
    ) -> None:
        """Run steps, one epoch after the other, with the task's hooks around them.

        Args:
            source: Where the loader comes from.
            steps: How many at most.
            run_window: Runs one, from its number and its micro-batches; returns whether to run another.
            within_limits: Whether an epoch has the batches that the Trainer's limits leave it, rather than all.
        """
        trainer, hooks, done, is_over = self._trainer, self._hooks, 0, False
        trainer.current.leave_batch()  # of a trial that has failed
        trainer.progress.begin_epoch(trainer.progress.epoch)
        with prepared(source) as loader:
            limit = epoch_length(trainer, loader) if within_limits else None
            trainer.current.stage = Stage.TRAIN
            trainer.logged.enter(TRAIN_EPOCH)
            hooks.call("on_train_start")
            while not is_over:
                hooks.call("on_train_epoch_start")
                trainer.logged.enter(TRAIN_STEP)
                with closing(self._windows(loader, limit)) as windows:
                    for window in windows:
                        is_over = not run_window(done, window) or trainer.control.ends_to_be_resumed
                        done += 1
                        is_over = is_over or done >= steps
                        if is_over:
                            break
                trainer.current.leave_batch()
                trainer.logged.enter(TRAIN_EPOCH)
                trainer.logged.finish_epoch(Stage.TRAIN, self._task)
                hooks.call("on_train_epoch_end")
                trainer.progress.begin_epoch(trainer.progress.epoch + 1)
            trainer.logged.enter(TRAIN_END)
            hooks.call("on_train_end")

    def step(self, window: list[PendingBatch]) -> None:
        """Run one step.

        Args:
            window: Its micro-batches.
        """
        self._step.run(window)

    def try_gradients(self, source: LoaderSource) -> None:
        """Run the forwards and backwards of the first step without exchanging gradients, and without stepping.

        What a process lacks memory for shows here while no peer waits for its gradients.

        Args:
            source: Where the loader comes from.
        """
        trainer = self._trainer
        trainer.current.stage = Stage.TRAIN
        trainer.logged.enter(TRAIN_STEP)
        with prepared(source) as loader, closing(self._windows(loader, None)) as windows:
            for window in windows:
                self._step.try_gradients(window)
                break
        trainer.current.leave_batch()

    def _windows(
        self, loader: PreparedLoader | CombinedLoader, limit: float | None
    ) -> Generator[list[PendingBatch], None, None]:
        """The micro-batches of an epoch, as many as make one step at a time."""
        size, index = self._trainer.accumulate_grad_batches, 0
        window: list[PendingBatch] = []
        loader.set_epoch(self._trainer.progress.epoch)
        for batch in loader.iterate_pending(limit, together=True):
            batch.batch_idx = index
            window.append(batch)
            index += 1
            if len(window) == size or batch.info.last or index == limit:
                yield window
                window = []
                if index == limit:
                    return
        if window:
            yield window
        if not index:
            raise DataError("The training loader gave no batch in a whole epoch. Check the dataset and its filters.")


def rehearse_evaluation(trainer: Trainer, task: Task, stage: Stage, source: LoaderSource, batches: int) -> None:
    """Run a few batches of each loader of an evaluation.

    Args:
        trainer: The trainer, which has placed the task.
        task: The task.
        stage: Which evaluation.
        source: Where its loaders come from.
        batches: How many of each.
    """
    model = trainer.task_run.model
    assert model is not None
    with trainer.task_run.with_callbacks(()), trainer.current.within(stage):
        if stage is Stage.PREDICT:
            PredictionLoop(trainer, task, model, source, keep=False, limit=batches).run()
        else:
            loop = EvaluationLoop(trainer, task, model, stage, source, batches, stage.limit_name)
            loop.run(keep=False)
            loop.forget()


@contextmanager
def prepared(source: LoaderSource) -> Iterator[PreparedLoader | CombinedLoader]:
    """The training loader of a source, whose generators are put back in the end, and which the engine then forgets."""
    loader = source.prepare_training()
    with ExitStack() as stack:
        stack.callback(source.forget_training)
        for each in [loader] if isinstance(loader, PreparedLoader) else loader.loaders:
            stack.enter_context(each.undone())
        yield loader
