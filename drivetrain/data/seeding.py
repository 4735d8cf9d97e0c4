"""Random state of samples and epochs: seeding each sample, and drawing an epoch's order reproducibly."""

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

COLLATE = 0xC011A7E  # separates the random state of collating a batch from that of its first sample

_FIXED = (TensorDataset, list, tuple, range, torch.Tensor, np.ndarray)


def is_deterministic(dataset: Any) -> bool:
    """Return True if reading a sample certainly draws no random numbers, as with tensors, lists and subsets of them."""
    if "__getitems__" in getattr(dataset, "__dict__", ()):  # set on the instance; torch's DataLoader calls it
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
    return collate_fn in (default_collate, default_convert)


def key_of(index: Any) -> int:
    """Map any index of a sampler to an integer, equal in every process."""
    try:
        return operator.index(index)
    except TypeError:
        return int.from_bytes(hashlib.blake2b(repr(index).encode(), digest_size=8).digest(), "little")


def as_is(batch: Any) -> Any:
    return batch


class SeededBatches(Dataset[Any]):
    """Dataset that reads and collates whole batches, with each sample in its own random state.

    It is indexed with `(epoch, indices)`, because persistent workers hold a copy that `set_epoch` cannot reach. In the
    main process the global generators are restored afterwards.

    Seeding a generator may take longer than reading a sample. A generator that no sample of the first batch uses is
    therefore not seeded for later samples. If a later batch uses it after all, the batch is read again with all its
    samples seeded. From then on this generator is always seeded. Collating is treated in this way too.
    """

    def __init__(self, dataset: Any, collate_fn: Callable[[Any], Any], seed: int, batched: bool) -> None:
        self.dataset = dataset
        self.collate_fn = collate_fn
        self.seed = seed
        self.batched = batched
        self.reads_many = bool(getattr(dataset, "__getitems__", None))
        self.seeds_samples = not is_deterministic(dataset)
        # Names of the generators that samples are known to use; None before the first batch.
        self._drawn: list[str] | None = None if self.seeds_samples else []
        self._collates_plainly = is_deterministic_collate(collate_fn)
        self._collating_draws: bool | None = None  # True if collating uses a generator; None before the first batch
        self._kept = KeptGenerators()

    def __getitem__(self, request: tuple[int, Any]) -> Any:
        self._kept.take()
        # If nothing is known to draw, read without seeding, and check the generators afterwards.
        if self._drawn == [] and (self._collates_plainly or self._collating_draws is False) and self.batched:
            try:
                batch = self.collate_fn(self._read_seeded(*request, ()))
            except Exception:
                if not self._kept.changed():
                    raise  # otherwise unseeded draws may be the cause: read again below with all samples seeded
            else:
                if not self._kept.changed():
                    return batch
            self._kept.put_back()
        try:
            return self._read(*request)
        finally:
            # In the main process these are the user's generators.
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
        # From now on seed these generators too, and read the batch again.
        self._drawn = [*self._drawn, *late]
        return self._samples(epoch, indices)

    def _read_seeded(self, epoch: int, indices: Any, drawn: Sequence[str]) -> Any:
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
        """Read samples with all generators seeded before each one, and record which generators they use."""
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
    return sample_seed(sample_seed(seed, epoch, key), COLLATE, 0)


class ShowUsersDataset:
    """Worker init function that makes `get_worker_info().dataset` the user's dataset instead of its wrapper."""

    def __init__(self, worker_init_fn: Callable[[int], None] | None) -> None:
        self.worker_init_fn = worker_init_fn

    def __call__(self, worker_id: int) -> None:
        info = get_worker_info()
        if info is not None:
            # torch's WorkerInfo refuses ordinary assignment.
            object.__setattr__(info, "dataset", info.dataset.dataset)  # type: ignore[attr-defined]
        if self.worker_init_fn is not None:
            self.worker_init_fn(worker_id)


# Random state of an epoch's order


Item = TypeVar("Item")

_END: Any = object()
_NESTED = ("batch_sampler", "sampler", "base_sampler")
_WRAPPED = (DataLoader, Sampler)


def several_processes() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def find_generators(*owners: Any) -> list[Any]:
    """Find the random generators that loaders and samplers, also nested ones, hold as attributes.

    Each generator of torch (CPU), NumPy (`Generator`, `RandomState`) and Python (`Random`) is returned once, in an
    order that is equal on all processes.
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
        # Wrappers may hold the wrapped loader or sampler under any name.
        waiting.extend(attributes[name] for name in sorted(attributes) if isinstance(attributes[name], _WRAPPED))
        several = attributes.get("loaders")  # the attribute of a CombinedLoader
        if isinstance(several, list):
            waiting.extend(each for each in several if isinstance(each, _WRAPPED))
    return found


def generator_state(generator: Any) -> Any:
    """Return a generator's state as bytes, or as lists and dicts of numbers and strings.

    The result holds no tensors. Checkpoints may save tensors from any process, but if rank 0 reads for all, only its
    state is valid.
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
    """Restore after the body all generators that `find_generators` finds in the given objects."""
    generators = find_generators(*owners)
    states = [generator_state(generator) for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            set_generator_state(generator, state)


@dataclass
class EpochStart:
    """Random state from which an epoch's order is drawn.

    Attributes:
        shared: State of the global generators of Python, NumPy and torch.
        own: States of the generators that the loader and its samplers hold.
        new_workers: True if torch's DataLoader first draws a seed for new workers, and False if workers persist.
        left: State of the global generators after the latest batch, if the order is drawn batch by batch; else None.
        follows: For Python, NumPy and torch, True if the global generator advances with the order's draws.
    """

    shared: RandomState
    own: list[Any]
    new_workers: bool = True
    left: RandomState | None = None
    follows: tuple[bool, bool, bool] = (False, False, False)

    @classmethod
    def capture(cls, generators: Iterable[Any], new_workers: bool = True) -> EpochStart:
        return cls(RandomState.capture(devices=False), [generator_state(each) for each in generators], new_workers)

    def agreed(self) -> EpochStart:
        """Broadcast the epoch's random state from rank 0. All processes must call it, and get equal states."""
        agreed: EpochStart = broadcast_object_list([self])[0]
        return agreed

    def state_dict(self) -> dict[str, Any]:
        state = {"shared": self.shared.state_dict(), "own": list(self.own), "new_workers": self.new_workers}
        if self.left is not None:
            state |= {"left": self.left.state_dict(), "follows": list(self.follows)}
        return state

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> EpochStart:
        left = RandomState.from_state_dict(state["left"]) if "left" in state else None
        shared, follows = RandomState.from_state_dict(state["shared"]), state.get("follows", (False, False, False))
        return cls(shared, list(state["own"]), bool(state["new_workers"]), left, tuple(follows))


class SeparateDraws:
    """Separate random state from which an epoch's order is drawn without disturbing the global generators.

    If the global generators were at the start of the epoch, they advance as if the order had been drawn from them. The
    next epoch then has another order. Otherwise they are restored. This also applies to an interrupted epoch in which
    nothing else used the generators.
    """

    def __init__(self, start: EpochStart) -> None:
        before = RandomState.capture(devices=False)
        self._start = start
        self._state = start.shared
        self._same = _equal_states(before, start.left or start.shared)
        if start.left is not None:
            self._same = _elementwise_and(self._same, start.follows)
        self._resumes, self._draws_later = start.left is not None, False
        self._left: RandomState | None = None

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Use the separate random state during the body, and restore the global generators afterwards."""
        outside = RandomState.capture(devices=False)
        self._state.restore()
        try:
            yield
        finally:
            self._state = RandomState.capture(devices=False)
            outside.restore()

    def iterate(self, items: Iterable[Item]) -> Iterator[Item]:
        """Iterate over items, and read each one with the separate random state."""
        self._draws_later = True
        return self._iterate(items)

    def _iterate(self, items: Iterable[Item]) -> Iterator[Item]:
        with self.drawing():
            iterator = iter(items)
        while True:
            with self.drawing():
                item = next(iterator, _END)
            if item is _END:
                self.settle()  # before the last batch is handed out, because a checkpoint may follow it
                return
            yield item

    def settle(self) -> None:
        """Advance the global generators as if the order had been drawn from them, if they were at its start.

        It is called after the first items are drawn, and again at the end. The second call advances only generators
        that nothing else has used in between.
        """
        now = RandomState.capture(devices=False)
        if self._left is not None:
            self._same = _elementwise_and(self._same, _equal_states(now, self._left))
        follows = (False, False, False) if self._resumes else self._same  # the interrupted run already advanced them
        self._resumes = False
        self._left = RandomState(
            python=self._state.python if follows[0] else now.python,
            numpy=self._state.numpy if follows[1] else now.numpy,
            torch=self._state.torch if follows[2] else now.torch,
        )
        self._left.restore()
        if self._draws_later:
            self._start.left, self._start.follows = self._left, self._same


def _equal_states(one: RandomState, other: RandomState) -> tuple[bool, bool, bool]:
    """Compare two random states. Returns a flag each for Python's, NumPy's and torch's generator."""
    numpy = all(np.array_equal(mine, theirs) for mine, theirs in zip(one.numpy, other.numpy, strict=True))
    return one.python == other.python, numpy, torch.equal(one.torch, other.torch)


def _elementwise_and(one: tuple[bool, bool, bool], other: tuple[bool, bool, bool]) -> tuple[bool, bool, bool]:
    return one[0] and other[0], one[1] and other[1], one[2] and other[2]


def _plain(state: Any) -> Any:
    """Convert the NumPy arrays in a generator's state to lists."""
    if isinstance(state, Mapping):
        return {str(key): _plain(value) for key, value in state.items()}
    if isinstance(state, np.ndarray):
        return {"dtype": str(state.dtype), "values": state.tolist()}
    return state.item() if isinstance(state, np.generic) else state


def _arrays(state: Any) -> Any:
    """Convert lists in a generator's state back to NumPy arrays."""
    if isinstance(state, Mapping):
        if state.keys() == {"dtype", "values"}:
            return np.array(state["values"], dtype=state["dtype"])
        return {key: _arrays(value) for key, value in state.items()}
    return state
