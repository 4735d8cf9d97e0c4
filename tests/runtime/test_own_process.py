"""This process as the system sees it, read from files of the kernel and by psutil."""

from __future__ import annotations

import mmap
import os
from typing import Any

import psutil
import pytest

from drivetrain.checkpoint import storage
from drivetrain.checkpoint.storage import started_at
from drivetrain.runtime import host
from drivetrain.runtime.host import resident_bytes


@pytest.fixture(params=["files", "psutil"])
def source(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With the files of Linux, or as if there was no such file."""
    if request.param == "psutil":
        monkeypatch.setattr(host, "_read_kernel_file", lambda path: b"")
        monkeypatch.setattr(storage, "started_since_boot", lambda: None)
    return str(request.param)


def test_resident_memory_is_what_psutil_has(source: str) -> None:
    assert resident_bytes() == pytest.approx(psutil.Process().memory_info().rss, rel=0.02)
    before = resident_bytes()
    with mmap.mmap(-1, 64 << 20) as held:  # not the heap's, which may have it already
        held.write(bytes(len(held)))
        assert resident_bytes() - before > 0.9 * (64 << 20)


def test_a_process_is_known_again_by_its_start(source: str) -> None:
    assert started_at() == pytest.approx(psutil.Process().create_time(), abs=1.1)


def test_a_file_that_is_not_there_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any) -> int:
        raise FileNotFoundError

    monkeypatch.setattr(os, "open", missing)
    assert host._read_kernel_file("/proc/self/statm") == b""
