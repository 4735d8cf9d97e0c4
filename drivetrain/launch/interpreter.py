"""How this interpreter was started: its options, and the script, module or command that it runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

_WITH_VALUE = "WX"
# These concern the terminal or the launcher's own choice, not what a rank computes.
_NOT_PASSED_ON = "iqhuV?"


@dataclass(frozen=True)
class Invocation:
    """One Python command line.

    Attributes:
        kind: `"script"`, `"module"`, `"command"` (`-c`) or `"stdin"` (nothing named).
        target: The script's path, the module's name or the command; empty for stdin.
        arguments: What follows it.
        options: The interpreter's own options worth passing on, each an argument of its own.
    """

    kind: str
    target: str
    arguments: tuple[str, ...]
    options: tuple[str, ...]

    @classmethod
    def current(cls) -> Invocation:
        """The command line that started this process."""
        return cls.parse(sys.orig_argv[1:])

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> Invocation:
        """Take a command line apart."""
        options: list[str] = []
        rest = list(arguments)
        while rest:
            given = rest.pop(0)
            if given == "--check-hash-based-pycs" and rest:
                options += [given, rest.pop(0)]
                continue
            if given == "-" or not given.startswith("-"):
                kind = "stdin" if given == "-" else "script"
                return cls(kind, "" if kind == "stdin" else given, tuple(rest), tuple(options))
            # Short options may be written together: `-Bm pkg.train`, `-Werror`.
            letters = given[1:]
            for position, letter in enumerate(letters):
                attached = letters[position + 1 :]
                if letter in "mc" or letter in _WITH_VALUE:
                    value = attached or (rest.pop(0) if rest else "")
                    if letter in _WITH_VALUE:
                        options += [f"-{letter}", value]
                        break
                    kind = "module" if letter == "m" else "command"
                    return cls(kind, value, tuple(rest), tuple(options))
                if letter not in _NOT_PASSED_ON:
                    options.append(f"-{letter}")
        return cls("stdin", "", (), tuple(options))
