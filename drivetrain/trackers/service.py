"""What trackers of servers check before they start, so that each problem gets a message of its own."""

from __future__ import annotations

import os
import socket
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from drivetrain.runtime.errors import PackageMissingError, TrackerError
from drivetrain.runtime.logging import get_logger
from drivetrain.trackers.secrets import HIDDEN, Secrets

logger = get_logger(__name__)

CONNECT_SECONDS = 10.0


def refuse_missing(owner: str, package: str, extra: str) -> PackageMissingError:
    """The error for a package that is not installed.

    Args:
        owner: The tracker.
        package: The package.
        extra: The extra of drivetrain that installs it.
    """
    return PackageMissingError(
        f"{owner} needs {package}, which is not installed. Install it with `pip install 'drivetrain[{extra}]'`, or use "
        "CSVLogger instead."
    )


def check_reachable(owner: str, url: str, advice: str) -> None:
    """Raise where the server of a tracker cannot be connected to; packages themselves try for minutes.

    Args:
        owner: The tracker.
        url: The address of its server.
        advice: What to do.

    Raises:
        TrackerError: There is no connection.
    """
    if any(scheme in urllib.request.getproxies() for scheme in ("http", "https", "all")):
        return  # through which the package connects
    parsed = urllib.parse.urlsplit(url)
    place = (parsed.hostname or "", parsed.port or (80 if parsed.scheme == "http" else 443))
    try:
        socket.create_connection(place, CONNECT_SECONDS).close()
    except OSError as error:
        raise TrackerError(f"{owner} has no connection to {place[0]} ({error.strerror or error}). {advice}") from None


def source_is_clean(owner: str, secrets: Iterable[str]) -> bool:
    """Whether a tracker may record the script and its command line; warns where they hold a secret as it is.

    Args:
        owner: The tracker.
        secrets: Values that it was given.
    """
    script, text = script_path(), " ".join(sys.argv)
    try:
        text += "" if script is None else Path(script).read_text(encoding="utf-8", errors="replace")
    except OSError:
        pass
    if HIDDEN not in Secrets(secrets).in_text(text.replace(HIDDEN, "")):
        return True
    logger.warning(
        f"{owner} records neither source code nor command line: a key or token is written in them. Take it from the "
        "environment instead."
    )
    return False


def script_path() -> str | None:
    """The path of the script that runs; None in a console."""
    return os.path.abspath(sys.argv[0]) if sys.argv and os.path.isfile(sys.argv[0]) else None


def flat_scalars(values: Mapping[str, Any], prefix: str = "") -> tuple[dict[str, float], dict[str, str]]:
    """Sort values into numbers and texts; nested ones become names with a `/`.

    Args:
        values: Names and values.
        prefix: Put before each name.
    """
    numbers: dict[str, float] = {}
    texts: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            inner_numbers, inner_texts = flat_scalars(value, f"{prefix}{key}/")
            numbers.update(inner_numbers)
            texts.update(inner_texts)
        elif isinstance(value, (bool, int, float)):
            numbers[prefix + key] = value
        else:
            texts[prefix + key] = str(value)
    return numbers, texts
