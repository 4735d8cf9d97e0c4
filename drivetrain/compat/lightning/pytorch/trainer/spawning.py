"""`strategy="ddp_spawn"`: each verb runs in processes of its own, which end with it, and its outcome comes back."""

from __future__ import annotations

import pickle
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.multiprocessing.spawn import ProcessRaisedException

from drivetrain.compat.aliases import PACKAGES, install
from drivetrain.compat.lightning.pytorch.strategies.ddp import DDPStrategy
from drivetrain.launch import already_launched, notebook_launcher
from drivetrain.launch.forking import cloudpickle_dumps
from drivetrain.runtime.devices import detect_device_kind, get_device_kind
from drivetrain.runtime.errors import ConfigurationError, LaunchError
from drivetrain.strategies import Single
from drivetrain.trainer import DataModule

if TYPE_CHECKING:
    from drivetrain.callbacks.stage import Stage
    from drivetrain.compat.lightning.pytorch.trainer.trainer import Trainer


class SpawnsDDP(Single):
    """What stands in the Trainer's own process for the strategy of the processes that it starts."""


DDPStrategy.register(SpawnsDDP)

_METHODS = ("ddp_spawn", "ddp_fork", "ddp_notebook")


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


class Spawning:
    """The processes of a Trainer that starts them for each verb.

    Args:
        strategy: The strategy within them.
        num_processes: How many.
    """

    def __init__(self, strategy: str, num_processes: int) -> None:
        self.strategy, self.num_processes = strategy, num_processes

    @classmethod
    def asked_for(cls, strategy: Any, devices: Any, accelerator: Any) -> Spawning | None:
        """The processes that Lightning's name of a strategy asks for; None for any other strategy.

        Args:
            strategy: The Trainer's argument.
            devices: The same.
            accelerator: The same.
        """
        method = next((each for each in _METHODS if isinstance(strategy, str) and strategy.startswith(each)), None)
        if method is None:
            return None
        inner = "ddp" + strategy.removeprefix(method)
        return cls(inner, 1 if already_launched() else _number(devices, accelerator))

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
        dumps = cloudpickle_dumps() or pickle.dumps
        names = [name for name in PACKAGES if name in sys.modules]
        try:
            outcome = notebook_launcher(
                run_verb, (names, dumps(call)), num_processes=self.num_processes, start_method="spawn"
            )
        except LaunchError as error:
            raise ProcessRaisedException(str(error), 0, 0) from error
        _take_over(trainer, stage, model, outcome, (*args, *given.values()))
        return outcome.result


def run_verb(names: list[str], call: bytes) -> Outcome:
    """What each process does.

    Args:
        names: The packages that drivetrain stands for.
        call: The Trainer's arguments, the verb and its own.
    """
    for name in names:
        install(name)
    kind, positional, keywords, verb, model, args, given, states, progress = pickle.loads(call)
    trainer = kind(*positional, **keywords)
    trainer.progress.load_state_dict(progress)
    for callback, state in zip(trainer.callbacks, states, strict=False):
        if state:
            callback.load_state_dict(state)
    result = getattr(trainer, verb)(model, *args, **given)
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
        if state:
            callback.load_state_dict(state)
    trainer.progress.load_state_dict(outcome.progress)
    trainer.logged.remember(outcome.metrics)
    trainer.tracker_log.written.update(outcome.written)


def _number(devices: Any, accelerator: Any) -> int:
    """How many processes an argument of the Trainer asks for."""
    kind = detect_device_kind() if accelerator == "auto" else get_device_kind(accelerator)
    if isinstance(devices, list | tuple):
        return len(devices)
    if devices in ("auto", -1, "-1"):
        return int(kind.default_processes())
    if not str(devices).isdigit() or int(devices) < 1:
        raise ConfigurationError(f"devices={devices!r}: give a number, the numbers of devices, or 'auto'.")
    return int(devices)
