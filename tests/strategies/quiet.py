"""A Trainer with nothing around its loop, for tests of what strategies do in it."""

from __future__ import annotations

from typing import Any

from drivetrain import Trainer
from tests.pool import device


def quiet_trainer(strategy: Any, **options: Any) -> Trainer:
    """One epoch on the CPU, unless `options` say otherwise."""
    return Trainer(
        **{
            "accelerator": device(),
            "strategy": strategy,
            "max_epochs": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            **options,
        }
    )
