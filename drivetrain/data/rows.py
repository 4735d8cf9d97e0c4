"""Rows of batches that are collated already: taken out, and put together."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from drivetrain.data.sharding import Share
from drivetrain.runtime.nested import batch_size_or_none, honor_type

_CONTAINERS = (Tensor, Mapping, list, tuple)


def share_of_batches(group: Sequence[Any], sizes: Sequence[int], share: Share, head: Sequence[Any]) -> Any:
    """Make one process's batch out of a group of batches.

    Args:
        group: The batches.
        sizes: How many rows each of them has.
        share: What the process takes.
        head: The epoch's first batches, which padding is made of.

    Returns:
        The batch itself where it is taken whole, else a new one.
    """
    if share.source is not None and not share.padding and share.stop - share.start == sizes[share.source]:
        return group[share.source]
    if share.source is None and share.offset == 0 and share.padding == row_count(head[0]):
        return head[0]
    batches = list(head)
    counts = [row_count(batch) for batch in head]
    total = sum(counts)
    picks = [(share.offset + number) % total for number in range(share.padding)]
    if share.source is not None:
        batches.append(group[share.source])
        counts.append(sizes[share.source])
        picks = [*range(total + share.start, total + share.stop), *picks]
    return pick_rows(batches, counts, picks)


def row_count(batch: Any) -> int:
    """How many rows a batch has; one whose rows cannot be found counts as one row."""
    return batch_size_or_none(batch) or 1


def pick_rows(batches: Sequence[Any], counts: Sequence[int], picks: Sequence[int]) -> Any:
    """Rows out of several batches of the same form, put together to one.

    Tensors and lists, such as of strings or numbers, that are as long as their batch has rows are columns. All else is
    taken from the last batch as it is.

    Args:
        batches: The batches.
        counts: How many rows each has.
        picks: Which rows, counted through all of the batches.
    """
    like = batches[-1]
    if isinstance(like, Tensor):
        if like.dim() and like.size(0) == counts[-1]:
            return torch.cat(list(batches))[torch.tensor(picks, dtype=torch.int64, device=like.device)]
        return like
    if isinstance(like, (list, tuple)):
        if _is_column(like, counts[-1]):
            every = [value for batch in batches for value in batch]
            return honor_type(like, [every[pick] for pick in picks])
        return honor_type(like, [pick_rows(parts, counts, picks) for parts in zip(*batches, strict=True)])
    if isinstance(like, Mapping):
        values = {key: pick_rows([batch[key] for batch in batches], counts, picks) for key in like}
        return values if type(like) is dict else type(like)(values)  # type: ignore[call-arg]
    if dataclasses.is_dataclass(like) and not isinstance(like, type):
        names = [field.name for field in dataclasses.fields(like)]
        parts = {name: pick_rows([getattr(batch, name) for batch in batches], counts, picks) for name in names}
        return dataclasses.replace(like, **parts)
    return like


def _is_column(value: Sequence[Any], rows: int) -> bool:
    """Whether a sequence holds one plain value for each row."""
    return len(value) == rows and not any(isinstance(each, _CONTAINERS) for each in value)
