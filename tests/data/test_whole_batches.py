"""Batches of datasets in memory are read at once, and are those of torch's own loader to the last bit."""

from __future__ import annotations

import logging
import multiprocessing
from itertools import zip_longest
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._pytree import tree_leaves
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    StackDataset,
    Subset,
    TensorDataset,
    default_collate,
    random_split,
)

from drivetrain.data import DataShard, TailPolicy, map_style, prepare_loader
from drivetrain.data.whole_batches import WholeBatches, reads_at_once
from drivetrain.runtime.state import PartialState
from tests.pool import run_in_processes
from tests.shared_runs import SharedRuns
from tests.simulated.devices import simulated as simulated
from tests.simulated.devices import start

runs = SharedRuns(__name__, world_size=1)

ROWS = 23


def tensors() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(ROWS, 3, 4, 5, generator=generator).to(memory_format=torch.channels_last)
    return TensorDataset(images, torch.arange(ROWS), torch.rand(ROWS, generator=generator, dtype=torch.float64) > 0.5)


def arrays() -> np.ndarray[Any, Any]:
    return np.arange(ROWS * 2, dtype=np.float32).reshape(ROWS, 2)


def part_of_tensors() -> Any:
    return random_split(tensors(), [10, 13], torch.Generator().manual_seed(1))[1]


DATASETS = {
    "tensors": tensors,
    "a tensor": lambda: tensors().tensors[0],
    "numbers in a tensor": lambda: torch.arange(ROWS),
    "an array": arrays,
    "numbers in an array": lambda: np.arange(ROWS, dtype=np.int16),
    "a part": part_of_tensors,
    "a part of a part": lambda: Subset(part_of_tensors(), [3, 3, 0, 11]),
    "a part by an array": lambda: Subset(tensors(), np.array([7, 2, 2, 22])),
    "a part by a tensor": lambda: Subset(tensors(), torch.tensor([5, 0, 9, 9])),
    "two one after the other": lambda: ConcatDataset([tensors(), part_of_tensors(), tensors()]),
    "two side by side": lambda: StackDataset(tensors(), arrays()),
    "two by name": lambda: StackDataset(x=arrays(), y=torch.arange(ROWS)),
    "stacks one after the other": lambda: ConcatDataset([StackDataset(x=arrays(), y=torch.arange(ROWS))] * 2),
}


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert one.stride() == other.stride()
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for name in one:
            assert_same(one[name], other[name])
    else:
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            assert_same(*pair)


@pytest.mark.parametrize("name", DATASETS)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_a_batch_read_at_once_is_that_of_its_samples(name: str, data: st.DataObject) -> None:
    dataset = DATASETS[name]()
    read = reads_at_once(dataset)
    assert read is not None
    size = len(dataset)
    indices = data.draw(st.lists(st.integers(-size, size - 1), min_size=1, max_size=9))
    assert_same(WholeBatches(dataset, read).__getitems__(indices), default_collate([dataset[each] for each in indices]))


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 1, "persistent_workers": True}])
@pytest.mark.parametrize("own_generator", [True, False])
def test_two_epochs_in_random_order_draw_what_torchs_loader_draws(options: dict[str, Any], own_generator: bool) -> None:
    def epochs(prepared: bool) -> list[Any]:
        torch.manual_seed(7)
        generator = torch.Generator().manual_seed(5) if own_generator else None
        loader: Any = DataLoader(part_of_tensors(), 4, shuffle=True, generator=generator, **options)
        if prepared:
            loader = prepare_loader(loader, shard=DataShard())
        return [[*loader, torch.rand(2)], [*loader, torch.rand(2)]]

    assert_same(epochs(prepared=True), epochs(prepared=False))


def started(**options: Any) -> int:
    """How many workers a prepared loader of tensors starts."""
    loader = prepare_loader(
        DataLoader(options.pop("dataset", tensors()), 4, num_workers=1, **options), shard=DataShard()
    )
    before = len(multiprocessing.active_children())
    iterator = iter(loader)
    next(iterator)
    return len(multiprocessing.active_children()) - before


def test_workers_that_could_only_take_time_are_left_out() -> None:
    assert started() == 0


@pytest.mark.parametrize(
    "options",
    [
        {"worker_init_fn": torch.manual_seed},
        {"sampler": iter([0, 1, 2, 3])},
        {"dataset": TensorDataset(torch.ones(4, 1 << 19))},
    ],
    ids=["code of the user's in them", "draws that may come later", "large batches"],
)
def test_workers_stay_where_something_may_need_them(options: dict[str, Any]) -> None:
    assert started(**options) == 1


def test_what_cannot_be_read_at_once_keeps_its_workers() -> None:
    from_the_end = Subset(tensors(), [-1, 3])
    assert started(dataset=from_the_end) == 1
    loader = DataLoader(from_the_end, 2, num_workers=1)
    assert_same(list(prepare_loader(loader, shard=DataShard())), list(loader))


@pytest.mark.parametrize("indices", [[3, 0, 11, 5], np.array([3, 0, 11, 5]), torch.tensor([3, 0, 11, 5])], ids=type)
def test_no_sample_is_made(indices: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [[each[[3, 0]] for each in tensors().tensors], [each[[11, 5]] for each in tensors().tensors]]
    monkeypatch.setattr(TensorDataset, "__getitem__", None)
    loader = prepare_loader(DataLoader(Subset(tensors(), indices), 2), shard=DataShard())
    assert [[part.tolist() for part in batch] for batch in loader] == [[p.tolist() for p in b] for b in expected]


def test_what_a_dataset_holds_may_change_between_two_batches() -> None:
    dataset = tensors()
    part = Subset(dataset, [0, 1])
    loader = prepare_loader(DataLoader(part, 2), shard=DataShard())
    list(loader)
    dataset.tensors, part.indices = (torch.arange(ROWS),), [5, 6]
    assert_same(list(loader), [[torch.tensor([5, 6])]])


class Doubled(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        return tuple(2 * each for each in super().__getitem__(index))


class Listed(Dataset[Any]):
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    "dataset",
    [
        Doubled(torch.arange(3)),
        Listed(),
        [1, 2],
        Subset(Listed(), [0]),
        ConcatDataset([tensors(), Doubled(torch.ones(3))]),
    ],
    ids=["a class of its own", "code", "a list", "a part of code", "partly code"],
)
def test_what_code_of_the_users_makes_is_read_by_the_sample(dataset: Any) -> None:
    assert reads_at_once(dataset) is None


def test_a_wrong_index_is_the_error_that_torch_raises() -> None:
    loader = prepare_loader(DataLoader(tensors(), sampler=[0, ROWS]), shard=DataShard())
    with pytest.raises(IndexError, match=f"index {ROWS} is out of bounds"):
        list(loader)


def test_a_collate_function_of_the_users_gets_samples() -> None:
    loader = prepare_loader(DataLoader(tensors(), 4, collate_fn=len), shard=DataShard())
    assert list(loader) == [4] * 5 + [3]


def test_that_workers_are_left_out_is_said_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(map_style.logger, "_seen", set())
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            prepare_loader(DataLoader(tensors(), 4, num_workers=2), shard=DataShard())
        prepare_loader(DataLoader(TensorDataset(torch.ones(4, 1 << 19)), 4, num_workers=2), shard=DataShard())
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith("num_workers=2 starts none for a loader whose samples are in memory")


def shares(workers: int) -> dict[str, list[Any]]:
    """This process's batches of each kind of dataset, which workers read where there are some."""
    state = PartialState(cpu=True)
    found = {}
    for name, make in DATASETS.items():
        generator = torch.Generator().manual_seed(3)
        init = torch.manual_seed if workers else None  # or there would be none
        user = DataLoader(
            make(), 4, shuffle=True, generator=generator, num_workers=workers, worker_init_fn=init, pin_memory=True
        )
        shard = DataShard(state.process_index, state.num_processes)
        loader = prepare_loader(user, shard=shard, tail=TailPolicy.UNEVEN)
        assert isinstance(loader._reader._inner.dataset, WholeBatches)  # type: ignore[attr-defined]
        found[name] = list(loader)
    return found


@pytest.mark.parametrize("workers", [0, 1])
def test_two_processes_share_the_batches_of_one(workers: int) -> None:
    first, second = run_in_processes(shares, 2, (workers,), timeout=120)
    for name, make in DATASETS.items():
        together = [batch for pair in zip_longest(first[name], second[name]) for batch in pair if batch is not None]
        assert_same(together, list(DataLoader(make(), 4, shuffle=True, generator=torch.Generator().manual_seed(3))))


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_read_batches_too(context: str) -> None:
    large = Subset(TensorDataset(torch.rand(6, 1 << 19)), [5, 0, 3, 1])
    loader = DataLoader(large, 3, num_workers=1, multiprocessing_context=context)
    assert_same(list(prepare_loader(loader, shard=DataShard())), list(loader))


@runs
def pinned() -> dict[str, tuple[bool, ...]]:
    start(1)
    found = {}
    for name, make in DATASETS.items():
        dataset = make()
        indices = [len(dataset) - 1, 0, 3, 0]
        loader = prepare_loader(DataLoader(dataset, 4, pin_memory=True), shard=DataShard())
        batch = loader._reader._inner.dataset.__getitems__(indices)  # type: ignore[attr-defined]
        assert_same(batch, default_collate([dataset[each] for each in indices]))
        found[name] = tuple(part.is_pinned() for part in tree_leaves(batch))
    return found


@pytest.mark.usefixtures("simulated")
def test_rows_of_tensors_are_gathered_into_page_locked_memory() -> None:
    (found,) = runs.of(pinned)
    of_arrays = {"an array": (False,), "numbers in an array": (False,)}  # torch's loader copies these
    mixed = {"two side by side": (True, True, True, False), "two by name": (False, True)}
    mixed |= {"stacks one after the other": (True, True)}
    assert found == {**{name: (True,) * len(parts) for name, parts in found.items()}, **of_arrays, **mixed}


@pytest.mark.gpu
def test_page_locked_batches_are_not_overwritten_while_a_gpu_copies_them() -> None:
    device = torch.device("cuda", 0)
    rows = torch.arange(64, dtype=torch.float32)[:, None].expand(64, 2**20).contiguous()
    loader = prepare_loader(DataLoader(TensorDataset(rows), 4, pin_memory=True), shard=DataShard())
    assert loader._reader._inner.dataset.__getitems__([0, 1])[0].is_pinned()  # type: ignore[attr-defined]
    side = torch.cuda.Stream(device)
    copies = []
    with torch.cuda.stream(side):
        torch.cuda._sleep(10**9)  # all copies wait, and all batches are freed before
        for (batch,) in loader:
            copies.append(batch.to(device, non_blocking=True))
            del batch
    torch.cuda.synchronize()
    assert torch.equal(torch.cat(copies).cpu(), rows)
