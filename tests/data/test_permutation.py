"""PermutationSampler: a good shuffle in constant memory, from anywhere."""

from __future__ import annotations

import math
import pickle
import tracemalloc
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from drivetrain import ConfigurationError
from drivetrain.data import PermutationSampler

AWKWARD = [0, 1, 2, 3, 5, 7, 255, 256, 257, 997, 1023, 1024, 1025, 4095, 4096, 4097, 65537, 100_003]


def deviations(observed: np.ndarray, expected: np.ndarray, freedom: int) -> float:
    """Chi-square, in standard deviations from its mean."""
    chi_square = ((observed - expected) ** 2 / expected).sum()
    return float((chi_square - freedom) / math.sqrt(2 * freedom))


@pytest.mark.parametrize("length", AWKWARD)
def test_every_index_comes_exactly_once(length: int) -> None:
    order = list(PermutationSampler(length, seed=3))
    assert sorted(order) == list(range(length))
    assert all(type(index) is int for index in order[:5])


@settings(max_examples=60, deadline=None)
@given(length=st.integers(0, 20_000), seed=st.integers(-(2**70), 2**70), epoch=st.integers(0, 2**40))
def test_every_index_comes_exactly_once_for_any_seed_and_epoch(length: int, seed: int, epoch: int) -> None:
    assert sorted(PermutationSampler(length, seed, epoch=epoch)[:]) == list(range(length))


@pytest.mark.parametrize("length", [5, 16, 31, 64])
def test_each_index_is_equally_likely_at_each_position(length: int) -> None:
    epochs = 3000
    counts = np.zeros((length, length))
    for epoch in range(epochs):
        counts[np.arange(length), PermutationSampler(length, seed=7, epoch=epoch)[:]] += 1
    assert abs(deviations(counts, np.full_like(counts, epochs / length), (length - 1) ** 2)) < 4


@pytest.mark.parametrize("length", [1025, 4096, 5000])
def test_regions_of_a_larger_set_are_equally_likely_at_each_region_of_the_order(length: int) -> None:
    epochs, regions = 300, 16
    position = np.arange(length) * regions // length
    counts = np.zeros((regions, regions))
    for epoch in range(epochs):
        index = np.array(PermutationSampler(length, seed=9, epoch=epoch)[:])
        np.add.at(counts, (position, index * regions // length), 1)
    sizes = np.bincount(position)
    expected = np.outer(sizes, sizes) / length * epochs
    assert abs(deviations(counts, expected, (regions - 1) ** 2)) < 4


def test_all_orders_of_four_are_equally_likely() -> None:
    trials = 6000
    orders = [tuple(PermutationSampler(4, seed=seed)[:]) for seed in range(trials)]
    counts = np.array([orders.count(order) for order in set(orders)])
    assert len(counts) == 24
    assert abs(deviations(counts, np.full(24, trials / 24), 23)) < 4


@pytest.mark.parametrize("length", [1000, 65_536, 300_007])
def test_neighbours_epochs_and_seeds_are_uncorrelated(length: int) -> None:
    order = np.array(PermutationSampler(length, seed=5)[:], dtype=float)
    others = [
        order[np.r_[1:length, 0]],  # the neighbour
        np.arange(length),
        np.array(PermutationSampler(length, seed=5, epoch=1)[:]),
        np.array(PermutationSampler(length, seed=6)[:]),
    ]
    for other in others:
        assert abs(np.corrcoef(order, other)[0, 1]) * math.sqrt(length) < 4


def test_orders_of_epochs_and_seeds_are_all_distinct() -> None:
    orders = {tuple(PermutationSampler(50, seed, epoch=epoch)) for seed in range(30) for epoch in range(30)}
    assert len(orders) == 900


def test_random_access_agrees_with_iteration() -> None:
    sampler = PermutationSampler(3001, seed=1)
    order = list(sampler)
    assert [sampler[position] for position in (0, 1, 1500, 3000, -1)] == [order[p] for p in (0, 1, 1500, 3000, -1)]
    assert sampler[10:20] == order[10:20]
    assert sampler[::-7] == order[::-7]
    assert list(sampler[5:5]) == []
    with pytest.raises(IndexError, match="3001"):
        sampler[3001]


def test_each_iteration_is_the_next_epoch_unless_set() -> None:
    sampler = PermutationSampler(100, seed=2)
    first, second = list(sampler), list(sampler)
    assert first == PermutationSampler(100, seed=2, epoch=0)[:]
    assert second == PermutationSampler(100, seed=2, epoch=1)[:]
    sampler.set_epoch(0)
    assert list(sampler) == first
    iter(sampler)  # made but not used: begins nothing
    assert list(sampler) == second


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("batch_size", [None, 4])
def test_it_serves_any_plain_loader(batch_size: int | None, workers: int) -> None:
    loader = DataLoader(
        list(range(20)), batch_size=batch_size, sampler=PermutationSampler(20, seed=4), num_workers=workers
    )
    for epoch in range(2):
        indices = [index for batch in loader for index in (batch.tolist() if batch_size else [batch])]
        assert indices == PermutationSampler(20, seed=4, epoch=epoch)[:]


def test_a_billion_samples_take_constant_memory_and_begin_anywhere() -> None:
    tracemalloc.start()
    sampler = PermutationSampler(10**9, seed=1)
    first = list(islice(iter(sampler), 5000))
    sampler.set_epoch(0)
    middle = list(islice(sampler.iterate_from(500_000_000), 5000))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len({*first, *middle}) == 10_000
    assert middle[:100] == sampler[500_000_000:500_000_100]
    assert peak < 8 * 2**20


def test_a_copy_in_another_process_has_the_same_order() -> None:
    sampler = PermutationSampler(2000, seed=8)
    order = sampler[:]
    assert pickle.loads(pickle.dumps(sampler))[:] == order


@pytest.mark.parametrize("source", [-1, 2**62, True, 2.5, iter([1])])
def test_a_source_without_a_usable_length_is_refused(source: object) -> None:
    with pytest.raises(ConfigurationError, match="PermutationSampler"):
        PermutationSampler(source)  # type: ignore[arg-type]
