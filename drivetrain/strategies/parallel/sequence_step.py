"""A step on this process's tokens of a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from drivetrain.strategies.parallel.context import SharedAttention, sequence_length


class SequenceStep(nn.Module):
    """Called with whole batches as `module(step, batch, ...)`, runs the step on this process's tokens.

    Args:
        inner: the module that runs steps.
        attention: makes attention see the tokens of all processes.
        split: takes its tokens of a batch.
        joined_dim: the dimension along which what the step returns is made whole; None leaves it as it is.
    """

    def __init__(
        self, inner: nn.Module, attention: SharedAttention, split: Callable[[Any], Any], joined_dim: int | None = None
    ) -> None:
        super().__init__()
        self.inner = inner
        self._attention, self._split, self._joined_dim = attention, split, joined_dim
        self._checked = False

    def forward(self, step: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Run `step` on a part of `batch`."""
        own = self._split(batch)
        before = self._attention.calls
        with self._attention.entered():
            output = self.inner(step, own, *args, **kwargs)
        if not self._checked:
            self._attention.check(before)
            self._checked = True
        if self._joined_dim is None or output is None:
            return output
        length = sequence_length(own, self._joined_dim)
        return output if length is None else self._attention.shard.join_output(output, length, self._joined_dim)
