"""What stands where there is no tracker: on other processes, in a trial run, and where one could not be started."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from drivetrain.trackers.base import Tracker


class Absent:
    """Takes every attribute, item and call, and does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self

    def __getitem__(self, key: Any) -> Any:
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return "<no tracker here>"


class AbsentTracker(Tracker):
    """Takes the place of a tracker on processes that do not call it, and in a trial run.

    Args:
        name: The name of that tracker.
    """

    def __init__(self, name: str = "absent") -> None:
        self.name = name  # type: ignore[misc]

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        pass

    def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        pass

    def _leave_out(self, what: str) -> None:
        pass

    @property
    def tracker(self) -> Any:
        """An object that ignores every call."""
        return Absent()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent()
