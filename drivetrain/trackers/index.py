"""The list of runs in a directory of runs: when each began, where it writes and with which command, newest first."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from drivetrain.runtime.logging import get_logger
from drivetrain.trackers.locks import locked
from drivetrain.trackers.secrets import HIDDEN, Secrets, is_secret_name

logger = get_logger(__name__)

DIRECTORY = "drivetrain_logs"
NAME = "index"
LOCK_SECONDS = 10.0
"""How long a run waits for others that write the same index."""

_TITLE = "# when, where and with which command each run began, newest first\n"


def record_run(save_dir: str | os.PathLike[str], place: str | os.PathLike[str], secrets: Sequence[str] = ()) -> None:
    """Put a line for this run at the top of `<save_dir>/drivetrain_logs/index`; a problem becomes a warning.

    Several runs may do so at once.

    Args:
        save_dir: The directory of all runs.
        place: The run's directory or file, which is shown relative to the index; or its address.
        secrets: What the command must not show, beside what has the name of a secret.
    """
    directory = Path(save_dir, DIRECTORY)
    shown = os.fspath(place)
    if "://" not in shown:
        shown = os.path.relpath(shown, directory)
    line = f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {shown}  {command(secrets)}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with locked(directory / f".{NAME}.lock", LOCK_SECONDS):
            _put_first(directory / NAME, " ".join(line.splitlines()))
    except OSError as error:
        logger.warning_once(f"This run is not listed in {directory / NAME}: {error}.")


def command(secrets: Sequence[str] = ()) -> str:
    """The command line of this process as a shell takes it, with `<hidden>` in the place of secrets."""
    words = [os.path.basename(sys.orig_argv[0]), *sys.orig_argv[1:]] if sys.orig_argv else list(sys.argv)
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
