"""What is run: command, commit, configuration, environment and data, as `run.json` holds them."""

from __future__ import annotations

import math
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from drivetrain.callbacks.model_summary import count_parameters
from drivetrain.callbacks.report.record import number
from drivetrain.runtime.devices import get_device_kind
from drivetrain.runtime.exports import package_version
from drivetrain.runtime.host import boot_id, started_at, started_since_boot
from drivetrain.runtime.seeds import recorded_seed
from drivetrain.runtime.timing import Timing
from drivetrain.trackers.base import flatten, plain
from drivetrain.trackers.index import command, words_of_command
from drivetrain.trackers.secrets import HIDDEN

if TYPE_CHECKING:
    from drivetrain.trainer.task import Task
    from drivetrain.trainer.trainer import Trainer


# Packages whose version explains a result, where a script has imported them.
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
    """What is run, in the parts of the page, without secrets. Nothing of it changes while it runs.

    Args:
        trainer: The trainer, which is about to train.
        task: The task.
    """
    secrets = trainer.tracker_group.secrets
    owners = [each for each in (trainer.datamodule, task) if each is not None]
    given = {name: value for owner in owners for name, value in owner.hparams.items()}
    words = words_of_command()
    shown = secrets.in_text(_shown_command(tuple(words)))
    is_whole = HIDDEN not in shown
    return {
        "command": shown,
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
    """Whether the command that is known is that of the whole run: a launcher that is not ours has its own."""
    return trainer.world_size == 1 or trainer.strategy.topology.environment.source == "drivetrain launch"


@cache
def _shown_command(words: tuple[str, ...]) -> str:
    """The command without secrets; of the same words it is the same in all runs of a process."""
    return command()


@cache
def _process() -> dict[str, Any]:
    started = {"started": started_at(), "since_boot": started_since_boot(), "boot": boot_id()}
    return {"host": platform.node(), "id": os.getpid(), **started}


def _settings(trainer: Trainer) -> dict[str, Any]:
    """How the Trainer differs from one without arguments, and what it runs on."""
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
    """The seed, and whether only deterministic algorithms may run."""
    seed = recorded_seed()
    found = {} if seed is None else {"seed": str(seed)}
    return found | ({"deterministic": "True"} if torch.are_deterministic_algorithms_enabled() else {})


def _of_groups(trainer: Trainer) -> dict[str, str]:
    """The optimizers' learning rates before any schedule, and their weight decay."""
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
    """How much data each stage has."""
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


# the commit


@cache
def commit_of(folder: str) -> dict[str, Any] | None:
    """The commit that is checked out around a folder, read from git's own files; None outside of a repository.

    Args:
        folder: The folder.
    """
    try:
        git = _git_directory(Path(folder))
        if git is None:
            return None
        head = (git / "HEAD").read_text(encoding="utf-8").strip()
        if not head.startswith("ref: "):
            return {"id": head, "branch": "", "changed": None}
        name = head.removeprefix("ref: ")
        return {"id": _resolve(git, name), "branch": name.removeprefix("refs/heads/"), "changed": None}
    except OSError:
        return None


@cache
def is_changed(folder: str) -> bool | None:
    """Whether files that git tracks differ from the commit; None where git is missing or takes too long.

    Args:
        folder: The folder.
    """
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
        if there.is_file():  # a worktree, or a submodule
            return (each / there.read_text(encoding="utf-8").strip().removeprefix("gitdir: ")).resolve()
    return None


def _resolve(git: Path, name: str) -> str:
    """The commit of a branch; those of a worktree are in the repository that it is of."""
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


# A sentence about where the time of a run went, and what to change


NOTICEABLE = 0.2  # the share of the time from which something around the model is worth changing


@dataclass(frozen=True)
class TimeSpent:
    """Where the time of training went, in seconds of one process.

    Attributes:
        total: All of it.
        waiting: Waiting for the training loader.
        model: Forward, backward and the optimizers.
        validating: Validations, with their loaders.
        saving: Saving checkpoints.
        syncing: Waiting for other processes.
        callbacks: The hooks of each callback, or of the task, by its name.
        samples: Samples that this process trained on in that time; None where the loader does not count them.
        workers: The loader's worker processes; None where it has none to set.
        cores: The processor's cores for each process of this machine.
    """

    total: float
    waiting: float = 0.0
    model: float = 0.0
    validating: float = 0.0
    saving: float = 0.0
    syncing: float = 0.0
    callbacks: Mapping[str, float] = field(default_factory=dict)
    samples: int | None = None
    workers: int | None = None
    cores: int = 1

    @classmethod
    def of(
        cls,
        timing: Timing,
        samples: int | None,
        workers: int | None,
        cores: int,
        callbacks: Mapping[str, float] | None = None,
    ) -> TimeSpent:
        """What a `Timing` has measured.

        Args:
            timing: The timing.
            samples: See the attribute, as the following.
            workers: The loader's.
            cores: Of the processor.
            callbacks: By name, where something else has measured each; all together if None.
        """
        seconds = timing.seconds
        named = {"callbacks, which profiler='simple' names": seconds["callbacks"]} if callbacks is None else callbacks
        return cls(
            timing.total_seconds,
            waiting=seconds["data"],
            model=seconds["forward"] + seconds["backward"] + seconds["optimizer"],
            validating=seconds["evaluation"],
            saving=seconds["checkpoint"],
            syncing=seconds["sync"],
            callbacks=named,
            samples=samples,
            workers=workers,
            cores=cores,
        )

    def verdict(self) -> str:
        """What takes the time, in one line; empty where nothing was measured."""
        if self.total <= 0:
            return ""
        name, most = max(self.callbacks.items(), key=lambda item: item[1], default=("", 0.0))
        # Waiting is seen against training alone: a validation has its own loader.
        training = max(self.total - self.validating - self.saving, 1e-12)
        found = [
            (self.waiting / self.total, self._about_data(self.waiting / training)),
            (
                self.validating / self.total,
                f"{_percent(self.validating / self.total)} of the time is validation: validate less often "
                "(check_val_every_n_epoch, val_check_interval), on fewer batches (limit_val_batches) or larger ones.",
            ),
            (
                self.saving / self.total,
                f"{_percent(self.saving / self.total)} of the time is saving checkpoints: save less often "
                "(ModelCheckpoint(every_n_train_steps=...)), or beside training (async_save=True).",
            ),
            (
                self.syncing / self.total,
                f"{_percent(self.syncing / self.total)} of the time waits for other processes: see which is slow "
                "(StragglerMonitor), or exchange gradients less often (accumulate_grad_batches).",
            ),
            (
                most / self.total,
                f"{_percent(most / self.total)} of the time is in {name}: make it cheaper, or let it act less often.",
            ),
        ]
        share, sentence = max(found, key=lambda item: item[0])
        if share >= NOTICEABLE:
            return sentence
        if self.model <= 0:
            return (
                f"{_percent(self.waiting / training)} of the step waits for data: the loader keeps up with the model."
            )
        return (
            f"{_percent(self.model / self.total)} of the time is the model's own (forward, backward, optimizer), "
            f"{_percent(self.waiting / self.total)} waits for data: to be faster, the model must be."
        )

    def _about_data(self, share: float) -> str:
        first = f"{_percent(share)} of the step waits for data"
        advice = "make the dataset cheaper, such as by keeping what it computes"
        training = self.total - self.validating - self.saving
        computing = training - self.waiting
        if not self.samples or self.waiting <= 0 or computing <= 0:
            return f"{first}: {advice}, or give its loader more workers (num_workers)."
        # Workers load while the model computes; without them the two take turns.
        loads_for = training if self.workers else self.waiting
        loader, model = self.samples / loads_for, self.samples / computing
        if self.workers is None:
            return f"{first}: the loader gives {_rate(loader)} samples/s, the model takes {_rate(model)}; {advice}."
        # One more than what would be just enough: handing batches over takes the time of this process, too.
        wanted = math.ceil(max(self.workers, 1) * model / loader) + 1
        sentence = (
            f"{first}: the loader gives {_rate(loader)} samples/s with {self.workers} workers, "
            f"the model takes {_rate(model)}; try num_workers={wanted}"
        )
        if wanted <= self.cores:
            return f"{sentence}."
        return (
            f"{sentence}. This process has {self.cores} core{'s' * (self.cores != 1)}: where loading computes rather "
            f"than waits for files, {advice}."
        )


def _percent(share: float) -> str:
    return f"{min(max(share, 0.0), 1.0) * 100:.0f} %"


def _rate(value: float) -> str:
    """A rate in three digits, such as 2,400."""
    digits = 2 - math.floor(math.log10(value)) if value > 0 else 0
    rounded = round(value, digits)
    return f"{rounded:,.0f}" if digits <= 0 else f"{rounded:,.{digits}f}"
