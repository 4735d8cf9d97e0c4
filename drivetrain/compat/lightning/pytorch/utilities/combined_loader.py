"""Combine several data loaders into one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from drivetrain import data

__all__ = ["CombinedLoader"]


class CombinedLoader(data.CombinedLoader):
    """`drivetrain.CombinedLoader` that yields (batch, batch index, loader index) to scripts."""

    def __init__(self, iterables: Any, mode: str = "min_size") -> None:
        super().__init__(iterables, mode)
        self._under_way: Iterator[tuple[Any, int, int]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_under_way": None}

    @property
    def flattened(self) -> list[Any]:
        """The loaders as a flat list. Assigning replaces them."""
        return self.loaders

    @flattened.setter
    def flattened(self, loaders: Sequence[Any]) -> None:
        if len(loaders) != len(self.loaders):
            raise ValueError(
                f"Mismatch in flattened length ({len(loaders)}) and existing length ({len(self.loaders)}). Give "
                "as many loaders as there are."
            )
        self.iterables, self.loaders = self.in_structure(list(loaders)), list(loaders)

    @property
    def sampler(self) -> Any:
        """Samplers of the loaders in the same nested structure, with None for loaders without one."""
        return self.in_structure([getattr(loader, "sampler", None) for loader in self.loaders])

    @property
    def batch_sampler(self) -> Any:
        """Batch samplers of the loaders in the same nested structure, with None for loaders without one."""
        return self.in_structure([getattr(loader, "batch_sampler", None) for loader in self.loaders])

    def reset(self) -> None:
        """Stop the current iteration and its workers."""
        self._under_way = None

    def __iter__(self) -> Iterator[Any]:
        if self.mode == "sequential":
            self._under_way = self._numbered(iter(self.loaders[0]))
        else:
            self._under_way = ((batch, index, 0) for index, batch in enumerate(self.iterate()))
        return self

    def __next__(self) -> tuple[Any, int, int]:
        if self._under_way is None:
            raise RuntimeError("No iteration is under way. Please call `iter(combined_loader)` first.")
        return next(self._under_way)

    def begin_together(self) -> list[Any]:
        """Create an iterator per loader, so that all workers start at once."""
        return [self.begin(loader) for loader in self.loaders]

    def _numbered(self, first: Iterator[Any]) -> Iterator[tuple[Any, int, int]]:
        """Yield the batches of each loader in turn, with the batch index and the loader index."""
        for number, loader in enumerate(self.loaders):
            for index, batch in enumerate(loader if number else first):
                yield batch, index, number
