"""`Precision`: in which number formats a model computes, and how its loss is scaled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.runtime.devices import DeviceKind


class Precision:
    """Full precision, and the seam that every other precision overrides.

    A precision decides dtypes and scaling; where tensors live is the strategy's business. What a
    precision does not override costs nothing in the step.

    Attributes:
        name: Canonical name, such as `"bf16"`.
        param_dtype: Dtype of parameters during compute, for strategies that shard; None keeps the model's.
        reduce_dtype: Dtype in which gradients are reduced, for strategies that shard; None keeps the model's.
    """

    name: ClassVar[str] = "32"
    aliases: ClassVar[tuple[str, ...]] = ("32-true", "no", "fp32")
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None

    def setup(self, kind: DeviceKind) -> None:
        """Bind the precision to a kind of device.

        Raises:
            ConfigurationError: This precision cannot run there; the message names the pair and what would work.
        """

    def convert(self, model: nn.Module) -> nn.Module:
        """Bring a model's parameters into the precision's dtype; called once, before placing."""
        return model

    def convert_batch(self, batch: Any) -> Any:
        """Bring a batch's floating-point tensors into the dtype that the model computes in."""
        return batch

    def init_context(self) -> AbstractContextManager[Any]:
        """Context in which a model is built, so that its parameters are made in the right dtype."""
        return nullcontext()

    def forward_context(self) -> AbstractContextManager[Any]:
        """Context around every forward."""
        return nullcontext()

    def autocast(self, kind: DeviceKind, enabled: bool, cache_enabled: bool) -> AbstractContextManager[Any]:
        """Autocast with options of its own, for computations outside a model; off where the precision does not cast.

        Args:
            kind: The kind of device.
            enabled: Whether to cast.
            cache_enabled: Whether cast copies of the weights are kept within the context.
        """
        return torch.autocast(kind.autocast_type, enabled=False, cache_enabled=cache_enabled)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Scale a loss before its backward."""
        return loss

    def hold_scale_while(self, holds: Callable[[], bool]) -> None:
        """Keep a loss scale as it is while `holds()`, since gradients that were scaled with it wait for their step."""

    def agree_on_overflow(self, largest: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Take note that each process sees a part of the gradients only, so that they must agree on overflow.

        Args:
            largest: Returns the largest value of a scalar tensor over the processes, the same on all.
        """

    def unscale(self, optimizer: Optimizer) -> None:
        """Bring an optimizer's gradients back to their true size, before clipping."""

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        """Step an optimizer. Returns False where the step was skipped because a gradient overflowed."""
        if closure is None:
            optimizer.step()
        else:
            optimizer.step(closure)
        return True

    def check_trained(self, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        """Refuse parameters that cannot be trained in this precision; called once their optimizer is prepared.

        Args:
            optimizer: The optimizer.
            names: The names of parameters, by their `id`.

        Raises:
            ConfigurationError: Names the parameters.
        """

    def prepare_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """See an optimizer once before its first step.

        Returns:
            The optimizer to step in its place: the same, unless this precision needs one of its own.
        """
        return optimizer

    def state_dict(self) -> dict[str, Any]:
        """What must survive a restart, such as the loss scale."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` returned."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def overrides(precision: Precision, method: str) -> bool:
    """Whether a precision's class defines a method itself, so that the step has to call it."""
    return getattr(type(precision), method) is not getattr(Precision, method)


# A loss scaler for gradients of which each process holds a part


class AgreeingGradScaler(torch.amp.GradScaler):
    """A `GradScaler` that checks this process's shards, and lets all processes skip a step or none.

    Torch's own checks one process's gradients, and cannot take plain tensors and sharded ones together.
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
                    raise ValueError("Attempting to unscale FP16 gradients.")
                if local.numel():
                    groups.setdefault((local.device, local.dtype), []).append(local)
        flags = {found_inf.device: found_inf}
        with torch.no_grad():
            for (device, _), gradients in groups.items():
                flag = flags.setdefault(device, torch.zeros_like(found_inf, device=device))
                torch._amp_foreach_non_finite_check_and_unscale_(gradients, flag, inv_scale.to(device))
            overall = torch.stack([flag.to(found_inf.device) for flag in flags.values()]).max()
            overall = self._largest(overall.reshape(1)).reshape(())
        return {device: overall.to(device).reshape(flag.shape) for device, flag in flags.items()}
