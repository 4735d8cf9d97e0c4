"""What Lightning's Trainer does with its arguments before it uses them."""

from __future__ import annotations

import ast
import inspect
import os
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from drivetrain.compat.lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn
from drivetrain.trainer import Trainer as CoreTrainer
from drivetrain.trainer.options import Option

_NOTHING_AROUND = {
    "enable_checkpointing": (None, False),
    "logger": (None, False),
    "enable_progress_bar": (None, False),
    "enable_model_summary": (None, False),
    "log_every_n_steps": (None, 0),
    "num_sanity_val_steps": (None, 0),
    "fast_dev_run": (False,),
    "detect_anomaly": (False,),
    "profiler": (None,),
}

_LIMITS = {
    "overfit_batches": "per epoch",
    "limit_train_batches": "per epoch",
    "limit_val_batches": "in each validation",
    "limit_test_batches": "in each test",
    "limit_predict_batches": "in each prediction",
}


def from_environment(init: Callable[..., None]) -> Callable[..., None]:
    """Let variables such as `PL_TRAINER_MAX_EPOCHS` stand for arguments that are not given.

    Args:
        init: The constructor.
    """

    @wraps(init)
    def wrapped(self: Any, **given: Any) -> None:
        names = {*inspect.signature(init).parameters, *inspect.signature(CoreTrainer.__init__).parameters} - {"self"}
        found = {name: os.environ[f"PL_TRAINER_{name.upper()}"] for name in names if _is_set(name)}
        init(self, **{**{name: _value(text) for name, text in found.items()}, **given})

    # Programs make options of the arguments that they find in the signature.
    known = {**inspect.signature(CoreTrainer.__init__).parameters, **inspect.signature(init).parameters}
    named = [each for each in known.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    vars(wrapped)["__signature__"] = inspect.Signature(named)
    return wrapped


def _is_set(name: str) -> bool:
    return f"PL_TRAINER_{name.upper()}" in os.environ


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def check_barebones(given: Mapping[str, Any]) -> None:
    """Refuse what stands around the loop in a Trainer that has nothing there.

    Args:
        given: The Trainer's arguments by name.

    Raises:
        ValueError: One of them is in the way.
    """
    for name, allowed in _NOTHING_AROUND.items():
        value = given.get(name, allowed[0])
        if not any(value is each or (value == each and not isinstance(value, bool)) for each in allowed):
            raise ValueError(
                f"`Trainer(barebones=True, {name}={value!r})` was passed, but a barebones run has nothing around its "
                f"loop. Leave {name} or barebones out."
            )
    rank_zero_info(
        "You are running in `Trainer(barebones=True)` mode: no loggers, checkpoints, progress bar, model summary or "
        "sanity check, and `self.log` does nothing."
    )


def log_nothing(name: str, *_: Any) -> None:
    """Stand for the `log` of a barebones run, which keeps no values.

    Args:
        name: Of the value.
    """
    rank_zero_warn(
        f"You are logging {name!r}, but `Trainer(barebones=True)` is configured: values are not kept. Leave barebones "
        "out to log.",
        stacklevel=5,
    )


def explain_ones(given: Mapping[str, Any]) -> None:
    """Write what 1 and 1.0 mean, where they are so easily taken for each other.

    Args:
        given: The Trainer's arguments by name.
    """
    for name, where in _LIMITS.items():
        value = given.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and value == 1:
            amount = "1 batch" if isinstance(value, int) else "100% of the batches"
            rank_zero_info(f"`Trainer({name}={value})` was configured so {amount} {where} will be used.")
    value = given.get("val_check_interval")
    if isinstance(value, int | float) and not isinstance(value, bool) and value == 1:
        when = "after every batch" if isinstance(value, int) else "at the end of the training epoch"
        rank_zero_info(f"`Trainer(val_check_interval={value})` was configured so validation will run {when}.")


class Shown(Option[Any]):
    """An option of the Trainer that reads as a number where it was left open.

    Args:
        default: The number.
        left_open: The option's own value where it was left open.
    """

    def __init__(self, default: float, left_open: float | None = None) -> None:
        self._default, self._left_open = default, left_open

    def __get__(self, trainer: Any, owner: type) -> Any:
        value = super().__get__(trainer, owner)
        return self._default if value == self._left_open else value
