"""The part of Fabric that runs the parts of a step."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn

from drivetrain.accelerator import Accelerator
from drivetrain.accelerator.prepared import unwrap_optimizer
from drivetrain.compat.lightning.fabric.wrappers import BackwardGuard, FabricModule
from drivetrain.runtime.errors import ArgumentTypeError, ConfigurationError


class Stepping:
    """What a loop does with a loss and its gradients."""

    accelerator: Accelerator
    _guard: BackwardGuard
    _strategy: Any

    def backward(self, tensor: Tensor, *args: Any, model: Any = None, **kwargs: Any) -> None:
        """Compute gradients of a loss, in place of `loss.backward()`.

        Args:
            tensor: The loss.
            *args: As for `torch.Tensor.backward`.
            model: The model, which strategies need that run several with an engine each.
            **kwargs: As for `torch.Tensor.backward`.
        """
        self._guard.is_inside = True
        try:
            self._strategy.backward(tensor, model and forward_module(model), *args, **kwargs)
        finally:
            self._guard.is_inside = False

    def clip_gradients(
        self,
        module: nn.Module,
        optimizer: Any,
        clip_val: float | None = None,
        max_norm: float | None = None,
        norm_type: float | str = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor | None:
        """Clip gradients, by value or by norm.

        Args:
            module: Whose gradients.
            optimizer: Taken for Lightning's sake.
            clip_val: The bound of each element.
            max_norm: The bound of the norm.
            norm_type: The order of the norm.
            error_if_nonfinite: Whether a norm that is not finite is an error.

        Returns:
            The norm before, where it was clipped by norm.

        Raises:
            ConfigurationError: None or both of the bounds were given.
            RuntimeError: The norm is not finite.
        """
        if (clip_val is None) is (max_norm is None):
            raise ConfigurationError("clip_gradients takes one of clip_val and max_norm.", code="DT-004")
        bare = forward_module(module), unwrap_optimizer(optimizer)
        if clip_val is not None:
            self._strategy.clip_gradients_value(*bare, clip_val=clip_val)
            return None
        norm: Tensor = self._strategy.clip_gradients_norm(
            *bare, max_norm=max_norm, norm_type=norm_type, error_if_nonfinite=error_if_nonfinite
        )
        return norm

    def autocast(self) -> AbstractContextManager[Any]:
        """Compute in the number format in the body."""
        return self.accelerator.autocast()

    def no_backward_sync(self, module: nn.Module, enabled: bool = True) -> AbstractContextManager[Any]:
        """Let backwards in the body exchange nothing, to accumulate gradients.

        Args:
            module: The module, as `setup` returned it.
            enabled: Whether to.

        Raises:
            ConfigurationError: The module has not been set up.
        """
        bare = getattr(module, "_orig_mod", module)
        if not isinstance(bare, FabricModule):
            raise ArgumentTypeError(
                "You need to set up the model first before you can call `fabric.no_backward_sync()`: "
                "model = fabric.setup(model).",
                code="DT-017",
            )
        return self.accelerator.no_sync(forward_module(bare)) if enabled else nullcontext()


def forward_module(module: nn.Module) -> nn.Module:
    """What the strategy made of a module that `Fabric.setup` returned; any other module as it is.

    Args:
        module: The module, compiled or not.
    """
    bare = getattr(module, "_orig_mod", module)
    return bare.get_submodule("_forward_module") if isinstance(bare, FabricModule) else module
