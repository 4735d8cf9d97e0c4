"""Base classes and checks of trackers that use a service or a package."""

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


def missing_package(owner: str, package: str, extra: str) -> PackageMissingError:
    return PackageMissingError(
        f"{owner} needs {package}, which is not installed. Install it with `pip install 'drivetrain[{extra}]'`, or use "
        "CSVLogger instead."
    )


def check_reachable(owner: str, url: str, advice: str) -> None:
    if any(scheme in urllib.request.getproxies() for scheme in ("http", "https", "all")):
        return  # the package connects through a proxy
    parsed = urllib.parse.urlsplit(url)
    place = (parsed.hostname or "", parsed.port or (80 if parsed.scheme == "http" else 443))
    try:
        socket.create_connection(place, CONNECT_SECONDS).close()
    except OSError as error:
        raise TrackerError(f"{owner} cannot connect to {place[0]} ({error.strerror or error}). {advice}") from None


def source_is_clean(owner: str, secrets: Iterable[str]) -> bool:
    script, text = script_path(), " ".join(sys.argv)
    try:
        text += "" if script is None else Path(script).read_text(encoding="utf-8", errors="replace")
    except OSError:
        pass
    if HIDDEN not in Secrets(secrets).in_text(text.replace(HIDDEN, "")):
        return True
    logger.warning(
        f"{owner} does not record the source code and command line, because they contain a key or token. Read the key "
        "from the environment instead."
    )
    return False


def script_path() -> str | None:
    """Return the path of the running script, or None in an interactive session."""
    return os.path.abspath(sys.argv[0]) if sys.argv and os.path.isfile(sys.argv[0]) else None


def flat_scalars(values: Mapping[str, Any], prefix: str = "") -> tuple[dict[str, float], dict[str, str]]:
    """Split logged values into a dict of numbers and a dict of texts."""
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


# Base classes


class PackageRun(Tracker):
    """Base class of adapters for the run of a third-party package, such as MLflow.

    Its methods are called on the thread of a `PackageLogger`. A subclass implements `open`, which opens the package's
    run and assigns it to `_run`, and `finalize`, which ends the run.

    Attributes:
        run_id: The ID of the run, or None before it is opened.
        save_dir: The root directory of all runs.
    """

    name = "package"
    id_form: ClassVar[str] = r"[\w.-]{1,128}"
    """The regular expression that valid IDs match."""
    has_own_id: ClassVar[bool] = False
    """True if the tracker chooses the ID, so that a checkpoint need not wait until the run is open."""

    def __init__(self, owner: str, save_dir: str | os.PathLike[str], run_id: str | None) -> None:
        self.owner, self.save_dir, self.run_id = owner, os.fspath(save_dir), run_id
        if run_id is None and self.has_own_id:
            self.run_id = uuid.uuid4().hex[:12]
        self._is_given = run_id is not None
        self._continues = run_id is not None
        self._run: Any = None

    def open(self) -> str | None:
        # Returns the run's path or URL, or None.
        raise NotImplementedError

    def start(self) -> None:
        if self._run is None:
            place = self.open()
            self._continues = True  # a later start continues this run
            if place is not None:
                record_run(self.save_dir, place, self.secrets)

    @property
    def tracker(self) -> Any:
        self.start()
        return self._run

    def _leave_out(self, what: str) -> None:
        logger.warning_once(f"{self.owner} does not support {what}. They are ignored.")

    def finish(self) -> None:
        self.finalize()

    def state_dict(self) -> dict[str, Any]:
        return {"run_id": self.run_id}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        run_id = state.get("run_id")
        if run_id is None or self._is_given:
            self._continues = self._continues or (run_id is not None and run_id == self.run_id)
            return
        # An ID may become part of a path, so `..` is not allowed.
        if not (isinstance(run_id, str) and re.fullmatch(self.id_form, run_id) and run_id.strip(".")):
            raise CheckpointError(
                f"The state of {self.owner} in this checkpoint has run_id={run_id!r}, which is not a run ID."
            )
        self.run_id, self._continues = run_id, True


class PackageLogger(BackgroundTracker):
    """Base class of trackers that wrap a third-party package and call it on a background thread.

    Args:
        run: The run of the package.
        log_model: Send the best checkpoint to the run when a `fit` ends.

    Raises:
        ConfigurationError: If the package is not installed.
    """

    def __init__(self, run: PackageRun, log_model: bool | str = False) -> None:
        if not self.is_available():
            raise missing_package(type(self).__name__, self.name, self.name)
        super().__init__(run)
        self._package_run = run
        self.log_model = bool(log_model)
        if log_model == "all":
            logger.warning(
                f"{type(self).__name__}(log_model='all') stores only the best checkpoint when a fit ends, as "
                "log_model=True does. Call log_artifact to store others."
            )

    @classmethod
    def is_available(cls) -> bool:
        return importlib.util.find_spec(cls.name) is not None

    def state_dict(self) -> dict[str, Any]:
        run = self._package_run
        return run.state_dict() if run.has_own_id else super().state_dict()

    @property
    def version(self) -> str | None:
        """The ID of the run in the tracker's service, or None before the run is opened."""
        return self._package_run.run_id

    @property
    def save_dir(self) -> str:
        return self._package_run.save_dir


def file_name(name: str, step: int | None = None, suffix: str = "") -> str:
    parts = [re.sub(r"[^\w.-]", "_", part).strip(".") or "_" for part in name.split("/")]
    return "/".join(parts) + ("" if step is None else f"-{step}") + suffix
