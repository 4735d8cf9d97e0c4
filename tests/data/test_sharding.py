"""The shares of all processes together are the plain order, whatever the sizes: pure functions, no processes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain import ConfigurationError, DataError
from drivetrain.data import BatchInfo, DataShard, TailPolicy
from drivetrain.data.sharding import Layout, shard_batches, with_last

Shares = list[list[tuple[Sequence[int], BatchInfo]]]


def batches_of(samples: int, size: int, drop_last: bool = False) -> list[list[int]]:
    batches = [list(range(start, min(start + size, samples))) for start in range(0, samples, size)]
    return batches[:-1] if drop_last and batches and len(batches[-1]) < size else batches


def shares_of(batches: list[list[int]], count: int, tail: TailPolicy, split: bool, size: int | None) -> Shares:
    return [list(shard_batches(batches, Layout(DataShard(index, count), tail, split, size))) for index in range(count)]


def gathered(shares: Shares) -> list[int]:
    """What gathering over the ranks gives, step by step, when each drops its padding."""
    steps = max((len(own) for own in shares), default=0)
    rows: list[int] = []
    for step in range(steps):
        for own in shares:
            if step < len(own):
                batch, info = own[step]
                rows += batch[: len(batch) - info.padding]
    return rows


setups = given(
    samples=st.integers(0, 60),
    size=st.integers(1, 9),
    count=st.integers(1, 5),
    tail=st.sampled_from(TailPolicy),
    split=st.booleans(),
    drop_last=st.booleans(),
)


@settings(max_examples=400, deadline=None)
@setups
def test_real_rows_of_all_ranks_in_step_order_are_the_plain_order(
    samples: int, size: int, count: int, tail: TailPolicy, split: bool, drop_last: bool
) -> None:
    size = size * count if split else size
    batches = batches_of(samples, size, drop_last)
    assert gathered(shares_of(batches, count, tail, split, size)) == [row for batch in batches for row in batch]


@settings(max_examples=400, deadline=None)
@setups
def test_what_is_known_about_a_batch_is_true(
    samples: int, size: int, count: int, tail: TailPolicy, split: bool, drop_last: bool
) -> None:
    size = size * count if split else size
    batches = batches_of(samples, size, drop_last)
    shares = shares_of(batches, count, tail, split, size)
    total = sum(len(batch) for batch in batches)
    for own in shares:
        assert [info.index for _, info in own] == list(range(len(own)))
        assert [info.last for _, info in own] == [False] * (len(own) - 1) + [True] * bool(own)
        assert [info.rows for _, info in own] == [len(batch) for batch, _ in own]
    for step in range(max(len(own) for own in shares)):
        infos = [own[step][1] for own in shares if step < len(own)]
        assert {info.global_rows for info in infos} == {sum(info.real_rows or 0 for info in infos)}
        assert len({info.consumed for info in infos}) == 1
    if batches:
        assert shares[0][-1][1].consumed == total


@settings(max_examples=300, deadline=None)
@setups
def test_each_policy_keeps_its_promise(
    samples: int, size: int, count: int, tail: TailPolicy, split: bool, drop_last: bool
) -> None:
    size = size * count if split else size
    batches = batches_of(samples, size, drop_last)
    shares = shares_of(batches, count, tail, split, size)
    layout = Layout(DataShard(0, count), tail, split, size)
    if tail is TailPolicy.UNEVEN:
        assert all(info.padding == 0 for own in shares for _, info in own)
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
    else:
        assert {len(own) for own in shares} == {layout.steps(len(batches))}
    if count == 1:
        assert [batch for batch, _ in shares[0]] == batches
        assert all(info.padding == 0 for _, info in shares[0])
    elif tail is TailPolicy.COMPLETE:
        own_size = size // count if split else size
        assert all(len(batch) == own_size for own in shares for batch, _ in own)
    elif tail is TailPolicy.WHOLE:
        for own in shares:
            for batch, info in own:
                assert info.padding in (0, info.rows)
                if info.padding:
                    assert batch == shares[0][0][0]


@settings(max_examples=200, deadline=None)
@given(samples=st.integers(1, 40), size=st.integers(1, 6), count=st.integers(2, 5))
def test_padding_continues_through_the_first_samples_of_the_epoch(samples: int, size: int, count: int) -> None:
    batches = batches_of(samples, size)
    padding = [
        row
        for own in shares_of(batches, count, TailPolicy.COMPLETE, False, size)
        for batch, info in own
        for row in batch[len(batch) - info.padding :]
    ]
    head = [row for batch in batches[:count] for row in batch]
    assert padding == [head[number % len(head)] for number in range(len(padding))]


@pytest.mark.parametrize("count", [2, 3])
def test_batches_of_a_custom_sampler_are_never_merged_or_cut(count: int) -> None:
    batches = [[0, 1, 2], [3], [4, 5, 6, 7], [8, 9], [10]]
    for tail in TailPolicy:
        shares = shares_of(batches, count, tail, False, None)
        real = [list(batch[: len(batch) - info.padding]) for own in shares for batch, info in own]
        assert sorted(batch for batch in real if batch) == sorted(batches)


def test_a_tail_without_a_known_batch_size_is_made_even() -> None:
    shares = shares_of([[0, 1], [2, 3], [4]], 2, TailPolicy.COMPLETE, False, None)
    assert [[list(batch) for batch, _ in own] for own in shares] == [[[0, 1], [4]], [[2, 3], [0]]]
    assert [own[-1][1].padding for own in shares] == [0, 1]


def test_a_set_smaller_than_one_step_is_repeated_as_often_as_needed() -> None:
    shares = shares_of([[7, 8]], 3, TailPolicy.COMPLETE, False, 4)
    assert [list(own[0][0]) for own in shares] == [[7, 8, 7, 8], [7, 8, 7, 8], [7, 8, 7, 8]]
    assert [own[0][1].padding for own in shares] == [2, 4, 4]
    assert [own[0][1].global_rows for own in shares] == [2, 2, 2]


def test_a_short_batch_is_split_evenly_unless_it_is_completed() -> None:
    shares = shares_of([[0, 1, 2, 3], [4, 5, 6]], 2, TailPolicy.WHOLE, True, 4)
    assert [[list(batch) for batch, _ in own] for own in shares] == [[[0, 1], [4, 5]], [[2, 3], [6]]]
    shares = shares_of([[0, 1, 2, 3], [4]], 2, TailPolicy.WHOLE, True, 4)
    assert [[list(batch) for batch, _ in own] for own in shares] == [[[0, 1], [4]], [[2, 3], [0, 1]]]
    assert shares[1][1][1].padding == 2


def test_a_batch_size_that_does_not_divide_cannot_be_split() -> None:
    with pytest.raises(ConfigurationError, match=r"batch size 5 is not a multiple of 2"):
        Layout(DataShard(0, 2), TailPolicy.COMPLETE, True, 5).check()


def test_an_empty_batch_is_refused_where_it_would_be_shared() -> None:
    with pytest.raises(DataError, match="empty batch"):
        shares_of([[0], []], 2, TailPolicy.COMPLETE, False, None)


@pytest.mark.parametrize(("index", "count"), [(2, 2), (-1, 2), (0, 0)])
def test_a_shard_must_be_one_of_its_parts(index: int, count: int) -> None:
    with pytest.raises(ConfigurationError, match="from 0 to count - 1"):
        DataShard(index, count)


@pytest.mark.parametrize("length", [None, 0, 1, 2, 3, 4, 9])
def test_the_last_item_is_known_also_where_the_length_is_right_or_too_small(length: int | None) -> None:
    marks = [last for _, last in with_last(range(4), length)]
    assert marks == ([False] * 3 + [length is None or length <= 4])


def test_nothing_is_read_ahead_while_the_length_promises_more() -> None:
    read: list[int] = []
    items = (read.append(number) or number for number in range(3))
    for number, _ in with_last(items, 3):
        assert read == list(range(number + 1))
