"""Builds what is planned: from a class, a configuration, or a script that runs until its first training batch."""

from __future__ import annotations

import copy
import inspect
import io
import os
import runpy
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

import drivetrain
from drivetrain.inference.model_size import loss_of, parse_inputs, read_model
from drivetrain.planning.workload import OPTIMIZERS, Loaded, PlannedTask, Workload, tensors_of
from drivetrain.runtime import observer
from drivetrain.runtime.errors import ConfigurationError, nearest
from drivetrain.runtime.state import PartialState, forget_process
from drivetrain.strategies.fsdp.materialise import on_meta, parameters_on_meta
from drivetrain.strategies.registry import Single
from drivetrain.strategies.step_module import StepModule

# A class or a configuration


def load(workload: Workload) -> Loaded:
    if workload.optimizer not in OPTIMIZERS:
        raise ConfigurationError(
            f"--optimizer {workload.optimizer!r} must be one of {', '.join(OPTIMIZERS)}."
            f"{nearest(workload.optimizer, OPTIMIZERS)}"
        )
    make = OPTIMIZERS[workload.optimizer]
    if workload.source.endswith(".py"):
        return load_script(workload)
    if workload.arguments:
        raise ConfigurationError(
            f"{' '.join(workload.arguments)} are arguments of a script, but {workload.source} is none."
        )
    device = "cpu" if workload.real_init else "meta"
    try:
        found = read_model(workload.source, workload.kwargs, workload.trust_remote_code, device)
    except ConfigurationError:
        raise
    except Exception as error:
        hint = "" if workload.real_init else " If the model cannot be built without values, use --real-init."
        raise ConfigurationError(f"{place_of(error)}: {type(error).__name__}: {error}.{hint}") from error
    if not isinstance(found, nn.Module):
        raise ConfigurationError(
            f"{workload.source!r} contains weights only. Pass the config.json beside them, a class or a script."
        )
    sample = None
    if workload.sample_inputs:
        sample = as_arguments(_read_sample(workload.sample_inputs))
        batch = _without_sample(sample)
    else:
        batch = _batch(workload, found)
    rows = next(each.shape[0] for each in tensors_of(batch))
    return Loaded(PlannedTask(_without_values(found)).train(), batch, make, rows, sample)


def _read_sample(path: str) -> Any:
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ConfigurationError(
            f"--sample-inputs {path!r} cannot be read: {error}. Pass a file written by torch.save, with a tensor, "
            "a tuple of the model's arguments or a dict of its keywords."
        ) from error
    if not any(each.dim() for each in tensors_of(found)):
        raise ConfigurationError(f"--sample-inputs {path!r} contains no tensor with a batch dimension. Save a batch.")
    return found


def as_arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(batch, dict):
        return (), batch
    return (tuple(batch) if isinstance(batch, list | tuple) else (batch,)), {}


def _without_sample(batch: Any) -> Any:
    return tree_map(lambda each: each.to("meta") if isinstance(each, Tensor) else each, batch)


def _batch(workload: Workload, model: nn.Module) -> Any:
    if workload.inputs:
        positional, named = parse_inputs(workload.inputs)
        arguments = tuple(torch.zeros(shape, dtype=dtype, device="meta") for shape, dtype in positional)
        return arguments, {key: torch.zeros(s, dtype=d, device="meta") for key, (s, d) in named.items()}
    config = getattr(model, "config", None)
    if not Path(workload.source).exists() or config is None:
        raise ConfigurationError(
            f"{workload.source} needs the shape of its inputs, such as --input 8x128:int64. The first number is the "
            "batch."
        )
    longest = getattr(config, "max_position_embeddings", None)
    seq = workload.seq or min(longest or 2048, 2048)
    if longest and seq > longest:
        raise ConfigurationError(f"--seq {seq} is longer than the model's {longest} positions.")
    tokens = torch.zeros((1, seq), dtype=torch.int64, device="meta")
    return (), {"input_ids": tokens, "labels": copy.copy(tokens), "use_cache": False}


# A script


class Reached(SystemExit):
    """Exception that stops a user's script at its first training batch, once its model and batch are recorded."""


class Catch(observer.Observer):
    """Observer of a user's script that records the model and first training batch, then stops the script."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._prepared: Any = None
        self.model_seen: nn.Module | None = None
        self.batch: Any = None
        self.optimizers: list[torch.optim.Optimizer] = []

    leaves_empty = True

    def strategy(self) -> Any:
        return Single()

    def precision(self) -> str | None:
        return "32"

    def trackers(self, trackers: list[Any]) -> list[Any]:
        return []

    def directory(self, path: str) -> str:
        return self._folder

    def model(self, model: Any) -> None:
        self.model_seen = model

    def hooks(self, hooks: Any, step: Any, precision: Any, prepared: Any) -> Any:
        self._prepared = prepared
        return hooks

    def batches(self, loader: Any, pairs: Iterator[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
        if self.model_seen is None or not self.model_seen.training:
            return  # a validation before the training, for which there are no values
        for self.batch, _ in pairs:
            held = self._prepared.optimizers if self._prepared is not None else ()
            self.optimizers = [getattr(each, "optimizer", each) for each in held]
            raise Reached
        yield from ()


class ScriptTask(nn.Module):
    """Module that runs the `training_step` of a task without a Trainer: calls of `self.log` do nothing.

    Args:
        task: The task.
    """

    def __init__(self, task: nn.Module) -> None:
        super().__init__()
        self.task = task
        for name in ("log", "log_dict"):
            if hasattr(task, name):
                task.__dict__[name] = lambda *args, **kwargs: None
        taken = inspect.signature(task.training_step).parameters  # type: ignore[arg-type]
        self._takes_index = len([each for each in taken.values() if each.default is each.empty]) > 1

    def training_step(self, batch: Any) -> Tensor:
        result: Any = self.task.training_step(batch, 0) if self._takes_index else self.task.training_step(batch)  # type: ignore[operator]
        loss: Tensor = result["loss"] if isinstance(result, dict) else result
        return loss


class LoopTask(PlannedTask):
    def training_step(self, batch: Any) -> Tensor:
        if isinstance(batch, dict):
            return loss_of(self.model(**batch))
        parts = list(batch) if isinstance(batch, list | tuple) else [batch]
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        taken = [each for each in inspect.signature(self.model.forward).parameters.values() if each.kind in positional]
        return loss_of(self.model(*parts[: len(taken)]))


def load_script(workload: Workload) -> Loaded:
    """Run the script of `workload` until its first training batch, and return its model, batch and optimizer.

    Its parameters are built on the meta device, unless `real_init` is set.

    Args:
        workload: The script.

    Raises:
        ConfigurationError: The script fails, trains nothing, or cannot build its model on the meta device.
    """
    if not os.path.isfile(workload.source):
        raise ConfigurationError(
            f"{workload.source} does not exist. Pass a script, a config.json or package.module:Class."
        )
    before, arguments = observer.current, sys.argv
    with tempfile.TemporaryDirectory() as folder:
        observer.current = catch = Catch(folder)
        sys.argv = [workload.source, *workload.arguments]
        sys.path.insert(0, os.path.dirname(os.path.abspath(workload.source)))
        PartialState(cpu=True)
        silent = io.StringIO()
        try:
            values = nullcontext() if workload.real_init else parameters_on_meta()
            with values, redirect_stdout(silent), redirect_stderr(silent):
                runpy.run_path(workload.source, run_name="__main__")
        except Reached:
            pass
        except SystemExit as error:
            if catch.batch is None:
                raise ConfigurationError(f"{workload.source} ended with exit code {error.code}.") from error
        except (Exception, KeyboardInterrupt) as error:
            hint = "" if workload.real_init else " If the model cannot be built without values, use --real-init."
            place = place_of(error, workload.source)
            raise ConfigurationError(f"{place}: {type(error).__name__}: {error}.{hint}") from error
        finally:
            observer.current, sys.argv = before, arguments
            sys.path.pop(0)
            forget_process()
    if catch.batch is None or catch.model_seen is None:
        raise ConfigurationError(
            f"{workload.source} trained nothing: it never took a batch of a prepared loader with a model in training "
            "mode. Pass a script that calls Trainer.fit, or that prepares its model and loader with an Accelerator."
        )
    return _loaded(catch, workload)


def place_of(error: BaseException, file: str | None = None) -> str:
    """Return the file and line where an error was raised, such as `train.py, line 12`.

    It is the last line in `file` or, without one, in the user's code.

    Args:
        error: The error.
        file: The file to look for.
    """
    frames = traceback.extract_tb(error.__traceback__)
    libraries = tuple(os.path.dirname(module.__file__ or "") for module in (torch, drivetrain))
    own = [each for each in frames if (each.filename == file if file else not each.filename.startswith(libraries))]
    last = (own or frames)[-1]
    return f"{last.filename}, line {last.lineno}"


def _loaded(catch: Catch, workload: Workload) -> Loaded:
    seen = catch.model_seen
    assert seen is not None
    bare = seen.task if isinstance(seen, StepModule) else seen
    task = _without_values(copy.deepcopy(bare))
    if getattr(task, "automatic_optimization", True) is False or len(catch.optimizers) > 1:
        raise ConfigurationError(
            f"{type(task).__name__} in {workload.source} has several optimizers or steps them itself, which a plan "
            "cannot follow. Plan its largest network as package.module:Class."
        )
    planned = ScriptTask(task) if isinstance(seen, StepModule) else LoopTask(task)
    sample = None
    if workload.sample_inputs:
        sample = catch.batch if workload.sample_inputs == "first" else _read_sample(workload.sample_inputs)
    batch = _without_sample(catch.batch if sample is None else sample)
    sizes = Counter(each.shape[0] for each in tree_leaves(batch) if isinstance(each, Tensor) and each.dim())
    if not sizes:
        raise ConfigurationError(f"The batches of {workload.source} have no tensors, so their size is unknown.")
    return Loaded(planned.train(), batch, _maker(catch, workload), sizes.most_common(1)[0][0], sample)


def _without_values(model: nn.Module) -> nn.Module:
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                made.setdefault(id(parameter), parameter if parameter.is_meta else on_meta(parameter))
                module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to("meta")
    return model


def _maker(catch: Catch, workload: Workload) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
    if not catch.optimizers:
        return OPTIMIZERS[workload.optimizer]
    kind, defaults = type(catch.optimizers[0]), dict(catch.optimizers[0].defaults)
    allowed = inspect.signature(kind).parameters
    options = {name: value for name, value in defaults.items() if name in allowed}
    return lambda parameters: kind(parameters, **options)
