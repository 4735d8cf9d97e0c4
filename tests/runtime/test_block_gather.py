"""Blocks of results come to the main process while the others compute."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch

from drivetrain import CollectiveError, PartialState
from drivetrain.runtime.collectives import BlockGather
from drivetrain.runtime.memory import HostBlocks
from tests.pool import ProcessesFailed, run_in_processes


def gathered(counts: list[int]) -> list[Any]:
    """As many blocks of each process, of sizes that differ."""
    state = PartialState(cpu=True)
    gather = BlockGather(state)
    rank = state.process_index
    for number in range(counts[rank]):
        gather.add({"of": (rank, number), "values": torch.arange(number * 3.0) + rank, "words": ["a"] * rank})
    return [[block["of"], block["values"].tolist(), block["words"]] for block in gather.finish()]


@pytest.mark.parametrize("counts", [[0], [2], [0, 0], [3, 3], [0, 4], [4, 0], [1, 5, 2]], ids=str)
def test_all_blocks_come_whatever_each_process_has(counts):
    main, *others = run_in_processes(gathered, len(counts), args=(counts,))
    expected = [
        [(rank, number), [float(value + rank) for value in range(number * 3)], ["a"] * rank]
        for rank, count in enumerate(counts)
        for number in range(count)
    ]
    assert sorted(main) == expected
    assert others == [[]] * (len(counts) - 1)


def gathered_twice_at_once() -> list[Any]:
    """Two gathers take turns among collectives, in another order on each process."""
    state = PartialState(cpu=True)
    first, second = BlockGather(state), BlockGather(state)
    for number in range(4):
        for gather in (first, second) if state.is_main_process else (second, first):
            gather.add((gather is first, state.process_index, number))
        state.wait_for_everyone()
    return [sorted(first.finish()), sorted(second.finish())]


def test_gathers_at_once_stay_apart():
    (first, second), _ = run_in_processes(gathered_twice_at_once, 2)
    assert first == [(True, rank, number) for rank in range(2) for number in range(4)]
    assert second == [(False, rank, number) for rank in range(2) for number in range(4)]


def overlapping(seconds: float) -> int:
    """How many blocks there are before the end, while the main process computes."""
    state = PartialState(cpu=True)
    gather = BlockGather(state)
    for _ in range(8):
        gather.add(torch.zeros(2**20))
    state.wait_for_everyone()
    deadline = time.monotonic() + seconds
    while state.is_main_process and len(gather._blocks) < 16 and time.monotonic() < deadline:
        torch.ones(64, 64) @ torch.ones(64, 64)
    come = len(gather._blocks)
    gather.finish()
    state.wait_for_everyone()
    return come


def test_blocks_come_before_the_end():
    assert run_in_processes(overlapping, 2, args=(60.0,)) == [16, 0]


def all_leave_and_gather_again() -> list[Any]:
    state = PartialState(cpu=True)
    gather = BlockGather(state)
    for number in range(3 if state.is_main_process else 1):
        gather.add(number)
    gather.abandon()
    again = BlockGather(state)
    again.add(10 + state.process_index)
    collected = sorted(again.finish())
    if gather._receiver is not None:
        gather._receiver.join(30)
    return [collected, gather._receiver is not None and gather._receiver.is_alive()]


def test_a_gather_that_all_have_left_does_not_disturb_the_next():
    assert run_in_processes(all_leave_and_gather_again, 2, timeout=60) == [[[10, 11], False], [[], False]]


def leaves_and_gathers_again() -> list[Any]:
    state = PartialState(cpu=True)
    gather = BlockGather(state)
    gather.add(state.process_index)
    message = ""
    if state.is_main_process:
        try:
            gather.finish()
        except CollectiveError as error:
            message = str(error)
    else:
        gather.add("never received")
        gather.abandon()
    again = BlockGather(state)
    again.add(10 + state.process_index)
    return [message, sorted(again.finish())]


def test_a_process_that_leaves_ends_the_wait_and_the_next_gather_is_whole():
    main, other = run_in_processes(leaves_and_gathers_again, 2, timeout=60)
    assert main == [
        "gather of results: rank 1 failed before its last block. See the rank's own error.",
        [10, 11],
    ]
    assert other == ["", []]


def killed() -> None:
    state = PartialState(cpu=True)
    gather = BlockGather(state)
    gather.add(torch.ones(3))
    state.wait_for_everyone()
    if not state.is_main_process:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(CollectiveError, match="gather of results failed on rank 0 of 2"):
        gather.finish()
    raise ValueError("came to its end")


def test_a_process_that_dies_does_not_leave_the_main_process_waiting():
    with pytest.raises(ProcessesFailed) as failed:
        run_in_processes(killed, 2, timeout=60)
    assert not failed.value.hung
    assert "came to its end" in failed.value.tracebacks[0]


def unsendable() -> None:
    gather = BlockGather(PartialState(cpu=True))
    gather.add(lambda: None)
    gather.finish()


def test_what_cannot_be_pickled_is_refused_by_the_process_that_has_it():
    with pytest.raises(ProcessesFailed, match="gather of results on rank 1: the object cannot be sent"):
        run_in_processes(unsendable, 2, timeout=60)


def test_a_block_is_full_by_its_items_or_its_bytes():
    state = PartialState(cpu=True)
    blocks = HostBlocks(state, most_items=3, most_bytes=100)
    items = [{"x": torch.ones(4, dtype=torch.uint8), "word": "a"} for _ in range(4)]
    assert [blocks.add(item) for item in items[:2]] == [[], []]
    full = blocks.add(items[2])
    assert all(one["x"] is item["x"] for one, item in zip(full, items, strict=False))
    assert blocks.add(items[3]) == []
    large = torch.ones(100, dtype=torch.uint8)
    assert [len(one) for one in blocks.add(large)] == [2, 100]
    assert blocks.take() == []


@pytest.mark.gpu
def test_what_leaves_a_device_is_what_was_there_when_it_was_added():
    blocks = HostBlocks(PartialState(), most_items=3)
    buffer, out = torch.zeros(2**20, device="cuda"), []
    for number in range(7):
        buffer.fill_(number)
        out += blocks.add([buffer])
    out += blocks.take()
    assert [(int(one.min()), int(one.max()), one.is_pinned()) for (one,) in out] == [(n, n, False) for n in range(7)]
