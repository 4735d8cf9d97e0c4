"""Float8 backend on torchao, which computes with `torch._scaled_mm`."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from drivetrain.runtime.devices import DeviceKind
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.logging import get_logger
from drivetrain.strategies.precision.fp8.base import FP8Backend, check_choice, replace_layers

if TYPE_CHECKING:
    from torchao.float8 import Float8LinearConfig

logger = get_logger(__name__)

_TORCHAOS_NAMES = {"rowwise_gw_hp": "rowwise_with_gw_hp"}


class TorchAO(FP8Backend):
    """FP8 backend that uses torchao.

    See https://github.com/pytorch/ao/tree/main/torchao/float8. Scales are computed from the current values, so there is
    no state to save. On devices without float8 arithmetic, the computation is emulated.
    """

    name = "torchao"
    recipes = ("tensorwise", "rowwise", "rowwise_gw_hp")

    def __init__(
        self,
        recipe: str = "tensorwise",
        *,
        emulate: bool | None = None,
        float8_all_gather: bool = False,
        pad_inner_dim: bool = True,
        config: Float8LinearConfig | None = None,
    ) -> None:
        known = {name: ours for ours, name in _TORCHAOS_NAMES.items()}
        self.recipe = check_choice("recipe", known.get(recipe, recipe), self.recipes)
        if float8_all_gather and self.recipe != "tensorwise":
            raise ConfigurationError(
                f"float8_all_gather=True requires one scale for each weight, but recipe={recipe!r} computes a scale "
                "for each row. Use recipe='tensorwise', or remove float8_all_gather.",
            )
        self._emulate, self._pad, self._given = emulate, pad_inner_dim, config
        self._gathers = float8_all_gather
        if config is not None:
            self.recipe, self._gathers = "config", config.enable_fsdp_float8_all_gather
        from drivetrain.strategies.precision.fp8.all_gather import Float8AllGather  # imports FSDP, which is slow

        self._all_gather = Float8AllGather()
        self._kind: DeviceKind | None = None

    def setup(self, kind: DeviceKind) -> None:
        if importlib.util.find_spec("torchao") is None:
            raise ConfigurationError("precision='fp8' needs torchao. Install it with: pip install \"drivetrain[fp8]\".")
        if kind.name == "mps":
            raise ConfigurationError(
                "precision='fp8' is not supported on mps devices, which have no float8, not even for emulation. Use "
                "'bf16', or the CPU.",
            )
        self._kind = kind
        native = kind.supports_float8()
        if self._emulate is False and not native and kind.name != "cpu":
            raise ConfigurationError(
                f"FP8(emulate=False) needs float8 arithmetic, which this machine's {kind.name} device does not "
                "support (NVIDIA: compute capability 8.9 or newer, such as Ada). Remove emulate=False, or use 'bf16'.",
            )
        if self._emulates():
            logger.warning_once(
                f"precision='fp8' is emulated on {kind.name}, which has no float8 arithmetic. Values are rounded to "
                "float8 and multiplied in float32, so a layer takes 2 to 4 times as long as in float32. Use this to "
                "test the accuracy of float8, and 'bf16' to train faster."
            )

    def _emulates(self) -> bool:
        assert self._kind is not None, "FP8 is set up by an Accelerator or a Trainer"
        given = self._emulate if self._given is None else self._given.emulate or None
        return not self._kind.supports_float8() if given is None else given

    def config(self) -> Float8LinearConfig:
        """Return torchao's float8 configuration for the chosen recipe.

        torchao's all-gather would replace the parameters with a tensor subclass.
        """
        from torchao.float8 import Float8LinearConfig

        config = self._given
        if config is None:
            name = _TORCHAOS_NAMES.get(self.recipe, self.recipe)
            config = replace(Float8LinearConfig.from_recipe_name(name), pad_inner_dim=self._pad)
        return replace(config, emulate=self._emulates(), enable_fsdp_float8_all_gather=False)

    def convert(self, model: nn.Module, layers: Sequence[nn.Linear], kept: Sequence[nn.Linear]) -> None:
        convert_to_float8_training = _import_convert()
        config = self.config()
        new: dict[nn.Module, nn.Module] = {}
        for layer in layers:
            converted: Any = convert_to_float8_training(nn.ModuleList([layer]), config=config)[0]
            # torchao builds its own class. Its methods are replaced by those that work in inference mode, too.
            converted.__class__ = float8_layer()
            new[layer] = converted
        replace_layers(model, new)

    def prepare_optimizer(self, optimizer: Optimizer, models: Iterable[nn.Module]) -> Optimizer:
        if self._gathers:
            self._all_gather.attach(models, optimizer)
        return optimizer

    def after_step(self, optimizer: Optimizer) -> None:
        if self._gathers:
            self._all_gather.compute_scales(optimizer)


def _import_convert() -> Any:
    import logging

    # torchao 0.18 logs and warns about missing kernels when it is imported.
    quiet = logging.getLogger("torchao")
    level = quiet.level
    quiet.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from torchao.float8 import convert_to_float8_training
    finally:
        quiet.setLevel(level)
    return convert_to_float8_training


@cache
def float8_layer() -> type[nn.Module]:
    # torchao 0.18 supports only CUDA's autocast. In inference mode, torch does not decompose operations on its tensors.
    from torchao.float8.float8_linear import Float8Linear

    class Float8Layer(Float8Linear):  # type: ignore[misc, no-any-unimported, unused-ignore]
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            if torch.is_inference_mode_enabled():
                with torch.inference_mode(False), torch.no_grad():
                    return self.forward(input)
            kind = input.device.type
            if not torch.is_autocast_enabled(kind):
                return super().forward(input)  # type: ignore[no-any-return, unused-ignore]
            input = input.to(torch.get_autocast_dtype(kind))
            with torch.autocast(kind, enabled=False):
                return super().forward(input)  # type: ignore[no-any-return, unused-ignore]

    # So that pickle finds the class in this module, by the module's `__getattr__`.
    Float8Layer.__qualname__ = Float8Layer.__name__
    return Float8Layer


def __getattr__(name: str) -> Any:
    if name == "Float8Layer":
        return float8_layer()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
