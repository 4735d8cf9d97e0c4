"""Models that are larger than a device: built without memory, sized, and placed over what there is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from drivetrain.runtime.exports import load_export

_EXPORTS = {
    "OffloadedWeightsLoader": "drivetrain.inference.offloaded",
    "PrefixedDataset": "drivetrain.inference.offloaded",
    "StreamOptions": "drivetrain.inference.streaming",
    "StreamedModelError": "drivetrain.inference.guard",
    "WeightStream": "drivetrain.inference.streaming",
    "calculate_maximum_sizes": "drivetrain.inference.sizes",
    "check_tied_parameters_in_config": "drivetrain.inference.ties",
    "compute_module_sizes": "drivetrain.inference.sizes",
    "cpu_offload": "drivetrain.inference.placement",
    "disk_offload": "drivetrain.inference.placement",
    "dispatch_model": "drivetrain.inference.placement",
    "dtype_byte_size": "drivetrain.inference.sizes",
    "extract_submodules_state_dict": "drivetrain.inference.offloaded",
    "find_tied_parameters": "drivetrain.inference.ties",
    "get_max_layer_size": "drivetrain.inference.sizes",
    "group_offload": "drivetrain.inference.placement",
    "id_tensor_storage": "drivetrain.inference.ties",
    "init_empty_weights": "drivetrain.inference.meta",
    "init_on_device": "drivetrain.inference.meta",
    "load_checkpoint_and_dispatch": "drivetrain.inference.placement",
    "load_checkpoint_in_model": "drivetrain.inference.loading",
    "load_offloaded_weight": "drivetrain.inference.offloaded",
    "load_offloaded_weights": "drivetrain.inference.offloaded",
    "load_state_dict": "drivetrain.inference.loading",
    "meta_leftovers": "drivetrain.inference.meta",
    "named_module_tensors": "drivetrain.inference.sizes",
    "offload_state_dict": "drivetrain.inference.offloaded",
    "offload_weight": "drivetrain.inference.offloaded",
    "retie_parameters": "drivetrain.inference.ties",
    "save_offload_index": "drivetrain.inference.offloaded",
}

__all__ = [
    "OffloadedWeightsLoader",
    "PrefixedDataset",
    "StreamOptions",
    "StreamedModelError",
    "WeightStream",
    "calculate_maximum_sizes",
    "check_tied_parameters_in_config",
    "compute_module_sizes",
    "cpu_offload",
    "disk_offload",
    "dispatch_model",
    "dtype_byte_size",
    "extract_submodules_state_dict",
    "find_tied_parameters",
    "get_max_layer_size",
    "group_offload",
    "id_tensor_storage",
    "init_empty_weights",
    "init_on_device",
    "load_checkpoint_and_dispatch",
    "load_checkpoint_in_model",
    "load_offloaded_weight",
    "load_offloaded_weights",
    "load_state_dict",
    "meta_leftovers",
    "named_module_tensors",
    "offload_state_dict",
    "offload_weight",
    "retie_parameters",
    "save_offload_index",
]

if TYPE_CHECKING:
    from drivetrain.inference.guard import StreamedModelError as StreamedModelError
    from drivetrain.inference.loading import load_checkpoint_in_model as load_checkpoint_in_model
    from drivetrain.inference.loading import load_state_dict as load_state_dict
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
    from drivetrain.inference.placement import cpu_offload as cpu_offload
    from drivetrain.inference.placement import disk_offload as disk_offload
    from drivetrain.inference.placement import dispatch_model as dispatch_model
    from drivetrain.inference.placement import group_offload as group_offload
    from drivetrain.inference.placement import load_checkpoint_and_dispatch as load_checkpoint_and_dispatch
    from drivetrain.inference.sizes import calculate_maximum_sizes as calculate_maximum_sizes
    from drivetrain.inference.sizes import compute_module_sizes as compute_module_sizes
    from drivetrain.inference.sizes import dtype_byte_size as dtype_byte_size
    from drivetrain.inference.sizes import get_max_layer_size as get_max_layer_size
    from drivetrain.inference.sizes import named_module_tensors as named_module_tensors
    from drivetrain.inference.streaming import StreamOptions as StreamOptions
    from drivetrain.inference.streaming import WeightStream as WeightStream
    from drivetrain.inference.ties import check_tied_parameters_in_config as check_tied_parameters_in_config
    from drivetrain.inference.ties import find_tied_parameters as find_tied_parameters
    from drivetrain.inference.ties import id_tensor_storage as id_tensor_storage
    from drivetrain.inference.ties import retie_parameters as retie_parameters


def __getattr__(name: str) -> Any:
    return load_export(name, _EXPORTS, globals())
