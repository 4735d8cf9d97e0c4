"""Rows of batches that are collated already: taken out, and put together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from drivetrain.data.sharding import Share
from drivetrain.runtime.nested import batch_size_or_none, field_names, honor_type, with_fields


def share_of_batches(
    group: Sequence[Any], sizes: Sequence[int], share: Share, head: Sequence[Any], head_sizes: Sequence[int]
) -> Any:
    """Make one process's batch out of a group of batches.

    Args:
        group: The batches.
        sizes: How many rows each of them has.
        share: The rows that the process takes.
        head: The epoch's first batches, which padding is made of. If their rows have another form, such as another
            width, then padding is made of the process's own batch, or of the first of them.
        head_sizes: How many rows each of these has.

    Returns:
        The batch itself if it is taken whole, else a new one.
    """
    if share.source is None and share.offset == 0 and share.padding == head_sizes[0]:
        return head[0]
    own: list[Any] = [] if share.source is None else [group[share.source]]
    counts = [] if share.source is None else [sizes[share.source]]
    taken = list(range(share.start, share.stop))
    if not share.padding:
        return own[0] if len(taken) == counts[0] else pick_rows(own, counts, taken)
    total, everything, sizes_of_all = sum(head_sizes), [*head, *own], [*head_sizes, *counts]
    real = [total + row for row in taken]
    paddings = [[(share.offset + number) % total for number in range(share.padding)]]
    if own:  # else made of its own rows; beside the head it shows what is a column
        paddings.append([total + number % counts[0] for number in range(share.padding)])
    for padding in paddings:
        with suppress(OtherForm):
            return pick_rows(everything, sizes_of_all, real + padding)
    batch, rows = (own[0], counts[0]) if own else (head[0], head_sizes[0])
    return pick_rows([batch], [rows], taken + [number % rows for number in range(share.padding)])


class OtherForm(Exception):
    """Batches whose rows cannot be put together, since their shapes, keys or lengths differ."""


def pick_rows(batches: Sequence[Any], counts: Sequence[int], picks: Sequence[int]) -> Any:
    """Rows out of several batches of the same form, put together to one.

    Tensors, NumPy arrays and lists, such as of strings, numbers or images, that are as long as their batch has rows are
    columns. All else is taken from the last batch as it is.

    Args:
        batches: The batches.
        counts: How many rows each has.
        picks: Which rows, counted through all of the batches.

    Raises:
        OtherForm: If the batches do not have the same form.
    """
    like = batches[-1]
    if any(type(batch) is not type(like) for batch in batches):
        raise OtherForm
    if isinstance(like, Tensor | np.ndarray):
        return _rows_of_arrays(batches, counts, picks)
    if isinstance(like, (list, tuple)):
        if _is_column(batches, counts):
            every = [value for batch in batches for value in batch]
            return honor_type(like, [every[pick] for pick in picks])
        if any(len(batch) != len(like) for batch in batches):
            raise OtherForm
        return honor_type(like, [pick_rows(parts, counts, picks) for parts in zip(*batches, strict=True)])
    if isinstance(like, Mapping):
        if any(batch.keys() != like.keys() for batch in batches):
            raise OtherForm
        values = {key: pick_rows([batch[key] for batch in batches], counts, picks) for key in like}
        return values if type(like) is dict else type(like)(values)  # type: ignore[call-arg]
    names = field_names(like)
    if names is not None:
        columns = ([getattr(batch, name) for batch in batches] for name in names)
        return with_fields(like, [pick_rows(column, counts, picks) for column in columns])
    return like


def _rows_of_arrays(arrays: Sequence[Any], counts: Sequence[int], picks: Sequence[int]) -> Any:
    like = arrays[-1]
    if not like.ndim or like.shape[0] != counts[-1]:
        return like
    if len(set(counts)) > 1 and all(array.shape == like.shape for array in arrays):
        return like  # a column is as long as its batch
    before = sum(counts[:-1])
    if picks and min(picks) >= before:  # the others need not have its form
        arrays, counts, picks = [like], [counts[-1]], [pick - before for pick in picks]
    for array, rows in zip(arrays, counts, strict=True):
        if not array.ndim or array.shape[0] != rows or array.shape[1:] != like.shape[1:]:
            raise OtherForm
    if isinstance(like, Tensor):
        return torch.cat(list(arrays))[torch.tensor(picks, dtype=torch.int64, device=like.device)]
    return np.concatenate(arrays)[list(picks)]


def _is_column(sequences: Sequence[Sequence[Any]], counts: Sequence[int]) -> bool:
    """Return whether sequences hold one value for each row of their batches, rather than the parts of a batch."""
    if any(len(values) != rows for values, rows in zip(sequences, counts, strict=True)):
        return False
    if len(set(counts)) > 1:  # the number of a batch's parts does not change with its rows
        return True
    values, rows = sequences[-1], counts[-1]
    if all(isinstance(each, Tensor) for each in values):
        # Three tensors of [3, height, width] are images rather than three columns.
        images = rows == 3 and all(each.dim() == 3 for each in values)
        return images or all(not each.dim() or each.size(0) != rows for each in values)
    if all(isinstance(each, Mapping) for each in values):
        return True  # such as the targets of images
    return not any(_has_rows(each, rows) for each in values)


def _has_rows(part: Any, rows: int) -> bool:
    sequence = isinstance(part, (list, tuple)) and len(part) == rows
    return sequence or isinstance(part, Tensor) or batch_size_or_none(part) == rows
