"""What is written to terminals."""

from __future__ import annotations

import os
import sys
import unicodedata
from typing import TextIO


def visible(text: str) -> str:
    """Return a text whose control characters are spelled out as numbers; line breaks and tabs stay.

    Names in files that somebody else wrote could else move the cursor, set the clipboard, or turn the direction of what
    follows.

    Args:
        text: The text.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(each if each in "\n\t" or not _is_control(each) else _spelled(each) for each in text)


def say(text: str, end: str = "\n", file: TextIO | None = None) -> None:
    """Write a text for whoever watches a run; a run does not depend on it, so nothing is raised.

    A text is lost if there is nowhere to write it to: a closed pipe or terminal, a full disk, no standard output. What
    the output's encoding has no characters for is spelled out.

    Args:
        text: The text.
        end: What stands after it.
        file: Where to; the standard output if None.
    """
    stream = sys.stdout if file is None else file
    if stream is None:  # as in a process without a console
        return
    text = encodable(text + end, stream)
    data = text.encode(getattr(stream, "encoding", None) or "utf-8")
    try:
        stream.flush()
        number = _descriptor(stream)
        if number is None:
            stream.write(text)
        # Past the stream's buffer: what it cannot write stays there, fails again when the interpreter ends, and makes
        # the exit code of a good run 120.
        while number is not None and data:
            data = data[os.write(number, data) :]
    except (OSError, ValueError):  # ValueError: the file is closed
        return


def encodable(text: str, stream: TextIO) -> str:
    """Return a text in which what a stream's encoding has no characters for is spelled out."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def _descriptor(stream: TextIO) -> int | None:
    """Return the number of a stream's file; None if it has none, as in a notebook."""
    try:
        return stream.fileno()
    except (AttributeError, OSError, ValueError):
        return None


def is_terminal() -> bool:
    """Return whether the standard output is a terminal; False if there is none or it is closed."""
    try:
        return sys.stdout is not None and sys.stdout.isatty()
    except ValueError:
        return False


def _is_control(character: str) -> bool:
    kind = unicodedata.category(character)
    # Cf has what turns the direction of text; joiners, which emoji are made with, are shown.
    return kind in ("Cc", "Cs") or (kind == "Cf" and character not in "\u200c\u200d")


def _spelled(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 65536 else f"\\U{code:08x}"
