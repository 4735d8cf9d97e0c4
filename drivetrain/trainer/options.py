"""Checked options of the Trainer: duration, limits and intervals of a run."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Generic, TypeVar, overload

from drivetrain.runtime import observer
from drivetrain.runtime.durations import Duration, Unit, clock_time, count_of, interval_of
from drivetrain.runtime.errors import ArgumentTypeError, ConfigurationError, nearest, unknown_argument

T = TypeVar("T")

Limit = int | float | None
"""Limit on the batches of a loader: a number of batches, a fraction of them, or None for all."""
LimitPerLoader = int | float | list[Limit] | dict[str, Limit] | None
"""Limit for all loaders of an evaluation, or one per loader, in their order or by name."""

CLIPPING = ("norm", "value")
ON_INTERRUPT = ("raise", "return")


@dataclass(frozen=True)
class TrainerOptions:
    """Checked options of a Trainer, such as `max_epochs`: durations, limits and intervals.

    `Trainer` documents each option.
    """

    max_epochs: int = 1000
    min_epochs: int | None = None
    max_steps: int = -1
    min_steps: int | None = None
    max_time: timedelta | None = None
    max_duration: Duration | None = None
    limit_train_batches: int | float | None = None
    limit_val_batches: LimitPerLoader = None
    limit_test_batches: LimitPerLoader = None
    limit_predict_batches: LimitPerLoader = None
    overfit_batches: int | float = 0.0
    val_check_interval: int | float | timedelta | Duration | None = None
    check_val_every_n_epoch: int | None = 1
    num_sanity_val_steps: int = 2
    log_every_n_steps: int | Duration = 50
    accumulate_grad_batches: int = 1
    gradient_clip_val: int | float | None = None
    gradient_clip_algorithm: str | None = None
    inference_mode: bool = True
    use_distributed_sampler: bool = True
    detect_anomaly: bool = False
    barebones: bool = False
    fast_dev_run: int | bool = False
    reload_dataloaders_every_n_epochs: int = 0
    auto_micro_batch: bool = False
    default_root_dir: str = "."
    on_interrupt: str = "raise"

    def __post_init__(self) -> None:
        for name in _LIMITS:
            value = getattr(self, name)
            per_loader = name in _PER_LOADER and isinstance(value, list | tuple | Mapping)
            for each in (value.values() if isinstance(value, Mapping) else value) if per_loader else (value,):
                # 1 means one batch and 1.0 all of them, so the type decides. True is no count.
                whole = isinstance(each, int) and not isinstance(each, bool) and each >= 0
                fraction = isinstance(each, float) and 0.0 <= each <= 1.0
                if not (each is None or whole or fraction):
                    more = ", or a list or dict with one per loader" if name in _PER_LOADER else ""
                    raise ConfigurationError(
                        f"`Trainer` was passed invalid value {name}={value!r}. Use a whole number of batches (10), or "
                        f"a fraction from 0.0 to 1.0 (0.25){more}.",
                    )
        for name, least in _COUNTS.items():
            value = getattr(self, name)
            if value is None or isinstance(value, Duration):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                kind = "an int >= 0" if least == 0 else "an integer"
                raise ConfigurationError(
                    f"{name}={value!r} is not valid: `{name}` must be a non-negative integer or -1."
                    if least < 0
                    else f"{name}={value!r} should be {kind}. Use a whole number of at least {least}.",
                )
        if self.gradient_clip_val is not None or self.gradient_clip_algorithm is not None:
            check_clipping(self.gradient_clip_val, self.gradient_clip_algorithm)
        if self.val_check_interval is not None:
            check_validation_interval(self.val_check_interval)
        if isinstance(self.val_check_interval, float) and self.check_val_every_n_epoch is None:
            raise ConfigurationError(
                f"val_check_interval={self.val_check_interval!r} is a fraction of an epoch. `val_check_interval` "
                "should be an integer or a time-based duration (str 'DD:HH:MM:SS', datetime.timedelta, or dict kwargs "
                "for timedelta) when `check_val_every_n_epoch=None`. Other durations ('1000 steps') are allowed too.",
            )
        if self.on_interrupt not in ON_INTERRUPT:
            raise ConfigurationError(
                f"on_interrupt={self.on_interrupt!r} is not valid. Use 'raise' to raise KeyboardInterrupt after "
                "Ctrl-C, once a checkpoint is saved, or 'return' to return from "
                f"fit().{nearest(str(self.on_interrupt), ON_INTERRUPT)}",
            )

    @classmethod
    def from_arguments(cls, given: Mapping[str, Any]) -> TrainerOptions:
        """Create the options from the constructor arguments of a Trainer, and check them."""
        chosen = {each.name: given[each.name] for each in fields(cls) if given[each.name] is not None}
        # None has a meaning here: count batches across epochs. So it must not fall back to the default.
        chosen["check_val_every_n_epoch"] = given["check_val_every_n_epoch"]
        root = os.path.expanduser(os.fspath(given["default_root_dir"] or Path.cwd()))
        chosen["default_root_dir"] = root if observer.current is None else observer.current.directory(root)
        if given["fast_dev_run"] < 0:
            raise ConfigurationError(
                f"fast_dev_run={given['fast_dev_run']} should be >= 0. It is the number of batches to run of each "
                "stage.",
            )
        options = cls(**resolve_durations(chosen))
        # The default of 1000 epochs would end a run with another limit too early.
        if given["max_epochs"] is None and options.has_end_without_epochs:
            options = replace(options, max_epochs=-1)
        if given["barebones"]:
            options = replace(options, num_sanity_val_steps=0, log_every_n_steps=0)
        return options._for_development(int(given["fast_dev_run"])) if given["fast_dev_run"] else options

    def _for_development(self, runs: int) -> TrainerOptions:
        limits = dict.fromkeys(_LIMITS[:4], runs)
        return replace(
            self,
            max_epochs=1,
            max_steps=runs,
            max_duration=None,
            num_sanity_val_steps=0,
            log_every_n_steps=0 if self.barebones else 1,
            val_check_interval=None,
            check_val_every_n_epoch=1,
            **limits,  # type: ignore[arg-type]
        )

    @property
    def has_end_without_epochs(self) -> bool:
        limits = (self.max_time, self.max_duration)
        return self.max_steps >= 0 or any(limit is not None for limit in limits)

    @property
    def is_quiet(self) -> bool:
        """True if the run writes neither to trackers nor checkpoints: `fast_dev_run` or `barebones`."""
        return bool(self.fast_dev_run) or self.barebones


_LIMITS = ("limit_train_batches", "limit_val_batches", "limit_test_batches", "limit_predict_batches", "overfit_batches")
_PER_LOADER = _LIMITS[1:4]
_COUNTS = {
    "max_epochs": -1,
    "min_epochs": 0,
    "max_steps": -1,
    "min_steps": 0,
    "check_val_every_n_epoch": 1,
    "num_sanity_val_steps": -1,
    "log_every_n_steps": 0,
    "accumulate_grad_batches": 1,
    "reload_dataloaders_every_n_epochs": 0,
}


class Option(Generic[T]):
    """Descriptor that makes an option an attribute of the Trainer and checks assigned values."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, trainer: None, owner: type) -> Option[T]: ...
    @overload
    def __get__(self, trainer: OptionAttributes, owner: type) -> T: ...
    def __get__(self, trainer: OptionAttributes | None, owner: type) -> Option[T] | T:
        if trainer is None:
            return self
        # Options are immutable. An assignment replaces all of them and checks each again.
        value: T = getattr(trainer.options, self._name)
        return value

    def __set__(self, trainer: OptionAttributes, value: T) -> None:
        trainer.change_options(**{self._name: value})


class OptionAttributes:
    options: TrainerOptions

    max_epochs = Option[int]()
    min_epochs = Option["int | None"]()
    max_steps = Option[int]()
    min_steps = Option["int | None"]()
    max_time = Option["timedelta | None"]()
    max_duration = Option["Duration | None"]()
    limit_train_batches = Option["int | float | None"]()
    limit_val_batches = Option["LimitPerLoader"]()
    limit_test_batches = Option["LimitPerLoader"]()
    limit_predict_batches = Option["LimitPerLoader"]()
    overfit_batches = Option["int | float"]()
    val_check_interval = Option["int | float | timedelta | Duration | None"]()
    check_val_every_n_epoch = Option["int | None"]()
    num_sanity_val_steps = Option[int]()
    log_every_n_steps = Option["int | Duration"]()
    accumulate_grad_batches = Option[int]()
    gradient_clip_val = Option["int | float | None"]()
    gradient_clip_algorithm = Option["str | None"]()
    inference_mode = Option[bool]()
    use_distributed_sampler = Option[bool]()
    detect_anomaly = Option[bool]()
    barebones = Option[bool]()
    fast_dev_run = Option["int | bool"]()
    reload_dataloaders_every_n_epochs = Option[int]()
    auto_micro_batch = Option[bool]()
    default_root_dir = Option[str]()
    on_interrupt = Option[str]()

    @property
    def validates_whole_epochs(self) -> bool:
        """True if `fit` validates only at the end of epochs.

        A `val_check_interval` of 1.0 means an epoch, and 1 means every batch.
        """
        interval = self.val_check_interval
        return interval is None or (isinstance(interval, float) and interval == 1.0)

    def change_options(self, **changed: Any) -> None:
        known = [each.name for each in fields(TrainerOptions)]
        for unknown in changed.keys() - set(known):
            raise unknown_argument("Trainer.change_options", unknown, known)
        self.options = replace(self.options, **resolve_durations(changed))


def check_clipping(value: float | None, algorithm: str | None) -> None:
    """Raise an error if `gradient_clip_val` or `gradient_clip_algorithm` is invalid."""
    if algorithm is not None and algorithm not in CLIPPING:
        raise ConfigurationError(
            f"`gradient_clip_algorithm` {algorithm} is invalid. Allowed: {', '.join(CLIPPING)}."
            f"{nearest(str(algorithm), CLIPPING)}",
        )
    if value is not None and not isinstance(value, int | float):
        raise ArgumentTypeError(
            f"`gradient_clip_val` should be an int or a float of at least 0, or None, got {value!r}."
        )
    # NaN is not below 0, so it needs its own check.
    if value is not None and (math.isnan(value) or value < 0):
        raise ConfigurationError(f"gradient_clip_val={value!r} is not valid. Use a number of at least 0, or None.")


def check_validation_interval(interval: Any) -> None:
    """Raise an error unless `val_check_interval` is a count, a fraction or a duration."""
    if isinstance(interval, timedelta | Duration):
        return
    whole = isinstance(interval, int) and not isinstance(interval, bool) and interval >= 1
    fraction = isinstance(interval, float) and 0.0 < interval <= 1.0
    if not (whole or fraction):
        raise ConfigurationError(
            f"`Trainer` was passed invalid value val_check_interval={interval!r}. Use a whole number of batches, a "
            "fraction of an epoch (0.25), or a duration ('1000 steps', '1M samples', '10 min').",
        )


_LIMIT_OF = {Unit.STEPS: "max_steps", Unit.EPOCHS: "max_epochs", Unit.SECONDS: "max_time"}


def resolve_durations(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the Trainer options with durations converted, such as `max_duration="100 steps"` to `max_steps=100`.

    `max_duration` keeps only samples and tokens, which no other option counts.
    """
    chosen = dict(given)
    if "max_time" in chosen:
        chosen["max_time"] = clock_time(chosen["max_time"], "max_time", " max_duration takes the other units.")
    for name in ("check_val_every_n_epoch", "reload_dataloaders_every_n_epochs"):
        if isinstance(chosen.get(name), str | Duration):
            other = " val_check_interval takes the other units." if name.startswith("check") else ""
            chosen[name] = count_of(chosen[name], name, Unit.EPOCHS, other)
    if isinstance(chosen.get("log_every_n_steps"), str | dict | timedelta | Duration):
        chosen["log_every_n_steps"] = interval_of(chosen["log_every_n_steps"], "log_every_n_steps")
    limit = chosen.get("max_duration")
    if limit is not None:
        limit = Duration.of(limit, "max_duration")
        assert limit is not None
        # Unit.RUN is a fraction of the run.
        if limit.unit is Unit.RUN:
            raise ConfigurationError(
                f"max_duration={given['max_duration']!r} is a fraction of the run, so it cannot limit the run. Use "
                "'500 steps', '2 epochs', '1M samples', '50M tokens' or '10 min'.",
            )
        # Steps, epochs and time have an option of their own; samples and tokens stay here.
        counted = _LIMIT_OF.get(limit.unit)
        if counted is not None and chosen.get(counted) not in (None, -1):
            raise ConfigurationError(
                f"max_duration={given['max_duration']!r} and {counted}={chosen[counted]!r} limit the same quantity. "
                "Use only one of them.",
            )
        chosen["max_duration"] = limit if counted is None else None
        if counted is not None:
            chosen[counted] = limit.timedelta if limit.unit is Unit.SECONDS else limit.amount
    interval = chosen.get("val_check_interval")
    if isinstance(interval, str | dict | Duration):
        _read_interval(chosen, Duration.of(interval, "val_check_interval"), interval)
    return chosen


def _read_interval(chosen: dict[str, Any], interval: Duration | None, written: Any) -> None:
    assert interval is not None
    if not interval.amount:
        raise ConfigurationError(f"val_check_interval={written!r} is not valid. It must be greater than 0.")
    chosen["val_check_interval"] = interval.timedelta if interval.unit is Unit.SECONDS else interval
    if interval.unit is Unit.SECONDS:
        return
    # 1 is the default, which cannot be told from an explicit 1.
    if chosen.get("check_val_every_n_epoch") not in (None, 1):
        raise ConfigurationError(
            f"val_check_interval={written!r} counts across epochs, so it cannot be combined with "
            f"check_val_every_n_epoch={chosen['check_val_every_n_epoch']}. Remove one of them.",
        )
    chosen["check_val_every_n_epoch"] = None
    if interval.unit is Unit.EPOCHS:
        chosen |= {"val_check_interval": None, "check_val_every_n_epoch": interval.amount}
