"""Registry of precisions by name."""

from __future__ import annotations

from typing import Literal

from drivetrain.runtime.errors import ConfigurationError, nearest
from drivetrain.strategies.precision.base import Precision
from drivetrain.strategies.precision.fp8.precision import FP8
from drivetrain.strategies.precision.mixed import BFloat16Mixed, Float16Mixed
from drivetrain.strategies.precision.true import BFloat16True, Double, Float16True

PrecisionName = Literal[
    "32",
    "32-true",
    "no",
    "fp32",
    "64",
    "64-true",
    "fp64",
    "double",
    "bf16",
    "bf16-mixed",
    "bf16-true",
    "fp16",
    "16-mixed",
    "16",
    "fp16-true",
    "16-true",
    "fp8",
]
"""Names of the built-in precisions, which editors complete."""

_PRECISIONS: dict[str, type[Precision]] = {}


def register_precision(precision: type[Precision], *, replace: bool = False) -> type[Precision]:
    """Register a `Precision` class under its names.

    Can be used as a class decorator.

    Args:
        precision: The class. Its names are matched in lower case.
        replace: Replace precisions that are already registered under these names.

    Returns:
        The class.

    Raises:
        ConfigurationError: A name is registered and `replace` is False.
    """
    names = [name.lower() for name in (precision.name, *precision.__dict__.get("aliases", ()))]
    taken = [name for name in names if name in _PRECISIONS]
    if taken and not replace:
        raise ConfigurationError(
            f"A precision named {taken[0]!r} is already registered. Give {precision.__name__} another `name`, or pass "
            "replace=True to replace it.",
        )
    _PRECISIONS.update(dict.fromkeys(names, precision))
    return precision


for _precision in (Precision, Double, BFloat16Mixed, BFloat16True, Float16Mixed, Float16True, FP8):
    register_precision(_precision)


def available_precisions() -> list[str]:
    """Return the names of all precisions that can be selected by name, without aliases."""
    return list(dict.fromkeys(precision.name for precision in _PRECISIONS.values()))


def resolve_precision(spec: str | int | Precision | None) -> Precision:
    """Return the precision that a name such as `"bf16"` stands for.

    A `Precision` object is returned unchanged.

    Args:
        spec: A canonical name such as `"bf16"`, an alias such as `"bf16-mixed"`, a number of bits (16, 32 or 64), a
            `Precision`, or None for float32.

    Raises:
        ConfigurationError: No precision has this name.
    """
    if isinstance(spec, Precision):
        return spec
    name = "32" if spec is None else str(spec).lower()
    if name not in _PRECISIONS:
        raise ConfigurationError(
            f"Unknown precision {spec!r}. Allowed: {', '.join(available_precisions())} "
            f"(and {', '.join(sorted(set(_PRECISIONS) - set(available_precisions())))}).{nearest(name, _PRECISIONS)}",
        )
    return _PRECISIONS[name]()
