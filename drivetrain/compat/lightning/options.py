"""Arguments of Lightning's classes that replace Lightning's internals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from drivetrain.compat.lightning.reasons import PLUGIN
from drivetrain.runtime.errors import ConfigurationError

_MACHINERY = ("accelerator", "parallel_devices")
_TAKEN_BY_TRAINER = ("checkpoint_io", "cluster_environment", "precision_plugin", "precision")


def refuse_machinery(given: Mapping[str, Any], owner: str, others: Sequence[str] = ()) -> dict[str, Any]:
    """Remove arguments that are None and would replace Lightning's internals. Raise an error for other values.

    Plugins, which the Trainer reads from the strategy, are removed too.
    """
    refused = (*_MACHINERY, *others)
    for name in refused:
        if given.get(name) is not None:
            raise ConfigurationError(f"{owner}({name}=...) is not taken. {PLUGIN}")
    return {name: value for name, value in given.items() if name not in (*refused, *_TAKEN_BY_TRAINER)}
