"""The state of Lightning's `ModelCheckpoint`, from its `.ckpt` files and for them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from drivetrain.callbacks.model_checkpoint import ModelCheckpoint


def from_lightning(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state in the form of this package, where it is of Lightning; else as it is.

    Args:
        state: As it was saved. Nothing in it is trusted yet: what becomes of it is checked as any other.
    """
    best = state.get("best_k_models")
    if not isinstance(best, Mapping):
        return dict(state)
    newest = state.get("best_model_path") or ""
    last = state.get("last_model_path") or ""
    score = state.get("current_score")
    # Without a metric Lightning keeps its only checkpoint by its path alone.
    scores = [[path, _number(value)] for path, value in best.items()] or ([[newest, 0.0]] if newest else [])
    return {
        "best_k_models": scores,
        "newest_of_best": newest,
        "last_model_path": last,
        "newest_model_path": next(reversed(best), newest),
        "beside": "",
        "passing": [],
        "doomed": [],
        "dirpath": state.get("dirpath"),
        "below_root": None,
        "current_score": None if score is None else _number(score),
        "validations": 0,
        "judged": 0,
        "last_step": 0,
        "waits_for_validation": False,
        "elapsed": 0.0,
    }


def to_lightning(callback: ModelCheckpoint) -> dict[str, Any]:
    """The state as Lightning's `ModelCheckpoint` keeps it.

    Of the checkpoints that were kept, no directories are named: Lightning does not open those of this package.

    Args:
        callback: The callback.
    """
    # One that is being written is not there yet.
    files = {
        path: torch.tensor(float(score)) for path, score in callback.kept_scores.items() if not os.path.isdir(path)
    }
    best, kth, last = (
        "" if os.path.isdir(path) else path
        for path in (callback.best_model_path, callback.kth_best_model_path, callback.last_model_path)
    )
    worst = torch.tensor(float("inf" if callback.mode == "min" else "-inf"))
    score = callback.current_score
    return {
        "monitor": callback.monitor,
        "best_model_score": callback.best_model_score if best else None,
        "best_model_path": best,
        "current_score": None if score is None else torch.tensor(float(score)),
        "dirpath": callback.dirpath,
        "best_k_models": files if callback.monitor is not None else {},
        "kth_best_model_path": kth if callback.monitor is not None else "",
        "kth_value": files.get(kth, worst) if callback.monitor is not None else worst,
        "last_model_path": last,
    }


def _number(value: Any) -> Any:
    """A number that was saved as a tensor; anything else as it is."""
    return float(value) if isinstance(value, torch.Tensor) and value.numel() == 1 else value
