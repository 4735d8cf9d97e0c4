"""Random state: seeding a run, seeding one sample, and keeping the generators' state."""

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
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from drivetrain.runtime.devices import available_device_kinds
from drivetrain.runtime.environment import ProcessEnvironment
from drivetrain.runtime.errors import CheckpointError, ConfigurationError
from drivetrain.runtime.state import PartialState

MAX_SEED = 2**32 - 1  # the largest that NumPy's global generator takes

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
            if torch.accelerator.is_available() or "torch_xla" in sys.modules:  # the CPU has none but torch's
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
