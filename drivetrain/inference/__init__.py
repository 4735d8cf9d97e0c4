"""Run models that exceed one device's memory: empty initialization, device maps, offloading, quantization, adapters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from drivetrain.runtime.exports import load_export

_EXPORTS = {
    "AlignDevicesHook": "drivetrain.inference.aligning",
    "BitsAndBytes": "drivetrain.inference.quantization",
    "BnbQuantizationConfig": "drivetrain.inference.quantization",
    "CpuOffload": "drivetrain.inference.aligning",
    "DeviceMap": "drivetrain.inference.device_map",
    "LayerwiseCastingHook": "drivetrain.inference.meta",
    "LoRALinear": "drivetrain.inference.adapters",
    "ModelHook": "drivetrain.inference.hooks",
    "OffloadedWeightsLoader": "drivetrain.inference.offloaded",
    "PipelineInference": "drivetrain.inference.pipeline",
    "PrefixedDataset": "drivetrain.inference.offloaded",
    "QLoRA": "drivetrain.inference.adapters",
    "Quantizer": "drivetrain.inference.quantization",
    "SequentialHook": "drivetrain.inference.hooks",
    "StreamOptions": "drivetrain.inference.streaming",
    "StreamedModelError": "drivetrain.inference.hooks",
    "TorchAO": "drivetrain.inference.quantization",
    "UserCpuOffloadHook": "drivetrain.inference.aligning",
    "WeightStream": "drivetrain.inference.streaming",
    "add_hook_to_module": "drivetrain.inference.hooks",
    "align_module_device": "drivetrain.inference.aligning",
    "attach_align_device_hook": "drivetrain.inference.aligning",
    "attach_align_device_hook_on_blocks": "drivetrain.inference.aligning",
    "attach_execution_device_hook": "drivetrain.inference.aligning",
    "attach_layerwise_casting_hooks": "drivetrain.inference.meta",
    "calculate_maximum_sizes": "drivetrain.inference.sizes",
    "check_device_map": "drivetrain.inference.device_map",
    "check_tied_parameters_in_config": "drivetrain.inference.tensors",
    "check_tied_parameters_on_same_device": "drivetrain.inference.device_map",
    "clean_device_map": "drivetrain.inference.device_map",
    "compute_module_sizes": "drivetrain.inference.sizes",
    "cpu_offload": "drivetrain.inference.placement",
    "cpu_offload_with_hook": "drivetrain.inference.aligning",
    "disk_offload": "drivetrain.inference.placement",
    "dispatch_model": "drivetrain.inference.placement",
    "dtype_byte_size": "drivetrain.inference.sizes",
    "extract_submodules_state_dict": "drivetrain.inference.offloaded",
    "find_tied_parameters": "drivetrain.inference.tensors",
    "get_balanced_memory": "drivetrain.inference.device_map",
    "get_max_layer_size": "drivetrain.inference.sizes",
    "get_max_memory": "drivetrain.inference.device_map",
    "get_quantizer": "drivetrain.inference.quantization",
    "get_state_dict_offloaded_model": "drivetrain.inference.aligning",
    "group_offload": "drivetrain.inference.placement",
    "has_offloaded_params": "drivetrain.inference.aligning",
    "id_tensor_storage": "drivetrain.inference.tensors",
    "infer_auto_device_map": "drivetrain.inference.device_map",
    "init_empty_weights": "drivetrain.inference.meta",
    "init_on_device": "drivetrain.inference.meta",
    "load_and_quantize_model": "drivetrain.inference.quantization",
    "load_checkpoint_and_dispatch": "drivetrain.inference.placement",
    "load_checkpoint_in_model": "drivetrain.inference.loading",
    "load_offloaded_weight": "drivetrain.inference.offloaded",
    "load_offloaded_weights": "drivetrain.inference.offloaded",
    "load_quantized": "drivetrain.inference.quantization",
    "load_state_dict": "drivetrain.inference.loading",
    "merge_adapters": "drivetrain.inference.merging",
    "meta_leftovers": "drivetrain.inference.meta",
    "named_module_tensors": "drivetrain.inference.sizes",
    "offload_state_dict": "drivetrain.inference.offloaded",
    "offload_weight": "drivetrain.inference.offloaded",
    "prepare_pippy": "drivetrain.inference.pipeline",
    "quantize_model": "drivetrain.inference.quantization",
    "register_quantizer": "drivetrain.inference.quantization",
    "remove_hook_from_module": "drivetrain.inference.hooks",
    "remove_hook_from_submodules": "drivetrain.inference.hooks",
    "resolve_device_map": "drivetrain.inference.device_map",
    "retie_parameters": "drivetrain.inference.tensors",
    "save_offload_index": "drivetrain.inference.offloaded",
    "save_quantized": "drivetrain.inference.quantization",
    "set_module_tensor_to_device": "drivetrain.inference.tensors",
}

__all__ = [
    "AlignDevicesHook",
    "BitsAndBytes",
    "BnbQuantizationConfig",
    "CpuOffload",
    "DeviceMap",
    "LayerwiseCastingHook",
    "LoRALinear",
    "ModelHook",
    "OffloadedWeightsLoader",
    "PipelineInference",
    "PrefixedDataset",
    "QLoRA",
    "Quantizer",
    "SequentialHook",
    "StreamOptions",
    "StreamedModelError",
    "TorchAO",
    "UserCpuOffloadHook",
    "WeightStream",
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
    "cpu_offload",
    "cpu_offload_with_hook",
    "disk_offload",
    "dispatch_model",
    "dtype_byte_size",
    "extract_submodules_state_dict",
    "find_tied_parameters",
    "get_balanced_memory",
    "get_max_layer_size",
    "get_max_memory",
    "get_quantizer",
    "get_state_dict_offloaded_model",
    "group_offload",
    "has_offloaded_params",
    "id_tensor_storage",
    "infer_auto_device_map",
    "init_empty_weights",
    "init_on_device",
    "load_and_quantize_model",
    "load_checkpoint_and_dispatch",
    "load_checkpoint_in_model",
    "load_offloaded_weight",
    "load_offloaded_weights",
    "load_quantized",
    "load_state_dict",
    "merge_adapters",
    "meta_leftovers",
    "named_module_tensors",
    "offload_state_dict",
    "offload_weight",
    "prepare_pippy",
    "quantize_model",
    "register_quantizer",
    "remove_hook_from_module",
    "remove_hook_from_submodules",
    "resolve_device_map",
    "retie_parameters",
    "save_offload_index",
    "save_quantized",
    "set_module_tensor_to_device",
]

if TYPE_CHECKING:
    from drivetrain.inference.adapters import LoRALinear as LoRALinear
    from drivetrain.inference.adapters import QLoRA as QLoRA
    from drivetrain.inference.aligning import AlignDevicesHook as AlignDevicesHook
    from drivetrain.inference.aligning import CpuOffload as CpuOffload
    from drivetrain.inference.aligning import UserCpuOffloadHook as UserCpuOffloadHook
    from drivetrain.inference.aligning import align_module_device as align_module_device
    from drivetrain.inference.aligning import attach_align_device_hook as attach_align_device_hook
    from drivetrain.inference.aligning import attach_align_device_hook_on_blocks as attach_align_device_hook_on_blocks
    from drivetrain.inference.aligning import attach_execution_device_hook as attach_execution_device_hook
    from drivetrain.inference.aligning import cpu_offload_with_hook as cpu_offload_with_hook
    from drivetrain.inference.aligning import get_state_dict_offloaded_model as get_state_dict_offloaded_model
    from drivetrain.inference.aligning import has_offloaded_params as has_offloaded_params
    from drivetrain.inference.device_map import DeviceMap as DeviceMap
    from drivetrain.inference.device_map import check_device_map as check_device_map
    from drivetrain.inference.device_map import (
        check_tied_parameters_on_same_device as check_tied_parameters_on_same_device,
    )
    from drivetrain.inference.device_map import clean_device_map as clean_device_map
    from drivetrain.inference.device_map import get_balanced_memory as get_balanced_memory
    from drivetrain.inference.device_map import get_max_memory as get_max_memory
    from drivetrain.inference.device_map import infer_auto_device_map as infer_auto_device_map
    from drivetrain.inference.device_map import resolve_device_map as resolve_device_map
    from drivetrain.inference.hooks import ModelHook as ModelHook
    from drivetrain.inference.hooks import SequentialHook as SequentialHook
    from drivetrain.inference.hooks import StreamedModelError as StreamedModelError
    from drivetrain.inference.hooks import add_hook_to_module as add_hook_to_module
    from drivetrain.inference.hooks import remove_hook_from_module as remove_hook_from_module
    from drivetrain.inference.hooks import remove_hook_from_submodules as remove_hook_from_submodules
    from drivetrain.inference.loading import load_checkpoint_in_model as load_checkpoint_in_model
    from drivetrain.inference.loading import load_state_dict as load_state_dict
    from drivetrain.inference.merging import merge_adapters as merge_adapters
    from drivetrain.inference.meta import LayerwiseCastingHook as LayerwiseCastingHook
    from drivetrain.inference.meta import attach_layerwise_casting_hooks as attach_layerwise_casting_hooks
    from drivetrain.inference.meta import init_empty_weights as init_empty_weights
    from drivetrain.inference.meta import init_on_device as init_on_device
    from drivetrain.inference.meta import meta_leftovers as meta_leftovers
    from drivetrain.inference.offloaded import OffloadedWeightsLoader as OffloadedWeightsLoader
    from drivetrain.inference.offloaded import PrefixedDataset as PrefixedDataset
    from drivetrain.inference.offloaded import extract_submodules_state_dict as extract_submodules_state_dict
    from drivetrain.inference.offloaded import load_offloaded_weight as load_offloaded_weight
    from drivetrain.inference.offloaded import load_offloaded_weights as load_offloaded_weights
    from drivetrain.inference.offloaded import offload_state_dict as offload_state_dict
    from drivetrain.inference.offloaded import offload_weight as offload_weight
    from drivetrain.inference.offloaded import save_offload_index as save_offload_index
    from drivetrain.inference.pipeline import PipelineInference as PipelineInference
    from drivetrain.inference.pipeline import prepare_pippy as prepare_pippy
    from drivetrain.inference.placement import cpu_offload as cpu_offload
    from drivetrain.inference.placement import disk_offload as disk_offload
    from drivetrain.inference.placement import dispatch_model as dispatch_model
    from drivetrain.inference.placement import group_offload as group_offload
    from drivetrain.inference.placement import load_checkpoint_and_dispatch as load_checkpoint_and_dispatch
    from drivetrain.inference.quantization import BitsAndBytes as BitsAndBytes
    from drivetrain.inference.quantization import BnbQuantizationConfig as BnbQuantizationConfig
    from drivetrain.inference.quantization import Quantizer as Quantizer
    from drivetrain.inference.quantization import TorchAO as TorchAO
    from drivetrain.inference.quantization import get_quantizer as get_quantizer
    from drivetrain.inference.quantization import load_and_quantize_model as load_and_quantize_model
    from drivetrain.inference.quantization import load_quantized as load_quantized
    from drivetrain.inference.quantization import quantize_model as quantize_model
    from drivetrain.inference.quantization import register_quantizer as register_quantizer
    from drivetrain.inference.quantization import save_quantized as save_quantized
    from drivetrain.inference.sizes import calculate_maximum_sizes as calculate_maximum_sizes
    from drivetrain.inference.sizes import compute_module_sizes as compute_module_sizes
    from drivetrain.inference.sizes import dtype_byte_size as dtype_byte_size
    from drivetrain.inference.sizes import get_max_layer_size as get_max_layer_size
    from drivetrain.inference.sizes import named_module_tensors as named_module_tensors
    from drivetrain.inference.streaming import StreamOptions as StreamOptions
    from drivetrain.inference.streaming import WeightStream as WeightStream
    from drivetrain.inference.tensors import check_tied_parameters_in_config as check_tied_parameters_in_config
    from drivetrain.inference.tensors import find_tied_parameters as find_tied_parameters
    from drivetrain.inference.tensors import id_tensor_storage as id_tensor_storage
    from drivetrain.inference.tensors import retie_parameters as retie_parameters
    from drivetrain.inference.tensors import set_module_tensor_to_device as set_module_tensor_to_device


def __getattr__(name: str) -> Any:
    return load_export(name, _EXPORTS, globals())
