"""Index of the runs in a directory: start, location and command of each, newest first."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from drivetrain.runtime.environment import COMMAND_VARIABLE
from drivetrain.trackers.secrets import HIDDEN, Secrets, is_secret_name


@contextlib.contextmanager
def locked(path: str | os.PathLike[str], seconds: float) -> Iterator[None]:
    """Hold an exclusive lock on a file in a `with` block, after waiting up to `seconds` for the lock."""
    import filelock

    lock = filelock.FileLock(path)
    try:
        lock.acquire(seconds)
    except filelock.Timeout:
        raise TimeoutError(f"{path} was locked by another run for {seconds:.0f} s") from None
    try:
        yield
    finally:
        lock.release()


DIRECTORY = "drivetrain_logs"
NAME = "index"
LOCK_SECONDS = 10.0
"""The seconds to wait for other runs that write to the index."""

_TITLE = "# when, where and with which command each run began, newest first\n"


def record_run(save_dir: str | os.PathLike[str], place: str | os.PathLike[str], secrets: Sequence[str] = ()) -> None:
    directory = Path(save_dir, DIRECTORY)
    shown = os.fspath(place)
    if "://" not in shown:
        shown = os.path.relpath(shown, directory)
    shown = Secrets(secrets).in_text(shown)
    line = f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {shown}  {command(secrets)}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        # Several runs may do this at the same time.
        with locked(directory / f".{NAME}.lock", LOCK_SECONDS):
            # A line break in a path or command must not begin another entry.
            _put_first(directory / NAME, " ".join(line.splitlines()))
    except OSError as error:
        from drivetrain.runtime.logging import get_logger  # imported late, because it imports torch

        get_logger(__name__).warning_once(f"This run is not listed in {directory / NAME}: {error}.")


@dataclass(frozen=True)
class ListedRun:
    """Entry of a run in the index file of a log directory.

    Attributes:
        when: The time when the run started or was last resumed, as text.
        place: The directory, file or address of the run.
        name: The place as written in the index, by which commands find the run.
        command: The command that started the run, without secrets.
    """

    when: str
    place: str
    name: str
    command: str


def read_runs(save_dir: str | os.PathLike[str]) -> list[ListedRun]:
    """Return the runs in the index file of a log directory, newest first."""
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
        # A resumed run has several lines, of which the first is the newest.
        found.setdefault(place, ListedRun(when, place, name.removeprefix("../"), command))
    return list(found.values())


def words_of_command() -> list[str]:
    """Return the words of the command that started this run or its launcher."""
    launched = os.environ.get(COMMAND_VARIABLE)
    return shlex.split(launched) if launched else list(sys.orig_argv or sys.argv)


def command(secrets: Sequence[str] = ()) -> str:
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
        # In `--api-key VALUE`, the secret is the next word.
        hides_next = is_secret and not separator and word.startswith("-")
        kept.append(word)
    return shlex.join(Secrets(secrets).in_text(word) for word in kept).replace(f"'{HIDDEN}'", HIDDEN)


def _put_first(path: Path, line: str) -> None:
    before = path.read_text(encoding="utf-8", errors="replace") if path.exists() else _TITLE
    title, rest = (_TITLE, before[len(_TITLE) :]) if before.startswith(_TITLE) else ("", before)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(f"{title}{line}\n{rest}", encoding="utf-8")
    os.replace(beside, path)
