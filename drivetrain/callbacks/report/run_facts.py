"""Facts about a run for `run.json`: command, commit, configuration, environment and data."""

from __future__ import annotations

import math
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from drivetrain.callbacks.model_summary import count_parameters
from drivetrain.callbacks.report.record import number
from drivetrain.checkpoint.storage import boot_id, started_at, started_since_boot
from drivetrain.runtime.devices import get_device_kind
from drivetrain.runtime.exports import package_version
from drivetrain.runtime.seeds import recorded_seed
from drivetrain.trackers.base import flatten, plain
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


def facts_of(trainer: Trainer, task: Task) -> dict[str, Any]:
    """Return what is known about a run at its start, such as command, settings, model and commit, without secrets."""
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
    return {
        "strategy": trainer.strategy.name,
        "precision": trainer.precision,
        "processes": trainer.world_size,
        **{name: str(value) for name, value in changed.items()},
        "callbacks": [type(each).__name__ for each in trainer.callbacks],
        "trackers": [type(each).__name__ for each in trainer.loggers],
        "optimizers": [type(each).__name__ for each in trainer.optimizers],
        **_randomness(),
        **_of_groups(trainer),
    }


def _randomness() -> dict[str, str]:
    seed = recorded_seed()
    found = {} if seed is None else {"seed": str(seed)}
    return found | ({"deterministic": "True"} if torch.are_deterministic_algorithms_enabled() else {})


def _of_groups(trainer: Trainer) -> dict[str, str]:
    """Return the initial learning rates and weight decays of all optimizers, as text for the report."""
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    values = {
        "optimizer lr": [group.get("initial_lr", group["lr"]) for group in groups if "lr" in group],
        "optimizer weight decay": [group["weight_decay"] for group in groups if "weight_decay" in group],
    }
    return {
        name: ", ".join(dict.fromkeys(f"{float(each):g}" for each in found)) for name, found in values.items() if found
    }


def _model(trainer: Trainer, task: Task) -> dict[str, str]:
    counted = count_parameters(task, trainer.strategy.state)
    parameters = {"parameters": f"{counted.elements:,}", "trained parameters": f"{counted.trained:,}"}
    return {"task": type(task).__name__, **parameters}


def _data(trainer: Trainer) -> dict[str, str]:
    found = {}
    validation = trainer.num_val_batches
    for name, loaders, batches in (
        ("training", trainer.train_dataloader, trainer.num_training_batches),
        ("validation", trainer.val_dataloaders, sum(validation) if validation else math.nan),
    ):
        several = list(loaders.values()) if isinstance(loaders, Mapping) else loaders
        several = several if isinstance(several, list | tuple) else [several]
        parts = [text for each in several if each is not None and (text := _loader(each))]
        if math.isfinite(batches):
            parts.append(f"{number(batches)} batches{' a process' if trainer.world_size > 1 else ''}")
        if parts:
            found[name] = ", ".join(parts)
    return found


def _loader(loader: Any) -> str:
    try:
        count = f"{len(loader.dataset):,} samples"
    except (AttributeError, TypeError, NotImplementedError):
        count = ""
    size = getattr(loader, "batch_size", None)
    return count + (f"{' in ' if count else ''}batches of {size}" if isinstance(size, int) else "")


def _environment(trainer: Trainer) -> dict[str, str]:
    device = trainer.strategy.topology.device
    return {"device": get_device_kind(device.type).describe(device), **_versions()}


@cache
def _versions() -> dict[str, str]:
    found = {
        "drivetrain": package_version(),
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
    }
    for name in _PACKAGES:
        version = getattr(sys.modules.get(name), "__version__", None)
        if isinstance(version, str):
            found[name] = version
    return found


# Commit


@cache
def commit_of(folder: str) -> dict[str, Any] | None:
    """Return the commit and branch of the git repository that contains a folder, or None outside of one."""
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
    """Return True if a git repository has uncommitted changes to tracked files, or None if git cannot tell."""
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
    """Return the commit ID of a git reference such as `refs/heads/main`, or an empty string if there is none."""
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
