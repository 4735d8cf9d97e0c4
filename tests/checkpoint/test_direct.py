"""Large files go past the page cache and hold the same bytes, whatever their length and wherever reading begins."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from drivetrain.checkpoint.storage import LocalStorage
from drivetrain.checkpoint.tensor_file import write_file
from tests.checkpoint.states import CountingStorage

CONTENT = os.urandom((17 << 20) + 4099)


def written(path: Path, storage: LocalStorage) -> None:
    parts = [memoryview(CONTENT)[:77], memoryview(CONTENT)[77 : 9 << 20], memoryview(CONTENT)[9 << 20 :]]
    digest = write_file(storage.create(str(path)), parts, len(CONTENT))
    assert (digest.size, digest.sha256) == (len(CONTENT), hashlib.sha256(CONTENT).hexdigest())


@pytest.mark.parametrize("storage", [LocalStorage(), CountingStorage()], ids=["whole writes", "short writes"])
def test_what_is_written_in_blocks_is_what_was_given(storage: LocalStorage, tmp_path: Path) -> None:
    written(tmp_path / "file", storage)
    assert (tmp_path / "file").read_bytes() == CONTENT


@pytest.mark.parametrize("start", [0, 4096, (4 << 20) - 1, (9 << 20) + 5, len(CONTENT) - 3, len(CONTENT)])
@pytest.mark.parametrize("cached", [True, False])
def test_reading_begins_anywhere_cached_or_not(cached: bool, start: int, tmp_path: Path) -> None:
    written(tmp_path / "file", LocalStorage())
    if cached:
        (tmp_path / "file").read_bytes()
    reader = LocalStorage().open(str(tmp_path / "file"), once=True)
    reader.seek(start)
    found = bytearray()
    buffer = memoryview(bytearray((3 << 20) + 1))
    while count := reader.readinto(buffer):
        found += buffer[:count]
    reader.close()
    assert found == CONTENT[start:]
