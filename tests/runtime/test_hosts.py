"""The host lists of SLURM."""

from __future__ import annotations

import pytest

from drivetrain import ConfigurationError
from drivetrain.runtime.environment import expand_hosts


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("login", ["login"]),
        ("a,b", ["a", "b"]),
        ("node[1-3]", ["node1", "node2", "node3"]),
        ("node[003-005,9],other", ["node003", "node004", "node005", "node9", "other"]),
        ("node[08-10]", ["node08", "node09", "node10"]),
        ("n[1-2]-ib", ["n1-ib", "n2-ib"]),
        ("rack[1-2]n[01-02]", ["rack1n01", "rack1n02", "rack2n01", "rack2n02"]),
        ("n[1,3],m[2]", ["n1", "n3", "m2"]),
    ],
)
def test_a_list_is_what_scontrol_shows(given: str, expected: list[str]) -> None:
    assert expand_hosts(given) == expected


@pytest.mark.parametrize("given", ["", "node[", "node[a-b]", "node[3-1]", "a,,b", "node[1]]", "a b"])
def test_what_is_no_list_is_refused(given: str) -> None:
    with pytest.raises(ConfigurationError, match="is not a list of hosts"):
        expand_hosts(given)
