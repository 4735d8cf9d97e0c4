"""Precision plugins. `Trainer(plugins=...)` accepts them in place of `precision`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.compat.lightning.enums import GradClipAlgorithmType
from drivetrain.compat.lightning.fabric.utilities.rank_zero import rank_zero_deprecation, rank_zero_warn
from drivetrain.runtime.devices import detect_device_kind
from drivetrain.runtime.errors import ConfigurationError, DrivetrainError
from drivetrain.runtime.pytrees import recursively_apply

DTYPES = {"64-true": torch.float64, "32-true": torch.float32, "16-true": torch.float16, "bf16-true": torch.bfloat16}
"""The dtype of parameters and of the computation, of number formats that have one for both."""

_SHARDED = ("32-true", "16-true", "bf16-true", "16-mixed", "bf16-mixed")


class ClippingError(DrivetrainError, RuntimeError):
    """Raised when gradients would be clipped before an optimizer that unscales inside its own step."""


class Precision:
    """Precision plugin. A run uses only its name, the methods are for scripts that call them.

    Attributes:
        precision: Name of the precision, as for `Trainer(precision=...)`.
    """

    precision: str = "32-true"

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Return the module with parameters and buffers in this precision's dtype."""
        dtype = DTYPES.get(self.precision)
        return module if dtype in (None, torch.float32) else module.to(dtype)

    def convert_input(self, data: Any) -> Any:
        """Return a batch with floating-point tensors in the compute dtype."""
        return _converted(data, DTYPES.get(self.precision, torch.float32))

    def convert_output(self, data: Any) -> Any:
        """Return a model's output with floating-point tensors in torch's default dtype."""
        return _converted(data, torch.get_default_dtype())

    @contextmanager
    def tensor_init_context(self) -> Iterator[None]:
        """Create floating-point tensors in the `with` body in the parameters' dtype by default."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(DTYPES.get(self.precision, before))
        try:
            yield
        finally:
            torch.set_default_dtype(before)

    def module_init_context(self) -> AbstractContextManager[None]:
        """Return a context manager in which modules are created with parameters of this precision."""
        return self.tensor_init_context()

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return the context manager for a forward pass."""
        return self.tensor_init_context()

    def pre_backward(self, tensor: Tensor, module: Any) -> Any:
        """Run code before each backward pass. Override it."""

    def backward(self, tensor: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        """Run the backward pass of a loss."""
        tensor.backward(*args, **kwargs)

    def post_backward(self, tensor: Tensor, module: Any) -> Any:
        """Run code after each backward pass. Override it."""

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Step an optimizer. Return what its `step` returns."""
        return optimizer.step(**kwargs)

    def main_params(self, optimizer: Optimizer) -> Iterator[Tensor]:
        """Yield the parameters of an optimizer."""
        for group in optimizer.param_groups:
            yield from group["params"]

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        """Divide gradients by the loss scale, if the loss is scaled."""

    def clip_gradients(
        self, optimizer: Any, clip_val: float = 0.0, gradient_clip_algorithm: Any = GradClipAlgorithmType.NORM
    ) -> None:
        """Clip gradients by value or by norm. Does nothing if `clip_val` is 0 or negative."""
        if clip_val <= 0:
            return
        clip = self.clip_grad_by_value if gradient_clip_algorithm == "value" else self.clip_grad_by_norm
        clip(optimizer, clip_val)

    def clip_grad_by_value(self, optimizer: Any, clip_val: float) -> None:
        """Clip each gradient element to the range [-clip_val, clip_val]."""
        nn.utils.clip_grad_value_(self.main_params(optimizer), clip_val)

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        """Clip the total norm of the gradients."""
        nn.utils.clip_grad_norm_(self.main_params(optimizer), clip_val)

    def connect(self, model: nn.Module, optimizers: Any, lr_schedulers: Any) -> tuple[nn.Module, Any, Any]:
        """Return the model, optimizers and schedulers, converted for this precision if needed.

        Args:
            model: The model.
            optimizers: The optimizers.
            lr_schedulers: The learning rate schedulers.
        """
        return model, optimizers, lr_schedulers

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state from a checkpoint."""

    def teardown(self) -> None:
        """Clean up after a run. The default does nothing."""


class ScaledPrecision(Precision):
    """Precision with optional loss scaling.

    Attributes:
        scaler: The gradient scaler, or None if the loss is not scaled.
    """

    scaler: Any = None

    def backward(self, tensor: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        super().backward(tensor if self.scaler is None else self.scaler.scale(tensor), model, *args, **kwargs)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        if self.scaler is None:
            return super().optimizer_step(optimizer, **kwargs)
        output = self.scaler.step(optimizer, **kwargs)
        self.scaler.update()
        return output

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)

    def clip_gradients(
        self, optimizer: Any, clip_val: float = 0.0, gradient_clip_algorithm: Any = GradClipAlgorithmType.NORM
    ) -> None:
        if clip_val > 0 and self.scaler is not None and getattr(optimizer, "_step_supports_amp_scaling", False):
            raise ClippingError(
                f"The current optimizer, {type(optimizer).__qualname__}, does not allow for gradient clipping, because "
                "it unscales gradients within its own step. Make it with fused=False, or leave clipping out."
            )
        super().clip_gradients(optimizer, clip_val, gradient_clip_algorithm)

    def state_dict(self) -> dict[str, Any]:
        return {} if self.scaler is None else dict(self.scaler.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.scaler is not None:
            self.scaler.load_state_dict(state_dict)

    def _choose_scaler(self, scaler: Any, make: Callable[[], Any]) -> None:
        if self.precision != "16-mixed" and scaler is not None:
            raise ConfigurationError(
                f"`precision={self.precision!r}` does not use a scaler, found {scaler}. Leave it out."
            )
        self.scaler = make() if scaler is None and self.precision == "16-mixed" else scaler


class MixedPrecision(ScaledPrecision):
    """Mixed precision with autocast."""

    def __init__(self, precision: str, device: str | None = None, scaler: Any = None) -> None:
        if precision not in ("16-mixed", "bf16-mixed"):
            raise ConfigurationError(
                f"Passed `{type(self).__name__}({precision=})`. Precision must be '16-mixed' or 'bf16-mixed'.",
            )
        self.precision = precision
        self.device = "cpu" if device is None else device
        self._choose_scaler(scaler, lambda: torch.amp.GradScaler(self._kind_of_device))

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return the autocast context manager for the device."""
        return torch.autocast(self._kind_of_device, self._dtype)

    def autocast_context_manager(self) -> torch.autocast:
        """Return the autocast context manager, without caching of cast weights."""
        return torch.autocast(self._kind_of_device, self._dtype, cache_enabled=False)

    @property
    def _dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.precision == "bf16-mixed" else torch.float16

    @property
    def _kind_of_device(self) -> str:
        return self.device.partition(":")[0] if isinstance(self.device, str) else "cuda"


class HalfPrecision(Precision):
    """Parameters and computation in half precision."""

    def __init__(self, precision: str = "16-true") -> None:
        _check(precision, ("16-true", "bf16-true"), f"{type(self).__name__}({precision=}) is not supported.")
        self.precision = precision


class DoublePrecision(Precision):
    """Parameters and computation in double precision."""

    precision = "64-true"


class FSDPPrecision(ScaledPrecision):
    """Precision of FSDP models."""

    def __init__(self, precision: str, scaler: Any = None) -> None:
        _check(precision, _SHARDED, f"{type(self).__name__}({precision=}) is not supported in FSDP.")
        self.precision = precision
        self._choose_scaler(scaler, _sharded_scaler)

    @property
    def mixed_precision_config(self) -> Any:
        """Options of torch's `FullyShardedDataParallel` for this precision."""
        from drivetrain.strategies.fsdp.model_sharding import MixedPrecision as Options

        dtype = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16, **DTYPES}[self.precision]
        if self.precision in ("16-true", "bf16-true"):
            rank_zero_warn(
                f"FSDPPrecision({self.precision!r}) enables computation in lower precision, and keeps the weights in "
                "it too, so that small updates are lost. Use the mixed one unless memory does not allow it."
            )
        return Options(param_dtype=dtype, reduce_dtype=dtype, buffer_dtype=dtype)

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return autocast on GPUs for mixed precision, else a context manager that sets the default dtype."""
        if not self.precision.endswith("-mixed"):
            return super().forward_context()
        return torch.autocast("cuda", torch.bfloat16 if self.precision == "bf16-mixed" else torch.float16)


class DeepSpeedPrecision(Precision):
    """Precision of DeepSpeed models."""

    def __init__(self, precision: str) -> None:
        _check(precision, _SHARDED, f"{type(self).__name__}({precision=}) is not supported in DeepSpeed.")
        self.precision = precision

    def backward(self, tensor: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        """Run the backward pass with DeepSpeed's engine."""
        model.backward(tensor, *args, **kwargs)


class TorchSyncBatchNorm:
    """Synchronized batch normalization, as with `Trainer(sync_batchnorm=True)`."""


SPELLINGS = {
    "32": "32-true",
    "64": "64-true",
    "bf16": "bf16-mixed",
    "fp16": "16-mixed",
    "bf16-true": "bf16-true",
    "fp16-true": "16-true",
}
"""The names of drivetrain's number formats, and Lightning's."""


def shown_as(precision: str) -> str:
    """Return Lightning's name of a precision."""
    return SPELLINGS.get(precision, precision)


def usable_on(kind: str, precision: Any) -> Any:
    """Return a precision, or a replacement if the device type does not support it."""
    is_cpu = (detect_device_kind().name if kind == "auto" else kind) == "cpu"
    if not is_cpu or str(precision) not in ("16", "16-mixed"):
        return precision
    rank_zero_warn("`precision='16-mixed'` is not for CPUs. Using `precision='bf16-mixed'` instead.")
    return "bf16-mixed"


def plugin_of(precision: str, device: str, scaler: Any) -> Precision:
    """Return the precision plugin for a precision's name."""
    if precision.endswith("-mixed"):
        return MixedPrecision(precision, device, scaler)
    if precision == "64-true":
        return DoublePrecision()
    if precision in ("16-true", "bf16-true"):
        return HalfPrecision(precision)
    plugin = Precision()
    plugin.precision = precision
    return plugin


def under_old_name(name: str, kind: type[Precision], *dropped: str) -> type[Precision]:
    """Create a precision plugin class under its name in Lightning 1.x, which warns on use."""

    def warn_and_make(self: Precision, *args: Any, **kwargs: Any) -> None:
        rank_zero_deprecation(f"The `{name}` is deprecated. Use `lightning.pytorch.plugins.{kind.__name__}` instead.")
        kind.__init__(self, *args, **{each: value for each, value in kwargs.items() if each not in dropped})

    return type(name, (kind,), {"__init__": warn_and_make, "__doc__": kind.__doc__})


def _check(precision: str, allowed: tuple[str, ...], refusal: str) -> None:
    if precision not in allowed:
        raise ConfigurationError(f"{refusal} `precision` must be one of {', '.join(map(repr, allowed))}.")


def _sharded_scaler() -> Any:
    from drivetrain.strategies.fsdp.model_sharding import ShardedGradScaler

    return ShardedGradScaler()


def _converted(data: Any, dtype: torch.dtype) -> Any:
    return recursively_apply(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, data)
