"""Batches of datasets in memory are read at once, and are those of torch's own loader to the last bit."""

from __future__ import annotations

from collections.abc import Callable
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
    StackDataset,
    Subset,
    TensorDataset,
    default_collate,
    random_split,
)
from torch.utils.data._utils.collate import default_collate_fn_map

from drivetrain import PartialState
from drivetrain.data import DataShard, TailPolicy, prepare_loader
from drivetrain.data.map_style import WholeBatches, read_at_once
from tests.pool import device, run_in_processes
from tests.shared_runs import SharedRuns
from tests.simulated.devices import simulated as simulated
from tests.simulated.devices import start

runs = SharedRuns(__name__, world_size=1)

ROWS = 23


def tensors() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(ROWS, 3, 4, 5, generator=generator).to(memory_format=torch.channels_last)
    return TensorDataset(images, torch.arange(ROWS), torch.rand(ROWS, generator=generator, dtype=torch.float64) > 0.5)


def part_of_tensors() -> Any:
    return random_split(tensors(), [10, 13], torch.Generator().manual_seed(1))[1]


DATASETS = {
    "tensors": tensors,
    "a part": part_of_tensors,
    "a part of a part": lambda: Subset(part_of_tensors(), [3, 3, 0, 11]),
    "a part by an array": lambda: Subset(tensors(), np.array([7, 2, 2, 22])),
    "a part by a tensor": lambda: Subset(tensors(), torch.tensor([5, 0, 9, 9])),
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
    size = len(dataset)
    indices = data.draw(st.lists(st.integers(-size, size - 1), min_size=1, max_size=9))
    batch = WholeBatches(dataset).__getitems__(indices)
    assert_same(batch, default_collate([dataset[each] for each in indices]))
    if isinstance(dataset, TensorDataset) and min(indices) >= 0:
        assert_same(read_at_once(dataset, indices), batch)


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


@pytest.mark.parametrize("indices", [[3, 0, 11, 5], np.array([3, 0, 11, 5]), torch.tensor([3, 0, 11, 5])], ids=type)
def test_no_sample_is_made(indices: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [[each[[3, 0]] for each in tensors().tensors], [each[[11, 5]] for each in tensors().tensors]]
    monkeypatch.setattr("drivetrain.data.map_style.default_collate", None)
    loader = prepare_loader(DataLoader(Subset(tensors(), indices), 2), shard=DataShard())
    assert [[part.tolist() for part in batch] for batch in loader] == [[p.tolist() for p in b] for b in expected]


def in_two_epochs(make: Callable[[], Any], change: Callable[[Any], None], prepared: bool) -> list[Any]:
    """The batches of two epochs, between which something happens to the dataset."""
    dataset = make()
    user = DataLoader(dataset, 2)
    loader = prepare_loader(user, shard=DataShard()) if prepared else user
    first = list(loader)
    change(dataset)
    return [*first, *loader]


class Doubled(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        return tuple(2 * each for each in super().__getitem__(index))


class Renamed(TensorDataset):
    """A subclass without a method of its own."""


def some(dataset: Any) -> Any:
    return Subset(dataset, [2, 0, 1])


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "other tensors": (tensors, lambda data: setattr(data, "tensors", (torch.arange(ROWS),))),
    "other indices": (lambda: some(tensors()), lambda data: setattr(data, "indices", [5, 6])),
    "another dataset": (lambda: some(tensors()), lambda data: setattr(data, "dataset", Doubled(torch.arange(9)))),
    "batches of its own": (tensors, lambda data: setattr(data, "__getitems__", lambda indices: indices)),
    "a subset with batches of its own": (
        lambda: some(tensors()),
        lambda data: setattr(data, "__getitems__", lambda indices: indices),
    ),
    "a subclass": (lambda: Renamed(torch.arange(4)), lambda data: None),
    "a class that doubles": (lambda: Doubled(torch.arange(4)), lambda data: None),
    "parts that change": (
        lambda: ConcatDataset([TensorDataset(torch.arange(2)), TensorDataset(torch.arange(3))]),
        lambda data: data.datasets.__setitem__(0, TensorDataset(torch.arange(7, 9))),
    ),
    "stacks that change": (
        lambda: StackDataset(x=torch.arange(3)),
        lambda data: data.datasets.__setitem__("x", torch.arange(5, 8)),
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_whatever_a_script_does_to_a_dataset_the_batches_are_torchs(name: str) -> None:
    make, change = CHANGES[name]
    assert_same(in_two_epochs(make, change, prepared=True), in_two_epochs(make, change, prepared=False))


@pytest.mark.parametrize("kind", [torch.Tensor, tuple])
def test_collate_functions_that_a_script_registers_are_called(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    def tenfold(samples: Any, *, collate_fn_map: Any = None) -> Any:
        return [10 * each if kind is torch.Tensor else each[0] for each in samples]

    loader = prepare_loader(DataLoader(tensors(), 2), shard=DataShard())
    monkeypatch.setitem(default_collate_fn_map, kind, tenfold)
    assert_same(list(loader), list(DataLoader(tensors(), 2)))


def test_a_class_of_torchs_that_a_script_patches_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = prepare_loader(DataLoader(tensors(), 2), shard=DataShard())
    monkeypatch.setattr(TensorDataset, "__getitem__", lambda self, index: (torch.tensor(index),))
    assert_same(list(loader), list(DataLoader(tensors(), 2)))


def test_a_wrong_index_is_the_error_that_torch_raises() -> None:
    loader = prepare_loader(DataLoader(tensors(), sampler=[0, ROWS]), shard=DataShard())
    with pytest.raises(IndexError, match=f"index {ROWS} is out of bounds"):
        list(loader)


def test_a_collate_function_of_the_users_gets_samples() -> None:
    loader = prepare_loader(DataLoader(tensors(), 4, collate_fn=len), shard=DataShard())
    assert list(loader) == [4] * 5 + [3]


def shares(workers: int) -> dict[str, list[Any]]:
    """This process's batches of each kind of dataset, which workers read where there are some."""
    state = PartialState(device=device())
    found = {}
    for name, make in DATASETS.items():
        generator = torch.Generator().manual_seed(3)
        user = DataLoader(make(), 4, shuffle=True, generator=generator, num_workers=workers, pin_memory=True)
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
    assert all(all(parts) for parts in found.values())


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
