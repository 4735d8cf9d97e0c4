"""Lets a module that a map splits bring together what is on several devices.

Its inputs and its own parameters and buffers are on one device, and each module within it returns on its own. Which of
them the module's forward brings together, as a residual connection does, is not known before it runs, so operations
that find their inputs on several devices are run again with all of them on one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle


class _OneDevice(TorchFunctionMode):
    """Runs what fails because its inputs are on several devices again, on one of them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        try:
            return func(*args, **kwargs)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            if len({tensor.device for tensor in tensors}) < 2:
                raise
        device = _where(func, args, kwargs, tensors)
        args, kwargs = pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), (args, kwargs))
        return func(*args, **kwargs)


def _where(func: Any, args: Any, kwargs: Mapping[str, Any], tensors: list[Tensor]) -> torch.device:
    """The device of what is written to, else that of the largest of the tensors: the others are less to copy."""
    name = getattr(func, "__name__", "")
    if isinstance(kwargs.get("out"), Tensor):
        return kwargs["out"].device  # type: ignore[no-any-return]
    if (name.endswith("_") and not name.endswith("__")) or name.startswith("__i"):
        return args[0].device  # type: ignore[no-any-return]
    return max(tensors, key=lambda tensor: tensor.numel() * tensor.element_size()).device


class _Together:
    """The hooks of one module and of those that it calls, which can be copied and pickled with it."""

    def __init__(self) -> None:
        self._open: list[_OneDevice] = []
        self._suspended: list[_OneDevice | None] = []

    def enter(self, module: nn.Module, args: Any) -> None:
        """Called before the module."""
        self._open.append(_OneDevice().__enter__())  # type: ignore[no-untyped-call]

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """Called after it, or after it has raised."""
        if self._open:
            self._open.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def suspend(self, module: nn.Module, args: Any) -> None:
        """Called before a module that it calls, all of whose operations would take longer."""
        mode = self._open[-1] if self._open else None
        # A mode of the forward's own may be within it.
        if mode is not None and _get_current_function_mode() is mode:  # type: ignore[no-untyped-call]
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._suspended.append(mode)
        else:
            self._suspended.append(None)

    def resume(self, module: nn.Module, args: Any, output: Any) -> None:
        """Called after that module, or after it has raised."""
        mode = self._suspended.pop() if self._suspended else None
        if mode is not None:
            mode.__enter__()  # type: ignore[no-untyped-call]


def align_split_modules(model: nn.Module, computes: Mapping[nn.Module, torch.device]) -> list[RemovableHandle]:
    """Have modules that a map splits run where what they bring together is on several devices.

    Args:
        model: The model.
        computes: Where modules compute, the model among them.

    Returns:
        What removes it.
    """
    handles: list[RemovableHandle] = []
    several = len(set(computes.values())) > 1
    for module in model.modules():
        called = [each for child in module.children() for each in callable_modules(child)]
        if not called:
            continue
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        devices = {computes[each] for each in module.modules() if each in computes}
        # Its inputs stay where they are, unlike those of modules that a map names, and of the model.
        takes_any = several and bool(devices) and module not in computes
        # What is on the CPU of a module that computes elsewhere is offloaded, and there when it is called.
        devices |= {tensor.device for tensor in own if module not in computes or tensor.device.type != "cpu"}
        if len(devices) > 1 or takes_any:
            hooks = _Together()
            handles += [
                module.register_forward_pre_hook(hooks.enter),
                module.register_forward_hook(hooks.leave, always_call=True, prepend=True),
            ]
            for each in called:
                handles += [
                    each.register_forward_pre_hook(hooks.suspend),
                    each.register_forward_hook(hooks.resume, always_call=True),
                ]
    return handles


def callable_modules(module: nn.Module) -> Iterator[nn.Module]:
    """The module, or what is in it where it cannot be called itself.

    Args:
        module: The module.
    """
    if isinstance(module, nn.ModuleList | nn.ModuleDict) and type(module).forward is nn.Module.forward:
        for child in module.children():
            yield from callable_modules(child)
    else:
        yield module
