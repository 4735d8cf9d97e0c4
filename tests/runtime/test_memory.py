"""A batch size that fits is found, from a real lack of memory too; and what a process takes."""

from __future__ import annotations

import resource
import weakref
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from drivetrain import (
    CollectiveError,
    ConfigurationError,
    DeviceKind,
    PartialState,
    find_executable_batch_size,
    gather_object,
    release_memory,
)
from drivetrain.runtime.devices import get_device_kind
from drivetrain.runtime.memory import MemoryHistory, MemoryUse
from tests.pool import run_in_processes
from tests.runtime.pretend import Pretend


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."),
    ],
    ids=["host", "device", "allocator"],
)
def test_smaller_sizes_are_tried(error):
    sizes = []

    @find_executable_batch_size(starting_batch_size=100)
    def train(batch_size: int, factor: int, *, more: int = 0) -> int:
        sizes.append(batch_size)
        if batch_size > 75:
            raise error
        return batch_size * factor + more

    assert train(2, more=1) == 72 * 2 + 1
    assert sizes == [100, 90, 81, 72]


def test_what_an_attempt_held_is_gone_in_the_next():
    held = []

    def train(batch_size: int) -> int:
        assert all(each() is None for each in held)
        model = torch.nn.Linear(4, 4)
        held.append(weakref.ref(model))
        if batch_size > 2:
            raise MemoryError(model)
        return batch_size

    assert find_executable_batch_size(train, 8, lambda size: size // 2)() == 2
    assert len(held) == 3


def test_other_errors_and_endless_lacks_are_raised():
    with pytest.raises(RuntimeError, match="shapes"):
        find_executable_batch_size(lambda batch_size: (_ for _ in ()).throw(RuntimeError("shapes")))()

    def never(batch_size: int) -> None:
        raise MemoryError("none")

    with pytest.raises(RuntimeError, match="never runs out of memory even with batch size") as raised:
        find_executable_batch_size(never, 4)()
    assert isinstance(raised.value.__cause__, MemoryError)
    for kind in (ConfigurationError, TypeError):
        with pytest.raises(kind, match=r"never\(\)"):
            find_executable_batch_size(never, 4)(3)


def limited() -> tuple[int, int]:
    """Allocate for real, with less memory than the first size takes."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 600 * 2**20, hard))

    @find_executable_batch_size(starting_batch_size=1024)
    def train(batch_size: int) -> int:
        return len(torch.empty(batch_size, 2**20, dtype=torch.uint8).fill_(1))

    return train(), 1024


def test_a_real_lack_of_memory_is_recovered_from():
    [(found, first)] = run_in_processes(limited, 1)
    assert 100 < found < first


def test_released_objects_are_gone():
    model = torch.nn.Linear(2, 2)
    gone = weakref.ref(model)
    [model] = release_memory(model)
    assert (model, gone()) == (None, None)


def lacking_on_one(rank_without: int) -> tuple[int, list[int]]:
    """Memory lacks on one process before the collective of the function, at 100 and 90."""
    state = PartialState()
    sizes: list[int] = []

    @find_executable_batch_size(starting_batch_size=100, patience=20)
    def train(batch_size: int) -> int:
        sizes.append(batch_size)
        if state.process_index == rank_without and batch_size > 85:
            raise MemoryError("none left")
        return batch_size

    found = train(), train()
    assert found[0] == found[1]
    assert gather_object([found[0]]) == [found[0]] * state.num_processes  # and they meet afterwards
    return found[0], sizes


@pytest.mark.parametrize("rank_without", [0, 1])
def test_processes_take_the_next_size_together_where_memory_lacks_on_one(rank_without: int) -> None:
    assert run_in_processes(lacking_on_one, 2, args=(rank_without,)) == [(81, [100, 90, 81] * 2)] * 2


def lacking_before_a_collective() -> str:
    """One process has no memory while the other waits for it in a collective."""
    state = PartialState(timeout=timedelta(seconds=20))

    @find_executable_batch_size(starting_batch_size=100, patience=0.5)
    def train(batch_size: int) -> list[int]:
        if state.process_index == 1 and batch_size > 85:
            raise MemoryError("none left")
        return gather_object([batch_size])

    try:
        return str(train())
    except Exception as error:
        dist.destroy_process_group()  # as at its end, which its peer sees
        return f"{type(error).__name__}: {error}"


def test_a_process_without_memory_does_not_wait_for_ever_for_one_that_waits_for_it() -> None:
    waiting, without = run_in_processes(lacking_before_a_collective, 2, timeout=50)
    assert "CollectiveError" in waiting
    assert without.startswith("CollectiveError: Rank 1 ran out of memory in train")
    assert "rank 0 has not ended the same attempt" in without
    assert "smaller starting_batch_size" in without


def failing_on_one() -> str:
    """One process fails for another reason, the other has ended its attempt."""
    state = PartialState()

    @find_executable_batch_size(starting_batch_size=4)
    def train(batch_size: int) -> None:
        if state.process_index == 1:
            raise ValueError("wrong shapes")

    with pytest.raises((CollectiveError, ValueError)) as raised:
        train()
    return f"{raised.type.__name__}: {raised.value}"


def test_an_error_of_one_process_reaches_the_others() -> None:
    other, failed = run_in_processes(failing_on_one, 2)
    assert failed == "ValueError: wrong shapes"
    assert other.startswith("CollectiveError: Rank 1 has failed in train: ValueError: wrong shapes")


def calling_on_one() -> int | None:
    """Only the main process calls the function."""
    state = PartialState()
    if not state.is_main_process:
        return None
    found: int = find_executable_batch_size(lambda batch_size: batch_size, 8, patience=0.2)()
    return found


def test_processes_that_do_not_call_are_not_waited_for() -> None:
    assert run_in_processes(calling_on_one, 2) == [8, None]


def test_a_process_takes_what_the_module_of_its_device_counts() -> None:
    kind = Pretend()
    for name, size in {"memory_allocated": 10, "max_memory_allocated": 20, "memory_reserved": 30}.items():
        setattr(kind.module, name, lambda device, size=size: size)
    host = psutil.Process().memory_info().rss
    use = MemoryUse.read(kind, torch.device("cpu"))
    assert use[:3] == (10, 20, 30)
    assert use.host == pytest.approx(host, rel=0.2)


@pytest.mark.parametrize("kind", [Pretend(), get_device_kind("cpu")], ids=repr)
def test_where_none_is_counted_it_is_the_memory_of_the_process(kind: DeviceKind) -> None:
    use = MemoryUse.read(kind, torch.device("cpu"))
    assert use.current == use.host <= use.peak
    assert use.reserved == 0
    kind.reset_peak_memory(torch.device("cpu"))


def test_a_device_without_a_history_of_allocations_records_none(tmp_path: Path) -> None:
    history = MemoryHistory(torch.device("cpu"), 10)
    history.start()
    assert not history.is_recording
    history.stop()
