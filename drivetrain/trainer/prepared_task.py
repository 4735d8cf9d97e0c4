"""`TaskRun`: the task that a Trainer runs, with the objects that the engine prepared for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from drivetrain.accelerator import PreparedOptimizer
from drivetrain.accelerator.run_state import Moment
from drivetrain.accelerator.step import StepHooks
from drivetrain.callbacks.base import Callback, Stage
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.logging import get_logger
from drivetrain.runtime.state import PartialState
from drivetrain.strategies import StepModule
from drivetrain.trainer.data_module import DataModule
from drivetrain.trainer.hooks import Hooks, call_all, call_setup_hooks, call_teardown_hooks, set_log_methods
from drivetrain.trainer.loops.batches import LoaderSource
from drivetrain.trainer.metrics.logged_values import NOWHERE
from drivetrain.trainer.metrics.metric_sync import find_metrics, restrict_sync
from drivetrain.trainer.optimizers import SchedulerConfig, names_of, parse_configured_optimizers
from drivetrain.trainer.task import Task

if TYPE_CHECKING:
    from drivetrain.trainer.trainer import Trainer


logger = get_logger(__name__)


@dataclass(eq=False)
class TaskRun:
    """State of a Trainer's current or last run: the task, its data module, prepared model, optimizers and hooks."""

    trainer: Trainer
    task: Task | None = None  # the one of the current or last run
    datamodule: DataModule | None = None
    hooks: Hooks | None = None
    model: nn.Module | None = None  # what the strategy made of the task
    optimizers: list[PreparedOptimizer] = field(default_factory=list)
    optimizer_names: tuple[str, ...] = ()
    schedulers: list[SchedulerConfig] = field(default_factory=list)
    steps_schedulers: bool = False  # any scheduler steps after optimizer steps
    ends_epochs_of_schedulers: bool = False  # any steps at epoch ends and monitors no value
    stage: Stage | None = None
    checkpoint_path: str | None = None
    sources: dict[Stage, LoaderSource] = field(default_factory=dict)
    _fitted: nn.Module | None = None  # the model that the last fit prepared
    _error: BaseException | None = None  # the exception that ended the run
    _restore_metrics: Callable[[], None] | None = None

    # beginning and end of a run

    def attach(self, task: Task, data: DataModule | None, stage: Stage, loaders: Mapping[Stage, Any]) -> None:
        if not isinstance(task, Task):
            raise ConfigurationError(f"Trainer.{stage.verb} takes a Task, got a {type(task).__name__}.")
        self.task, self.datamodule = task, data
        self.stage, self.checkpoint_path = stage, None
        state, topology = PartialState.existing(), self.trainer.strategy.topology
        if state is not None and not state.environment.is_distributed:
            state.move_to(topology.kind, topology.device)  # a Trainer of another device may have run since
        # Before anything else runs: hooks and loaders may use `self.trainer`.
        task.trainer = self.trainer
        if data is not None:
            data.trainer = self.trainer
        self.sources = {each: LoaderSource(self.trainer, task, each, given, data) for each, given in loaders.items()}
        logged = self.trainer.logged
        logged.enter(NOWHERE)
        logged.reset_for_run(evaluates_alone=stage is not Stage.TRAIN)
        self.trainer.tracker_log.written.clear()

    def remember(self, task: Task | None, data: DataModule | None) -> None:
        self.task, self.datamodule = task, data

    def set_up(self, task: Task, stage: Stage) -> None:
        """Set up a run of `task`: collect the overridden hooks, and call `prepare_data` and the `setup` hooks."""
        trainer, actions = self.trainer, self.trainer.actions
        actions.begin(task, stage)
        # Before hooks are looked up, because it may replace callbacks.
        trainer.adopt_callbacks(task.configure_callbacks())
        for callback in trainer.callbacks:
            set_log_methods(callback, task)
            if stage is Stage.TRAIN:
                trainer.control.take_over(callback)
        self.hooks = Hooks(trainer, task)
        owners = [owner for owner in (self.datamodule, task) if owner is not None]
        if any(type(owner).prepare_data not in (DataModule.prepare_data, Task.prepare_data) for owner in owners):
            if trainer.accelerator.is_local_main_process:
                for owner in owners:
                    actions.watch(actions.of_owner(owner, "prepare_data"), owner.prepare_data)()
            # No process reads the data before it is complete.
            trainer.accelerator.wait_for_everyone()
        call_setup_hooks(trainer, task, self.datamodule, stage.verb)
        # Ranks that process equal batches, as in tensor parallelism, would count samples several times.
        self._restore_metrics = restrict_sync(find_metrics(task).values(), trainer.strategy.topology.value_ranks)

    @contextmanager
    def with_callbacks(self, callbacks: Sequence[Callback]) -> Iterator[None]:
        assert self.task is not None
        before = self.hooks, self.steps_schedulers, self.ends_epochs_of_schedulers
        self.hooks, self.steps_schedulers = Hooks(self.trainer, self.task, callbacks), False
        self.ends_epochs_of_schedulers = False
        try:
            yield
        finally:
            self.hooks, self.steps_schedulers, self.ends_epochs_of_schedulers = before

    def tear_down(self, task: Task, stage: Stage) -> None:
        """Clean up after a run: call the `teardown` hooks, finish the trackers' runs and release the data loaders."""
        trainer, engine = self.trainer, self.trainer.accelerator
        trainer.logged.enter(NOWHERE)
        engine.optimizer_step.set_hooks(StepHooks())
        engine.accumulation.end_planned()
        trainer.current.leave_batch()
        try:
            call_teardown_hooks(trainer, task, self.datamodule, stage.verb)
        except BaseException as raised:
            # The error that ended the run is the cause; an error of a teardown hook often follows from it.
            self._error = self._error or raised
            raise
        finally:
            if self._restore_metrics is not None:
                self._restore_metrics()
            for callback in trainer.callbacks:
                set_log_methods(callback, None)
            error, self._error = self._error, None
            trainer.tracker_log.end_run(error, stage is Stage.TRAIN)
            # Saves outside of the run describe the current state again.
            engine.run_state.moment = Moment
            if trainer.loop is not None:
                trainer.loop.forget_loaders()
            trainer.current.leave_stage()
            trainer.actions.finish(stage)

    def report_exception(self, task: Task, error: BaseException) -> None:
        """Call all `on_exception` hooks, and mark the trackers' runs as failed.

        Errors of the hooks are logged, because the run ends with the original error.
        """
        trainer = self.trainer
        self._error = error
        hooks = [partial(each.on_exception, trainer, task, error) for each in trainer.callbacks]
        hooks.append(partial(task.on_exception, error))
        if self.datamodule is not None:
            hooks.append(partial(self.datamodule.on_exception, error))
        call_all("on_exception", hooks)

    # preparation for devices and processes

    def configure_optimizers(self, task: Task) -> list[Optimizer]:
        """Call the task's `configure_optimizers` and return its optimizers.

        Its schedulers are stored.
        """
        actions = self.trainer.actions
        configure = actions.watch(actions.of_owner(task, "configure_optimizers"), task.configure_optimizers)
        configured = configure()
        optimizers, self.schedulers = parse_configured_optimizers(
            configured, self.trainer.read_scheduler, by_hand=not task.automatic_optimization
        )
        self.optimizer_names = names_of(configured)
        if not optimizers and task.automatic_optimization:
            logger.warning(
                f"{type(task).__name__}.configure_optimizers returned None, so this fit will run with no optimizer: "
                "losses and gradients are computed, but parameters do not change. If this is not intended, return an "
                "optimizer, or set automatic_optimization = False to update parameters yourself."
            )
        # With manual optimization, the task steps its schedulers itself.
        # Known once, so that a step without schedulers does not have to look for them.
        by_step = any(config.interval == "step" for config in self.schedulers)
        self.steps_schedulers = task.automatic_optimization and by_step
        by_epoch = any(config.interval == "epoch" and not config.reduce_on_plateau for config in self.schedulers)
        self.ends_epochs_of_schedulers = task.automatic_optimization and by_epoch
        return optimizers

    def place(self, task: Task, optimizers: list[Optimizer]) -> nn.Module:
        engine, strategy = self.trainer.accelerator, self.trainer.strategy
        # Otherwise the engine would keep the last fit's model and optimizers in memory and in checkpoints.
        before = [one for one in engine.prepared.models if one is self._fitted or strategy.unwrap(one) is task]
        for known in before:
            engine.unwrap_model(known, keep_fp32_wrapper=False)  # steps enter autocast themselves
            engine.prepared.forget_model(known)
        by_hand = not task.automatic_optimization
        # The strategy wraps `training_step` rather than `forward`, so that DDP's hooks see the whole step.
        wrapped = StepModule(task, by_hand, several_losses=bool(self.optimizer_names) and not by_hand)
        # Model and optimizers together: sharding strategies replace parameters, in the optimizers as well.
        prepared: Any = engine.prepare(wrapped, *optimizers) if optimizers else [engine.prepare(wrapped)]
        model: nn.Module
        model, *self.optimizers = prepared
        self.model = self._fitted = model
        for config in self.schedulers:
            # One step per call: the number of processes must not change a schedule.
            engine.prepare_scheduler(config.scheduler, steps_per_call=1)
        return model

    def place_for_evaluation(self, task: Task) -> nn.Module:
        engine, strategy = self.trainer.accelerator, self.trainer.strategy
        # After `fit`, its prepared model is used.
        if self.model is None or strategy.unwrap(self.model) is not task:
            with engine.precision.init_context(), strategy.init_context():
                task.configure_model()
            self.model = engine.prepare_model(StepModule(task), evaluation_mode=True)
        return self.model
