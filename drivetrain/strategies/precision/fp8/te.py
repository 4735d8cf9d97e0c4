"""Float8 backend that replaces layers with modules of NVIDIA's TransformerEngine."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.runtime.devices import DeviceKind
from drivetrain.runtime.errors import CheckpointError, ConfigurationError
from drivetrain.strategies.precision.fp8.base import CONVERTED, FP8Backend, check_choice, replace_layers

_FORMATS = ("HYBRID", "E4M3")
_ALGORITHMS = ("max", "most_recent")
_DELAYED_ALONE = ("margin", "amax_history_len", "amax_compute_algo")
_SCALING = ("scaling_fwd", "scaling_bwd")
_HELD = ("scale", "amax_history")


class TransformerEngine(FP8Backend):
    """FP8 backend that uses NVIDIA's TransformerEngine.

    See https://docs.nvidia.com/deeplearning/transformer-engine. It runs on NVIDIA GPUs of the Ada generation or newer.
    """

    name = "te"
    recipes = ("delayed", "current", "mxfp8")

    def __init__(
        self,
        recipe: str = "delayed",
        *,
        format: str = "HYBRID",
        margin: int | None = None,
        amax_history_len: int | None = None,
        amax_compute_algo: str | None = None,
        layer_norm: bool = True,
        use_autocast_during_eval: bool = False,
    ) -> None:
        self.recipe = check_choice("recipe", recipe, self.recipes)
        self.format = check_choice("format", format, _FORMATS)
        if amax_compute_algo is not None:
            amax_compute_algo = check_choice("amax_compute_algo", amax_compute_algo, _ALGORITHMS)
        if amax_history_len is not None and amax_history_len < 1:
            raise ConfigurationError(f"amax_history_len={amax_history_len} must be at least 1.")
        values = (margin, amax_history_len, amax_compute_algo)
        self._delayed = {name: value for name, value in zip(_DELAYED_ALONE, values, strict=True) if value is not None}
        if self._delayed and self.recipe != "delayed":
            raise ConfigurationError(
                f"{', '.join(self._delayed)} can only be used with recipe='delayed', but recipe={self.recipe!r} was "
                "given. Remove the options, or use recipe='delayed'.",
            )
        self.layer_norm, self.in_evaluation = layer_norm, use_autocast_during_eval
        self._te: Any = None
        self._recipe: Any = None

    def setup(self, kind: DeviceKind) -> None:
        elsewhere = (
            "TransformerEngine supports NVIDIA GPUs with compute capability 8.9 or newer"
            + (" (10.0 for recipe='mxfp8')" if self.recipe == "mxfp8" else "")
            + ". FP8(backend='torchao') supports all devices except mps, and emulates float8 if necessary."
        )
        if kind.name != "cuda" and importlib.util.find_spec("transformer_engine") is not None:
            raise ConfigurationError(f"FP8(backend='te') is not supported on {kind.name} devices. {elsewhere}")
        try:
            import transformer_engine.pytorch as te
            from transformer_engine.common import recipe as recipes
        except ImportError as error:
            raise ConfigurationError(
                f"FP8(backend='te') needs TransformerEngine, which could not be imported ({error}). Install it with: "
                f'pip install "transformer-engine[pytorch]". {elsewhere}',
            ) from error
        able, reason = _support(te, self.recipe)
        if not able:
            raise ConfigurationError(
                f"FP8(backend='te', recipe={self.recipe!r}) is not supported on this machine: {reason}. {elsewhere}"
            )
        self._te, self._recipe = te, self._make_recipe(recipes)

    def _make_recipe(self, recipes: Any) -> Any:
        format = getattr(recipes.Format, self.format)
        if self.recipe == "delayed":
            return recipes.DelayedScaling(fp8_format=format, **self._delayed)
        kind = recipes.Float8CurrentScaling if self.recipe == "current" else recipes.MXFP8BlockScaling
        return kind(fp8_format=format)

    def convert(self, model: nn.Module, layers: Sequence[nn.Linear], kept: Sequence[nn.Linear]) -> None:
        linear, norm = _plain(self._te.Linear), _plain(self._te.LayerNorm)
        new: dict[nn.Module, nn.Module] = {}
        for layer in layers:
            new[layer] = linear(
                layer.in_features,
                layer.out_features,
                bias=layer.bias is not None,
                params_dtype=layer.weight.dtype,
                device="meta",  # replace_layers shares the old layer's parameters
            )
        for module in model.modules() if self.layer_norm else ():
            if type(module) is nn.LayerNorm and module.elementwise_affine and module.bias is not None:
                shape = list(module.normalized_shape)
                new[module] = norm(shape, eps=module.eps, params_dtype=module.weight.dtype, device="meta")
        replace_layers(model, new)

    def context(self) -> AbstractContextManager[Any]:
        # This context must be closed before backward, as TransformerEngine updates its scales on exit.
        return self._autocast(self.in_evaluation or torch.is_grad_enabled())

    def _autocast(self, enabled: bool) -> AbstractContextManager[Any]:
        modern = getattr(self._te, "autocast", None)  # 2.8 and newer
        context: AbstractContextManager[Any]
        if modern is not None:
            context = modern(enabled=enabled, recipe=self._recipe)
        else:
            context = self._te.fp8_autocast(enabled=enabled, fp8_recipe=self._recipe)
        return context

    # The history of delayed scaling is saved as tensors: a module's `_extra_state` is a pickle, which checkpoints do
    # not contain.

    def state_dict(self, models: Sequence[nn.Module]) -> dict[str, Any]:
        if self.recipe != "delayed":
            return {}
        return {
            str(index): {name: found for name, module in _modules(model) if (found := _history(module))}
            for index, model in enumerate(models)
        }

    def load_state_dict(self, models: Sequence[nn.Module], state: dict[str, Any]) -> None:
        # With gradients enabled, TransformerEngine would count the end of this context as a step.
        with torch.no_grad(), self._autocast(True):
            for index, model in enumerate(models):
                saved = state.get(str(index), {})
                for name, module in _modules(model):
                    if name in saved:
                        # Creates the tensors to load into, which otherwise exist only after the first forward pass.
                        module.init_fp8_metadata(num_gemms=1)
                        _restore(name, module, saved[name])


def _support(te: Any, recipe: str) -> tuple[bool, str]:
    # Whether the device supports the recipe, and the reason if not.
    block = recipe == "mxfp8"
    modern = getattr(te, "is_mxfp8_available" if block else "is_fp8_available", None)
    if modern is not None:  # 2.8 and newer
        able, reason = modern(return_reason=True)
    else:
        from transformer_engine.pytorch import fp8

        able, reason = (fp8.check_mxfp8_support if block else fp8.check_fp8_support)()
    return able, reason


def _plain(kind: type[nn.Module]) -> type[nn.Module]:
    # State dicts of this class have no float8 entries.
    own = {"get_extra_state": nn.Module.get_extra_state, "set_extra_state": nn.Module.set_extra_state}
    return type(kind.__name__, (kind,), {**own, "__module__": kind.__module__})


def _modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, module in model.named_modules():
        if hasattr(module, CONVERTED) and hasattr(module, "fp8_meta"):
            yield name, module


def _history(module: Any) -> dict[str, dict[str, Tensor]]:
    # Empty before the first forward.
    found = {key: module.fp8_meta[key] for key in _SCALING if key in module.fp8_meta}
    return {key: {name: getattr(meta, name).detach().cpu() for name in _HELD} for key, meta in found.items()}


def _restore(layer: str, module: Any, saved: dict[str, dict[str, Tensor]]) -> None:
    for key, values in saved.items():
        for name, value in values.items():
            target: Tensor = getattr(module.fp8_meta[key], name)
            if target.shape != value.shape:
                raise CheckpointError(
                    f"Shape mismatch for {name} of layer {layer!r}: {tuple(value.shape)} in the checkpoint, but "
                    f"{tuple(target.shape)} in this run. Use the amax_history_len of the saved run."
                )
            target.copy_(value)
