"""The order of the data must not depend on how many processes take it, nor on what else is read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset

from drivetrain import CombinedLoader
from tests.pool import run_in_processes
from tests.trainer.tasks import Weight, fitted

EPOCHS = 3
SAMPLES = 10


class Drawn(Sampler[int]):
    """Draws each index when it is asked for, from a generator of its own or the global one, and may have a length."""

    def __init__(self, own: bool) -> None:
        self.generator = torch.Generator().manual_seed(3) if own else None

    def __iter__(self) -> Iterator[int]:
        for _ in range(SAMPLES):
            yield int(torch.randint(SAMPLES, (), generator=self.generator))


class Sized(Drawn):
    def __len__(self) -> int:
        return SAMPLES


def samples() -> Dataset[Any]:
    return TensorDataset(torch.arange(float(SAMPLES))[:, None])


def shuffled(batch_size: int = 1, **options: Any) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(5)
    return DataLoader(samples(), batch_size=batch_size, shuffle=True, generator=generator, **options)


def loader_of(kind: str) -> Any:
    if kind == "shuffled":
        return shuffled()
    if kind == "two workers":
        return shuffled(num_workers=2)
    if kind == "batches of two":
        return shuffled(2)
    if kind == "combined":
        return CombinedLoader({"a": shuffled(2), "b": shuffled(2)}, "min_size")
    if kind == "one after the other":
        return CombinedLoader([shuffled(), shuffled()], "sequential")
    return DataLoader(samples(), sampler=(Sized if "sized" in kind else Drawn)("own" in kind))


# name: batches of an epoch on one process
LIMITS = {
    "shuffled": 8,
    "two workers": 8,
    "batches of two": 4,
    "combined": 4,
    "one after the other": 16,
    "own sampler": 4,
    "own sampler, sized": 4,
    "global sampler": 4,
    "global sampler, sized": 4,
}


class Seen(Weight):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[float, ...]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        first = batch["a"] if isinstance(batch, dict) else batch
        self.seen.append(tuple(first[0].flatten().tolist()))
        return self.w * 1.0


def order_of_epochs(kind: str, limit: int) -> list[tuple[float, ...]]:
    torch.manual_seed(1)
    task = Seen()
    fitted(task, loader_of(kind), max_epochs=EPOCHS, limit_train_batches=limit)
    return task.seen


def orders(processes: int) -> dict[str, list[tuple[float, ...]]]:
    return {kind: order_of_epochs(kind, limit // processes) for kind, limit in LIMITS.items()}


@pytest.fixture(scope="module")
def on_one_and_two() -> list[list[dict[str, list[tuple[float, ...]]]]]:
    return [run_in_processes(orders, processes, args=(processes,)) for processes in (1, 2)]


@pytest.mark.parametrize("kind", LIMITS)
def test_a_limit_gives_every_epoch_the_same_order_on_any_number_of_processes(on_one_and_two: Any, kind: str) -> None:
    (alone,), together = on_one_and_two
    assert [batch for step in zip(*(of[kind] for of in together), strict=True) for batch in step] == alone[kind]
    assert len(alone[kind]) == EPOCHS * LIMITS[kind]
    assert len(set(alone[kind])) > 1


def test_a_limit_draws_what_a_plain_loop_that_breaks_draws() -> None:
    plain: list[tuple[float, ...]] = []
    loader = shuffled()
    for _ in range(EPOCHS):
        for index, (batch,) in enumerate(loader):
            plain.append(tuple(batch.flatten().tolist()))
            if index == SAMPLES - 2:
                break
    assert order_of_epochs("shuffled", SAMPLES - 1) == plain
