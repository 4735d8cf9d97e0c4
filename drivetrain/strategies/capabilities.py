"""What only some strategies can do; asked for with `strategy.capability(kind)`, which is None for the others."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from drivetrain.strategies.base import Strategy
    from drivetrain.strategies.precision import Precision


class ContextParallel:
    """Splits sequences over processes."""

    def split(
        self, buffers: Sequence[torch.Tensor], seq_dims: Sequence[int], keep: Collection[torch.Tensor] = ()
    ) -> AbstractContextManager[Any]:
        """Context in which tensors are this process's part of themselves, and attention sees all parts.

        Args:
            buffers: Tensors that hold whole sequences, and this process's part of them in the context.
            seq_dims: For each, which dimension is the sequence.
            keep: Those that stay parts afterwards.
        """
        raise NotImplementedError


def split_context(
    capable: ContextParallel | None,
    buffers: Sequence[torch.Tensor] | None,
    seq_dims: Sequence[int] | None,
    keep: Collection[torch.Tensor] | None,
) -> AbstractContextManager[Any]:
    """Context in which sequences are split; without effect where the strategy does not split them.

    Args:
        capable: What `strategy.capability(ContextParallel)` returned.
        buffers: Tensors that hold whole sequences.
        seq_dims: For each, which dimension is the sequence.
        keep: Those that stay parts afterwards.
    """
    return nullcontext() if capable is None else capable.split(buffers or (), seq_dims or (), keep or ())


class Join:
    """Lets processes have different numbers of batches."""

    def joined(self, models: Sequence[nn.Module]) -> AbstractContextManager[Any]:
        """Context in which processes that run out of batches shadow the collectives of the others.

        Args:
            models: What `prepare` returned.

        Raises:
            ConfigurationError: Every process needs as many batches under this strategy.
        """
        raise NotImplementedError


def join_context(capable: Join | None, models: Sequence[nn.Module]) -> AbstractContextManager[Any]:
    """Context in which processes may run out of batches; without effect where the strategy has no `Join`.

    Args:
        capable: What `strategy.capability(Join)` returned.
        models: What `prepare` returned.
    """
    return nullcontext() if capable is None else capable.joined(models)


class Configurations:
    """Holds several configurations of the strategy, one of which places what is prepared."""

    def add(self, name: str, other: Strategy) -> None:
        """Hold one more.

        Args:
            name: What it is selected by.
            other: A strategy of the same kind, made but not set up, whose configuration it is.

        Raises:
            ConfigurationError: It cannot run beside this one.
        """
        raise NotImplementedError

    def select(self, name: str) -> None:
        """Place what is prepared from now on by one of them; what has been prepared stays as it is."""
        raise NotImplementedError


class ConfiguredPrecision:
    """Decides the precision by the strategy's own configuration."""

    def choose(self, given: str | Precision | None) -> str | Precision | None:
        """Return the configuration's precision; what was given if it decides none, or another one.

        Args:
            given: A precision or its name; None if none was given.
        """
        raise NotImplementedError

    def accelerate_name(self, precision: Precision) -> str:
        """Return what Accelerate calls a precision under this strategy."""
        raise NotImplementedError


class RepeatableStep:
    """Computes the gradients of a step without exchanging anything, so that it can be done again where memory lacks.

    The class itself is that of one process.
    """

    def reduce(self, model: nn.Module) -> None:
        """Average the gradients of a step over processes; call it on all, once each has its own.

        Args:
            model: What `prepare` returned, whose gradients were computed by the module in it.
        """


class StepInBackward:
    """Leaves a parameter's gradient complete, over all processes too, where its post-accumulate hooks are called."""


class StartsProcesses:
    """Runs each verb of a Trainer in processes that are started for it, and computes nothing in the Trainer's own.

    Attributes:
        within: Makes the strategy of those processes.
        start_method: `"spawn"` or `"fork"`.
        num_processes: How many; 0 until a Trainer has chosen.
        kind: Name of the kind of device that they run on.
    """

    within: Callable[[], Strategy]
    start_method: str
    num_processes: int
    kind: str


class BatchPlacement:
    """Brings batches onto the devices in a way of its own, for devices that compile a graph for each shape.

    Attributes:
        fills_evaluation: Whether short batches are filled up in evaluations whose values include the padding, too.
    """

    fills_evaluation: bool = False

    def around(self, place: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """What a loader calls with each batch.

        Args:
            place: Puts a batch on the device, as the user or the loop wants it.
        """
        raise NotImplementedError

    def finish(self) -> None:
        """End the work on the last batch; called where an iteration over a loader ends."""
        raise NotImplementedError


class PlainEvaluation:
    """Evaluation must not run in inference mode, since tensors that are made there would break training."""


def evaluation_context(capable: PlainEvaluation | None, inference_mode: bool) -> AbstractContextManager[Any]:
    """Context without gradients that an evaluation runs in.

    Args:
        capable: What `strategy.capability(PlainEvaluation)` returned.
        inference_mode: Whether inference mode was asked for, where it can be had.
    """
    return torch.inference_mode() if inference_mode and capable is None else torch.no_grad()
