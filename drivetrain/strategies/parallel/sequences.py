"""Sequences that are split over processes, or whole on each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import nn

from drivetrain.strategies.base import View
from drivetrain.strategies.capabilities import ContextParallel
from drivetrain.strategies.parallel.context import SequenceShard, SharedAttention, sequence_length, split_in_place


class Sequences(Protocol):
    """What becomes of the sequences of a batch."""

    @property
    def capability(self) -> ContextParallel | None:
        """What splits tensors in a raw loop; None where sequences are whole."""

    def view(self, model: nn.Module, stage: View) -> nn.Module:
        """The module to call with whole batches."""

    def attention(self) -> AbstractContextManager[Any]:
        """Context in which attention is over the tokens of all processes that share a sequence."""

    def shard_batch(self, batch: Any) -> Any:
        """This process's tokens of a batch of whole sequences."""


class WholeSequences:
    """Every process has whole sequences."""

    capability = None

    def view(self, model: nn.Module, stage: View) -> nn.Module:
        """The model itself."""
        return model

    def attention(self) -> AbstractContextManager[Any]:
        """A context that changes nothing."""
        return nullcontext()

    def shard_batch(self, batch: Any) -> Any:
        """The batch itself."""
        return batch


class SplitSequences(ContextParallel):
    """Processes share each sequence.

    Args:
        shard: Which tokens are this process's.
        attention: Makes attention see the tokens of all processes.
        seq_dim: Which dimension of a batch's tensors is the sequence.
        shard_batch: Splits a batch instead, called with it and `shard`.

    Attributes:
        shard: Which tokens are this process's.
    """

    def __init__(
        self,
        shard: SequenceShard,
        attention: SharedAttention,
        seq_dim: int,
        shard_batch: Callable[[Any, SequenceShard], Any] | None,
    ) -> None:
        self.shard, self._attention, self._seq_dim, self._shard_batch = shard, attention, seq_dim, shard_batch
        self.capability: ContextParallel | None = self

    def view(self, model: nn.Module, stage: View) -> nn.Module:
        """The model on this process's tokens; in evaluation what a step returns is made whole."""
        joined_dim = self._seq_dim if stage == "evaluate" else None
        return SequenceStep(model, self._attention, self.shard_batch, joined_dim)

    def attention(self) -> AbstractContextManager[Any]:
        """Context in which attention is over the tokens of all processes that share a sequence."""
        return self._attention.entered()

    def shard_batch(self, batch: Any) -> Any:
        """This process's tokens of a batch of whole sequences."""
        if self._shard_batch is not None:
            return self._shard_batch(batch, self.shard)
        return self.shard.split_batch(batch, self._seq_dim)

    @contextmanager
    def split(
        self, buffers: Sequence[torch.Tensor], seq_dims: Sequence[int], keep: Collection[torch.Tensor] = ()
    ) -> Iterator[None]:
        """Split tensors over the processes that share sequences, and let attention see all of them."""
        before = self._attention.calls
        with split_in_place(self.shard, buffers, seq_dims, keep), self.attention():
            yield
        self._attention.check(before)


class SequenceStep(nn.Module):
    """Called with whole batches as `module(step, batch, ...)`, runs the step on this process's tokens.

    Args:
        inner: The module that runs steps.
        attention: Makes attention see the tokens of all processes.
        split: Takes its tokens of a batch.
        joined_dim: The dimension along which what the step returns is made whole; None leaves it as it is.
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
