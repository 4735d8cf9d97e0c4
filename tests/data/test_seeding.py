"""In a seeded run, a sample's randomness belongs to the sample: not to the worker, the process or the resume."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    StackDataset,
    Subset,
    TensorDataset,
    default_collate,
    get_worker_info,
)

from drivetrain import ConfigurationError, PartialState, set_seed
from drivetrain.data import DataLoaderConfiguration, DataShard, PreparedLoader, prepare_loader
from drivetrain.data.seeding import is_deterministic, key_of
from drivetrain.runtime.seeds import sample_seed, seed_all_generators
from tests.data.kinds import Numbers, random_state, seed_everything
from tests.pool import run_in_processes

SAMPLES = 14


def noise() -> list[float]:
    return [random.random(), float(np.random.rand()), torch.rand(1).item()]


class Augmented(Dataset[Tensor]):
    """Sample i: i, and one number from each global generator."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index), *noise()], dtype=torch.float64)


class AugmentedAtOnce(Augmented):
    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        return [self[index] for index in indices]


class AugmentedStream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        for index in range(SAMPLES):
            yield torch.tensor([float(index), *noise()], dtype=torch.float64)


def masked(samples: list[Tensor]) -> Tensor:
    """Collates with noise of its own, as masking for language models does."""
    return torch.cat([default_collate(samples), torch.tensor([[-1.0, *noise()]])])


def loader(workers: int = 0, seed: int | None = 1, shard: DataShard | None = None, **options: Any) -> PreparedLoader:
    options = {"dataset": Augmented(), "batch_size": 4, "shuffle": True, "generator": torch.Generator(), **options}
    options["generator"].manual_seed(2)
    if isinstance(options["dataset"], IterableDataset):
        options.pop("shuffle")
    return prepare_loader(DataLoader(num_workers=workers, **options), shard=shard or DataShard(), seed=seed)


def samples_of(prepared: PreparedLoader, epochs: int = 2) -> list[dict[int, list[float]]]:
    """For each epoch, the noise of each real sample."""
    seen: list[dict[int, list[float]]] = []
    for _ in range(epochs):
        epoch: dict[int, list[float]] = {}
        for batch in prepared:
            assert prepared.current is not None
            rows = batch.tolist() if batch.dim() > 1 else [batch.tolist()]
            for row in rows[: len(rows) - prepared.current.padding]:
                epoch[int(row[0])] = row[1:]
        seen.append(epoch)
    return seen


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"workers": 1},
        {"workers": 3},
        {"workers": 3, "persistent_workers": True},
        {"workers": 1, "multiprocessing_context": "spawn"},
        {"batch_size": 5, "shuffle": False},
        {"batch_size": None},
        {"batch_size": None, "workers": 2},
        {"dataset": AugmentedAtOnce()},
    ],
    ids=lambda change: "-".join(change) or "as it is",
)
def test_augmentation_does_not_depend_on_workers_batches_or_order(options: dict[str, Any]) -> None:
    expected = samples_of(loader())
    seed_everything(99)  # nor on the global generators
    assert samples_of(loader(**options)) == expected


def test_augmentation_differs_between_samples_epochs_and_seeds() -> None:
    first, second = samples_of(loader())
    other, _ = samples_of(loader(seed=3))
    everything = [value for epoch in (first, second, other) for row in epoch.values() for value in row]
    assert len(set(everything)) == len(everything) == 3 * SAMPLES * 3


def test_an_epoch_that_is_set_reaches_workers_that_stay() -> None:
    expected = samples_of(loader(), 3)[2]
    staying = loader(2, persistent_workers=True)
    samples_of(staying, 1)
    staying.set_epoch(2)
    assert samples_of(staying, 1) == [expected]


def augment(workers: int, dispatch: bool, stream: bool) -> list[dict[int, list[float]]]:
    rank = PartialState().process_index
    seed_everything(rank)
    options: dict[str, Any] = {"dataset": AugmentedStream() if stream else Augmented(), "batch_size": 4}
    prepared = prepare_loader(
        DataLoader(num_workers=workers, **options),
        shard=DataShard(rank, 2),
        seed=1,
        config=DataLoaderConfiguration(dispatch_batches=dispatch),
    )
    return samples_of(prepared)


@pytest.mark.parametrize(("workers", "dispatch"), [(0, False), (3, False), (0, True)])
def test_augmentation_is_the_same_on_two_processes(workers: int, dispatch: bool) -> None:
    first, second = run_in_processes(augment, args=(workers, dispatch, False))
    assert [{**one, **other} for one, other in zip(first, second, strict=True)] == samples_of(loader())


@pytest.mark.parametrize("dispatch", [False, True])
def test_a_streams_augmentation_is_the_same_on_two_processes(dispatch: bool) -> None:
    first, second = run_in_processes(augment, args=(0, dispatch, True))
    expected = samples_of(loader(dataset=AugmentedStream()))
    assert [{**one, **other} for one, other in zip(first, second, strict=True)] == expected


@pytest.mark.parametrize("workers", [1, 2])
def test_a_streams_workers_draw_apart_and_again_the_same(workers: int) -> None:
    class Parted(AugmentedStream):
        def __iter__(self) -> Iterator[Tensor]:
            info = get_worker_info()
            for index, sample in enumerate(super().__iter__()):
                if info is not None and index % info.num_workers == info.id:
                    yield sample

    def run(persistent: bool) -> list[dict[int, list[float]]]:
        seed_everything(int(persistent))
        return samples_of(loader(workers, dataset=Parted(), persistent_workers=persistent))

    once = run(False)
    assert run(True) == once
    values = [value for epoch in once for row in epoch.values() for value in row]
    assert len(set(values)) == len(values)


@pytest.mark.parametrize("dataset", [Augmented(), AugmentedStream(), Numbers(SAMPLES)], ids=lambda d: type(d).__name__)
def test_loading_does_not_disturb_the_models_random_numbers(dataset: Any) -> None:
    prepared = loader(dataset=dataset)
    iterator = iter(prepared)
    next(iterator)
    state = random_state()
    for _ in iterator:
        assert random_state() == state


@pytest.mark.parametrize(
    "dataset", [TensorDataset(torch.zeros(SAMPLES, 4)), Augmented(), AugmentedStream()], ids=lambda d: type(d).__name__
)
def test_collating_has_a_random_state_of_its_own(dataset: Any) -> None:
    def run(workers: int) -> list[Any]:
        def collate(samples: list[Any]) -> Tensor:
            return masked([sample[0] if isinstance(sample, tuple) else sample for sample in samples]).double()

        seed_everything(workers)
        prepared = loader(workers, dataset=dataset, collate_fn=collate)
        return [batch[-1].tolist() for _ in range(2) for batch in prepared]

    once = run(0)
    if not isinstance(dataset, AugmentedStream):  # a stream's randomness depends on the worker that reads it
        assert run(2) == once
    assert len({tuple(row) for row in once}) == len(once) == 8


class Many(list):  # type: ignore[type-arg]
    """A dataset that is asked for a whole batch at once."""


class CountingMany(TensorDataset):
    asked: list[Any]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        self.asked.append(indices)
        return [self[index] for index in indices]


def test_reading_that_draws_nothing_keeps_torchs_fast_path() -> None:
    plain = list(range(8))
    seeded = prepare_loader(DataLoader(plain, batch_size=4), shard=DataShard(), seed=1)  # type: ignore[arg-type]
    inner = seeded._reader._inner  # type: ignore[attr-defined]
    assert inner.dataset is plain
    assert inner.collate_fn is default_collate


@pytest.mark.parametrize(
    ("dataset", "expected"),
    [
        (TensorDataset(torch.zeros(2)), True),
        ([1, 2], True),
        (Subset(TensorDataset(torch.zeros(2)), [0]), True),
        (ConcatDataset([TensorDataset(torch.zeros(2)), TensorDataset(torch.zeros(2))]), True),
        (StackDataset(TensorDataset(torch.zeros(2))), True),
        (ConcatDataset([TensorDataset(torch.zeros(2)), Augmented()]), False),
        (Subset(Augmented(), [0]), False),
        (CountingMany(torch.zeros(2)), False),
        (Many([1]), False),
    ],
)
def test_only_sets_that_surely_draw_nothing_count_as_such(dataset: Any, expected: bool) -> None:
    assert is_deterministic(dataset) is expected


def users_dataset(worker_id: int) -> None:
    info = get_worker_info()
    assert info is not None
    assert type(info.dataset) in (Augmented, AugmentedStream)
    info.dataset.prepared_by = worker_id  # type: ignore[attr-defined]


@pytest.mark.parametrize("dataset", [Augmented(), AugmentedStream()], ids=lambda d: type(d).__name__)
def test_worker_init_functions_see_the_users_dataset(dataset: Any) -> None:
    assert len(samples_of(loader(1, dataset=dataset, worker_init_fn=users_dataset))[0]) == SAMPLES


def test_seeding_can_be_switched_off_and_insisted_on() -> None:
    def first(seed: int, config: DataLoaderConfiguration, run_seed: int | None) -> list[float]:
        prepared = prepare_loader(DataLoader(Augmented(), 4), shard=DataShard(), config=config, seed=run_seed)
        seed_everything(seed)
        return next(iter(prepared))[0].tolist()

    off = DataLoaderConfiguration(seed_samples=False)
    assert first(1, off, 5) != first(2, off, 5)
    with pytest.raises(ConfigurationError, match="set_seed"):
        first(1, DataLoaderConfiguration(seed_samples=True), None)
    set_seed(5)
    on = DataLoaderConfiguration(seed_samples=True)
    assert first(1, on, None) == first(2, on, None) == first(3, DataLoaderConfiguration(), 5)


def test_any_kind_of_index_has_a_stable_key() -> None:
    assert key_of(np.int64(3)) == key_of(torch.tensor(3)) == 3
    assert key_of(("a", 1)) == key_of(("a", 1)) != key_of(("a", 2))


class Counted(Dataset[Tensor]):
    """Draws from chosen generators, for chosen samples, and notes what is read.

    Args:
        draws: By sample, what it draws.
        fails: Whether it fails where it draws above a half.
    """

    def __init__(self, draws: dict[int, Callable[[], float]], fails: bool = False) -> None:
        self.draws, self.fails, self.read = draws, fails, list[int]()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        self.read.append(index)
        value = self.draws[index]() if index in self.draws else 0.0
        if self.fails and value > 0.5:
            raise OSError(f"sample {index} draws {value}")
        return torch.tensor([float(index), value], dtype=torch.float64)


DRAWS = {
    "python": random.random,
    "numpy": lambda: float(np.random.rand()),
    "torch": lambda: torch.rand(1).item(),
}


def by_hand(draws: dict[int, Callable[[], float]], epoch: int) -> dict[int, list[float]]:
    """The noise of each sample, each from its own seed."""
    found = {}
    for index in range(SAMPLES):
        seed_all_generators(sample_seed(1, epoch, index))
        found[index] = [draws[index]()] if index in draws else [0.0]
    return found


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
@pytest.mark.parametrize("drawing", [range(SAMPLES), [3], [9, 11]], ids=["all", "one at first", "some later"])
def test_a_sample_has_its_own_numbers_whenever_the_first_one_draws(draw, drawing):
    draws = dict.fromkeys(drawing, draw)
    dataset = Counted(draws)
    found = samples_of(loader(dataset=dataset, shuffle=False))
    assert found == [by_hand(draws, 0), by_hand(draws, 1)]
    again = [index for index in set(dataset.read) if dataset.read.count(index) > 2]
    assert again == ([8, 9, 10, 11] if 9 in draws and 3 not in draws else [])  # the batch that drew first


def test_a_sample_that_fails_by_chance_fails_by_its_own_chance():
    draws = {9: random.random}
    dataset = Counted(draws, fails=True)
    seeds = [seed for seed in range(20) if random.Random(sample_seed(seed, 0, 9)).random() > 0.5]
    for seed in range(20):
        batches = iter(loader(dataset=dataset, shuffle=False, seed=seed))
        if seed in seeds:
            with pytest.raises(OSError, match="sample 9 draws"):
                list(batches)
        else:
            assert len(list(batches)) == 4


class AtOnce(Counted):
    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        self.read.append(-len(indices))
        return [self[index] for index in indices]


def test_a_dataset_that_draws_nothing_is_asked_for_whole_batches_after_the_first():
    dataset = AtOnce({})
    samples_of(loader(dataset=dataset, shuffle=False), epochs=1)
    assert [-index for index in dataset.read if index < 0] == [1, 1, 1, 1, 4, 4, 2]


@pytest.mark.parametrize("fails", [False, True])
def test_collating_that_draws_in_a_later_batch_does_so_from_its_own_state(fails: bool) -> None:
    def batches(workers: int, order: list[int]) -> list[Any]:
        failed: list[bool] = []

        def collate(samples: list[int]) -> Tensor:
            drawn = noise() if max(samples) > 3 else [0.0]
            if fails and max(samples) > 3 and not failed:
                failed.append(True)
                raise ValueError("at the first draw only, which is made again")
            return torch.tensor([*samples, *drawn], dtype=torch.float64)

        loader = prepare_loader(
            DataLoader(Numbers(8), 2, sampler=order, num_workers=workers, collate_fn=collate), shard=DataShard(), seed=7
        )
        return sorted(batch.tolist() for batch in loader)

    late, early = [0, 1, 2, 3, 4, 5, 6, 7], [2, 3, 0, 1, 6, 7, 4, 5]
    random.seed(1)
    expected, following = batches(0, late), random.random()
    assert len({len(batch) for batch in expected}) == 2
    assert batches(1, early) == expected == batches(0, early)
    random.seed(1)
    assert following == random.random()
