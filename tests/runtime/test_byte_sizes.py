"""Bytes as text, and those of this machine."""

from __future__ import annotations

import pytest

from drivetrain.runtime.byte_sizes import as_bytes, host_memory, parse_bytes
from drivetrain.runtime.devices import available_device_kinds
from drivetrain.runtime.errors import ConfigurationError


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (7, 7),
        ("7B", 7),
        ("1KB", 1000),
        ("1.5 KiB", 1536),
        ("20GIB", 20 * 2**30),
        ("2tb", 2 * 10**12 // 8),
        ("2TB", 2 * 10**12),
        ("8Mb", 10**6),
        (".5GB", 5 * 10**8),
    ],
)
def test_sizes_are_read(text: int | str, size: int):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GB", "5", "5 parsecs", "1IB", "-1GB", True, None])
def test_what_is_no_size_is_refused(text: object):
    with pytest.raises(ConfigurationError, match="is no size"):
        parse_bytes(text)


def test_sizes_are_written():
    assert [as_bytes(count) for count in (0, 1023, 1024, 1.5 * 2**30, 2**50)] == [
        "0 B",
        "1023 B",
        "1 KB",
        "1.5 GB",
        "1024 TB",
    ]


def test_the_host_has_memory():
    free, total = host_memory()
    assert 10**6 < free <= total
    *_, host = available_device_kinds()
    assert host.free_memory(host.device(0))[1] == total
