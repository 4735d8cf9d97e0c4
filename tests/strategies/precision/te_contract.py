"""A stand-in for TransformerEngine, built from the signatures of its documentation and sources (2.5 and 2.20).

It records what it is asked for and computes in 32 bits: TransformerEngine itself needs an NVIDIA GPU. What holds here
is that the calls fit its API; that its kernels compute well is for the tests marked `gpu`.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Format(Enum):
    E4M3 = "e4m3"
    E5M2 = "e5m2"
    HYBRID = "hybrid"


@dataclass
class DelayedScaling:
    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable[..., Any] = "max"
    scaling_factor_compute_algo: Callable[..., Any] | None = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False


@dataclass
class Float8CurrentScaling:
    fp8_format: Format = Format.HYBRID
    fp8_dpa: bool = False
    fp8_mha: bool = False


@dataclass
class MXFP8BlockScaling:
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False


class State:
    """What TransformerEngine keeps for the process: whether a context is open, and the modules that ran in it."""

    enabled = False
    depth = 0
    recipe: Any = None
    contexts: ClassVar[list[tuple[bool, Any]]] = []
    ran: ClassVar[list[Any]] = []


@contextmanager
def autocast(
    enabled: bool = True,
    calibrating: bool = False,
    recipe: Any = None,
    amax_reduction_group: Any = None,
    _graph: bool = False,
) -> Iterator[None]:
    before = State.enabled, State.recipe
    State.enabled, State.recipe = enabled, recipe
    State.depth += 1
    State.contexts.append((enabled, recipe))
    try:
        yield
    finally:
        State.depth -= 1
        if enabled and State.depth == 0 and torch.is_grad_enabled():
            for module in State.ran:
                module.roll()
            State.ran.clear()
        State.enabled, State.recipe = before


def fp8_autocast(
    enabled: bool = True, calibrating: bool = False, fp8_recipe: Any = None, fp8_group: Any = None, _graph: bool = False
) -> Any:
    return autocast(enabled, calibrating, fp8_recipe, fp8_group, _graph)


class Linear(nn.Module):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        rng_tracker_name: str | None = None,
        init_method: Any = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        parameters_split: Any = None,
        device: torch.device | str = "cuda",
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        self.weight = nn.Parameter(torch.empty(out_features, in_features, device=device, dtype=params_dtype))
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=params_dtype))
        else:
            self.bias = torch.empty(0, device=device, dtype=params_dtype)
        self.fp8_meta: dict[str, Any] = {}
        self.fp8_initialized = False

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        if not State.enabled or (self.fp8_initialized and self.fp8_meta["recipe"] == State.recipe):
            return
        self.fp8_meta["recipe"], self.fp8_meta["num_gemms"] = State.recipe, num_gemms
        if isinstance(State.recipe, DelayedScaling):
            for key in ("scaling_fwd", "scaling_bwd"):
                history = torch.zeros(State.recipe.amax_history_len, 3 * num_gemms)
                self.fp8_meta[key] = types.SimpleNamespace(scale=torch.ones(3 * num_gemms), amax_history=history)
        self.fp8_initialized = True

    def roll(self) -> None:
        """As a context closes: the history moves on by a step, and gives the scale of the next."""
        meta = self.fp8_meta.get("scaling_fwd")
        if meta is not None:
            meta.scale.fill_(448.0).div_(meta.amax_history.amax(0).clamp(min=1e-12))
            meta.amax_history.copy_(meta.amax_history.roll(-1, 0))
            meta.amax_history[0].zero_()

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        self.init_fp8_metadata()
        scale = 1.0
        if State.enabled and "scaling_fwd" in self.fp8_meta:
            meta = self.fp8_meta["scaling_fwd"]
            scale = float(meta.scale[0])
            meta.amax_history[0, 0] = inp.detach().abs().max()
            State.ran.append(self)
        output = F.linear(inp, self.weight, self.bias if self.use_bias else None)
        # The scale of past steps shows in what is computed, as rounding would; 1 is that of the first.
        return output * (1 + 0.05 * (1 - 1 / scale))

    def get_extra_state(self) -> Tensor:
        return torch.zeros(3, dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        raise RuntimeError("Refusing to load pickled Transformer Engine extra state.")


class LayerNorm(nn.Module):
    def __init__(
        self,
        normalized_shape: Any = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        *,
        device: Any = "cuda",
    ) -> None:
        super().__init__()
        self.shape, self.eps = tuple(normalized_shape), eps
        self.weight = nn.Parameter(torch.empty(self.shape, device=device, dtype=params_dtype))
        self.bias = nn.Parameter(torch.empty(self.shape, device=device, dtype=params_dtype))

    def forward(self, input: Tensor) -> Tensor:
        return F.layer_norm(input, self.shape, self.weight, self.bias, self.eps)

    def get_extra_state(self) -> Tensor:
        return torch.zeros(3, dtype=torch.uint8)


def packages(modern: bool, mxfp8: bool = False) -> dict[str, types.ModuleType]:
    """The modules of the package, as `sys.modules` holds them.

    Args:
        modern: As from 2.8 on: `autocast` and `is_fp8_available`, besides what there was before.
        mxfp8: Whether the device computes in MXFP8.
    """
    root, common = types.ModuleType("transformer_engine"), types.ModuleType("transformer_engine.common")
    recipe, pytorch = (
        types.ModuleType("transformer_engine.common.recipe"),
        types.ModuleType("transformer_engine.pytorch"),
    )
    fp8 = types.ModuleType("transformer_engine.pytorch.fp8")
    for kind in (Format, DelayedScaling, Float8CurrentScaling, MXFP8BlockScaling):
        setattr(recipe, kind.__name__, kind)
    block = (mxfp8, "" if mxfp8 else "Device compute capability 10.0 or higher required for MXFP8 execution")
    pytorch.Linear, pytorch.LayerNorm, pytorch.fp8_autocast = Linear, LayerNorm, fp8_autocast
    fp8.check_fp8_support, fp8.check_mxfp8_support = lambda: (True, ""), lambda: block
    if modern:
        pytorch.autocast = autocast
        pytorch.is_fp8_available = lambda return_reason=False: (True, "") if return_reason else True
        pytorch.is_mxfp8_available = lambda return_reason=False: block if return_reason else block[0]
    root.common, common.recipe, root.pytorch, pytorch.fp8 = common, recipe, pytorch, fp8
    return {module.__name__: module for module in (root, common, recipe, pytorch, fp8)}


def install(modern: bool = True, mxfp8: bool = False) -> None:
    """Let this process import the stand-in."""
    sys.modules.update(packages(modern, mxfp8))
    State.contexts, State.ran, State.enabled, State.depth = [], [], False, 0
