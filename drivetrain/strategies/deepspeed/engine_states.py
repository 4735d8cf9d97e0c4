"""What a strategy with engines saves and loads, and how it finds the engine of a model."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from drivetrain.runtime.errors import ConfigurationError
from drivetrain.strategies.base import StateDict, Strategy
from drivetrain.strategies.deepspeed import native, states
from drivetrain.strategies.deepspeed.engine import TrainedModel


class EngineStates(Strategy):
    """The states of models that have an engine each; those without one are as in the base class."""

    _trained: list[TrainedModel]

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The user's own module."""
        for trained in self._trained:
            if model is trained.engine:
                return trained.bare
        return super().unwrap(model)

    def describe_parameter(self, parameter: nn.Parameter) -> tuple[int, bool]:
        """As everywhere; of one that ZeRO-3 has divided, the size that DeepSpeed has noted."""
        elements, trained = super().describe_parameter(parameter)
        return getattr(parameter, "ds_numel", elements), trained

    # state

    def model_state(self, model: nn.Module) -> StateDict:
        """Parameters and buffers; in 32 bits where DeepSpeed keeps such master weights.

        What has to be put together from all processes is kept by one of them each, and stands as a tensor on the meta
        device on the others, so that no process ever holds all of it.
        """
        trained = self._find(model)
        if trained is None:
            return super().model_state(model)
        return states.read_model(trained, masters=True, holder=self._holds)

    def full_state_dict(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """All parameters and buffers, whole and on the CPU, on rank 0; an empty dict elsewhere."""
        trained = self._find(model)
        if trained is None:
            return super().full_state_dict(model)
        return states.read_model(trained, masters=False, holder=lambda _: self.environment.rank == 0, whole=True)

    def load_model_state(self, model: nn.Module, state: StateDict, strict: bool = True) -> Any:
        """Load whole tensors by name into parameters and master weights."""
        trained = self._find(model)
        if trained is None:
            return super().load_model_state(model, state, strict)
        return states.write_model(trained, state, strict)

    def optimizer_state(self, model: nn.Module, optimizer: Optimizer) -> StateDict:
        """An optimizer's state by canonical parameter name, put together from all processes as in `model_state`."""
        return states.read_optimizer(self._stepped_by(optimizer), self._holds)

    def load_optimizer_state(self, model: nn.Module, optimizer: Optimizer, state: StateDict) -> None:
        """Give each process its part of what any strategy saved."""
        states.write_optimizer(self._stepped_by(optimizer), state)

    def _holds(self, number: int) -> bool:
        """Whether this process is the one that keeps a tensor which is put together for a checkpoint."""
        return number % self.environment.world_size == self.environment.rank

    def save_native(self, model: nn.Module, directory: str | os.PathLike[str], tag: str = "native") -> None:
        """Write DeepSpeed's own checkpoint, each process its part; call it on all.

        Args:
            model: a prepared model.
            directory: where to.
            tag: the name of the folder in it.
        """
        native.save(self._required(model), directory, tag)

    def load_native(self, model: nn.Module, directory: str | os.PathLike[str], tag: str | None = None) -> None:
        """Read what `save_native` wrote, on as many processes; call it on all.

        Args:
            model: a prepared model.
            directory: where from.
            tag: the name of the folder in it; the latest one if None.

        Raises:
            CheckpointError: there is none, or another number of processes wrote it.
        """
        native.load(self._required(model), directory, tag, self.environment.world_size)

    # engines

    def engine_of(self, model: nn.Module) -> Any:
        """The DeepSpeed engine of a prepared model, for what only DeepSpeed has."""
        return self._required(model).engine

    def _find(self, model: nn.Module) -> TrainedModel | None:
        for trained in self._trained:
            if model is trained.engine or model is trained.bare or model is trained.engine.module:
                return trained
        return None

    def _required(self, model: nn.Module) -> TrainedModel:
        trained = self._find(model)
        if trained is None:
            raise ConfigurationError(
                f"{type(model).__name__} has no DeepSpeed engine: it was not prepared together with an optimizer."
            )
        return trained

    def _stepped_by(self, optimizer: Optimizer) -> TrainedModel:
        for trained in self._trained:
            if optimizer is trained.optimizer or optimizer is trained.layout.inner:
                return trained
        raise ConfigurationError(
            f"{type(optimizer).__name__} was not prepared together with its model, which DeepSpeed needs: "
            "model, optimizer = accelerator.prepare(model, optimizer)."
        )
