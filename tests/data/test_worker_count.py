"""`num_workers="auto"`: the number follows from what was measured, and the batches are the same whatever it is."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from drivetrain import Accelerator, DataLoaderConfiguration, Task, Trainer
from drivetrain.data import DataShard, PreparedLoader, map_style, prepare_loader
from drivetrain.data.map_style import BATCHES, WorkerCount
from drivetrain.runtime.errors import ConfigurationError
from tests.data.kinds import Numbers

AUTO = DataLoaderConfiguration(num_workers="auto")


class Clock:
    """Seconds that pass only where a test lets them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(map_style.time, "perf_counter", lambda: self.now)


class Setup:
    """A loader and a step whose times are known, and what reads them.

    Args:
        clock: Takes the times.
        read: Seconds to read a batch without workers.
        step: Seconds for a step.
        wait: Seconds that a step waits with some number of workers.
    """

    def __init__(self, clock: Clock, read: float, step: float, wait: dict[int, float]) -> None:
        self.clock, self.read, self.step, self.wait = clock, read, step, wait
        self.began: list[tuple[int, int]] = []  # with how many workers, and at which batch
        self.given = 0

    def begin(self, workers: int, requests: Iterator[Any]) -> Iterator[Any]:
        self.began.append((workers, self.given))
        return self._read(workers, requests)

    def _read(self, workers: int, requests: Iterator[Any]) -> Iterator[Any]:
        for request in requests:
            self.clock.now += self.wait[workers] if workers else self.read
            yield request

    def run(self, count: WorkerCount, batches: int) -> list[int]:
        seen = []
        for batch in count.batches(iter(range(batches)), self.begin):
            seen.append(batch)
            self.given += 1
            self.clock.now += self.step * (100 if self.given <= 3 else 1)  # the first steps compile
        return seen


@pytest.mark.parametrize(
    ("read", "step", "wait", "began", "settled"),
    [
        pytest.param(0.04, 1.0, {}, [(0, 0), (0, 25)], 0, id="a loader that is fast"),
        pytest.param(1.0, 1.0, {2: 0.0}, [(0, 0), (2, 25), (2, 50)], 2, id="one that takes as long as the step"),
        pytest.param(3.0, 1.0, {4: 0.5, 6: 0.0}, [(0, 0), (4, 25), (6, 50)], 6, id="workers that are waited for"),
        pytest.param(9.0, 1.0, {8: 0.5}, [(0, 0), (8, 25), (8, 50)], 8, id="no more than there are cores"),
        pytest.param(1.0, 1.0, {2: 1.5}, [(0, 0), (2, 25), (0, 50)], 0, id="workers that only take time"),
    ],
)
def test_the_number_follows_from_what_reading_and_a_step_take(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    read: float,
    step: float,
    wait: dict[int, float],
    began: list[tuple[int, int]],
    settled: int,
) -> None:
    setup = Setup(Clock(monkeypatch), read, step, wait)
    count = WorkerCount(8, lambda: None)
    with caplog.at_level(logging.INFO):
        assert setup.run(count, 70) == list(range(70))
    assert setup.began == began
    assert count.settled == settled
    shown = "40 ms" if read < 1 else f"{read:g} s"
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f'num_workers="auto": {settled} workers, since {shown} to read a batch')


def test_short_epochs_are_measured_together(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Setup(Clock(monkeypatch), 1.0, 1.0, {2: 0.0})
    count = WorkerCount(8, lambda: None)
    for _ in range(4):
        assert setup.run(count, 15) == list(range(15))
    assert setup.began == [(0, 0), (0, 15), (2, 25), (2, 30), (2, 45), (2, 50)]
    assert count.settled == 2


def test_workers_that_cannot_start_are_done_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    setup = Setup(Clock(monkeypatch), 1.0, 1.0, {})
    count = WorkerCount(8, lambda: None)
    begin = setup.begin

    def begin_or_fail(workers: int, requests: Iterator[Any]) -> Iterator[Any]:
        if workers:
            raise AttributeError("Can't pickle local object")
        return begin(workers, requests)

    monkeypatch.setattr(setup, "begin", begin_or_fail)
    with caplog.at_level(logging.INFO):
        assert setup.run(count, 60) == list(range(60))
    assert count.settled == 0
    assert "workers cannot be started here (AttributeError: Can't pickle local object)" in caplog.text


class Augmented(Dataset[Tensor]):
    """Samples that draw from every generator."""

    def __len__(self) -> int:
        return 4 * (BATCHES + 20)

    def __getitem__(self, index: int) -> Tensor:
        return index + torch.rand(2) + random.random() + float(np.random.rand())


class Plain(Augmented):
    """Samples that draw nothing."""

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index, index])


def loader_over(dataset: Any, seed: int | None, config: DataLoaderConfiguration | None, **options: Any) -> Any:
    torch.manual_seed(1)
    shard = options.pop("shard", DataShard())
    return prepare_loader(DataLoader(dataset, 4, shuffle=True, **options), shard=shard, seed=seed, config=config)


@pytest.mark.parametrize("shard", [DataShard(), DataShard(1, 2)])
@pytest.mark.parametrize(("dataset", "seed"), [(Augmented(), 5), (Plain(), None)])
def test_batches_are_those_of_any_number_of_workers(dataset: Any, seed: int | None, shard: DataShard) -> None:
    def epochs(config: DataLoaderConfiguration | None, **options: Any) -> list[Any]:
        loader = loader_over(dataset, seed, config, shard=shard, **options)
        # Nothing but reading takes time here, so the second stage has workers.
        found = [torch.cat([torch.stack(list(loader)).flatten(), torch.rand(3)]) for _ in range(3)]
        if config is not None:
            assert loader._reader._count.settled is not None
        return found

    expected = epochs(None)
    assert all(map(torch.equal, epochs(AUTO), expected))
    assert all(map(torch.equal, epochs(None, num_workers=2), expected))


@pytest.mark.parametrize("stop", [10, 30, BATCHES + 5])
def test_a_run_resumes_in_any_stage(stop: int) -> None:
    whole = list(loader_over(Augmented(), 5, AUTO))
    first = loader_over(Augmented(), 5, AUTO)
    iterator = iter(first)
    begun = [next(iterator) for _ in range(stop)]
    state = first.state_dict()
    second = loader_over(Augmented(), 5, AUTO)
    second.load_state_dict(state)
    assert torch.equal(torch.stack([*begun, *second]), torch.stack(whole))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(range(8))


@pytest.mark.parametrize(
    ("loader", "why"),
    [
        (lambda: DataLoader(Stream(), 2), "a DataLoader as it is, since it reads an iterable dataset"),
        (lambda: [1, 2], "a list as it is, since it is no plain torch.utils.data.DataLoader"),
        (lambda: DataLoader(Numbers(8), 2, worker_init_fn=print), "since it has a worker_init_fn"),
        (lambda: DataLoader(Numbers(8), 2, in_order=False), "since it has in_order=False"),
    ],
)
def test_a_loader_that_keeps_its_own_number_is_named(loader: Any, why: str, caplog: pytest.LogCaptureFixture) -> None:
    assert isinstance(prepare_loader(loader(), shard=DataShard(), config=AUTO), PreparedLoader)
    assert why in caplog.text


def test_samples_in_memory_need_no_measuring(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        loader = prepare_loader(DataLoader(TensorDataset(torch.arange(8)), 2), shard=DataShard(), config=AUTO)
    assert loader._reader._count.settled == 0  # type: ignore[attr-defined]
    assert 'num_workers="auto": 0 workers, since the samples are in memory' in caplog.text


@pytest.mark.parametrize("make", [DataLoaderConfiguration, Trainer])
def test_a_number_belongs_to_the_loader(make: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"num_workers=4: give 'auto'.*DataLoader\(num_workers="):
        make(num_workers=4)


class Fit(Task):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = torch.nn.functional.dropout(self.layer(batch)).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-6)


def test_the_trainer_settles_with_the_same_losses(caplog: pytest.LogCaptureFixture) -> None:
    def losses(**options: Any) -> list[float]:
        trainer = Trainer(
            accelerator="cpu",
            max_epochs=2,
            seed=3,
            accumulate_grad_batches=3,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            **options,
        )
        task = Fit()
        trainer.fit(task, DataLoader(Augmented(), 4, shuffle=True))
        return task.losses

    with caplog.at_level(logging.INFO):
        assert losses(num_workers="auto") == losses()
    assert caplog.text.count('num_workers="auto"') == 1


def test_an_accelerator_takes_it_too() -> None:
    loader = Accelerator(cpu=True, dataloader_config=AUTO).prepare(DataLoader(Plain(), 4))
    assert torch.equal(torch.cat(list(loader))[:, 0], torch.arange(4 * (BATCHES + 20)))
    assert loader._reader._count.settled is not None
