"""The list of runs in a directory of runs: when each began, where it writes and with which command, newest first."""

from __future__ import annotations

import contextlib
import importlib
import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from drivetrain.runtime.environment import COMMAND_VARIABLE
from drivetrain.trackers.secrets import HIDDEN, Secrets, is_secret_name

# A lock among processes


# Not by name: each has a type only on the systems that have it.
try:
    fcntl: Any = importlib.import_module("fcntl")
except ImportError:  # Windows
    fcntl = None


@contextlib.contextmanager
def locked(path: str | os.PathLike[str], seconds: float) -> Iterator[None]:
    """Hold the lock of a file, which other processes and other threads wait for."""
    deadline = time.monotonic() + seconds
    with open(path, "a", encoding="utf-8") as file:
        while not _takes(file):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{path} was locked by another run for {seconds:.0f} s")
            time.sleep(0.01)
        try:
            yield
        finally:
            _give_back(file)


def _takes(file: IO[str]) -> bool:
    """Take the lock of an open file, unless it is taken."""
    try:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        else:
            _lock_first_byte(file, "LK_NBLCK")
    except (BlockingIOError, PermissionError):
        return False
    return True


def _give_back(file: IO[str]) -> None:
    """Give the lock back, before the file is closed: a fork may have the file too, and Windows takes its time."""
    if fcntl is not None:
        fcntl.flock(file, fcntl.LOCK_UN)
    else:
        _lock_first_byte(file, "LK_UNLCK")


def _lock_first_byte(file: IO[str], mode: str) -> None:
    msvcrt: Any = importlib.import_module("msvcrt")
    file.seek(0)  # what is locked begins where the file stands
    msvcrt.locking(file.fileno(), getattr(msvcrt, mode), 1)


DIRECTORY = "drivetrain_logs"
NAME = "index"
LOCK_SECONDS = 10.0
"""How long a run waits for others that write the same index."""

_TITLE = "# when, where and with which command each run began, newest first\n"


def record_run(save_dir: str | os.PathLike[str], place: str | os.PathLike[str], secrets: Sequence[str] = ()) -> None:
    """Put a line for this run at the top of `<save_dir>/drivetrain_logs/index`; a problem becomes a warning.

    Several runs may do so at once.
    """
    directory = Path(save_dir, DIRECTORY)
    shown = os.fspath(place)
    if "://" not in shown:
        shown = os.path.relpath(shown, directory)
    shown = Secrets(secrets).in_text(shown)
    line = f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {shown}  {command(secrets)}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with locked(directory / f".{NAME}.lock", LOCK_SECONDS):
            _put_first(directory / NAME, " ".join(line.splitlines()))
    except OSError as error:
        from drivetrain.runtime.logging import get_logger  # here: it imports torch, and a list of runs needs none

        get_logger(__name__).warning_once(f"This run is not listed in {directory / NAME}: {error}.")


@dataclass(frozen=True)
class ListedRun:
    """A run as the index lists it.

    Attributes:
        when: When it began, as text; when it was last resumed, where it was.
        place: Its directory or file, or its address.
        name: The same as the index shows it: the name to ask for it by.
        command: The command that began it, without secrets.
    """

    when: str
    place: str
    name: str
    command: str


def read_runs(save_dir: str | os.PathLike[str]) -> list[ListedRun]:
    """The runs that `<save_dir>/drivetrain_logs/index` lists, newest first, each once."""
    directory = Path(save_dir, DIRECTORY)
    path = directory / NAME
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    found: dict[str, ListedRun] = {}
    for line in text.splitlines():
        when, _, rest = line.partition("  ")
        name, _, command = rest.partition("  ")
        if line.startswith("#") or not name:
            continue
        place = name if "://" in name else os.path.normpath(directory / name)
        found.setdefault(place, ListedRun(when, place, name.removeprefix("../"), command))
    return list(found.values())


def words_of_command() -> list[str]:
    """The command line that began this run: the launcher's, where one has started this process."""
    launched = os.environ.get(COMMAND_VARIABLE)
    return shlex.split(launched) if launched else list(sys.orig_argv or sys.argv)


def command(secrets: Sequence[str] = ()) -> str:
    """The command line of this run as a shell takes it, with `<hidden>` in the place of secrets."""
    words = words_of_command()
    words[:1] = [os.path.basename(word) for word in words[:1]]
    kept: list[str] = []
    hides_next = False
    for word in words:
        name, separator, _ = word.partition("=")
        is_secret = is_secret_name(name.lstrip("-"))
        if hides_next and not word.startswith("-"):
            word = HIDDEN
        elif is_secret and separator:
            word = f"{name}={HIDDEN}"
        hides_next = is_secret and not separator and word.startswith("-")
        kept.append(word)
    return shlex.join(Secrets(secrets).in_text(word) for word in kept).replace(f"'{HIDDEN}'", HIDDEN)


def _put_first(path: Path, line: str) -> None:
    """Write the index again with one more line, beside itself first: the lines there are never at risk."""
    before = path.read_text(encoding="utf-8", errors="replace") if path.exists() else _TITLE
    title, rest = (_TITLE, before[len(_TITLE) :]) if before.startswith(_TITLE) else ("", before)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(f"{title}{line}\n{rest}", encoding="utf-8")
    os.replace(beside, path)
