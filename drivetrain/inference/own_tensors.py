"""Lets a module's own tensors meet what the modules within it return on other devices.

Where a map splits a module, its own parameters and buffers are on one device, and each module within it returns on its
own. Which of them the module's forward brings together is not known before it runs, so operations that find their
inputs on several devices are run again with all of them on one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
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
    """The hooks of one module, which can be copied and pickled with it."""

    def __init__(self) -> None:
        self._open: list[_OneDevice] = []

    def enter(self, module: nn.Module, args: Any) -> None:
        """Called before the module."""
        self._open.append(_OneDevice().__enter__())  # type: ignore[no-untyped-call]

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """Called after it, or after it has raised."""
        if self._open:
            self._open.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]


def align_own_tensors(model: nn.Module, computes: Mapping[nn.Module, torch.device]) -> list[RemovableHandle]:
    """Have modules that a map splits run where their own tensors meet outputs of other devices.

    Args:
        model: The model.
        computes: Where modules compute.

    Returns:
        What removes it.
    """
    handles: list[RemovableHandle] = []
    for module in model.modules():
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if not own or not any(True for _ in module.children()):
            continue
        devices = {computes[each] for each in module.modules() if each in computes}
        # What is on the CPU of a module that computes elsewhere is offloaded, and there when it is called.
        devices |= {tensor.device for tensor in own if module not in computes or tensor.device.type != "cpu"}
        if len(devices) > 1:
            hooks = _Together()
            handles += [
                module.register_forward_pre_hook(hooks.enter),
                module.register_forward_hook(hooks.leave, always_call=True, prepend=True),
            ]
    return handles
