"""The part of the Accelerator's face that exchanges values between processes."""

from __future__ import annotations

from typing import Any

from drivetrain.accelerator.metrics import gather_real_rows
from drivetrain.accelerator.trigger import Trigger
from drivetrain.data import ActiveLoaders, PreparedLoader, SkippingLoader
from drivetrain.runtime import collectives
from drivetrain.strategies import Strategy


class Collectives:
    """Accelerate's `gather`, `reduce` and what belongs to them."""

    strategy: Strategy
    active_loaders: ActiveLoaders
    trigger: Trigger

    def gather(self, tensor: Any) -> Any:
        """Concatenate tensors of all processes along the first dimension, on every process."""
        return collectives.gather(tensor)

    def gather_for_metrics(
        self,
        input_data: Any,
        use_gather_object: bool = False,
        *,
        loader: PreparedLoader | SkippingLoader | None = None,
    ) -> Any:
        """Gather per-sample values of the current batch, without the rows that only pad it.

        A tensor is per-sample where its first dimension is the batch's number of rows; others are gathered whole.

        Args:
            input_data: Nested structure of tensors, and of lists that hold one object per sample, such as a string.
            use_gather_object: Gather as objects even where all are tensors.
            loader: Whose batch this is, where several loaders are iterated at once.

        Returns:
            The real rows of all processes, in the order of the plain loader.
        """
        return gather_real_rows(input_data, loader, self.active_loaders, self.strategy.topology, use_gather_object)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Combine tensors of all processes elementwise: `"sum"`, `"mean"`, `"max"`, `"min"` or `"none"`."""
        return collectives.reduce(tensor, reduction, scale)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Pad tensors of all processes to the largest size along one dimension."""
        return collectives.pad_across_processes(tensor, dim, pad_index, pad_first)

    def set_trigger(self) -> None:
        """Raise a flag on this process that `check_trigger` sees on all."""
        self.trigger.set()

    def check_trigger(self) -> bool:
        """Whether any process raised the flag; lowers it."""
        return self.trigger.check()
