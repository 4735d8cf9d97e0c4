"""In a world of one a prepared loader is the plain loader, to the bit and to the random number."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from drivetrain.data import ActiveLoaders, DataShard, TailPolicy, prepare_loader
from tests.data.kinds import ITERABLE, KINDS, MAP_STYLE, Episodes, Numbers, random_state, rows_of, seed_everything

ALONE = DataShard()


def epochs(loader: Any, count: int = 2) -> list[Any]:
    """The batches of some epochs, and the random state after each."""
    seen: list[Any] = []
    for _ in range(count):
        seen.append([rows_of(batch) for batch in loader])
        seen.append(random_state())
    return seen


@pytest.mark.parametrize("tail", TailPolicy)
@pytest.mark.parametrize("kind", KINDS)
def test_batches_and_random_state_are_those_of_the_plain_loader(kind: str, tail: TailPolicy) -> None:
    make = KINDS[kind]
    if tail is not TailPolicy.COMPLETE and "workers" in kind:
        tail = TailPolicy.COMPLETE
    seed_everything(5)
    expected = epochs(make())
    seed_everything(5)
    assert epochs(prepare_loader(make(), shard=ALONE, tail=tail)) == expected


@pytest.mark.parametrize("kind", [*MAP_STYLE, *ITERABLE])
def test_the_last_batch_and_the_consumed_samples_are_known(kind: str) -> None:
    loader = prepare_loader(KINDS[kind](), shard=ALONE)
    infos, rows = [], 0
    for batch in loader:
        info = loader.current
        assert info is not None
        rows += len(rows_of(batch))
        infos.append((info.index, info.padding, info.last, info.consumed))
    assert [info[0] for info in infos] == list(range(len(infos)))
    assert [info[2] for info in infos] == [False] * (len(infos) - 1) + [True] * bool(infos)
    assert all(info[1] == 0 for info in infos)
    if infos:
        assert infos[-1][3] == rows
    if kind not in ("stream without length", "stream that draws"):
        assert len(loader) == len(infos)


class Noisy(Dataset[Tensor]):
    """Draws augmentation from torch's global generator."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Tensor:
        return index + torch.rand(2)


@pytest.mark.parametrize("make_sampler", [lambda: Episodes(6, 6), lambda: None], ids=["draws late", "shuffled"])
def test_draws_between_batches_fall_where_they_do_with_the_plain_loader(make_sampler: Callable[[], Any]) -> None:
    class More(Noisy):
        def __len__(self) -> int:
            return 22

    def make() -> DataLoader[Tensor]:
        sampler = make_sampler()
        return DataLoader(More(), batch_sampler=sampler) if sampler else DataLoader(More(), batch_size=4, shuffle=True)

    def run(loader: Any) -> list[Tensor]:
        seed_everything(3)
        seen = []
        for batch in loader:
            seen += [batch, torch.rand(3)]  # a model with dropout, say
        return seen

    plain, prepared = run(make()), run(prepare_loader(make(), shard=ALONE))
    assert len(plain) == len(prepared) > 8
    assert all(torch.equal(one, other) for one, other in zip(plain, prepared, strict=True))


def test_making_an_iterator_draws_what_it_draws_in_torch_and_no_more() -> None:
    def run(loader: Any) -> list[Any]:
        seed_everything(1)
        first, second = iter(loader), iter(loader)
        state = random_state()
        return [state, rows_of(next(first)), rows_of(next(second)), random_state()]

    make = MAP_STYLE["shuffled"]
    assert run(prepare_loader(make(), shard=ALONE)) == run(make())


def test_a_sampler_that_promises_too_much_is_corrected(caplog: pytest.LogCaptureFixture) -> None:
    loader = prepare_loader(DataLoader(Numbers(), batch_sampler=Episodes(4, says=9)), shard=ALONE)
    marks = [[bool(loader.current and loader.current.last) for _ in loader] for _ in range(2)]
    assert marks == [[False] * 4, [False] * 3 + [True]]
    assert "has a length of 9 batches, but returned 4" in caplog.text


def test_batches_reach_the_device_through_place() -> None:
    loader = prepare_loader(DataLoader(Numbers(6), batch_size=4), shard=ALONE, place=lambda batch: batch * 10)
    assert [batch.tolist() for batch in loader] == [[0, 10, 20, 30], [40, 50]]


class Failing(Numbers):
    def __getitem__(self, index: int) -> int:
        if index == 9:
            raise RuntimeError("broken sample")
        return index


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("how", ["break", "raise", "return", "broken sample", "close"])
def test_leaving_a_loop_leaves_nothing(how: str, workers: int) -> None:
    active, left = ActiveLoaders(), []
    active.on_leave.append(left.append)
    dataset = Failing() if how == "broken sample" else Numbers()
    loader = prepare_loader(DataLoader(dataset, batch_size=4, num_workers=workers), shard=ALONE, active=active)

    def loop() -> None:
        for number, _ in enumerate(loader):
            assert active.innermost is loader
            assert loader.current is not None
            if number == 1:
                if how == "break":
                    break
                if how == "return":
                    return
                if how == "raise":
                    raise RuntimeError("broken step")

    if how == "close":
        iterator = iter(loader)
        next(iterator)
        iterator.close()  # type: ignore[attr-defined]
    elif how in ("raise", "broken sample"):
        with pytest.raises(RuntimeError, match="broken"):
            loop()
    else:
        loop()
    assert loader.current is None
    assert active.innermost is None
    assert active.loaders == []
    assert left == [loader]
    if how != "broken sample":
        assert rows_of(next(iter(loader))) == [0, 1, 2, 3]


def test_workers_of_an_abandoned_loop_are_gone() -> None:
    loader = prepare_loader(DataLoader(Numbers(), batch_size=2, num_workers=2), shard=ALONE)
    before = set(torch.multiprocessing.active_children())
    workers: set[Any] = set()
    for _ in loader:
        workers = set(torch.multiprocessing.active_children()) - before
        break
    assert len(workers) == 2
    assert not any(process.is_alive() for process in workers)


class CountingEpochs(Numbers):
    def __init__(self) -> None:
        super().__init__(4)
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


def test_each_iteration_is_the_next_epoch_and_the_dataset_hears_of_it() -> None:
    dataset = CountingEpochs()
    loader = prepare_loader(DataLoader(dataset, batch_size=2), shard=ALONE)
    assert loader.epoch == 0
    for expected in (0, 1):
        list(loader)
        assert (loader.epoch, dataset.epochs[-1]) == (expected, expected)
    loader.set_epoch(7)
    assert dataset.epochs[-1] == 7
    for _ in loader:
        assert loader.epoch == 7
        break
    list(loader)
    assert (loader.epoch, dataset.epochs[-1]) == (8, 8)


def test_an_epoch_that_the_user_sets_on_the_sampler_holds() -> None:
    loader = prepare_loader(KINDS["permutation"](), shard=ALONE)
    sampler = loader.sampler
    for epoch in (5, 2):
        sampler.set_epoch(epoch)
        rows = [row for batch in loader for row in batch.tolist()]
        sampler.set_epoch(epoch)
        assert rows == sampler[:]
        assert loader.epoch == epoch


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        number = 0
        while True:
            yield number
            number += 1


def test_a_stream_without_end_can_be_left() -> None:
    loader = prepare_loader(DataLoader(Endless(), batch_size=3), shard=ALONE)
    for number, batch in enumerate(loader):
        if number == 3:
            assert batch.tolist() == [9, 10, 11]
            break
    assert loader.current is None
    with pytest.raises(TypeError):
        len(loader)
    assert loader.remaining is None
