"""Which loader a tensor comes from, and how many of its rows are padding, in loops of all shapes."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data import DataLoader

from drivetrain import DataError
from drivetrain.data import ActiveLoaders, DataShard, PreparedLoader, prepare_loader
from tests.data.kinds import Numbers


def loader(samples: int, active: ActiveLoaders, index: int = 1, size: int = 4) -> PreparedLoader:
    """The part of rank `index` of 2, with complete batches."""
    return prepare_loader(DataLoader(Numbers(samples), batch_size=size), shard=DataShard(index, 2), active=active)


def test_padding_is_that_of_the_current_batch() -> None:
    active = ActiveLoaders()
    paddings = [active.padding_for(4) for _ in loader(14, active)]
    assert paddings == [0, 2]
    assert active.padding_for(4) == 0  # outside of all loops


def test_a_tensor_that_is_not_per_sample_has_no_padding() -> None:
    active = ActiveLoaders()
    assert [active.padding_for(7) for _ in loader(14, active)] == [0, 0]


def test_in_a_loop_inside_a_loop_the_inner_one_counts() -> None:
    active = ActiveLoaders()
    training, evaluation = loader(24, active), loader(6, active)
    for _ in training:
        assert active.innermost is training
        for _ in evaluation:
            assert active.innermost is evaluation
            assert active.loaders == [training, evaluation]
            assert active.padding_for(4) == 2
        assert active.innermost is training
        assert active.padding_for(4) == 0


def test_an_inner_loop_that_is_broken_out_of_counts_no_more() -> None:
    active = ActiveLoaders()
    evaluation = loader(6, active)
    for _ in loader(14, active):
        for _ in evaluation:
            break
        assert len(active) == 1


def test_loaders_taken_in_turn_are_told_apart_by_their_rows() -> None:
    active = ActiveLoaders()
    pairs = zip(loader(14, active), loader(27, active, size=8), strict=False)
    assert [(active.padding_for(4), active.padding_for(8)) for _ in pairs] == [(0, 0), (2, 5)]


def test_loaders_taken_in_turn_that_cannot_be_told_apart_are_an_error() -> None:
    active = ActiveLoaders()
    for step, _ in enumerate(zip(loader(14, active), loader(13, active), strict=True)):
        if step == 0:
            assert active.padding_for(4) == 0
        else:
            with pytest.raises(DataError, match="loader="):
                active.padding_for(4)
    assert len(active) == 0


def test_what_leaves_is_told_to_the_hooks() -> None:
    active, left = ActiveLoaders(), []
    active.on_leave.append(left.append)
    first, second = loader(8, active), loader(8, active)
    for _ in first:
        list(second)
        assert left == [second]
        break
    assert left == [second, first]


def test_one_loader_iterated_twice_at_once_leaves_twice() -> None:
    active = ActiveLoaders()
    twice = loader(16, active)
    outer = []
    for batch in twice:
        outer.append(batch.tolist())
        assert [inner.tolist() for inner in twice] == [[4, 5, 6, 7], [12, 13, 14, 15]]
        assert active.loaders == [twice]
    assert outer == [[4, 5, 6, 7], [12, 13, 14, 15]]
    assert len(active) == 0


def test_batches_say_what_they_are() -> None:
    prepared = loader(6, ActiveLoaders())
    for _ in prepared:
        info: Any = prepared.current
        assert repr(info) == "BatchInfo(index=0, rows=4, padding=2, global_rows=6, last=True, consumed=6)"
        assert info.real_rows == 2
