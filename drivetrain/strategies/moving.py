"""Moving a model onto a device while its parameters stay the same objects."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.runtime.errors import ConfigurationError


def move(model: nn.Module, device: torch.device) -> nn.Module:
    """Bring a model onto a device, whose parameters stay those that its optimizers hold.

    Args:
        model: The model.
        device: The device.

    Returns:
        The model.

    Raises:
        ConfigurationError: Something else holds on to a parameter's memory.
    """
    probe = nn.ParameterList([nn.Parameter(torch.empty(0))])
    before = probe[0]
    return model.to(device) if probe.to(device)[0] is before else move_in_place(model, device)


def move_in_place(
    model: nn.Module, device: torch.device, placed: Callable[[str, nn.Parameter], None] | None = None
) -> nn.Module:
    """Bring parameters and buffers onto a device.

    On XLA, and on devices of other backends (PrivateUse1), `Module.to` makes new parameters, which optimizers that
    were built before do not hold, and unties tied ones. Here the same objects become tensors on the device, wherever
    they are held.

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
        if not _is_on(parameter, device):
            _move(name, parameter, device)
        if placed is not None:
            placed(name, parameter)
    moved: dict[int, Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and not _is_on(buffer, device):
                if id(buffer) not in moved:
                    moved[id(buffer)] = buffer.to(device)
                module._buffers[name] = moved[id(buffer)]
    return model


def refuse_left_behind(before: Mapping[str, nn.Parameter], model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Refuse optimizers over parameters that are the model's no longer, once it has been placed.

    Args:
        before: The model's parameters as they were, by name.
        model: The placed model.
        optimizers: Its optimizers.

    Raises:
        ConfigurationError: Names the first such parameter.
    """
    now = {id(parameter) for parameter in model.parameters()}
    gone = {id(parameter): name for name, parameter in before.items() if id(parameter) not in now}
    for optimizer in optimizers if gone else ():
        for parameter in (each for group in optimizer.param_groups for each in group["params"]):
            if id(parameter) in gone:
                raise ConfigurationError(
                    f"{type(optimizer).__name__} holds {gone[id(parameter)]} as it was before the model was placed: "
                    "placing has made a new parameter, which would not be trained. Bring the model to its device and "
                    "dtype before you make the optimizer.",
                    code="DT-046",
                )


def _is_on(tensor: Tensor, device: torch.device) -> bool:
    return tensor.device.type == device.type and device.index in (None, tensor.device.index)


def _move(name: str, parameter: nn.Parameter, device: torch.device) -> None:
    gradient, attributes = parameter.grad, dict(parameter.__dict__)
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
    parameter.__dict__.update(attributes)
    if gradient is not None:
        parameter.grad = gradient.to(device)
