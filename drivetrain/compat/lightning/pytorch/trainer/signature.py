"""The arguments of Lightning's `Trainer` with their types, for what makes options of signatures."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any, get_type_hints

from drivetrain.callbacks import Callback
from drivetrain.compat.lightning.accelerators import Accelerator
from drivetrain.compat.lightning.plugins import Precision, TorchSyncBatchNorm
from drivetrain.compat.lightning.pytorch.profilers import Profiler
from drivetrain.trackers import Tracker
from drivetrain.trainer import Trainer as CoreTrainer
from drivetrain.trainer.cli.parser import subclasses


class AnyOf(type):
    """The metaclass of a type whose subclasses are another class's, one for each name: the mirror's before the core's.

    jsonargparse refuses a name that several classes have, and what the mirror has is often over a class of that name.
    """

    of: type

    def __subclasscheck__(cls, kind: type) -> bool:
        return issubclass(kind, cls.of)

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, cls.of)

    def __subclasses__(cls) -> list[Any]:
        every = list(subclasses(cls.of))
        mirrored = {each.__name__ for each in every if each.__module__.startswith(_MIRROR)}
        hidden = {each for each in every if each.__name__ in mirrored and not each.__module__.startswith(_MIRROR)}
        return [each for each in every if each not in hidden and not hidden & set(subclasses(each))]


_MIRROR = "drivetrain.compat.lightning."


def any_of(kind: type) -> Any:
    """A type for annotations that stands for a class; see `AnyOf`.

    Args:
        kind: The class.
    """
    return AnyOf(kind.__name__, (), {"of": kind, "__module__": kind.__module__, "__doc__": kind.__doc__})


_PLUGIN = Precision | TorchSyncBatchNorm | str
_CALLBACK, _LOGGER, _PROFILER = any_of(Callback), any_of(Tracker), any_of(Profiler)
_TYPES: dict[str, Any] = {
    "accelerator": str | Accelerator,
    "callbacks": list[_CALLBACK] | _CALLBACK | None,  # type: ignore[valid-type]
    "logger": _LOGGER | Iterable[_LOGGER] | bool | None,  # type: ignore[valid-type]
    "plugins": _PLUGIN | list[_PLUGIN] | None,
    "precision": str | int | None,
    "profiler": _PROFILER | str | None,
}
"""The types of what the mirror takes beside, or in the place of, what the core does."""

_DEFAULTS: dict[str, Any] = {"accumulate_grad_batches": 1}
"""What Lightning's command line expects where the core leaves a value open."""

ONLY_HERE = (
    *("max_duration", "enable_run_report", "num_workers", "auto_micro_batch", "optimizer_in_backward"),
    *("fused_optimizer", "compile", "on_interrupt", "seed", "advise", "suggest_integrations"),
)
"""Arguments that Lightning's `Trainer` does not take, and its command line refuses in a file."""


def show_all_arguments(kind: type) -> None:
    """Show the core's arguments in the signature of a constructor, and types rather than their names in those of verbs.

    Args:
        kind: The class.
    """
    init: Any = kind.__init__  # type: ignore[misc]
    own = inspect.signature(inspect.unwrap(init)).parameters
    core = inspect.signature(CoreTrainer.__init__).parameters
    types = {**get_type_hints(CoreTrainer.__init__), **get_type_hints(inspect.unwrap(init)), **_TYPES}
    ordered = {**core, **own}  # in the core's order, and then what is only here
    named = [
        each.replace(default=_DEFAULTS.get(each.name, each.default))
        for each in ordered.values()
        if each.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    init.__doc__ = CoreTrainer.__doc__  # which describes the arguments that are not described here
    init.__signature__ = inspect.Signature([each.replace(annotation=types.get(each.name, Any)) for each in named])
    for verb in ("fit", "validate", "test", "predict"):
        function = getattr(kind, verb)
        function.__signature__ = inspect.signature(function, eval_str=True)
