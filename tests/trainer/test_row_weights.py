"""What a batch counts for among those of all processes, however the rows of a batch come to be known."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from drivetrain import Accelerator, CombinedLoader, DataLoaderConfiguration
from tests.pool import run_in_processes
from tests.trainer.tasks import Weight, fitted, rows

SEVEN = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
SIZES = [4, 2, 3]  # of ready batches over 1, 2, 3, ...


def ready_batches() -> list[Tensor]:
    return list(torch.arange(1.0, 10.0)[:, None].split(SIZES))


class Batches(Dataset[Tensor]):
    """A dataset whose items are batches."""

    def __len__(self) -> int:
        return len(SIZES)

    def __getitem__(self, index: int) -> Tensor:
        return ready_batches()[index]


class BatchStream(IterableDataset[Tensor]):
    """A stream of batches."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter(ready_batches())


@dataclass
class Opaque:
    """A batch whose rows nobody finds."""

    value: float


def combined(mode: str) -> CombinedLoader:
    return CombinedLoader([rows(SEVEN, 2)], mode)


def two_sizes() -> CombinedLoader:
    """Batches of two rows beside batches of one row."""
    return CombinedLoader({"a": rows(SEVEN, 2), "b": rows([0.0] * 4, 1)})


LOADERS: dict[str, Callable[[], Any]] = {
    "plain": lambda: rows(SEVEN, 2),
    "list of one": lambda: [rows(SEVEN, 2)],
    "min_size": lambda: combined("min_size"),
    "max_size": lambda: combined("max_size"),
    "sequential": lambda: combined("sequential"),
    "two sizes": two_sizes,
    "no batch size": lambda: DataLoader(Batches(), batch_size=None),
    "stream without a batch size": lambda: DataLoader(BatchStream(), batch_size=None),
    "combined without a batch size": lambda: [DataLoader(Batches(), batch_size=None)],
    "ready": ready_batches,
    "opaque": lambda: [Opaque(1.0), Opaque(3.0), Opaque(7.0)],
}
SEVEN_BY_TWO_AND_TWO = [2.5, 6.0]  # the means of 1 2 3 4 and of 5 6 7
READY_BY_TWO = [3.5, 8.0]  # the means of 1 to 6 and of 7 8 9
EXPECTED: dict[str, list[float]] = {
    **dict.fromkeys(LOADERS, SEVEN_BY_TWO_AND_TWO),
    # Rows 5 6 beside one zero, and 7 beside one zero: the processes count by three and two rows of five.
    "two sizes": [2.5, 5.5 * 3 / 5 + 7.0 * 2 / 5],
    "no batch size": READY_BY_TWO,
    "stream without a batch size": READY_BY_TWO,
    "combined without a batch size": READY_BY_TWO,
    "ready": READY_BY_TWO,
    "opaque": [2.0, 7.0],
}


class First(Weight):
    """The gradient is the mean of the first loader's part of the batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if isinstance(batch, Opaque):
            return self.w * batch.value
        while not isinstance(batch, Tensor):
            batch = batch["a"] if isinstance(batch, dict) else batch[0]
        return self.w * batch.mean()


def gradients(dispatch: bool | None) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for name, make in LOADERS.items():
        task = First()
        config = DataLoaderConfiguration(dispatch_batches=dispatch)
        fitted(task, make(), accelerator=Accelerator(cpu=True, dataloader_config=config))
        found[name] = task.gradients
    return found


@pytest.fixture(scope="module", params=[None, False, True], ids=["default", "read by all", "dispatched"])
def on_two(request: pytest.FixtureRequest) -> list[dict[str, list[float]]]:
    return run_in_processes(gradients, 2, args=(request.param,))


@pytest.mark.parametrize("loader", LOADERS)
def test_two_processes_have_the_gradient_of_the_global_batch(on_two: list[dict[str, list[float]]], loader: str) -> None:
    for of_rank in on_two:
        assert of_rank[loader] == pytest.approx(EXPECTED[loader], abs=1e-6)
