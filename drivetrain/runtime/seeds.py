"""Random state: seeding a run and its samples, and capturing and restoring the global generators."""

from __future__ import annotations

import hashlib
import operator
import os
import pickle
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from drivetrain.runtime.devices import available_device_kinds
from drivetrain.runtime.environment import ProcessEnvironment
from drivetrain.runtime.errors import CheckpointError, ConfigurationError
from drivetrain.runtime.state import PartialState

MAX_SEED = 2**32 - 1  # NumPy's global generator accepts no larger seed

_MASK = 2**64 - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15


def set_seed(seed: int, device_specific: bool = False, deterministic: bool | Literal["warn"] = False) -> None:
    """Seed the global generators of Python, NumPy and torch, on all devices, and record the seed.

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
    """Return the seed of the last `set_seed` call in this process, or None before the first call."""
    seed: int | None = PartialState.registry().get("seed")
    return seed


def sample_seed(seed: int, epoch: int, index: int) -> int:
    """Return the 64-bit seed of one sample, mixed from the run's seed, the epoch and the sample's index.

    Each argument goes through SplitMix64's finaliser in turn (Steele, Lea and Flood, "Fast splittable pseudorandom
    number generators", OOPSLA 2014). For one seed and epoch, different indices below 2**64 have different seeds.
    """
    return sample_seeds(seed, epoch)(index)


def sample_seeds(seed: int, epoch: int) -> Callable[[int], int]:
    """Return a function that maps a sample's index to its seed in one epoch, faster than `sample_seed`."""
    base = _splitmix64((_splitmix64(seed) + epoch) & _MASK)
    return lambda index: _splitmix64((base + index) & _MASK)


def _splitmix64(value: int) -> int:
    """Apply the finaliser of the SplitMix64 generator to a 64-bit integer."""
    mixed = (value + _GOLDEN_GAMMA) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)


def seed_all_generators(seed: int) -> None:
    """Seed the CPU generators of Python, NumPy and torch from 64 bits, without seeding devices.

    It is fast enough for every sample. NumPy gets the upper and torch the lower 32 bits. Both are Mersenne Twisters
    with 32-bit seeds, so equal seeds would give equal streams.
    """
    for each in GENERATORS.values():
        each.seed(seed)


class GlobalGenerator(NamedTuple):
    """Functions of one global random generator.

    Attributes:
        seed: Seeds the generator from 64 bits, or from 32 of them.
        draw: Draws at least 53 random bits.
        get_state: Returns the generator's state.
        set_state: Restores a state that `get_state` returned.
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
    """Return the names of generators that were used or reseeded since `seed_all_generators(seed)`.

    Each generator's next value is compared with the first value after seeding.
    """
    drawn = []
    for name in names:
        generator = GENERATORS[name]
        found = generator.draw()
        generator.seed(seed)
        if generator.draw() != found:
            drawn.append(name)
    return drawn


def own_generator(name: str) -> torch.Generator:
    """Create a named torch generator whose draws do not affect the global generators.

    It is seeded from the state of torch's global generator, which does not change. Its state is part of this process's
    `RandomState` until another generator of that name is created.
    """
    state = torch.default_generator.get_state().numpy().tobytes()
    seed = int.from_bytes(hashlib.blake2b(state, digest_size=8).digest(), "little")
    generator = torch.Generator().manual_seed(seed >> 1)
    PartialState.registry().setdefault("generators", {})[name] = generator
    return generator


@dataclass(frozen=True)
class RandomState:
    """State of the global generators of Python, NumPy and torch, and of the devices' generators.

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
            for kind in available_device_kinds():
                state = kind.get_rng_state()
                if state is not None:
                    states[kind.name] = state
            generators = PartialState.registry().get("generators", {})
            own = {name: generator.get_state() for name, generator in generators.items()}
        numpy_state: Any = np.random.get_state()
        return cls(random.getstate(), numpy_state, torch.default_generator.get_state(), states, own)

    def restore(self) -> None:
        """Restore all captured generators, skipping devices that this machine does not have."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.default_generator.set_state(self.torch)
        here = {kind.name: kind for kind in available_device_kinds()} if self.devices else {}
        for name, state in self.devices.items():
            if name in here:
                here[name].set_rng_state(state)
        for name, generator in PartialState.registry().get("generators", {}).items():
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
        """Build a random state from its `state_dict`, in which lists may replace tensors."""
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
    """Snapshot of the CPU generators of Python, NumPy and torch that detects and undoes changes.

    Used as a context manager, it restores the generators after the body. It can be entered repeatedly.
    """

    def __init__(self) -> None:
        self._states: dict[str, Any] = {}

    def take(self) -> None:
        self._states = {name: each.get_state() for name, each in GENERATORS.items()}

    def changed(self, names: Iterable[str] | None = None) -> list[str]:
        """Return the names of the generators whose state differs from the recorded one."""
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
        return pickle.dumps(one) == pickle.dumps(other)
    return bool(one == other)


@contextmanager
def isolated_random_state(devices: bool = False) -> Iterator[None]:
    """Run the body and then restore the global generators.

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
        raise ConfigurationError(f"A seed must be an integer from 0 to {MAX_SEED} (2**32 - 1), got {seed!r}.")
    return value


def make_deterministic(mode: bool | str) -> None:
    """Turn on torch's deterministic algorithms and the settings of cuBLAS and cuDNN that they need."""
    if mode not in (True, "warn"):
        raise ConfigurationError(f"deterministic must be True, False or 'warn', got {mode!r}.")
    # cuBLAS reads this when it creates its handle: https://docs.nvidia.com/cuda/cublas/#results-reproducibility
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=mode == "warn")
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def _integers(values: Any) -> list[int]:
    integers: list[int] = values.tolist() if isinstance(values, Tensor) else list(values)
    return integers
