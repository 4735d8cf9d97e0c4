"""Several loaders iterated as one, in every mode, and gone on with from any batch."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch.utils.data import DataLoader

from drivetrain import CombinedLoader, ConfigurationError
from drivetrain.data import DataShard, prepare_loader

MODES = ("min_size", "max_size_cycle", "max_size", "sequential")


def combined(mode: str) -> CombinedLoader:
    loaders = {
        "few": DataLoader(torch.arange(6), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(1)),
        "many": DataLoader(torch.arange(100, 115), batch_size=3),
    }
    return CombinedLoader(loaders, mode).map(lambda loader: prepare_loader(loader, shard=DataShard()))


def as_lists(batches):
    return [
        {name: None if rows is None else rows.tolist() for name, rows in batch.items()}
        if isinstance(batch, dict)
        else batch.tolist()
        for batch in batches
    ]


@pytest.mark.parametrize(
    ("mode", "count"), [("min_size", 3), ("max_size_cycle", 5), ("max_size", 5), ("sequential", 8)]
)
def test_each_mode_gives_as_many_batches_as_it_says(mode, count):
    loader = combined(mode)
    assert len(loader) == count
    assert len(list(loader)) == count


def test_max_size_gives_none_for_those_that_ended_and_cycle_starts_them_anew():
    assert [batch["few"] is None for batch in combined("max_size")] == [False, False, False, True, True]
    assert all(batch["few"] is not None for batch in combined("max_size_cycle"))


@pytest.mark.parametrize("mode", MODES)
def test_the_last_batch_is_known_as_such(mode):
    loader = combined(mode)
    flags = [loader.current.last for _ in loader]
    assert flags == [False] * (len(flags) - 1) + [True]


@pytest.mark.parametrize("mode", MODES)
def test_going_on_from_any_batch_gives_the_rest_and_the_same_next_epoch(mode):
    whole = combined(mode)
    expected = as_lists(whole), as_lists(whole)
    for stop in range(1, len(expected[0])):
        first, second = combined(mode), combined(mode)
        seen = []
        for batch in first:
            seen.append(batch)
            if len(seen) == stop:
                state = first.state_dict()
                break
        second.load_state_dict(state)
        assert as_lists(seen) + as_lists(second) == expected[0], stop
        assert as_lists(second) == expected[1], stop


def test_structure_of_the_batches_is_that_of_the_loaders():
    loaders = [DataLoader(torch.arange(2)), DataLoader(torch.arange(2))]
    assert isinstance(next(iter(CombinedLoader(loaders))), list)
    assert isinstance(next(iter(CombinedLoader(tuple(loaders)))), tuple)


def test_one_loader_and_named_tuples_keep_their_structure():
    class Both(NamedTuple):
        few: list[int]
        many: list[int]

    assert list(CombinedLoader(DataLoader(torch.arange(2)), "max_size")) == [torch.tensor([0]), torch.tensor([1])]
    assert list(CombinedLoader(Both([1], [2, 3]), "max_size")) == [Both(1, 2), Both(None, 3)]


def test_an_unknown_mode_and_no_loaders_are_refused():
    with pytest.raises(ConfigurationError, match=r"Use one of min_size.*Did you mean 'max_size_cycle'"):
        CombinedLoader([[1]], mode="max_size_cycl")
    with pytest.raises(ConfigurationError, match="at least one loader"):
        CombinedLoader([])


def test_structures_may_be_nested_and_a_list_of_numbers_is_a_loader():
    loader = CombinedLoader({"a": [1, 2], "b": (range(3), [[4, 5], DataLoader(torch.arange(2))])}, "max_size")
    assert [list(each) for each in loader.loaders[:3]] == [[1, 2], [0, 1, 2], [4, 5]]
    assert next(iter(loader)) == {"a": 1, "b": (0, [4, torch.tensor([0])])}
    assert list(CombinedLoader(["x", "y"])) == ["x", "y"]
    batches = [[torch.zeros(1), torch.ones(1)], [torch.ones(1)]]
    assert CombinedLoader(batches).loaders == batches


def test_a_nested_structure_keeps_its_form_when_it_is_mapped():
    loader = CombinedLoader([{"few": range(2)}, DataLoader(torch.arange(6))]).map(list)
    assert [len(each) for each in loader.loaders] == [2, 6]
    assert next(iter(loader)) == [{"few": 0}, torch.tensor([0])]
