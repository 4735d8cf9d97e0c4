"""Durations as people write them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from drivetrain import ConfigurationError, Duration
from drivetrain.runtime.durations import Unit, clock_time

WRITTEN: list[tuple[Any, float, Unit]] = [
    ("500 steps", 500, Unit.STEPS),
    ("1 step", 1, Unit.STEPS),
    ("500ba", 500, Unit.STEPS),
    ("2 epochs", 2, Unit.EPOCHS),
    ("2ep", 2, Unit.EPOCHS),
    ("1M samples", 1_000_000, Unit.SAMPLES),
    ("1,500 samples", 1500, Unit.SAMPLES),
    ("1e6 samples", 1_000_000, Unit.SAMPLES),
    ("64sp", 64, Unit.SAMPLES),
    ("50M tokens", 50_000_000, Unit.TOKENS),
    ("1.5B tokens", 1_500_000_000, Unit.TOKENS),
    ("2.3k tokens", 2300, Unit.TOKENS),
    ("3tok", 3, Unit.TOKENS),
    ("10 min", 600, Unit.SECONDS),
    ("1.5h", 5400, Unit.SECONDS),
    ("90s", 90, Unit.SECONDS),
    ("01:02:03:04", 93784, Unit.SECONDS),
    (timedelta(hours=1), 3600, Unit.SECONDS),
    ({"minutes": 2}, 120, Unit.SECONDS),
    ("10%", 0.1, Unit.RUN),
    ("0.25dur", 0.25, Unit.RUN),
    (Duration(3, Unit.STEPS), 3, Unit.STEPS),
]


@pytest.mark.parametrize(("written", "amount", "unit"), WRITTEN, ids=str)
def test_a_duration_is_read_as_it_is_written(written: Any, amount: float, unit: Unit) -> None:
    assert Duration.of(written) == Duration(amount, unit)


@pytest.mark.parametrize(
    ("written", "said"),
    [
        (
            "5 stpes",
            "'stpes' is not a unit. The units are steps, epochs, samples, tokens, s, min, h, d, and % of the run.",
        ),
        ("5 stpes", "Did you mean 'steps'?"),
        ("2 epocs", "Did you mean 'epochs'?"),
        ("10", "the unit is missing"),
        ("5M", "'M' is not a unit"),
        ("1.5 steps", "not a whole number of steps"),
        ("120%", "at most 100 %"),
        ("-3 steps", "is not a duration"),
        ("soon", "is not a duration"),
        ({"weeks_": 2}, "is not a duration"),
        (10, "is not a duration"),
    ],
)
def test_what_is_no_duration_is_refused_with_the_units(written: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said) as raised:
        Duration.of(written, "max_duration")
    assert str(raised.value).startswith("max_duration=")


def test_a_unit_in_capitals_is_the_same_unit() -> None:
    assert Duration.of("5 Minutes") == Duration.of("300 SEC")


def test_only_a_time_is_a_time() -> None:
    assert clock_time("10 min", "max_time") == timedelta(minutes=10)
    with pytest.raises(ConfigurationError, match=r"max_time='2 epochs' is not a time.*10 min"):
        clock_time("2 epochs", "max_time")


def test_a_part_of_a_run_is_in_the_unit_of_the_run() -> None:
    tenth = Duration(0.1, Unit.RUN)
    assert tenth.part_of(Duration(1005, Unit.STEPS)) == Duration(100, Unit.STEPS)
    assert tenth.part_of(Duration(3, Unit.STEPS)) == Duration(1, Unit.STEPS)
    assert tenth.part_of(Duration(5.0, Unit.SECONDS)) == Duration(0.5, Unit.SECONDS)


def test_a_duration_reads_as_people_write_it() -> None:
    texts = ["1,000,000 samples", "1 step", "2 epochs", "600 seconds", "10% of the run"]
    assert [str(Duration.of(text)) for text in ("1M samples", "1ba", "2ep", "10 min", "10%")] == texts
