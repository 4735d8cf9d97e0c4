"""Quantization to 4 and 8 bits with bitsandbytes."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.inference.quantization.base import Quantizer, linear_like, pieces_of
from drivetrain.runtime.errors import ConfigurationError, PackageMissingError, nearest

_TYPES = ("nf4", "fp4")
_PACKS, _MADE_OF, _ROWS_TOGETHER = "support_avx512bf16_for_cpu", "_made_of", 32
_SHORT = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(eq=True, repr=False)
class BitsAndBytes(Quantizer):
    """Quantizer that replaces linear layers by 4-bit or 8-bit bitsandbytes layers.

    The 4-bit types are `nf4` and `fp4`. The 8-bit type is LLM.int8. Source: Dettmers et al., "LLM.int8()" (2022) and
    "QLoRA" (2023).

    Args:
        bits: 4 or 8.
        quant_type: 4-bit data type, `"nf4"` or `"fp4"`.
        double_quant: Quantize the scales of 4-bit blocks too.
        compute_dtype: Dtype of 4-bit layers' matrix products. None uses the inputs' dtype.
        quant_storage: Dtype that 4-bit values are packed into. Under FSDP, the dtype of the other parameters.
        threshold: In 8 bits, inputs above this value are outliers, multiplied separately in 16 bits.
    """

    name = "bitsandbytes"

    bits: int = 4
    quant_type: str = "nf4"
    double_quant: bool = False
    compute_dtype: torch.dtype | str | None = None
    quant_storage: torch.dtype | str = torch.uint8
    threshold: float = 6.0

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise ConfigurationError(f"bits is {self.bits!r}, but bitsandbytes supports only 4 and 8.")
        if self.quant_type not in _TYPES:
            raise ConfigurationError(
                f"quant_type is {self.quant_type!r}, but must be 'nf4' or 'fp4'.{nearest(self.quant_type, _TYPES)}"
            )
        if self.compute_dtype is not None:
            self.compute_dtype = dtype_of("compute_dtype", self.compute_dtype)
        self.quant_storage = dtype_of("quant_storage", self.quant_storage)

    def check(self) -> None:
        if find_spec("bitsandbytes") is None:
            raise PackageMissingError(
                "Quantization to 4 or 8 bits needs bitsandbytes, which is not installed: pip install "
                '"drivetrain[quantization]".'
            )

    def quantize(self, layer: nn.Linear, weight: Tensor, device: torch.device) -> nn.Module:
        if self.bits == 4:
            return self._in_4_bits(layer, weight, device)
        from bitsandbytes.functional import int8_vectorwise_quant

        stored = torch.empty(weight.shape, dtype=torch.int8, device=device)
        scales = torch.empty(len(weight), dtype=torch.float32, device=device)
        for rows, piece in pieces_of(layer, weight, device):
            stored[rows], scales[rows], _ = int8_vectorwise_quant(piece.to(torch.float16))
        return self._of_int8(layer, stored, scales)

    def _in_4_bits(self, layer: nn.Linear, weight: Tensor, device: torch.device) -> nn.Module:
        from bitsandbytes import functional
        from bitsandbytes.nn import modules as layers

        made = self._empty(layer)
        size = made.weight.blocksize
        # Two 4-bit values per byte.
        stored = torch.empty((weight.numel() + 1) // 2, 1, dtype=torch.uint8, device=device)
        scales = torch.empty(-(-weight.numel() // size), dtype=torch.float32, device=device)
        state: Any = None
        for start, piece in _whole_blocks(pieces_of(layer, weight, device), size):
            packed, state = functional.quantize_4bit(piece, blocksize=size, quant_type=self.quant_type)
            stored[start // 2 :][: len(packed)] = packed
            scales[start // size :][: len(state.absmax)] = state.absmax
        state.shape, state.absmax = weight.shape, scales
        if self.double_quant:
            # Double quantization: the scales themselves in 8 bits, around their mean.
            state.offset, state.nested = scales.mean(), True
            state.absmax, state.state2 = functional.quantize_blockwise(scales - state.offset, blocksize=256)
        made.weight = layers.Params4bit(
            stored.view(-1).view(dtype_of("quant_storage", self.quant_storage)).unsqueeze(1),
            requires_grad=False,
            quant_state=state,
            blocksize=size,
            module=made,
            bnb_quantized=True,
            **self._of_parameter(),
        )
        made.quant_state = state
        self._keep_scales(made)
        return made  # type: ignore[no-any-return]

    def _keep_scales(self, made: Any) -> None:
        # On CPUs with AVX-512 BF16, the first forward in evaluation packs the layer for another kernel. That kernel
        # rounds the scales to bfloat16, and fails if rows or columns are not full blocks (bitsandbytes 0.50.2).
        rows, columns = made.weight.quant_state.shape
        if rows % _ROWS_TOGETHER or columns % made.weight.blocksize:
            self.settle(made)
        elif made.weight.device.type == "cpu" and getattr(made, _PACKS, False):
            made.__dict__[_MADE_OF] = copy.copy(made.quant_state)

    def _of_int8(self, layer: nn.Linear, weight: Tensor, scale: Tensor) -> nn.Module:
        from bitsandbytes.nn import modules as layers

        made = self._empty(layer)
        made.weight = layers.Int8Params(weight, requires_grad=False, has_fp16_weights=False, CB=weight, SCB=scale)
        return made  # type: ignore[no-any-return]

    def made(self, module: nn.Module) -> bool:
        return type(module).__name__ == ("Linear4bit" if self.bits == 4 else "Linear8bitLt")

    def saved(self, layer: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
        state = layer.state_dict()  # undoes the packing of the weight
        kept = layer.__dict__.get(_MADE_OF)
        if kept is not None:
            weight: Any = layer.weight
            weight.quant_state = layer.quant_state = copy.copy(kept)
            state = layer.state_dict()
        return {name: value for name, value in state.items() if name != "bias"}, {}

    def finds(self, names: Collection[str]) -> bool:
        return any(name == "SCB" or name.startswith("weight.quant_state") for name in names)

    def opened(
        self, layer: nn.Linear, tensors: Mapping[str, Tensor], texts: Mapping[str, str], device: torch.device
    ) -> nn.Module:
        if self.bits == 8:
            return self._of_int8(layer, tensors["weight"].to(device), tensors["SCB"].to(device))
        from bitsandbytes.nn import modules as layers

        made = self._empty(layer)
        stats = {name.removeprefix("weight."): value for name, value in tensors.items() if name != "weight"}
        made.weight = layers.Params4bit.from_prequantized(
            tensors["weight"].to(device), stats, requires_grad=False, device=device, module=made
        )
        made.quant_state = made.weight.quant_state
        self._keep_scales(made)
        return made  # type: ignore[no-any-return]

    def settle(self, layer: nn.Module) -> None:
        # The kernel that bitsandbytes packs the layer for in evaluation (see _keep_scales) has no backward.
        layer.__dict__[_PACKS] = False
        layer.__dict__.pop(_MADE_OF, None)

    def parts(self, layer: Any) -> dict[str, Tensor]:
        if self.bits == 4:
            return {"weight": layer.weight.data, "absmax": layer.quant_state.absmax}
        # Before the first forward, the values are in the parameter instead of the state.
        if layer.weight.CB is not None:
            layer.init_8bit_state()
        return {"weight": layer.state.CB, "SCB": layer.state.SCB}

    def bind(self, layer: Any, parts: Mapping[str, Tensor]) -> None:
        layer.weight.data = parts["weight"]
        if self.bits == 4:
            # An earlier forward has saved the old state for backward, so change a copy.
            state = copy.copy(layer.quant_state)
            state.absmax = parts["absmax"]
            layer.quant_state = layer.weight.quant_state = state
        else:
            state = copy.copy(layer.state)
            state.CB, state.SCB = parts["weight"], parts["SCB"]
            layer.state = state
            layer.weight.CB = layer.weight.SCB = None

    def as_dict(self) -> dict[str, Any]:
        options: dict[str, Any] = {"bits": self.bits}
        if self.bits == 8:
            return {**options, "threshold": self.threshold}
        options |= {"quant_type": self.quant_type, "double_quant": self.double_quant}
        dtypes = {"compute_dtype": self.compute_dtype, "quant_storage": self.quant_storage}
        return options | {name: value and str(value).removeprefix("torch.") for name, value in dtypes.items()}

    def _empty(self, layer: nn.Linear) -> Any:
        from bitsandbytes.nn import modules as layers

        if self.bits == 8:
            options = {"has_fp16_weights": False, "threshold": self.threshold}
            return linear_like(layer, layers.Linear8bitLt, **options)
        return linear_like(layer, layers.Linear4bit, compute_dtype=self.compute_dtype, **self._of_parameter())

    def _of_parameter(self) -> dict[str, Any]:
        return {
            "quant_type": self.quant_type,
            "compress_statistics": self.double_quant,
            "quant_storage": self.quant_storage,
        }


@dataclass
class BnbQuantizationConfig:
    """Options for quantization with bitsandbytes, for use with `load_and_quantize_model`.

    Args:
        load_in_8bit: Quantize linear layers to 8 bits.
        llm_int8_threshold: In 8 bits, inputs above this value are multiplied separately in 16 bits.
        load_in_4bit: Quantize linear layers to 4 bits.
        bnb_4bit_quant_type: `"fp4"` or `"nf4"`.
        bnb_4bit_use_double_quant: Quantize the scales of 4-bit blocks too.
        bnb_4bit_compute_dtype: Dtype of 4-bit layers' matrix products: a dtype, `"fp32"`, `"fp16"` or `"bf16"`.
        torch_dtype: Dtype of all other weights. None means float16 with 8 bits, and the compute dtype with 4 bits.
        skip_modules: Names of modules that are not quantized. None means the output head and tied modules.
        keep_in_fp32_modules: Names of modules that stay in float32.

    Raises:
        ConfigurationError: Not exactly one of `load_in_8bit` and `load_in_4bit` is True, or a value is not allowed.
    """

    load_in_8bit: bool = False
    llm_int8_threshold: float = 6.0
    load_in_4bit: bool = False
    bnb_4bit_quant_type: str = "fp4"
    bnb_4bit_use_double_quant: bool = False
    bnb_4bit_compute_dtype: torch.dtype | str = "fp16"
    torch_dtype: torch.dtype | str | None = None
    skip_modules: list[str] | None = None
    keep_in_fp32_modules: list[str] | None = None

    def __post_init__(self) -> None:
        if self.load_in_8bit == self.load_in_4bit:
            both = "both are" if self.load_in_8bit else "neither is"
            raise ConfigurationError(
                f"Exactly one of load_in_8bit and load_in_4bit must be True, but {both}.",
            )
        self.bnb_4bit_compute_dtype = dtype_of("bnb_4bit_compute_dtype", self.bnb_4bit_compute_dtype)
        default = torch.float16 if self.load_in_8bit else self.bnb_4bit_compute_dtype
        self.torch_dtype = default if self.torch_dtype is None else dtype_of("torch_dtype", self.torch_dtype)
        self.quantizer()  # raises for an unknown quant_type

    def quantizer(self) -> BitsAndBytes:
        """Create a `BitsAndBytes` quantizer with the options of this configuration."""
        if self.load_in_8bit:
            return BitsAndBytes(8, threshold=self.llm_int8_threshold)
        return BitsAndBytes(
            4,
            quant_type=self.bnb_4bit_quant_type,
            double_quant=self.bnb_4bit_use_double_quant,
            compute_dtype=self.bnb_4bit_compute_dtype,
        )

    @property
    def target_dtype(self) -> Any:
        """Dtype that the weights are quantized to: `torch.int8`, or the string `"int4"`."""
        return torch.int8 if self.load_in_8bit else "int4"


def _whole_blocks(pieces: Iterable[tuple[slice, Tensor]], size: int) -> Iterator[tuple[int, Tensor]]:
    start, left = 0, None
    for _, piece in pieces:
        flat = piece.reshape(-1) if left is None else torch.cat([left, piece.reshape(-1)])
        whole = flat.numel() // size * size
        if whole:
            yield start, flat[:whole]
        start, left = start + whole, flat[whole:]
    if left is not None and left.numel():
        yield start, left


def dtype_of(argument: str, given: torch.dtype | str) -> torch.dtype:
    found = _SHORT.get(given) or getattr(torch, given.removeprefix("torch."), None) if isinstance(given, str) else given
    if not isinstance(found, torch.dtype):
        raise ConfigurationError(f"{argument} is {given!r}, but must be a torch dtype, 'fp32', 'fp16' or 'bf16'.")
    return found
