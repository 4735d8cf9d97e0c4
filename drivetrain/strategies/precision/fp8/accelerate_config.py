"""Accelerate's `fp8_config`, in both spellings of its keys, in the words of `FP8`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drivetrain.runtime.errors import ConfigurationError, nearest
from drivetrain.runtime.logging import get_logger
from drivetrain.strategies.precision.fp8.base import check_choice

logger = get_logger(__name__)

# The questionnaire writes the longer names, the launcher's flags and the handlers have the shorter ones.
_SPELLINGS = {
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
    """Arguments of `FP8` for an `fp8_config`.

    What the config leaves out is as in Accelerate, so a run that moves over computes the same layers.

    Args:
        config: Its keys, with or without their `fp8_`.

    Raises:
        ConfigurationError: A key is unknown, belongs to another backend, or its value cannot be.
    """
    given: dict[str, Any] = {}
    for key, value in config.items():
        short = str(key).removeprefix("fp8_")
        name = _SPELLINGS.get(short, short)
        if name not in _KNOWN:
            allowed = sorted({*_KNOWN, *_SPELLINGS})
            raise ConfigurationError(
                f"Unknown key {key!r} in fp8_config. Allowed: {', '.join(allowed)} (with or without their fp8_)."
                f"{nearest(short, allowed)}",
                code="DT-006",
            )
        if value is None:
            continue
        if name in given and given[name] != value:
            raise ConfigurationError(
                f"fp8_config gives {name} twice, in both spellings: {given[name]!r} and {value!r}.", code="DT-004"
            )
        given[name] = value
    backend = _backend(given.pop("backend", None), given)
    strange = sorted(set(given) - set(_KEYS[backend]))
    if strange:
        raise ConfigurationError(
            f"fp8_config has {', '.join(strange)}, but its backend is {backend!r}, which takes: "
            f"{', '.join(_KEYS[backend])}.",
            code="DT-006",
        )
    return {"torchao": _torchao, "te": _te, "msamp": _msamp}[backend](given)


def _backend(named: Any, given: Mapping[str, Any]) -> str:
    """The backend by its name, else the one that the keys belong to."""
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
        logger.warning_once(f"fp8_interval={given['interval']} changes nothing: scales are computed in every step.")
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
                f"{', '.join(history)} have no meaning with use_mxfp8_block_scaling=true, which keeps no history. "
                "Leave them out.",
                code="DT-004",
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
            f"override_linear_precision={value!r}: TransformerEngine 2 computes all three products of a layer in 8-bit "
            "floats. Leave it out, or use FP8(backend='torchao', recipe='rowwise_gw_hp'), which keeps the gradient of "
            "the weight in high precision.",
            code="DT-008",
        )


def _number(key: str, value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        raise ConfigurationError(f"fp8_{key}={value!r}: give a whole number.", code="DT-003") from None


def _boolean(key: str, value: Any) -> bool:
    known = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if str(value).strip().lower() not in known:
        raise ConfigurationError(f"fp8_{key}={value!r}: give true or false.", code="DT-001")
    return known[str(value).strip().lower()]
