"""Random state: seeding a run and one sample, keeping generators' states, and drawing an epoch's order from one."""

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

MAX_SEED = 2**32 - 1  # the largest that NumPy's global generator takes

_PLUGINS = frozenset({"torch_xla", "torch_npu", "torch_mlu", "habana_frameworks"})  # that bring devices to torch

_MASK = 2**64 - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15


def set_seed(seed: int, device_specific: bool = False, deterministic: bool | Literal["warn"] = False) -> None:
    """Seed Python's, NumPy's and torch's global generators, those of all devices too, and record the seed.

    No process group is started. The recorded seed is the one given here, the same on all processes; samples'
    own seeds derive from it (see `sample_seed`).

    Args:
        seed: From 0 to 2**32 - 1.
        device_specific: Add this process's rank to what the generators are seeded with.
        deterministic: Make torch use deterministic algorithms only, and raise where an operation has none;
            with `"warn"` it warns instead. False changes nothing.

    Raises:
        ConfigurationError: If `seed` or `deterministic` is none of the allowed values.

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
        own = (base + environment.rank) % (MAX_SEED + 1)
    random.seed(own)
    np.random.seed(own)
    torch.default_generator.manual_seed(own)
    for kind in available_device_kinds():
        kind.manual_seed_all(own)


def recorded_seed() -> int | None:
    """The seed that `set_seed` was last given in this process; None before its first call."""
    seed: int | None = PartialState.registry().get("seed")
    return seed


def sample_seed(seed: int, epoch: int, index: int) -> int:
    """The seed of one sample: 64 bits mixed from the run's seed, the epoch and the sample's index.

    Each argument goes through SplitMix64's finaliser in turn (Steele, Lea and Flood, "Fast splittable
    pseudorandom number generators", OOPSLA 2014). For one seed and epoch, different indices below 2**64 have
    different seeds.
    """
    return sample_seeds(seed, epoch)(index)


def sample_seeds(seed: int, epoch: int) -> Callable[[int], int]:
    """`sample_seed` for the samples of an epoch, in a third of the time."""
    base = _mixed((_mixed(seed) + epoch) & _MASK)
    return lambda index: _mixed((base + index) & _MASK)


def _mixed(value: int) -> int:
    """SplitMix64's finaliser."""
    mixed = (value + _GOLDEN_GAMMA) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)


def seed_all_generators(seed: int) -> None:
    """Seed Python's, NumPy's and torch's CPU generator from 64 bits; devices are left alone.

    Meant to be called for every sample. NumPy gets the upper and torch the lower 32 bits: both run the same
    Mersenne Twister, which keeps 32 bits of a seed, and one seed would give both the same stream.
    """
    for each in GENERATORS.values():
        each.seed(seed)


class GlobalGenerator(NamedTuple):
    """One of the generators that `seed_all_generators` seeds.

    Attributes:
        seed: Seeds it with its part of 64 bits.
        draw: Draws 53 bits or more.
        get_state: Returns its state.
        set_state: Restores a state that `get_state` has returned.
    """

    seed: Callable[[int], object]
    draw: Callable[[], object]
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
    """Find the generators that were drawn from, or seeded otherwise, since they were seeded: by what they give next."""
    drawn = []
    for name in names:
        generator = GENERATORS[name]
        found = generator.draw()
        generator.seed(seed)
        if generator.draw() != found:
            drawn.append(name)
    return drawn


_own_generators: dict[str, torch.Generator] = {}


def own_generator(name: str) -> torch.Generator:
    """A generator that draws nothing from the global ones, for what users do not see being drawn.

    It is seeded by the state of torch's global generator, which stays as it is, and belongs to the random state of
    this process until another of the name is made.
    """
    state = torch.default_generator.get_state().numpy().tobytes()
    seed = int.from_bytes(hashlib.blake2b(state, digest_size=8).digest(), "little")
    generator = torch.Generator().manual_seed(seed >> 1)
    _own_generators[name] = generator
    return generator


@dataclass(frozen=True)
class RandomState:
    """The state of Python's, NumPy's and torch's global generators, and of the devices in use.

    Attributes:
        python: As from `random.getstate`.
        numpy: As from `numpy.random.get_state`.
        torch: State of torch's CPU generator, bytes.
        devices: State of the current device of each kind of device, bytes, by the kind's name.
        own: State of the generators that `own_generator` made, bytes, by their names; taken with `devices`.

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
        """Take the state of all generators."""
        states: dict[str, Tensor] = {}
        own: dict[str, Tensor] = {}
        if devices:
            # Where torch has no accelerator, nothing but a plug-in has generators, and the kinds need not be asked.
            if torch.accelerator.is_available() or ADDED or not _PLUGINS.isdisjoint(sys.modules):
                found = ((kind.name, kind.get_rng_state()) for kind in available_device_kinds())
                states = {name: state for name, state in found if state is not None}
            own = {name: generator.get_state() for name, generator in _own_generators.items()}
        numpy_state: Any = np.random.get_state()
        return cls(random.getstate(), numpy_state, torch.default_generator.get_state(), states, own)

    def restore(self) -> None:
        """Put all captured generators back. A device that this machine does not have is passed over."""
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
        """The state as nested dicts of tensors, numbers, strings and None."""
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
        """Make a state from what `state_dict` returned; lists of numbers do in place of tensors."""
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
                f"This random state has no {error}. It must come from RandomState.state_dict()."
            ) from None


class KeptGenerators:
    """Finds which of Python's, NumPy's and torch's CPU generator have changed since a moment, and puts them back.

    As a context, it puts back in the end what the body has changed. It can be entered again.
    """

    def __init__(self) -> None:
        self._states: dict[str, Any] = {}

    def take(self) -> None:
        """Note the states."""
        self._states = {name: each.get_state() for name, each in GENERATORS.items()}

    def changed(self, names: Iterable[str] | None = None) -> list[str]:
        """Return the names of those that have drawn, or were seeded, since their states were noted."""
        return [
            name
            for name in (GENERATORS if names is None else names)
            if not _same_state(GENERATORS[name].get_state(), self._states[name])
        ]

    def put_back(self) -> None:
        """Restore the states that were noted."""
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
    if isinstance(one, dict):  # NumPy's, which has arrays in it
        return pickle.dumps(one) == pickle.dumps(other)
    return bool(one == other)


@contextmanager
def isolated_random_state(devices: bool = False) -> Iterator[None]:
    """Run the body and then put the global generators back to where they were.

    Most of its time goes into NumPy's state, which is copied twice: do it once for a batch, not for each sample.
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
        raise ConfigurationError(f"A seed is an integer from 0 to {MAX_SEED} (2**32 - 1), got {seed!r}.")
    return value


def make_deterministic(mode: bool | str) -> None:
    """Turn on torch's deterministic algorithms, and what cuBLAS and cuDNN need for them."""
    if mode not in (True, "warn"):
        raise ConfigurationError(f"deterministic must be True, False or 'warn', got {mode!r}.")
    # cuBLAS reads it when its handle is made: https://docs.nvidia.com/cuda/cublas/#results-reproducibility
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=mode == "warn")
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def _integers(values: Any) -> list[int]:
    """The numbers of a tensor or a list."""
    integers: list[int] = values.tolist() if isinstance(values, Tensor) else list(values)
    return integers


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
