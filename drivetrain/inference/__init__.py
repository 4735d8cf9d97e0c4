"""Models that are larger than a device: built without memory, sized, and placed over what there is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from drivetrain.runtime.exports import load_export

_EXPORTS = {
    "calculate_maximum_sizes": "drivetrain.inference.sizes",
    "check_tied_parameters_in_config": "drivetrain.inference.ties",
    "compute_module_sizes": "drivetrain.inference.sizes",
    "dtype_byte_size": "drivetrain.inference.sizes",
    "find_tied_parameters": "drivetrain.inference.ties",
    "get_max_layer_size": "drivetrain.inference.sizes",
    "id_tensor_storage": "drivetrain.inference.ties",
    "init_empty_weights": "drivetrain.inference.meta",
    "init_on_device": "drivetrain.inference.meta",
    "meta_leftovers": "drivetrain.inference.meta",
    "named_module_tensors": "drivetrain.inference.sizes",
    "retie_parameters": "drivetrain.inference.ties",
}

__all__ = [
    "calculate_maximum_sizes",
    "check_tied_parameters_in_config",
    "compute_module_sizes",
    "dtype_byte_size",
    "find_tied_parameters",
    "get_max_layer_size",
    "id_tensor_storage",
    "init_empty_weights",
    "init_on_device",
    "meta_leftovers",
    "named_module_tensors",
    "retie_parameters",
]

if TYPE_CHECKING:
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
