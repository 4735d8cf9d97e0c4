"""A shuffle that is a function of the position, not a list: for sets too large for a list of indices."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any, overload

import numpy as np
import numpy.typing as npt
from torch.utils.data import Sampler

from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.seeds import sample_seed

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

    Args:
        length: The size of the set, below 2**62.
        key: 64 bits; each gives another permutation.
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
                code="DT-100",
            )
        self._source = data_source
        self.seed = seed
        self._epoch = epoch
        self._begun = False
        self._cached: tuple[tuple[int, int, int], KeyedPermutation] | None = None
        length = data_source if isinstance(data_source, int) else len(data_source)
        if not 0 <= length < _LARGEST_LENGTH:
            raise ConfigurationError(
                f"PermutationSampler takes lengths from 0 to 2**62 - 1, but got {length}.", code="DT-002"
            )

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
