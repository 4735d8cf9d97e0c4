"""Models that take turns on a device: each is there while it is used, and in the CPU's memory before and after."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import nn

from drivetrain.inference.aligning import Device
from drivetrain.inference.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from drivetrain.inference.tensors import release_memory
from drivetrain.runtime.devices import detect_device_kind
from drivetrain.runtime.nested import send_to_device

ModuleT = TypeVar("ModuleT", bound=nn.Module)
_CPU = torch.device("cpu")


class CpuOffload(ModelHook):
    """Keeps a model in the CPU's memory until its forward; it stays on the device after that.

    Args:
        execution_device: The device that it runs on; this machine's first accelerator if None, or else the CPU.
        prev_module_hook: What `cpu_offload_with_hook` returned for the model that runs before this one, which leaves
            the device when this one comes.
    """

    def __init__(
        self, execution_device: Device | None = None, prev_module_hook: UserCpuOffloadHook | None = None
    ) -> None:
        self.prev_module_hook = prev_module_hook
        self.execution_device = detect_device_kind().device(0) if execution_device is None else execution_device

    def init_hook(self, module: ModuleT) -> ModuleT:
        """Move the model to the CPU."""
        return module.to(_CPU)

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Move the model before it away, and this one and its inputs to the device."""
        device = torch.device(self.execution_device)
        previous = self.prev_module_hook
        if previous is not None and previous.model is not module and not _is_on(previous.model, _CPU):
            previous.offload()
            release_memory(device)
        if not _is_on(module, device):
            module.to(device)
        return send_to_device(args, device), send_to_device(kwargs, device)


def _is_on(module: nn.Module, device: torch.device) -> bool:
    """Whether all that a module holds is on a device."""
    index = device.index
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.device.type != device.type or (index is not None and tensor.device.index not in (None, index)):
            return False
    return True


class UserCpuOffloadHook:
    """What `cpu_offload_with_hook` returns beside a model, to move the model away by hand.

    Args:
        model: The model.
        hook: Its hook.
    """

    def __init__(self, model: nn.Module, hook: ModelHook) -> None:
        self.model, self.hook = model, hook

    def offload(self) -> None:
        """Move the model to the CPU until its next forward."""
        self.hook.init_hook(self.model)

    def remove(self) -> None:
        """Remove the hook; the model stays where it is."""
        remove_hook_from_module(self.model)


def cpu_offload_with_hook(
    model: ModuleT, execution_device: Device | None = None, prev_module_hook: UserCpuOffloadHook | None = None
) -> tuple[ModuleT, UserCpuOffloadHook]:
    """Keep a model in the CPU's memory until its forward, and on the device from then until it is moved away.

    For pipelines of several models, one of which may run many times in a row: a model leaves the device when the one
    after it comes, or by `offload` of what is returned.

    Args:
        model: The model.
        execution_device: The device that it runs on; this machine's first accelerator if None, or else the CPU.
        prev_module_hook: What this function returned for the model before.

    Returns:
        The model, and what moves it away.

    Example:
        ```python
        import torch
        from torch import nn

        from drivetrain import cpu_offload_with_hook

        encoder, first = cpu_offload_with_hook(nn.Linear(4, 8))
        decoder, second = cpu_offload_with_hook(nn.Linear(8, 4), prev_module_hook=first)
        hidden = encoder(torch.ones(4))
        for _ in range(3):
            output = decoder(hidden)  # the encoder leaves the device when the decoder comes
        second.offload()
        ```
    """
    hook = CpuOffload(execution_device, prev_module_hook)
    add_hook_to_module(model, hook, append=True)
    return model, UserCpuOffloadHook(model, hook)
