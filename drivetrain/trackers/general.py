"""Accelerate's base of custom trackers."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from drivetrain.runtime.environment import ProcessEnvironment
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.state import PartialState
from drivetrain.trackers.base import Tracker

Method = TypeVar("Method", bound=Callable[..., Any])


def on_main_process(function: Method) -> Method:
    """Decorate a tracker's method so that only the main process runs it, where its class asks for that.

    Args:
        function: The method.
    """

    @functools.wraps(function)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "main_process_only", False):
            state = PartialState.existing()
            rank = state.process_index if state is not None else ProcessEnvironment.detect().rank
            if rank != 0:
                return None
        return function(self, *args, **kwargs)

    return run  # type: ignore[return-value]


class GeneralTracker(Tracker):
    """A tracker of the user's own, as Accelerate's scripts write them: it works in both drivers.

    A subclass has `name`, `requires_logging_directory` and the property `tracker`, and overrides the methods that it
    needs. With `main_process_only = True` it is called on the main process, on a thread of its own; with False on every
    process, on the thread of the loop.

    Attributes:
        requires_logging_directory: Whether it needs a directory to write to.

    Raises:
        ConfigurationError: The class lacks one of the three.

    Example:
        ```python
        from drivetrain import Accelerator, GeneralTracker

        class Printed(GeneralTracker):
            name = "printed"
            requires_logging_directory = False

            @property
            def tracker(self):
                return print

            def log(self, values, step=None, **options):
                print(step, values)

        accelerator = Accelerator(cpu=True, log_with=Printed())
        accelerator.init_trackers("digits")
        accelerator.log({"loss": 0.5}, step=1)
        accelerator.end_training()
        ```
    """

    requires_logging_directory: bool
    log_dir: str | None = None

    def __init__(self, _blank: bool = False) -> None:
        missing = [name for name in ("name", "requires_logging_directory") if not hasattr(self, name)]
        if "tracker" not in vars(self) and type(self).tracker is Tracker.tracker:
            missing.append("tracker")
        if missing and not _blank:
            raise ConfigurationError(
                f"The tracker class {type(self).__name__} lacks {', '.join(missing)}. Define them in the class: `name` "
                "(text), `requires_logging_directory` (bool) and `tracker` (a property, the object behind it).",
                code="DT-120",
            )

    @classmethod
    def for_run(cls, save_dir: str | os.PathLike[str], project: str | None, **options: Any) -> GeneralTracker:
        """Make the tracker as Accelerate does: of the project's name and, where it needs one, a directory.

        Args:
            save_dir: Where the run writes.
            project: The name of the project, if the run gave one.
            **options: Further arguments of the constructor.
        """
        places = [os.fspath(save_dir)] if cls.requires_logging_directory else []
        made: Any = cls
        return made(project, *places, **options)  # type: ignore[no-any-return]

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Write the hyper-parameters of the run."""

    def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        """Write values of one step.

        Args:
            values: Names and values.
            step: The step that they belong to.
            **options: What `Accelerator.log` was given for this tracker.
        """
