"""The arguments of Lightning's `Trainer` with their types, for what makes options of signatures."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any, get_type_hints

from drivetrain.compat.lightning.accelerators import Accelerator
from drivetrain.compat.lightning.plugins import Precision, TorchSyncBatchNorm
from drivetrain.compat.lightning.pytorch import profilers
from drivetrain.trackers import Tracker
from drivetrain.trainer import Trainer as CoreTrainer

_PLUGIN = Precision | TorchSyncBatchNorm | str
_TYPES: dict[str, Any] = {
    "accelerator": str | Accelerator,
    "logger": Tracker | Iterable[Tracker] | bool | None,
    "plugins": _PLUGIN | list[_PLUGIN] | None,
    "precision": str | int | None,
}
"""The types of what the mirror takes beside, or in the place of, what the core does."""


def show_all_arguments(kind: type) -> None:
    """Let the signature of a Trainer's constructor have the core's arguments in the place of `**options`.

    Args:
        kind: The class.
    """
    init: Any = kind.__init__  # type: ignore[misc]
    own = inspect.signature(inspect.unwrap(init)).parameters
    core = inspect.signature(CoreTrainer.__init__).parameters
    types = {**get_type_hints(CoreTrainer.__init__), **get_type_hints(inspect.unwrap(init)), **_TYPES}
    profiler: Any = getattr(profilers, "Profiler", None)
    types["profiler"] = Any if profiler is None else profiler | str | None
    ordered = {**core, **own}  # in the core's order, and then what is only here
    named = [each for each in ordered.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    init.__doc__ = CoreTrainer.__doc__  # which describes the arguments that are not described here
    init.__signature__ = inspect.Signature([each.replace(annotation=types.get(each.name, Any)) for each in named])
