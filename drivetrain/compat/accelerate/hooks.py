"""Hooks that move a module's weights, which belong to big-model inference."""

from __future__ import annotations

from torch import nn

from drivetrain.compat.accelerate.absent import BIG_MODELS, absent_names

__getattr__ = absent_names(
    __name__,
    (
        BIG_MODELS,
        [
            "AlignDevicesHook",
            "CpuOffload",
            "LayerwiseCastingHook",
            "ModelHook",
            "SequentialHook",
            "UserCpuOffloadHook",
            "add_hook_to_module",
            "attach_align_device_hook",
            "attach_align_device_hook_on_blocks",
            "attach_execution_device_hook",
        ],
    ),
)


def remove_hook_from_module(module: nn.Module, recurse: bool = False) -> nn.Module:
    """Return the module: there are no hooks on it."""
    return module


def remove_hook_from_submodules(module: nn.Module) -> None:
    """Do nothing: there are no hooks on a module's parts."""
