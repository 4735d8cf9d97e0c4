"""Mixed precision: float32 parameters, and forward passes under `torch.autocast`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch.optim import Optimizer

from drivetrain.runtime.devices import DeviceKind
from drivetrain.runtime.errors import ConfigurationError, some_of
from drivetrain.strategies.precision.base import AgreeingGradScaler, Precision
from drivetrain.strategies.precision.true import refuse_without_bf16


class MixedPrecision(Precision):
    """Base class for mixed precision, with float32 parameters and a forward pass under autocast.

    Args:
        cache_enabled: Cache the cast copies of weights within one forward pass.

    Attributes:
        enabled: True if autocast is used.
    """

    dtype: ClassVar[torch.dtype]

    def __init__(self, cache_enabled: bool = True) -> None:
        self.param_dtype = self.dtype
        self.reduce_dtype = torch.float32
        self.cache_enabled = cache_enabled
        self.enabled = True
        self._device_type = "cpu"

    def setup(self, kind: DeviceKind) -> None:
        self._device_type = kind.autocast_type

    def forward_context(self) -> AbstractContextManager[Any]:
        return torch.autocast(
            self._device_type, dtype=self.dtype, enabled=self.enabled, cache_enabled=self.cache_enabled
        )

    def autocast(self, kind: DeviceKind, enabled: bool, cache_enabled: bool) -> AbstractContextManager[Any]:
        return torch.autocast(kind.autocast_type, dtype=self.dtype, enabled=enabled, cache_enabled=cache_enabled)


class BFloat16Mixed(MixedPrecision):
    """Mixed precision with bfloat16, without loss scaling.

    Bfloat16 has the range of float32.
    """

    name = "bf16"
    aliases = ("bf16-mixed",)
    dtype = torch.bfloat16

    def setup(self, kind: DeviceKind) -> None:
        refuse_without_bf16(self.name, kind)
        super().setup(kind)


class Float16Mixed(MixedPrecision):
    """Mixed precision with float16 and loss scaling.

    Method: Micikevicius et al., 2018, https://arxiv.org/abs/1710.03740. A step with overflowing gradients is skipped,
    and the loss scale is multiplied by `backoff_factor`. The scale is updated before the next loss is scaled, after all
    optimizers have stepped.

    Args:
        init_scale: Initial loss scale.
        growth_factor: Factor for the scale after `growth_interval` steps without overflow.
        backoff_factor: Factor for the scale after an overflow.
        growth_interval: Number of steps without overflow before the scale grows.
        enabled: Use a loss scale.
        cache_enabled: Cache the cast copies of weights within one forward pass.
    """

    name = "fp16"
    aliases = ("16-mixed", "16")
    dtype = torch.float16

    def __init__(
        self,
        init_scale: float = 65536.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        cache_enabled: bool = True,
    ) -> None:
        super().__init__(cache_enabled)
        self._options = {
            "init_scale": init_scale,
            "growth_factor": growth_factor,
            "backoff_factor": backoff_factor,
            "growth_interval": growth_interval,
            "enabled": enabled,
        }
        self.scaler: torch.amp.GradScaler = torch.amp.GradScaler("cpu", **self._options)  # type: ignore[arg-type]
        self._held: Callable[[], bool] = _never
        # Optimizers since the last update of the scale, and whether they were really stepped.
        self._stepped: dict[int, bool] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes without the state of a run, such as the current loss scale."""
        # Pickled for other processes and runs, which must not start with the loss scale of this one.
        fresh = torch.amp.GradScaler(self._device_type, **self._options)  # type: ignore[arg-type]
        return {**self.__dict__, "scaler": fresh, "_held": _never, "_stepped": {}}

    def setup(self, kind: DeviceKind) -> None:
        super().setup(kind)
        self.scaler = torch.amp.GradScaler(kind.autocast_type, **self._options)  # type: ignore[arg-type]

    def check_trained(self, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        if not self.scaler.is_enabled():
            return
        found = [
            names.get(id(parameter), f"parameter {place} of group {number}")
            for number, group in enumerate(optimizer.param_groups)
            for place, parameter in enumerate(group["params"])
            if parameter.requires_grad and parameter.dtype is torch.float16
        ]
        if found:
            raise ConfigurationError(
                "precision='fp16' scales the loss and cannot train float16 weights, but these trainable weights are "
                f"float16: {some_of(found)}. Convert them to float32 (model.float(), or autocast_adapter_dtype=True "
                "for PEFT adapters), or use 'bf16' or 'fp16-true'. Frozen weights may be float16.",
            )

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        # The scale must not change while another optimizer still accumulates gradients at the old scale.
        if self._stepped and not self._held():
            self._update()
        scaled: torch.Tensor = self.scaler.scale(loss)
        return scaled

    def hold_scale_while(self, holds: Callable[[], bool]) -> None:
        self._held = holds

    def agree_on_overflow(self, largest: Callable[[torch.Tensor], torch.Tensor]) -> None:
        if isinstance(self.scaler, AgreeingGradScaler):
            return
        state = self.scaler.state_dict()
        # The new scaler continues with the state of the old one, which may come from a checkpoint.
        self.scaler = AgreeingGradScaler(self._device_type, largest, self._options)
        if state:
            self.scaler.load_state_dict(state)

    def unscale(self, optimizer: Optimizer) -> None:
        if not self.scaler.is_enabled():
            return
        state = self.scaler._per_optimizer_states[id(optimizer)]
        if state["stage"].value == 0:  # READY: neither unscaled nor stepped
            try:
                self.scaler.unscale_(optimizer)
            except ValueError:
                self.check_trained(optimizer, {})  # parameters may have been unfrozen or added since `prepare`
                raise

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        if closure is not None:
            raise ConfigurationError(
                "precision='fp16' scales the loss, so it does not support optimizers that call a closure. Use 'bf16' "
                "or '32', or another optimizer.",
            )
        agrees = isinstance(self.scaler, AgreeingGradScaler) and self.scaler._scale is not None
        if not agrees and not _has_gradients(optimizer):
            optimizer.step()  # the scaler would raise if there are no gradients to check for overflow
            return True
        if id(optimizer) in self._stepped:
            self._update()
        self._stepped[id(optimizer)] = False
        # The scaler does not return whether it has stepped.
        watched = optimizer.register_step_post_hook(self._record_step)
        try:
            self.scaler.step(optimizer)
        except ValueError:
            self.check_trained(optimizer, {})
            raise
        finally:
            watched.remove()
        return self._stepped[id(optimizer)]

    def _record_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        # A fused optimizer is called even on overflow, with `found_inf` set, and skips the step itself.
        found = getattr(optimizer, "found_inf", None)
        self._stepped[id(optimizer)] = found is None or not bool(found)

    def _update(self) -> None:
        if self._stepped:
            self._stepped.clear()
            self.scaler.update()

    def state_dict(self) -> dict[str, Any]:
        self._update()
        return self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._stepped.clear()
        if state:
            self.scaler.load_state_dict(state)


def _never() -> bool:
    return False


def _has_gradients(optimizer: Optimizer) -> bool:
    return any(parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"])
