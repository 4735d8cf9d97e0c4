"""What a program of Lightning's is given in both places: a recorder of its losses, and what it lacks here.

All start from one seed, and nothing is added to the program. `COMPAT_TRAINER` holds arguments of the Trainer that take
the place of the program's own, where it has no options for them: how long to run, and on how many processes. With
`COMPAT_AVERAGES_LATE` gradients of what is unfrozen during the run are averaged over processes, as Lightning does not.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import importlib.util
import json
import os
import random
import sys
from types import ModuleType
from typing import Any

import numpy
import torch

FULL = 4000
"""Values that are recorded at most."""


def prepare() -> None:
    """Record what the Trainers of this process compute, and let their arguments be replaced."""
    for seed in (random.seed, numpy.random.seed, torch.manual_seed):
        seed(5)
    replaced = json.loads(os.environ.get("COMPAT_TRAINER", "{}"))
    let_torchvision_be_imported()
    if importlib.util.find_spec("gymnasium") is not None:
        sys.modules["gym"] = old_gym()
    report: dict[str, float] = {}
    atexit.register(write, report)
    package = os.environ.get("COMPAT_PACKAGE", "lightning")
    record(importlib.import_module("lightning.pytorch" if package == "lightning" else package), report, replaced)


def write(report: dict[str, float]) -> None:
    """Write what this process has recorded."""
    rank = os.environ.get("RANK", "0")
    path = os.environ["COMPAT_RESULT"]
    with open(path if rank == "0" else f"{path}.{rank}", "w") as file:
        json.dump(report, file)


def record(pytorch: ModuleType, report: dict[str, float], replaced: dict[str, Any]) -> None:
    """Give every Trainer the recorder when its first verb is called."""
    trainer = pytorch.Trainer
    recorder = recorder_of(pytorch.Callback, report)
    others = [averager_of(pytorch.Callback)] if os.environ.get("COMPAT_AVERAGES_LATE") else []

    def recorded(verb: Any) -> Any:
        @functools.wraps(verb)
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not any(isinstance(each, recorder) for each in self.callbacks):
                self.callbacks[:0] = [each() for each in (recorder, *others)]
            return verb(self, *args, **kwargs)

        return run

    for name in ("fit", "validate", "test", "predict"):
        setattr(trainer, name, recorded(getattr(trainer, name)))
    if replaced:
        made = trainer.__init__

        @functools.wraps(made)
        def with_others(self: Any, *args: Any, **kwargs: Any) -> None:
            made(self, *args, **{**kwargs, **replaced})

        trainer.__init__ = with_others


def recorder_of(base: type, report: dict[str, float]) -> type:
    """The callback that records, over one framework's own base class."""

    class Recorder(base):  # type: ignore[misc, valid-type]
        def keep(self, name: str, value: Any) -> None:
            assert len(report) < FULL
            report[f"{len(report)} {name}"] = float(value)

        def keep_all(self, name: str, trainer: Any) -> None:
            for key, value in sorted(trainer.callback_metrics.items()):
                self.keep(f"{name} {key}", value)

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
            loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
            if loss is not None:
                self.keep("loss", loss)
            elif not module.automatic_optimization:
                total = sum(float(each.detach().double().abs().sum()) for each in module.parameters())
                self.keep("weights", total)
            for group in [group for each in trainer.optimizers for group in each.param_groups]:
                self.keep("rate", group["lr"])

        def on_validation_end(self, trainer: Any, module: Any) -> None:
            if not trainer.sanity_checking:
                self.keep_all("validation", trainer)

        def on_test_end(self, trainer: Any, module: Any) -> None:
            self.keep_all("test", trainer)

        def on_train_end(self, trainer: Any, module: Any) -> None:
            self.keep_all("end", trainer)

        def on_predict_start(self, trainer: Any, module: Any) -> None:
            self.predicted = 0.0

        def on_predict_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
            self.predicted += sum_of(outputs)

        def on_predict_end(self, trainer: Any, module: Any) -> None:
            self.keep("predicted", self.predicted)

    return Recorder


def averager_of(base: type) -> type:
    """The callback that averages the gradients of parameters which were frozen when the run began."""

    class Averager(base):  # type: ignore[misc, valid-type]
        def on_train_start(self, trainer: Any, module: Any) -> None:
            self.late = [each for each in module.parameters() if not each.requires_grad]

        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            if trainer.world_size > 1:
                for gradient in [each.grad for each in self.late if each.grad is not None]:
                    torch.distributed.all_reduce(gradient)
                    gradient /= trainer.world_size

    return Averager


def sum_of(predictions: Any) -> float:
    """The sum of all numbers in what a batch was predicted as."""
    if isinstance(predictions, dict):
        predictions = list(predictions.values())
    if isinstance(predictions, list | tuple):
        return sum(sum_of(each) for each in predictions)
    return float(predictions.double().sum()) if hasattr(predictions, "double") else 0.0


def let_torchvision_be_imported() -> None:
    """Leave out what torchvision registers for tracing: a build for CUDA lacks the operators on a CPU."""
    sys.modules.setdefault("torchvision._meta_registrations", ModuleType("torchvision._meta_registrations"))


def old_gym() -> ModuleType:
    """The module `gym` of the time when a step returned four values, over gymnasium; every environment is seeded."""
    import gymnasium

    class Old:
        def __init__(self, name: str) -> None:
            self.inner = gymnasium.make(name)
            self.inner.reset(seed=3)
            self.inner.action_space.seed(3)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

        def reset(self) -> Any:
            return self.inner.reset()[0]

        def step(self, action: Any) -> Any:
            state, reward, ended, cut, more = self.inner.step(action)
            return state, reward, ended or cut, more

    gym = ModuleType("gym")
    gym.make, gym.Env, gym.spaces = Old, gymnasium.Env, gymnasium.spaces
    return gym
