"""Steps each parameter within the backward, as its gradient is ready, and frees the gradient."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.runtime.errors import ConfigurationError


class InBackward:
    """Lets a backward step the parameters of some optimizers, so that their gradients are never held together.

    A copy of the optimizer steps one parameter at a time: by the same `step`, over the same state, with the options
    of the parameter's group as they are then. The optimizer itself, its groups and its hooks are left as they are.

    Args:
        optimizers: The bare optimizers.
        clip: What is done to each gradient before its step; nothing if None.
        beside: A parameter that no optimizer has, whose gradient is cleared with each step.
        check: Called with each parameter that is found to be trained; raises if its gradient is completed later.

    Raises:
        ConfigurationError: Two of the optimizers have the same parameter, or `step` of one is another function than
            that of its class.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        clip: Callable[[list[Tensor]], Any] | None = None,
        beside: nn.Parameter | None = None,
        check: Callable[[Tensor], None] | None = None,
    ) -> None:
        self._optimizers, self._clip, self._beside, self._check = list(optimizers), clip, beside, check
        self._places: dict[Tensor, tuple[Optimizer, int]] = {}  # each one's optimizer, and the number of its group
        self._hooks: list[Any] = []
        self._checked: set[tuple[int, int]] = set()  # groups of which a parameter has been stepped
        self._copies = {id(optimizer): _copy_of(optimizer) for optimizer in optimizers}
        self._stepped: set[Tensor] = set()
        self._locks = {id(optimizer): Lock() for optimizer in optimizers}  # there is a thread for each device
        self._steps, self._is_attached = True, False
        _refuse_shared(optimizers)
        for optimizer in optimizers:
            _refuse_own_step(optimizer)

    @property
    def is_torn(self) -> bool:
        """Whether some parameters are those of a step that others are yet to take."""
        return bool(self._stepped)

    def attach(self) -> None:
        """Step within backwards from now on."""
        self._is_attached = True
        self._find()

    def detach(self) -> None:
        """End that."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._places.clear()
        self._stepped.clear()
        self._is_attached = False

    def begin(self) -> None:
        """Get ready for the backward of a step: nothing is left of gradients that were not stepped with."""
        self._stepped.clear()
        if self._beside is not None:
            self._beside.grad = None
        if self._is_attached:
            self._find()

    def end(self) -> None:
        """Record that all of a step's parameters are stepped."""
        self._stepped.clear()

    @contextmanager
    def only_freeing(self) -> Iterator[None]:
        """Free gradients in the body without stepping."""
        self._steps = False
        try:
            yield
        finally:
            self._steps = True

    def _find(self) -> None:
        """Watch the parameters that are trained now, among them what groups were added for and what is unfrozen."""
        for optimizer in self._optimizers:
            for number, group in enumerate(optimizer.param_groups):
                for parameter in group["params"]:
                    parameter.grad = None
                    if parameter not in self._places and parameter.requires_grad:
                        if self._check is not None:
                            self._check(parameter)
                        self._places[parameter] = optimizer, number
                        self._hooks.append(parameter.register_post_accumulate_grad_hook(self._step))

    def _step(self, parameter: Tensor) -> None:
        if not self._steps:
            parameter.grad = None
            return
        if parameter in self._stepped:
            raise ConfigurationError(
                f"optimizer_in_backward=True: a parameter of shape {tuple(parameter.shape)} got a second gradient in "
                "the same step, after it was stepped with the first. It is used in several parts of the model that run "
                "backwards of their own (reentrant checkpoints, or a sharded block that is called twice), or the "
                "backward ran twice. Use torch.utils.checkpoint with use_reentrant=False, or leave "
                "optimizer_in_backward out.",
                code="DT-093",
            )
        self._stepped.add(parameter)
        if self._clip is not None:
            self._clip([parameter])
        optimizer, number = self._places[parameter]
        with self._locks[id(optimizer)]:
            changed = _step_alone(self._copies[id(optimizer)], optimizer, number, parameter)
        parameter.grad = None
        if (id(optimizer), number) not in self._checked:
            self._checked.add((id(optimizer), number))
            if changed:
                raise ConfigurationError(
                    f"optimizer_in_backward=True: {type(optimizer).__name__} keeps {', '.join(map(repr, changed))} "
                    "over all parameters of a group, which a step of one parameter alone would change. Leave "
                    "optimizer_in_backward out, or use an optimizer that treats each parameter by itself, such as "
                    "AdamW.",
                    code="DT-093",
                )


def _copy_of(optimizer: Optimizer) -> Optimizer:
    """Return a shallow copy of an optimizer; torch copies its options, state and groups, but neither hooks nor `step`.

    What a class of the user's own keeps on the instance is added.
    """
    made = copy.copy(optimizer)
    for name, value in vars(optimizer).items():
        if name != "step":
            vars(made).setdefault(name, value)
    return made


def _step_alone(alone: Optimizer, optimizer: Optimizer, number: int, parameter: Tensor) -> list[str]:
    """Step one parameter of an optimizer.

    Args:
        alone: A copy of the optimizer, which steps in its place.
        optimizer: The optimizer.
        number: The parameter's group.
        parameter: The parameter.

    Returns:
        Names of what the step has changed beside the parameter and its state, which the optimizer itself lacks then.
    """
    own, group = vars(alone), optimizer.param_groups[number]
    alone.state, alone.param_groups = optimizer.state, [{**group, "params": [parameter]}]
    kept = dict(own)
    alone.step()
    # torch's optimizers have flags for what they have checked once.
    changed = [name for name, value in own.items() if value is not kept.get(name, _ABSENT) and type(value) is not bool]
    options = alone.param_groups[0]
    return changed + [
        name for name, value in options.items() if name != "params" and value is not group.get(name, _ABSENT)
    ]


_ABSENT = object()


def _refuse_shared(optimizers: Sequence[Optimizer]) -> None:
    seen: dict[Tensor, Optimizer] = {}
    for optimizer in optimizers:
        for parameter in (each for group in optimizer.param_groups for each in group["params"]):
            other = seen.setdefault(parameter, optimizer)
            if other is not optimizer:
                raise ConfigurationError(
                    f"optimizer_in_backward=True: a parameter of shape {tuple(parameter.shape)} is in two optimizers "
                    f"({type(other).__name__} and {type(optimizer).__name__}), and its gradient is freed once one of "
                    "them has stepped. Give it to one of them, or leave optimizer_in_backward out.",
                    code="DT-088",
                )


def _refuse_own_step(optimizer: Optimizer) -> None:
    own = optimizer.__dict__.get("step")
    # A learning-rate scheduler of torch puts a function in the place of `step` that counts its calls.
    if own is not None and not hasattr(own, "_wrapped_by_lr_sched"):
        raise ConfigurationError(
            f"optimizer_in_backward=True: something has replaced step() of this {type(optimizer).__name__}, so it "
            "cannot step a parameter alone. Leave that, or optimizer_in_backward, out.",
            code="DT-093",
        )
