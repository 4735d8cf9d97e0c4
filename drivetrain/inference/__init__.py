"""Models that are larger than a device: built without memory, sized, and placed over what there is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from drivetrain.runtime.exports import load_export

_EXPORTS = {
    "DeviceMap": "drivetrain.inference.device_map",
    "AlignDevicesHook": "drivetrain.inference.aligning",
    "CpuOffload": "drivetrain.inference.whole_offload",
    "LayerwiseCastingHook": "drivetrain.inference.casting",
    "ModelHook": "drivetrain.inference.hooks",
    "PipelineInference": "drivetrain.inference.pipeline",
    "SequentialHook": "drivetrain.inference.hooks",
    "UserCpuOffloadHook": "drivetrain.inference.whole_offload",
    "add_hook_to_module": "drivetrain.inference.hooks",
    "align_module_device": "drivetrain.inference.aligning",
    "attach_align_device_hook": "drivetrain.inference.attaching",
    "attach_align_device_hook_on_blocks": "drivetrain.inference.attaching",
    "attach_execution_device_hook": "drivetrain.inference.attaching",
    "attach_layerwise_casting_hooks": "drivetrain.inference.casting",
    "calculate_maximum_sizes": "drivetrain.inference.sizes",
    "check_device_map": "drivetrain.inference.device_map",
    "check_tied_parameters_in_config": "drivetrain.inference.ties",
    "check_tied_parameters_on_same_device": "drivetrain.inference.device_map",
    "clean_device_map": "drivetrain.inference.device_map",
    "compute_module_sizes": "drivetrain.inference.sizes",
    "cpu_offload_with_hook": "drivetrain.inference.whole_offload",
    "dtype_byte_size": "drivetrain.inference.sizes",
    "find_tied_parameters": "drivetrain.inference.ties",
    "get_balanced_memory": "drivetrain.inference.budgets",
    "get_max_layer_size": "drivetrain.inference.sizes",
    "get_max_memory": "drivetrain.inference.budgets",
    "get_state_dict_offloaded_model": "drivetrain.inference.aligning",
    "has_offloaded_params": "drivetrain.inference.aligning",
    "id_tensor_storage": "drivetrain.inference.ties",
    "infer_auto_device_map": "drivetrain.inference.device_map",
    "init_empty_weights": "drivetrain.inference.meta",
    "init_on_device": "drivetrain.inference.meta",
    "meta_leftovers": "drivetrain.inference.meta",
    "named_module_tensors": "drivetrain.inference.sizes",
    "resolve_device_map": "drivetrain.inference.device_map",
    "prepare_pippy": "drivetrain.inference.pipeline",
    "remove_hook_from_module": "drivetrain.inference.hooks",
    "remove_hook_from_submodules": "drivetrain.inference.hooks",
    "retie_parameters": "drivetrain.inference.ties",
    "set_module_tensor_to_device": "drivetrain.inference.tensors",
}

__all__ = [
    "DeviceMap",
    "AlignDevicesHook",
    "CpuOffload",
    "LayerwiseCastingHook",
    "ModelHook",
    "PipelineInference",
    "SequentialHook",
    "UserCpuOffloadHook",
    "add_hook_to_module",
    "align_module_device",
    "attach_align_device_hook",
    "attach_align_device_hook_on_blocks",
    "attach_execution_device_hook",
    "attach_layerwise_casting_hooks",
    "calculate_maximum_sizes",
    "check_device_map",
    "check_tied_parameters_in_config",
    "check_tied_parameters_on_same_device",
    "clean_device_map",
    "compute_module_sizes",
    "cpu_offload_with_hook",
    "dtype_byte_size",
    "find_tied_parameters",
    "get_balanced_memory",
    "get_max_layer_size",
    "get_max_memory",
    "get_state_dict_offloaded_model",
    "has_offloaded_params",
    "id_tensor_storage",
    "infer_auto_device_map",
    "init_empty_weights",
    "init_on_device",
    "meta_leftovers",
    "named_module_tensors",
    "resolve_device_map",
    "prepare_pippy",
    "remove_hook_from_module",
    "remove_hook_from_submodules",
    "retie_parameters",
    "set_module_tensor_to_device",
]

if TYPE_CHECKING:
    from drivetrain.inference.aligning import AlignDevicesHook as AlignDevicesHook
    from drivetrain.inference.aligning import align_module_device as align_module_device
    from drivetrain.inference.aligning import get_state_dict_offloaded_model as get_state_dict_offloaded_model
    from drivetrain.inference.aligning import has_offloaded_params as has_offloaded_params
    from drivetrain.inference.attaching import attach_align_device_hook as attach_align_device_hook
    from drivetrain.inference.attaching import attach_align_device_hook_on_blocks as attach_align_device_hook_on_blocks
    from drivetrain.inference.attaching import attach_execution_device_hook as attach_execution_device_hook
    from drivetrain.inference.budgets import get_balanced_memory as get_balanced_memory
    from drivetrain.inference.budgets import get_max_memory as get_max_memory
    from drivetrain.inference.casting import LayerwiseCastingHook as LayerwiseCastingHook
    from drivetrain.inference.casting import attach_layerwise_casting_hooks as attach_layerwise_casting_hooks
    from drivetrain.inference.device_map import DeviceMap as DeviceMap
    from drivetrain.inference.device_map import check_device_map as check_device_map
    from drivetrain.inference.device_map import (
        check_tied_parameters_on_same_device as check_tied_parameters_on_same_device,
    )
    from drivetrain.inference.device_map import clean_device_map as clean_device_map
    from drivetrain.inference.device_map import infer_auto_device_map as infer_auto_device_map
    from drivetrain.inference.device_map import resolve_device_map as resolve_device_map
    from drivetrain.inference.hooks import ModelHook as ModelHook
    from drivetrain.inference.hooks import SequentialHook as SequentialHook
    from drivetrain.inference.hooks import add_hook_to_module as add_hook_to_module
    from drivetrain.inference.hooks import remove_hook_from_module as remove_hook_from_module
    from drivetrain.inference.hooks import remove_hook_from_submodules as remove_hook_from_submodules
    from drivetrain.inference.meta import init_empty_weights as init_empty_weights
    from drivetrain.inference.meta import init_on_device as init_on_device
    from drivetrain.inference.meta import meta_leftovers as meta_leftovers
    from drivetrain.inference.pipeline import PipelineInference as PipelineInference
    from drivetrain.inference.pipeline import prepare_pippy as prepare_pippy
    from drivetrain.inference.sizes import calculate_maximum_sizes as calculate_maximum_sizes
    from drivetrain.inference.sizes import compute_module_sizes as compute_module_sizes
    from drivetrain.inference.sizes import dtype_byte_size as dtype_byte_size
    from drivetrain.inference.sizes import get_max_layer_size as get_max_layer_size
    from drivetrain.inference.sizes import named_module_tensors as named_module_tensors
    from drivetrain.inference.tensors import set_module_tensor_to_device as set_module_tensor_to_device
    from drivetrain.inference.ties import check_tied_parameters_in_config as check_tied_parameters_in_config
    from drivetrain.inference.ties import find_tied_parameters as find_tied_parameters
    from drivetrain.inference.ties import id_tensor_storage as id_tensor_storage
    from drivetrain.inference.ties import retie_parameters as retie_parameters
    from drivetrain.inference.whole_offload import CpuOffload as CpuOffload
    from drivetrain.inference.whole_offload import UserCpuOffloadHook as UserCpuOffloadHook
    from drivetrain.inference.whole_offload import cpu_offload_with_hook as cpu_offload_with_hook


def __getattr__(name: str) -> Any:
    return load_export(name, _EXPORTS, globals())
