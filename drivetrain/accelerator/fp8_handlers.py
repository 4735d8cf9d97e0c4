"""Accelerate's holders of options for `"fp8"`; `Accelerator(mixed_precision=FP8(...))` takes the same directly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from torch import nn

from drivetrain.strategies.precision import FP8
from drivetrain.strategies.precision.fp8.base import check_choice


class FP8Handler:
    """Options of `"fp8"` under Accelerate's names."""

    def precision(self) -> FP8:
        """The precision that these options mean.

        Raises:
            ConfigurationError: An option cannot be.
        """
        raise NotImplementedError


@dataclass
class AORecipeKwargs(FP8Handler):
    """Options of torchao.

    Attributes:
        config: A `Float8LinearConfig` of torchao's, in place of the others.
        module_filter_func: Called with a layer and its name: whether it computes in 8-bit floats.
        pad_inner_dim: Pad the inner dimension of products to a multiple of 16; True if None.
        enable_fsdp_float8_all_gather: Under FSDP, gather weights in 8-bit floats; True if None.
    """

    config: Any = None
    module_filter_func: Callable[[nn.Module, str], bool] | None = None
    pad_inner_dim: bool | None = None
    enable_fsdp_float8_all_gather: bool | None = None

    def precision(self) -> FP8:
        """The precision that these options mean."""
        if self.config is not None:
            # A filter takes the place of Accelerate's own, which keeps the first and the last layer.
            return FP8(
                config=self.config,
                filter=self.module_filter_func,
                keep_first_and_last=self.module_filter_func is None,
            )
        return FP8(
            pad_inner_dim=self.pad_inner_dim is not False,
            float8_all_gather=self.enable_fsdp_float8_all_gather is not False,
            filter=self.module_filter_func,
            keep_first_and_last=self.module_filter_func is None,
        )


@dataclass
class TERecipeKwargs(FP8Handler):
    """Options of TransformerEngine; None is Accelerate's default: HYBRID, a history of 1024, the most recent value."""

    use_autocast_during_eval: bool | None = None
    margin: int | None = None
    interval: int | None = None
    fp8_format: str | None = None
    amax_history_len: int | None = None
    amax_compute_algo: str | None = None
    override_linear_precision: tuple[bool, bool, bool] | None = None
    use_mxfp8_block_scaling: bool | None = None

    def precision(self) -> FP8:
        """The precision that these options mean."""
        given = {field.name: getattr(self, field.name) for field in fields(TERecipeKwargs)}
        return FP8.from_config({"backend": "te", **given})


@dataclass
class MSAMPRecipeKwargs(FP8Handler):
    """Options of MS-AMP; `opt_level` is `"O1"` or `"O2"`, the default."""

    opt_level: str | None = None

    def precision(self) -> FP8:
        """The precision that these options mean."""
        return FP8.from_config({"backend": "msamp", "opt_level": self.opt_level})


@dataclass
class FP8RecipeKwargs(TERecipeKwargs):
    """Accelerate's older holder for both; `backend` is `"te"`, the default, or `"msamp"`."""

    opt_level: str | None = None
    backend: str | None = None

    def precision(self) -> FP8:
        """The precision that these options mean."""
        if check_choice("FP8RecipeKwargs(backend)", self.backend or "te", ("te", "msamp")) == "msamp":
            return MSAMPRecipeKwargs(self.opt_level).precision()
        return super().precision()
