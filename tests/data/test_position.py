"""A loader's position is a number of samples: another loader, on any number of processes, goes on from there."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, SequentialSampler, TensorDataset

from drivetrain import CheckpointError, ConfigurationError, PartialState
from drivetrain.data import (
    DataLoaderConfiguration,
    DataShard,
    PermutationSampler,
    PreparedLoader,
    TailPolicy,
    prepare_loader,
    skip_first_batches,
)
from tests.data.kinds import (
    ITERABLE,
    KINDS,
    OWN_ITERATION,
    READY,
    Episodes,
    Numbers,
    Remembering,
    Stream,
    rows_of,
    seed_everything,
)
from tests.pool import run_in_processes

# Streams that draw from the global generators are read anew from wherever these stand.
RESUMABLE = [kind for kind in KINDS if kind not in ("no samples", "empty stream", "stream that draws", "one batch")]


def rest_of(loader: Any) -> list[list[int]]:
    return [rows_of(batch) for batch in loader]


@pytest.mark.parametrize("kind", RESUMABLE)
def test_a_fresh_loader_goes_on_where_another_stood(kind: str) -> None:
    seed_everything(3)
    original = prepare_loader(KINDS[kind](), shard=DataShard())
    rest_of(original)
    iterator = iter(original)
    next(iterator)
    next(iterator)
    state = original.state_dict()
    there = torch.get_rng_state()
    rest = rest_of(iterator)
    following = rest_of(original)

    seed_everything(17)
    resumed = prepare_loader(KINDS[kind](), shard=DataShard())
    resumed.load_state_dict(state)
    if "draw" in kind:  # the random state of the process is restored by the run
        torch.set_rng_state(there)
    assert resumed.epoch == 1
    assert rest_of(resumed) == rest
    if kind in ("shuffled, own generator", "permutation", "in order", "stream"):
        assert rest_of(resumed) == following
    assert resumed.epoch >= 1


def test_resuming_leaves_the_global_generators_where_the_run_restored_them() -> None:
    seed_everything(3)
    original = prepare_loader(KINDS["shuffled"](), shard=DataShard())
    iterator = iter(original)
    next(iterator)
    state = original.state_dict()
    resumed = prepare_loader(KINDS["shuffled"](), shard=DataShard())
    resumed.load_state_dict(state)
    seed_everything(21)
    before = torch.get_rng_state()
    rest_of(resumed)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_position_after_an_epoch_is_the_start_of_the_next() -> None:
    loader = prepare_loader(KINDS["permutation"](), shard=DataShard())
    rest_of(loader)
    state = loader.state_dict()
    assert (state["epoch"], state["consumed"], state["start"]) == (1, 0, None)
    other = prepare_loader(KINDS["permutation"](), shard=DataShard())
    other.load_state_dict(state)
    assert rest_of(other) == rest_of(loader)


def test_the_position_after_a_break_is_where_the_loop_was_left() -> None:
    loader = prepare_loader(KINDS["shuffled"](), shard=DataShard())
    whole: list[list[int]] = []
    for batch in loader:
        whole.append(rows_of(batch))
        if len(whole) == 2:
            break
    state = loader.state_dict()
    assert (state["epoch"], state["consumed"]) == (0, 8)
    loader.load_state_dict(state)
    seen = {row for batch in [*whole, *rest_of(loader)] for row in batch}
    assert seen == set(range(22))


@pytest.mark.parametrize("read", [2, 6])
def test_the_position_after_the_next_epoch_was_set_is_its_start(read: int) -> None:
    loader = prepare_loader(DataLoader(range(6)), shard=DataShard())
    assert len(list(itertools.islice(loader, read + 1))) == read + (read < 6)  # left within the epoch, or at its end
    loader.set_epoch(1)
    state = loader.state_dict()
    assert (state["epoch"], state["batches"], loader.consumed_batches, loader.reached_end) == (1, 0, 0, False)


def test_a_position_is_dropped_when_another_epoch_is_set() -> None:
    loader = prepare_loader(KINDS["in order"](), shard=DataShard())
    loader.skip(3)
    assert loader.state_dict()["batches"] == 3
    loader.set_epoch(0)
    assert rest_of(loader)[0] == [12, 13, 14, 15]
    loader.skip(3)
    loader.set_epoch(4)
    assert rest_of(loader)[0] == [0, 1, 2, 3]


def test_a_position_that_is_not_used_is_kept() -> None:
    loader = prepare_loader(KINDS["shuffled"](), shard=DataShard())
    next(iter(loader))
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    rest = rest_of(iterator)
    other = prepare_loader(KINDS["shuffled"](), shard=DataShard())
    other.load_state_dict(state)
    third = prepare_loader(KINDS["shuffled"](), shard=DataShard())
    third.load_state_dict(other.state_dict())
    assert rest_of(third) == rest


class Watching(Numbers):
    """Notes what is read."""

    def __init__(self, length: int = 22) -> None:
        super().__init__(length)
        self.read: list[int] = []

    def __getitem__(self, index: int) -> int:
        self.read.append(index)
        return index


@pytest.mark.parametrize("sampler", [SequentialSampler, RandomSampler, PermutationSampler])
def test_what_is_skipped_is_not_read(sampler: Any) -> None:
    dataset = Watching()
    loader = prepare_loader(DataLoader(dataset, batch_size=4, sampler=sampler(dataset)), shard=DataShard())
    loader.skip(4)
    rows = [row for batch in rest_of(loader) for row in batch]
    assert dataset.read == rows
    assert len(rows) == 6


def test_the_middle_of_a_billion_samples_is_reached_at_once() -> None:
    dataset = Numbers(10**9)
    for sampler in (PermutationSampler(dataset, seed=1), SequentialSampler(dataset)):
        loader = prepare_loader(DataLoader(dataset, batch_size=100, sampler=sampler), shard=DataShard(1, 2))
        loader.load_state_dict({**loader.state_dict(), "consumed": 600_000_000, "batches": 6_000_000})
        iterator = iter(loader)
        batch = next(iterator)
        assert loader.current is not None
        assert loader.current.index == 3_000_000
        assert loader.current.consumed == 600_000_200
        expected = sampler[600_000_100:600_000_200] if isinstance(sampler, PermutationSampler) else None
        assert batch.tolist() == (expected or list(range(600_000_100, 600_000_200)))
        iterator.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["in order", "shuffled", "custom batch sampler", *ITERABLE, *READY])
def test_first_batches_are_skipped_at_every_iteration_of_the_new_loader(kind: str) -> None:
    for loader in (KINDS[kind](), prepare_loader(KINDS[kind](), shard=DataShard())):
        seed_everything(1)
        expected = rest_of(KINDS[kind]())[2:]
        skipping = skip_first_batches(loader, 2)
        for seed in (1, 1):
            seed_everything(seed)
            assert rest_of(skipping) == expected
        if kind not in ("stream without length", "stream that draws", "empty stream", "batches of strings"):
            assert len(skipping) == len(expected)
        if isinstance(loader, PreparedLoader):
            assert len(rest_of(loader)) >= len(expected)


def test_what_is_known_about_batches_counts_what_was_skipped() -> None:
    loader = skip_first_batches(prepare_loader(KINDS["in order"](), shard=DataShard()), 4)
    infos = [(loader.current.index, loader.current.consumed, loader.remaining) for _ in loader if loader.current]
    assert infos == [(4, 20, 2), (5, 22, 1)]


@pytest.mark.parametrize("call", [lambda loader: loader.skip(-1), lambda loader: skip_first_batches(loader, -1)])
def test_a_negative_number_of_batches_is_refused(call: Any) -> None:
    with pytest.raises(ConfigurationError, match="-1"):
        call(prepare_loader([torch.zeros(1)], shard=DataShard()))


def test_a_state_of_something_else_is_refused() -> None:
    loader = prepare_loader(KINDS["in order"](), shard=DataShard())
    with pytest.raises(CheckpointError, match="epoch, consumed"):
        loader.load_state_dict({"step": 3})


def test_a_batch_that_was_begun_is_finished_with_its_rest() -> None:
    loader = prepare_loader(DataLoader(Numbers(), batch_sampler=[[0, 1, 2], [3, 4], [5, 6, 7]]), shard=DataShard())
    loader.load_state_dict({**loader.state_dict(), "consumed": 4, "batches": 1})
    assert rest_of(loader) == [[4], [5, 6, 7]]


# on other numbers of processes

MOVABLE = [
    *("shuffled", "shuffled, own generator", "permutation", "custom sampler drawing from python", "weighted"),
    *(kind for kind in OWN_ITERATION if "workers" not in kind),
]


def begin(kinds: list[str], steps: int) -> list[Any]:
    rank, count = PartialState().process_index, PartialState().num_processes
    found: list[Any] = []
    for kind in kinds:
        seed_everything(7 if rank == 0 else 50 + rank)
        loader = prepare_loader(KINDS[kind](), shard=DataShard(rank, count))
        iterator = iter(loader)
        batches = [rows_of(next(iterator)) for _ in range(steps)]
        found.append((batches, loader.state_dict()))
        iterator.close()  # type: ignore[attr-defined]
    return found


def go_on(kinds: list[str], states: list[Any]) -> list[Any]:
    rank, count = PartialState().process_index, PartialState().num_processes
    found: list[Any] = []
    for kind, state in zip(kinds, states, strict=True):
        seed_everything(90 + rank)
        loader = prepare_loader(KINDS[kind](), shard=DataShard(rank, count))
        loader.load_state_dict(state)
        batches: list[list[int]] = []
        for batch in loader:
            assert loader.current is not None
            rows = rows_of(batch)
            batches.append(rows[: len(rows) - loader.current.padding])
        found.append(batches)
    return found


def interleaved(ranks: list[list[list[int]]]) -> list[int]:
    steps = max(map(len, ranks))
    return [row for step in range(steps) for own in ranks if step < len(own) for row in own[step]]


def test_a_run_moves_from_two_processes_to_three_and_to_one() -> None:
    first, second = run_in_processes(begin, args=(MOVABLE, 1))
    states = [state for _, state in first]
    on_three = run_in_processes(go_on, world_size=3, args=(MOVABLE, states))
    for number, kind in enumerate(MOVABLE):
        seed_everything(7)
        expected = [row for batch in KINDS[kind]() for row in rows_of(batch)]
        done = interleaved([first[number][0], second[number][0]])
        assert done + interleaved([own[number] for own in on_three]) == expected
        alone = prepare_loader(KINDS[kind](), shard=DataShard())
        alone.load_state_dict(states[number])
        assert done + [row for batch in rest_of(alone) for row in batch] == expected


def test_a_run_moves_from_one_process_to_two() -> None:
    states, done = [], []
    for kind in MOVABLE:
        seed_everything(7)
        loader = prepare_loader(KINDS[kind](), shard=DataShard())
        iterator = iter(loader)
        done.append([row for _ in range(3) for row in rows_of(next(iterator))])
        states.append(loader.state_dict())
    ranks = run_in_processes(go_on, args=(MOVABLE, states))
    for number, kind in enumerate(MOVABLE):
        seed_everything(7)
        expected = [row for batch in KINDS[kind]() for row in rows_of(batch)]
        assert done[number] + interleaved([own[number] for own in ranks]) == expected


def test_a_sampler_that_draws_late_goes_on_with_the_restored_random_state() -> None:
    seed_everything(2)
    loader = prepare_loader(DataLoader(Numbers(), batch_sampler=Episodes()), shard=DataShard())
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
        torch.rand(4)  # a model with dropout, say
    state, random_state = loader.state_dict(), torch.get_rng_state()
    rest = []
    for batch in iterator:
        rest.append(rows_of(batch))
        torch.rand(4)
    resumed = prepare_loader(DataLoader(Numbers(), batch_sampler=Episodes()), shard=DataShard())
    resumed.load_state_dict(state)
    torch.set_rng_state(random_state)
    again = []
    for batch in resumed:
        again.append(rows_of(batch))
        torch.rand(4)
    assert again == rest


RESHARED = [
    *("in order", "shuffled", "weighted", "custom sampler drawing from python", "custom batch sampler", "no batches"),
    *("custom batch sampler drawing late", "stream", "stream that draws", "stream, no batches", "two workers"),
    *("list of batches", "subclass, shuffled", "object around a loader, no length"),
]


def rest_and_next_epoch(kind: str, config: DataLoaderConfiguration) -> list[list[list[int]]]:
    """Interrupt epoch 1 after one step. Return its rest and epoch 2, undisturbed and by a fresh loader."""
    state = PartialState()
    shard = DataShard(state.process_index, state.num_processes)
    seed_everything(3)
    loader = prepare_loader(KINDS[kind](), shard=shard, config=config)
    rest_of(loader)
    iterator = iter(loader)
    next(iterator)
    position = loader.state_dict()
    there = random.getstate(), np.random.get_state(), torch.get_rng_state()
    expected = [rest_of(iterator), rest_of(loader)]
    seed_everything(17)
    resumed = prepare_loader(KINDS[kind](), shard=shard, config=config)
    resumed.load_state_dict(position)
    random.setstate(there[0])
    np.random.set_state(there[1])
    torch.set_rng_state(there[2])
    return [*expected, rest_of(resumed), rest_of(resumed)]


def changed_by_a_resume() -> list[str]:
    changed = []
    for kind, dispatch, split in itertools.product(RESHARED, (None, True), (False, True)):
        if split and "no batches" in kind:  # which has none to split
            continue
        config = DataLoaderConfiguration(dispatch_batches=dispatch, split_batches=split)
        rest, following, *again = rest_and_next_epoch(kind, config)
        if again != [rest, following]:
            changed.append(f"{kind}, dispatch {dispatch}, split {split}: {again} for {rest}, {following}")
    return changed


def test_processes_resume_with_the_same_padding_and_the_same_next_epoch() -> None:
    assert run_in_processes(changed_by_a_resume, world_size=2, timeout=120) == [[], []]


def test_a_loader_with_a_state_of_its_own_continues_from_it() -> None:
    for loaded in (prepare_loader(Remembering(), shard=DataShard()) for _ in range(2)):
        loader = prepare_loader(Remembering(), shard=DataShard())
        iterator = iter(loader)
        next(iterator), next(iterator)
        loaded.load_state_dict(loader.state_dict())
        assert loaded.loader.place == 0  # nothing is loaded before the iteration begins
        assert rest_of(loaded) == rest_of(iterator)
        assert rest_of(loaded) == rest_of(loader)


def streams(steps: int, state: Any, batch_size: int | None, workers: int) -> tuple[list[list[int]], Any]:
    """Read some steps of a stream that every process reads whole, or the rest of it where `steps` is negative."""
    rank, count = PartialState().process_index, PartialState().num_processes
    config = DataLoaderConfiguration(dispatch_batches=False)
    stream = DataLoader(Stream(), batch_size=batch_size, num_workers=workers)
    loader = prepare_loader(stream, shard=DataShard(rank, count), config=config, tail=TailPolicy.UNEVEN)
    if state is not None:
        loader.load_state_dict(state)
    iterator, batches = iter(loader), []
    for batch in iterator:
        batches.append(rows_of(batch))
        if len(batches) == steps:
            break
    state = loader.state_dict()
    iterator.close()  # type: ignore[attr-defined]
    return batches, state


def test_a_stream_that_all_processes_read_moves_to_any_number_of_them() -> None:
    worlds = [(3, 2, 3), (3, 1, 2), (1, 2, 1)]  # on 1, 2 and 3 processes, and the others
    for batch_size, (first, second, third) in itertools.product((3, 1, None), worlds):
        state, done = None, []
        for world, steps in ((first, 1), (second, 1), (third, -1)):
            ranks = run_in_processes(streams, world_size=world, args=(steps, state, batch_size, 0))
            state = ranks[0][1]
            done += interleaved([batches for batches, _ in ranks])
        assert done == list(range(22)), (batch_size, first, second, third)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_a_stream_that_workers_read_repeats_and_leaves_out_nothing_on_another_number_of_processes(
    before: int, after: int
) -> None:
    ranks = run_in_processes(streams, world_size=before, args=(3, None, 2, 2))
    rest = run_in_processes(streams, world_size=after, args=(-1, ranks[0][1], 2, 2))
    assert sorted(row for batches, _ in (*ranks, *rest) for batch in batches for row in batch) == list(range(22))


def test_a_stream_is_read_up_to_the_position() -> None:
    loader = prepare_loader(DataLoader(Stream(), batch_size=4), shard=DataShard())
    loader.skip(5)
    assert rest_of(loader) == [[20, 21]]


def test_a_distributed_sampler_goes_on_counting_its_own_batches() -> None:
    data = TensorDataset(torch.arange(20.0))

    def make() -> PreparedLoader:
        sampler: DistributedSampler[Any] = DistributedSampler(data, num_replicas=2, rank=0, shuffle=False)
        return prepare_loader(DataLoader(data, batch_size=2, sampler=sampler), shard=DataShard(0, 2))

    whole = make()
    states = [(whole.current.index, whole.state_dict()) for _ in whole if whole.current is not None]
    resumed = make()
    resumed.load_state_dict(states[1][1])
    rest = [(resumed.current.index, resumed.state_dict()) for _ in resumed if resumed.current is not None]
    assert [index for index, _ in rest] == [2, 3, 4]
    assert [state["batches"] for _, state in rest] == [state["batches"] for _, state in states[2:]]
