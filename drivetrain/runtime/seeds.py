"""Random state: seeding a run and its samples, capturing and restoring generators, and drawing an epoch's order."""

from __future__ import annotations

import hashlib
import operator
import os
import pickle
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from drivetrain.runtime.collectives import broadcast_object_list
from drivetrain.runtime.devices import ADDED, available_device_kinds
from drivetrain.runtime.environment import ProcessEnvironment
from drivetrain.runtime.errors import CheckpointError, ConfigurationError
from drivetrain.runtime.state import PartialState

MAX_SEED = 2**32 - 1  # NumPy's global generator accepts no larger seed

# Packages that bring devices to torch.
_PLUGINS = frozenset({"torch_xla", "torch_npu", "torch_mlu", "torch_musa", "torch_sdaa", "habana_frameworks"})

_MASK = 2**64 - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15


def set_seed(seed: int, device_specific: bool = False, deterministic: bool | Literal["warn"] = False) -> None:
    """Seed the global random generators of Python, NumPy and torch on all devices, and record the seed.

    The recorded seed is the `seed` argument, even with `device_specific`. The seeds of samples are derived from it (see
    `sample_seed`). No process group is started.

    Args:
        seed: From 0 to 2**32 - 1.
        device_specific: Add this process's rank to the seed of the generators.
        deterministic: Use torch's deterministic algorithms, and raise an error for operations that have none. `"warn"`
            warns instead. False changes nothing.

    Raises:
        ConfigurationError: If `seed` or `deterministic` is not an allowed value.

    Example:
        ```python
        from drivetrain import set_seed

        set_seed(42)
        ```
    """
    base = _checked_seed(seed)
    if deterministic is not False:
        make_deterministic(deterministic)
    PartialState.registry()["seed"] = base
    own = base
    if device_specific:
        state = PartialState.existing()
        environment = state.environment if state is not None else ProcessEnvironment.detect()
        own = (base + environment.rank) % (MAX_SEED + 1)  # NumPy would refuse a larger seed
    random.seed(own)
    np.random.seed(own)
    torch.default_generator.manual_seed(own)
    for kind in available_device_kinds():
        kind.manual_seed_all(own)


def recorded_seed() -> int | None:
    """Return the seed of the last `set_seed` call in this process, or None."""
    seed: int | None = PartialState.registry().get("seed")
    return seed


def sample_seed(seed: int, epoch: int, index: int) -> int:
    """Return the 64-bit seed of one sample in one epoch.

    Each argument goes through SplitMix64's finaliser in turn (Steele, Lea and Flood, "Fast splittable pseudorandom
    number generators", OOPSLA 2014). For one seed and epoch, different indices below 2**64 have different seeds.
    """
    return sample_seeds(seed, epoch)(index)


def sample_seeds(seed: int, epoch: int) -> Callable[[int], int]:
    # Mixed once per epoch, so that only the index is mixed for each sample.
    base = _splitmix64((_splitmix64(seed) + epoch) & _MASK)
    return lambda index: _splitmix64((base + index) & _MASK)


def _splitmix64(value: int) -> int:
    # One step of the SplitMix64 generator.
    mixed = (value + _GOLDEN_GAMMA) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)


def seed_all_generators(seed: int) -> None:
    """Seed the global CPU generators of Python, NumPy and torch.

    It is fast enough for every sample. NumPy gets the upper and torch the lower 32 bits. Both are Mersenne Twisters
    with 32-bit seeds, so equal seeds would give equal streams.
    """
    for each in GENERATORS.values():
        each.seed(seed)


class GlobalGenerator(NamedTuple):
    """Functions to seed, draw from, save and restore one global random generator, such as NumPy's."""

    seed: Callable[[int], object]  # from 64 bits, or from 32 of them
    draw: Callable[[], object]  # at least 53 random bits
    get_state: Callable[[], Any]
    set_state: Callable[[Any], object]


def _seed_numpy(seed: int) -> None:
    np.random.seed(seed >> 32)


def _draw_from_torch() -> int:
    return int(torch.empty((), dtype=torch.int64).random_())


GENERATORS = {
    "python": GlobalGenerator(random.seed, partial(random.getrandbits, 64), random.getstate, random.setstate),
    "numpy": GlobalGenerator(
        _seed_numpy, np.random.random_sample, partial(np.random.get_state, legacy=False), np.random.set_state
    ),
    "torch": GlobalGenerator(
        torch.default_generator.manual_seed, _draw_from_torch, torch.get_rng_state, torch.set_rng_state
    ),
}


def drawn_since(seed: int, names: Iterable[str]) -> list[str]:
    drawn = []
    for name in names:
        generator = GENERATORS[name]
        # An unused generator returns its first value after seeding.
        found = generator.draw()
        generator.seed(seed)
        # At least 53 bits are compared, so an equal draw by chance is negligible.
        if generator.draw() != found:
            drawn.append(name)
    return drawn


_own_generators: dict[str, torch.Generator] = {}


def own_generator(name: str) -> torch.Generator:
    """Create a named torch generator, whose use does not advance the global random generators.

    It is seeded from the state of torch's global generator, which does not change. Its state is part of this process's
    `RandomState` until another generator of that name is created.
    """
    state = torch.default_generator.get_state().numpy().tobytes()
    seed = int.from_bytes(hashlib.blake2b(state, digest_size=8).digest(), "little")
    generator = torch.Generator().manual_seed(seed >> 1)
    _own_generators[name] = generator
    return generator


@dataclass(frozen=True)
class RandomState:
    """Saved state of the global random generators of all devices.

    Attributes:
        python: State from `random.getstate`.
        numpy: State from `numpy.random.get_state`.
        torch: State of torch's CPU generator, as bytes.
        devices: State of each device kind's current device, as bytes, by the kind's name.
        own: States of the generators from `own_generator`, as bytes, by name. Captured along with `devices`.

    Example:
        ```python
        from drivetrain.runtime.seeds import RandomState

        state = RandomState.capture()
        ...
        state.restore()
        ```
    """

    python: tuple[Any, ...]
    numpy: tuple[Any, ...]
    torch: Tensor
    devices: dict[str, Tensor] = field(default_factory=dict)
    own: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def capture(cls, devices: bool = True) -> RandomState:
        states: dict[str, Tensor] = {}
        own: dict[str, Tensor] = {}
        if devices:
            # Where torch has no accelerator, nothing but a plug-in has generators, and the kinds need not be asked.
            if torch.accelerator.current_accelerator() is not None or ADDED or not _PLUGINS.isdisjoint(sys.modules):
                found = ((kind.name, kind.get_rng_state()) for kind in available_device_kinds())
                states = {name: state for name, state in found if state is not None}
            own = {name: generator.get_state() for name, generator in _own_generators.items()}
        numpy_state: Any = np.random.get_state()
        return cls(random.getstate(), numpy_state, torch.default_generator.get_state(), states, own)

    def restore(self) -> None:
        """Set the random generators back to the states that `capture` has saved."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.default_generator.set_state(self.torch)
        here = {kind.name: kind for kind in available_device_kinds()} if self.devices else {}
        for name, state in self.devices.items():
            if name in here:
                here[name].set_rng_state(state)
        for name, generator in _own_generators.items():
            if name in self.own:
                generator.set_state(self.own[name])

    def state_dict(self) -> dict[str, Any]:
        version, words, gauss = self.python
        name, keys, position, has_gauss, cached = self.numpy
        return {
            "python": {"version": version, "state": torch.tensor(words), "gauss_next": gauss},
            "numpy": {
                "bit_generator": str(name),
                "state": torch.from_numpy(keys.astype(np.int64)),
                "position": int(position),
                "has_gauss": int(has_gauss),
                "cached_gaussian": float(cached),
            },
            "torch": self.torch.clone(),
            "devices": {kind: state.cpu().clone() for kind, state in self.devices.items()},
            "own": {name: state.clone() for name, state in self.own.items()},
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> RandomState:
        """Rebuild a random state from the dict that `state_dict` returned."""
        try:
            python, numpy = state["python"], state["numpy"]
            return cls(
                python=(python["version"], tuple(_integers(python["state"])), python["gauss_next"]),
                numpy=(
                    numpy["bit_generator"],
                    np.array(_integers(numpy["state"]), dtype=np.uint32),
                    numpy["position"],
                    numpy["has_gauss"],
                    numpy["cached_gaussian"],
                ),
                torch=torch.as_tensor(state["torch"], dtype=torch.uint8),
                devices={k: torch.as_tensor(v, dtype=torch.uint8) for k, v in state["devices"].items()},
                own={k: torch.as_tensor(v, dtype=torch.uint8) for k, v in state.get("own", {}).items()},
            )
        except KeyError as error:
            raise CheckpointError(
                f"This random state has no key {error}. Use a state from RandomState.state_dict()."
            ) from None


class KeptGenerators:
    """Snapshot of the global CPU generators, which can restore them and show which of them have been used.

    Used as a context manager, it restores the generators after the body. It can be entered repeatedly.
    """

    def __init__(self) -> None:
        self._states: dict[str, Any] = {}

    def take(self) -> None:
        self._states = {name: each.get_state() for name, each in GENERATORS.items()}

    def changed(self, names: Iterable[str] | None = None) -> list[str]:
        return [
            name
            for name in (GENERATORS if names is None else names)
            if not _same_state(GENERATORS[name].get_state(), self._states[name])
        ]

    def put_back(self) -> None:
        for name, state in self._states.items():
            GENERATORS[name].set_state(state)

    def __enter__(self) -> None:
        self.take()

    def __exit__(self, *_: object) -> None:
        self.put_back()

    def __getstate__(self) -> dict[str, Any]:
        return {"_states": {}}


def _same_state(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):  # NumPy's state, which holds arrays
        # Comparing arrays with == gives an array, which has no truth value.
        return pickle.dumps(one) == pickle.dumps(other)
    return bool(one == other)


@contextmanager
def isolated_random_state(devices: bool = False) -> Iterator[None]:
    """Return a context manager that restores the global random generators when it exits.

    Copying NumPy's state takes most of the time, so use it once per batch and not once per sample.
    """
    state = RandomState.capture(devices=devices)
    try:
        yield
    finally:
        state.restore()


def _checked_seed(seed: int) -> int:
    try:
        value = -1 if isinstance(seed, bool) else operator.index(seed)
    except TypeError:
        value = -1
    if not 0 <= value <= MAX_SEED:
        raise ConfigurationError(f"seed is {seed!r}, but must be an integer from 0 to {MAX_SEED} (2**32 - 1).")
    return value


def make_deterministic(mode: bool | str) -> None:
    """Make torch use deterministic algorithms."""
    if mode not in (True, "warn"):
        raise ConfigurationError(f"deterministic is {mode!r}, but must be True, False or 'warn'.")
    # cuBLAS reads this when it creates its handle: https://docs.nvidia.com/cuda/cublas/#results-reproducibility
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=mode == "warn")
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def _integers(values: Any) -> list[int]:
    integers: list[int] = values.tolist() if isinstance(values, Tensor) else list(values)
    return integers


# The random state that an epoch's order is drawn from: kept, shared between processes, and drawn from apart


Item = TypeVar("Item")

_END: Any = object()
_NESTED = ("batch_sampler", "sampler", "base_sampler")
_WRAPPED = (DataLoader, Sampler)


def several_processes() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def find_generators(*owners: Any) -> list[Any]:
    """Return all random generators that are attributes of `owners`, such as loaders, datasets and samplers.

    These are generators of torch (CPU), NumPy (`Generator`, `RandomState`) and Python (`Random`), each once, in an
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
        # Sorted, so that the order is equal on all processes.
        for name in sorted(attributes):
            value = attributes[name]
            if isinstance(value, torch.Generator):
                # The global generator is captured separately, with NumPy's and Python's.
                is_generator = value.device.type == "cpu" and value is not torch.default_generator
            else:
                is_generator = isinstance(value, (np.random.Generator, np.random.RandomState, random.Random))
            if is_generator and id(value) not in seen:
                seen.add(id(value))
                found.append(value)
        waiting.extend(attributes[name] for name in _NESTED if attributes.get(name) is not None)
        # A wrapper may store the loader or sampler under any attribute name.
        waiting.extend(attributes[name] for name in sorted(attributes) if isinstance(attributes[name], _WRAPPED))
        several = attributes.get("loaders")  # of a CombinedLoader
        if isinstance(several, list):
            waiting.extend(each for each in several if isinstance(each, _WRAPPED))
    return found


def generator_state(generator: Any) -> Any:
    """Return the state of a random generator as plain values for a checkpoint.

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
    generators = find_generators(*owners)
    states = [generator_state(generator) for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            set_generator_state(generator, state)


@dataclass
class EpochStart:
    """Random state at the start of an epoch, from which a resumed run draws the same sample order.

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
        # With the random state of rank 0, all processes draw one sample order.
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
    """Copy of an epoch's random state, from which its sample order is drawn instead of the global generators.

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
            # On resume, a generator follows the order only if it did so before the interruption.
            self._same = _elementwise_and(self._same, start.follows)
        self._resumes, self._draws_later = start.left is not None, False
        self._left: RandomState | None = None

    @contextmanager
    def drawing(self) -> Iterator[None]:
        outside = RandomState.capture(devices=False)
        self._state.restore()
        try:
            yield
        finally:
            # The next body continues where this one has stopped.
            self._state = RandomState.capture(devices=False)
            outside.restore()

    def iterate(self, items: Iterable[Item]) -> Iterator[Item]:
        self._draws_later = True
        return self._iterate(items)

    def _iterate(self, items: Iterable[Item]) -> Iterator[Item]:
        with self.drawing():
            # `iter` may draw too: a DataLoader draws a seed for its workers.
            iterator = iter(items)
        while True:
            with self.drawing():
                item = next(iterator, _END)
            if item is _END:
                self.settle()  # before the last batch is handed out, with which the run may be saved
                return
            yield item

    def settle(self) -> None:
        # Advances the global generators as if they had drawn the sample order. It is called after the first items are
        # drawn, and again at the end. A generator that other code has used in between keeps its own state.
        now = RandomState.capture(devices=False)
        if self._left is not None:
            self._same = _elementwise_and(self._same, _equal_states(now, self._left))
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


def _equal_states(one: RandomState, other: RandomState) -> tuple[bool, bool, bool]:
    # One result each for Python, NumPy and torch.
    numpy = all(np.array_equal(mine, theirs) for mine, theirs in zip(one.numpy, other.numpy, strict=True))
    return one.python == other.python, numpy, torch.equal(one.torch, other.torch)


def _elementwise_and(one: tuple[bool, bool, bool], other: tuple[bool, bool, bool]) -> tuple[bool, bool, bool]:
    return one[0] and other[0], one[1] and other[1], one[2] and other[2]


def _plain(state: Any) -> Any:
    # `_arrays` is the inverse.
    if isinstance(state, Mapping):
        return {str(key): _plain(value) for key, value in state.items()}
    if isinstance(state, np.ndarray):
        return {"dtype": str(state.dtype), "values": state.tolist()}
    return state.item() if isinstance(state, np.generic) else state


def _arrays(state: Any) -> Any:
    if isinstance(state, Mapping):
        if state.keys() == {"dtype", "values"}:
            return np.array(state["values"], dtype=state["dtype"])
        return {key: _arrays(value) for key, value in state.items()}
    return state
