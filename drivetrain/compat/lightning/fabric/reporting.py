"""The part of Fabric that writes values and calls callbacks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from drivetrain.accelerator import Accelerator
from drivetrain.compat.lightning.fabric.utilities.apply_func import convert_tensors_to_scalars
from drivetrain.compat.lightning.fabric.utilities.rank_zero import rank_zero_warn


class Reporting:
    """What a loop reports, and to whom."""

    accelerator: Accelerator
    _callbacks: list[Any]
    _loggers: list[Any]

    def log(self, name: str, value: Any, step: int | None = None) -> None:
        """Write one value.

        Args:
            name: Its name.
            value: A number, or a tensor of one element.
            step: The step that it belongs to.
        """
        self.log_dict({name: value}, step)

    def log_dict(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Write values, on the main process.

        Args:
            metrics: Names and values.
            step: The step that they belong to.

        Raises:
            ConfigurationError: A tensor has more than one element.
        """
        numbers = convert_tensors_to_scalars(dict(metrics))
        if self.accelerator.is_main_process:
            for logger in self._loggers:
                logger.log_metrics(metrics=numbers, step=step)

    def call(self, hook_name: str, *args: Any, **kwargs: Any) -> None:
        """Call a method of every callback that has it, with those of the keywords that it takes.

        Args:
            hook_name: The method.
            *args: Its arguments.
            **kwargs: The same.
        """
        for callback in self._callbacks:
            method = getattr(callback, hook_name, None)
            if method is None:
                continue
            if callable(method):
                method(*args, **_taken(method, kwargs))
            else:
                rank_zero_warn(
                    f"Skipping the callback `{type(callback).__name__}.{hook_name}`: it is a "
                    f"{type(method).__name__}, which cannot be called."
                )


def _taken(method: Callable[..., Any], given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Those keywords that a method takes; all where this cannot be found out."""
    try:
        parameters = inspect.signature(method).parameters
    except (TypeError, ValueError):
        return given
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
        return given
    return {name: value for name, value in given.items() if name in parameters}
