"""Large files go past the page cache and hold the same bytes, whatever their length and wherever reading begins."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from drivetrain.checkpoint import load_run_state, safetensors_file, save, save_run_state
from drivetrain.checkpoint.safetensors_file import (
    address_of,
    aligned_block,
    copy_bytes,
    huge_memory,
    joined_bytes,
    write_file,
)
from drivetrain.checkpoint.storage import LocalStorage
from tests.checkpoint.states import CountingStorage, alone, assert_same

CONTENT = os.urandom((17 << 20) + 4099)


def written(path: Path, storage: LocalStorage) -> None:
    parts = [memoryview(CONTENT)[:77], memoryview(CONTENT)[77 : 9 << 20], memoryview(CONTENT)[9 << 20 :]]
    digest = write_file(storage.create(str(path)), parts, len(CONTENT))
    assert (digest.size, digest.sha256) == (len(CONTENT), hashlib.sha256(CONTENT).hexdigest())


def read_from(path: Path, start: int = 0) -> bytearray:
    reader = LocalStorage().open(str(path), once=True)
    reader.seek(start)
    found = bytearray()
    buffer = memoryview(bytearray((3 << 20) + 1))
    while count := reader.readinto(buffer):
        found += buffer[:count]
    reader.close()
    return found


def cached(path: Path) -> list[bool]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return safetensors_file._cached_blocks(descriptor)
    finally:
        os.close(descriptor)


def evict(path: Path) -> None:
    """Drop a file from the page cache, for certain."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
    if all(cached(path)):
        pytest.skip(f"the file system of {path} keeps its files in memory")
    assert not any(cached(path))


@pytest.mark.parametrize("storage", [LocalStorage(), CountingStorage()], ids=["whole writes", "short writes"])
def test_what_is_written_in_blocks_is_what_was_given(storage: LocalStorage, tmp_path: Path) -> None:
    written(tmp_path / "file", storage)
    assert (tmp_path / "file").read_bytes() == CONTENT


@pytest.mark.parametrize("storage", [LocalStorage(), CountingStorage()], ids=["whole writes", "short writes"])
@pytest.mark.parametrize("header", [4096, 8192, 4000], ids=["a page", "two pages", "no whole page"])
def test_what_lies_at_pages_already_is_written_as_it_is(header: int, storage: LocalStorage, tmp_path: Path) -> None:
    memory = huge_memory(9 << 20)
    memory[:] = CONTENT[: len(memory)]
    parts = [memoryview(CONTENT)[:header], memory[: (5 << 20) + 77], memory[4096 : 4 << 20], memory[: 3 << 20]]
    content = b"".join(parts)
    digest = write_file(storage.create(str(tmp_path / "file")), parts, 16 << 20)
    assert (digest.size, digest.sha256) == (len(content), hashlib.sha256(content).hexdigest())
    assert (tmp_path / "file").read_bytes() == content


def test_tensors_behind_each_other_in_memory_are_one_piece_and_others_are_not() -> None:
    memory = torch.arange(64, dtype=torch.uint8)
    first, second = memory[:16].view(torch.float32).view(2, 2), memory[16:24].view(torch.int16)
    beyond, across, empty = memory[32:40], torch.arange(6).view(2, 3).t(), torch.empty(0)
    pieces = list(joined_bytes([first, second, beyond, across, empty, first]))
    assert [len(piece) for piece in pieces] == [24, 8, 48, 0, 16]
    assert [bytes(piece) for piece in pieces[:2]] == [bytes(range(24)), bytes(range(32, 40))]
    assert bytes(pieces[2]) == across.contiguous().numpy().tobytes()


def test_staged_copies_are_written_from_where_they_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []

    def counted(target: memoryview, source: memoryview) -> None:
        copied.append(len(source))
        copy_bytes(target, source)

    monkeypatch.setattr(safetensors_file, "copy_bytes", counted)
    generator = torch.Generator().manual_seed(0)
    sizes = [(1500, 1500), (7,), (2000, 1999), (3, 5)]
    state = {str(size): torch.randn(size, generator=generator) for size in sizes} | {"half": torch.ones(3).half()}
    parameters = [torch.nn.Parameter(tensor) for tensor in state.values()]
    state = {name: parameter.detach() for name, parameter in zip(state, parameters, strict=True)}
    optimizers = [torch.optim.SGD(parameters)]
    save_run_state(tmp_path / "one", state, {}, alone(), block=False, optimizers=optimizers).wait(60)
    assert (tmp_path / "one/tensors/rank_0_0.safetensors").stat().st_size > 16 << 20
    assert sum(copied) < 3 * 4096  # the header, and what ends within a page
    loaded, _ = load_run_state(tmp_path / "one", alone())
    assert_same(loaded, state)
    save_run_state(tmp_path / "two", state, {}, alone(), optimizers=optimizers)
    assert sum(copied) > 16 << 20  # not staged


def test_copies_in_page_locked_memory_begin_where_no_page_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save, "_is_pinned", lambda kind: True)
    monkeypatch.setattr(
        save, "_host_memory", lambda size, pinned: torch.frombuffer(huge_memory(size), dtype=torch.uint8)
    )
    files = [
        {MetadataIndex("a"): torch.ones(5), MetadataIndex("b"): torch.zeros(3)},
        {MetadataIndex("c"): torch.ones(2)},
    ]
    copies = save.StagingBuffer().copy(files, alone().kind).copies
    assert [copies[MetadataIndex(name)].data_ptr() % 4096 for name in "abc"] == [64, 84, 64]
    assert [copies[MetadataIndex(name)].tolist() for name in "abc"] == [[1.0] * 5, [0.0] * 3, [1.0] * 2]


STARTS = [0, 4096, (4 << 20) - 1, (9 << 20) + 5, len(CONTENT) - 3, len(CONTENT)]


@pytest.mark.parametrize("start", STARTS)
def test_reading_begins_anywhere_in_the_cache(start: int, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(CONTENT)
    assert all(cached(tmp_path / "file"))
    assert read_from(tmp_path / "file", start) == CONTENT[start:]


@pytest.mark.parametrize("start", STARTS)
def test_reading_begins_anywhere_on_the_disk_and_leaves_the_cache_alone(start: int, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(CONTENT)
    evict(tmp_path / "file")
    assert read_from(tmp_path / "file", start) == CONTENT[start:]
    assert not any(cached(tmp_path / "file")[:-1])  # the last page may need it


def test_reading_takes_from_the_cache_what_is_there_and_the_rest_from_the_disk(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(CONTENT)
    evict(tmp_path / "file")
    with open(tmp_path / "file", "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # no reading ahead
        file.seek(4 << 20)
        file.readinto(bytearray(4 << 20))
    assert cached(tmp_path / "file") == [False, True, False, False, False]
    assert read_from(tmp_path / "file") == CONTENT


# file systems that do not take part


def is_direct(descriptor: int) -> bool:
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)


class RefusesDirectWrites(LocalStorage):
    """Takes the flag and fails at the first transfer, as some file systems do."""

    def __init__(self, reason: int) -> None:
        self.reason, self.refused = reason, 0

    def _write(self, descriptor: int, data: memoryview, path: str) -> int:
        if is_direct(descriptor):
            self.refused += 1
            raise OSError(self.reason, os.strerror(self.reason))
        return super()._write(descriptor, data, path)


@pytest.mark.parametrize("reason", [errno.EINVAL, errno.EFAULT], ids=["the file system", "the memory"])
def test_where_direct_writes_are_refused_the_file_is_written_through_the_cache(reason: int, tmp_path: Path) -> None:
    storage = RefusesDirectWrites(reason)
    written(tmp_path / "file", storage)
    assert storage.refused == 1
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_a_file_system_that_refuses_direct_reads_with_einval_is_read_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(CONTENT)
    evict(tmp_path / "file")
    refused: list[int] = []
    preadv = os.preadv

    def refusing(descriptor: int, buffers: Any, offset: int) -> int:
        if is_direct(descriptor):
            refused.append(offset)
            raise OSError(errno.EINVAL, "Invalid argument")
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", refusing)
    assert read_from(tmp_path / "file") == CONTENT
    assert refused == [0]


def test_a_file_system_that_refuses_the_flag_with_einval_is_used_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[int] = []
    control = fcntl.fcntl

    def refusing(descriptor: int, command: int, argument: int = 0) -> int:
        if command == fcntl.F_SETFL and argument & os.O_DIRECT:
            refused.append(descriptor)
            raise OSError(errno.EINVAL, "Invalid argument")
        return int(control(descriptor, command, argument))

    monkeypatch.setattr(fcntl, "fcntl", refusing)
    written(tmp_path / "file", LocalStorage())
    evict(tmp_path / "file")
    assert read_from(tmp_path / "file") == CONTENT
    assert len(refused) == 2


def test_another_error_of_a_direct_write_is_no_refusal(tmp_path: Path) -> None:
    class Full(LocalStorage):
        def _write(self, descriptor: int, data: memoryview, path: str) -> int:
            if is_direct(descriptor):
                raise OSError(errno.ENOSPC, "No space left on device")
            return super()._write(descriptor, data, path)

    with pytest.raises(OSError, match="No space left"):
        written(tmp_path / "file", Full())


# forks, such as those of a loader's workers


@contextmanager
def child(work: Callable[[], int] = lambda: 0) -> Iterator[Callable[[], int]]:
    """A child that lives until it is asked for its result."""
    ask, asked = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(asked)
        os.read(ask, 1)  # ends with the parent's
        os._exit(work())
    os.close(ask)
    open_end = [asked]

    def result() -> int:
        os.close(open_end.pop())
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])

    try:
        yield result
    finally:
        if open_end:
            result()


def is_mapped(address: int) -> int:
    with open("/proc/self/maps") as maps:
        ranges = [[int(end, 16) for end in line.split()[0].split("-")] for line in maps]
    return int(any(start <= address < end for start, end in ranges))


@pytest.mark.parametrize("memory", [aligned_block, lambda: huge_memory(5 << 20)], ids=["block", "staging"])
def test_a_child_gets_no_memory_of_transfers_or_copies(memory: Callable[[], memoryview]) -> None:
    held = memory()
    held[:] = bytes([7]) * len(held)
    address = address_of(held)
    assert is_mapped(address)
    with child(lambda: is_mapped(address)) as result:
        assert result() == 0
    assert held[-1] == 7


def in_thread_among_forks(work: Callable[[], None]) -> None:
    """Run something in a thread while children come, stay and go."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    with child():
        thread.start()
        while True:
            with child():
                pass
            if not thread.is_alive():
                break
    thread.join()
    assert not errors, errors


def test_forks_in_the_midst_of_a_write_change_nothing(tmp_path: Path) -> None:
    in_thread_among_forks(lambda: written(tmp_path / "file", LocalStorage()))
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_forks_in_the_midst_of_a_read_change_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(CONTENT)
    evict(tmp_path / "file")
    found: list[bytearray] = []
    in_thread_among_forks(lambda: found.append(read_from(tmp_path / "file")))
    assert found == [CONTENT]
