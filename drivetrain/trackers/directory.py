"""Where trackers that write files put those of one run."""

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
    """The directory `<save_dir>/<name>/version_<n>` of one run.

    Without a version the next free number is taken, when the path is first asked for. Trackers of one run
    hold the same object, so their files lie in the same directory.

    A number is taken by making its directory, so that runs that start at the same moment never share one. One that
    stays empty is removed again.
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
        """The directory that holds the versions."""
        return Path(self.save_dir, self.name)

    @property
    def is_decided(self) -> bool:
        """Whether the version was given or has been looked up."""
        return self._version is not None

    @property
    def version(self) -> int | str:
        """The version of this run; looked up once, then it stays."""
        if self._version is None:
            self._version = self._take_version()
        return self._version

    @version.setter
    def version(self, version: int | str) -> None:
        self._version = version

    @property
    def path(self) -> Path:
        """The directory of this run, which may not be there yet."""
        version = self.version
        return self.root / (version if isinstance(version, str) else f"version_{version}")

    def resume(self, version: Any) -> bool:
        """Continue the directory of a run to resume, unless another version was asked for, or it is gone."""
        if self.is_given:
            return bool(self._version == version)
        is_number = type(version) is int and version >= 0
        is_name = isinstance(version, str) and "\0" not in version
        if not is_number and not (is_name and all(part not in ("", ".", "..") for part in version.split("/"))):
            raise CheckpointError(
                f"The state of a tracker in this checkpoint has version={version!r}, which no run writes: a version is "
                f"a number, or the name of a directory in {self.root}. Do not resume from this checkpoint unless you "
                "know who made it."
            )
        before, self._version, self._is_free_again = self._version, version, False
        if not self.path.is_dir():
            self._version = before
        elif not os.path.realpath(self.path).startswith(os.path.realpath(self.root) + os.sep):
            logger.warning(f"{self.path} leads out of {self.root}, so it is not continued; give version= to do so.")
            self._version = before
        return bool(self._version == version)

    def create(self) -> Path:
        """Make the directory unless it is there, list it in the index of runs, and return it."""
        if self._is_free_again and self.path.exists():
            self._version = None  # another run has taken the number meanwhile
        self._is_free_again = False
        path = self.path
        path.mkdir(parents=True, exist_ok=True)
        if not self._is_listed:
            self._is_listed = True
            if self.url is not None:
                logger.warning(
                    f"{self.url} is a URL, and trackers write local files: they are in {path.absolute()}. Checkpoints "
                    "go to a URL, that of default_root_dir or of ModelCheckpoint(dirpath=...)."
                )
            record_run(self.save_dir, path)
        return path

    def existing(self) -> list[Path]:
        """The directories of runs that are there, the newest first; only this run's where its version was given."""
        if self.is_given:
            return [self.path]
        return [self.root / f"version_{number}" for number in sorted(self._numbers(), reverse=True)]

    def _take_version(self) -> int:
        """Make the directory of the next free number, as the only one that does. Returns the number.

        On other processes than the main one nothing is made: the Trainer gives them the number of the main process.
        """
        number = max(self._numbers(), default=-1) + 1
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
            except OSError:  # it cannot be written to, which the writers report
                return number
            self._remove_empty = weakref.finalize(self, _remove_if_empty, [path, *made], os.getpid())
            return number

    def release(self) -> None:
        """Remove the directory if nothing was written to it."""
        if self._remove_empty is not None and self._remove_empty():
            self._is_free_again = True

    def _numbers(self) -> list[int]:
        if not self.root.is_dir():
            return []
        found = (_VERSION.fullmatch(entry.name) for entry in self.root.iterdir() if entry.is_dir())
        return [int(match[1]) for match in found if match]


def _remove_if_empty(folders: Sequence[Path], process: int) -> bool:
    """Remove directories that are empty, that of the run first. Returns whether that one is gone."""
    if os.getpid() == process:  # not in a process that was forked
        with suppress(OSError):
            for folder in folders:
                folder.rmdir()
    return not folders[0].exists()


class DirectoryTracker(Tracker):
    """A tracker that writes files into a `RunDirectory`, the hyper-parameters among them as `hparams.yaml`.

    Args:
        save_dir: The directory of all runs.
        name: The name of the experiment, a directory in `save_dir`.
        version: The run, a directory `version_<n>` (a text: as it is); the next free number without it.
        prefix: Put before the name of every value, with a `-` between.
    """

    in_background = False  # a file is fast

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
        """The directory of all runs."""
        return self.run_directory.save_dir

    @property
    def version(self) -> int | str:
        """The version of this run."""
        return self.run_directory.version

    @property
    def log_dir(self) -> str:
        """The directory of this run.

        On several processes only the main process's answer counts: another process may look when the
        directory is there already and would find the next number.
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
                logger.warning(f"{written} cannot be read, so it is written anew: {error}.")
                found = None
            self._hyperparameters = found if isinstance(found, dict) else {}
        self._resume_from(state)

    def _checked(self, state: Mapping[str, Any], key: str, kind: type) -> Any:
        """One entry of a checkpoint's state."""
        value = state.get(key)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise CheckpointError(
                f"The state of {type(self).__name__} in this checkpoint has {key}={value!r}, which is no "
                f"{kind.__name__}: no run writes it."
            )
        return value

    def _resume_from(self, state: Mapping[str, Any]) -> None:
        """Drop what was written into this run's directory after `state_dict` was called."""

    def finalize(self, status: str = COMPLETED, message: str = "") -> None:
        """Write what is left. The files stay open where the run is completed: values of the same step may follow."""
        if STATUS_WORDS.get(status, status) == COMPLETED:
            self.save()
        else:
            self.finish()

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Write the hyper-parameters to `hparams.yaml`, together with those given before, and without secrets."""
        self._hyperparameters.update(Secrets().hide(plain(values)))
        import yaml

        target = self.run_directory.create() / "hparams.yaml"
        beside = target.with_name(f".{target.name}.{os.getpid()}")
        beside.write_text(yaml.safe_dump(self._hyperparameters, sort_keys=False, allow_unicode=True), encoding="utf-8")
        os.replace(beside, target)
