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


def pages_of_activations(times: int) -> int:
    """How many pages the system gives for six tensors of 16 MiB that are made and freed together, again and again."""
    for _ in range(3):  # do not count: small objects may come to lie in what the first have left
        [torch.ones(4 * MIB) for _ in range(6)]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(times):
        [torch.ones(4 * MIB) for _ in range(6)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def own_memory() -> int:
    """Bytes of memory that no file backs."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon")]
    return int(line.split()[1]) * 1024


def show_what_training_gets() -> None:
    """Print figures of this process: pages in a run, bytes that a release returns."""
    accelerator = Accelerator(cpu=True)
    assert keep_freed_memory() is (os.environ.get("MALLOC_TRIM_THRESHOLD_") is None)
    during = pages_of_activations(4)
    held = own_memory()
    accelerator.free_memory()
    print(during, held - own_memory())


def figures(**variables: str) -> list[int]:
    """What a fresh process prints: what is set for the allocator stays set for the life of a process."""
    program = "from tests.runtime.test_host_allocator import show_what_training_gets as show; show()"
    environment = {**os.environ, **variables}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    return [int(number) for number in done.stdout.split()]


def test_a_run_on_the_host_uses_freed_memory_again_and_returns_it_on_demand() -> None:
    during, returned = figures()
    assert during < 100
    assert returned > 40 * MIB


def test_what_a_user_has_set_for_the_allocator_stays() -> None:
    during, _ = figures(MALLOC_TRIM_THRESHOLD_="131072")
    assert during > 1000  # of 96 MiB, whatever the size of a page
