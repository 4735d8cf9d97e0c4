"""Number formats as Lightning's plugins: `Trainer(plugins=...)` takes them for the name of a precision."""

from __future__ import annotations

from typing import Any

from drivetrain.runtime.errors import ConfigurationError


class Precision:
    """A number format.

    Attributes:
        precision: Its name, as `Trainer(precision=...)` takes it.
    """

    precision: str = "32-true"


class MixedPrecision(Precision):
    """Autocast.

    Args:
        precision: `"16-mixed"` or `"bf16-mixed"`.
        device: Taken for Lightning's sake; it is the run's.
        scaler: Taken for Lightning's sake; one is made where it is needed.
    """

    def __init__(self, precision: str, device: str | None = None, scaler: Any = None) -> None:
        _check(precision, ("16-mixed", "bf16-mixed"), type(self).__name__)
        self.precision = precision


class HalfPrecision(Precision):
    """Parameters in half precision.

    Args:
        precision: `"16-true"` or `"bf16-true"`.
    """

    def __init__(self, precision: str = "16-true") -> None:
        _check(precision, ("16-true", "bf16-true"), type(self).__name__)
        self.precision = precision


class DoublePrecision(Precision):
    """Parameters in double precision."""

    precision = "64-true"


class FSDPPrecision(Precision):
    """The number format of a model that is sharded.

    Args:
        precision: `"32-true"`, `"16-true"`, `"bf16-true"`, `"16-mixed"` or `"bf16-mixed"`.
        scaler: Taken for Lightning's sake; one is made where it is needed.
    """

    def __init__(self, precision: str, scaler: Any = None) -> None:
        _check(precision, ("32-true", "16-true", "bf16-true", "16-mixed", "bf16-mixed"), type(self).__name__)
        self.precision = precision


class DeepSpeedPrecision(FSDPPrecision):
    """The number format of a model that DeepSpeed trains.

    Args:
        precision: As for a model that is sharded.
    """

    def __init__(self, precision: str) -> None:
        super().__init__(precision)


class TorchSyncBatchNorm:
    """Batch statistics over all processes; the same as `Trainer(sync_batchnorm=True)`."""


def _check(precision: str, allowed: tuple[str, ...], name: str) -> None:
    if precision not in allowed:
        raise ConfigurationError(f"{name}(precision={precision!r}): allowed are {', '.join(map(repr, allowed))}.")
