"""Loaders that join the batches of several processes for one, with random numbers seeded by sample index."""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from drivetrain.runtime.pytrees import concatenate, recursively_apply
from drivetrain.runtime.seeds import KeptGenerators, seed_all_generators


def seed_of(key: Any, draw: int = 0) -> int:
    digest = hashlib.blake2b(f"{key}/{draw}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


class _Joined:
    # Each batch consists of `count` batches of the other sampler. An epoch has `rows` rows, or all if this is None.
    def __init__(self, sampler: Any, count: int, is_reversed: bool, rows: int | None) -> None:
        self.batch_sampler, self.count, self.is_reversed, self.rows = sampler, count, is_reversed, rows
        self.sampler = getattr(sampler, "sampler", None)
        self.batch_size = getattr(sampler, "batch_size", 1) * count
        self.drop_last = getattr(sampler, "drop_last", False)

    def __iter__(self) -> Iterator[list[Any]]:
        batches, left = iter(self.batch_sampler), math.inf if self.rows is None else self.rows
        while left > 0 and (joined := [index for batch in islice(batches, self.count) for index in batch]):
            joined = joined[: int(min(left, len(joined)))]
            left -= len(joined)
            if len(joined) == self.batch_size or not (self.drop_last and self.rows is not None):
                yield joined[::-1] if self.is_reversed else joined

    def __len__(self) -> int:
        whole = -(-len(self.batch_sampler) // self.count)
        if self.rows is None:
            return whole
        return min(whole, self.rows // self.batch_size if self.drop_last else -(-self.rows // self.batch_size))

    def set_epoch(self, epoch: int) -> None:
        for each in (self.batch_sampler, self.sampler):
            if hasattr(each, "set_epoch"):
                each.set_epoch(epoch)  # type: ignore[union-attr]


class _Around:
    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_inner":  # copies and pickles have no inner object yet
            raise AttributeError(name)
        return getattr(self._inner, name)


class _JoinedBatches(_Around):
    def __init__(self, batches: Any, count: int) -> None:
        super().__init__(batches)
        self._count = count

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._inner)
        while group := list(islice(batches, self._count)):
            yield concatenate(group)

    def __len__(self) -> int:
        return -(-len(self._inner) // self._count)


class _Seeded(_Around):
    """Dataset that seeds random numbers, such as those of augmentations, from the sample's index.

    A sample is then the same in whichever process and in whatever order it is read.
    """

    def __getitem__(self, index: Any) -> Any:
        with KeptGenerators():
            seed_all_generators(seed_of(repr(index)))
            return self._inner[index]

    def __len__(self) -> int:
        return len(self._inner)


def joined(loader: Any, shards: int = 1, *, is_reversed: bool = False, uneven_over: int | None = None) -> Any:
    """Merge every `shards` batches of a loader into one, so that one process trains on the batches of several.

    Its samples take random numbers from their index. Only loaders of samples with an index are reversed or uneven.

    Args:
        loader: The script's loader.
        shards: Number of its batches that become one.
        is_reversed: True to reverse the rows of each batch.
        uneven_over: Number of processes for which epochs are cut so that their last batch is not full, or None.
    """
    if not isinstance(loader, DataLoader) or (loader.batch_sampler is None and loader.batch_size is None):
        return loader if shards == 1 else _JoinedBatches(loader, shards)
    same, size = copy.copy(loader), (loader.batch_size or 1) * shards
    # `DataLoader.__setattr__` refuses to change these after construction.
    if isinstance(loader.dataset, IterableDataset):
        object.__setattr__(same, "batch_size", size)
        object.__setattr__(same, "batch_sampler", BatchSampler(loader.sampler, size, loader.drop_last))
        return same
    object.__setattr__(same, "dataset", _Seeded(loader.dataset))
    batches, sampler = loader.batch_sampler, loader.sampler
    if type(batches) is BatchSampler and type(sampler) is RandomSampler:
        # Frameworks shuffle in a different order with one process than with several.
        generator = torch.Generator().manual_seed(torch.initial_seed() % 2**63)
        sampler = RandomSampler(sampler.data_source, sampler.replacement, sampler.num_samples, generator)
        batches = BatchSampler(sampler, batches.batch_size, batches.drop_last)
        object.__setattr__(same, "sampler", sampler)
        object.__setattr__(same, "batch_sampler", batches)
    if shards > 1 or is_reversed or uneven_over is not None:
        rows = None if uneven_over is None else 2 * uneven_over * size // shards + size // shards // 2 + 1
        object.__setattr__(same, "batch_sampler", _Joined(batches, shards, is_reversed, rows))
        object.__setattr__(same, "batch_size", size)
    return same


# Identity of rows


def rows_of(batch: Any, rows: int | None) -> list[str] | None:
    """Return a hash of each row of `batch`, to check whether two runs train on equal rows.

    None if the batch has no tensors with `rows` rows. Padding at the end of a row of token ids does not count, because
    batches of other sizes are padded to other lengths.

    Args:
        batch: The batch.
        rows: Number of rows, including padding rows.
    """
    leaves = [each.detach().cpu() for each in _tensors(batch) if each.dim() and each.shape[0] == rows]
    if not leaves or not rows:
        return None
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    digests = [hashlib.blake2b(digest_size=8) for _ in range(rows)]
    for leaf in leaves:
        is_padded = not leaf.is_floating_point() and leaf.dim() > 1
        for number, digest in enumerate(digests):
            row = leaf[number]
            if is_padded and isinstance(mask, Tensor) and mask.shape == leaf.shape:
                row = row[mask[number].cpu().bool()]
            elif is_padded:
                row = _without_end(row.reshape(-1))
            digest.update(row.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return [digest.hexdigest() for digest in digests]


def _without_end(row: Tensor) -> Tensor:
    kept = ((row != 0) & (row != -100)).nonzero()
    return row[: int(kept[-1]) + 1] if len(kept) else row[:0]


def counts_of(batch: Any) -> dict[str, float]:
    # Numbers by which a script may divide its loss: the elements that are no padding (-100 or 0).
    found: dict[str, float] = {}
    for number, tensor in enumerate(_tensors(batch)):
        if not tensor.is_floating_point() and tensor.dim():
            found[f"{number} not -100"] = float((tensor != -100).sum())
            found[f"{number} not 0"] = float((tensor != 0).sum())
            if tensor.dim() > 1:
                found[f"{number} not -100, shifted"] = float((tensor[:, 1:] != -100).sum())
                found[f"{number} not 0, shifted"] = float((tensor[:, 1:] != 0).sum())
    return found


def _tensors(batch: Any) -> list[Tensor]:
    found: list[Tensor] = []
    recursively_apply(found.append, batch)
    return found
