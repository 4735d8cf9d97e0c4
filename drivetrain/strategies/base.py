"""`Strategy`: places one model on a set of processes and runs optimizer steps there."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from drivetrain.runtime.keywords import KnownKeywords
from drivetrain.runtime.state import PartialState
from drivetrain.strategies.gradients import Gradients
from drivetrain.strategies.model_state import ModelState
from drivetrain.strategies.moving import move as move_model
from drivetrain.strategies.moving import refuse_left_behind
from drivetrain.strategies.optimizer_names import lay_out_state
from drivetrain.strategies.precision import Precision
from drivetrain.strategies.step_module import StepModule
from drivetrain.strategies.topology import Topology

MicroBatch = TypeVar("MicroBatch")
Output = TypeVar("Output")
Capability = TypeVar("Capability")

View = Literal["train", "manual", "evaluate"]


class Given(NamedTuple):
    """What the user gave a loop.

    Attributes:
        argument: Where it was given, such as `"Trainer(gradient_clip_val)"`.
        value: Its value.
    """

    argument: str
    value: Any


@dataclass(frozen=True)
class RunOptions:
    """What a loop was asked for that a strategy may refuse, or that its own configuration may give too.

    Args:
        precision: The number formats.
        gradient_accumulation_steps: Micro-batches of a step.
        gradient_clipping: The norm that gradients are clipped to; None where the loop takes no such argument.
    """

    precision: Precision
    gradient_accumulation_steps: Given
    gradient_clipping: Given | None = None


class Strategy(KnownKeywords, ABC):
    """Places one model on a set of processes and runs optimizer steps there.

    The base class is the whole behaviour of one process on one device; a strategy overrides what
    differs. A new one is a subclass in a file of its own and a line in the registry, and a third
    party adds its own with `register_strategy`. What is not about placing, running and stepping
    belongs to three parts, which `setup` makes.

    Attributes:
        name: The name that users write.
        schedules_microbatches: Whether the strategy must see all micro-batches of a step at once, as a pipeline does.
        needs_even_batches: Whether every process must see as many evaluation batches, since its forward is collective.
        topology: This process's place among the others, and which processes count.
        gradients: How gradients are reduced, held, scaled and clipped.
        state: The state of models and optimizers, under the bare model's names.
    """

    name: ClassVar[str]
    schedules_microbatches: bool = False
    needs_even_batches: bool = False

    topology: Topology
    gradients: Gradients
    state: ModelState

    def setup(self, state: PartialState) -> None:
        """Take this process's place, and make the three parts.

        Args:
            state: This process, its device and its peers.

        Raises:
            ConfigurationError: The strategy cannot run in this environment.
        """
        self.topology = Topology.data_parallel(state)
        self.gradients = Gradients()
        self.state = ModelState(self.topology, self.unwrap)

    def check(self, options: RunOptions) -> None:
        """Refuse what cannot work with this strategy; called after `setup`, before anything is built.

        Args:
            options: What the loop was asked for.

        Raises:
            ConfigurationError: Names what contradicts what, and what would work.
        """

    def capability(self, kind: type[Capability]) -> Capability | None:
        """What this strategy can do beyond the others, such as `ContextParallel` or `Join`; None where it cannot."""
        return None

    # model

    def init_context(self) -> AbstractContextManager[Any]:
        """Context in which a model is best built."""
        return nullcontext()

    def place(self, model: nn.Module, precision: Precision, move: bool = True) -> nn.Module:
        """Bring a model's parameters onto the device and into the precision's dtype, without wrapping it.

        Args:
            model: The model.
            precision: The number formats.
            move: Whether to move it; not where its user places it by hand.
        """
        converted = precision.convert(model)
        return move_model(converted, self.topology.device) if move else converted

    def prepare(
        self, model: nn.Module, optimizers: Sequence[Optimizer], precision: Precision, move: bool = True
    ) -> tuple[nn.Module, list[Optimizer]]:
        """Place a model together with its optimizers.

        Args:
            model: The model as the user built it.
            optimizers: The optimizers over its parameters.
            precision: The number formats.
            move: Whether to bring the model onto the device.

        Returns:
            The module to call, and the optimizers to step.
        """
        before = dict(self.unwrap(model).named_parameters())
        placed = self.place(model, precision, move)
        refuse_left_behind(before, placed, optimizers)
        for optimizer in optimizers:
            lay_out_state(optimizer)
        return placed, list(optimizers)

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The user's own module inside whatever `prepare` wrapped around it."""
        while True:
            if isinstance(model, StepModule):
                model = model.task
            elif hasattr(model, "_orig_mod"):
                model = model._orig_mod  # type: ignore[assignment]
            else:
                return model

    def view(self, model: nn.Module, stage: View) -> nn.Module:
        """The module to call in a stage of the run; call it on all processes as the stage begins.

        Args:
            model: What `prepare` returned.
            stage: `"train"`; `"manual"` where the task runs backward within its training step; or `"evaluate"`, in
                which no gradients need reducing, and for which every process is given the same model.
        """
        return model

    # one optimizer step

    def forward_backward(
        self, model: nn.Module, step_fn: Callable[[MicroBatch], Output], microbatches: Sequence[MicroBatch]
    ) -> list[Output]:
        """Run forward and backward over the micro-batches of one optimizer step.

        Gradients are reduced over processes in the last one only.

        Args:
            model: What `prepare` returned.
            step_fn: Runs forward and backward on one micro-batch.
            microbatches: The window of one step.

        Returns:
            What `step_fn` returned for each.
        """
        if len(microbatches) == 1:
            return [step_fn(microbatches[0])]
        with self.gradients.sync(model, enabled=False):
            outputs = [step_fn(microbatch) for microbatch in microbatches[:-1]]
        outputs.append(step_fn(microbatches[-1]))
        return outputs

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Compute the gradients of a loss, scaled already."""
        loss.backward(**kwargs)  # type: ignore[no-untyped-call]

    def optimizer_step(
        self, optimizer: Optimizer, precision: Precision, closure: Callable[[], Any] | None = None
    ) -> bool:
        """Step an optimizer. Returns False where the step was skipped on overflow."""
        return precision.step(optimizer, closure)

    def teardown(self) -> None:
        """Release everything that would keep the process group alive."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"
