"""Models that are built without memory; those larger than a device are absent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn

from drivetrain.compat.accelerate.absent import BIG_MODELS, absent_names

__getattr__ = absent_names(
    __name__,
    (
        BIG_MODELS,
        [
            "attach_layerwise_casting_hooks",
            "cpu_offload",
            "cpu_offload_with_hook",
            "disk_offload",
            "dispatch_model",
            "load_checkpoint_and_dispatch",
        ],
    ),
)


def init_empty_weights(include_buffers: bool | None = None) -> AbstractContextManager[None]:
    """Context in which models are built whose parameters have no memory.

    Args:
        include_buffers: Whether buffers have none either.
    """
    return init_on_device(torch.device("meta"), include_buffers)


@contextmanager
def init_on_device(device: torch.device | str, include_buffers: bool | None = None) -> Iterator[None]:
    """Context in which models are built whose parameters are on a device.

    Args:
        device: The device.
        include_buffers: Whether buffers are too.
    """
    if include_buffers:
        with torch.device(device):
            yield
        return
    register = nn.Module.register_parameter

    def register_on_device(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(module, name, param)
        if param is not None:
            moved = nn.Parameter(param.detach().to(device), requires_grad=param.requires_grad)
            moved.__dict__.update(vars(param))
            module._parameters[name] = moved

    nn.Module.register_parameter = register_on_device  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
