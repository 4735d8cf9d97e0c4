"""The part of the Accelerator's face that speaks to experiment trackers; `RunTracking` does the work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

    def log_images(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Give images to the trackers; only the main process does anything.

        Args:
            values: Names and images, one or several of a name: tensors or arrays of shape (H, W), (C, H, W), (H, W, C)
                or with the number of images before it, in [0, 1] or of bytes; or PIL images.
            step: The step that they belong to.
        """
        self.tracking.group.log_images(values, step)

    def log_table(
        self, name: str, columns: Sequence[str] | None = None, data: Any = None, step: int | None = None
    ) -> None:
        """Give a table to the trackers; only the main process does anything.

        Args:
            name: Its name.
            columns: The names of its columns; the first row of `data` if None, or a DataFrame's own.
            data: The rows, or a pandas DataFrame.
            step: The step that it belongs to.
        """
        self.tracking.group.log_table(name, columns, data, step)

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
