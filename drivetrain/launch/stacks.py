"""The stack that a rank writes when its launcher asks, and what can be read from it: the collective and the line."""

from __future__ import annotations

import linecache
import os
import re
from dataclasses import dataclass
from itertools import takewhile

from drivetrain.runtime.frames import in_package, in_torch, is_library, shown_path

_FRAME = re.compile(r'^  File "(?P<filename>.*)", line (?P<line>\d+) in (?P<function>.*)$')


# Parts of drivetrain/runtime that wait for other processes.
_WAITING_FILES = {"collectives.py", "collective_checks.py", "process_group.py", "assembly.py"}
_UNNAMED = ("_", "<", "wrapper")


@dataclass(frozen=True)
class Frame:
    """One line of a stack."""

    filename: str
    line: int
    function: str

    def __str__(self) -> str:
        source = linecache.getline(self.filename, self.line).strip()
        text = f"{shown_path(self.filename)}:{self.line} in {self.function}"
        return f"{text}: {source}" if source else text


@dataclass(frozen=True)
class Stack:
    """What the main thread of a rank does.

    Attributes:
        frames: Innermost first.
    """

    frames: tuple[Frame, ...]

    @classmethod
    def parse(cls, text: str) -> Stack | None:
        """Read what `faulthandler` wrote; None where it holds no frame. Of several stacks the last one counts."""
        frames: list[Frame] = []
        for line in text.splitlines():
            if line.startswith(("Stack ", "Current thread ", "Thread ")):
                frames = []
            elif match := _FRAME.match(line):
                frames.append(Frame(match["filename"], int(match["line"]), match["function"]))
        return cls(tuple(frames)) if frames else None

    @property
    def user_frame(self) -> Frame:
        """The innermost line outside drivetrain, torch and the standard library."""
        return next((frame for frame in self.frames if not is_library(frame.filename)), self.frames[0])

    @property
    def collective(self) -> str | None:
        """The collective that the rank waits in; None where it waits in none."""
        inside = list(takewhile(lambda frame: is_library(frame.filename), self.frames))
        ours = [frame for frame in inside if in_package(frame.filename, "runtime")]
        torchs = [frame for frame in inside if in_torch(frame.filename, "distributed")]
        if torchs or any(os.path.basename(frame.filename) in _WAITING_FILES for frame in ours):
            # The outermost function is the one that was called: `gather`, and not what it consists of.
            named = [frame.function for frame in (*torchs, *ours) if not frame.function.startswith(_UNNAMED)]
            return named[-1] if named else inside[-1].function
        if inside and in_torch(inside[0].filename, os.path.join("nn", "parallel", "distributed.py")):
            return inside[0].function
        # Gradients are reduced inside the backward pass, where Python has no frame.
        return "backward" if any(in_torch(frame.filename, "autograd") for frame in inside) else None

    def __str__(self) -> str:
        return "\n".join(f"    {frame}" for frame in reversed(self.frames))
