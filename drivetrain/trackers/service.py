"""What trackers of servers check before they start, so that each problem gets a message of its own."""

from __future__ import annotations

import importlib.util
import os
import re
import socket
import sys
import urllib.parse
import urllib.request
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from drivetrain.runtime.errors import CheckpointError, PackageMissingError, TrackerError
from drivetrain.runtime.logging import get_logger
from drivetrain.trackers.base import Tracker
from drivetrain.trackers.group import BackgroundTracker
from drivetrain.trackers.index import record_run
from drivetrain.trackers.secrets import HIDDEN, Secrets

logger = get_logger(__name__)

CONNECT_SECONDS = 10.0


def refuse_missing(owner: str, package: str, extra: str) -> PackageMissingError:
    """The error for a package that is not installed."""
    return PackageMissingError(
        f"{owner} needs {package}, which is not installed. Install it with `pip install 'drivetrain[{extra}]'`, or use "
        "CSVLogger instead."
    )


def check_reachable(owner: str, url: str, advice: str) -> None:
    """Raise where the server of a tracker cannot be connected to; packages themselves try for minutes."""
    if any(scheme in urllib.request.getproxies() for scheme in ("http", "https", "all")):
        return  # through which the package connects
    parsed = urllib.parse.urlsplit(url)
    place = (parsed.hostname or "", parsed.port or (80 if parsed.scheme == "http" else 443))
    try:
        socket.create_connection(place, CONNECT_SECONDS).close()
    except OSError as error:
        raise TrackerError(f"{owner} has no connection to {place[0]} ({error.strerror or error}). {advice}") from None


def source_is_clean(owner: str, secrets: Iterable[str]) -> bool:
    """Whether a tracker may record the script and its command line; warns where they hold a secret as it is."""
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
    """Sort values into numbers and texts; nested ones become names with a `/`."""
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


# What trackers over a package have in common: whether it is there, which run is continued, where it is listed


class PackageRun(Tracker):
    """One run of a package's, called on the thread of a `PackageLogger`.

    A subclass opens the package's run in `open` and leaves it in `_run`; `close` ends it.

    Attributes:
        run_id: The ID of the run, once it is known.
        save_dir: The directory of all runs.
    """

    name = "package"
    id_form: ClassVar[str] = r"[\w.-]{1,128}"
    """The form of an ID, as a regular expression."""
    has_own_id: ClassVar[bool] = False
    """Whether the tracker chooses the ID, so that a checkpoint does not wait until the run is open."""

    def __init__(self, owner: str, save_dir: str | os.PathLike[str], run_id: str | None) -> None:
        self.owner, self.save_dir, self.run_id = owner, os.fspath(save_dir), run_id
        if run_id is None and self.has_own_id:
            self.run_id = uuid.uuid4().hex[:12]
        self._is_given = run_id is not None
        self._continues = run_id is not None
        self._run: Any = None

    def open(self) -> str | None:
        """Open the run, leave it in `_run`, and return its directory or address for the index."""
        raise NotImplementedError

    def start(self) -> None:
        if self._run is None:
            place = self.open()
            self._continues = True  # whenever it is opened again
            if place is not None:
                record_run(self.save_dir, place, self.secrets)

    @property
    def tracker(self) -> Any:
        self.start()
        return self._run

    def _leave_out(self, what: str) -> None:
        logger.warning_once(f"{self.owner} has no place for {what}, which are left out.")

    def finish(self) -> None:
        self.finalize()

    def state_dict(self) -> dict[str, Any]:
        return {"run_id": self.run_id}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        run_id = state.get("run_id")
        if run_id is None or self._is_given:
            self._continues = self._continues or (run_id is not None and run_id == self.run_id)
            return
        if not (isinstance(run_id, str) and re.fullmatch(self.id_form, run_id) and run_id.strip(".")):
            raise CheckpointError(
                f"The state of {self.owner} in this checkpoint has run_id={run_id!r}, which is no ID of a run."
            )
        self.run_id, self._continues = run_id, True


class PackageLogger(BackgroundTracker):
    """A tracker over a package that has the tracker's name; all calls return at once, and a thread makes them.

    Args:
        run: Its run.
        log_model: Whether the run gets the best checkpoint when a `fit` ends.

    Raises:
        ConfigurationError: If the package is not installed.
    """

    def __init__(self, run: PackageRun, log_model: bool | str = False) -> None:
        if not self.is_available():
            raise refuse_missing(type(self).__name__, self.name, self.name)
        super().__init__(run)
        self._package_run = run
        self.log_model = bool(log_model)
        if log_model == "all":
            logger.warning(
                f"{type(self).__name__}(log_model='all') keeps the best checkpoint when a fit ends, as log_model=True "
                "does. For others call log_artifact."
            )

    @classmethod
    def is_available(cls) -> bool:
        return importlib.util.find_spec(cls.name) is not None

    def state_dict(self) -> dict[str, Any]:
        run = self._package_run
        return run.state_dict() if run.has_own_id else super().state_dict()

    @property
    def version(self) -> str | None:
        """The ID of the run, once it is known."""
        return self._package_run.run_id

    @property
    def save_dir(self) -> str:
        """The directory of all runs."""
        return self._package_run.save_dir


def file_name(name: str, step: int | None = None, suffix: str = "") -> str:
    """A name with its step as that of a file, within directories where it has a `/`."""
    parts = [re.sub(r"[^\w.-]", "_", part).strip(".") or "_" for part in name.split("/")]
    return "/".join(parts) + ("" if step is None else f"-{step}") + suffix
