"""Results of all processes come to the main process, and from devices to the host."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch

from drivetrain import CollectiveError, PartialState
from drivetrain.runtime.collectives import gather_on_main
from drivetrain.runtime.memory import HostBlocks
from tests.pool import ProcessesFailed, run_in_processes


def gathered(counts: list[int]) -> list[Any]:
    """As many blocks of each process, of sizes that differ."""
    rank = PartialState(cpu=True).process_index
    blocks = [
        {"of": (rank, number), "values": torch.arange(number * 3.0) + rank, "words": ["a"] * rank}
        for number in range(counts[rank])
    ]
    return [[block["of"], block["values"].tolist(), block["words"]] for block in gather_on_main(blocks)]


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


def killed() -> None:
    state = PartialState(cpu=True)
    state.wait_for_everyone()
    if not state.is_main_process:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(CollectiveError, match=r"failed on rank 0 of 2"):
        gather_on_main([torch.ones(3)])
    raise ValueError("came to its end")


def test_a_process_that_dies_does_not_leave_the_main_process_waiting():
    with pytest.raises(ProcessesFailed) as failed:
        run_in_processes(killed, 2, timeout=60)
    assert not failed.value.hung
    assert "came to its end" in failed.value.tracebacks[0]


def unsendable() -> None:
    PartialState(cpu=True)
    gather_on_main([lambda: None])


def test_what_cannot_be_pickled_is_refused_by_the_process_that_has_it():
    with pytest.raises(ProcessesFailed, match="gather_on_main on rank 1: the object cannot be sent"):
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
