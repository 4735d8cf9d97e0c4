"""Models built on the meta device or directly on a device, and layerwise casting of their weights."""

from __future__ import annotations

import re
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ContextDecorator, ExitStack, contextmanager
from functools import cache
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from drivetrain.inference.hooks import ModelHook, add_hook_to_module, hook_of
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.pytrees import recursively_apply

_active = threading.local()


def init_empty_weights(include_buffers: bool = False) -> AbstractContextManager[Any]:
    """Context manager and decorator that builds models on the meta device.

    Buffers are built normally, so that non-persistent ones such as position tables and masks have their values. Models
    that other threads build at the same time are not affected.

    Args:
        include_buffers: Build buffers on the meta device too. `meta_leftovers` lists those that no checkpoint contains.

    Example:
        ```python
        from torch import nn

        from drivetrain import init_empty_weights

        with init_empty_weights():
            model = nn.Sequential(*(nn.Linear(20_000, 20_000) for _ in range(30)))  # 48 GB, if it had memory
        ```
    """
    return init_on_device("meta", include_buffers)


def init_on_device(device: torch.device | str | int, include_buffers: bool = False) -> AbstractContextManager[Any]:
    """Context manager and decorator that creates a model's parameters on a device.

    If contexts are nested, the innermost one decides. See `init_empty_weights`.

    Args:
        device: The device.
        include_buffers: Build buffers and all other new tensors on the device too.
    """
    return _OnDevice(torch.device(device), include_buffers)


class _OnDevice(ContextDecorator):
    """Context manager and decorator in which modules create their parameters on a given device.

    It can be nested and used in threads.
    """

    def __init__(self, device: torch.device, include_buffers: bool) -> None:
        self._device, self._include_buffers = device, include_buffers

    def _recreate_cm(self) -> _OnDevice:
        return _OnDevice(self._device, self._include_buffers)

    def __enter__(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(_building(self._device, self._include_buffers))
            _active.__dict__.setdefault("entered", []).append(stack.pop_all())

    def __exit__(self, *error: Any) -> None:
        _active.entered.pop().__exit__(*error)


class _Context(NamedTuple):
    moved: _CopyOnce
    include_buffers: bool


@contextmanager
def _building(device: torch.device, include_buffers: bool) -> Iterator[None]:
    _watch_registration()
    contexts: list[_Context] = _active.__dict__.setdefault("contexts", [])
    outside: torch.device = _active.__dict__.setdefault("device", torch.get_default_device())
    contexts.append(_Context(_CopyOnce(device), include_buffers))
    try:
        # `torch.device` as a context affects only this thread. An inner context without `include_buffers` must undo
        # an outer one with it, so it enters the original default device.
        with device if include_buffers else outside:
            yield
    finally:
        contexts.pop()
        if not contexts:
            del _active.device


@cache
def _watch_registration() -> None:
    register: list[Callable[..., Any]] = [
        register_module_parameter_registration_hook,
        register_module_buffer_registration_hook,
    ]
    # Once per process: adding and removing the hooks in each context fails in PyTorch 2.13 if another thread builds a
    # module at the same time.
    for each, move in zip(register, (_move_parameter, _move_buffer), strict=True):
        each(move)


def _move_parameter(module: nn.Module, name: str, tensor: Any) -> torch.Tensor | None:
    contexts: list[_Context] = _active.__dict__.get("contexts", [])
    return contexts[-1].moved(tensor) if contexts and isinstance(tensor, torch.Tensor) else None


def _move_buffer(module: nn.Module, name: str, tensor: Any) -> torch.Tensor | None:
    contexts: list[_Context] = _active.__dict__.get("contexts", [])
    if contexts and contexts[-1].include_buffers and isinstance(tensor, torch.Tensor):
        return contexts[-1].moved(tensor)
    return None


class _CopyOnce:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device == self._device:
            return tensor
        known = self._made.get(id(tensor))
        if known is not None and known[0]() is tensor:  # the id may belong to a new object by now
            return known[1]
        made = _on(tensor, self._device)
        self._made[id(tensor)] = weakref.ref(tensor), made
        return made


def _on(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    # Lazy parameters have no shape before the first batch.
    if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
        kind = cast(Any, type(tensor))
        lazy = {"requires_grad": tensor.requires_grad} if isinstance(tensor, nn.Parameter) else {}
        return kind(device=device, dtype=tensor.dtype, **lazy)  # type: ignore[no-any-return]
    if tensor.device.type == "meta":
        # A meta tensor has no values to copy.
        data = torch.empty_like(tensor, device=device)
    else:
        data = tensor.detach().to(device)
    if isinstance(tensor, nn.Parameter):
        data = torch.Tensor._make_subclass(type(tensor), data, tensor.requires_grad)
    data.__dict__.update(vars(tensor))
    return data


def meta_leftovers(model: nn.Module) -> dict[str, str]:
    """Return the names of tensors that are still on the meta device, for example after loading a checkpoint.

    Args:
        model: The model.

    Returns:
        A dict from name to `"parameter"`, `"buffer"` or `"buffer that no state dict holds"`. Loading a checkpoint fills
        the first two. Buffers of the last kind must be computed again by the code that creates them.
    """
    saved = set(model.state_dict())
    left = {name: "parameter" for name, held in model.named_parameters(remove_duplicate=False) if held.is_meta}
    for name, held in model.named_buffers(remove_duplicate=False):
        if held.is_meta:
            left[name] = "buffer" if name in saved else "buffer that no state dict holds"
    return left


# Layerwise casting


ModuleT = TypeVar("ModuleT", bound=nn.Module)
Conv = nn.modules.conv._ConvNd
CAST_CLASSES: tuple[type[nn.Module], ...] = (nn.Linear, Conv)
"""Layer classes that layerwise casting applies to. Their accuracy suffers least from a small storage dtype."""


class LayerwiseCastingHook(ModelHook):
    """Hook that stores a module's weights in one dtype and computes in another.

    Inputs are cast to the compute dtype too. The stored weights never change, so repeated forwards lose no precision.

    Args:
        storage_dtype: Dtype of the weights between forwards, such as `torch.float8_e4m3fn`.
        compute_dtype: Dtype of the weights and inputs during a forward, such as `torch.bfloat16`.
        non_blocking: Cast asynchronously if the device supports it.
    """

    def __init__(self, storage_dtype: torch.dtype, compute_dtype: torch.dtype, non_blocking: bool = False) -> None:
        for role, dtype in (("storage_dtype", storage_dtype), ("compute_dtype", compute_dtype)):
            if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
                raise ConfigurationError(
                    f"{role}={dtype!r} is not a floating-point dtype. Use a dtype such as torch.float8_e4m3fn for "
                    "storage and torch.bfloat16 for computation.",
                )
        self.storage_dtype, self.compute_dtype, self.non_blocking = storage_dtype, compute_dtype, non_blocking
        self._stored: dict[int, list[_Cast]] = {}

    def init_hook(self, module: ModuleT) -> ModuleT:
        for _, _, tensor in _floats(module):
            tensor.data = tensor.data.to(self.storage_dtype, non_blocking=self.non_blocking)
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        casts = self._stored[id(module)] = []
        for table, name, tensor in list(_floats(module)):
            if tensor.dtype != self.compute_dtype:
                cast = tensor.to(self.compute_dtype, non_blocking=self.non_blocking)
                if isinstance(tensor, nn.Parameter) and not tensor.requires_grad:
                    # A trainable weight stays a plain tensor, so that its gradient flows back through the cast.
                    cast = nn.Parameter(cast, requires_grad=False)
                table[name] = cast
                casts.append((table, name, tensor, cast))
        if not all(isinstance(each, torch.Tensor) and each.dtype == self.compute_dtype for each in args) or kwargs:
            args, kwargs = recursively_apply(self._cast_input, (args, kwargs))
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        self._restore(module)
        return output

    def on_error(self, module: nn.Module) -> None:
        self._restore(module)

    def _restore(self, module: nn.Module) -> None:
        for table, name, stored, copy in self._stored.pop(id(module), ()):
            if table[name] is copy:  # another hook may have moved the tensor since
                table[name] = stored

    def _cast_input(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.compute_dtype) if tensor.is_floating_point() else tensor


_Cast = tuple[dict[str, Any], str, torch.Tensor, torch.Tensor]


def _floats(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, torch.Tensor]]:
    for inner in module.modules():
        tables: tuple[dict[str, Any], ...] = (inner._parameters, inner._buffers)
        for table in tables:
            for name, tensor in table.items():
                if tensor is not None and tensor.is_floating_point():
                    yield table, name, tensor


def attach_layerwise_casting_hooks(
    module: nn.Module,
    storage_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    skip_modules_pattern: str | Sequence[str] | None = None,
    skip_modules_classes: Sequence[type[nn.Module]] | None = None,
    non_blocking: bool = False,
) -> None:
    """Save memory by storing the weights of linear and convolution layers in a smaller dtype, such as float8.

    The weights are cast for each forward. All other layers, such as embeddings and norms, do not change.

    Args:
        module: The model, in the compute dtype.
        storage_dtype: Dtype of the weights between forwards, such as `torch.float8_e4m3fn`.
        compute_dtype: Dtype of the weights and inputs during a forward, such as `torch.bfloat16`.
        skip_modules_pattern: Regular expressions. Modules whose name matches one (`re.search`) are skipped with their
            submodules.
        skip_modules_classes: Classes whose modules are skipped with their submodules.
        non_blocking: Cast asynchronously if the device supports it.

    Raises:
        ConfigurationError: A dtype is not floating-point, or every layer is skipped.

    Example:
        ```python
        import torch
        from torch import nn

        from drivetrain import attach_layerwise_casting_hooks

        model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 8)).to(torch.bfloat16)
        attach_layerwise_casting_hooks(model, torch.float8_e4m3fn, torch.bfloat16, skip_modules_pattern=["2"])
        assert model[0].weight.dtype == torch.float8_e4m3fn
        assert model(torch.ones(1, 64)).dtype == torch.bfloat16
        ```
    """
    given = (skip_modules_pattern,) if isinstance(skip_modules_pattern, str) else (skip_modules_pattern or ())
    patterns, classes = [re.compile(each) for each in given], tuple(skip_modules_classes or ())
    found = list(_to_cast(module, "", patterns, classes))
    if not found:
        raise ConfigurationError(
            f"{type(module).__name__} has nothing to cast: every linear and convolution layer is skipped. Check "
            "skip_modules_pattern and skip_modules_classes, or add a LayerwiseCastingHook to single modules with "
            "add_hook_to_module.",
        )
    for each in found:
        if not _casts(hook_of(each)):  # a shared layer is visited more than once
            add_hook_to_module(each, LayerwiseCastingHook(storage_dtype, compute_dtype, non_blocking), append=True)


def _to_cast(
    module: nn.Module, name: str, patterns: Sequence[re.Pattern[str]], classes: tuple[type[nn.Module], ...]
) -> Iterator[nn.Module]:
    if isinstance(module, classes) or any(pattern.search(name) for pattern in patterns):
        return
    if isinstance(module, CAST_CLASSES):
        yield module
        return
    for below, child in module.named_children():
        yield from _to_cast(child, f"{name}.{below}" if name else below, patterns, classes)


def _casts(hook: Any) -> bool:
    return any(isinstance(each, LayerwiseCastingHook) for each in getattr(hook, "hooks", (hook,)))
