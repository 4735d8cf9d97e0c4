"""Run directories, and the base class of trackers that write files into them."""

from __future__ import annotations

import os
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from drivetrain.runtime.errors import CheckpointError
from drivetrain.runtime.logging import get_logger, rank_and_world_size
from drivetrain.runtime.yaml_text import load_yaml
from drivetrain.trackers.base import COMPLETED, STATUS_WORDS, Tracker, plain
from drivetrain.trackers.index import record_run
from drivetrain.trackers.secrets import Secrets

logger = get_logger(__name__)

_VERSION = re.compile(r"version_(\d+)")


class RunDirectory:
    """Directory `<save_dir>/<name>/version_<n>` for the files of one run.

    Without a version, the next free number is taken when the path is first read. Trackers of one run share the object,
    so that their files are in the same directory.

    A number is reserved by creating its directory, so that runs which start at the same moment never share one. A
    directory that stays empty is removed again.
    """

    def __init__(self, save_dir: str | os.PathLike[str], name: str | None, version: int | str | None = None) -> None:
        self.url = os.fspath(save_dir) if "://" in os.fspath(save_dir) else None
        self.save_dir = os.fspath(save_dir) if self.url is None else "."
        self.name = name or ""
        self._version = version
        self.is_given = version is not None
        self._is_listed = self._is_free_again = False
        self._remove_empty: Callable[[], Any] | None = None

    @property
    def root(self) -> Path:
        return Path(self.save_dir, self.name)

    @property
    def is_decided(self) -> bool:
        return self._version is not None

    @property
    def version(self) -> int | str:
        """The version number or name of this run. A number is reserved on first use."""
        if self._version is None:
            self._version = self._take_version()
        return self._version

    @version.setter
    def version(self, version: int | str) -> None:
        self._version = version

    @property
    def path(self) -> Path:
        """The path of this run's directory, which may not exist yet."""
        version = self.version
        return self.root / (version if isinstance(version, str) else f"version_{version}")

    def resume(self, version: Any) -> bool:
        if self.is_given:
            return bool(self._version == version)
        is_number = type(version) is int and version >= 0
        is_name = isinstance(version, str) and "\0" not in version
        if not is_number and not (is_name and all(part not in ("", ".", "..") for part in version.split("/"))):
            raise CheckpointError(
                f"The state of a tracker in this checkpoint has version={version!r}, which is not valid: a version is "
                f"a number, or the name of a directory in {self.root}. Do not resume from a checkpoint of unknown "
                "origin."
            )
        before, self._version, self._is_free_again = self._version, version, False
        if not self.path.is_dir():
            self._version = before
        # The version comes from a checkpoint, which must not redirect writes through a link.
        elif not os.path.realpath(self.path).startswith(os.path.realpath(self.root) + os.sep):
            logger.warning(f"{self.path} leads outside of {self.root}, so it is not continued. Pass version= to do so.")
            self._version = before
        return bool(self._version == version)

    def create(self) -> Path:
        """Create the run's directory, list the run in the index, and return the path."""
        if self._is_free_again and self.path.exists():
            self._version = None  # another run has taken the number in the meantime
        self._is_free_again = False
        path = self.path
        path.mkdir(parents=True, exist_ok=True)
        if not self._is_listed:
            self._is_listed = True
            if self.url is not None:
                logger.warning(
                    f"{self.url} is a URL, but trackers write local files: they are in {path.absolute()}. Only "
                    "checkpoints go to the URL of default_root_dir or of ModelCheckpoint(dirpath=...)."
                )
            record_run(self.save_dir, path)
        return path

    def existing(self) -> list[Path]:
        """Return the directories of all runs, newest first."""
        if self.is_given:
            return [self.path]
        return [self.root / f"version_{number}" for number in sorted(self._numbers(), reverse=True)]

    def _take_version(self) -> int:
        number = max(self._numbers(), default=-1) + 1
        # Only the main process creates a directory. The Trainer sends its number to the others.
        if rank_and_world_size()[0] != 0:
            return number
        made = [] if self.root.is_dir() else [self.root]
        while True:
            path = self.root / f"version_{number}"
            try:
                path.mkdir(parents=True)
            except FileExistsError:
                number += 1
                continue
            except OSError:  # not writable: the first write raises the error
                return number
            self._remove_empty = weakref.finalize(self, _remove_if_empty, [path, *made], os.getpid())
            return number

    def release(self) -> None:
        if self._remove_empty is not None and self._remove_empty():
            self._is_free_again = True

    def _numbers(self) -> list[int]:
        if not self.root.is_dir():
            return []
        found = (_VERSION.fullmatch(entry.name) for entry in self.root.iterdir() if entry.is_dir())
        return [int(match[1]) for match in found if match]


def _remove_if_empty(folders: Sequence[Path], process: int) -> bool:
    # Parent directories are removed only if they are empty as well: `rmdir` raises otherwise.
    if os.getpid() == process:  # a forked child must not remove the parent's directory
        with suppress(OSError):
            for folder in folders:
                folder.rmdir()
    return not folders[0].exists()


class DirectoryTracker(Tracker):
    """Base class of trackers that write files into a run directory, such as event files and `hparams.yaml`.

    Args:
        save_dir: The root directory of all runs.
        name: The name of the experiment, a directory in `save_dir`.
        version: The number of the run, for a directory `version_<n>`, or the name of its directory. If None, the next
            free number.
        prefix: A prefix for the names of all values, joined by `-`.
    """

    in_background = False  # writing files is fast

    def __init__(
        self,
        save_dir: str | os.PathLike[str],
        name: str | None = "drivetrain_logs",
        version: int | str | None = None,
        prefix: str = "",
    ) -> None:
        self.run_directory = RunDirectory(save_dir, name, version)
        self._prefix = f"{prefix}-" if prefix else ""
        self._hyperparameters: dict[str, Any] = {}

    @classmethod
    def for_run(cls, save_dir: str | os.PathLike[str], project: str | None, **options: Any) -> Tracker:
        given = {"save_dir": save_dir} if project is None else {"save_dir": save_dir, "name": project}
        return cls(**{**given, **options})

    @property
    def save_dir(self) -> str:
        return self.run_directory.save_dir

    @property
    def version(self) -> int | str:
        return self.run_directory.version

    @property
    def log_dir(self) -> str:
        """The path of this run's directory.

        Only the value of the main process is reliable. Another process may read it when the directory already exists,
        and would then find the next number.
        """
        return str(self.run_directory.path)

    def state_dict(self) -> dict[str, Any]:
        self.save()
        return {"version": self.version}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.finish()
        if not self.run_directory.resume(state.get("version")):
            return
        written = self.run_directory.path / "hparams.yaml"
        if written.is_file():
            import yaml

            try:
                found = load_yaml(written.read_text(encoding="utf-8"))
            except (OSError, ValueError, yaml.YAMLError) as error:
                logger.warning(f"{written} cannot be read, so it is replaced: {error}.")
                found = None
            self._hyperparameters = found if isinstance(found, dict) else {}
        self._resume_from(state)

    def _checked(self, state: Mapping[str, Any], key: str, kind: type) -> Any:
        value = state.get(key)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise CheckpointError(
                f"The state of {type(self).__name__} in this checkpoint has {key}={value!r}, but {key} "
                f"must be of type {kind.__name__}."
            )
        return value

    def _resume_from(self, state: Mapping[str, Any]) -> None:
        # Subclasses remove the values that were logged after the checkpoint was saved.
        ...

    def finalize(self, status: str = COMPLETED, message: str = "") -> None:
        # Files stay open after a completed run, for later test results.
        if STATUS_WORDS.get(status, status) == COMPLETED:
            self.save()
        else:
            self.finish()

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        self._hyperparameters.update(Secrets().hide(plain(values)))
        import yaml

        target = self.run_directory.create() / "hparams.yaml"
        beside = target.with_name(f".{target.name}.{os.getpid()}")
        beside.write_text(yaml.safe_dump(self._hyperparameters, sort_keys=False, allow_unicode=True), encoding="utf-8")
        os.replace(beside, target)
