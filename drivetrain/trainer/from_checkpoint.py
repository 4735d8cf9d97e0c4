"""Building a task or a data module from a checkpoint, whichever tool wrote it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from drivetrain.trainer.hyper_parameters import arguments_for, hyper_parameters_in, made_of


def build(
    kind: type,
    driver: Mapping[str, Any],
    entry: str,
    hparams_file: str | os.PathLike[str] | None,
    overrides: Mapping[str, Any],
    instantiate: bool = False,
) -> Any:
    """Build an object from the hyper-parameters that a checkpoint has of it.

    Args:
        kind: Its class.
        driver: The Trainer's entries in the checkpoint.
        entry: The name of the hyper-parameters among them.
        hparams_file: A YAML or CSV file of hyper-parameters to take instead of the saved ones.
        overrides: Arguments of the constructor that win over the saved ones. Where the constructor takes the saved ones
            as one argument, those that are no arguments themselves are changed within it.
        instantiate: Whether classes that the hyper-parameters name are imported and called.
    """
    saved = driver.get(entry, {}) if hparams_file is None else hyper_parameters_in(hparams_file)
    whole = driver.get(entry.replace("hyper_parameters", "hparams_name"), driver.get("hparams_name"))
    constructor = driver.get(entry.replace("hyper_parameters", "hparams_constructor"))
    if constructor and hparams_file is None and constructor["class"] == kind.__qualname__:
        values = {**saved, **constructor["values"]}  # a base may have saved another value under the name of an argument
        given = {name: values[name] for name in constructor["names"] if name in values}
        return made_of(kind, given, None, overrides, instantiate)
    arguments = arguments_for(kind, saved, whole)
    if whole not in arguments or whole in saved:
        return made_of(kind, saved, whole, overrides, instantiate)
    own = arguments_for(kind, overrides)
    arguments[whole].update({name: value for name, value in overrides.items() if name not in own})
    return made_of(kind, arguments, None, own, instantiate)
