"""Trial steps and batches of a search, and the restoring of the run afterwards."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from drivetrain.callbacks.base import Callback, Stage
from drivetrain.callbacks.progress_bar import Stage as BarStage
from drivetrain.callbacks.progress_bar import make_display
from drivetrain.data import CombinedLoader, PendingBatch, PreparedLoader
from drivetrain.runtime.errors import ConfigurationError, DataError, nearest
from drivetrain.runtime.seeds import isolated_random_state, kept_generators
from drivetrain.strategies.base import local_part
from drivetrain.trainer.data_module import DataModule
from drivetrain.trainer.loops.batches import LoaderSource, epoch_length
from drivetrain.trainer.loops.evaluation_loop import EvaluationLoop, PredictionLoop
from drivetrain.trainer.loops.special_steps import choose_step
from drivetrain.trainer.metrics.logged_values import TRAIN_END, TRAIN_EPOCH, TRAIN_STEP
from drivetrain.trainer.metrics.metric_sync import find_metrics, metric_states, restore_metric_states
from drivetrain.trainer.task import Task

if TYPE_CHECKING:
    from drivetrain.trainer.trainer import Trainer


class TrainingTrial:
    """Runner of trial steps for a learning-rate or batch-size search, which calls only the given callbacks."""

    def __init__(self, trainer: Trainer, task: Task, callbacks: Sequence[Callback] = (), splits: bool = True) -> None:
        self._trainer, self._task = trainer, task
        assert trainer.task_run.model is not None
        with trainer.task_run.with_callbacks(callbacks):
            # These hooks are kept for all trials, since `with_callbacks` ends here.
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
        # `run_window` receives the number of each step and its micro-batches, and runs the step. It returns False to
        # end the trial. With `within_limits`, epochs end at `limit_train_batches`.
        trainer, hooks, done, is_over = self._trainer, self._hooks, 0, False
        trainer.current.leave_batch()  # a failed trial may have left a batch in memory
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
                        # A signal of the cluster ends the trial, so that the process can leave in time.
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
        self._step.run(window)

    def try_gradients(self, source: LoaderSource) -> None:
        # Finds out whether memory is enough. Runs no all-reduce.
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
        size, index = self._trainer.accumulate_grad_batches, 0
        window: list[PendingBatch] = []
        # Each epoch of the trial has an order of its own, as in a run.
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
            raise DataError(
                "The training loader returned no batch in a whole epoch. Check the dataset and its filters."
            )


def try_evaluation(trainer: Trainer, task: Task, stage: Stage, source: LoaderSource, batches: int) -> None:
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
    # The loader's position is restored after the `with` block.
    loader = source.prepare_training()
    with ExitStack() as stack:
        stack.callback(source.forget_training)
        for each in [loader] if isinstance(loader, PreparedLoader) else loader.loaders:
            stack.enter_context(each.preserve_state())
        yield loader


# Restoring the run after a trial


@contextmanager
def preserve_run(trainer: Trainer, task: Task, trains: bool) -> Iterator[None]:
    """Save the state of the run, and restore it after the `with` block, so that a trial run changes nothing.

    The state is: counters, weights, buffers, optimizers, schedulers, the loss scale, logged values, metric states,
    random generators and the current stage and batch. Each rank restores its own part without a collective. If `trains`
    is False, weights, optimizers and schedulers are not copied, since evaluation does not change them.
    """
    progress, metrics = trainer.progress.state_dict(), metric_states(find_metrics(task))
    with ExitStack() as stack:
        stack.enter_context(isolated_random_state(devices=True))
        stack.enter_context(kept_generators(task, trainer.datamodule))
        for part in (trainer.control, trainer.current, trainer.accelerator.optimizer_step, trainer.logged):
            stack.enter_context(part.kept())
        stack.callback(restore_metric_states, task, metrics)
        stack.callback(trainer.progress.load_state_dict, progress)
        # Callbacks run in reverse: weights and optimizers are restored first.
        stack.callback(_TrainedState(trainer, task, trains).restore)
        yield


class _TrainedState:
    def __init__(self, trainer: Trainer, task: Task, trains: bool) -> None:
        engine, model = trainer.accelerator, trainer.task_run.model
        assert model is not None
        # Evaluation changes no weights, only buffers and metric states.
        weights = engine.strategy.state.parameters_in_place(model).values() if trains else ()
        tensors = [local_part(each.detach()) for each in (*weights, *task.buffers())]
        # Copies are on the CPU, to leave the device's memory free.
        self._tensors = [(tensor, tensor.to("cpu", copy=True)) for tensor in tensors]
        self._optimizers = [
            (
                each.optimizer,
                _copy(dict(each.optimizer.state)),
                [_group(group) for group in each.optimizer.param_groups],
            )
            for each in (trainer.task_optimizers if trains else ())
        ]
        # All schedulers, since with manual optimization the task steps them itself.
        others: list[Any] = [*(engine.prepared.schedulers if trains else ()), engine.precision]
        self._others = [(one, deepcopy(one.state_dict())) for one in others]

    def restore(self) -> None:
        with torch.no_grad():
            for tensor, copy in self._tensors:
                tensor.copy_(copy)
        for optimizer, state, groups in self._optimizers:
            # Gradients of the last trial step would be added to those of the run.
            optimizer.zero_grad()
            optimizer.state.clear()
            optimizer.state.update(state)
            for group, kept in zip(optimizer.param_groups, groups, strict=False):
                # Parameters are not copied, they are restored in place above.
                group.update(kept)
        for one, saved in self._others:
            one.load_state_dict(saved)


def _group(group: dict[str, Any]) -> dict[str, Any]:
    return {name: _copy(value) for name, value in group.items() if name != "params"}


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    return type(value)(_copy(item) for item in value) if type(value) in (list, tuple) else deepcopy(value)


# Progress bar of a search


REFRESH_SECONDS = 0.1


@contextmanager
def shown(trainer: Trainer, title: str, total: int) -> Iterator[Callable[..., None]]:
    if trainer.progress_bar_callback is None or not trainer.is_global_zero:
        yield lambda **values: None
        return
    display, stage = make_display(REFRESH_SECONDS), BarStage(title, [total], passing=True)
    display.open(stage)

    def advance(**values: float) -> None:
        stage.done += 1
        display.draw(stage, values)

    try:
        yield advance
    finally:
        display.close(stage)


# The attribute that a search sets


class MissingAttributeError(ConfigurationError, AttributeError):
    """Raised if a search finds no attribute to set, such as `lr` or `batch_size`, in the task or data module."""


class TunedAttribute:
    """Attribute, such as `batch_size`, that a search sets on the task, the data module and their `hparams`."""

    def __init__(self, name: str, task: Task, data: DataModule | None) -> None:
        self.name = name
        self._holders = list(_holders(name, task, data))
        self.is_twice_in_task = len(list(_holders(name, task, None))) > 1

    @classmethod
    def find(cls, names: Sequence[str], task: Task, data: DataModule | None, advice: str) -> TunedAttribute:
        for name in names:
            found = cls(name, task, data)
            if found.is_kept:
                return found
        given = sorted({*vars(task), *task.hparams, *(() if data is None else (*vars(data), *data.hparams))})
        known = [name for name in given if not name.startswith("_")]
        raise MissingAttributeError(
            f"{type(task).__name__}, its hparams or its data module should have one of these fields, but have none: "
            f"{', '.join(names)}. {advice}{nearest(names[0], known)}"
        )

    @property
    def is_kept(self) -> bool:
        return bool(self._holders)

    @property
    def value(self) -> Any:
        # The data module comes last among the holders.
        holder = self._holders[-1]
        return holder[self.name] if isinstance(holder, Mapping) else getattr(holder, self.name)

    def write(self, value: Any) -> None:
        for holder in self._holders:
            if isinstance(holder, Mapping):
                holder[self.name] = value  # type: ignore[index]
            else:
                setattr(holder, self.name, value)


def _holders(name: str, task: Task, data: DataModule | None) -> Iterator[Any]:
    for owner in (task, data):
        if owner is None:
            continue
        if hasattr(owner, name):
            yield owner
        if name in owner.hparams:
            yield owner.hparams
