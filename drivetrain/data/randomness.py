"""The random state that an epoch's order is drawn from: kept, shared between processes, and drawn from apart."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Sampler

from drivetrain.runtime.collectives import broadcast_object_list
from drivetrain.runtime.seeds import RandomState

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

    Args:
        start: Where the global generators stand for the first draw. What it holds for a resumed run is kept up to date.
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
