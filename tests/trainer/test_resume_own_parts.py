"""Runs whose processes each read a part of their own: every process resumes at its own position and order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from drivetrain import Accelerator, Callback, CombinedLoader, DataLoaderConfiguration, PartialState, Task, Trainer
from tests.pool import run_in_processes
from tests.trainer.tasks import quiet

ROWS, BATCH = 12, 3  # of each process


def part() -> list[float]:
    first = 100.0 * PartialState().process_index
    return [first + number for number in range(ROWS)]


class ShuffledStream(IterableDataset[float]):
    """Draws the order of its part from torch's global generator."""

    def __iter__(self) -> Iterator[float]:
        rows = part()
        yield from (rows[place] for place in torch.randperm(ROWS).tolist())


class Remembering:
    """A loader that counts its epochs, orders each of them by that count and the process, and saves its place."""

    def __init__(self, sized: bool = True) -> None:
        self.epoch = self.place = 0
        if sized:
            self.__class__ = SizedRemembering

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "place": self.place, "rank": PartialState().process_index}

    def load_state_dict(self, state: dict[str, int]) -> None:
        assert state["rank"] == PartialState().process_index
        self.epoch, self.place = state["epoch"], state["place"]

    def __iter__(self) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(1000 * self.epoch + PartialState().process_index)
        order = torch.tensor(part())[torch.randperm(ROWS, generator=generator)].split(BATCH)
        while self.place < len(order):
            self.place += 1
            yield order[self.place - 1]
        self.epoch, self.place = self.epoch + 1, 0


class SizedRemembering(Remembering):
    def __len__(self) -> int:
        return ROWS // BATCH


def shuffled(generator: torch.Generator | None = None) -> DataLoader[float]:
    return DataLoader(part(), batch_size=BATCH, shuffle=True, generator=generator)  # type: ignore[arg-type]


def make(kind: str) -> Any:
    rank = PartialState().process_index
    if kind == "shuffled":
        return shuffled()
    if kind == "shuffled by a generator":
        return shuffled(torch.Generator().manual_seed(rank + 5))
    if kind == "stream":
        return DataLoader(ShuffledStream(), batch_size=BATCH)
    if kind == "batches":
        return [torch.tensor(part())[place : place + BATCH] for place in range(0, ROWS, BATCH)]
    if kind == "combined":
        return CombinedLoader([Remembering(), shuffled()], "min_size")
    return Remembering(sized=kind == "with a state")


KINDS = [
    *("shuffled", "shuffled by a generator", "stream", "batches", "with a state", "with a state, no length"),
    "combined",
]


class Rows(Callback):
    """The rows of every training batch."""

    def __init__(self) -> None:
        self.seen: list[list[float]] = []

    def on_train_batch_start(self, trainer: Trainer, task: Any, batch: Any, batch_idx: int) -> None:
        parts = batch if isinstance(batch, list) else [batch]
        self.seen.append([row for each in parts for row in each.flatten().tolist()])


class Line(Task):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(torch.cat(batch if isinstance(batch, list) else [batch]).float()[:, None]).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trained(kind: str, folder: str, at: int) -> list[str]:
    """Compare a run of three epochs with one that stops after `at` steps and is resumed."""

    def train(**options: Any) -> list[list[float]]:
        torch.manual_seed(PartialState().process_index)
        rows = Rows()
        trainer = quiet([rows], use_distributed_sampler=False, max_epochs=3, **options)
        trainer.fit(Line(), make(kind), resume=path if resumes else None)
        if trainer.global_step == at:
            trainer.save_checkpoint(path)
        return rows.seen

    path, resumes = f"{folder}/{kind}.{at}", False
    whole = train()
    first = train(max_steps=at)
    resumes = True
    rest = train()
    return [] if [*first, *rest] == whole else [f"{first} {rest} for {whole}"]


@pytest.mark.parametrize("at", [2, 4, 6, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_a_trainer_resumes_the_part_of_each_process(tmp_path: Path, kind: str, at: int) -> None:
    assert run_in_processes(trained, 2, args=(kind, str(tmp_path), at), timeout=60) == [[], []]


def looped(kind: str, folder: str, stateful: bool) -> list[str]:
    """Compare the rest of an epoch and the next one with those of an Accelerator that loads the state."""
    config = DataLoaderConfiguration(use_distributed_sampler=False, use_stateful_dataloader=stateful)
    torch.manual_seed(PartialState().process_index)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    loader = accelerator.prepare_data_loader(make(kind))
    for _ in loader:
        pass
    epoch = iter(loader)
    begun = [next(epoch).tolist() for _ in range(2)]
    accelerator.save_state(folder)
    expected = [[*([] if stateful else begun), *(batch.tolist() for batch in epoch)], [b.tolist() for b in loader]]
    torch.manual_seed(99)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    loader = accelerator.prepare_data_loader(make(kind))
    accelerator.load_state(folder)
    found = [[batch.tolist() for batch in loader] for _ in range(2)]
    return [] if found == expected else [f"{found} for {expected}"]


@pytest.mark.parametrize(
    ("kind", "stateful"),
    [(kind, True) for kind in KINDS if kind != "combined"] + [(kind, False) for kind in KINDS if "shuffled" in kind],
)
def test_an_accelerator_loads_the_part_of_each_process(tmp_path: Path, kind: str, stateful: bool) -> None:
    assert run_in_processes(looped, 2, args=(kind, str(tmp_path / "state"), stateful), timeout=60) == [[], []]
