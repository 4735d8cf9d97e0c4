"""Hooks that run around the forward of a module, and move its weights."""

from __future__ import annotations

from drivetrain.inference import AlignDevicesHook as AlignDevicesHook
from drivetrain.inference import CpuOffload as CpuOffload
from drivetrain.inference import LayerwiseCastingHook as LayerwiseCastingHook
from drivetrain.inference import ModelHook as ModelHook
from drivetrain.inference import SequentialHook as SequentialHook
from drivetrain.inference import UserCpuOffloadHook as UserCpuOffloadHook
from drivetrain.inference import add_hook_to_module as add_hook_to_module
from drivetrain.inference import attach_align_device_hook as attach_align_device_hook
from drivetrain.inference import attach_align_device_hook_on_blocks as attach_align_device_hook_on_blocks
from drivetrain.inference import attach_execution_device_hook as attach_execution_device_hook
from drivetrain.inference import remove_hook_from_module as remove_hook_from_module
from drivetrain.inference import remove_hook_from_submodules as remove_hook_from_submodules
