"""Which learning rates a search tries."""

from __future__ import annotations

from dataclasses import dataclass

from drivetrain.runtime.errors import ConfigurationError, nearest

MODES = ("exponential", "linear")
"""How the rate is raised."""


@dataclass(frozen=True)
class LRRange:
    """Which learning rates a search tries, and what becomes of the one that it finds; see `LearningRateFinder`.

    Raises:
        ConfigurationError: If an argument cannot be.
    """

    min_lr: float = 1e-8
    max_lr: float = 1.0
    num_training: int = 100
    mode: str = "exponential"
    early_stop_threshold: float | None = 4.0
    update_attr: bool = True
    attr_name: str = ""

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ConfigurationError(
                f"mode={self.mode!r}: should be either of {MODES}.{nearest(str(self.mode), MODES)}", code="DT-001"
            )
        for name in ("min_lr", "max_lr"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
                raise ConfigurationError(f"{name}={value!r}: give a learning rate above 0.", code="DT-002")
        if not isinstance(self.num_training, int) or self.num_training < 1:
            raise ConfigurationError(
                f"num_training={self.num_training!r}: give a whole number of at least 1.", code="DT-002"
            )
        if self.early_stop_threshold is not None and not self.early_stop_threshold > 0:
            raise ConfigurationError(
                f"early_stop_threshold={self.early_stop_threshold!r}: give a number above 0, or None never to stop.",
                code="DT-002",
            )

    def rate(self, number: int) -> float:
        """The rate of one of the steps.

        Args:
            number: Which step, from 0.
        """
        part = (number + 1) / self.num_training if number else 0.0
        if self.mode == "linear":
            return self.min_lr + part * (self.max_lr - self.min_lr)
        return float(self.min_lr * (self.max_lr / self.min_lr) ** part)
