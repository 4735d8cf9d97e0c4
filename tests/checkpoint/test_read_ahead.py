"""Parts of files that are read into the system's cache ahead of who uses them."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from drivetrain.checkpoint.safetensors_file import MappedFile, MappedRange
from drivetrain.checkpoint.shards import ReadAhead
from tests.pool import run_in_processes

SIZE = 8 << 20


@pytest.fixture
def part(tmp_path: Path) -> MappedRange:
    save_file({"weight": torch.ones(SIZE // 4)}, tmp_path / "m.safetensors")
    file = MappedFile(tmp_path / "m.safetensors")
    return MappedRange(file, file.placed["weight"].start, file.placed["weight"].end)


def bytes_from_disk() -> int:
    """What the disk was read for this process so far; what was in memory already does not count."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))


@pytest.mark.skipif(not os.path.exists("/proc/self/io"), reason="the system does not count what is read from disk")
def test_what_was_asked_for_is_in_memory_before_it_is_used(part: MappedRange) -> None:
    def forget() -> None:
        with open(part.file.path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    forget()
    before = bytes_from_disk()
    Path(part.file.path).read_bytes()
    if bytes_from_disk() - before < SIZE:
        pytest.skip("temporary files are not on a disk that counts what is read")
    forget()
    ahead, start = ReadAhead(), bytes_from_disk()
    ahead.ask(0, [part])
    ahead.wait(0)
    read = bytes_from_disk()
    assert read - start >= SIZE - (1 << 20)  # the header's pages and those beside it were read before
    assert float(part.file.tensor("weight").sum()) == SIZE // 4
    assert bytes_from_disk() == read


def test_files_that_are_gone_or_shorter_are_left_to_who_uses_them(part: MappedRange) -> None:
    ahead = ReadAhead()
    os.truncate(part.file.path, 4096)
    ahead.ask(0, [part])
    ahead.wait(0)
    os.unlink(part.file.path)
    ahead.ask(1, [part])
    ahead.wait(1)
    ahead.wait(2)  # it was not asked for


def waits_in_a_fork(path: str) -> int:
    file = MappedFile(path)
    place, ahead = file.placed["weight"], ReadAhead()
    ahead.ask(0, [MappedRange(file, place.start, place.end)])
    child = os.fork()
    if not child:
        ahead.wait(0)
        ahead.ask(0, [MappedRange(file, place.start, place.end)])
        ahead.wait(0)
        os._exit(7)
    ahead.wait(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_a_fork_has_threads_of_its_own_and_so_has_a_copy(part: MappedRange) -> None:
    assert run_in_processes(waits_in_a_fork, 1, args=[part.file.path], timeout=30) == [7]
    ahead = ReadAhead()
    ahead.ask(0, [part])
    copied = pickle.loads(pickle.dumps(ahead))
    copied.ask(0, [part])
    copied.wait(0)
