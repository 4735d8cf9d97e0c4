"""`strategy="ddp_spawn"`: each verb runs in processes of its own, which end with it, and its outcome comes back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.multiprocessing.spawn import ProcessRaisedException

from drivetrain.callbacks import ModelCheckpoint
from drivetrain.compat.lightning.pytorch.strategies.ddp import DDPStrategy
from drivetrain.compat.lightning.spawning import SpawnedProcesses
from drivetrain.runtime.errors import LaunchError
from drivetrain.strategies import Single
from drivetrain.trainer import DataModule

if TYPE_CHECKING:
    from drivetrain.callbacks.stage import Stage
    from drivetrain.compat.lightning.pytorch.trainer.trainer import Trainer


class SpawnsDDP(Single):
    """What stands in the Trainer's own process for the strategy of the processes that it starts."""


DDPStrategy.register(SpawnsDDP)


@dataclass
class Outcome:
    """What a verb leaves in its first process.

    Attributes:
        result: What it returned.
        weights: The model's.
        callbacks: The states of the callbacks, in their order.
        progress: The counters of the run.
        metrics: What callbacks see.
        written: What loggers got.
    """

    result: Any
    weights: dict[str, Any]
    callbacks: list[dict[str, Any]]
    progress: dict[str, Any]
    metrics: dict[str, float]
    written: dict[str, float]


class Spawning(SpawnedProcesses):
    """The processes of a Trainer that starts them for each verb."""

    def run(self, trainer: Trainer, stage: Stage, model: Any, args: Any, given: dict[str, Any]) -> Any:
        """Run a verb in new processes, and take over what it leaves.

        Args:
            trainer: The Trainer of this process.
            stage: What the verb is for.
            model: The module, that of the verb before if None.
            args: Further arguments of the verb.
            given: Those by name.

        Raises:
            ProcessRaisedException: One of the processes failed; the message holds its traceback.
        """
        model = trainer.task if model is None else model
        if given.pop("return_predictions", None):
            raise ProcessRaisedException(
                "`return_predictions` should be set to `False` where the strategy starts processes: write the "
                "predictions in on_predict_batch_end, or launch the script.",
                0,
                0,
            )
        if stage.verb == "predict":
            given["return_predictions"] = False
        positional, keywords = trainer.made_with
        keywords = {**keywords, "strategy": self.strategy, "devices": "auto"}
        states = [callback.state_dict() for callback in trainer.callbacks]
        progress = trainer.progress.state_dict()
        call = (type(trainer), positional, keywords, str(stage.verb), model, args, given, states, progress)
        try:
            outcome = self.call(run_verb, *call)
        except LaunchError as error:
            raise ProcessRaisedException(str(error), 0, 0) from error
        _take_over(trainer, stage, model, outcome, (*args, *given.values()))
        return outcome.result


def run_verb(
    kind: type[Trainer],
    positional: Any,
    keywords: dict[str, Any],
    verb: str,
    model: Any,
    args: Any,
    given: dict[str, Any],
    states: list[dict[str, Any]],
    progress: dict[str, Any],
) -> Outcome:
    """What each process does.

    Args:
        kind: The Trainer's class.
        positional: Its arguments.
        keywords: Those by name.
        verb: What it runs.
        model: The module.
        args: Further arguments of the verb.
        given: Those by name.
        states: The states of the callbacks.
        progress: The counters of the run.
    """
    trainer = kind(*positional, **keywords)
    trainer.progress.load_state_dict(progress)
    for callback, state in zip(trainer.callbacks, states, strict=False):
        if state:
            callback.load_state_dict(state)
    result = getattr(trainer, verb)(model, *args, **given)
    assert trainer.task is not None
    weights = {name: tensor.detach().cpu() for name, tensor in trainer.task.state_dict().items()}
    return Outcome(
        result,
        weights,
        [callback.state_dict() for callback in trainer.callbacks],
        trainer.progress.state_dict(),
        {name: float(value) for name, value in trainer.callback_metrics.items()},
        dict(trainer.tracker_log.written),
    )


def _take_over(trainer: Trainer, stage: Stage, model: Any, outcome: Outcome, given: Any) -> None:
    """Let the Trainer of this process be where that of the others is."""
    data = next((each for each in given if isinstance(each, DataModule)), None)
    trainer.task_run.attach(model, data, stage, {})
    model.load_state_dict(outcome.weights)
    for callback, state in zip(trainer.callbacks, outcome.callbacks, strict=False):
        if isinstance(callback, ModelCheckpoint) and callback.dirpath is None:
            callback.dirpath = state["dirpath"]
        if state:
            callback.load_state_dict(state)
    trainer.progress.load_state_dict(outcome.progress)
    trainer.logged.remember(outcome.metrics)
    trainer.tracker_log.written.update(outcome.written)
