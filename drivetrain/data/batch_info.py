"""A loader's record of the batch that it handed out last, and which loaders are being iterated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

from drivetrain.runtime.errors import DataError

if TYPE_CHECKING:
    from drivetrain.data.loader import PreparedLoader


@dataclass(slots=True, eq=False)
class BatchInfo:
    """What is known about one batch of this process.

    Attributes:
        index: The batch's number among this process's batches of the epoch, from 0.
        rows: Rows of this process's batch, padding included; None if unknown.
        padding: How many of its rows, always its last ones, are padding.
        global_rows: Real rows of all processes in this step; None if unknown.
        last: Whether no batch follows in this epoch.
        consumed: Samples of the epoch that all processes have consumed once this batch is; None if unknown.
        weights: What counts in place of the real rows of this process and of all, where these are not known or not of
            one batch; else None.
        offset: Real rows of the step that come before this process's in the order of the data; None if unknown.
    """

    index: int
    rows: int | None
    padding: int
    global_rows: int | None
    last: bool
    consumed: int | None
    weights: tuple[int, int] | None = None
    offset: int | None = None

    def share(self, processes: int) -> float:
        """What the mean over this batch counts for, so that the mean over processes is that over all their rows.

        Args:
            processes: How many of them the step's batches are spread over.

        Returns:
            1.0 where all have as many rows, or nothing is known; 0.0 for a batch that is padding only.
        """
        own, total = (self.real_rows, self.global_rows) if self.weights is None else self.weights
        if own is None or not total:
            return 0.0 if self.is_padding else 1.0
        return own * processes / total

    @property
    def is_padding(self) -> bool:
        """Whether no row is real: the batch only stands in for one that this process lacks."""
        return self.padding > 0 and self.padding == self.rows

    @property
    def real_rows(self) -> int | None:
        """Rows that are not padding; None if unknown."""
        return None if self.rows is None else self.rows - self.padding

    @property
    def start(self) -> int | None:
        """Where its first row is in the order of the epoch's samples; None if unknown."""
        if self.consumed is None or self.global_rows is None:
            return None
        alone = self.real_rows == self.global_rows
        if self.offset is None and not alone:
            return None
        return self.consumed - self.global_rows + (0 if alone else self.offset or 0)

    def __repr__(self) -> str:
        names = ("index", "rows", "padding", "global_rows", "last", "consumed")
        values = ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
        return f"BatchInfo({values})"


@dataclass(eq=False)
class ActiveLoaders:
    """The loaders that are being iterated right now, the innermost last.

    A loader enters with its first batch, and leaves when it is exhausted, broken out of, closed or raised from.

    Attributes:
        on_leave: Called with each loader that leaves.
        tick: The clock by which loaders note when they advanced.

    Example:
        ```python
        for batch in loader:
            assert active.innermost is loader
        assert active.innermost is None
        ```
    """

    on_leave: list[Callable[[PreparedLoader], None]] = field(default_factory=list)
    tick: Callable[[], int] = field(default_factory=lambda: count(1).__next__)
    _entries: list[tuple[PreparedLoader, int]] = field(default_factory=list)  # with the time of entering

    @property
    def innermost(self) -> PreparedLoader | None:
        """The loader that was entered last; None outside of all loops."""
        return self._entries[-1][0] if self._entries else None

    @property
    def loaders(self) -> list[PreparedLoader]:
        """All of them, the outermost first."""
        return [loader for loader, _ in self._entries]

    def __len__(self) -> int:
        return len(self._entries)

    def enter(self, loader: PreparedLoader) -> None:
        """Note that an iteration over `loader` has begun."""
        self._entries.append((loader, self.tick()))

    def leave(self, loader: PreparedLoader) -> None:
        """Note that the last begun iteration over `loader` has ended, and call the `on_leave` hooks."""
        for position in range(len(self._entries) - 1, -1, -1):
            if self._entries[position][0] is loader:
                del self._entries[position]
                break
        for callback in list(self.on_leave):
            callback(loader)

    def encloses(self, outer: PreparedLoader, inner: PreparedLoader) -> bool:
        """Return whether one loader has not advanced since the iteration over another one began within its loop."""
        return any(loader is inner and outer.advanced < entered for loader, entered in self._entries)

    def padding_for(self, rows: int) -> int:
        """How many of a tensor's rows, its last ones, are padding.

        The tensor is taken to come from the batch of as many rows that was handed out last.

        Args:
            rows: The tensor's first dimension.

        Returns:
            The padding of that batch; 0 if no current batch has as many rows.

        Raises:
            DataError: If loaders are advanced in turn, as by `zip`, and two of them have such a batch, each with
                another padding.
        """
        found: list[tuple[int, int, int]] = []  # (advanced, entered, padding)
        for loader, entered in self._entries:
            info = loader.current
            if info is not None and info.rows == rows:
                found.append((loader.advanced, entered, info.padding))
        if not found:
            return 0
        found.sort()
        _, latest_entered, padding = found[-1]
        for advanced, _, other in found[:-1]:
            # One that advanced after the latest was entered is no outer loop: the two take turns.
            if other != padding and advanced > latest_entered:
                raise DataError(
                    f"Two loaders that are iterated in turn both gave a batch of {rows} rows, one with {padding} rows "
                    f"of padding and one with {other}, so it is not known which of them this tensor comes from. "
                    "Say so with loader=, as in gather_for_metrics(tensor, loader=loader)."
                )
        return padding
