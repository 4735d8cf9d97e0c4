"""What a file in Lightning's format holds under a key of this package: everything that Lightning has no place for.

With it a run resumes from the file as exactly as from a directory: the order of the epoch under way, random states and
open means of every process, the run's counters. The values are packed as those of a directory are, so that the file
opens with `weights_only`, and everything in it is checked when it is read.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from drivetrain.checkpoint.lightning_keys import key_here, key_there
from drivetrain.checkpoint.manifest import LOSS_IS_FINITE
from drivetrain.checkpoint.tree import pack, unpack
from drivetrain.runtime.errors import CheckpointError, DamagedCheckpointError

KEY = "drivetrain"
"""The entry of the file."""

FORMAT = "drivetrain.lightning_file"
VERSION = 1

_ELSEWHERE = ("hyper_parameters", "datamodule_hyper_parameters", "hparams_name", "hooks", "callbacks", "datamodule")


def packed(state: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """State as plain values and one flat dict of tensors on the CPU.

    Args:
        state: Nested dicts and lists of plain values and tensors.
        path: Where it is, for messages.

    Raises:
        CheckpointError: Something in it is neither.
    """
    tree, tensors = pack(dict(state), path)
    return {"tree": tree, "tensors": {name: tensor.cpu() for name, tensor in tensors.items()}}


def extras_of(
    shared: Mapping[str, Any],
    content: Mapping[str, Any],
    processes: Sequence[Mapping[str, Any]],
    datamodule: str | None,
) -> dict[str, Any]:
    """The entry under `KEY`.

    Args:
        shared: The shared state of a run, in the schema of `drivetrain.checkpoint.manifest`.
        content: What the file holds in Lightning's own entries.
        processes: What each process keeps of its own, packed.
        datamodule: The entry that the data module's state is in, if it is in one.
    """
    engine, driver = shared["engine"], shared["driver"]
    there = content.get("callbacks", {})
    rest = {
        "engine": {name: engine[name] for name in ("loaders", "registered", "precision", "classes") if name in engine},
        "driver": {name: value for name, value in driver.items() if name not in _ELSEWHERE},
        # Lightning keeps scores as tensors of 32 bits, and less than this package in all.
        "callbacks": {
            key: state for key, state in driver.get("callbacks", {}).items() if there.get(key_there(key)) is not state
        },
        "hparams_name": driver.get("hparams_name"),
        "datamodule": datamodule,
        "kept": list(shared.get("kept", ())),
    }
    return {
        "format": FORMAT,
        "version": VERSION,
        "world_size": len(processes),
        "step": driver.get("progress", {}).get("global_step"),
        "saved_at": time.time(),
        "finite_loss": driver.get(LOSS_IS_FINITE) is not False,
        "shared": packed(rest),
        "processes": list(processes),
    }


@dataclass(frozen=True)
class Extras:
    """The entry under `KEY`, read.

    Attributes:
        name: The file, for messages.
        world_size: How many processes wrote it.
        step: The optimizer step, if known.
        saved_at: When, in seconds since the epoch.
        finite_loss: Whether every loss since the save before was finite.
        entry: The whole entry.
    """

    name: str
    world_size: int
    step: int | None
    saved_at: float
    finite_loss: bool
    entry: Mapping[str, Any]

    @classmethod
    def of(cls, content: Any, name: str) -> Extras | None:
        """Read the entry of a file, or None where it has none of this package.

        Args:
            content: What the file holds.
            name: The file, for messages.

        Raises:
            CheckpointError: The entry is damaged, or of a newer version.
        """
        entry = content.get(KEY) if isinstance(content, Mapping) else None
        if not isinstance(entry, Mapping) or entry.get("format") != FORMAT:
            return None
        if entry.get("version") != VERSION:
            raise CheckpointError(
                f"{name} holds version {entry.get('version')!r} of {KEY}'s entry; this drivetrain reads version "
                f"{VERSION}. Install the version of drivetrain that wrote it, or a later one."
            )
        step, saved_at, processes = entry.get("step"), entry.get("saved_at"), entry.get("processes")
        fits = isinstance(step, int | None) and isinstance(saved_at, int | float)
        if not isinstance(processes, list) or not processes or len(processes) != entry.get("world_size") or not fits:
            raise DamagedCheckpointError(f"{name} is damaged: its entry {KEY!r} is not what a run writes.")
        return cls(name, len(processes), step, float(saved_at or 0), entry.get("finite_loss") is True, entry)

    def own(self, rank: int) -> dict[str, Any]:
        """What a process kept of its own.

        Args:
            rank: Which process.
        """
        return self._unpacked(self.entry["processes"][rank])

    def added_to(self, shared: dict[str, Any], content: Mapping[str, Any]) -> dict[str, Any]:
        """The shared state of the run: what Lightning's entries give, and what only this one has.

        Lightning's entries win where a file was changed since: weights, optimizers and the step that it counts.

        Args:
            shared: From Lightning's entries.
            content: What the file holds.
        """
        rest = self._unpacked(self.entry.get("shared"))
        engine, driver, callbacks = (self._part(rest, name) for name in ("engine", "driver", "callbacks"))
        if "optimizers" not in shared["engine"]:
            engine = {name: engine[name] for name in ("classes",) if name in engine}
        found = {"engine": {**shared["engine"], **engine}, "driver": {**shared["driver"], **driver}}
        if self._part(driver, "progress").get("global_step") != shared["driver"]["progress"]["global_step"]:
            found["driver"]["progress"] = shared["driver"]["progress"]
        states = found["driver"].get("callbacks", {})
        ours = {spelled: state for key, state in callbacks.items() for spelled in (key_here(key), key)}
        found["driver"]["callbacks"] = {**states, **ours}
        found["driver"]["hparams_name"] = rest.get("hparams_name")
        found["driver"]["datamodule"] = content.get(str(rest.get("datamodule"))) or {}
        return {**found, "kept": list(rest.get("kept") or ())}

    def _part(self, state: Mapping[str, Any], name: str) -> dict[str, Any]:
        part = state.get(name)
        if not isinstance(part, dict):
            raise self._damaged()
        return part

    def _unpacked(self, state: Any) -> dict[str, Any]:
        tensors = state.get("tensors") if isinstance(state, Mapping) else None
        if not isinstance(tensors, Mapping) or not all(isinstance(each, Tensor) for each in tensors.values()):
            raise self._damaged()
        try:
            found = unpack(state.get("tree"), tensors.__getitem__, self.name)
        except KeyError as error:
            raise self._damaged() from error
        if not isinstance(found, dict):
            raise self._damaged()
        return found

    def _damaged(self) -> DamagedCheckpointError:
        return DamagedCheckpointError(f"{self.name} is damaged: its entry {KEY!r} is not what a run writes.")
