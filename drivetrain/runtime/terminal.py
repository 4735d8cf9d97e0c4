"""Output to terminals: text without credentials and control characters, and printing that never raises."""

from __future__ import annotations

import os
import re
import sys
import unicodedata
from contextlib import suppress
from typing import Any, TextIO

HIDDEN = "<hidden>"

# The part of a URL before the host: user:password, where the password may hold any character, or a token alone.
# Container names and accounts on machines are not secrets.
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
    """Escape the control characters in a text, so that it is safe to print.

    File names chosen by others could otherwise move the cursor, set the clipboard or reverse the text's direction.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(each if each in "\n\t" or not _is_control(each) else _escaped(each) for each in text)


def without_credentials(text: str) -> str:
    """Hide passwords, keys and tokens in the URLs of a text."""
    if "://" not in text:
        return text
    text = _USER_INFO.sub(lambda found: f"{found['before']}{found['user'] or ''}{HIDDEN}@", text)
    return _PARAMETER.sub(lambda found: f"{found[1]}{HIDDEN}" if _is_credential(found["name"]) else found[0], text)


def shown(text: str) -> str:
    return visible(without_credentials(text))


def _is_credential(name: str) -> bool:
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    return bool(_CREDENTIAL.search(snake)) and not snake.endswith(("max_token", "num_token"))


def print_text(text: str, end: str = "\n", file: TextIO | None = None) -> None:
    """Write text to a stream such as stdout, and ignore errors such as a closed pipe.

    The text is lost if the pipe or terminal is closed, the disk is full or there is no stdout. Characters that the
    stream's encoding lacks are escaped.
    """
    stream = sys.stdout if file is None else file
    if stream is None:  # a process without a console
        return
    text = encodable(text + end, stream)
    data = text.encode(getattr(stream, "encoding", None) or "utf-8")
    try:
        stream.flush()
        number = _descriptor(stream)
        if number is None:
            stream.write(text)
        # Bypass the stream's buffer: text that cannot be written would stay in it, fail again when the interpreter
        # ends, and turn the exit code of a successful run into 120.
        while number is not None and data:
            data = data[os.write(number, data) :]
    except (OSError, ValueError):  # ValueError: the file is closed
        return


def print_all(
    *args: object, sep: str | None = " ", end: str | None = "\n", file: Any = None, flush: bool = False
) -> None:
    print_text((" " if sep is None else sep).join(map(str, args)), "\n" if end is None else end, file)


def flush_output() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with suppress(OSError, ValueError):
                stream.flush()


def encodable(text: str, stream: TextIO) -> str:
    """Escape the characters that a stream's encoding cannot represent."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def _descriptor(stream: TextIO) -> int | None:
    # A stream with its own `write`, such as one that copies the output to a file, must receive the text.
    try:
        return stream.fileno() if type(stream).__module__ == "_io" and "write" not in vars(stream) else None
    except (AttributeError, OSError, ValueError):
        return None


class Lenient:
    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        if self._stream is not None:
            print_text(text, end="", file=self._stream)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError, AttributeError):
            self._stream.flush()


def is_terminal() -> bool:
    try:
        return sys.stdout is not None and sys.stdout.isatty()
    except ValueError:
        return False


def _is_control(character: str) -> bool:
    kind = unicodedata.category(character)
    # Category Cf includes characters that change the text's direction, but also the joiners of emoji, which are kept.
    return kind in ("Cc", "Cs") or (kind == "Cf" and character not in "\u200c\u200d")


def _escaped(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 65536 else f"\\U{code:08x}"
