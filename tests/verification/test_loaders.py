"""Loaders with the batches of several processes, samples that follow from their index, and random numbers of rows."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from drivetrain.verification.loaders import joined, rows_of
from drivetrain.verification.record import strategy_of
from drivetrain.verification.row_random import RowRandom


class Noisy(Dataset):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, random.random(), torch.rand(()).item()])


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(10))


def test_batches_of_several_processes_become_one() -> None:
    loader = DataLoader(TensorDataset(torch.arange(11)), 2)

    assert [batch[0].tolist() for batch in joined(loader, 2)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]
    assert len(joined(loader, 2)) == 3
    assert next(iter(joined(loader, 2, is_reversed=True)))[0].tolist() == [3, 2, 1, 0]
    assert [len(batch[0]) for batch in loader] == [2, 2, 2, 2, 2, 1]  # the script's own is unchanged


@pytest.mark.parametrize(("drop_last", "sizes"), [(False, [4, 4, 2]), (True, [4, 4])])
def test_an_epoch_is_cut_so_that_its_last_batch_is_not_full(drop_last: bool, sizes: list[int]) -> None:
    loader = DataLoader(TensorDataset(torch.arange(64)), 2, drop_last=drop_last)

    found = joined(loader, 2, uneven_over=2)

    assert [len(batch[0]) for batch in found] == sizes
    assert len(found) == len(sizes)
    # Two processes with batches of 2 share the same rows.
    assert sum(len(batch[0]) for batch in joined(loader, uneven_over=2)) == 10


def test_streams_and_ready_batches_are_joined_too() -> None:
    assert [batch.tolist() for batch in joined(DataLoader(Stream(), 2), 3)] == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9]]

    ready = [{"x": torch.tensor([n]), "pair": (torch.tensor([n]), torch.tensor([-n]))} for n in range(3)]
    found = list(joined(ready, 2))

    assert [batch["x"].tolist() for batch in found] == [[0, 1], [2]]
    assert found[0]["pair"][1].tolist() == [0, -1]


def test_a_sample_does_not_depend_on_who_reads_it_and_when() -> None:
    own = random.getstate()

    forward = torch.cat(list(joined(DataLoader(Noisy(), 4))))
    backward = torch.cat(list(joined(DataLoader(Noisy(), 4), 3, is_reversed=True)))

    assert torch.equal(forward, backward.flip(0))
    assert len(forward[:, 1].unique()) == len(forward[:, 2].unique()) == 12
    assert random.getstate() == own


def test_rows_are_told_apart_by_their_content_without_padding() -> None:
    tokens = torch.tensor([[5, 6, 0], [7, 0, 0], [5, 6, 0]])
    longer = F.pad(tokens, (0, 2))

    first, second, third = rows_of({"ids": tokens}, 3)

    assert first == third != second
    assert rows_of({"ids": longer}, 3) == [first, second, third]
    assert rows_of({"ids": tokens[:2]}, 3) is None
    assert rows_of([torch.tensor([1.0, 2.0]), "text"], 2) is not None


def drawn(keys: str) -> list[torch.Tensor]:
    mode, rows = RowRandom(), len(keys)
    x, layer = torch.ones(rows, 3), nn.Dropout(0.5)
    with mode:
        mode.begin(list(keys), 0)
        found = [
            torch.randn_like(x),
            torch.rand(rows, 2),
            torch.randint(0, 100, (rows,)),
            torch.empty(rows, 2).normal_(3.0, 0.1, generator=None),
            torch.empty(rows, dtype=torch.long).random_(10**6, generator=None),
            torch.bernoulli(torch.full((rows, 8), 0.5)),
            torch.multinomial(torch.ones(rows, 50), 2),
            torch.normal(0.0, 1.0, (rows,)),
            layer(x),
        ]
        mode.end()
    return found


def test_random_numbers_belong_to_rows_and_dropout_is_off() -> None:
    state = torch.get_rng_state()

    whole = drawn("abcdef")
    parts = [torch.cat(pair) for pair in zip(drawn("ab"), drawn("cdef"), strict=True)]
    turned = [each.flip(0) for each in drawn("fedcba")]

    for one, other, third in zip(whole, parts, turned, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, third)
    assert len(whole[0][:, 0].unique()) == 6
    assert torch.equal(whole[-1], torch.ones(6, 3))
    assert torch.equal(torch.get_rng_state(), state)


def test_numbers_that_belong_to_no_row_are_told() -> None:
    mode = RowRandom()
    with mode:
        mode.begin(list("abcd"), 0)
        torch.randn(3)
        torch.empty((), dtype=torch.int64).random_()  # as a loader that is created within the step draws its seed
        mode.end()

    assert mode.unplaced == {"randn(3,)"}


@pytest.mark.parametrize(("spec", "name"), [("ddp", "ddp"), ("fsdp", "fsdp"), ("deepspeed:3", "deepspeed")])
def test_strategies_are_named_as_users_name_them(spec: str, name: str) -> None:
    assert strategy_of(spec).name == name


def test_sizes_of_parallel_strategies_are_joined_by_a_plus() -> None:
    found = strategy_of("fsdp+tp2")

    assert (found.sizes.tp, found.sizes.pp) == (2, 1)
    with pytest.raises(ValueError, match=r"'megatron\+tp2' is not valid"):
        strategy_of("megatron+tp2")
    with pytest.raises(ValueError, match=r"Unknown strategy 'dpd'"):
        strategy_of("dpd")
