"""What the arguments of `ModelCheckpoint` may be."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, NamedTuple

from drivetrain.callbacks.support.monitored_metric import check_mode
from drivetrain.runtime.durations import Duration, Unit, clock_time, count_of
from drivetrain.runtime.errors import ConfigurationError, nearest

ON_SAVE_ERROR = ("raise", "warn")


def check_options(
    mode: str, save_last: Any, save_top_k: Any, monitor: str | None, total_limit: Any, on_save_error: str
) -> None:
    """Refuse arguments that are out of range or exclude each other."""
    check_mode(mode, "ModelCheckpoint")
    if not isinstance(save_top_k, int) or save_top_k < -1:
        raise ConfigurationError(
            f"ModelCheckpoint(save_top_k={save_top_k!r}): give how many checkpoints to keep, -1 for all or 0 for none. "
            "Must be >= -1.",
            code="DT-002",
        )
    if monitor is None and save_top_k > 1:
        raise ConfigurationError(
            f"ModelCheckpoint(save_top_k={save_top_k}, monitor=None) is not a valid configuration: without monitor= no "
            "checkpoint is better than another. Name a metric, or keep 1 (the newest), -1 (all) or 0 (none). For "
            "the newest few, keep all and give total_limit.",
            code="DT-005",
        )
    if save_last not in (None, True, False, "link", "copy"):
        raise ConfigurationError(
            f"ModelCheckpoint(save_last={save_last!r}): give True, False, 'link' or 'copy'.", code="DT-001"
        )
    if total_limit is not None and (not isinstance(total_limit, int) or total_limit < 1):
        raise ConfigurationError(
            f"ModelCheckpoint(total_limit={total_limit!r}): give how many checkpoints the directory may hold, 1 or "
            "more, or None for any number.",
            code="DT-002",
        )
    if on_save_error not in ON_SAVE_ERROR:
        raise ConfigurationError(
            f"ModelCheckpoint(on_save_error={on_save_error!r}): give 'raise' to end the run where a checkpoint cannot "
            f"be written, or 'warn' to go on.{nearest(str(on_save_error), ON_SAVE_ERROR)}",
            code="DT-001",
        )


class Rhythm(NamedTuple):
    """How often checkpoints are saved: one of these is given.

    Attributes:
        steps: Every so many optimizer steps; 0 for never.
        time: Each time so much time has gone by.
        epochs: Every so many epochs; 0 for never.
        rest: Every so many samples or tokens, or every such part of the run.
    """

    steps: int
    time: timedelta | None
    epochs: int
    rest: Duration | None

    @classmethod
    def of(cls, steps: Any, interval: Any, epochs: Any, every: Any) -> Rhythm:
        """The rhythm that the arguments ask for; an epoch where they ask for none.

        Args:
            steps: `every_n_train_steps`.
            interval: `train_time_interval`.
            epochs: `every_n_epochs`.
            every: The same in any unit.

        Raises:
            ConfigurationError: More than one is given, or one is below zero.
        """
        other = " every= takes the other units."
        steps = count_of(steps, "every_n_train_steps", Unit.STEPS, other)
        epochs = count_of(epochs, "every_n_epochs", Unit.EPOCHS, other)
        time = clock_time(interval, "train_time_interval", other)
        duration = Duration.of(every, "every")
        _check_intervals(steps, time, epochs, duration)
        if duration is None:
            return cls(steps or 0, time, (0 if steps or time else 1) if epochs is None else epochs, None)
        if not duration.amount:
            raise ConfigurationError(f"ModelCheckpoint(every={every!r}): give more than nothing.", code="DT-002")
        return cls(
            int(duration.amount) if duration.unit is Unit.STEPS else 0,
            duration.timedelta if duration.unit is Unit.SECONDS else None,
            int(duration.amount) if duration.unit is Unit.EPOCHS else 0,
            duration if duration.unit in (Unit.SAMPLES, Unit.TOKENS, Unit.RUN) else None,
        )


def _check_intervals(steps: int | None, interval: timedelta | None, epochs: int | None, every: Duration | None) -> None:
    """Refuse more than one rhythm, and numbers below zero."""
    given: dict[str, Any] = {"every_n_train_steps": steps, "train_time_interval": interval, "every_n_epochs": epochs}
    given = {name: value for name, value in given.items() if value}
    if every is not None:
        given["every"] = str(every)
    if len(given) > 1:
        raise ConfigurationError(
            "ModelCheckpoint: Combination of parameters every_n_train_steps, every_n_epochs and train_time_interval, "
            f"and every: give one of them, not {', '.join(f'{name}={value!r}' for name, value in given.items())}. For "
            "several rhythms, use several ModelCheckpoints.",
            code="DT-004",
        )
    for name, value in (("every_n_train_steps", steps), ("every_n_epochs", epochs)):
        if value is not None and value < 0:
            raise ConfigurationError(f"ModelCheckpoint({name}={value}): Must be >= 0, where 0 is never.", code="DT-002")
