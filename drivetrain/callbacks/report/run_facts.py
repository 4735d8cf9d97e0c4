"""Facts about a run for `run.json`: command, commit, configuration, environment and data."""

from __future__ import annotations

import hashlib
import math
import os
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from drivetrain.callbacks.model_summary import count_parameters
from drivetrain.checkpoint.storage import boot_id, started_at, started_since_boot
from drivetrain.runtime.devices import get_device_kind
from drivetrain.runtime.exports import package_version
from drivetrain.runtime.seeds import recorded_seed
from drivetrain.trackers.base import first_line, flatten, plain
from drivetrain.trackers.directory import RunDirectory
from drivetrain.trackers.index import command, words_of_command
from drivetrain.trackers.secrets import HIDDEN

if TYPE_CHECKING:
    from drivetrain.trainer.task import Task
    from drivetrain.trainer.trainer import Trainer


# Packages whose versions are recorded if the script has imported them.
_PACKAGES = (
    "numpy",
    "torchvision",
    "transformers",
    "datasets",
    "timm",
    "torchmetrics",
    "deepspeed",
    "lightning",
    "sklearn",
)
_NOT_SHOWN = {"default_root_dir"}
_NOT_SETTINGS = {"params", "param_names", "initial_lr"}
_JSON = (bool, int, float, str, list, dict)


def facts_of(trainer: Trainer, task: Task) -> dict[str, Any]:
    """Return the command, settings and environment of a run as a dict, for its report."""
    secrets = trainer.tracker_group.secrets
    owners = [each for each in (trainer.datamodule, task) if each is not None]
    given = {name: value for owner in owners for name, value in owner.hparams.items()}
    words = words_of_command()
    shown = secrets.in_text(_shown_command(tuple(words)))
    is_whole = HIDDEN not in shown
    return {
        "command": shown,
        # A command with a hidden secret cannot be run again.
        "argv": words if is_whole and _can_start_again(trainer) else None,
        "cwd": os.getcwd(),
        "process": _process(),
        "hyper_parameters": flatten(secrets.hide(plain(given))),
        "trainer": secrets.hide(plain(_settings(trainer))),
        "optimizers": secrets.hide([_optimizer(each) for each in trainer.optimizers]),
        "model": _model(trainer, task),
        "data": _data(trainer),
        "environment": _environment(trainer),
        "commit": commit_of(os.getcwd()),
    }


def _can_start_again(trainer: Trainer) -> bool:
    # Under another launcher, such as torchrun, the process knows only its own command, not that of the run.
    return trainer.world_size == 1 or trainer.strategy.topology.environment.source == "drivetrain launch"


@cache
def _shown_command(words: tuple[str, ...]) -> str:
    return command()


@cache
def _process() -> dict[str, Any]:
    started = {"started": started_at(), "since_boot": started_since_boot(), "boot": boot_id()}
    return {"host": platform.node(), "id": os.getpid(), **started}


def _settings(trainer: Trainer) -> dict[str, Any]:
    options = trainer.options
    changed = {
        each.name: getattr(options, each.name)
        for each in fields(options)
        if getattr(options, each.name) != each.default and each.name not in _NOT_SHOWN
    }
    seed = recorded_seed()
    return {
        "strategy": trainer.strategy.name,
        "precision": trainer.precision,
        "processes": trainer.world_size,
        # Durations have a short text, such as "10 min".
        **{name: value if isinstance(value, _JSON) else str(value) for name, value in changed.items()},
        **({} if seed is None else {"seed": seed}),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "callbacks": [type(each).__name__ for each in trainer.callbacks],
        "trackers": [type(each).__name__ for each in trainer.loggers],
    }


def _optimizer(optimizer: Any) -> dict[str, Any]:
    groups = [{**group, "lr": group["initial_lr"]} if "initial_lr" in group else group for group in _groups(optimizer)]
    found: dict[str, Any] = {"class": type(optimizer).__name__}
    for name in dict.fromkeys(name for group in groups for name in group if name not in _NOT_SETTINGS):
        values = [plain(group.get(name)) for group in groups]
        value = values[0] if all(each == values[0] for each in values) else values
        if value is not None and value is not False:
            found[name] = value
    return found


def _groups(optimizer: Any) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = getattr(optimizer, "param_groups", [])
    return groups


def _model(trainer: Trainer, task: Task) -> dict[str, Any]:
    counted = count_parameters(task, trainer.strategy.state)
    return {"task": type(task).__name__, "parameters": counted.elements, "trained_parameters": counted.trained}


def _data(trainer: Trainer) -> dict[str, dict[str, Any]]:
    found = {}
    validation = trainer.num_val_batches
    for name, loaders, batches in (
        ("training", trainer.train_dataloader, trainer.num_training_batches),
        ("validation", trainer.val_dataloaders, sum(validation) if validation else math.nan),
    ):
        several = list(loaders.values()) if isinstance(loaders, Mapping) else loaders
        several = several if isinstance(several, list | tuple) else [several]
        given = [each for each in several if each is not None]
        sizes: dict[str, list[Any]] = {
            "samples": [_samples(each) for each in given],
            "batch_size": [
                size if isinstance(size := getattr(each, "batch_size", None), int) else None for each in given
            ],
        }
        part = {key: each[0] if len(each) == 1 else each for key, each in sizes.items() if any(each)}
        if math.isfinite(batches):
            # the batches of one process
            part["batches"] = int(batches)
        if part:
            found[name] = part
    return found


def _samples(loader: Any) -> int | None:
    try:
        return len(loader.dataset)
    except (AttributeError, TypeError, NotImplementedError):
        return None


def _environment(trainer: Trainer) -> dict[str, Any]:
    device = trainer.strategy.topology.device
    return {"device": get_device_kind(device.type).describe(device), **_versions()}


@cache
def _versions() -> dict[str, Any]:
    found: dict[str, Any] = {
        "drivetrain": package_version(),
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpus": os.cpu_count(),
    }
    for name in _PACKAGES:
        version = getattr(sys.modules.get(name), "__version__", None)
        if isinstance(version, str):
            found[name] = version
    return found


# Name


_ADJECTIVES = (
    "amber brave bright calm clear cool crisp deep early eager fair fast fine fresh gentle golden green happy "
    "honest keen kind lively lucky mellow neat noble plain proud quick quiet rapid ready silver smart solid spry "
    "still sunny swift warm"
)
_NOUNS = (
    "badger beaver bison brook cedar cliff comet crane delta falcon fern finch fjord forest fox glacier harbor "
    "hawk heron island lake lark lynx maple meadow otter owl pine raven reef ridge river robin sparrow summit "
    "tiger valley willow wren"
)
_DEFAULT_NAMES = ("", "drivetrain_logs", "lightning_logs")


def generated_name(directory: RunDirectory) -> str:
    """Return a readable name for a run, such as `digits-brave-otter-3`.

    A version that the user has named replaces words and number.
    """
    experiment, version = directory.name, directory.version
    words = str(version)
    if isinstance(version, int) or words.startswith("version_"):
        # Not from the `random` module, whose state belongs to the user.
        digest = hashlib.sha256(f"{directory.path.absolute()} {time.time_ns()}".encode()).digest()
        lists = (_ADJECTIVES.split(), _NOUNS.split())
        chosen = [each[digest[index] % len(each)] for index, each in enumerate(lists)]
        words = "-".join([*chosen, words.removeprefix("version_")])
    return words if experiment in _DEFAULT_NAMES else f"{experiment}-{words}"


# Errors


_LIBRARIES = (os.path.dirname(os.__file__), str(Path(__file__).parents[2]))


def reason_of(error: BaseException) -> str:
    first, text = first_line(error), str(error).strip()
    if "\nOriginal Traceback" not in text:
        return first
    # The first line is such as "ValueError: Caught ValueError in DataLoader worker process 0."
    # The last line is the original error of the loader's worker.
    return f"{text.splitlines()[-1]} (in {first.partition(' in ')[2].rstrip('.')})"


def place_of(error: BaseException) -> str:
    """Return the place in the user's code where an error was raised, or ""."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [each for each in frames if not each.filename.startswith(_LIBRARIES) and "-packages" not in each.filename]
    return f"{own[-1].filename}:{own[-1].lineno}, in {own[-1].name}" if own else ""


# Commit


@cache
def commit_of(folder: str) -> dict[str, Any] | None:
    """Return the git commit and branch of a folder, or None outside of a repository."""
    try:
        # Reading git's files is much faster than starting git, which `is_changed` does later.
        git = _git_directory(Path(folder))
        if git is None:
            return None
        head = (git / "HEAD").read_text(encoding="utf-8").strip()
        # A detached HEAD holds a commit ID instead of a branch.
        if not head.startswith("ref: "):
            return {"id": head, "branch": "", "changed": None}
        name = head.removeprefix("ref: ")
        return {"id": _resolve(git, name), "branch": name.removeprefix("refs/heads/"), "changed": None}
    except OSError:
        return None


@cache
def is_changed(folder: str) -> bool | None:
    """Return True if a git repository has uncommitted changes, or None if unknown."""
    command = ["git", "--no-optional-locks", "status", "--porcelain", "--untracked-files=no"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return bool(done.stdout.strip())


def _git_directory(folder: Path) -> Path | None:
    for each in (folder, *folder.parents):
        there = each / ".git"
        if there.is_dir():
            return there
        if there.is_file():  # a worktree or a submodule
            return (each / there.read_text(encoding="utf-8").strip().removeprefix("gitdir: ")).resolve()
    return None


def _resolve(git: Path, name: str) -> str:
    """Return the commit ID of a git reference, or an empty string."""
    # A worktree keeps its branches in the directory of the main repository.
    common = git / "commondir"
    places = [git, (git / common.read_text(encoding="utf-8").strip()).resolve()] if common.is_file() else [git]
    for place in places:
        if (place / name).is_file():
            return (place / name).read_text(encoding="utf-8").strip()
    for place in places:
        packed = place / "packed-refs"
        for line in packed.read_text(encoding="utf-8").splitlines() if packed.is_file() else []:
            if line.endswith(f" {name}"):
                return line.split()[0]
    return ""
