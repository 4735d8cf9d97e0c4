"""An optimizer's `step` and `zero_grad` without what torch does around them for profilers, where none looks.

That takes as long as stepping a small model does. Nor is torch's compiler imported where nothing is compiled: torch
imports it for each optimizer, to leave some functions of the optimizer out of what is compiled, which takes a second.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

_profiles = torch._C._autograd._profiler_enabled
_ZERO_GRAD = Optimizer.zero_grad
_ABSENT = object()
# The hooks that torch runs around the steps of all optimizers.
_before, _after = torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks
_COMPILER = "torch._dynamo"
_LEFT_OUT = "__dynamo_disable"  # where torch keeps the function that a compiler leaves out


def step(optimizer: Optimizer) -> None:
    """Do what `optimizer.step()` does.

    Args:
        optimizer: The optimizer; one that somebody has put another `step` or hooks on runs these.
    """
    function: Any = type(optimizer).step
    is_watched = (
        "step" in optimizer.__dict__
        or _before
        or _after
        or type(function) is not FunctionType
        or "hooked" not in function.__dict__
        or optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or _profiles()
    )
    if is_watched:
        optimizer.step()
    else:
        _call(function.__wrapped__, optimizer)


def step_parameter(optimizer: Optimizer, number: int, parameter: Tensor) -> list[str]:
    """Step one parameter of an optimizer as `step` would, without the hooks of its steps.

    Args:
        optimizer: The optimizer.
        number: Of the parameter's group.
        parameter: The parameter.

    Returns:
        The options of the group that the optimizer has changed, and which are unchanged in the group itself.
    """
    groups = optimizer.param_groups
    group = groups[number]
    alone = {**group, "params": [parameter]}
    function: Any = type(optimizer).step
    inner = function.__wrapped__ if "hooked" in function.__dict__ else function
    optimizer.param_groups = [alone]
    try:
        _call(inner, optimizer)
    finally:
        optimizer.param_groups = groups
    return [name for name, value in alone.items() if name != "params" and value is not group.get(name, _ABSENT)]


def _call(function: Any, optimizer: Optimizer) -> None:
    """Call an optimizer's step; where torch wraps it only to keep gradients off and a compiler out, what it wraps."""
    if getattr(function, "__code__", None) is not _GRADIENTS_OFF:
        function(optimizer)
        return
    were_on = torch.is_grad_enabled()
    torch.set_grad_enabled(optimizer.defaults["differentiable"])
    try:
        function.__wrapped__(optimizer)
    finally:
        torch.set_grad_enabled(were_on)


_GRADIENTS_OFF = torch_optimizer._use_grad_for_differentiable(_call).__code__


@contextlib.contextmanager
def compiler_not_imported() -> Iterator[None]:
    """Within, optimizers are made and read without importing torch's compiler, where nothing has imported it yet."""
    inner = [function.__wrapped__ for function in _METHODS if hasattr(function, "__wrapped__")]
    marked = [] if _COMPILER in sys.modules else [each for each in inner if _LEFT_OUT not in each.__dict__]
    for each in marked:
        setattr(each, _LEFT_OUT, each)
    try:
        yield
    finally:
        for each in marked:
            delattr(each, _LEFT_OUT)


_METHODS: tuple[Any, ...] = (Optimizer.add_param_group, Optimizer.state_dict, Optimizer.load_state_dict)


def zero_grad(optimizer: Optimizer, set_to_none: bool = True) -> None:
    """Do what `optimizer.zero_grad()` does.

    Args:
        optimizer: The optimizer; one that has a `zero_grad` of its own runs that.
        set_to_none: Whether gradients are freed rather than set to 0.
    """
    is_plain = set_to_none and type(optimizer).zero_grad is _ZERO_GRAD and "zero_grad" not in optimizer.__dict__
    if is_plain and not _profiles():
        drop_gradients(optimizer)
    else:
        optimizer.zero_grad(set_to_none)


def drop_gradients(*optimizers: Optimizer, beside: Tensor | None = None) -> None:
    """Free the gradients of optimizers' parameters.

    Args:
        *optimizers: The bare optimizers.
        beside: A further parameter.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
    if beside is not None:
        beside.grad = None
