"""Which batch sizes a search tries."""

from __future__ import annotations

from dataclasses import dataclass

from drivetrain.runtime.errors import ConfigurationError, nearest

MODES = ("power", "binsearch")
"""How the size is raised."""


@dataclass(frozen=True)
class BatchSizeRange:
    """Which batch sizes a search tries, and how; see `BatchSizeFinder`.

    Raises:
        ConfigurationError: If an argument cannot be.
    """

    mode: str = "power"
    steps_per_trial: int = 3
    init_val: int = 2
    max_trials: int = 25
    batch_arg_name: str = "batch_size"
    margin: float = 0.05
    max_val: int = 8192

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ConfigurationError(
                f"mode={self.mode!r}: should be either of {MODES}.{nearest(str(self.mode), MODES)}", code="DT-001"
            )
        for name, least in (("steps_per_trial", 1), ("init_val", 1), ("max_trials", 0), ("max_val", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigurationError(f"{name}={value!r}: give a whole number of at least {least}.", code="DT-002")
        if not 0.0 <= self.margin < 1.0:
            raise ConfigurationError(f"margin={self.margin!r}: give a share from 0.0 to below 1.0.", code="DT-002")

    def next_size(self, fitting: int, lacking: int | None, most: int) -> int | None:
        """The size to try once some have been tried.

        Args:
            fitting: The largest that fits; 0 where none does yet.
            lacking: The smallest that does not; None where all did.
            most: No larger one is tried.

        Returns:
            The size; None where the search is over.
        """
        if lacking is None:
            return min(2 * fitting, most) if fitting < most else None
        if not fitting:
            return lacking // 2 or None
        middle = (fitting + lacking) // 2
        return middle if self.mode == "binsearch" and fitting < middle < lacking else None

    def chosen(self, fitting: int) -> int:
        """What becomes of the largest size that fits: less by the margin, where the search came close to the limit.

        Args:
            fitting: That size.
        """
        return max(1, int(fitting * (1 - self.margin))) if self.mode == "binsearch" else fitting
