"""Models that are larger than a device: built without memory, sized, and placed over what there is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from drivetrain.runtime.exports import load_export

_EXPORTS = {
    "DeviceMap": "drivetrain.inference.device_map",
    "calculate_maximum_sizes": "drivetrain.inference.sizes",
    "check_device_map": "drivetrain.inference.device_map",
    "check_tied_parameters_in_config": "drivetrain.inference.ties",
    "check_tied_parameters_on_same_device": "drivetrain.inference.device_map",
    "clean_device_map": "drivetrain.inference.device_map",
    "compute_module_sizes": "drivetrain.inference.sizes",
    "dtype_byte_size": "drivetrain.inference.sizes",
    "find_tied_parameters": "drivetrain.inference.ties",
    "get_balanced_memory": "drivetrain.inference.budgets",
    "get_max_layer_size": "drivetrain.inference.sizes",
    "get_max_memory": "drivetrain.inference.budgets",
    "id_tensor_storage": "drivetrain.inference.ties",
    "infer_auto_device_map": "drivetrain.inference.device_map",
    "init_empty_weights": "drivetrain.inference.meta",
    "init_on_device": "drivetrain.inference.meta",
    "meta_leftovers": "drivetrain.inference.meta",
    "named_module_tensors": "drivetrain.inference.sizes",
    "resolve_device_map": "drivetrain.inference.device_map",
    "retie_parameters": "drivetrain.inference.ties",
}

__all__ = [
    "DeviceMap",
    "calculate_maximum_sizes",
    "check_device_map",
    "check_tied_parameters_in_config",
    "check_tied_parameters_on_same_device",
    "clean_device_map",
    "compute_module_sizes",
    "dtype_byte_size",
    "find_tied_parameters",
    "get_balanced_memory",
    "get_max_layer_size",
    "get_max_memory",
    "id_tensor_storage",
    "infer_auto_device_map",
    "init_empty_weights",
    "init_on_device",
    "meta_leftovers",
    "named_module_tensors",
    "resolve_device_map",
    "retie_parameters",
]

if TYPE_CHECKING:
    from drivetrain.inference.budgets import get_balanced_memory as get_balanced_memory
    from drivetrain.inference.budgets import get_max_memory as get_max_memory
    from drivetrain.inference.device_map import DeviceMap as DeviceMap
    from drivetrain.inference.device_map import check_device_map as check_device_map
    from drivetrain.inference.device_map import (
        check_tied_parameters_on_same_device as check_tied_parameters_on_same_device,
    )
    from drivetrain.inference.device_map import clean_device_map as clean_device_map
    from drivetrain.inference.device_map import infer_auto_device_map as infer_auto_device_map
    from drivetrain.inference.device_map import resolve_device_map as resolve_device_map
    from drivetrain.inference.meta import init_empty_weights as init_empty_weights
    from drivetrain.inference.meta import init_on_device as init_on_device
    from drivetrain.inference.meta import meta_leftovers as meta_leftovers
    from drivetrain.inference.sizes import calculate_maximum_sizes as calculate_maximum_sizes
    from drivetrain.inference.sizes import compute_module_sizes as compute_module_sizes
    from drivetrain.inference.sizes import dtype_byte_size as dtype_byte_size
    from drivetrain.inference.sizes import get_max_layer_size as get_max_layer_size
    from drivetrain.inference.sizes import named_module_tensors as named_module_tensors
    from drivetrain.inference.ties import check_tied_parameters_in_config as check_tied_parameters_in_config
    from drivetrain.inference.ties import find_tied_parameters as find_tied_parameters
    from drivetrain.inference.ties import id_tensor_storage as id_tensor_storage
    from drivetrain.inference.ties import retie_parameters as retie_parameters


def __getattr__(name: str) -> Any:
    return load_export(name, _EXPORTS, globals())
