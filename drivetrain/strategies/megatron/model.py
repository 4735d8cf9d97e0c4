"""A model as megatron-core runs it, and all models of a strategy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from drivetrain.runtime.errors import ConfigurationError
from drivetrain.strategies.megatron.layout import Layout
from drivetrain.strategies.megatron.program import MegatronProgram

if TYPE_CHECKING:
    from drivetrain.strategies.megatron.optimizer import MegatronOptimizerFront


class PlacedModel:
    """The parts of one model that this process holds.

    Args:
        owner: The user's module: a task, or a bare model of megatron-core.
        bare: The parts, earliest layers first.
        wrapped: What is called for each.
        layout: Where the parts belong in the whole model.

    Attributes:
        called: What `prepare` returned.
        optimizer: What steps it; None where it is only evaluated.
        accumulates: Whether a backward is within an accumulation window.
    """

    def __init__(self, owner: nn.Module, bare: list[nn.Module], wrapped: list[nn.Module], layout: Layout) -> None:
        self.owner, self.bare, self.wrapped, self.layout = owner, bare, wrapped, layout
        self.called: nn.Module = owner
        self.optimizer: MegatronOptimizerFront | None = None
        self.accumulates = False

    @property
    def config(self) -> Any:
        """Their `TransformerConfig`."""
        return self.bare[0].config

    @property
    def program(self) -> MegatronProgram:
        """The task.

        Raises:
            ConfigurationError: The model is none of a task.
        """
        if not isinstance(self.owner, MegatronProgram):
            raise ConfigurationError(
                f"{type(self.owner).__name__} is not a MegatronTask, which has the forward step of a schedule.",
                code="DT-064",
            )
        return self.owner

    def finalize(self, chunks: list[nn.Module] | None = None, num_tokens: Any = None, **options: Any) -> None:
        """Reduce the gradients of a window over all that share them, to their average over data shards.

        Args:
            chunks: The parts; all of this process if None.
            num_tokens: Left to the engine, which weighs losses by their tokens.
            **options: Further arguments of megatron-core's function.
        """
        from megatron.core.distributed import finalize_model_grads

        finalize_model_grads(self.wrapped, None, **options)
        if self.config.calculate_per_token_loss:
            # Megatron-core adds gradients up then, and leaves the average to its own count of tokens.
            for chunk in self.wrapped:
                chunk.scale_gradients(1.0 / chunk.dp_cp_group.size())  # type: ignore[operator]

    def zero_gradients(self) -> None:
        """Forget gradients that are held."""
        for chunk in self.wrapped:
            chunk.zero_grad_buffer()  # type: ignore[operator]

    def held_gradients(self) -> list[torch.Tensor]:
        """What has been accumulated."""
        parameters = (parameter for chunk in self.bare for parameter in chunk.parameters())
        return [parameter.main_grad for parameter in parameters if hasattr(parameter, "main_grad")]


class PlacedModels:
    """All models of a strategy."""

    def __init__(self) -> None:
        self._placed: list[PlacedModel] = []

    def __iter__(self) -> Iterator[PlacedModel]:
        return iter(self._placed)

    def add(self, placed: PlacedModel) -> None:
        """Take a model, in place of what it was placed as before."""
        self._placed = [known for known in self._placed if known.owner is not placed.owner]
        self._placed.append(placed)

    def clear(self) -> None:
        """Forget all models."""
        self._placed.clear()

    def find(self, model: nn.Module) -> PlacedModel | None:
        """A model by what it was or by what `prepare` returned; None where it is none of them."""
        for placed in self._placed:
            if model is placed.owner or model is placed.called or any(model is chunk for chunk in placed.wrapped):
                return placed
        return None

    def require(self, model: nn.Module) -> PlacedModel:
        """The same.

        Raises:
            ConfigurationError: It is none of them.
        """
        placed = self.find(model)
        if placed is None:
            raise ConfigurationError(
                f"{type(model).__name__} has not been prepared under strategy='megatron'.", code="DT-047"
            )
        return placed
