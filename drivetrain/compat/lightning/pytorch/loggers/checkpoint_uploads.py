"""Select the checkpoints that a logger uploads."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

_OPTIONS = ("monitor", "mode", "save_last", "save_top_k", "save_weights_only")
_COUNTED = ("epoch", "step")


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint to upload, with its score and options.

    Attributes:
        path: The file or directory.
        score: The monitored value, or None without `monitor`.
        is_best: True if it is the best checkpoint so far.
        options: Arguments of its `ModelCheckpoint`.
    """

    path: str
    score: float | int | None
    is_best: bool
    options: dict[str, Any]

    @property
    def aliases(self) -> list[str]:
        """Aliases of the upload: `latest`, and `best` for the best checkpoint."""
        return ["latest", "best"] if self.is_best else ["latest"]

    @property
    def metadata(self) -> dict[str, Any]:
        """Metadata of the upload: score, file name and callback options."""
        return {
            "score": self.score,
            "original_filename": os.path.basename(self.path),
            "ModelCheckpoint": self.options,
        }


class CheckpointUploads:
    """Collects the checkpoints that a run's callbacks save, each of them once."""

    def __init__(self, log_model: bool | str) -> None:
        self._log_model = log_model
        self._callbacks: list[Any] = []
        self._times: dict[str, float] = {}

    def after_save(self, callback: Any) -> list[SavedCheckpoint]:
        """Return the checkpoints to upload after a callback has saved."""
        if not self._log_model:
            return []
        if self._log_model == "all" or callback.save_top_k == -1:
            return self._new_of(callback)
        if all(each is not callback for each in self._callbacks):
            self._callbacks.append(callback)
        return []

    def at_end(self) -> list[SavedCheckpoint]:
        """Return the checkpoints to upload when the run ends."""
        return [saved for callback in self._callbacks for saved in self._new_of(callback)]

    def _new_of(self, callback: Any) -> list[SavedCheckpoint]:
        """Return the checkpoints of a callback that were not returned before, oldest first."""
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
    """Return a score as a float, or as an int if the metric counts epochs or steps."""
    if score is None:
        return None
    return int(score) if monitor in _COUNTED else float(score)
