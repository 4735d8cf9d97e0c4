"""Quantization of linear layers with bitsandbytes and torchao."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from drivetrain.runtime.exports import load_export

_EXPORTS = {
    "BitsAndBytes": "drivetrain.inference.quantization.bitsandbytes",
    "BnbQuantizationConfig": "drivetrain.inference.quantization.bitsandbytes",
    "Quantization": "drivetrain.inference.quantization.models",
    "Quantizer": "drivetrain.inference.quantization.base",
    "TorchAO": "drivetrain.inference.quantization.torchao",
    "get_quantizer": "drivetrain.inference.quantization.base",
    "load_and_quantize_model": "drivetrain.inference.quantization.models",
    "load_quantized": "drivetrain.inference.quantization.models",
    "quantize_model": "drivetrain.inference.quantization.models",
    "register_quantizer": "drivetrain.inference.quantization.base",
    "save_quantized": "drivetrain.inference.quantization.models",
}

__all__ = [*sorted(_EXPORTS)]

if TYPE_CHECKING:
    from drivetrain.inference.quantization.base import Quantizer as Quantizer
    from drivetrain.inference.quantization.base import get_quantizer as get_quantizer
    from drivetrain.inference.quantization.base import register_quantizer as register_quantizer
    from drivetrain.inference.quantization.bitsandbytes import BitsAndBytes as BitsAndBytes
    from drivetrain.inference.quantization.bitsandbytes import BnbQuantizationConfig as BnbQuantizationConfig
    from drivetrain.inference.quantization.models import Quantization as Quantization
    from drivetrain.inference.quantization.models import load_and_quantize_model as load_and_quantize_model
    from drivetrain.inference.quantization.models import load_quantized as load_quantized
    from drivetrain.inference.quantization.models import quantize_model as quantize_model
    from drivetrain.inference.quantization.models import save_quantized as save_quantized
    from drivetrain.inference.quantization.torchao import TorchAO as TorchAO


def __getattr__(name: str) -> Any:
    return load_export(name, _EXPORTS, globals())
