"""Building a task or a data module from a checkpoint, whichever tool wrote it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, TypeVar

from drivetrain.trainer.hyper_parameters import arguments_for, hyper_parameters_in

T = TypeVar("T")

_OF_COMMAND_LINES = ("_instantiator", "_class_path")


def build(
    kind: type[T],
    driver: Mapping[str, Any],
    entry: str,
    hparams_file: str | os.PathLike[str] | None,
    overrides: Mapping[str, Any],
) -> T:
    """Build an object from the hyper-parameters that a checkpoint has of it.

    Args:
        kind: Its class.
        driver: The Trainer's entries in the checkpoint.
        entry: The name of the hyper-parameters among them.
        hparams_file: A YAML or CSV file of hyper-parameters to take instead of the saved ones.
        overrides: Arguments of the constructor that win over the saved ones. Where the constructor takes the saved ones
            as one argument, those that are no arguments themselves are changed within it.
    """
    saved = dict(driver.get(entry, {}) if hparams_file is None else hyper_parameters_in(hparams_file))
    for name in _OF_COMMAND_LINES:
        saved.pop(name, None)
    given = dict(overrides)
    whole = driver.get("hparams_name")
    arguments = arguments_for(kind, saved, whole)
    if whole in arguments and whole not in saved:
        takes = arguments_for(kind, given)
        arguments[whole].update({name: given.pop(name) for name in list(given) if name not in takes})
    return kind(**{**arguments, **given})
