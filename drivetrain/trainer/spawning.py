"""Running `fit` and similar methods in new processes, and returning their result to the Trainer that was called.

The new processes create a Trainer from the same arguments, restore its state, and run the method. The Trainer that was
called then takes over the state and weights of the first process.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch

from drivetrain.callbacks.base import Callback, Stage
from drivetrain.callbacks.model_checkpoint import ModelCheckpoint
from drivetrain.launch.notebook import (
    InterruptedProcessesError,
    ScriptMain,
    call_in_processes,
    sent,
    stop_at_start_of_processes,
    what_cannot_be_sent,
)
from drivetrain.launch.options import LaunchOptions
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.seeds import RandomState, recorded_seed, set_seed
from drivetrain.runtime.state import forget_process
from drivetrain.trainer import task_checks
from drivetrain.trainer.compiling import uncompiled
from drivetrain.trainer.data_module import DataModule
from drivetrain.trainer.loops.run_control import Ending
from drivetrain.trainer.metrics.logged_values import Value
from drivetrain.trainer.options import TrainerOptions
from drivetrain.trainer.task import Task

if TYPE_CHECKING:
    from drivetrain.runtime.timing import Timing
    from drivetrain.trainer.trainer import Trainer


@dataclass
class SpawnedVerb:
    """Everything that a new process needs to run a Trainer method, such as `fit`, for its parent process."""

    kind: type[Trainer]
    made_with: tuple[tuple[Any, ...], dict[str, Any]]  # positional and keyword arguments of the Trainer
    options: TrainerOptions
    callbacks: list[Callback]
    trackers: list[dict[str, Any]]  # empty before the first run
    progress: dict[str, Any]
    ending: Ending  # why its last `fit` ended
    seed: int | None
    random: RandomState
    task: Task
    datamodule: DataModule | None
    is_given: bool  # False if the task is that of the previous run
    stage: Stage
    given: dict[str, Any]  # the other arguments of the method

    def run(self) -> Outcome | None:
        forget_process()  # state from before the fork, or from importing the script
        positional, keywords = self.made_with
        trainer = self.kind(*positional, **keywords)
        # Options that were assigned after the construction, such as `trainer.max_epochs = 5`.
        before = {each.name: getattr(trainer.options, each.name) for each in fields(TrainerOptions)}
        changed = {name: value for name, value in vars(self.options).items() if value != before[name]}
        if changed:
            trainer.change_options(**changed)
        # The constructor has made its own callbacks. The received ones have the state of earlier runs.
        trainer.callbacks.clear()
        trainer.callbacks.extend(self.callbacks)
        trainer.tracker_group.load_state(self.trackers)
        trainer.progress.load_state_dict(self.progress)
        trainer.control.adopt(self.ending)
        trainer.task_run.remember(self.task, self.datamodule)
        if self.seed is not None:
            set_seed(self.seed)
        # After the constructor, which may have drawn random numbers.
        self.random.restore()
        left: BaseException | None = None
        result: Any = None
        try:
            result = getattr(trainer, self.stage.verb)(self.task if self.is_given else None, **self.given)
        except (KeyboardInterrupt, SystemExit) as stop:
            if not (trainer.interrupted or trainer.preempted):  # an orderly end, on which all processes have agreed
                raise
            # Tracebacks cannot be pickled.
            left = stop.with_traceback(None)
        return Outcome.of(trainer, result, left) if trainer.is_global_zero else None


@dataclass
class Outcome:
    """Result, final weights and state that a spawned process returns to the Trainer that started it."""

    result: Any
    left: BaseException | None  # with which a signal ended the run in an orderly way
    weights: dict[str, Any]
    callbacks: dict[str, dict[str, Any]]
    trackers: list[dict[str, Any]]
    progress: dict[str, Any]
    ending: Ending
    metrics: dict[str, Value]
    bar: dict[str, Value]
    written: dict[str, float]  # what trackers received
    is_finite: bool  # all values and weights were finite
    lengths: Any  # numbers of batches
    checkpoint_path: str | None
    timing: Timing
    random: RandomState

    @classmethod
    def of(cls, trainer: Trainer, result: Any, left: BaseException | None) -> Outcome:
        assert trainer.task is not None
        return cls(
            _on_host(result),
            left,
            _on_host(dict(trainer.task.state_dict())),
            {each.state_key: state for each in trainer.callbacks if (state := each.state_dict())},
            trainer.tracker_group.state(),
            trainer.progress.state_dict(),
            trainer.control.ending(),
            _on_host(dict(trainer.logged.callback_values())),
            _on_host(dict(trainer.logged.bar_values())),
            dict(trainer.tracker_log.written),
            trainer.is_finite,
            trainer.current.lengths(),
            trainer.task_run.checkpoint_path,
            trainer.timing,
            RandomState.capture(devices=False),
        )

    def load_into(self, trainer: Trainer, task: Task) -> None:
        """Load the weights and states from a spawned process into the Trainer and task that started the run."""
        # Layers that `configure_model` created in the processes do not exist in this one yet.
        if self.weights.keys() - task.state_dict().keys():
            task.configure_model()
        task.load_state_dict(self.weights, strict=task.strict_loading)
        trainer.adopt_callbacks(task.configure_callbacks())
        trainer.control.adopt(self.ending)
        for callback in trainer.callbacks:
            if self.ending.reason is not None:
                trainer.control.take_over(callback)
            state = self.callbacks.get(callback.state_key)
            if state is None:
                continue
            if isinstance(callback, ModelCheckpoint) and callback.dirpath is None:
                callback.dirpath = state["dirpath"]  # chosen by the run in the processes
            callback.load_state_dict(state)
        trainer.tracker_group.load_state(self.trackers)
        trainer.progress.load_state_dict(self.progress)
        trainer.logged.remember(self.metrics, self.bar)
        trainer.tracker_log.written.update(self.written)
        trainer.finiteness.is_finite = self.is_finite
        trainer.current.adopt_lengths(self.lengths)
        trainer.task_run.checkpoint_path = self.checkpoint_path
        vars(trainer.timing).update(vars(self.timing))
        self.random.restore()


def run_spawned(trainer: Trainer, stage: Stage, model: Task | None, given: dict[str, Any]) -> Any:
    """Start new processes and run a Trainer method, such as `fit`, in them, as `ddp_spawn` does.

    Return its result. The Trainer then takes over the state and weights of the first process.
    """
    # A started process imports the script, and must not start processes again if it has no main guard.
    stop_at_start_of_processes()
    spawning = trainer.spawning
    assert spawning is not None
    task = task_checks.check_evaluation(trainer.task if model is None else uncompiled(model), stage)
    verb = _verb(trainer, stage, task, model is not None, given)
    packed: SpawnedVerb | bytes = verb
    # A forked process inherits the objects, so that nothing has to be pickled.
    if spawning.start_method != "fork":
        packed = _packed(verb, trainer.strategy.name)
    given_data = (given.get("datamodule"), given.get("dataloaders"), trainer.datamodule)
    data = next((each for each in given_data[: 2 if model is not None else 3] if isinstance(each, DataModule)), None)
    trainer.task_run.attach(task, data, stage, {})
    if stage is Stage.TRAIN:
        trainer.control.begin()
    options = LaunchOptions(num_processes=spawning.num_processes, cpu=spawning.kind == "cpu")
    stopped: InterruptedProcessesError | None = None
    try:
        found = call_in_processes(
            _run_verb,
            (packed,),
            options,
            spawning.start_method,
            prepare=spawning.first_call,
            takes_over=True,
        )
    except InterruptedProcessesError as error:
        stopped, found = error, error.value
    except BaseException as error:
        trainer.control.record_exception(error)
        raise
    outcome: Outcome = pickle.loads(found)
    outcome.load_into(trainer, task)
    if outcome.left is not None:
        raise outcome.left
    # Ctrl-C came too late for the run to stop by itself, so the script still has to end.
    if stopped is not None and not trainer.interrupted:
        raise KeyboardInterrupt
    return outcome.result


def _verb(trainer: Trainer, stage: Stage, task: Task, is_given: bool, given: dict[str, Any]) -> SpawnedVerb:
    has_run = trainer.task_run.stage is not None
    return SpawnedVerb(
        type(trainer),
        trainer.made_with,
        trainer.options,
        trainer.callbacks,
        trainer.tracker_group.state() if has_run else [],
        trainer.progress.state_dict(),
        trainer.control.ending(),
        recorded_seed(),
        RandomState.capture(devices=False),
        task,
        trainer.datamodule if not is_given else None,
        is_given,
        stage,
        given,
    )


def _packed(verb: SpawnedVerb, strategy: str) -> bytes:
    has_script = ScriptMain.here() is not None
    try:
        return sent(verb, has_script)
    except Exception as error:
        found = what_cannot_be_sent(_parts(verb), has_script) or str(error)
        raise ConfigurationError(
            f"strategy={strategy!r} pickles all objects that {verb.stage.verb}() needs for the new processes, but "
            f"{found}. Define classes and functions at the top level of a file, and create objects that cannot be "
            "pickled (lambdas, open files, locks, connections) in setup() or configure_model(), which run in each "
            "process. Or use strategy='ddp_fork', which pickles nothing, or 'ddp', which runs the script in each "
            "process.",
        ) from error


def _parts(verb: SpawnedVerb) -> Mapping[str, Any]:
    arguments = {f"Trainer({name}=...)": value for name, value in verb.made_with[1].items()}
    # Objects are tried in this order until one cannot be pickled, so the most likely ones come first.
    given = {f"{verb.stage.verb}({name}=...)": value for name, value in verb.given.items()}
    callbacks = {f"the callback {type(each).__name__}": each for each in verb.callbacks}
    return {
        "the task": verb.task,
        **given,
        "the DataModule": verb.datamodule,
        **callbacks,
        **arguments,
        "the class of the Trainer": verb.kind,
    }


def _run_verb(packed: SpawnedVerb | bytes) -> bytes:
    verb: SpawnedVerb = pickle.loads(packed) if isinstance(packed, bytes) else packed
    outcome = verb.run()
    return sent(outcome, has_script=True)


def _on_host(value: Any) -> Any:
    """Move all tensors in nested lists and dicts to the CPU, detached."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {key: _on_host(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_on_host(each) for each in value]
    return value
