"""Several processes together see exactly the samples, in the order, that the plain loader gives one process."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    Sampler,
    Subset,
    TensorDataset,
    get_worker_info,
)

from drivetrain import Accelerator, ConfigurationError, DataError, PartialState
from drivetrain.data import DataLoaderConfiguration, DataShard, TailPolicy, prepare_loader
from tests.data.kinds import (
    ITERABLE,
    ITERABLE_WITH_WORKERS,
    KINDS,
    MAP_STYLE,
    READY,
    SAMPLES,
    Episodes,
    Numbers,
    Stream,
    random_state,
    rows_of,
    seed_everything,
)
from tests.pool import device, run_in_processes

EPOCHS = 2
SEED = 5

WHOLE_BATCHES = [kind for kind in KINDS if "no batches" not in kind]

# name: kinds, tail, options
SETUPS: dict[str, tuple[list[str], TailPolicy, dict[str, Any]]] = {
    "complete": (list(KINDS), TailPolicy.COMPLETE, {}),
    "whole": ([kind for kind in KINDS if "workers" not in kind], TailPolicy.WHOLE, {}),
    "uneven": ([kind for kind in KINDS if "workers" not in kind], TailPolicy.COMPLETE, {"even_batches": False}),
    "split": (
        [kind for kind in WHOLE_BATCHES if "workers" not in kind],
        TailPolicy.COMPLETE,
        {"split_batches": True},
    ),
    "split, whole": (["shuffled", "custom batch sampler", "stream"], TailPolicy.WHOLE, {"split_batches": True}),
    "dispatched": ([*MAP_STYLE, *READY], TailPolicy.COMPLETE, {"dispatch_batches": True}),
    "dispatched, whole": (["shuffled", "one batch", *ITERABLE], TailPolicy.WHOLE, {"dispatch_batches": True}),
    "dispatched, uneven": (["shuffled", "one batch", *ITERABLE], TailPolicy.UNEVEN, {"dispatch_batches": True}),
    "dispatched, split": (
        ["shuffled", "custom batch sampler", "stream"],
        TailPolicy.COMPLETE,
        {"dispatch_batches": True, "split_batches": True},
    ),
    "read by all": ([*ITERABLE, *ITERABLE_WITH_WORKERS], TailPolicy.COMPLETE, {"dispatch_batches": False}),
    "read by all, whole": (list(ITERABLE), TailPolicy.WHOLE, {"dispatch_batches": False}),
    "read by all, uneven": (list(ITERABLE), TailPolicy.UNEVEN, {"dispatch_batches": False}),
}
ALL_CASES = [(setup, kind) for setup, (kinds, _, _) in SETUPS.items() for kind in kinds]
CASES = {
    2: ALL_CASES,
    3: [
        (setup, kind)
        for setup, kind in ALL_CASES
        if setup in ("complete", "uneven", "dispatched, uneven") and "workers" not in kind
    ],
}


def visit(cases: list[tuple[str, str]]) -> dict[tuple[str, str], list[list[Any]]]:
    """On each rank: for each case and epoch, every batch's real rows and what is known about it."""
    state = PartialState()
    seen: dict[tuple[str, str], list[list[Any]]] = {}
    for setup, kind in cases:
        _, tail, options = SETUPS[setup]
        # Only rank 0 begins where the plain loader began: the others must follow it.
        seed_everything(SEED + state.process_index)
        loader = prepare_loader(
            KINDS[kind](),
            shard=DataShard(state.process_index, state.num_processes),
            config=DataLoaderConfiguration(**options),
            tail=tail,
        )
        epochs: list[list[Any]] = []
        for _ in range(EPOCHS):
            batches: list[Any] = []
            for batch in loader:
                info = loader.current
                assert info is not None
                rows = rows_of(batch)
                assert info.rows in (len(rows), None)
                real = rows[: len(rows) - info.padding]
                batches.append((real, info.rows, info.padding, info.last, info.global_rows, info.consumed))
            epochs.append(batches)
        seen[setup, kind] = epochs
    return seen


@lru_cache
def visited(world_size: int) -> list[dict[tuple[str, str], list[list[Any]]]]:
    return run_in_processes(visit, world_size=world_size, args=(CASES[world_size],), timeout=120)


@lru_cache
def plain(kind: str) -> list[list[list[int]]]:
    """The batches of each epoch in one plain process."""
    seed_everything(SEED)
    loader = KINDS[kind]()
    return [[rows_of(batch) for batch in loader] for _ in range(EPOCHS)]


@pytest.mark.parametrize(
    ("world_size", "setup", "kind"), [(size, *case) for size, cases in CASES.items() for case in cases]
)
def test_all_processes_together_give_the_plain_order(world_size: int, setup: str, kind: str) -> None:
    _, tail, options = SETUPS[setup]
    by_rank = [each[setup, kind] for each in visited(world_size)]
    for epoch, expected in enumerate(plain(kind)):
        if "drop_last" in kind and not options.get("split_batches"):  # only rounds that have a batch for each process
            expected = expected[: len(expected) // world_size * world_size]
        ranks = [own[epoch] for own in by_rank]
        steps = [[own[step] for own in ranks if step < len(own)] for step in range(max(map(len, ranks)))]
        together = [row for step in steps for batch in step for row in batch[0]]
        in_order = [row for batch in expected for row in batch]
        if setup == "read by all" and kind == "stream, two workers":  # each worker groups its own stream
            together, in_order = sorted(together), sorted(in_order)
        assert together == in_order
        if not options.get("split_batches"):
            assert sorted(batch[0] for step in steps for batch in step if batch[0]) == sorted(expected)
        for step in steps:
            known = {batch[4] for batch in step}
            assert known <= {sum(len(batch[0]) for batch in step), None}
            assert len(known) == 1
        for own in ranks:
            assert [batch[3] for batch in own] == [False] * (len(own) - 1) + [True] * bool(own)
        if tail is TailPolicy.UNEVEN or options.get("even_batches") is False:
            assert all(batch[2] == 0 for own in ranks for batch in own)
        else:
            assert len({len(own) for own in ranks}) == 1
        if tail is TailPolicy.WHOLE:
            assert all(batch[2] in (0, batch[1]) for own in ranks for batch in own)
        if tail is TailPolicy.COMPLETE and kind in ("shuffled", "stream", "list of batches"):
            full = 4 // world_size if options.get("split_batches") else 4
            assert options.get("even_batches") is False or {batch[1] for own in ranks for batch in own} == {full}


# the processes' own random state


def draw(kinds: list[str], same: bool) -> list[Any]:
    rank = PartialState().process_index
    states: list[Any] = []
    for kind in kinds:
        seed_everything(SEED if same else SEED + rank)
        before = random_state()
        loader = prepare_loader(KINDS[kind](), shard=DataShard(rank, 2))
        for _ in loader:
            pass
        states.append((before, random_state()))
    return states


DRAWING = [kind for kind in MAP_STYLE if "workers" not in kind]


@pytest.mark.parametrize("same", [True, False], ids=["same state", "other state"])
def test_the_processes_own_random_state_is_advanced_alike_or_left_alone(same: bool) -> None:
    first, second = run_in_processes(draw, args=(DRAWING, same))
    for kind, (_, after), (before, other_after) in zip(DRAWING, first, second, strict=True):
        seed_everything(SEED)
        list(KINDS[kind]())
        assert after == random_state(), kind  # rank 0 is where the plain loader would be
        assert other_after == (after if same else before), kind


def draw_while_training() -> list[Any]:
    rank = PartialState().process_index
    seed_everything(SEED + rank)
    loader = prepare_loader(DataLoader(Numbers(), batch_sampler=Episodes()), shard=DataShard(rank, 2))
    seen: list[Any] = []
    for _ in range(2):
        for batch in loader:
            seen.append((batch.tolist(), torch.rand(1).item()))
    return seen


def test_a_sampler_that_draws_late_is_followed_also_when_the_model_draws_in_between() -> None:
    first, second = run_in_processes(draw_while_training)
    seed_everything(SEED)
    expected = [rows_of(batch) for batch in DataLoader(Numbers(), batch_sampler=Episodes())]
    # seven batches: the last step's second one is padding
    together = [batch for pair in zip(first[:4], second[:4], strict=True) for batch, _ in pair]
    assert together[:7] == expected
    assert first[0][1] != second[0][1]


# what is said, and what is refused


def use_distributed_sampler() -> Any:
    state = PartialState()
    sampler = DistributedSampler(Numbers(7), shuffle=True, seed=1)
    loader = prepare_loader(
        DataLoader(Numbers(7), batch_size=2, sampler=sampler), shard=DataShard(state.process_index, 2)
    )
    epochs = [[row for batch in loader for row in rows_of(batch)] for _ in range(2)]
    loader.set_epoch(0)
    return [*epochs, [row for batch in loader for row in rows_of(batch)], loader.current, len(loader)]


def test_a_distributed_sampler_is_used_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    first, second = run_in_processes(use_distributed_sampler)
    for epoch in range(2):
        samplers = [DistributedSampler(Numbers(7), 2, rank, shuffle=True, seed=1) for rank in range(2)]
        for sampler in samplers:
            sampler.set_epoch(epoch)
        assert [first[epoch], second[epoch]] == [list(sampler) for sampler in samplers]
    assert first[2] == first[0] != first[1]
    assert first[4] == 2
    sampler = DistributedSampler(Numbers(9), 2, 0)
    prepare_loader(DataLoader(Numbers(9), batch_size=2, sampler=sampler), shard=DataShard(0, 2))
    assert "DistributedSampler repeats 1 samples" in caplog.text


class Hidden(Sampler[int]):
    """Draws from a generator that nobody can find."""

    def __iter__(self) -> Any:
        fresh = torch.Generator()
        fresh.manual_seed(PartialState().process_index)
        return iter(torch.randperm(SAMPLES, generator=fresh).tolist())

    def __len__(self) -> int:
        return SAMPLES


def disagree() -> str:
    rank = PartialState().process_index
    loader = prepare_loader(DataLoader(Numbers(), batch_size=4, sampler=Hidden()), shard=DataShard(rank, 2))
    with pytest.raises(DataError) as caught:
        list(loader)
    return str(caught.value)


def test_a_sampler_whose_order_differs_between_processes_is_refused() -> None:
    for message in run_in_processes(disagree):
        assert "Hidden returns a different order in each process" in message


class Broken(Numbers):
    def __getitem__(self, index: int) -> int:
        if index >= 17:
            raise KeyError(f"no sample {index}")
        return index


class BrokenStream(Stream):
    def __iter__(self) -> Any:
        yield from range(17)
        raise KeyError("no sample 17")


def read_broken(which: str, even: bool) -> tuple[str, str, int]:
    rank = PartialState().process_index
    dataset = Broken() if which == "map" else BrokenStream(known=False)
    config = DataLoaderConfiguration(dispatch_batches=True, even_batches=even)
    loader = prepare_loader(DataLoader(dataset, batch_size=4), shard=DataShard(rank, 2), config=config)
    batches = 0
    try:
        for _ in loader:
            batches += 1
    except Exception as error:
        return type(error).__name__, str(error), batches
    return "nothing", "", batches


@pytest.mark.parametrize("which", ["map", "stream"])
@pytest.mark.parametrize("even", [True, False])
def test_when_the_reading_process_fails_all_fail(which: str, even: bool) -> None:
    first, second = run_in_processes(read_broken, args=(which, even), timeout=30)
    assert first[0] == "KeyError"
    assert second[0] == "DataError"
    assert "rank 0" in second[1]
    assert "no sample 17" in second[1]
    assert first[2] == second[2]


def leave_dispatch() -> list[list[int]]:
    rank = PartialState().process_index
    loader = prepare_loader(DataLoader(Stream(), batch_size=4), shard=DataShard(rank, 2))
    seen = []
    for stop in (1, 2, 99):
        for number, batch in enumerate(loader):
            seen.append(batch.tolist())
            if number + 1 == stop:
                break
    return seen


def test_a_dispatched_loop_can_be_left_and_begun_anew() -> None:
    first, second = run_in_processes(leave_dispatch, timeout=30)
    assert first[:3] == [[0, 1, 2, 3], [0, 1, 2, 3], [8, 9, 10, 11]]
    assert second[:3] == [[4, 5, 6, 7], [4, 5, 6, 7], [12, 13, 14, 15]]
    assert len(first) == len(second) == 6


def leave_early_on_one_rank_in_the_tail() -> list[int]:
    """As the Trainer does: no further batch is asked for once the last one is known."""
    rank = PartialState().process_index
    config = DataLoaderConfiguration(dispatch_batches=True, even_batches=False)
    loader = prepare_loader(DataLoader(Numbers(12), batch_size=4), shard=DataShard(rank, 2), config=config)
    seen: list[int] = []
    for batch in loader:
        seen += batch.tolist()
        if loader.current and loader.current.last:
            break
    return seen


def test_a_process_without_a_last_batch_need_not_wait_for_it() -> None:
    assert run_in_processes(leave_early_on_one_rank_in_the_tail, timeout=30) == [
        [0, 1, 2, 3, 8, 9, 10, 11],
        [4, 5, 6, 7],
    ]


def test_batches_out_of_order_are_refused_where_processes_share_them() -> None:
    loader = DataLoader(Numbers(), batch_size=4, num_workers=1, in_order=False)
    with pytest.raises(ConfigurationError, match="in_order"):
        prepare_loader(loader, shard=DataShard(0, 2))
    alone = prepare_loader(loader, shard=DataShard())
    assert sorted(row for batch in alone for row in rows_of(batch)) == list(range(SAMPLES))


@pytest.mark.parametrize("loader", [DataLoader(Numbers(), batch_size=3), DataLoader(Stream(), batch_size=3)])
def test_a_batch_size_that_cannot_be_split_is_refused(loader: Any) -> None:
    with pytest.raises(ConfigurationError, match="batch size 3 is not a multiple of 2"):
        prepare_loader(loader, shard=DataShard(0, 2), config=DataLoaderConfiguration(split_batches=True))


def count_workers_seeds() -> list[int]:
    rank = PartialState().process_index
    loader = prepare_loader(
        DataLoader(Numbers(8), batch_size=2, num_workers=2, collate_fn=initial_seed), shard=DataShard(rank, 2)
    )
    return list(loader)


def initial_seed(samples: list[int]) -> int:
    return torch.initial_seed()


def test_workers_of_different_processes_draw_different_random_numbers() -> None:
    first, second = run_in_processes(count_workers_seeds)
    assert len({*first, *second}) == 4


def seedable(seed: int) -> list[list[int]]:
    rank = PartialState().process_index
    seed_everything(rank)
    config = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=seed)
    loader = prepare_loader(MAP_STYLE["shuffled"](), shard=DataShard(rank, 2), config=config)
    return [[row for batch in loader for row in batch.tolist()] for _ in range(2)]


def test_a_seedable_sampler_depends_on_the_seed_and_the_epoch_only() -> None:
    once, again, other = (run_in_processes(seedable, args=(seed,)) for seed in (3, 3, 4))
    assert once == again
    assert once != other
    assert once[0][0] != once[0][1]


# data that are divided already


class OwnPart(IterableDataset[int]):
    """A stream that gives each process its own part."""

    def __iter__(self) -> Iterator[int]:
        state = PartialState()
        return iter(range(state.process_index, 8, state.num_processes))


def read_parts(options: dict[str, Any]) -> tuple[str, list[int], list[int]]:
    """The error, what was read, and what gathering gave."""
    accelerator = Accelerator(device=device(), dataloader_config=DataLoaderConfiguration(**options))
    loader = accelerator.prepare(DataLoader(OwnPart(), 3))
    rows, gathered = [], []
    try:
        for batch in loader:
            rows += batch.tolist()
            gathered += accelerator.gather_for_metrics(batch).tolist()
    except DataError as error:
        return str(error), rows, gathered
    return "", rows, gathered


def test_processes_that_read_parts_of_their_own_are_left_to_it_or_refused() -> None:
    both = run_in_processes(read_parts, 2, ({"use_distributed_sampler": False},))
    assert [rows for _, rows, _ in both] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert all(gathered == [0, 2, 4, 1, 3, 5, 6, 7] for _, _, gathered in both)
    for options in ({"dispatch_batches": False}, {}):  # by default rank 0 reads for all
        for error, rows, _ in run_in_processes(read_parts, 2, (options,)):
            assert "OwnPart gives each process other samples" in error
            assert not rows
    both = run_in_processes(read_parts, 2, ({"dispatch_batches": True},))
    assert all(gathered == [0, 2, 4, 6] for _, _, gathered in both)  # as was asked for


class PartByEnvironment(IterableDataset[int]):
    """Reads its rank's part with workers, of which each takes its own."""

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        assert worker is not None
        step = int(os.environ["WORLD_SIZE"]) * worker.num_workers
        return iter(range(int(os.environ["RANK"]) * worker.num_workers + worker.id, 16, step))


class ReadyParts:
    """Gives batches without being a torch loader: each rank its own."""

    def __iter__(self) -> Iterator[Any]:
        rank = PartialState().process_index
        return iter(torch.arange(8).view(4, 2)[rank::2])


class Blank:
    """A sample of a class of one's own."""

    def __init__(self, number: int) -> None:
        self.number, self.itself = number, self


class ObjectParts(IterableDataset[Blank]):
    def __iter__(self) -> Iterator[Blank]:
        return map(Blank, range(PartialState().process_index, 8, 2))


class FramedParts(IterableDataset[torch.Tensor]):
    """Images whose first rows are empty."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in range(PartialState().process_index, 8, 2):
            yield torch.nn.functional.pad(torch.full((2, 2), float(number)), (30, 30, 30, 30))


class OnlyOnRank0(IterableDataset[int]):
    """Can be read on one machine only."""

    def __iter__(self) -> Iterator[int]:
        if PartialState().process_index:
            raise FileNotFoundError("samples.txt")
        return iter(range(8))


class OtherEachTime(IterableDataset[int]):
    """Draws from a generator that no one can set."""

    def __iter__(self) -> Iterator[int]:
        return iter(random.SystemRandom().sample(range(10**9), 8))


class Augmented(IterableDataset[float]):
    """Draws from the global generators, whose states differ between the processes."""

    def __iter__(self) -> Iterator[float]:
        yield from (torch.rand(()).item() + random.random() + np.random.rand() for _ in range(8))


class Counting(IterableDataset[int]):
    """Remembers how often it was opened."""

    opened = 0

    def __iter__(self) -> Iterator[int]:
        self.opened += 1
        return iter(range(8))


def read_by_default(kind: str) -> tuple[str, int, bool]:
    """The error, how many samples were read, and whether the random state stayed this process's own."""
    state = PartialState(device=device())
    seed_everything(state.process_index)
    loader: Any = ReadyParts()
    if kind == "PartByEnvironment":
        loader = DataLoader(PartByEnvironment(), 2, num_workers=2)
    elif kind != "ReadyParts":
        loader = DataLoader(globals()[kind](), 2, collate_fn=list)
    prepared = prepare_loader(loader, shard=DataShard(state.process_index, state.num_processes))
    before, read = random_state(), 0
    try:
        for batch in prepared:
            read += len(batch)
    except DataError as error:
        return str(error), read, False
    if kind == "Counting":
        list(prepared)
        assert loader.dataset.opened == (1 if state.process_index else 2)
    return "", read, before == random_state()


@pytest.mark.parametrize("kind", ["PartByEnvironment", "ReadyParts", "ObjectParts", "FramedParts"])
def test_parts_are_recognised_however_a_stream_finds_its_rank(kind: str) -> None:
    for error, rows, _ in run_in_processes(read_by_default, 2, (kind,)):
        assert "gives each process other samples" in error
        assert not rows


def read_tables() -> list[str]:
    """The errors of datasets of which each process holds a part, all, or another selection that overlaps."""
    rank = PartialState(device=device()).process_index
    tables: list[Any] = [
        Subset(Numbers(16), range(rank, 16, 2)),
        Subset(Subset(Numbers(16), list(range(16))), range(8 * rank, 8 * rank + 8)),
        Numbers(8 + rank),
        Subset(Numbers(16), list(range(9))),
        Subset(Numbers(16), range(rank, rank + 12)),
        TensorDataset(torch.full((8,), float(rank))),
    ]
    errors = []
    for shuffle in (False, True):
        for table in tables:
            prepared = prepare_loader(DataLoader(table, 2, shuffle=shuffle), shard=DataShard(rank, 2))
            try:
                list(prepared)
                errors.append("")
            except DataError as error:
                errors.append(str(error))
    return errors


def test_datasets_that_hold_parts_are_refused_and_others_are_read() -> None:
    for errors in run_in_processes(read_tables, 2):
        assert ["gives each process other samples" in error for error in errors] == 2 * [*3 * [True], *3 * [False]]


@pytest.mark.parametrize("kind", ["OnlyOnRank0", "OtherEachTime", "Augmented", "Counting"])
def test_a_stream_that_rank_0_can_read_for_all_is_read(kind: str) -> None:
    first, second = run_in_processes(read_by_default, 2, (kind,))
    assert (first[:2], second[:2]) == (("", 4), ("", 4))
    assert second[2]


def positions(epochs: int) -> list[Any]:
    rank = PartialState().process_index
    config = DataLoaderConfiguration(dispatch_batches=True)
    found: list[Any] = []
    for kind in ("shuffled", "shuffled, own generator", "subset"):
        seed_everything(SEED)
        loader = prepare_loader(KINDS[kind](), shard=DataShard(rank, 2), config=config)
        for _ in range(epochs):
            for _ in loader:
                pass
        iterator = iter(loader)
        next(iterator)
        start = loader.state_dict()["start"]
        found.append({"torch": start["shared"]["torch"].tolist(), "own": start["own"]})
    return found


def test_the_position_of_a_dispatched_loader_is_that_of_rank_0_on_every_process() -> None:
    first, second = run_in_processes(positions, args=(1,))
    assert second == first
