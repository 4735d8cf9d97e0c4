"""The part of the Accelerator's face that speaks to experiment trackers; `RunTracking` does the work."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drivetrain.accelerator.tracking import RunTracking
from drivetrain.trackers import Tracker


class Tracking:
    """Accelerate's tracking members."""

    tracking: RunTracking

    def init_trackers(
        self,
        project_name: str,
        config: Mapping[str, Any] | None = None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Open the trackers that `log_with` asked for; call it on all processes.

        After `load_state` they continue the runs of the checkpoint.

        Args:
            project_name: The name of the project, or of the directory of its runs.
            config: Hyper-parameters; secrets among them are left out.
            init_kwargs: Further arguments of trackers, by name: `{"comet_ml": {"online": False}}`.
        """
        self.tracking.init(project_name, config, init_kwargs)

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Give values to the trackers; only the main process does anything, and does not wait for slow ones.

        Args:
            values: Names and values: numbers, tensors of one element, text.
            step: The step that they belong to.
            log_kwargs: Further arguments of a tracker's own `log`, by name.
        """
        self.tracking.group.log(values, step, log_kwargs)

    @property
    def trackers(self) -> list[Tracker]:
        """The trackers of the run."""
        return self.tracking.group.trackers

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """One of the trackers; on other processes than the main one, an object that ignores every call.

        Args:
            name: Its name.
            unwrap: Whether to return the raw object behind it, such as TensorBoard's `SummaryWriter`.

        Raises:
            ConfigurationError: There is none with this name.
        """
        return self.tracking.get(name, unwrap)
