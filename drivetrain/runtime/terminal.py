"""What is written to terminals."""

from __future__ import annotations

import os
import re
import sys
import unicodedata
from contextlib import suppress
from typing import Any, TextIO

HIDDEN = "<hidden>"

# The part of a URL before its host: user:password, which may hold any character that is not encoded, or a token alone.
# Names of containers and of accounts on machines are no secrets.
_USER_INFO = re.compile(
    r"""(?P<before>\b(?P<scheme>[a-z][a-z0-9+.-]*)://)
    (?: (?P<user>[^\s/@:?#'"]*:)(?!\d*[/?#]) (?:(?!://)[^\s'"])+
      | (?<!abfs://)(?<!abfss://)(?<!wasb://)(?<!wasbs://)(?<!ssh://)(?<!sftp://)(?<!hdfs://)
        (?!git@)[^\s/@:?#'"]+ )@""",
    re.VERBOSE | re.IGNORECASE,
)
_PARAMETER = re.compile(r"""([?&;#](?P<name>[\w.%-]+)=)[^&;\s#'"]+""")
_CREDENTIAL = re.compile(
    r"(?:^|[_.-])(?:(?:\w*(?:api|access|auth|secret|private|signing|account|shared|storage)_?)?key(?:_?id)?|\w*secret|\w*token|pass|passwd|password|pwd|passphrase|sig|signature|sas|auth"
    r"|credentials?)$"
)


def visible(text: str) -> str:
    """Return a text whose control characters are spelled out as numbers; line breaks and tabs stay.

    Names in files that somebody else wrote could else move the cursor, set the clipboard, or turn the direction of what
    follows.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(each if each in "\n\t" or not _is_control(each) else _spelled(each) for each in text)


def without_credentials(text: str) -> str:
    """Return a text with `<hidden>` in the place of passwords, keys and tokens in the URLs that it holds."""
    if "://" not in text:
        return text
    text = _USER_INFO.sub(lambda found: f"{found['before']}{found['user'] or ''}{HIDDEN}@", text)
    return _PARAMETER.sub(lambda found: f"{found[1]}{HIDDEN}" if _is_credential(found["name"]) else found[0], text)


def shown(text: str) -> str:
    """Return a text as it may be written for people: without credentials and without control characters."""
    return visible(without_credentials(text))


def _is_credential(name: str) -> bool:
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    return bool(_CREDENTIAL.search(snake)) and not snake.endswith(("max_token", "num_token"))


def print_text(text: str, end: str = "\n", file: TextIO | None = None) -> None:
    """Write a text for those who watch a run; a run does not depend on it, so nothing is raised.

    A text is lost if there is nowhere to write it to: a closed pipe or terminal, a full disk, no standard output. What
    the output's encoding has no characters for is spelled out.
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


def print_all(
    *args: object, sep: str | None = " ", end: str | None = "\n", file: Any = None, flush: bool = False
) -> None:
    """Print as the built-in `print` does, and raise nothing if the text cannot be written."""
    print_text((" " if sep is None else sep).join(map(str, args)), "\n" if end is None else end, file)


def flush_output() -> None:
    """Write what waits in the standard output and in the standard error, as far as they can be written to."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with suppress(OSError, ValueError):
                stream.flush()


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


class Lenient:
    """A stream that loses what cannot be written instead of raising, for packages that write by themselves."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write a text, as far as it can be."""
        if self._stream is not None:
            print_text(text, end="", file=self._stream)
        return len(text)

    def flush(self) -> None:
        """Flush the stream, as far as it can be."""
        with suppress(OSError, ValueError, AttributeError):
            self._stream.flush()


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
