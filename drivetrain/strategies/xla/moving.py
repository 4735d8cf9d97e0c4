"""Moving a model onto an XLA device while its parameters stay the same objects."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from drivetrain.runtime.errors import ConfigurationError


def move_in_place(
    model: nn.Module, device: torch.device, placed: Callable[[str, nn.Parameter], None] | None = None
) -> nn.Module:
    """Bring parameters and buffers onto a device.

    `Module.to` makes new parameters on XLA, which optimizers that were built before do not hold, and unties tied ones.
    Here the same objects become tensors on the device, wherever they are held.

    Args:
        model: The model, changed in place.
        device: The device.
        placed: Called with the name of each parameter, and with it once it is there.

    Returns:
        The model.

    Raises:
        ConfigurationError: Something else holds on to a parameter's memory.
    """
    for name, parameter in model.named_parameters():
        if parameter.device.type != device.type:
            _move(name, parameter, device)
        if placed is not None:
            placed(name, parameter)
    moved: dict[int, Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device.type != device.type:
                if id(buffer) not in moved:
                    moved[id(buffer)] = buffer.to(device)
                module._buffers[name] = moved[id(buffer)]
    return model


def _move(name: str, parameter: nn.Parameter, device: torch.device) -> None:
    gradient = parameter.grad
    parameter.grad = None
    target = nn.Parameter(parameter.detach().to(device), requires_grad=parameter.requires_grad)
    try:
        torch.utils.swap_tensors(parameter, target)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise ConfigurationError(
            f"Parameter {name!r} cannot be moved to {device} since something else refers to it: a graph of a forward "
            "that is still alive, or a weak reference. Prepare the model, or call fit, before anything computes "
            "with it.",
            code="DT-017",
        ) from error
    if gradient is not None:
        parameter.grad = gradient.to(device)
