"""Several loaders as one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from drivetrain import data

__all__ = ["CombinedLoader"]


class CombinedLoader(data.CombinedLoader):
    """`drivetrain.CombinedLoader`; iterated by a script it gives each batch with its number and that of its loader.

    Args:
        iterables: A list, tuple or dict of loaders, or one loader.
        mode: As there.
    """

    def __init__(self, iterables: Any, mode: str = "min_size") -> None:
        super().__init__(iterables, mode)

    @property
    def flattened(self) -> list[Any]:
        """The loaders, in their order."""
        return list(self.loaders)

    def reset(self) -> None:
        """Forget how far an iteration has come: the next one begins at the start anyway."""

    def __iter__(self) -> Iterator[Any]:
        if self.mode != "sequential":
            for index, batch in enumerate(super().__iter__()):
                yield batch, index, 0
            return
        for number, loader in enumerate(self.loaders):
            for index, batch in enumerate(loader):
                yield batch, index, number
