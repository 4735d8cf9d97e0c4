"""Parser of the command line that started this Python interpreter."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

_WITH_VALUE = "WX"
# Options that concern the terminal or the launcher only, and not the computation of a rank.
_NOT_PASSED_ON = "iqhuV?"


@dataclass(frozen=True)
class Invocation:
    """Command line of a Python interpreter, parsed to start it again."""

    kind: str  # "script", "module" (-m), "command" (-c) or "stdin"
    target: str  # path, module or command; empty for stdin
    arguments: tuple[str, ...]
    options: tuple[str, ...]  # of the interpreter, to use for other ranks

    @classmethod
    def parse(cls, arguments: Sequence[str] | None = None) -> Invocation:
        options: list[str] = []
        rest = list(sys.orig_argv[1:] if arguments is None else arguments)
        while rest:
            given = rest.pop(0)
            if given == "--check-hash-based-pycs" and rest:
                options += [given, rest.pop(0)]
                continue
            if given == "-" or not given.startswith("-"):
                kind = "stdin" if given == "-" else "script"
                return cls(kind, "" if kind == "stdin" else given, tuple(rest), tuple(options))
            # Short options may be combined: `-Bm pkg.train`, `-Werror`.
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
