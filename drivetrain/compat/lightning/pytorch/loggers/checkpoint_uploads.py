"""Which checkpoints a logger keeps with its run."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

_OPTIONS = ("monitor", "mode", "save_last", "save_top_k", "save_weights_only")
_COUNTED = ("epoch", "step")


@dataclass(frozen=True)
class SavedCheckpoint:
    """One checkpoint that is to be kept.

    Attributes:
        path: The file or directory.
        score: The monitored value, None where nothing is monitored.
        is_best: Whether it is the best one so far.
        options: How its `ModelCheckpoint` was made.
    """

    path: str
    score: float | int | None
    is_best: bool
    options: dict[str, Any]

    @property
    def aliases(self) -> list[str]:
        """The words under which it can be asked for."""
        return ["latest", "best"] if self.is_best else ["latest"]

    @property
    def metadata(self) -> dict[str, Any]:
        """What is recorded of it."""
        return {
            "score": self.score,
            "original_filename": os.path.basename(self.path),
            "ModelCheckpoint": self.options,
        }


class CheckpointUploads:
    """Finds what the checkpoint callbacks of a run have saved, each checkpoint once."""

    def __init__(self, log_model: bool | str) -> None:
        self._log_model = log_model
        self._callbacks: list[Any] = []
        self._times: dict[str, float] = {}

    def after_save(self, callback: Any) -> list[SavedCheckpoint]:
        """What is to be kept now that a callback has saved."""
        if not self._log_model:
            return []
        if self._log_model == "all" or callback.save_top_k == -1:
            return self._new_of(callback)
        if all(each is not callback for each in self._callbacks):
            self._callbacks.append(callback)
        return []

    def at_end(self) -> list[SavedCheckpoint]:
        """What is to be kept when the run ends."""
        return [saved for callback in self._callbacks for saved in self._new_of(callback)]

    def _new_of(self, callback: Any) -> list[SavedCheckpoint]:
        """What a callback has saved and was not found yet, the oldest first."""
        scores = {
            callback.last_model_path: callback.current_score,
            callback.best_model_path: callback.best_model_score,
            **callback.best_k_models,
        }
        times = {path: os.path.getmtime(path) for path in scores if path and os.path.exists(path)}
        new = [path for path, time in times.items() if self._times.get(path, -1.0) < time]
        self._times.update(times)
        options = {name: getattr(callback, name) for name in _OPTIONS}
        options |= {"save_last": callback.save_last or None, "_every_n_train_steps": callback.every_n_train_steps or 0}
        return [
            SavedCheckpoint(
                path, _number(scores[path], callback.monitor), path == callback.best_model_path, dict(options)
            )
            for path in sorted(new, key=lambda path: (times[path], path))
        ]


def _number(score: Any, monitor: str | None) -> float | int | None:
    """A score as a number, a whole one where epochs or steps are counted."""
    if score is None:
        return None
    return int(score) if monitor in _COUNTED else float(score)
