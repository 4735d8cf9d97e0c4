"""Randomness that belongs to the sample: each one's random state derives from the seed, the epoch and its index."""

from __future__ import annotations

import hashlib
import operator
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    Sampler,
    StackDataset,
    Subset,
    TensorDataset,
    default_collate,
    get_worker_info,
)
from torch.utils.data._utils.collate import default_convert

from drivetrain.runtime.collectives import broadcast_object_list
from drivetrain.runtime.seeds import (
    GENERATORS,
    KeptGenerators,
    RandomState,
    drawn_since,
    sample_seed,
    sample_seeds,
    seed_all_generators,
)

COLLATE = 0xC011A7E  # distinguishes the random state of collating a batch from that of its first sample

_FIXED = (TensorDataset, list, tuple, range, torch.Tensor, np.ndarray)


def is_deterministic(dataset: Any) -> bool:
    """Whether reading a sample surely draws no random numbers: tensors, lists, tables, subsets and unions of such."""
    if "__getitems__" in getattr(dataset, "__dict__", ()):  # put on this one object, and called by torch's loader
        return False
    is_table = type(dataset).__module__ == "datasets.arrow_dataset" and dataset.format["type"] == "torch"
    if type(dataset) in _FIXED or is_table:
        return True
    if type(dataset) is Subset:
        return is_deterministic(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return all(is_deterministic(each) for each in dataset.datasets)
    if type(dataset) is StackDataset:
        parts = dataset.datasets
        return all(is_deterministic(each) for each in (parts.values() if isinstance(parts, dict) else parts))
    return False


def is_deterministic_collate(collate_fn: Any) -> bool:
    """Whether this is one of torch's own collate functions, which draw no random numbers."""
    return collate_fn in (default_collate, default_convert)


def key_of(index: Any) -> int:
    """An integer for any index that a sampler may give, the same in every process."""
    try:
        return operator.index(index)
    except TypeError:
        return int.from_bytes(hashlib.blake2b(repr(index).encode(), digest_size=8).digest(), "little")


def as_is(batch: Any) -> Any:
    """The collate function of loaders whose dataset gives whole batches."""
    return batch


class SeededBatches(Dataset[Any]):
    """Reads and collates whole batches of a map-style dataset, each sample in its own random state.

    It is indexed with `(epoch, indices)`: the epoch travels with the indices, since persistent workers hold a copy
    that no `set_epoch` reaches. In the main process the global generators are left as they were.

    Seeding a generator takes longer than reading many a sample. So those that no sample of the first batch draws from
    are left as they are from then on; where a batch has drawn from one nevertheless, its samples are read again, each
    from its own state, and the generator is seeded for each sample for good. So it is with what collates them.
    """

    def __init__(self, dataset: Any, collate_fn: Callable[[Any], Any], seed: int, batched: bool) -> None:
        self.dataset = dataset
        self.collate_fn = collate_fn
        self.seed = seed
        self.batched = batched
        self.reads_many = bool(getattr(dataset, "__getitems__", None))
        self.seeds_samples = not is_deterministic(dataset)
        # The generators that samples draw from, as far as is known; None before the first batch.
        self._drawn: list[str] | None = None if self.seeds_samples else []
        self._collates_plainly = is_deterministic_collate(collate_fn)
        self._collating_draws: bool | None = None  # from any of them; None before the first batch
        self._kept = KeptGenerators()

    def __getitem__(self, request: tuple[int, Any]) -> Any:
        self._kept.take()
        if self._drawn == [] and (self._collates_plainly or self._collating_draws is False) and self.batched:
            try:
                batch = self.collate_fn(self._read_seeded(*request, ()))
            except Exception:
                if not self._kept.changed():
                    raise  # else it may be due to what was drawn, and comes again below where it is not
            else:
                if not self._kept.changed():
                    return batch
            self._kept.put_back()
        try:
            return self._read(*request)
        finally:
            if get_worker_info() is None:
                self._kept.put_back()

    def _read(self, epoch: int, indices: Any) -> Any:
        if not self.batched:
            seed_all_generators(sample_seed(self.seed, epoch, key_of(indices)))
            return self.collate_fn(self.dataset[indices])
        samples = self._samples(epoch, indices)
        if self._collates_plainly:
            return self.collate_fn(samples)
        seed = collate_seed(self.seed, epoch, key_of(indices[0]) if len(indices) else 0)
        seed_all_generators(seed)
        batch = self.collate_fn(samples)
        if not (self._drawn or self._collating_draws):
            self._collating_draws = bool(drawn_since(seed, GENERATORS))
        return batch

    def _samples(self, epoch: int, indices: Any) -> Any:
        if not self.seeds_samples or not len(indices):
            return self._read_seeded(epoch, indices, ())
        if self._drawn is None:
            return self._read_first(epoch, indices)
        others = [name for name in GENERATORS if name not in self._drawn]
        try:
            samples = self._read_seeded(epoch, indices, self._drawn)
        except Exception:
            late = self._kept.changed(others)
            if not late:
                raise
        else:
            late = self._kept.changed(others)
            if not late:
                return samples
        self._drawn = [*self._drawn, *late]
        return self._samples(epoch, indices)

    def _read_seeded(self, epoch: int, indices: Any, drawn: Sequence[str]) -> Any:
        """Samples, with these generators seeded for each."""
        if not drawn:
            return self.dataset.__getitems__(indices) if self.reads_many else [self.dataset[index] for index in indices]
        seeds = [GENERATORS[name].seed for name in drawn]
        seed_of = sample_seeds(self.seed, epoch)
        samples = []
        for index in indices:
            seed = seed_of(key_of(index))
            for seed_generator in seeds:
                seed_generator(seed)
            samples.append(self._read_one(index))
        return samples

    def _read_first(self, epoch: int, indices: Any) -> Any:
        """Samples, with all generators seeded for each, and note which of them they draw from."""
        drawn: list[str] = []
        samples = []
        for index in indices:
            seed = sample_seed(self.seed, epoch, key_of(index))
            seed_all_generators(seed)
            samples.append(self._read_one(index))
            drawn += drawn_since(seed, [name for name in GENERATORS if name not in drawn])
        self._drawn = drawn
        return samples

    def _read_one(self, index: Any) -> Any:
        return self.dataset.__getitems__([index])[0] if self.reads_many else self.dataset[index]


def collate_seed(seed: int, epoch: int, key: int) -> int:
    """The seed for collating the batch whose first sample has this key."""
    return sample_seed(sample_seed(seed, epoch, key), COLLATE, 0)


class ShowUsersDataset:
    """A worker's init function: `get_worker_info().dataset` is the user's dataset, not what wraps it."""

    def __init__(self, worker_init_fn: Callable[[int], None] | None) -> None:
        self.worker_init_fn = worker_init_fn

    def __call__(self, worker_id: int) -> None:
        info = get_worker_info()
        if info is not None:
            # The class refuses assignment, for the users' sake.
            object.__setattr__(info, "dataset", info.dataset.dataset)  # type: ignore[attr-defined]
        if self.worker_init_fn is not None:
            self.worker_init_fn(worker_id)


# The random state that an epoch's order is drawn from: kept, shared between processes, and drawn from apart


Item = TypeVar("Item")

_END: Any = object()
_NESTED = ("batch_sampler", "sampler", "base_sampler")
_WRAPPED = (DataLoader, Sampler)


def several_processes() -> bool:
    """Whether there is a process group of more than one process, which must agree about the order."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def find_generators(*owners: Any) -> list[Any]:
    """The random generators that loaders and samplers, and the samplers inside of these, hold as attributes.

    Those of torch on the CPU, of NumPy (`Generator`, `RandomState`) and of Python (`Random`) are found, each once,
    in an order that is the same on all processes.
    """
    found: list[Any] = []
    seen: set[int] = set()
    waiting = [owner for owner in owners if owner is not None]
    while waiting:
        owner = waiting.pop(0)
        if id(owner) in seen:
            continue
        seen.add(id(owner))
        attributes = getattr(owner, "__dict__", {})
        for name in sorted(attributes):
            value = attributes[name]
            if isinstance(value, torch.Generator):
                is_generator = value.device.type == "cpu" and value is not torch.default_generator
            else:
                is_generator = isinstance(value, (np.random.Generator, np.random.RandomState, random.Random))
            if is_generator and id(value) not in seen:
                seen.add(id(value))
                found.append(value)
        waiting.extend(attributes[name] for name in _NESTED if attributes.get(name) is not None)
        # What a loader or a sampler is wrapped in may hold it under any name.
        waiting.extend(attributes[name] for name in sorted(attributes) if isinstance(attributes[name], _WRAPPED))
        several = attributes.get("loaders")  # of a CombinedLoader
        if isinstance(several, list):
            waiting.extend(each for each in several if isinstance(each, _WRAPPED))
    return found


def generator_state(generator: Any) -> Any:
    """The state of a generator that `find_generators` found: bytes, or lists and dicts of numbers and strings.

    No tensor: any process may write those of a checkpoint, and if rank 0 reads for all, only its state counts.
    """
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, np.random.Generator):
        return _plain(generator.bit_generator.state)
    if isinstance(generator, np.random.RandomState):
        return _plain(generator.get_state(legacy=False))
    version, words, gauss = generator.getstate()
    return [version, list(words), gauss]


def set_generator_state(generator: Any, state: Any) -> None:
    """Put a generator where `generator_state` found it."""
    if isinstance(generator, torch.Generator):
        state = torch.frombuffer(bytearray(state), dtype=torch.uint8) if isinstance(state, bytes) else state
        generator.set_state(torch.as_tensor(state, dtype=torch.uint8))
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = _arrays(state)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(_arrays(state))
    else:
        generator.setstate((state[0], tuple(state[1]), state[2]))


@contextmanager
def kept_generators(*owners: Any) -> Iterator[None]:
    """Put the generators that `find_generators` finds back, in the end, to where they were."""
    generators = find_generators(*owners)
    states = [generator_state(generator) for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            set_generator_state(generator, state)


@dataclass
class EpochStart:
    """The random state that an epoch's order is drawn from.

    Attributes:
        shared: Python's, NumPy's and torch's global generators.
        own: The states of the generators that the loader and its samplers hold.
        new_workers: Whether torch's loader first draws a seed for workers; those that stay have one.
        left: Where the global generators were left while the order is drawn batch by batch; None if drawn at once.
        follows: Which of them, Python's, NumPy's and torch's, go where the order's draws end.
    """

    shared: RandomState
    own: list[Any]
    new_workers: bool = True
    left: RandomState | None = None
    follows: tuple[bool, bool, bool] = (False, False, False)

    @classmethod
    def capture(cls, generators: Iterable[Any], new_workers: bool = True) -> EpochStart:
        """The state right now."""
        return cls(RandomState.capture(devices=False), [generator_state(each) for each in generators], new_workers)

    def agreed(self) -> EpochStart:
        """That of rank 0, on every rank. All processes must call it."""
        agreed: EpochStart = broadcast_object_list([self])[0]
        return agreed

    def state_dict(self) -> dict[str, Any]:
        """The state as dicts and lists of tensors, numbers and strings."""
        state = {"shared": self.shared.state_dict(), "own": list(self.own), "new_workers": self.new_workers}
        if self.left is not None:
            state |= {"left": self.left.state_dict(), "follows": list(self.follows)}
        return state

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> EpochStart:
        """The way back from `state_dict`."""
        left = RandomState.from_state_dict(state["left"]) if "left" in state else None
        shared, follows = RandomState.from_state_dict(state["shared"]), state.get("follows", (False, False, False))
        return cls(shared, list(state["own"]), bool(state["new_workers"]), left, tuple(follows))


class SeparateDraws:
    """Draws from a state of its own, and leaves the global generators to the user.

    A process whose global generators stood where the epoch starts is afterwards where it would be had it drawn
    from them itself, so that the next epoch has another order; any other process is back where it was. This holds too
    for an epoch that was interrupted, if nothing else had drawn from the generators in it.
    """

    def __init__(self, start: EpochStart) -> None:
        before = RandomState.capture(devices=False)
        self._start = start
        self._state = start.shared
        self._same = _compare(before, start.left or start.shared)
        if start.left is not None:
            self._same = _both(self._same, start.follows)
        self._resumes, self._draws_later = start.left is not None, False
        self._left: RandomState | None = None

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Draw in the body from the separate state; the global generators are then as before."""
        outside = RandomState.capture(devices=False)
        self._state.restore()
        try:
            yield
        finally:
            self._state = RandomState.capture(devices=False)
            outside.restore()

    def iterate(self, items: Iterable[Item]) -> Iterator[Item]:
        """The items, each read while drawing from the separate state."""
        self._draws_later = True
        return self._iterate(items)

    def _iterate(self, items: Iterable[Item]) -> Iterator[Item]:
        with self.drawing():
            iterator = iter(items)
        while True:
            with self.drawing():
                item = next(iterator, _END)
            if item is _END:
                self.settle()  # before the last batch is handed out, with which the run may be saved
                return
            yield item

    def settle(self) -> None:
        """Advance the global generators as if they had been drawn from, where they stood at the start.

        Called once the first items are drawn and again at the end. After the first time, only generators that nothing
        else has used in between are advanced further.
        """
        now = RandomState.capture(devices=False)
        if self._left is not None:
            self._same = _both(self._same, _compare(now, self._left))
        follows = (False, False, False) if self._resumes else self._same  # they were advanced by the first items before
        self._resumes = False
        self._left = RandomState(
            python=self._state.python if follows[0] else now.python,
            numpy=self._state.numpy if follows[1] else now.numpy,
            torch=self._state.torch if follows[2] else now.torch,
        )
        self._left.restore()
        if self._draws_later:
            self._start.left, self._start.follows = self._left, self._same


def _compare(one: RandomState, other: RandomState) -> tuple[bool, bool, bool]:
    """Whether Python's, NumPy's and torch's states are the same."""
    numpy = all(np.array_equal(mine, theirs) for mine, theirs in zip(one.numpy, other.numpy, strict=True))
    return one.python == other.python, numpy, torch.equal(one.torch, other.torch)


def _both(one: tuple[bool, bool, bool], other: tuple[bool, bool, bool]) -> tuple[bool, bool, bool]:
    return one[0] and other[0], one[1] and other[1], one[2] and other[2]


def _plain(state: Any) -> Any:
    """A NumPy generator's state with lists in place of arrays."""
    if isinstance(state, Mapping):
        return {str(key): _plain(value) for key, value in state.items()}
    if isinstance(state, np.ndarray):
        return {"dtype": str(state.dtype), "values": state.tolist()}
    return state.item() if isinstance(state, np.generic) else state


def _arrays(state: Any) -> Any:
    """The way back from `_plain`."""
    if isinstance(state, Mapping):
        if state.keys() == {"dtype", "values"}:
            return np.array(state["values"], dtype=state["dtype"])
        return {key: _arrays(value) for key, value in state.items()}
    return state
