"""Optimizers that a command line chooses, in the place of a task's `configure_optimizers`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MethodType
from typing import Any

from drivetrain.runtime.errors import ConfigurationError
from drivetrain.trainer.cli.instantiation import instantiate_class
from drivetrain.trainer.cli.parser import AUTOMATIC
from drivetrain.trainer.task import Task


def with_class_path(kind: type) -> Callable[[Any], dict[str, Any]]:
    """What makes a configuration of the arguments of one class.

    Args:
        kind: The class.
    """

    def add_class_path(init_args: Any) -> dict[str, Any]:
        return {"class_path": f"{kind.__module__}.{kind.__qualname__}", "init_args": _plain(init_args)}

    return add_class_path


@dataclass(frozen=True)
class ConfiguredOptimizers:
    """A `configure_optimizers` that makes what was chosen, each time that a run begins.

    Attributes:
        optimizer: Configuration of the optimizer.
        lr_scheduler: Configuration of the schedule, if there is one.
        arrange: What makes the return value of them; called with the task, `optimizer` and `lr_scheduler`.
    """

    optimizer: Mapping[str, Any]
    lr_scheduler: Mapping[str, Any] | None
    arrange: Callable[..., Any]

    def __call__(self, task: Task) -> Any:
        """Make them for the parameters that the task has now."""
        optimizer = instantiate_class(task.parameters(), self.optimizer)
        if self.lr_scheduler is None:
            return self.arrange(task, optimizer=optimizer, lr_scheduler=None)
        return self.arrange(task, optimizer=optimizer, lr_scheduler=instantiate_class(optimizer, self.lr_scheduler))


def chosen_configuration(
    added: Mapping[str, tuple[Any, str]], config: Mapping[str, Any], what: str
) -> dict[str, Any] | None:
    """The configuration of the optimizer, or of the schedule, that the command line hands to the task; None without.

    Args:
        added: For each key the class, or several, and where it goes.
        config: What was parsed.
        what: For the message.

    Raises:
        ConfigurationError: There are several.
    """
    automatic = {key: kind for key, (kind, link_to) in added.items() if link_to == AUTOMATIC}
    if len(automatic) > 1:
        raise ConfigurationError(
            f"Several keys have an {what} for the task: {', '.join(automatic)}. At most one {what} can be handed over "
            f'automatically: give link_to="model.{next(iter(automatic))}" for the others, and make them in '
            "configure_optimizers with instantiate_class.",
            code="DT-004",
        )
    for key, kind in automatic.items():
        init = config.get(key)
        if init is not None:
            return _plain(init) if isinstance(kind, tuple) else with_class_path(kind)(init)
    return None


def override_optimizers(task: Task, configured: ConfiguredOptimizers, owner: str, warn: Callable[[str], None]) -> None:
    """Put what was chosen in the place of a task's `configure_optimizers`.

    Args:
        task: The task.
        configured: What was chosen.
        owner: The command line's class, for the warning.
        warn: What warns where the task has one of its own.
    """
    if type(task).configure_optimizers is not Task.configure_optimizers:
        warn(
            f"`{type(task).__name__}.configure_optimizers` will be overridden by `{owner}.configure_optimizers`: an "
            "optimizer was given on the command line or in a configuration."
        )
    task.configure_optimizers = MethodType(configured, task)  # type: ignore[method-assign]


def _plain(init: Any) -> dict[str, Any]:
    """A configuration as nested dicts."""
    values: dict[str, Any] = init.as_dict() if hasattr(init, "as_dict") else dict(init)
    return values
