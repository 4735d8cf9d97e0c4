"""What the launcher was asked for, where the Trainer's arguments leave it open, and where they contradict it."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from drivetrain import Accelerator, ConfigurationError, Trainer
from drivetrain.trainer.setup import logger
from tests.pool import device
from tests.trainer.tasks import Weight, fitted, ones

STEPS = "DRIVETRAIN_GRADIENT_ACCUMULATION_STEPS"


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What is announced, as if it were for the first time."""
    monkeypatch.setattr(logger, "_seen", set())
    caplog.set_level(logging.WARNING, logger=logger.logger.name)
    name = logger.logger.name
    return lambda: [record.getMessage() for record in caplog.records if record.name == name]


# launched with, the Trainer's own argument, the Accelerator's -> micro-batches of a step, what is announced
ACCUMULATION: list[tuple[str | None, int | None, int | None, int, str | None]] = [
    (None, None, None, 1, None),
    ("1", None, None, 1, None),
    ("4", None, None, 4, "the launcher was started with --gradient_accumulation_steps 4"),
    ("4", 2, None, 2, r"Trainer(accumulate_grad_batches=2) replaces the launcher's"),
    ("4", 1, None, 1, r"Trainer(accumulate_grad_batches=1) replaces the launcher's"),
    ("4", 4, None, 4, None),
    (None, None, 2, 2, None),
    ("4", None, 2, 2, None),
    (None, 4, 2, 4, None),
]


@pytest.mark.parametrize(("launched", "given", "engine", "expected", "announced"), ACCUMULATION)
def test_the_window_is_the_trainers_own_else_the_accelerators_else_the_launchers(
    launched: str | None,
    given: int | None,
    engine: int | None,
    expected: int,
    announced: str | None,
    monkeypatch: pytest.MonkeyPatch,
    logged: Any,
) -> None:
    if launched is not None:
        monkeypatch.setenv(STEPS, launched)
    options: dict[str, Any] = {} if given is None else {"accumulate_grad_batches": given}
    if engine is not None:
        options["accelerator"] = Accelerator(device=device(), gradient_accumulation_steps=engine)
    trainer = fitted(Weight(), ones(4), **options)
    assert (trainer.accumulate_grad_batches, trainer.global_step) == (expected, 4 // expected)
    assert [announced in message for message in logged()] == [True] if announced else logged() == []


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        ({"DRIVETRAIN_USE_FSDP": "1"}, "fsdp"),
        (
            {"DRIVETRAIN_USE_PARALLELISM_CONFIG": "1", "DRIVETRAIN_PARALLELISM_CONFIG_TP_SIZE": "2"},
            "parallel",
        ),
    ],
)
def test_sync_batchnorm_under_a_launchers_strategy_is_refused(
    variables: dict[str, str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigurationError, match=rf"sync_batchnorm=True.*the launcher selected strategy='{name}'"):
        Trainer(accelerator=device(), sync_batchnorm=True)
    assert Trainer(accelerator=device(), strategy="ddp", sync_batchnorm=True, logger=False).strategy.name == "single"
