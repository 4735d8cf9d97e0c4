"""Batches of one shape, for devices that compile a graph for each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from drivetrain.data.batch_info import BatchInfo
from drivetrain.data.rows import pick_rows
from drivetrain.runtime.nested import batch_size_or_none


def filled(pairs: Iterable[tuple[Any, BatchInfo]], size: int | None) -> Iterator[tuple[Any, BatchInfo]]:
    """Fill short batches up with copies of their own rows, in turn, which are counted as padding.

    Args:
        pairs: Batches, each with what is known about it, which is changed.
        size: Rows of a full batch; those of the largest one so far if None.

    Returns:
        The batches.
    """
    full = size or 0

    def fill(pair: tuple[Any, BatchInfo]) -> tuple[Any, BatchInfo]:
        nonlocal full
        batch, info = pair
        rows = batch_size_or_none(batch) if info.rows is None else info.rows
        if rows:
            full = max(full, rows)
            if rows < full:
                picks = [number % rows for number in range(full)]
                batch = pick_rows([batch], [rows], picks)
                info.padding += full - rows
                info.rows = full
        return batch, info

    return map(fill, pairs)
