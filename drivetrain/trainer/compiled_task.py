"""Tasks that the user has compiled with `torch.compile(task)`."""

from __future__ import annotations

import sys
from typing import Any

import torch

from drivetrain.callbacks.stage import Stage
from drivetrain.trainer.hooks import is_overridden
from drivetrain.trainer.task import Task

_STEPS = ("forward", *(stage.step_name for stage in Stage))
_LOGGING = ("log", "log_dict")
_BEFORE = "_before_compiling"


def uncompiled(model: Any) -> Any:
    """The task in what `torch.compile(task)` returns, whose forward and steps are compiled from then on.

    Logging stays outside of the compiled code.

    Args:
        model: A task, compiled or not; anything else is returned as it is.
    """
    compiler = sys.modules.get("torch._dynamo")  # takes seconds to import, and nothing is compiled without it
    if compiler is None or not isinstance(model, compiler.OptimizedModule) or not isinstance(model._orig_mod, Task):
        return model
    task: Task = model._orig_mod
    if not is_compiled(task):
        task.__dict__[_BEFORE] = {name: task.__dict__[name] for name in (*_STEPS, *_LOGGING) if name in task.__dict__}
        for name in _STEPS:
            if is_overridden(task, Task, name):
                task.__dict__[name] = model.dynamo_ctx(getattr(task, name))
        for name in _LOGGING:
            task.__dict__[name] = torch.compiler.disable(getattr(task, name))  # type: ignore[no-untyped-call]
    return task


def is_compiled(task: Task) -> bool:
    """Whether a task's forward and steps are compiled since it was taken out of what `torch.compile` had returned.

    Args:
        task: The task.
    """
    return _BEFORE in task.__dict__


def leave_compiled(task: Task) -> None:
    """Give a task its forward and its steps back as they were before it was compiled.

    Args:
        task: The task.
    """
    before = task.__dict__.pop(_BEFORE, {})
    for name in (*_STEPS, *_LOGGING):
        task.__dict__.pop(name, None)
    task.__dict__.update(before)
