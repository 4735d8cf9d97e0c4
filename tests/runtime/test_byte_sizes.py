"""Bytes as text, and those of this machine."""

from __future__ import annotations

import pytest

from drivetrain import ConfigurationError
from drivetrain.runtime.devices import available_device_kinds
from drivetrain.runtime.host import as_bytes, host_memory, parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (7, 7),
        ("7B", 7),
        ("1KB", 1000),
        ("1.5 KiB", 1536),
        ("20GIB", 20 * 2**30),
        ("2tb", 2 * 10**12),
        ("2TB", 2 * 10**12),
        ("8Mb", 10**6),
        ("8Mib", 2**20),
        (".5GB", 5 * 10**8),
        ("24G", 24 * 10**9),
        ("24g", 24 * 10**9),
        ("24Gi", 24 * 2**30),
        ("5", 5),
    ],
)
def test_sizes_are_read(text: int | str, size: int):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GB", "G", "5 parsecs", "1IB", "1I", "-1GB", True, None])
def test_what_is_no_size_is_refused(text: object):
    with pytest.raises(ConfigurationError, match="is not a size"):
        parse_bytes(text)


def test_sizes_are_written():
    assert [as_bytes(count) for count in (0, 1023, 1024, 1.5 * 2**30, 2**50)] == [
        "0 B",
        "1023 B",
        "1 KiB",
        "1.5 GiB",
        "1024 TiB",
    ]


@pytest.mark.parametrize("count", [0, 1000, 1536, 24 * 10**9, 3 * 2**40, 2**52])
def test_what_is_written_is_read_as_the_same_size(count: int):
    assert parse_bytes(as_bytes(count)) == pytest.approx(count, rel=1e-3)


def test_the_host_has_memory():
    free, total = host_memory()
    assert 10**6 < free <= total
    *_, host = available_device_kinds()
    assert host.free_memory(host.device(0))[1] == total
