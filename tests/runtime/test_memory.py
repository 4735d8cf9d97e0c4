"""A batch size that fits is found, from a real lack of memory too."""

from __future__ import annotations

import resource
import weakref

import pytest
import torch

from drivetrain import ConfigurationError, find_executable_batch_size, release_memory
from tests.pool import run_in_processes


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

    with pytest.raises(RuntimeError, match="never with any batch size") as raised:
        find_executable_batch_size(never, 4)()
    assert isinstance(raised.value.__cause__, MemoryError)
    with pytest.raises(ConfigurationError, match=r"never\(\)"):
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
