"""Items that processes take one after the other."""

from __future__ import annotations

import multiprocessing
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.connection import Connection
from threading import Event
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, Store, TCPStore

from drivetrain import Accelerator, CollectiveError, ConfigurationError, DataError, PartialState, WorkQueue
from tests.pool import run_in_processes


@pytest.mark.parametrize(
    ("inputs", "items"),
    [
        (["a", "b", "c"], ["a", "b", "c"]),
        ((1, 2), [1, 2]),
        (torch.arange(3), [0, 1, 2]),
        ({"x": [1, 2], "y": "ab"}, [{"x": 1, "y": "a"}, {"x": 2, "y": "b"}]),
        ([], []),
        ({}, []),
    ],
)
def test_one_process_takes_all_items_in_order(inputs: Any, items: list[Any]):
    with PartialState(cpu=True).split_between_processes(inputs, dynamic=True) as work:
        assert len(work) == len(items)
        assert list(work) == items
        assert work.results() == [None] * len(items)


def shared() -> Any:
    outputs = []
    for length in (7, 1, 0):
        with Accelerator(cpu=True).split_between_processes(list(range(length)), dynamic=True) as work:
            mine = []
            for item in work:
                mine.append(item)
                work.done({"square": torch.tensor([item * item]), "by": PartialState().process_index})
            outputs.append((mine, [int(result["square"]) for result in work.results()]))
    state = PartialState()
    with state.split_between_processes("abc", dynamic=True) as work:
        mapped = work.map(str.upper)
    state.wait_for_everyone()
    return outputs, mapped, state.store.num_keys()


def test_processes_share_the_items_and_all_get_the_results_in_order():
    ranks = run_in_processes(shared, 2)
    for number, length in enumerate((7, 1, 0)):
        taken = [rank[0][number][0] for rank in ranks]
        assert sorted([*taken[0], *taken[1]]) == list(range(length))
        assert all(rank[0][number][1] == [item * item for item in range(length)] for rank in ranks)
    assert [rank[1] for rank in ranks] == [["A", "B", "C"]] * 2
    assert ranks[0][2] < 60  # nothing of the queues stays in the store


def test_a_fast_process_takes_more_items():
    store, rest_is_done = HashStore(), Event()

    def slow() -> list[int]:
        with WorkQueue(list(range(9)), store, 1, 2) as work:
            taken = [next(work)]
            started.set()
            assert rest_is_done.wait(20)
            work.done(-1)
            return taken + list(work)

    def fast() -> tuple[list[int], list[int]]:
        assert started.wait(20)
        with WorkQueue(list(range(9)), store, 0, 2) as work:
            taken = []
            for item in work:
                taken.append(item)
                work.done(item)
                if len(taken) == 8:
                    rest_is_done.set()
            return taken, work.results()

    started = Event()
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.submit(slow), pool.submit(fast)
        assert first.result(30) == [0]
        assert second.result(30) == ([1, 2, 3, 4, 5, 6, 7, 8], [-1, 1, 2, 3, 4, 5, 6, 7, 8])


def test_an_item_finished_just_before_its_process_leaves_is_not_taken_again():
    store = HashStore()
    other = WorkQueue([5, 6], store, 1, 2).__enter__()
    assert next(other) == 5

    class LeavesWhenAsked(HashStore):
        """Store in which the other process finishes its item and leaves as soon as somebody asks whether it left."""

        def check(self, keys: list[str]) -> bool:
            if any(key.endswith("left/1") for key in keys) and not store.check(keys):
                other.done("five")
                other.__exit__(None, None, None)
            return store.check(keys)

        def __getattribute__(self, name: str) -> Any:
            return super().__getattribute__(name) if name == "check" else getattr(store, name)

    with WorkQueue([5, 6], LeavesWhenAsked(), 0, 2) as work:
        assert list(work) == [6]
        assert work.results() == ["five", None]


def all_of(queue: WorkQueue, bad: str = "") -> None:
    """Take all items, until there is one that cannot be done."""
    with queue as work:
        for item in work:
            if item == bad:
                raise MemoryError
            work.done(item)


def fail_with(store: Store, number: int, items: list[str], bad: str) -> None:
    with pytest.raises(MemoryError):
        all_of(WorkQueue(items, store, number, 4), bad)


def test_an_item_whose_process_raises_is_given_to_another():
    store = HashStore()
    fail_with(store, 1, ["large", "small"], "large")
    with WorkQueue(["large", "small"], store, 0, 4) as work:
        assert work.map(len) == [5, 5]


def test_an_item_that_ends_every_process_is_given_up_and_named():
    store = HashStore()
    for number in (1, 2, 3):
        fail_with(store, number, ["bad", "good"], "bad")
    with (
        WorkQueue(["bad", "good"], store, 0, 4) as work,
        pytest.raises(DataError, match=r"Items \[0\] were each assigned to 3 processes"),
    ):
        work.map(str)


def test_a_result_may_be_larger_than_an_entry_of_the_store():
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with WorkQueue([0], store, 0, 1) as work:
        (result,) = work.map(lambda _: torch.arange(3 * 2**20))
    assert torch.equal(result, torch.arange(3 * 2**20))


def take(number: int, port: int, behaviour: str, answer: Connection) -> None:
    """One of four processes of which one dies and one is frozen, each with an item in its hands."""
    store = TCPStore("127.0.0.1", port, is_master=False)
    with WorkQueue(list(range(10)), store, number, 4, lease=1.0) as work:
        if behaviour == "work":
            store.wait(["die", "freeze"])
        for item in work:
            if behaviour != "work":
                store.set(behaviour, str(item))
                os.kill(os.getpid(), signal.SIGKILL if behaviour == "die" else signal.SIGSTOP)
            work.done((item, number))
        answer.send(work.results())


def with_losses() -> tuple[list[Any], int | None]:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("fork")
    ends, ranks = [], []
    for number, behaviour in enumerate(("work", "work", "die", "freeze")):
        end, answer = context.Pipe(duplex=False)
        ranks.append(context.Process(target=take, args=(number, store.port, behaviour, answer)))
        ranks[-1].start()
        ends.append(end)
    try:
        results = [end.recv() for end in ends[:2]]
        ranks[2].join()
        os.kill(ranks[3].pid or 0, signal.SIGCONT)
        return [*results, ends[3].recv()], ranks[2].exitcode
    finally:
        for each in ranks:
            each.kill()


def test_items_of_a_process_that_dies_or_hangs_are_given_to_others():
    ((results, end),) = run_in_processes(with_losses, 1, timeout=40)
    assert end == -signal.SIGKILL
    assert results[0] == results[1] == results[2]
    assert [item for item, _ in results[0]] == list(range(10))
    # What the frozen process had was done by others, and its own result came too late.
    assert {number for _, number in results[0]} <= {0, 1}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda work: work.done(1), "called without an item"),
        (lambda work: work.results(), r"after the queue has been iterated to its end"),
    ],
)
def test_a_queue_is_used_in_order(call: Any, message: str):
    with (
        PartialState(cpu=True).split_between_processes([1, 2], dynamic=True) as work,
        pytest.raises(ConfigurationError, match=message),
    ):
        call(work)
    with pytest.raises(ConfigurationError, match="within the `with` block"):
        next(work)


def test_what_cannot_be_shared_is_refused():
    split = PartialState(cpu=True).split_between_processes
    with pytest.raises(ConfigurationError, match="cannot use apply_padding with dynamic=True"):
        split([1], apply_padding=True, dynamic=True).__enter__()
    with pytest.raises(ConfigurationError, match="equal lengths"):
        split({"x": [1], "y": [1, 2]}, dynamic=True).__enter__()


def test_a_store_that_is_gone_is_named():
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = TCPStore("127.0.0.1", store.port, is_master=False)
    queue = WorkQueue([1], client, 0, 1)
    del store
    with pytest.raises(CollectiveError, match="cannot reach the rendezvous store"):
        all_of(queue)


def test_a_process_that_does_not_come_is_named():
    store = HashStore()
    store.set_timeout(timedelta(seconds=0.2))
    with pytest.raises(CollectiveError, match=r"Rank 1, 2 did not call .* All processes must call it"):
        WorkQueue([1, 2], store, 0, 3).wait_for_all()
