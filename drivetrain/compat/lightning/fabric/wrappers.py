"""`FabricModule`, `FabricDataLoader` and the other wrappers that `Fabric.setup` creates."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from drivetrain.accelerator import PreparedOptimizer
from drivetrain.accelerator.preparation import under_precision
from drivetrain.data import PreparedLoader
from drivetrain.runtime.errors import ArgumentTypeError, ConfigurationError
from drivetrain.runtime.pytrees import recursively_apply, send_to_device
from drivetrain.strategies.precision import Precision
from drivetrain.trainer import Task

if TYPE_CHECKING:
    from drivetrain.compat.lightning.fabric.fabric import Preparing

# Wrappers of modules, optimizers and loaders

STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class BackwardGuard:
    """Raise on `loss.backward()` if the precision or strategy requires `fabric.backward(loss)`.

    Attributes:
        is_inside: True while Fabric runs a backward pass.
    """

    def __init__(self, is_needed: bool) -> None:
        self.is_needed, self.is_inside = is_needed, False

    def watch(self, output: Any) -> Any:
        """Register backward hooks on the output tensors that require gradients. Return the output."""
        recursively_apply(self._watch_tensor, output)
        return output

    def _watch_tensor(self, tensor: Tensor) -> Tensor:
        if tensor.requires_grad:
            tensor.register_hook(self._check)  # type: ignore[no-untyped-call]
        return tensor

    def _check(self, gradient: Tensor) -> None:
        if self.is_needed and not self.is_inside:
            raise RuntimeError(
                "The current strategy and precision selection requires you to call `fabric.backward(loss)` instead of "
                "`loss.backward()`."
            )


class FabricModule(nn.Module):
    """Wrapper of a module. Calls run the strategy's wrapper, and attributes are the module's own.

    The steps of a `LightningModule`, and methods given to `mark_forward_method`, go through the wrapper too. Other
    methods that call a submodule directly raise an error, since their gradients would not be reduced.
    """

    def __init__(
        self,
        forward_module: nn.Module,
        strategy: Any,
        original_module: nn.Module | None = None,
        precision: Precision | None = None,
        device: torch.device | None = None,
        guard: BackwardGuard | None = None,
    ) -> None:
        super().__init__()
        own = self.__dict__
        own["_original_module"] = forward_module if original_module is None else original_module
        own["_forward_methods"] = set(STEPS)
        own["_strategy"], own["_precision"], own["_placed_on"] = strategy, precision, device
        own["_guard"] = guard or BackwardGuard(is_needed=False)
        nn.Module.__setattr__(self, "_forward_module", forward_module)

    @property
    def module(self) -> nn.Module:
        """The original module."""
        original: nn.Module = self._original_module
        return original

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        found = next((tensor.device for tensor in (*self.parameters(), *self.buffers())), None)
        return found or self._placed_on or torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the floating-point parameters, torch's default dtype if there are none."""
        found = (tensor.dtype for tensor in self.parameters() if tensor.is_floating_point())
        return next(found, torch.get_default_dtype())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward through the strategy's wrapper."""
        return self._guard.watch(self._forward_module(*args, **kwargs))

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the original module's state dict, without wrapper prefixes."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load a state dict into the original module."""
        return self.module.load_state_dict(*args, **kwargs)

    def mark_forward_method(self, method: str | Callable[..., Any]) -> None:
        """Route a method of the module through the strategy's wrapper, like `forward`."""
        if not isinstance(method, str) and not inspect.ismethod(method):
            raise ArgumentTypeError(f"Expected a method or a string, but got: {type(method).__name__}")
        name = method if isinstance(method, str) else method.__name__
        if name == "forward":
            raise ConfigurationError("You cannot mark the forward method itself as a forward method: it is one.")
        if not inspect.ismethod(getattr(self.module, name, None)):
            raise AttributeError(f"`{type(self.module).__name__}.{name}` does not exist or is not a method.")
        self._forward_methods.add(name)

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__.get("_modules", ()):
            return super().__getattr__(name)
        original = self.__dict__.get("_original_module")
        if original is None:
            raise AttributeError(name)
        value = getattr(original, name)
        if not inspect.ismethod(value) or not self._is_wrapped:
            return value
        return self._through_wrapper(value) if name in self._forward_methods else self._guarded(value)

    def __setattr__(self, name: str, value: Any) -> None:
        mine = name in self.__dict__ or name in self.__dict__.get("_modules", ()) or hasattr(type(self), name)
        if mine or "_original_module" not in self.__dict__:
            super().__setattr__(name, value)
        else:
            setattr(self._original_module, name, value)

    @property
    def _is_wrapped(self) -> bool:
        forward = self._forward_module
        return forward is not self._original_module or bool(getattr(forward, "_forward_pre_hooks", None))

    def _through_wrapper(self, method: Callable[..., Any]) -> Callable[..., Any]:
        original, precision = self.module, self._precision
        step = method if precision is None else under_precision(method, precision)

        def call_forward_module(*args: Any, **kwargs: Any) -> Any:
            before = original.__dict__.get("forward")

            def restore() -> None:
                original.__dict__.pop("forward", None)
                if before is not None:
                    original.__dict__["forward"] = before

            def in_place_of_forward(*args: Any, **kwargs: Any) -> Any:
                restore()  # the method may call the module
                return step(*args, **kwargs)

            original.__dict__["forward"] = in_place_of_forward
            try:
                return self._guard.watch(self._forward_module(*args, **kwargs))
            finally:
                restore()

        return call_forward_module

    def _guarded(self, method: Callable[..., Any]) -> Callable[..., Any]:
        original = self.module
        name = f"{type(original).__name__}.{method.__name__}"

        def refuse(module: nn.Module, inputs: Any) -> None:
            raise RuntimeError(
                f"You are calling the method `{name}()` from outside the model. It calls {type(module).__name__} past "
                f"what the strategy put around the model, so gradients would not be reduced over processes. Call the "
                f"model, or first model.mark_forward_method({method.__name__!r})."
            )

        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            handles = [module.register_forward_pre_hook(refuse) for module in original.modules()]
            try:
                return method(*args, **kwargs)
            finally:
                for handle in handles:
                    handle.remove()

        return call


class FabricDataLoader:
    """Wrapper of a data loader. Attributes are the loader's own."""

    def __init__(self, dataloader: Any, device: torch.device | None = None) -> None:
        self._dataloader, self._device, self._passes = dataloader, device, 0

    @property
    def device(self) -> torch.device | None:
        """Device that batches are moved to, or None if they are not moved."""
        return self._device

    def __len__(self) -> int:
        return len(self._dataloader)

    def __getattr__(self, name: str) -> Any:
        if name == "_dataloader":
            raise AttributeError(name)
        return getattr(self._dataloader, name)

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self._dataloader, PreparedLoader):  # it moves batches and counts epochs
            yield from self._dataloader
            return
        for sampler in (self._dataloader.sampler, getattr(self._dataloader.batch_sampler, "sampler", None)):
            set_epoch = getattr(sampler, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(self._passes)
                break
        self._passes += 1
        for batch in self._dataloader:
            yield batch if self._device is None else send_to_device(batch, self._device)


def is_wrapped(obj: object) -> bool:
    """Return True if Fabric has prepared the object."""
    bare = getattr(obj, "_orig_mod", obj)
    return isinstance(bare, FabricModule | FabricDataLoader | PreparedOptimizer | PreparedLoader)


_FabricModule, _FabricOptimizer, _FabricDataLoader = FabricModule, PreparedOptimizer, FabricDataLoader


# Stand-in for `trainer` when a `LightningModule` runs under Fabric

_OF_FABRIC = ("global_rank", "local_rank", "node_rank", "world_size", "is_global_zero", "device", "strategy", "print")


class FabricSide:
    """Stand-in for `module.trainer` when a `LightningModule` runs under Fabric."""

    def __init__(self, fabric: Any, module: Any = None, wrapped: Any = None, optimizers: Any = ()) -> None:
        self.fabric = fabric
        self._module, self._wrapped, self._optimizers = module, wrapped, list(optimizers)

    def __getattr__(self, name: str) -> Any:
        if name in _OF_FABRIC:
            return getattr(self.fabric, name)
        raise AttributeError(
            f"Your LightningModule code tried to access `self.trainer.{name}`, which only a Trainer has. This module "
            f"runs under Fabric: use `self.fabric`, which has {', '.join(_OF_FABRIC)}, or give the module the value."
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return FabricSide, (None,)

    def __deepcopy__(self, memo: Any) -> FabricSide:
        return self

    @property
    def logger(self) -> Any:
        """The first logger."""
        return self.fabric.logger

    @property
    def loggers(self) -> list[Any]:
        """All loggers."""
        found: list[Any] = self.fabric.loggers
        return found

    def log(self, name: str, value: Any, prog_bar: bool = False, logger: bool | None = None, **_: Any) -> None:
        """Log a value. Arguments about epochs are not supported here."""
        self.log_dict({name: value}, prog_bar, logger)

    def log_dict(
        self, dictionary: Mapping[str, Any], prog_bar: bool = False, logger: bool | None = None, **_: Any
    ) -> None:
        """Log several values. Raise `ConfigurationError` for nested dicts."""
        for name, value in dictionary.items():
            if isinstance(value, Mapping):
                raise ConfigurationError(
                    f"`{name}`: nested dictionaries cannot be logged. Give each value a name of its own."
                )
            if not isinstance(value, Tensor | int | float):
                raise ConfigurationError(
                    f"`{name}`: `{type(value).__name__}` values cannot be logged. Give a number, or a tensor of one "
                    "element.",
                )
        if logger is not False:
            self.fabric.log_dict(dictionary)

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """Return the optimizer that was set up with the module, or a list if there are several."""
        return self._optimizers[0] if len(self._optimizers) == 1 else self._optimizers

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run the backward pass of a loss."""
        self.fabric.backward(loss, *args, **kwargs)

    def clip_gradients(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: Any = None
    ) -> None:
        """Clip the module's gradients, by norm (the default) or by value."""
        if gradient_clip_val is None:
            return
        by_value = str(getattr(gradient_clip_algorithm, "value", gradient_clip_algorithm)) == "value"
        bounds = {"clip_val": gradient_clip_val if by_value else None}
        bounds["max_norm"] = None if by_value else gradient_clip_val
        self.fabric.clip_gradients(self._module, optimizer, **bounds)


def attach(fabric: Preparing, module: Task, wrapped: Any, optimizers: Any) -> None:
    """Make `trainer` of a module, and of Lightning modules inside it, refer to Fabric."""
    for each in module.modules():
        if isinstance(each, Task):
            side: Any = FabricSide(fabric, each, wrapped, optimizers)
            each.trainer = side
            own = each.__dict__
            own["log"], own["log_dict"] = side.log, side.log_dict
            own["optimizers"], own["clip_gradients"] = side.optimizers, side.clip_gradients
            own["backward"] = own["manual_backward"] = side.backward
