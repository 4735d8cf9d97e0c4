"""Freed host memory stays in the process while it trains, and is returned on demand."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from drivetrain import Accelerator
from drivetrain.runtime.host_allocator import keep_freed_memory

MIB = 1 << 20

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux") or "CS_GNU_LIBC_VERSION" not in os.confstr_names,
    reason="needs glibc, whose allocator this is about",
)


def pages_of_large_tensors(times: int) -> int:
    """How many pages the system gives for a tensor of 48 MiB that is made and freed again and again."""
    for _ in range(3):  # do not count: small objects may come to lie in what the first has left
        torch.ones(12 * MIB)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(times):
        torch.ones(12 * MIB)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def own_memory() -> int:
    """Bytes of memory that no file backs."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon")]
    return int(line.split()[1]) * 1024


def show_what_training_gets() -> None:
    """Print figures of this process: pages before and in a run, bytes that a release returns."""
    before = pages_of_large_tensors(4)
    accelerator = Accelerator(cpu=True)
    assert keep_freed_memory() is (os.environ.get("MALLOC_TRIM_THRESHOLD_") is None)
    during = pages_of_large_tensors(4)
    held = own_memory()
    accelerator.free_memory()
    print(before, during, held - own_memory())


def figures(**variables: str) -> list[int]:
    """What a fresh process prints: what is set for the allocator stays set for the life of a process."""
    program = "from tests.runtime.test_host_allocator import show_what_training_gets as show; show()"
    environment = {**os.environ, **variables}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    return [int(number) for number in done.stdout.split()]


def test_a_run_on_the_host_uses_freed_memory_again_and_returns_it_on_demand() -> None:
    before, during, returned = figures()
    assert before > 10 * during  # of 48 MiB, whatever the size of a page
    assert during < 100
    assert returned > 40 * MIB


def test_what_a_user_has_set_for_the_allocator_stays() -> None:
    before, during, _ = figures(MALLOC_TRIM_THRESHOLD_="131072")
    assert during > before / 2 > 0
