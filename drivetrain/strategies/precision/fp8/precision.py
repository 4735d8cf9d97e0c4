"""`FP8` precision: linear layers in float8, and other operations in bfloat16 or float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import nn
from torch.optim import Optimizer

from drivetrain.runtime.devices import DeviceKind
from drivetrain.runtime.errors import ConfigurationError, nearest
from drivetrain.runtime.logging import get_logger
from drivetrain.strategies.precision.fp8.base import FP8Backend, LayerFilter, check_choice, choose_layers, listed
from drivetrain.strategies.precision.fp8.msamp import MSAMP
from drivetrain.strategies.precision.fp8.te import TransformerEngine
from drivetrain.strategies.precision.fp8.torchao import TorchAO
from drivetrain.strategies.precision.mixed import MixedPrecision
from drivetrain.strategies.precision.true import refuse_without_bf16
from drivetrain.strategies.step_module import StepModule

logger = get_logger(__name__)

BACKENDS: dict[str, type[FP8Backend]] = {kind.name: kind for kind in (TorchAO, TransformerEngine, MSAMP)}
_SPELLINGS = {"ao": "torchao", "transformer-engine": "te", "transformer_engine": "te", "ms-amp": "msamp"}
_BASES = ("bf16", "32")


class FP8(MixedPrecision):
    """Precision that computes linear layers in float8.

    Method: Micikevicius et al., 2022, https://arxiv.org/abs/2209.05433. Parameters, gradients and optimizer state keep
    the model's dtype, usually float32. Checkpoints and exports have the names of the unconverted model.

    Args:
        backend: `"torchao"`, `"te"` (TransformerEngine), `"msamp"`, or a backend object such as `TorchAO()`.
        recipe: How values are scaled into float8's range. None selects the backend's default. torchao: `"tensorwise"`,
            `"rowwise"`, `"rowwise_gw_hp"`. te: `"delayed"`, `"current"`, `"mxfp8"`. msamp: `"O1"`, `"O2"`.
        filter: Function of a linear layer and its name that returns True to convert the layer. None converts all.
        keep_first_and_last: Do not convert the first and the last linear layer.
        multiple_of: Convert only layers whose sizes are multiples of this number. With tensor parallelism over n
            processes, give 16 n.
        base: Precision of other operations: `"bf16"` for autocast to bfloat16, or `"32"`.
        cache_enabled: Cache autocast's cast copies of weights within one forward pass.
        **options: Further arguments of the backend's class.

    Attributes:
        backend: The backend object.

    Raises:
        ConfigurationError: An option is invalid.

    Example:
        ```python
        from drivetrain import FP8, Accelerator

        accelerator = Accelerator(cpu=True, mixed_precision=FP8(recipe="rowwise", base="32"))
        ```
    """

    name = "fp8"
    dtype = torch.bfloat16

    def __init__(
        self,
        backend: str | FP8Backend = "torchao",
        recipe: str | None = None,
        *,
        filter: LayerFilter | None = None,
        keep_first_and_last: bool = True,
        multiple_of: int = 16,
        base: str = "bf16",
        cache_enabled: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(cache_enabled)
        if multiple_of < 1:
            raise ConfigurationError(f"multiple_of={multiple_of} must be a positive number, such as 16.")
        self.backend = _make_backend(backend, recipe, options)
        self.base = check_choice("base", base, _BASES)
        self.enabled = self.base == "bf16"
        if not self.enabled:
            self.param_dtype = self.reduce_dtype = None
        self._filter, self._keep_ends, self._multiple_of = filter, keep_first_and_last, multiple_of
        self._converted: list[ReferenceType[nn.Module]] = []

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> FP8:
        """Create an FP8 precision from the section `fp8_config` of a launcher's YAML file.

        Args:
            config: The options by key, with or without the prefix `fp8_`, as in a launcher's YAML file.

        Returns:
            The precision.

        Raises:
            ConfigurationError: A key is unknown, or its value is invalid.
        """
        return cls(**arguments_from(config))

    def setup(self, kind: DeviceKind) -> None:
        self.backend.setup(kind)
        if self.enabled:
            refuse_without_bf16(self.name, kind)
        super().setup(kind)

    def convert(self, model: nn.Module) -> nn.Module:
        bare = _bare(model)
        chosen = choose_layers(bare, self._multiple_of, self._keep_ends, self._filter)
        if chosen.misfits:
            logger.warning_once(
                f"precision='fp8' leaves {len(chosen.misfits)} layer(s) in {self.base}, because their sizes are not "
                f"multiples of {self._multiple_of}: {listed(chosen.misfits)}."
            )
        if chosen.converted:
            self.backend.convert(bare, list(chosen.converted.values()), list(chosen.kept.values()))
            kept = listed(sorted(chosen.kept)) or "none"
            logger.info(
                f"{len(chosen.converted)} linear layers compute in float8 ({self.backend.name}, "
                f"{self.backend.recipe}). Kept in {self.base}: {kept}."
            )
        elif not chosen.before:
            logger.warning_once(
                f"precision='fp8' converts no layer of {type(bare).__name__}, so the model computes in {self.base}. "
                f"Its {len(chosen.kept)} linear layer(s) are excluded by the filter, by their sizes, or as the first "
                "and the last layer (keep_first_and_last=False converts these)."
            )
        if all(known is not bare for known in self._models()):
            self._converted.append(ref(bare))
        return model

    def _models(self) -> list[nn.Module]:
        return [model for held in self._converted if (model := held()) is not None]

    def forward_context(self) -> AbstractContextManager[Any]:
        autocast, inner = super().forward_context(), self.backend.context()
        return autocast if inner is None else _both(autocast, inner)

    def autocast(self, kind: DeviceKind, enabled: bool, cache_enabled: bool) -> AbstractContextManager[Any]:
        return super().autocast(kind, enabled and self.base == "bf16", cache_enabled)

    def prepare_optimizer(self, optimizer: Optimizer) -> Optimizer:
        return self.backend.prepare_optimizer(optimizer, self._models())

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        stepped = super().step(optimizer, closure)
        self.backend.after_step(optimizer)
        return stepped

    def state_dict(self) -> dict[str, Any]:
        state = self.backend.state_dict(self._models())
        return {"backend": self.backend.name, "recipe": self.backend.recipe, "scaling": state} if state else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not state:
            return
        written = (state.get("backend"), state.get("recipe"))
        if written != (self.backend.name, self.backend.recipe):
            logger.warning_once(
                f"The checkpoint's float8 scaling state is for {written}, but this run uses "
                f"{(self.backend.name, self.backend.recipe)}. The state is ignored, and scaling starts from scratch."
            )
            return
        self.backend.load_state_dict(self._models(), state["scaling"])

    def __repr__(self) -> str:
        return f"FP8(backend={self.backend.name!r}, recipe={self.backend.recipe!r}, base={self.base!r})"


def _make_backend(spec: str | FP8Backend, recipe: str | None, options: dict[str, Any]) -> FP8Backend:
    if isinstance(spec, FP8Backend):
        if recipe is not None or options:
            raise ConfigurationError(
                f"recipe and further options require the name of a backend, but backend is a {type(spec).__name__} "
                "object. Pass the options to its constructor.",
            )
        return spec
    spelled = _SPELLINGS.get(str(spec).lower(), spec)
    kind = BACKENDS[check_choice("backend", spelled, tuple(BACKENDS))]
    given = dict(options) if recipe is None else {**options, "recipe": recipe}
    try:
        return kind(**given)
    except TypeError as error:
        allowed = kind.__init__.__annotations__
        raise ConfigurationError(
            f"FP8(backend={kind.name!r}) does not take these options ({error}). Allowed: "
            f"{', '.join(sorted(set(allowed) - {'return'}))}.",
        ) from error


def _bare(model: nn.Module) -> nn.Module:
    # Filters and messages use the layer names of the user's module, without a wrapper's prefix.
    while True:
        if isinstance(model, StepModule):
            model = model.task
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


@contextmanager
def _both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield


# Conversion of an `fp8_config` to arguments of `FP8`


# The launcher's questionnaire writes the longer names, its flags and the keyword handlers use the shorter ones.
_QUESTIONNAIRE_SPELLINGS = {
    "amax_history_length": "amax_history_len",
    "amax_compute_algorithm": "amax_compute_algo",
    "optimization_level": "opt_level",
}
_BACKENDS = {"ao": "torchao", "torchao": "torchao", "te": "te", "msamp": "msamp"}
_KEYS: dict[str, tuple[str, ...]] = {
    "torchao": ("enable_fsdp_float8_all_gather", "pad_inner_dim"),
    "te": (
        "use_autocast_during_eval",
        "margin",
        "interval",
        "format",
        "amax_history_len",
        "amax_compute_algo",
        "override_linear_precision",
        "use_mxfp8_block_scaling",
    ),
    "msamp": ("opt_level",),
}
_KNOWN = {"backend", *(key for keys in _KEYS.values() for key in keys)}


def arguments_from(config: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the `fp8_config` section of a launcher's configuration file to keyword arguments for `FP8`.

    Missing keys have the defaults of the launcher that writes these files, so that the same layers are converted.
    """
    given: dict[str, Any] = {}
    for key, value in config.items():
        short = str(key).removeprefix("fp8_")
        name = _QUESTIONNAIRE_SPELLINGS.get(short, short)
        if name not in _KNOWN:
            allowed = sorted({*_KNOWN, *_QUESTIONNAIRE_SPELLINGS})
            raise ConfigurationError(
                f"Unknown key {key!r} in fp8_config. Allowed: {', '.join(allowed)} (with or without the prefix "
                f"fp8_).{nearest(short, allowed)}",
            )
        if value is None:
            continue
        if name in given and given[name] != value:
            raise ConfigurationError(
                f"fp8_config contains {name} in two spellings: {given[name]!r} and {value!r}. Remove one."
            )
        given[name] = value
    backend = _backend(given.pop("backend", None), given)
    strange = sorted(set(given) - set(_KEYS[backend]))
    if strange:
        raise ConfigurationError(
            f"fp8_config contains {', '.join(strange)}, which the backend {backend!r} does not support. Allowed: "
            f"{', '.join(_KEYS[backend])}.",
        )
    return {"torchao": _torchao, "te": _te, "msamp": _msamp}[backend](given)


def _backend(named: Any, given: Mapping[str, Any]) -> str:
    if named is not None and str(named).upper() != "NO":
        return _BACKENDS[check_choice("fp8_config's backend", named, tuple(_BACKENDS))]
    return next((backend for backend, keys in _KEYS.items() if any(key in keys for key in given)), "torchao")


def _torchao(given: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "backend": "torchao",
        "pad_inner_dim": _boolean("pad_inner_dim", given.get("pad_inner_dim", True)),
        "float8_all_gather": _boolean(
            "enable_fsdp_float8_all_gather", given.get("enable_fsdp_float8_all_gather", True)
        ),
    }


def _te(given: Mapping[str, Any]) -> dict[str, Any]:
    if _number("interval", given.get("interval", 1)) != 1:
        logger.warning_once(f"fp8_interval={given['interval']} has no effect: scales are computed in every step.")
    _refuse_overrides(given.get("override_linear_precision", False))
    arguments: dict[str, Any] = {
        "backend": "te",
        "keep_first_and_last": False,
        "format": str(given.get("format", "HYBRID")).upper(),
        "use_autocast_during_eval": _boolean("use_autocast_during_eval", given.get("use_autocast_during_eval", False)),
    }
    history = {key: given[key] for key in ("amax_history_len", "amax_compute_algo") if key in given}
    if _boolean("use_mxfp8_block_scaling", given.get("use_mxfp8_block_scaling", False)):
        if history:
            raise ConfigurationError(
                f"{', '.join(history)} cannot be combined with use_mxfp8_block_scaling=true, which keeps no history. "
                "Remove one of the two.",
            )
        return {**arguments, "recipe": "mxfp8"}
    return {
        **arguments,
        "recipe": "delayed",
        "margin": _number("margin", given.get("margin", 0)),
        "amax_history_len": _number("amax_history_len", history.get("amax_history_len", 1024)),
        "amax_compute_algo": str(history.get("amax_compute_algo", "most_recent")).lower(),
    }


def _msamp(given: Mapping[str, Any]) -> dict[str, Any]:
    return {"backend": "msamp", "recipe": str(given.get("opt_level", "O2")), "keep_first_and_last": False}


def _refuse_overrides(value: Any) -> None:
    flags = value.split(",") if isinstance(value, str) else value if isinstance(value, list | tuple) else [value]
    if any(_boolean("override_linear_precision", flag) for flag in flags):
        raise ConfigurationError(
            f"override_linear_precision={value!r} is not supported: TransformerEngine 2 computes all three matrix "
            "products of a layer in float8. Remove the key, or use FP8(backend='torchao', recipe='rowwise_gw_hp'), "
            "which computes the gradient of the weight in high precision.",
        )


def _number(key: str, value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        raise ConfigurationError(f"fp8_{key}={value!r} is not supported. Use a whole number.") from None


def _boolean(key: str, value: Any) -> bool:
    known = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if str(value).strip().lower() not in known:
        raise ConfigurationError(f"fp8_{key}={value!r} is not supported. Use true or false.")
    return known[str(value).strip().lower()]
