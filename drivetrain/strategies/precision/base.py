"""`Precision` base class: dtypes of parameters and computation, and loss scaling."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.runtime.devices import DeviceKind


class Precision:
    """Base class for the numeric precision of training, with its dtypes and loss scaling.

    The class itself is plain float32, without autocast or loss scaling. The strategy places tensors on devices.

    Attributes:
        name: Canonical name, such as `"bf16"`.
        aliases: Other names.
        param_dtype: Dtype of parameters in the forward pass of sharded models. None keeps the model's dtype.
        reduce_dtype: Dtype in which the gradients of sharded models are reduced. None keeps the model's dtype.
    """

    name: ClassVar[str] = "32"
    aliases: ClassVar[tuple[str, ...]] = ("32-true", "no", "fp32")
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None

    def setup(self, kind: DeviceKind) -> None:
        """Prepare for training on devices of type `kind`, or raise an error if they do not support the precision.

        Args:
            kind: The device type.

        Raises:
            ConfigurationError: The device does not support this precision. The message names one that it supports.
        """

    def convert(self, model: nn.Module) -> nn.Module:
        """Convert a model's parameters and buffers to this precision's dtype.

        Args:
            model: The user's model.

        Returns:
            The converted model.
        """
        return model

    def convert_batch(self, batch: Any) -> Any:
        """Convert a batch's floating-point tensors to the dtype that the model takes."""
        return batch

    def init_context(self) -> AbstractContextManager[Any]:
        """Return a context in which constructed modules get parameters in the precision's dtype."""
        return nullcontext()

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return the context manager for forward passes in this precision."""
        return nullcontext()

    def autocast(self, kind: DeviceKind, enabled: bool, cache_enabled: bool) -> AbstractContextManager[Any]:
        """Return the context that applies the precision's autocast to code outside of the model, such as a loss.

        Args:
            kind: The device type.
            enabled: Enable autocast.
            cache_enabled: Cache the cast copies of weights within the context.
        """
        return torch.autocast(kind.autocast_type, enabled=False, cache_enabled=cache_enabled)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Multiply a loss by the loss scale before its backward pass."""
        return loss

    def hold_scale_while(self, holds: Callable[[], bool]) -> None:
        """Keep the loss scale unchanged while `holds()` returns True, because gradients are being accumulated.

        Accumulated gradients were computed with the current scale, which therefore must not change before their step.
        """

    def agree_on_overflow(self, largest: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Make all processes skip an optimizer step if gradients overflow on one of them.

        Used for sharded gradients, of which each process holds and checks only a part.

        Args:
            largest: Function that returns the maximum of a scalar tensor over all processes.
        """

    def unscale(self, optimizer: Optimizer) -> None:
        """Divide an optimizer's gradients by the loss scale."""

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        """Step an optimizer. A subclass with loss scaling skips the step if gradients have overflowed.

        Args:
            optimizer: The optimizer.
            closure: Function that recomputes the loss.

        Returns:
            False if the step was skipped because a gradient overflowed, else True.
        """
        if closure is None:
            optimizer.step()
        else:
            optimizer.step(closure)
        return True

    def check_trained(self, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        """Raise an error if an optimizer's parameters have dtypes that this precision cannot train.

        Args:
            optimizer: The prepared optimizer.
            names: Parameter names by the `id` of the parameter.

        Raises:
            ConfigurationError: A parameter cannot be trained. The message names it.
        """

    def prepare_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Return the optimizer to step in this precision, which is `optimizer` itself or a replacement.

        Called before the first step.

        Args:
            optimizer: The user's optimizer.

        Returns:
            The optimizer to step, which is the given one unless the precision replaces it.
        """
        return optimizer

    def state_dict(self) -> dict[str, Any]:
        """Return the precision's state for a checkpoint, such as the loss scale."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the precision's state, such as the loss scale, from a checkpoint."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def overrides(precision: Precision, method: str) -> bool:
    """Return True if a precision's class overrides the `Precision` method named `method`."""
    return getattr(type(precision), method) is not getattr(Precision, method)


# Loss scaler for sharded gradients


class AgreeingGradScaler(torch.amp.GradScaler):
    """Gradient scaler that skips a step on all processes if one overflows.

    Torch's `GradScaler` checks one process's gradients, and cannot handle plain tensors and DTensors together.
    """

    def __init__(self, device: str, largest: Callable[[Tensor], Tensor], options: dict[str, Any]) -> None:
        super().__init__(device, **options)
        self._largest = largest

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                gradient = parameter.grad
                local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
                if local.dtype == torch.float16 and not allow_fp16:
                    raise ValueError("Attempting to unscale FP16 gradients. Keep trainable weights in float32.")
                if local.numel():
                    groups.setdefault((local.device, local.dtype), []).append(local)
        flags = {found_inf.device: found_inf}
        with torch.no_grad():
            for (device, _), gradients in groups.items():
                flag = flags.setdefault(device, torch.zeros_like(found_inf, device=device))
                torch._amp_foreach_non_finite_check_and_unscale_(gradients, flag, inv_scale.to(device))
            # Every process gets here, even without gradients of its own, because `largest` is a collective call.
            overall = torch.stack([flag.to(found_inf.device) for flag in flags.values()]).max()
            overall = self._largest(overall.reshape(1)).reshape(())
        return {device: overall.to(device).reshape(flag.shape) for device, flag in flags.items()}
