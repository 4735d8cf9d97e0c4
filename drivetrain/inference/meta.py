"""Models that are built without memory, or straight on a device."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ContextDecorator, ExitStack, contextmanager
from functools import cache
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

_active = threading.local()


def init_empty_weights(include_buffers: bool = False) -> AbstractContextManager[Any]:
    """Context in which models are built whose parameters have shapes and dtypes, but no memory; also a decorator.

    Buffers are built as they are without it, so that those which no checkpoint holds (tables of positions, masks) have
    their values. A model that another thread builds meanwhile is not touched.

    Args:
        include_buffers: Leave buffers without memory too; `meta_leftovers` lists those that no checkpoint fills.

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
    """Context in which the parameters of models are built on a device; also a decorator. See `init_empty_weights`.

    Within another such context the inner one decides.

    Args:
        device: The device.
        include_buffers: Whether buffers, and all else that is computed meanwhile, are built there too.
    """
    return _OnDevice(torch.device(device), include_buffers)


class _OnDevice(ContextDecorator):
    """What `init_on_device` returns; it may be entered again, also while it is active, and by several threads."""

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
    """What of a thread's modules goes where, for as long as it is the innermost."""

    moved: _Moved
    include_buffers: bool


@contextmanager
def _building(device: torch.device, include_buffers: bool) -> Iterator[None]:
    """Move what this thread's modules register, unless a context within this one is active."""
    _watch_registration()
    contexts: list[_Context] = _active.__dict__.setdefault("contexts", [])
    outside: torch.device = _active.__dict__.setdefault("device", torch.get_default_device())
    contexts.append(_Context(_Moved(device), include_buffers))
    try:
        # A mode of this thread alone. Within a context that includes buffers, one that does not ends that.
        with device if include_buffers else outside:
            yield
    finally:
        contexts.pop()
        if not contexts:
            del _active.device


@cache
def _watch_registration() -> None:
    """Have torch ask for every parameter and buffer, once and for all.

    A hook for each context would come and go while another thread registers modules, and torch fails where its hooks
    change meanwhile (2.13).
    """
    register: list[Callable[..., Any]] = [
        register_module_parameter_registration_hook,
        register_module_buffer_registration_hook,
    ]
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


class _Moved:
    """Moves each tensor once, so that what several modules share they share afterwards.

    Args:
        device: Where to.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device == self._device:
            return tensor
        known = self._made.get(id(tensor))
        if known is not None and known[0]() is tensor:  # an id is used again once its object is gone
            return known[1]
        made = _on(tensor, self._device)
        self._made[id(tensor)] = weakref.ref(tensor), made
        return made


def _on(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The same parameter or buffer on another device: its class, and what its users have put on it."""
    # The shape of a lazy module's comes with its first batch.
    if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
        kind = cast(Any, type(tensor))
        lazy = {"requires_grad": tensor.requires_grad} if isinstance(tensor, nn.Parameter) else {}
        return kind(device=device, dtype=tensor.dtype, **lazy)  # type: ignore[no-any-return]
    if tensor.device.type == "meta":
        data = torch.empty_like(tensor, device=device)
    else:
        data = tensor.detach().to(device)
    if isinstance(tensor, nn.Parameter):
        data = torch.Tensor._make_subclass(type(tensor), data, tensor.requires_grad)
    data.__dict__.update(vars(tensor))
    return data


def meta_leftovers(model: nn.Module) -> dict[str, str]:
    """What of a model is still on the meta device, and would give no result.

    Args:
        model: The model.

    Returns:
        Names, and for each `"parameter"`, `"buffer"`, or `"buffer that no state dict holds"`: loading a checkpoint
        fills the first two, the last has to be computed again by the code that made it.
    """
    saved = set(model.state_dict())
    left = {name: "parameter" for name, held in model.named_parameters(remove_duplicate=False) if held.is_meta}
    for name, held in model.named_buffers(remove_duplicate=False):
        if held.is_meta:
            left[name] = "buffer" if name in saved else "buffer that no state dict holds"
    return left
