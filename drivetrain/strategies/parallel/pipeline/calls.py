"""What a call of the module that is split does, while a task's step runs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from drivetrain.runtime.errors import ConfigurationError
from drivetrain.strategies.parallel.pipeline.split_model import SplitModel
from drivetrain.strategies.parallel.pipeline.stage import CALL, Call
from drivetrain.strategies.parallel.pipeline.trace import Route, signature_of

# Routes of so many different shapes of inputs are kept.
_MOST_ROUTES = 64


class Caught(BaseException):
    """A step called the model and must not continue: not an `Exception`, which a step might catch."""


class ModelCalls:
    """Answers the calls of the module that is split.

    Args:
        split: The model.
        stages: How many stages there are.
    """

    def __init__(self, split: SplitModel, stages: int) -> None:
        self.split = split
        self.name = type(split.whole).__name__
        self._stages = stages
        self._routes: OrderedDict[Any, Route] = OrderedDict()
        self._answer: Callable[..., Any] | None = None
        split.whole.__dict__[CALL] = self._called

    def _called(self, *args: Any, **kwargs: Any) -> Any:
        if self._answer is None:
            raise ConfigurationError(
                f"{self.name} is spread over {self._stages} stages, so it can only be called within "
                "training_step, validation_step, test_step and predict_step, once in each.",
                code="DT-053",
            )
        answer, self._answer = self._answer, None
        return answer(*args, **kwargs)

    @contextmanager
    def answered(self, answer: Callable[..., Any]) -> Iterator[None]:
        """Let the next call be answered so."""
        self._answer = answer
        try:
            yield
        finally:
            self._answer = None

    @property
    def was_called(self) -> bool:
        """Whether the answer has been asked for."""
        return self._answer is None

    def routed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """A call and how the stages run it.

        Raises:
            ConfigurationError: An argument requires gradients.
        """
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                raise ConfigurationError(
                    f"An argument of {self.name} requires gradients, so it was computed from "
                    "parameters outside of it, where a pipeline has no stage. Move that computation into the module "
                    "that is split.",
                    code="DT-053",
                )
        return Call(args, kwargs, self._route(args, kwargs))

    def _route(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Route:
        training = self.split.whole.training
        key = signature_of(args, kwargs, training)
        if key not in self._routes:
            if len(self._routes) >= _MOST_ROUTES:
                self._routes.popitem(last=False)
            self._routes[key] = self.split.outline.route(args, kwargs, training)
        self._routes.move_to_end(key)
        return self._routes[key]

    def close(self) -> None:
        """Let the module be called as any other again; parameters of other stages stay away."""
        self.split.whole.__dict__.pop(CALL, None)
