"""Order of the samples in an epoch: user's samplers, resumption within an epoch, and shuffling in constant memory."""

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

# Shuffling without a list of indices


_ROUNDS = 8
_SMALL = 1024  # up to this length the whole order is computed at once
_SMALL_HALF_BITS = 16
_LARGEST_LENGTH = 1 << 62
_FIRST_BLOCK = 1024  # small, so that the first batch is not delayed
_BLOCK = 16384

_Words = npt.NDArray[np.uint64]


class KeyedPermutation:
    """Pseudo-random permutation of `range(length)` that can compute any element without those before it.

    A Feistel network of 8 rounds (Luby and Rackoff, "How to construct pseudorandom permutations from pseudorandom
    functions", SIAM J. Comput. 17(2), 1988) permutes the smallest domain with an even number of bits that holds
    `length`. Results outside of `range(length)` are encrypted again until they fall inside (cycle walking: Black and
    Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002), fewer than four times on average.

    The round function is MurmurHash3's 64-bit finaliser over the half and the round's key. Halves of a small domain are
    too narrow for it. Up to 1024 elements are therefore sorted by their images in a 32-bit domain (the prefix cipher of
    Black and Rogaway's paper).
    """

    def __init__(self, length: int, key: int) -> None:
        self.length = length
        # Both halves have equally many bits, as a Feistel network requires.
        half_bits = _SMALL_HALF_BITS if length <= _SMALL else ((length - 1).bit_length() + 1) // 2
        self._half = np.uint64(half_bits)
        self._mask = np.uint64((1 << half_bits) - 1)
        self._keys = [np.uint64(sample_seed(key, length, number)) for number in range(_ROUNDS)]
        self._order: _Words | None = None
        if length <= _SMALL:
            self._order = np.argsort(self._encrypt(np.arange(length, dtype=np.uint64))).astype(np.uint64)

    def __call__(self, positions: _Words) -> _Words:
        """Return the permutation's elements at positions below its length. The input array is not changed."""
        if self._order is not None:
            return self._order[positions]
        values = self._encrypt(positions)
        limit = np.uint64(self.length)
        outside = np.flatnonzero(values >= limit)
        # Cycle walking: encrypt results outside of the range again.
        while outside.size:
            again = self._encrypt(values[outside])
            values[outside] = again
            outside = outside[again >= limit]
        return values

    def _encrypt(self, values: _Words) -> _Words:
        left = values >> self._half
        right = values & self._mask
        # Each round replaces (left, right) by (right, left ^ mix(right + key)).
        for key in self._keys:
            mixed = right + key  # arrays of uint64 wrap around without a warning
            mixed ^= mixed >> np.uint64(33)
            mixed *= np.uint64(0xFF51AFD7ED558CCD)
            mixed ^= mixed >> np.uint64(33)
            mixed *= np.uint64(0xC4CEB9FE1A85EC53)
            mixed >>= np.uint64(64) - self._half  # the upper bits are mixed best
            mixed ^= left
            left, right = right, mixed
        result: _Words = (left << self._half) | right
        return result


class PermutationSampler(Sampler[int]):
    """Sampler that shuffles a dataset in constant memory and can start at any position without delay.

    It works as `sampler=` of any `torch.utils.data.DataLoader`. Each epoch has its own order, which depends only on the
    length, the seed and the epoch. Each iteration is the next epoch unless `set_epoch` is called.

    Args:
        data_source: The dataset, or its number of samples (below 2**62).
        seed: Any integer; each seed gives different orders.
        epoch: Epoch of the first iteration.

    Raises:
        ConfigurationError: If `data_source` has no length, or a length out of range.

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
                "PermutationSampler needs a dataset with a length, or an integer length, but got "
                f"an object of type {type(data_source).__name__!r}.",
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
        """Number of the current epoch, from 0.

        After `set_epoch`, the number of the next one.
        """
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which determines the permutation of the dataset that the next iteration yields.

        Args:
            epoch: Number of the epoch, from 0.
        """
        self._epoch = epoch
        self._begun = False

    def __len__(self) -> int:
        return self._source if isinstance(self._source, int) else len(self._source)

    def __iter__(self) -> Iterator[int]:
        # A generator, because torch creates iterators that it never uses, and these must not begin an epoch.
        yield from self.iterate_from(0)

    def iterate_from(self, position: int) -> Iterator[int]:
        """Yield the indices of an epoch's samples from `position` on, so that a resumed run starts there at once.

        Args:
            position: Number of samples to skip, from 0 to the length.
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
        """Return the index at a position of the epoch's order, or a list of indices for a slice."""
        permutation = self._permutation()
        if isinstance(position, slice):
            # A range resolves negative positions and slices.
            places = range(permutation.length)[position]
            positions = np.arange(places.start, places.stop, places.step, dtype=np.int64).astype(np.uint64)
            indices: list[int] = permutation(positions).tolist()
            return indices
        try:
            place = range(permutation.length)[position]
        except IndexError:
            raise IndexError(f"Index {position} is out of range for {permutation.length} samples.") from None
        return int(permutation(np.array([place], dtype=np.uint64))[0])

    def _permutation(self) -> KeyedPermutation:
        asked = (len(self), self.seed, self._epoch)
        if self._cached is None or self._cached[0] != asked:
            self._cached = (asked, KeyedPermutation(asked[0], sample_seed(*asked[1:], 0)))
        return self._cached[1]

    def __repr__(self) -> str:
        return f"PermutationSampler({len(self)}, seed={self.seed}, epoch={self._epoch})"

    def __getstate__(self) -> dict[str, Any]:
        # The permutation is cheap to rebuild, so it is not pickled.
        return {**self.__dict__, "_cached": None}


logger = get_logger(__name__)

LARGE_SET = 50_000_000  # with more samples, a RandomSampler's list of indices takes gigabytes


class InterleavingSampler(DistributedSampler[Any]):
    """`DistributedSampler` that gives this process every n-th sample.

    If the length is not a multiple of the number of processes, the first samples are repeated at the end.

    Args:
        dataset: The dataset.
        shard: Part of the data that this process reads.
        shuffle: Use a random order.
        seed: Seed of the random order.
    """

    def __init__(self, dataset: Any, shard: DataShard, shuffle: bool, seed: int) -> None:
        super().__init__(dataset, num_replicas=shard.count, rank=shard.index, shuffle=shuffle, seed=seed)


# Samplers that draw from the global generators only before their first index, or never.
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
    """Position of a loader in an epoch: the batches and samples before it, and the epoch's random state.

    Attributes:
        batches: Number of the user's batches before the position.
        samples: Number of samples before the position, or None if only the batches are known.
        start: Random state at the start of the epoch, or None to draw a new order.
        own: State that the user's loader saved at the position, or None if it has none.
        group: Batches per step of all processes in the run that saved the position, or None if unknown.
    """

    batches: int = 0
    samples: int | None = None
    start: EpochStart | None = None
    own: Mapping[str, Any] | None = None
    group: int | None = None


class IndexOrder:
    """Order in which a loader's sampler visits the samples of a dataset, as batches of sample indices."""

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
        return self.batch_sampler if self.batched else self.sampler

    @property
    def regular(self) -> bool:
        return type(self.batch_sampler) is BatchSampler

    @property
    def draws_at_once(self) -> bool:
        # True if all random numbers are drawn before the first index, as by `RandomSampler`.
        if self.batched and not self.regular:
            return type(self.batch_sampler) in (list, tuple)
        return type(self.sampler) in _DRAWS_AT_ONCE

    @property
    def batch_size(self) -> int | None:
        size = getattr(self.batch_sampler, "batch_size", None) if self.batched else 1
        return size if isinstance(size, int) else None

    @property
    def distributed_sampler(self) -> DistributedSampler[Any] | None:
        """The `DistributedSampler` that the user has given to the loader, or None."""
        return next((each for each in (self.sampler, self.source) if isinstance(each, DistributedSampler)), None)

    def __len__(self) -> int:
        return len(self.source)

    def reported_length(self) -> int | None:
        # Reading one batch ahead shows which batch is the last. A sampler that draws numbers while it iterates would
        # then draw them earlier than in torch's DataLoader, so its length is used instead.
        if self.draws_at_once or self._length_is_wrong:
            return None
        try:
            return len(self.source)
        except (TypeError, NotImplementedError):
            return None

    def record_end(self, batches: int, was_last: bool) -> None:
        if batches and not was_last:
            logger.warning_once(
                "%s has a length of %d batches, but returned %d, so the last batch of this epoch was not recognised as "
                "the last one. Correct the __len__ method.",
                type(self.source).__name__,
                len(self.source),
                batches,
            )
            # The length is ignored from now on.
            self._length_is_wrong = True

    def plain_iterator(self) -> Iterator[Any]:
        return iter(self.source)

    def batches(self, iterator: Iterator[Any]) -> Iterator[Any]:
        # A loader without batching yields single indices.
        return iterator if self.batched else ([index] for index in iterator)

    def from_position(
        self, iterator: Iterator[Any], position: Position, keep: int
    ) -> tuple[Iterator[Sequence[Any]], Head, int]:
        # Returns the batches of indices that are left, the epoch's first indices and the number of skipped samples.
        if self.batched and not self.regular:
            return _skip_batches(iterator, position, keep)
        size = self.batch_size or 1
        skipped = position.batches * size if position.samples is None else position.samples
        per_process = skipped
        if self.distributed_sampler is not None:
            # A DistributedSampler iterates over the samples of one process only.
            per_process //= self.distributed_sampler.num_replicas
        indices, first = _skip_indices(self.sampler, iterator if not self.batched else None, per_process, keep * size)
        head = Head(first, [min(size, len(first) - start) for start in range(0, len(first), size)])
        if not self.batched:
            return ([index] for index in indices), head, skipped
        return iter(BatchSampler(indices, size, self.batch_sampler.drop_last)), head, skipped


def _skip_indices(
    sampler: Any, iterator: Iterator[Any] | None, skipped: int, keep: int
) -> tuple[Iterator[Any], list[Any]]:
    # Returns the indices that are left, and the first `keep` of all.
    if type(sampler) is PermutationSampler:
        rest = sampler.iterate_from(skipped)
        following = list(islice(rest, 1))  # reading the first index begins the epoch
        return chain(following, rest), sampler[:keep]
    if type(sampler) is SequentialSampler:
        # Slicing a range skips indices without iterating over them.
        every = range(len(sampler.data_source))
        return iter(every[skipped:]), list(every[:keep])
    indices = iter(sampler) if iterator is None else iterator
    first = list(islice(indices, min(keep, skipped)))
    for _ in islice(indices, skipped - len(first)):
        pass
    following = list(islice(indices, keep - len(first)))
    return chain(following, indices), [*first, *following]


def _skip_batches(iterator: Iterator[Any], position: Position, keep: int) -> tuple[Iterator[Sequence[Any]], Head, int]:
    # Returns the batches that are left, the epoch's first `keep` batches and the number of skipped samples.
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
    # Draw no batch that is not skipped, because the result may depend on when it is drawn.
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
    """Wrapper of a `RandomSampler` that is seeded for each epoch."""

    def __init__(self, sampler: RandomSampler, seed: int) -> None:
        self._seed = seed
        self._generator = sampler.generator = torch.Generator()

    def set_epoch(self, epoch: int) -> None:
        self._generator.manual_seed(self._seed + epoch)
