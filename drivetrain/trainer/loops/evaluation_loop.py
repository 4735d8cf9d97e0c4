"""Validation and test: every sample once, over all processes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from drivetrain.callbacks.stage import Stage
from drivetrain.data.randomness import kept_generators
from drivetrain.runtime.seeds import RandomState, isolated_random_state
from drivetrain.strategies.capabilities import PlainEvaluation, evaluation_context
from drivetrain.strategies.step_module import StepModule
from drivetrain.trainer.loops.binding import DataEnded, Feed, as_taken, bind_evaluation_step, muted_logging
from drivetrain.trainer.loops.interruption import EvaluationWatch
from drivetrain.trainer.loops.loader_source import LoaderSource, Prepared, limits_of, own_batches
from drivetrain.trainer.metrics.log_scopes import TEST_EPOCH, TEST_STEP, VALIDATE_EPOCH, VALIDATE_STEP, LogScope
from drivetrain.trainer.metrics.logged_value import EpochValue, to_numbers
from drivetrain.trainer.task import Task

if TYPE_CHECKING:
    from drivetrain.trainer.trainer import Trainer

_SCOPES: dict[Stage, tuple[LogScope, LogScope]] = {
    Stage.VALIDATE: (VALIDATE_STEP, VALIDATE_EPOCH),
    Stage.TEST: (TEST_STEP, TEST_EPOCH),
}


class EvaluationLoop:
    """Runs the task's validation or test step over its loaders.

    Args:
        trainer: The trainer.
        task: Its task.
        model: What the strategy made of the task.
        stage: Validating or testing.
        source: Where the loaders come from.
        limit: How many batches of each loader: a whole number, a fraction, or None for all.
        limit_name: That argument's name, for errors.
        drawn_from: The random state that the loaders are first made in, without moving that of training; the present
            one, which moves on, if None.
    """

    def __init__(
        self,
        trainer: Trainer,
        task: Task,
        model: nn.Module,
        stage: Stage,
        source: LoaderSource,
        limit: float | int | None,
        limit_name: str,
        drawn_from: RandomState | None = None,
    ) -> None:
        self._trainer, self._task, self._stage = trainer, task, stage
        self._hooks = trainer.hooks
        self._source, self._limit, self._limit_name = source, limit, limit_name
        self._loaders: list[Prepared] | None = None
        self._loaded_in: float = -FOREVER  # the epoch that they were made in
        self._limits: list[float] = []
        self._drawn_from = drawn_from
        self._strategy, self._model = trainer.strategy, model
        self._step: Callable[..., Any]
        self._feed: Feed
        self._in_step, self._in_epoch = _SCOPES[stage]
        self._watch: Callable[[], EvaluationWatch] | None = None

    def load(self) -> list[Prepared]:
        """Prepare the loaders, the first time they are needed or when they are to be made again."""
        trainer = self._trainer
        every, epoch = trainer.reload_dataloaders_every_n_epochs, trainer.current_epoch
        stale = every and epoch - self._loaded_in >= every and self._stage is Stage.VALIDATE
        if self._loaders is None or stale or self._source.is_stale:
            # those of a sanity check serve the first epoch, where it validates
            if not trainer.sanity_checking or (epoch + 1) % (trainer.check_val_every_n_epoch or 1) == 0:
                self._loaded_in = epoch
            self.forget()
            with self._drawing_apart():
                self._loaders = self._source.prepare_evaluation()
            even = self._strategy.needs_even_batches
            self._limits = limits_of(self._loaders, self._limit, self._limit_name, even)
            trainer.current.evaluation_batches[self._stage] = own_batches(self._loaders, self._limits)
        return self._loaders

    @contextmanager
    def _drawing_apart(self) -> Iterator[None]:
        """Let what the first making of loaders draws depend on nothing but the start of the run, and change nothing."""
        state, self._drawn_from = self._drawn_from, None
        if state is None:
            yield
            return
        with isolated_random_state(devices=True), kept_generators(self._task, self._trainer.datamodule):
            state.restore()
            yield

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Undo in the end what the body draws, as the sanity check does: training then draws what it does without.

        The global generators are put back, those of devices too, and those that the task and the data module hold; a
        `run` that keeps nothing puts back those of its loaders and their datasets.
        """
        with isolated_random_state(devices=True), kept_generators(self._task, self._trainer.datamodule):
            yield

    def run(
        self,
        at_most: int | None = None,
        keep: bool = True,
        on_results: Callable[[], None] | None = None,
        watch: Callable[[], EvaluationWatch] | None = None,
    ) -> list[dict[str, float]]:
        """Evaluate once.

        Args:
            at_most: Batches of each loader, for a sanity check.
            keep: Whether the results become visible and are written.
            on_results: Called when they are, before the last hooks.
            watch: Makes what ends the pass over each loader when a signal has come.

        Returns:
            For each loader, its logged values by name.

        Raises:
            EvaluationEnded: A signal has come, and `watch` was given.
        """
        trainer, hooks, stage = self._trainer, self._hooks, self._stage
        self._watch = watch
        loaders = self.load()
        taken = as_taken(self._task, stage.step_name, lambda: self._feed.following())
        bound = bind_evaluation_step(trainer, self._task, self._model, taken)
        self._step = trainer.actions.watch(trainer.actions.of_strategy(stage.step_name), bound)
        with ExitStack() as stack:
            stack.enter_context(evaluating(self._task, stage, self._model))
            for loader in () if keep else loaders:
                stack.enter_context(loader.undone())
            trainer.logged.enter(self._in_epoch)
            # A task may keep a tensor of a validation within fit and train with it.
            inference = trainer.inference_mode and trainer.task_run.stage is not Stage.TRAIN
            with evaluation_context(self._strategy.capability(PlainEvaluation), inference):
                hooks.call(stage.hook_name("start"))
                hooks.call(stage.hook_name("epoch_start"))
                if self._source.is_stale:  # a hook has changed what they are made of
                    loaders = self.load()
                limits = [min(limit, FOREVER if at_most is None else at_most) for limit in self._limits]
                for index, (loader, limit) in enumerate(zip(loaders, limits, strict=True)):
                    self._run_loader(loader, limit, index if len(loaders) > 1 else None, keep)
            with torch.no_grad():  # and no inference mode: training uses what these hooks make, such as pruning masks
                results = self._finish(keep, on_results)
        return _by_loader(results, len(loaders), trainer.tracker_log.name_of)

    def _finish(self, keep: bool, on_results: Callable[[], None] | None) -> list[EpochValue]:
        """Reduce what was logged, and call the hooks of the end; see `run`. Returns the results."""
        trainer, hooks, stage = self._trainer, self._hooks, self._stage
        trainer.logged.enter(self._in_epoch)
        results = trainer.tracker_log.finish_epoch(stage, keep)
        try:
            hooks.call(stage.hook_name("epoch_end"))
        except BaseException:
            if keep:
                trainer.tracker_log.write_in_spite_of_error(partial(trainer.tracker_log.write_epoch_values, results))
            raise
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
        """Evaluate once, and forget the loaders; a limit of 0 leaves all of it out."""
        if self._limit == 0:
            self._trainer.current.evaluation_batches.pop(self._stage, None)
            return []
        try:
            return self.run()
        finally:
            self.forget()

    def forget(self) -> None:
        """Let the engine forget the loaders."""
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
                if info is not None and info.real_rows == 0:
                    self._run_padding(batch, feed.index, extra)
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

    def _run_padding(self, batch: Any, index: int, extra: tuple[int, ...]) -> None:
        """Run a batch made of padding, so that peers' collectives have their partner; nothing of it counts."""
        with muted_logging(self._trainer.logged, self._task):
            self._step(batch, index, *extra)


FOREVER = float("inf")


@contextmanager
def evaluating(task: Task, stage: Stage, model: nn.Module) -> Iterator[None]:
    """Evaluation mode in the body; afterwards every module is in the mode it was in.

    Args:
        task: The task.
        stage: What runs.
        model: What the strategy made of the task, which is in the same mode where it is a plain module around it.
    """
    modes = [(module, module.training) for module in task.modules()]
    _call_if_any(task, stage.hook_name("model_eval"))
    if isinstance(model, StepModule):
        modes.append((model, model.training))
        model.training = task.training
    try:
        yield
    finally:
        _call_if_any(task, stage.hook_name("model_train"))
        for module, mode in modes:
            module.training = mode


def _call_if_any(task: Task, name: str) -> None:
    hook = getattr(task, name)
    if hook is not None:
        hook()


def loader_argument(step: Callable[..., Any], dataloader_idx: int | None) -> tuple[int, ...]:
    """The third argument of a step: the loader's number, where the step takes it.

    Args:
        step: The task's method.
        dataloader_idx: The loader's number, None if there is only one.
    """
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(step).parameters.values()
    third = [p for p in parameters if p.kind in positional][2:3]
    takes_any = any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters)
    needs_it = bool(third) and third[0].default is inspect.Parameter.empty
    if dataloader_idx is None:
        return (0,) if needs_it else ()
    return (dataloader_idx,) if third or takes_any else ()


def _by_loader(results: list[EpochValue], count: int, name_of: Callable[[EpochValue], str]) -> list[dict[str, float]]:
    """Sort results by loader; what was logged for the whole epoch is among each one's."""
    numbers = to_numbers({name_of(result): result.value for result in results})
    if not count:
        return [numbers] if numbers else []
    loaders = {name_of(result): result.loader for result in results}
    return [
        {name: value for name, value in numbers.items() if loaders[name] in (None, index)} for index in range(count)
    ]
