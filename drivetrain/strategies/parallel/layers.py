"""Layers that are split over tensor-parallel processes, or whole on each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from drivetrain.runtime.devices import DeviceKind
from drivetrain.strategies.parallel.copies import CopyCheck, share_random_state
from drivetrain.strategies.parallel.loss import LossParallel
from drivetrain.strategies.parallel.tensor import Plan, apply_plan, plan_of_model, whole_outputs_without_gradients


class Layers(Protocol):
    """What becomes of a model's layers."""

    def split(self, model: nn.Module, elsewhere: frozenset[int] = frozenset()) -> None:
        """Split them, in place.

        Args:
            model: The model.
            elsewhere: The `id` of modules that other stages of a pipeline compute, which stay as they are.
        """

    def begin(self, model: nn.Module) -> None:
        """Get ready for training a prepared model."""

    def check(self, optimizer: Optimizer) -> None:
        """Compare, the first time that an optimizer steps, what must be the same on all processes."""

    def teardown(self) -> None:
        """Undo what `begin` did to torch."""


class WholeLayers:
    """Every process computes all of each layer."""

    def split(self, model: nn.Module, elsewhere: frozenset[int] = frozenset()) -> None:
        """Leave them as they are."""

    def begin(self, model: nn.Module) -> None:
        """Do nothing."""

    def check(self, optimizer: Optimizer) -> None:
        """Do nothing."""

    def teardown(self) -> None:
        """Do nothing."""


class SplitLayers:
    """Processes share the computation of each layer.

    Args:
        mesh: The processes that share layers.
        kind: The kind of their devices.
        plan: Which layers are split how; `"auto"` takes the model's own.
        loss_parallel: Whether losses take logits that are split by class.
        unwrap: Returns the user's own module inside a wrapped one.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        kind: DeviceKind,
        plan: Plan | str,
        loss_parallel: bool,
        unwrap: Callable[[nn.Module], nn.Module],
    ) -> None:
        self._mesh, self._kind, self._plan, self._unwrap = mesh, kind, plan, unwrap
        self._loss = LossParallel() if loss_parallel else None
        self._copies: CopyCheck | None = None

    def split(self, model: nn.Module, elsewhere: frozenset[int] = frozenset()) -> None:
        """Split layers over the processes."""
        bare = self._unwrap(model)
        plan = plan_of_model(bare) if isinstance(self._plan, str) else self._plan
        root = apply_plan(bare, self._mesh, plan, elsewhere)
        if self._loss is not None:
            whole_outputs_without_gradients(root)

    def begin(self, model: nn.Module) -> None:
        """Let losses take split logits, and dropout leave out the same on all processes."""
        if self._loss is not None:
            self._loss.enable()
        share_random_state(self._mesh, self._kind)
        self._copies = CopyCheck(self._mesh, self._unwrap(model))

    def check(self, optimizer: Optimizer) -> None:
        """See once that copies have the same gradients."""
        if self._copies is not None:
            self._copies.check(optimizer)
            self._copies = None

    def teardown(self) -> None:
        """Let losses be torch's own again."""
        if self._loss is not None:
            self._loss.disable()
