"""The order of an epoch as the user's own sampler or batch sampler gives it, from any position on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from drivetrain.data.configuration import DataShard
from drivetrain.data.sharding import Head
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.logging import get_logger
from drivetrain.runtime.seeds import EpochStart, sample_seed

# A shuffle that is a function of the position, not a list: for sets too large for a list of indices


_ROUNDS = 8
_SMALL = 1024  # up to here the whole order is computed at once
_SMALL_HALF_BITS = 16
_LARGEST_LENGTH = 1 << 62
_FIRST_BLOCK = 1024  # small, so that the first batch comes at once
_BLOCK = 16384

_Words = npt.NDArray[np.uint64]


class KeyedPermutation:
    """A pseudo-random bijection of `range(length)`, computed position by position.

    A Feistel network (Luby and Rackoff, "How to construct pseudorandom permutations from pseudorandom functions",
    SIAM J. Comput. 17(2), 1988) of 8 rounds permutes the smallest domain of an even number of bits that holds
    `length`; results outside of `range(length)` are sent through it again until they fall inside (cycle walking:
    Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002), on average fewer than four times. The
    round function is MurmurHash3's 64-bit finaliser over the half and the round's key. The halves of a small domain
    are too narrow for this, so up to 1024 elements are sorted by their images in a domain of 32 bits (the prefix
    cipher of the same paper).
    """

    def __init__(self, length: int, key: int) -> None:
        self.length = length
        half_bits = _SMALL_HALF_BITS if length <= _SMALL else ((length - 1).bit_length() + 1) // 2
        self._half = np.uint64(half_bits)
        self._mask = np.uint64((1 << half_bits) - 1)
        self._keys = [np.uint64(sample_seed(key, length, number)) for number in range(_ROUNDS)]
        self._order: _Words | None = None
        if length <= _SMALL:
            self._order = np.argsort(self._encrypt(np.arange(length, dtype=np.uint64))).astype(np.uint64)

    def __call__(self, positions: _Words) -> _Words:
        """The elements at these positions, all below `length`; the array given is not changed."""
        if self._order is not None:
            return self._order[positions]
        values = self._encrypt(positions)
        limit = np.uint64(self.length)
        outside = np.flatnonzero(values >= limit)
        while outside.size:
            again = self._encrypt(values[outside])
            values[outside] = again
            outside = outside[again >= limit]
        return values

    def _encrypt(self, values: _Words) -> _Words:
        """One pass through the network, over the whole domain."""
        left = values >> self._half
        right = values & self._mask
        for key in self._keys:
            mixed = right + key  # arrays of uint64 wrap around without a warning
            mixed ^= mixed >> np.uint64(33)
            mixed *= np.uint64(0xFF51AFD7ED558CCD)
            mixed ^= mixed >> np.uint64(33)
            mixed *= np.uint64(0xC4CEB9FE1A85EC53)
            mixed >>= np.uint64(64) - self._half  # the upper bits are the best mixed ones
            mixed ^= left
            left, right = right, mixed
        result: _Words = (left << self._half) | right
        return result


class PermutationSampler(Sampler[int]):
    """Shuffles a set of any size in constant memory, and begins anywhere in the order at once.

    Works as `sampler=` of any `torch.utils.data.DataLoader`. Each epoch has its own order; an iteration that no
    `set_epoch` precedes is the next epoch. The order depends on the length, the seed and the epoch only.

    Args:
        data_source: The dataset, or how many samples it has (below 2**62).
        seed: Any integer; each gives other orders.
        epoch: The epoch of the first iteration.

    Raises:
        ConfigurationError: If `data_source` has no length, or one out of range.

    Example:
        ```python
        sampler = PermutationSampler(dataset, seed=42)
        loader = DataLoader(dataset, batch_size=64, sampler=sampler)
        assert sampler[5] == list(sampler)[5]
        ```
    """

    def __init__(self, data_source: Sized | int, seed: int = 0, *, epoch: int = 0) -> None:
        if not isinstance(data_source, (int, Sized)) or isinstance(data_source, bool):
            raise ConfigurationError(
                "PermutationSampler needs a dataset with a length, or the length itself, but got "
                f"{type(data_source).__name__!r}.",
            )
        self._source = data_source
        self.seed = seed
        self._epoch = epoch
        self._begun = False
        self._cached: tuple[tuple[int, int, int], KeyedPermutation] | None = None
        length = data_source if isinstance(data_source, int) else len(data_source)
        if not 0 <= length < _LARGEST_LENGTH:
            raise ConfigurationError(f"PermutationSampler takes lengths from 0 to 2**62 - 1, but got {length}.")

    @property
    def epoch(self) -> int:
        """The epoch of the iteration under way or, before the first one and after `set_epoch`, of the next."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` that of the next iteration, and of random access."""
        self._epoch = epoch
        self._begun = False

    def __len__(self) -> int:
        return self._source if isinstance(self._source, int) else len(self._source)

    def __iter__(self) -> Iterator[int]:
        # A generator, so that an iterator that is made but never used begins no epoch: torch makes such ones.
        yield from self.iterate_from(0)

    def iterate_from(self, position: int) -> Iterator[int]:
        """Begin an epoch at a position, without computing what comes before.

        Args:
            position: From 0 to the length; how many samples of the epoch are skipped.
        """
        if self._begun:
            self._epoch += 1
        self._begun = True
        permutation = self._permutation()
        size = _FIRST_BLOCK
        while position < permutation.length:
            stop = min(position + size, permutation.length)
            yield from permutation(np.arange(position, stop, dtype=np.uint64)).tolist()
            position, size = stop, _BLOCK

    @overload
    def __getitem__(self, position: int) -> int: ...
    @overload
    def __getitem__(self, position: slice) -> list[int]: ...
    def __getitem__(self, position: int | slice) -> int | list[int]:
        """The index, or for a slice the list of indices, at a position of this epoch's order."""
        permutation = self._permutation()
        if isinstance(position, slice):
            places = range(permutation.length)[position]
            positions = np.arange(places.start, places.stop, places.step, dtype=np.int64).astype(np.uint64)
            indices: list[int] = permutation(positions).tolist()
            return indices
        try:
            place = range(permutation.length)[position]
        except IndexError:
            raise IndexError(f"position {position} of an order of {permutation.length} samples") from None
        return int(permutation(np.array([place], dtype=np.uint64))[0])

    def _permutation(self) -> KeyedPermutation:
        """The permutation of this epoch; made once for each."""
        asked = (len(self), self.seed, self._epoch)
        if self._cached is None or self._cached[0] != asked:
            self._cached = (asked, KeyedPermutation(asked[0], sample_seed(*asked[1:], 0)))
        return self._cached[1]

    def __repr__(self) -> str:
        return f"PermutationSampler({len(self)}, seed={self.seed}, epoch={self._epoch})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cached": None}


logger = get_logger(__name__)

LARGE_SET = 50_000_000  # above, a RandomSampler's list of indices takes gigabytes


class InterleavingSampler(DistributedSampler[Any]):
    """Gives each process every n-th sample, in an order that a seed and the epoch decide alone.

    It is for what counts on that order. The first samples come again at the end where they do not go evenly round.

    Args:
        dataset: The samples.
        shard: Which share this process reads.
        shuffle: Whether in a random order.
        seed: The seed.
    """

    def __init__(self, dataset: Any, shard: DataShard, shuffle: bool, seed: int) -> None:
        super().__init__(dataset, num_replicas=shard.count, rank=shard.index, shuffle=shuffle, seed=seed)


# Samplers that draw from the global generators with their first index, or never.
_DRAWS_AT_ONCE = (
    SequentialSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    PermutationSampler,
    DistributedSampler,
    InterleavingSampler,
    range,
    list,
    tuple,
)


@dataclass(frozen=True)
class Position:
    """Where in an epoch an iteration begins.

    Attributes:
        batches: Batches of the user's loader that come before.
        samples: Samples that come before; None where only the batches are known.
        start: The random state that the epoch began with; None to draw the order from the present one.
        own: What a loader with a state of its own has saved there; None if it has none.
        group: How many batches all processes together took in a step of the run that was there; None if unknown.
    """

    batches: int = 0
    samples: int | None = None
    start: EpochStart | None = None
    own: Mapping[str, Any] | None = None
    group: int | None = None


class IndexOrder:
    """The index batches of a map-style loader, in the order of the user's sampler or batch sampler."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.batched = loader.batch_sampler is not None
        self.batch_sampler: Any = loader.batch_sampler
        self.sampler: Any = loader.sampler
        if self.batched:
            self.sampler = getattr(self.batch_sampler, "sampler", None)
        self._workers = loader.num_workers
        self._length_is_wrong = False
        if type(self.sampler) is RandomSampler and len(self.sampler) > LARGE_SET:
            logger.warning_once(
                "A RandomSampler over %d samples holds a list of all their indices in each process. "
                "drivetrain.PermutationSampler(dataset, seed) shuffles in constant memory, and resumes at once.",
                len(self.sampler),
            )

    @property
    def source(self) -> Any:
        """What the indices come from: the batch sampler, or the sampler where there is none."""
        return self.batch_sampler if self.batched else self.sampler

    @property
    def regular(self) -> bool:
        """Whether batches are made by torch's own BatchSampler."""
        return type(self.batch_sampler) is BatchSampler

    @property
    def draws_at_once(self) -> bool:
        """Whether all draws from the global generators come with the first index."""
        if self.batched and not self.regular:
            return type(self.batch_sampler) in (list, tuple)
        return type(self.sampler) in _DRAWS_AT_ONCE

    @property
    def batch_size(self) -> int | None:
        """Samples of a full batch; None if the batch sampler does not report it."""
        size = getattr(self.batch_sampler, "batch_size", None) if self.batched else 1
        return size if isinstance(size, int) else None

    @property
    def distributed_sampler(self) -> DistributedSampler[Any] | None:
        """Torch's sampler that shards by itself, if the user has one."""
        return next((each for each in (self.sampler, self.source) if isinstance(each, DistributedSampler)), None)

    def __len__(self) -> int:
        return len(self.source)

    def said_length(self) -> int | None:
        """How many batches a sampler that may draw at any time reports; None to read ahead instead.

        Reading ahead would draw from the global generators earlier than a plain loader does.
        """
        if self.draws_at_once or self._length_is_wrong:
            return None
        try:
            return len(self.source)
        except (TypeError, NotImplementedError):
            return None

    def record_end(self, batches: int, was_last: bool) -> None:
        """Record at the end of an epoch how many batches there were, and whether the last one was known as such."""
        if batches and not was_last:
            logger.warning_once(
                "%s says that it has %d batches, but gave %d. In this epoch the last batch was not known to be the "
                "last one; correct its __len__.",
                type(self.source).__name__,
                len(self.source),
                batches,
            )
            self._length_is_wrong = True

    def plain_iterator(self) -> Iterator[Any]:
        """What torch's loader makes of the sampler: nothing is drawn before the first batch is asked for."""
        return iter(self.source)

    def batches(self, iterator: Iterator[Any]) -> Iterator[Any]:
        """Index batches out of such an iterator: a single index counts as a batch of one."""
        return iterator if self.batched else ([index] for index in iterator)

    def from_position(
        self, iterator: Iterator[Any], position: Position, keep: int
    ) -> tuple[Iterator[Sequence[Any]], Head, int]:
        """Leave out what comes before a position; nothing that random access makes needless is computed."""
        if self.batched and not self.regular:
            return _skip_batches(iterator, position, keep)
        size = self.batch_size or 1
        skipped = position.batches * size if position.samples is None else position.samples
        per_process = skipped
        if self.distributed_sampler is not None:
            per_process //= self.distributed_sampler.num_replicas
        indices, first = _skip_indices(self.sampler, iterator if not self.batched else None, per_process, keep * size)
        head = Head(first, [min(size, len(first) - start) for start in range(0, len(first), size)])
        if not self.batched:
            return ([index] for index in indices), head, skipped
        return iter(BatchSampler(indices, size, self.batch_sampler.drop_last)), head, skipped


def _skip_indices(
    sampler: Any, iterator: Iterator[Any] | None, skipped: int, keep: int
) -> tuple[Iterator[Any], list[Any]]:
    """The indices after the first `skipped` ones, and the first `keep` of all."""
    if type(sampler) is PermutationSampler:
        rest = sampler.iterate_from(skipped)
        following = list(islice(rest, 1))  # the epoch begins with the first index that is read
        return chain(following, rest), sampler[:keep]
    if type(sampler) is SequentialSampler:
        every = range(len(sampler.data_source))
        return iter(every[skipped:]), list(every[:keep])
    indices = iter(sampler) if iterator is None else iterator
    first = list(islice(indices, min(keep, skipped)))
    for _ in islice(indices, skipped - len(first)):
        pass
    following = list(islice(indices, keep - len(first)))
    return chain(following, indices), [*first, *following]


def _skip_batches(iterator: Iterator[Any], position: Position, keep: int) -> tuple[Iterator[Sequence[Any]], Head, int]:
    """Leave out batches of the user's batch sampler; one that was begun is cut."""
    head = Head([], [])
    skipped = count = 0

    def listed() -> Iterator[list[Any]]:
        for batch in iterator:
            batch = list(batch)
            if len(head.sizes) < keep:
                head.samples.extend(batch)
                head.sizes.append(len(batch))
            yield batch

    batches = listed()
    following: list[list[Any]] = []
    # A batch that does not have to be left out is not drawn here: the draw may depend on when it happens.
    while count < position.batches if position.samples is None else skipped < position.samples:
        batch = next(batches, None)
        if batch is None:
            break
        count += 1
        skipped += len(batch)
        if position.samples is not None and skipped > position.samples:
            following = [batch[position.samples - skipped :]]
            skipped = position.samples
    following.extend(islice(batches, max(0, keep - len(head.sizes))))
    return chain(following, batches), head, skipped


class SeedableSampler:
    """Gives a RandomSampler a generator that is seeded again at each epoch, with the seed plus the epoch."""

    def __init__(self, sampler: RandomSampler, seed: int) -> None:
        self._seed = seed
        self._generator = sampler.generator = torch.Generator()

    def set_epoch(self, epoch: int) -> None:
        """Seed the generator for an epoch."""
        self._generator.manual_seed(self._seed + epoch)
