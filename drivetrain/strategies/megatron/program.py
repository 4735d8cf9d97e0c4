"""What a task gives to `Megatron`, and what it is given."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from drivetrain.runtime.errors import ConfigurationError


@runtime_checkable
class MegatronProgram(Protocol):
    """A task in megatron-core's own signatures, such as `drivetrain.MegatronTask`.

    Attributes:
        chunks: The parts of the model that this process holds.
    """

    chunks: list[nn.Module]

    def transformer_config(self) -> Any:
        """The model's `TransformerConfig`, without the sizes of the grid."""

    def model_provider(
        self, pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None, config: Any = None
    ) -> nn.Module:
        """Build one part of the model."""

    def forward_step(self, data_iterator: Iterator[Any], model: nn.Module) -> tuple[Tensor, Any]:
        """Run one part of the model on the next batch; return its output and the function that computes the loss."""

    def batch_shape(self, batch: Any) -> tuple[int, int]:
        """How many rows a batch has, and how long they are."""


class MegatronRuntime:
    """Builds and runs the parts of a model that this process holds: a capability of strategies."""

    def build(self, program: MegatronProgram) -> list[nn.Module]:
        """Build the parts of a model that this process holds, earliest layers first.

        Args:
            program: Provides the model.

        Raises:
            ConfigurationError: Sizes of the model do not fit those of the grid.
        """
        raise NotImplementedError

    def run(self, program: MegatronProgram, batch: Any) -> tuple[Tensor, Any]:
        """Run the part of the model whose turn it is on a batch; call it within a step.

        On processes that compute another part than the last one, this ends the step.

        Args:
            program: Has the forward step.
            batch: What the loader gave.

        Returns:
            The output of the whole model, and the function that computes the loss.
        """
        raise NotImplementedError

    def loss_of(self, result: Any) -> tuple[Any, dict[str, Any]]:
        """What a loss function in megatron-core's signature returned, as a step returns it.

        Args:
            result: `(loss, report)` with a mean, or `(loss, num_tokens, report)` with a sum.

        Returns:
            A loss, or a dict with a loss and its weight where losses are averaged per token; and the report.
        """
        raise NotImplementedError

    def own_part(self, batch: dict[str, Any]) -> dict[str, Any]:
        """This process's part of the sequences of a batch, where processes share them."""
        raise NotImplementedError

    def whole_vocabulary(self, logits: Tensor) -> Tensor:
        """Logits over the whole vocabulary, from those of this process's part of it."""
        raise NotImplementedError


def shape_of(batch: Any) -> tuple[int, int]:
    """How many rows the first tensor of a batch with two dimensions or more has, and how long they are.

    Args:
        batch: A tensor, or dicts and sequences of tensors.

    Raises:
        ConfigurationError: There is none.
    """
    for tensor in _tensors(batch):
        if tensor.dim() >= 2:
            return tensor.shape[0], tensor.shape[1]
    raise ConfigurationError(
        "No tensor of rows and columns was found in the batch, whose shape the stages of a pipeline hand over. "
        "Override MegatronTask.batch_shape(batch), which returns (rows, length).",
        code="DT-060",
    )


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, dict):
        for key in sorted(batch, key=lambda key: (key not in ("tokens", "input_ids"), str(key))):
            yield from _tensors(batch[key])
    elif isinstance(batch, list | tuple):
        for each in batch:
            yield from _tensors(each)
