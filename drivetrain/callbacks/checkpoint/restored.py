"""What a checkpoint holds about the other checkpoints of its run: names within one directory, never paths.

A checkpoint may come from anywhere, and what a `ModelCheckpoint` restores decides what is removed and replaced. So
nothing of it is taken but names of checkpoints in the directory that this run saves in, and numbers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from drivetrain.runtime.errors import CheckpointError


@dataclass(frozen=True)
class RestoredState:
    """The state of a `ModelCheckpoint` from a checkpoint, checked.

    Attributes:
        saved_in: The directory of the checkpoints then; only ever compared with those of this run.
        below_root: That directory as seen from the run's default directory; None where it was not below it.
        scores: Names and scores of the checkpoints kept.
        names: Other names by the field of `KeptCheckpoints`.
        lists: Lists of names by the field of `KeptCheckpoints`.
    """

    saved_in: str
    below_root: str | None
    scores: dict[str, float]
    names: dict[str, str] = field(default_factory=dict)
    lists: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> RestoredState:
        """Check the state.

        Raises:
            CheckpointError: It holds what no run writes; the entry is named.
        """
        saved_in = state.get("dirpath") or ""
        if not isinstance(saved_in, str):
            raise _refused("dirpath", saved_in)
        below_root = state.get("below_root")
        if below_root is not None:
            below_root = _checked_name("below_root", below_root, "")
        scores: dict[str, float] = {}
        for pair in _list("best_k_models", state.get("best_k_models")):
            if not isinstance(pair, list | tuple) or len(pair) != 2 or not isinstance(pair[1], int | float):
                raise _refused("best_k_models", pair)
            scores[_checked_name("best_k_models", pair[0], saved_in)] = float(pair[1])
        names = {
            attribute: _checked_name(key, state.get(key), saved_in)
            for attribute, key in (
                ("newest_of_best", "newest_of_best"),
                ("last", "last_model_path"),
                ("newest", "newest_model_path"),
                ("beside", "beside"),
            )
        }
        lists = {
            key: [_checked_name(key, name, saved_in) for name in _list(key, state.get(key))]
            for key in ("passing", "doomed")
        }
        return cls(saved_in, below_root, scores, names, lists)

    def without(self, names: set[str]) -> RestoredState:
        """The same but for some names."""
        return RestoredState(
            self.saved_in,
            self.below_root,
            {name: score for name, score in self.scores.items() if name not in names},
            {key: "" if name in names else name for key, name in self.names.items()},
            {key: [name for name in listed if name not in names] for key, listed in self.lists.items()},
        )

    def leading_outside(self, directory: str) -> set[str]:
        """The names that a link in a local directory makes lead outside of it."""
        every = {*self.scores, *self.names.values(), *(name for listed in self.lists.values() for name in listed)}
        inside = os.path.realpath(directory) + os.sep
        return {name for name in every - {""} if not os.path.realpath(os.path.join(directory, name)).startswith(inside)}


def number(state: Mapping[str, Any], key: str, kind: type, optional: bool = False) -> Any:
    """A number of the state; an int where a float is asked for is one.

    Args:
        state: The state.
        key: Its name in it.
        kind: Int, float or bool.
        optional: Whether it may be None or missing.

    Raises:
        CheckpointError: It is something else.
    """
    value = state.get(key)
    if value is None and optional:
        return None
    allowed: tuple[type, ...] = (int, float) if kind is float else (kind,)
    if not isinstance(value, allowed) or (isinstance(value, bool) and kind is not bool):
        raise _refused(key, value)
    return value


def _checked_name(key: str, value: Any, saved_in: str) -> str:
    """A name within the directory of checkpoints, or an empty text."""
    if not isinstance(value, str):
        raise _refused(key, value)
    # Before there were names, there were paths within the directory.
    inside = saved_in.rstrip("/") + "/"
    name = value[len(inside) :] if saved_in and value.startswith(inside) else value
    if name and ("\0" in name or any(part in ("", ".", "..") for part in name.split("/"))):
        raise _refused(key, value)
    return name


def _list(key: str, value: Any) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise _refused(key, value)
    return list(value)


def _refused(key: str, value: Any) -> CheckpointError:
    return CheckpointError(
        f"The state of ModelCheckpoint in this checkpoint has {key}={value!r}, which no run writes: it takes names of "
        "checkpoints within one directory, and numbers. Do not resume from this checkpoint unless you know who made it."
    )
