"""A prepared optimizer: steps only where an accumulation window ends, and records when a step was skipped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from drivetrain.accelerator.prepared import Prepared, parameters_of
from drivetrain.strategies import Strategy
from drivetrain.strategies.optimizer_names import lay_out_state
from drivetrain.strategies.optimizer_proxy import OptimizerProxy, needs_closure

if TYPE_CHECKING:
    from drivetrain.accelerator.step import OptimizerStep


class PreparedOptimizer(OptimizerProxy):
    """What `Accelerator.prepare` returns for an optimizer; everything else is the optimizer's own.

    Args:
        optimizer: The user's optimizer, also found under `.optimizer`.
        step: The engine's step, which it is a part of.
        prepared: The models that it is prepared beside.
        strategy: Reduces their gradients over processes.

    Attributes:
        needs_closure: Whether it cannot step without a closure, as L-BFGS.
        step_was_skipped: Whether the last step was skipped on overflow.
        spent: Whether the gradients held have been stepped with.
        holds_abandoned: Whether they are those of a window whose loop was left before its step.
        backwards: How many backwards the engine had run when this one last stepped or cleared its gradients.
        stepped_on: When the batch was handed out that it last stepped on.
    """

    def __init__(self, optimizer: Optimizer, step: OptimizerStep, prepared: Prepared, strategy: Strategy) -> None:
        # Not Optimizer.__init__: parameters, state and defaults are those of the optimizer inside.
        self.optimizer = optimizer
        self.needs_closure = needs_closure(optimizer)
        self._engine, self._engine_step = step, step.step
        self._window = step.window
        self._prepared, self._strategy = prepared, strategy
        self.step_was_skipped = False
        self.spent = False
        self.holds_abandoned = False
        self.backwards = self.stepped_on = 0

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters."""
        self.optimizer.add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients that are not needed any more; those of the window under way accumulate.

        So it may stand before the backward or after the step, as the loop likes.
        """
        if self.spent or not self._window.holds_gradients:
            self.spent = self.holds_abandoned = False
            self.backwards = self._engine.backwards
            self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step, where a window ends.

        Args:
            closure: Computes gradients first; None where they are there already.

        Returns:
            What the closure returned.
        """
        return self._engine_step(self, closure)

    @contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Iterator[None]:
        """Let only this optimizer's parameters take gradients in the body, as for one side of a GAN.

        Args:
            sync_grad: Whether gradients are reduced over processes in the body.
        """
        mine = {id(parameter) for parameter in parameters_of(self)}
        models = self._prepared.models
        others = [
            (parameter, parameter.requires_grad)
            for model in models
            for parameter in model.parameters()
            if id(parameter) not in mine
        ]
        for parameter, _ in others:
            parameter.requires_grad_(False)
        try:
            with ExitStack() as stack:
                for model in [] if sync_grad else models:
                    stack.enter_context(self._strategy.gradients.sync(model, enabled=False))
                yield
        finally:
            for parameter, required in others:
                parameter.requires_grad_(required)

    def train(self) -> Any:
        """Switch to training, for schedule-free optimizers."""
        return self.optimizer.train() if hasattr(self.optimizer, "train") else None

    def eval(self) -> Any:
        """Switch to evaluation, for schedule-free optimizers."""
        return self.optimizer.eval() if hasattr(self.optimizer, "eval") else None

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's own state."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the optimizer's own state, laid out in memory as its parameters are."""
        self.optimizer.load_state_dict(state_dict)
        lay_out_state(self.optimizer)

    def __reduce__(self) -> tuple[Any, ...]:
        return _alone, (self.optimizer,)


def unwrap_optimizer(optimizer: Optimizer) -> Optimizer:
    """The user's own optimizer."""
    return optimizer.optimizer if isinstance(optimizer, PreparedOptimizer) else optimizer


class _Alone:
    """What a copy of a prepared optimizer is part of: no engine, so that it steps whenever it is called."""

    window = None
    holds_gradients = False
    backwards = 0

    @staticmethod
    def step(prepared: PreparedOptimizer, closure: Callable[[], Any] | None = None) -> Any:
        """Step the optimizer."""
        prepared.spent = True
        return prepared.optimizer.step(closure)


def _alone(optimizer: Optimizer) -> PreparedOptimizer:
    """A prepared optimizer as it comes out of a pickle or a deep copy; prepare its `.optimizer` to train with it."""
    engine: Any = _Alone()
    engine.window = engine
    return PreparedOptimizer(optimizer, engine, Prepared(), Strategy())
