"""Several loaders as one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from drivetrain import data

__all__ = ["CombinedLoader"]


class CombinedLoader(data.CombinedLoader):
    """`drivetrain.CombinedLoader`; iterated by a script it gives each batch with its number and that of its loader."""

    def __init__(self, iterables: Any, mode: str = "min_size") -> None:
        super().__init__(iterables, mode)
        self._under_way: Iterator[tuple[Any, int, int]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_under_way": None}

    @property
    def flattened(self) -> list[Any]:
        """The loaders, in their order. Setting it puts others into their places."""
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
        """The samplers of the loaders, in their structure; None for those that have none."""
        return self.in_structure([getattr(loader, "sampler", None) for loader in self.loaders])

    @property
    def batch_sampler(self) -> Any:
        """The batch samplers of the loaders, in their structure; None for those that have none."""
        return self.in_structure([getattr(loader, "batch_sampler", None) for loader in self.loaders])

    def reset(self) -> None:
        """End the iteration under way, with the workers of its loaders."""
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
        """An iterator of each loader, so that the workers of all start at once."""
        return [self.begin(loader) for loader in self.loaders]

    def _numbered(self, first: Iterator[Any]) -> Iterator[tuple[Any, int, int]]:
        """The batches of one loader after the other, each with its number and the loader's."""
        for number, loader in enumerate(self.loaders):
            for index, batch in enumerate(loader if number else first):
                yield batch, index, number
