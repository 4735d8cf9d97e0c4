"""The host lists of SLURM, taken apart as `scontrol show hostnames` does."""

from __future__ import annotations

import re
from itertools import product

from drivetrain.runtime.errors import ConfigurationError

# A comma that is not within brackets.
_SEPARATOR = re.compile(r",(?![^\[]*\])")


def expand_hosts(hosts: str) -> list[str]:
    """Names of all hosts in a compressed list.

    Args:
        hosts: As SLURM writes it, such as `"node[003-005,9],other"` or `"rack[1-2]n[01-02]-ib"`.

    Returns:
        The names, in the order of the list.

    Raises:
        ConfigurationError: The list cannot be read.

    Example:
        ```python
        from drivetrain.runtime.hosts import expand_hosts

        assert expand_hosts("node[08-10],login") == ["node08", "node09", "node10", "login"]
        ```
    """
    names: list[str] = []
    for each in _SEPARATOR.split(hosts.strip()):
        # Text and ranges take turns: rack, 1-2, n, 01-02, -ib.
        parts = re.split(r"\[([^\[\]]*)\]", each.strip())
        choices = [_numbers(part, hosts) if position % 2 else [part] for position, part in enumerate(parts)]
        found = ["".join(chosen) for chosen in product(*choices)]
        if any(not name or set(name) & set("[], ") for name in found):
            raise _unreadable(hosts)
        names += found
    return names


def _numbers(ranges: str, hosts: str) -> list[str]:
    """The numbers of `"003-005,9"`, each as wide as the first of its range."""
    numbers = []
    for each in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", each.strip())
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise _unreadable(hosts)
        numbers += [f"{number:0{len(match[1])}d}" for number in range(int(match[1]), int(match[2] or match[1]) + 1)]
    return numbers


def _unreadable(hosts: str) -> ConfigurationError:
    return ConfigurationError(
        f"{hosts!r} is no list of hosts. One is like 'node[003-005,9],other', as in SLURM_JOB_NODELIST.", code="DT-007"
    )
