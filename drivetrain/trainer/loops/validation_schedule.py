"""When validation is due, also after a resume."""

from __future__ import annotations

import math
import time
from datetime import timedelta

from drivetrain.runtime.durations import Duration
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.trainer.state.progress import Progress

FOREVER = float("inf")


class ValidationSchedule:
    """When validation is due: after so many batches, steps, samples or tokens, after a time, or at the end of an epoch.

    Args:
        progress: The counters of the run.
        interval: `val_check_interval`: a number of batches, a fraction of an epoch, a time, a number of steps, samples
            or tokens, or None for the end of an epoch.
        epochs: `check_val_every_n_epoch`: every how many epochs; None counts `interval` across epochs.
        exists: Whether there is anything to validate on.
    """

    def __init__(
        self,
        progress: Progress,
        interval: int | float | timedelta | Duration | None,
        epochs: int | None,
        exists: bool,
    ) -> None:
        self._progress = progress
        self._interval, self._epochs, self._exists = interval, epochs, exists
        self._every: float = FOREVER  # batches
        self._after: timedelta | None = None
        self._counted = interval if isinstance(interval, Duration) else None
        self._limit: float = FOREVER
        self._validated_at = time.monotonic()

    @property
    def follows_a_clock(self) -> bool:
        """Whether validation is due after a time."""
        return self._after is not None

    def set_epoch_length(self, batches: float) -> None:
        """Work out the interval in batches.

        Args:
            batches: How many an epoch has; infinite where this is not known.

        Raises:
            ConfigurationError: There is no such interval in an epoch of this length.
        """
        self._limit = batches
        self._every, self._after = FOREVER, None
        if not self._exists:
            return
        interval = self._interval
        if isinstance(interval, timedelta):
            self._after = interval
        elif isinstance(interval, float) and interval < 1.0:
            if math.isinf(batches):
                raise ConfigurationError(
                    f"val_check_interval={interval} is a fraction, but the training loader's length is not known. "
                    "Give a whole number of batches.",
                    code="DT-096",
                )
            self._every = max(1, int(batches * interval))
        elif isinstance(interval, int):
            if interval > batches and self._epochs is not None:
                raise ConfigurationError(
                    f"val_check_interval={interval} must be less than or equal to the number of the training batches: "
                    f"an epoch has {batches:.0f} batches. Set check_val_every_n_epoch=None to count across epochs.",
                    code="DT-002",
                )
            self._every = interval

    def restart_clock(self) -> None:
        """Measure the time to the next validation from now on."""
        self._validated_at = time.monotonic()

    def record_due(self) -> None:
        """Remember that a validation by the clock begins, for a run that resumes from a save within it."""
        self._progress.due_at = self._progress.total_batches

    def record_validation(self) -> None:
        """Count a validation once its results are there: a checkpoint that its last hooks write includes it."""
        self._progress.validations += 1
        self._progress.validated_at = self._progress.total_batches
        if self._counted is not None:
            self._progress.validated_count = self._progress.count(self._counted.unit)

    # when it is due

    @property
    def is_this_epoch(self) -> bool:
        """Whether the epoch under way is one of those with a validation."""
        return self._exists and (self._epochs is None or (self._progress.epoch + 1) % self._epochs == 0)

    @property
    def is_overdue(self) -> bool:
        """Whether the time since the last validation is over, by this process's clock."""
        return self._after is not None and time.monotonic() - self._validated_at >= self._after.total_seconds()

    @property
    def is_due(self) -> bool:
        """Whether it is due now, after the batch that `next_batch` has named."""
        return self._counted is None or self.is_pending

    @property
    def is_at_epoch_end(self) -> bool:
        """Whether it comes at the end of the epoch under way, where no interval was asked for."""
        if not self.is_this_epoch or self._progress.validated_at == self._progress.total_batches:
            return False
        return self._after is None and self._every == FOREVER and self._epochs is not None

    @property
    def is_pending(self) -> bool:
        """Whether it comes before the next batch; after a resume, the checkpoint was written between the two."""
        progress, every = self._progress, self._every
        if not self.is_this_epoch:
            return False
        if self.follows_a_clock:
            return progress.due_at == progress.total_batches != progress.validated_at
        if self._counted is not None:
            count = progress.count(self._counted.unit)
            return count // self._counted.amount > min(progress.validated_count, count) // self._counted.amount
        if every == FOREVER:
            return False
        done, last = progress.total_batches, max(progress.validated_at, 0)
        if self._epochs is not None:
            before = done - progress.batches_in_epoch
            done, last = done - before, max(last - before, 0)
        return done >= (last // every + 1) * every

    @property
    def follows_this_step(self) -> bool:
        """Whether it follows the step that is being ended."""
        if self.is_at_epoch_end and self._progress.batches_in_epoch >= self._limit:
            return True
        return self.is_pending

    def next_batch(self) -> float:
        """The number of batches in this epoch after which to validate next; infinite where it is not its turn."""
        every, done = self._every, self._progress.batches_in_epoch
        if self._counted is not None and self._exists:
            return done + 1
        if every == FOREVER or not self.is_this_epoch:
            return FOREVER
        if self._epochs is None:
            return done + (every - self._progress.total_batches % every)
        return (done // every + 1) * every
