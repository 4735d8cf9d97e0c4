"""Compare the records of two runs: the largest difference of each quantity in each step."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

Values = Mapping[str, Sequence[float]]

QUANTITIES = ("rows", "loss", "gradients", "clipped gradients", "learning rates", "skipped steps", "weights", "buffers")
"""Names of the compared quantities, in the order in which a step computes them."""

_FLOORS = {"loss": 2e-6, "gradients": 2e-5, "clipped gradients": 2e-5, "weights": 5e-6, "buffers": 5e-6}
"""Differences per step that are rounding in float32, whatever the measured rounding is."""
_LOW_PRECISION = {"loss": 4e-3, "gradients": 3e-2, "clipped gradients": 3e-2, "weights": 2e-3, "buffers": 2e-3}
_ROUNDING = 1e-5
"""Largest gradient of an element, relative to its tensor, that counts as rounding error of a sum."""
ALLOWED = 4.0
"""Largest difference, as a multiple of the measured rounding."""


@dataclass(frozen=True)
class Run:
    """Record of one run of a script for `drivetrain verify`: losses, gradients and weights of all processes.

    Attributes:
        ranks: The record of each process, by rank.
        name: What sentences call the run.
        folder: Folder that the records were read from.
    """

    ranks: list[dict[str, Any]]
    name: str = "one process"
    folder: str = ""

    @classmethod
    def read(cls, folder: Path, name: str = "one process") -> Run:
        paths = sorted(folder.glob("rank*.json"), key=lambda path: int(path.stem[4:]))
        return cls([json.loads(path.read_text()) for path in paths], name, str(folder))

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("rank*.json"):
            old.unlink()
        for number, rank in enumerate(self.ranks):
            folder.joinpath(f"rank{number}.json").write_text(json.dumps(rank))

    @property
    def first(self) -> dict[str, Any]:
        return self.ranks[0]

    @property
    def steps(self) -> int:
        return min((len(rank["steps"]) for rank in self.ranks), default=0)

    @property
    def shards(self) -> int:
        # Processes, or groups of processes, that train on different batches.
        return int(self.first.get("shards", 1))

    @cached_property
    def readers(self) -> list[int]:
        # One rank of each group that trains on equal batches, in the order of the data.
        found: dict[int, int] = {}
        for number, rank in enumerate(self.ranks):
            found.setdefault(rank.get("shard", number), number)
        return [found[shard] for shard in sorted(found)]

    def rows(self, step: int) -> list[list[str]] | None:
        # Digests of the rows that each of `readers` trained on. None if they are unknown.
        found = []
        for rank in self.readers:
            if not self.first["loaders"]:
                found.append(self.ranks[rank]["steps"][step].get("inputs", []))
                continue
            batches = self.ranks[rank]["steps"][step].get("batches", ())
            if any(batch["rows"] is None for batch in batches):
                return None
            found.append([row for batch in batches for row in batch["rows"]])
        return found

    def loss_of(self, rank: int, step: int) -> float | None:
        losses = self.ranks[rank]["steps"][step].get("losses")
        return math.fsum(losses) if losses else None

    def loss(self, step: int) -> float | None:
        losses = [self.loss_of(rank, step) for rank, each in enumerate(self.ranks) if each.get("computes_loss", True)]
        seen = [loss for loss in losses if loss is not None]
        return math.fsum(seen) / len(seen) if seen else None

    def values(self, step: int, name: str) -> dict[str, list[float]]:
        # Of each tensor, the record of the first process that has the tensor.
        found: dict[str, list[float]] = {}
        for rank in self.ranks:
            for key, values in rank["steps"][step].get(name, {}).items():
                found.setdefault(key, values)
        return found

    def disagreeing(self, step: int, name: str) -> list[str]:
        found = self.values(step, name)
        # Ranks receive the same bits from an all-reduce. Norms of shards may be summed in other orders.
        differing = {
            key
            for rank in self.ranks
            for size, key in sizes_of_differences(found, rank["steps"][step].get(name, {}))
            if size > 1e-5
        }
        return [key for key in found if key in differing]

    def scalar(self, step: int, name: str) -> Any:
        return self.first["steps"][step].get(name)


def generators_apart(found: Run, expected: Run) -> str:
    first: dict[str, int] = {}
    for step, (own, other) in enumerate(zip(found.first["steps"], expected.first["steps"], strict=False)):
        states, others = own.get("generators", {}), other.get("generators", {})
        for name in states.keys() & others.keys():
            if states[name] != others[name]:
                first.setdefault(name, step)
    return ", ".join(f"{name} generator from step {step} on" for name, step in sorted(first.items()))


@dataclass
class Difference:
    """Largest difference of one quantity, such as the gradients, between two runs in one optimizer step.

    Attributes:
        step: The step, from 0.
        quantity: One of `QUANTITIES`.
        size: Largest relative difference.
        name: Name of the tensor with the largest difference, or an empty string.
        allowed: Largest difference that counts as rounding.
    """

    step: int
    quantity: str
    size: float
    name: str = ""
    allowed: float = 0.0

    @property
    def is_rounding(self) -> bool:
        return self.size <= self.allowed


def sizes_of_differences(found: Values, expected: Values) -> Iterator[tuple[float, str]]:
    """Yield the relative size of the difference, and the name, of each tensor that differs between two runs.

    It is relative to the root mean square of the tensor, or to a hundredth of the largest one if that is more, because
    tensors that should be zero hold only rounding errors.

    Args:
        found: Recorded elements by name.
        expected: The same of the run to compare with.
    """
    sizes = {name: _rms(values) for name, values in expected.items()}
    largest = max((size for size in sizes.values() if math.isfinite(size)), default=0.0)
    for name, values in expected.items():
        other = found.get(name)
        if other is None or len(other) != len(values):
            size = math.inf if sizes[name] > 0 else 0.0
        else:
            scale = max(sizes[name], 0.01 * largest, 1e-30)
            apart = (abs(a - b) / scale for a, b in zip(other, values, strict=True) if a != b and (a == a or b == b))
            size = max((math.inf if each != each else each for each in apart), default=0.0)
        if size > 0:
            yield size, name


def relative(found: Values, expected: Values) -> tuple[float, str]:
    return max(sizes_of_differences(found, expected), default=(0.0, ""), key=lambda each: each[0])


def difference(
    step: int, quantity: str, found: Run, expected: Run, arbitrary: Mapping[str, AbstractSet[int]] | None = None
) -> Difference | None:
    """Measure how much a quantity, such as the gradients, differs between two runs in one optimizer step.

    Args:
        step: The step.
        quantity: One of `QUANTITIES`.
        found: The run to judge.
        expected: The run to compare with.
        arbitrary: Positions of recorded elements of weights that are left out, by name.
    """
    size, name = 0.0, ""
    if quantity == "rows":
        rows, others = found.rows(step), expected.rows(step)
        if rows is None or others is None or not any(rows) or not any(others):
            return None
        size = float(Counter(chain(*rows)) != Counter(chain(*others)))
    elif quantity == "loss":
        loss, other = found.loss(step), expected.loss(step)
        if loss is None or other is None:
            return None
        size = 0.0 if loss == other or (loss != loss and other != other) else abs(loss - other) / max(abs(other), 1e-2)
        size = math.inf if size != size else size
    elif quantity in ("gradients", "weights", "buffers"):
        own, wanted = found.values(step, quantity), expected.values(step, quantity)
        if not own or not wanted:
            return None
        left_out = arbitrary if arbitrary and quantity == "weights" else {}
        size, name = relative(_without(own, left_out), _without(wanted, left_out))
        if set(own) - set(wanted) and quantity == "gradients":
            size, name = math.inf, min(set(own) - set(wanted))
    else:
        key = {"clipped gradients": "clipped", "learning rates": "rates", "skipped steps": "skipped"}[quantity]
        value, other = found.scalar(step, key), expected.scalar(step, key)
        if value is None or other is None:
            return None
        size, name = relative({key: _as_list(value)}, {key: _as_list(other)})[0], ""
    return Difference(step, quantity, size, name)


def _without(values: Values, arbitrary: Mapping[str, AbstractSet[int]]) -> Values:
    return {
        name: [value for place, value in enumerate(held) if place not in arbitrary.get(name, ())]
        for name, held in values.items()
    }


def _only_rounding(gradients: Values, elements: Values) -> Iterator[tuple[str, int]]:
    # The gradient of some weights is only rounding error, such as that of the bias of an attention's keys. Adam divides
    # a gradient by its size, so such weights move by a whole learning rate in an arbitrary direction.
    sizes = {name: _rms(values) for name, values in gradients.items()}
    largest = max((size for size in sizes.values() if math.isfinite(size)), default=0.0)
    for name, values in elements.items():
        bound = _ROUNDING * max(sizes[name], 0.01 * largest)
        yield from ((name, place) for place, value in enumerate(values) if 0 < abs(value) <= bound)


def _rms(values: Sequence[float]) -> float:
    return math.sqrt(math.fsum(v * v for v in values) / max(1, len(values)))


def _as_list(value: Any) -> list[float]:
    return [float(each) for each in value] if isinstance(value, list) else [float(value)]


@dataclass
class Comparison:
    """Differences of a script's run from a reference run, and which of them are only rounding error.

    Attributes:
        subject: The run to judge.
        reference: The run to compare with.
        single: A run on one process, which is the reference by default.
        rounding: The same with sums in another order and in the subject's precision.
        differences: All differences, by step and in the order of a step.
    """

    subject: Run
    reference: Run
    single: Run
    rounding: Run
    differences: list[Difference] = field(default_factory=list)

    def __post_init__(self) -> None:
        floors = _LOW_PRECISION if self.is_low else _FLOORS
        measured = dict.fromkeys(QUANTITIES, 0.0)
        steps = min(self.subject.steps, self.reference.steps)
        arbitrary: dict[str, set[int]] = {}
        for step in range(steps):
            gradients, elements = self.reference.values(step, "gradients"), self.reference.values(step, "elements")
            for name, place in _only_rounding(gradients, elements):
                arbitrary.setdefault(name, set()).add(place)
            for quantity in QUANTITIES:
                found = difference(step, quantity, self.subject, self.reference, arbitrary)
                if found is None:
                    continue
                if quantity in floors and step < min(self.rounding.steps, self.single.steps):
                    noise = difference(step, quantity, self.rounding, self.single, arbitrary)
                    if noise is not None and math.isfinite(noise.size):
                        measured[quantity] = max(measured[quantity], noise.size)
                found.allowed = ALLOWED * measured[quantity] + floors.get(quantity, 0.0) * (step + 1)
                if quantity == "skipped steps" and self.is_low:
                    found.allowed = math.inf if self.rounding.steps > step and self._skips_alike(step) else 0.0
                self.differences.append(found)

    def _skips_alike(self, step: int) -> bool:
        return bool(self.rounding.scalar(step, "skipped") == self.subject.scalar(step, "skipped"))

    @property
    def is_low(self) -> bool:
        return self.subject.first.get("precision", "32") not in ("32", "32-true", "64", "64-true")

    @property
    def first(self) -> Difference | None:
        return next((each for each in self.differences if not each.is_rounding), None)

    @property
    def is_identical(self) -> bool:
        return all(each.size == 0.0 for each in self.differences)

    def of(self, quantity: str) -> Iterator[Difference]:
        return (each for each in self.differences if each.quantity == quantity)
