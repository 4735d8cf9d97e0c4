"""Act when the loss jumps far above what it was."""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Any

from drivetrain.callbacks.guards.guard import Guard
from drivetrain.runtime.durations import Duration
from drivetrain.runtime.errors import ConfigurationError

if TYPE_CHECKING:
    from torch import Tensor

    from drivetrain.trainer.trainer import Trainer

NORMAL_MAD = 0.6745
"""The median absolute deviation of a normal distribution, in standard deviations."""

SMALLEST_SPREAD = 1e-3
"""The least spread, as a share of the median: where a loss stands still, noise is no spike."""


class LossSpikeGuard(Guard):
    """Stops, skips or goes back when the loss is far above its last values.

    How far is measured by the modified z-score of Iglewicz and Hoaglin (How to Detect and Handle Outliers, ASQC, 1993),
    `0.6745 * (x - median) / MAD`, where MAD is the median absolute deviation from the median. Neither is moved by
    a few outliers, as mean and standard deviation would be. Only values above the median count, and spikes do not
    enter the window. All processes judge the mean over all of them.

    Values that are not finite are left to `NaNGuard`.

    Args:
        monitor: `"loss"` for what `training_step` returns, or the name of a metric that it logs.
        window: How many of the last values to compare with. Nothing is judged before half of them are there.
        threshold: The score from which on a value is a spike. The book calls 3.5 an outlier; losses have longer
            tails.
        action: `"stop"`, `"skip"` or `"rollback"`, see `NaNGuard`.
        max_rollbacks: After so many of them the run ends with an error.
        every_n_steps: Read the values every so many steps, or in another unit: `"1M samples"`, `"1 min"`; 1 for
            `"skip"`.
        max_skips: After so many steps in a row that were left out the run ends with an error.

    Attributes:
        rollbacks: How often the run went back.
        skipped: The batches that were left out: (epoch, index in the epoch).

    Raises:
        ConfigurationError: If an argument is out of range, or cannot go with the run.
        DrivetrainError: During the run, by `action`.

    Example:
        ```python
        from drivetrain import LossSpikeGuard, Trainer

        trainer = Trainer(callbacks=[LossSpikeGuard(window=200, action="skip")])
        ```
    """

    def __init__(
        self,
        monitor: str = "loss",
        window: int = 100,
        threshold: float = 6.0,
        action: str = "stop",
        max_rollbacks: int = 3,
        every_n_steps: int | str | Duration = 1,
        max_skips: int = 20,
    ) -> None:
        self.window = window
        super().__init__(monitor, action, max_rollbacks, max_skips, every_n_steps)
        if not isinstance(window, int) or window < 4:
            raise ConfigurationError(
                f"LossSpikeGuard(window={window!r}): give how many values to compare with, 4 or more.", code="DT-002"
            )
        if not threshold > 0:
            raise ConfigurationError(
                f"LossSpikeGuard(threshold={threshold!r}): give a score above 0, such as 6.", code="DT-002"
            )
        self.threshold = threshold

    def forget_run(self) -> None:
        super().forget_run()
        self._values: deque[float] = deque(maxlen=self.window)

    def measure(self, trainer: Trainer, value: Tensor) -> Tensor:
        return value

    def judge(self, value: float) -> str | None:
        if not math.isfinite(value):
            return None
        if len(self._values) >= self.window // 2:
            score, median = modified_z_score(value, self._values)
            if score > self.threshold:
                what = "the loss" if self.monitor == "loss" else self.monitor
                return f"{what} is {value:.6g}, {score:.1f} robust deviations above the median {median:.6g}"
        self._values.append(value)
        return None

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "values": list(self._values)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._values = deque(state_dict["values"], maxlen=self.window)


def modified_z_score(value: float, values: Any) -> tuple[float, float]:
    """Return the modified z-score of a value among others, and their median (Iglewicz and Hoaglin, 1993)."""
    import statistics  # here: it imports fractions and decimals, which no other part needs

    median = statistics.median(values)
    deviation = statistics.median(abs(each - median) for each in values)
    spread = max(deviation / NORMAL_MAD, SMALLEST_SPREAD * abs(median), 1e-12)
    return (value - median) / spread, median
