"""Record of a loader's latest batch, and the stack of loaders that are being iterated."""

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
    """Record of one batch of this process, such as its number in the epoch, its rows and its padding.

    Attributes:
        index: Number of the batch among this process's batches of the epoch, from 0.
        rows: Rows of the batch, including padding; None if unknown.
        padding: Number of padding rows, which are the last rows of the batch.
        global_rows: Real rows of all processes in this step; None if unknown.
        last: True if this is the last batch of the epoch.
        consumed: Samples of the epoch that all processes have consumed after this batch; None if unknown.
        weights: Weight of this process's batch and total weight of all processes, if these are not the real rows; else
            None.
        offset: Real rows of the step that precede this process's rows in the order of the data; None if unknown.
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
        """Return the factor for this batch's mean loss, so that a mean over all processes counts each row equally.

        1.0 if all processes have equally many rows or nothing is known, and 0.0 for a batch of padding only.
        """
        own, total = (self.real_rows, self.global_rows) if self.weights is None else self.weights
        if own is None or not total:
            return 0.0 if self.is_padding else 1.0
        return own * processes / total

    @property
    def is_padding(self) -> bool:
        """True if all rows of the batch are padding."""
        return self.padding > 0 and self.padding == self.rows

    @property
    def real_rows(self) -> int | None:
        """Number of rows of the batch without padding, or None if unknown."""
        return None if self.rows is None else self.rows - self.padding

    @property
    def start(self) -> int | None:
        """Index of the batch's first sample among all samples of the epoch, or None if unknown."""
        if self.consumed is None or self.global_rows is None:
            return None
        # `consumed` counts the samples of all processes up to the end of this step.
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
    """Stack of the loaders that the script's running `for` loops iterate over, the innermost last.

    A loader is added with its first batch. It is removed when it is exhausted or closed, or the loop is left by `break`
    or an exception.

    Attributes:
        on_leave: Callbacks that receive each loader that is removed.
        tick: Counter whose values order the loaders' advances in time.

    Example:
        ```python
        for batch in loader:
            assert active.innermost is loader
        assert active.innermost is None
        ```
    """

    on_leave: list[Callable[[PreparedLoader], None]] = field(default_factory=list)
    tick: Callable[[], int] = field(default_factory=lambda: count(1).__next__)
    _entries: list[tuple[PreparedLoader, int]] = field(default_factory=list)  # with the tick at which each was added

    @property
    def innermost(self) -> PreparedLoader | None:
        return self._entries[-1][0] if self._entries else None

    @property
    def loaders(self) -> list[PreparedLoader]:
        return [loader for loader, _ in self._entries]

    def __len__(self) -> int:
        return len(self._entries)

    def enter(self, loader: PreparedLoader) -> None:
        self._entries.append((loader, self.tick()))

    def leave(self, loader: PreparedLoader) -> None:
        # From the end, because a loader may be on the stack twice, and its latest loop ends first.
        for position in range(len(self._entries) - 1, -1, -1):
            if self._entries[position][0] is loader:
                del self._entries[position]
                break
        for callback in list(self.on_leave):
            callback(loader)

    def encloses(self, outer: PreparedLoader, inner: PreparedLoader) -> bool:
        # The outer loader has not advanced since the loop over the inner one began.
        return any(loader is inner and outer.advanced < entered for loader, entered in self._entries)

    def padding_for(self, rows: int) -> int:
        """Return how many rows at the end of a tensor are padding that a loader has added to its current batch.

        The tensor is assumed to come from the latest batch with as many rows.

        Args:
            rows: Size of the tensor's first dimension.

        Returns:
            The padding of that batch, or 0 if no current batch has as many rows.

        Raises:
            DataError: If loaders advance alternately, as with `zip`, and two of them have such a batch with different
                padding.
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
            # A loader that advanced after the latest one began is not an outer loop: the two alternate.
            if other != padding and advanced > latest_entered:
                raise DataError(
                    f"Two loaders that are iterated alternately returned batches of {rows} rows, one with {padding} "
                    f"rows of padding and one with {other}. It is unknown which loader this tensor comes from. "
                    "Pass the loader, as in gather_for_metrics(tensor, loader=loader)."
                )
        return padding
