"""How far a run has come, as Lightning's loops count it and as this package does.

Lightning counts batches and epochs as ready, started, processed and completed. A batch counts as done once it is
processed: what is saved in the hook of a batch's end is not completed yet, and Lightning itself completes it on the way
back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_EPOCHS = "epoch_progress"
_BATCHES = "epoch_loop.batch_progress"
_VALIDATION = "epoch_loop.val_loop.batch_progress"
_STEPS = "epoch_loop.automatic_optimization.optim_progress"
_STEPS_BY_HAND = "epoch_loop.manual_optimization.optim_step_progress"


def progress_of(found: Mapping[str, Any]) -> dict[str, Any]:
    """The counters of a run from a file of Lightning's.

    Args:
        found: Its content. Files of versions before 1.6, and those with the weights alone, may be without loops.

    Returns:
        The `progress` of a Trainer's checkpoint.
    """
    loops = found.get("loops")
    fit = loops.get("fit_loop") if isinstance(loops, Mapping) else None
    epoch, done, total, phase, is_validated = int(found.get("epoch", 0)), 0, 0, "BATCHES", True
    if isinstance(fit, Mapping) and _EPOCHS in fit and _BATCHES in fit:
        epochs, batches = fit[_EPOCHS]["current"], fit[_BATCHES]
        epoch = int(epochs["processed"])
        total = int(batches.get("total", {}).get("processed", 0))
        if epochs["started"] > epoch:  # within an epoch
            done = int(batches["current"]["processed"])
            phase = "SCHEDULED" if done and batches.get("is_last_batch") else "BATCHES"
            ends_batch = batches["current"]["completed"] < done
            # At an epoch's end the validation is run again: what it logged is not in the file, and callbacks watch it.
            is_validated = phase == "BATCHES" and not ends_batch and not _is_within_validation(fit)
    return {
        "global_step": int(found.get("global_step", 0)),
        "epoch": epoch,
        "batches_in_epoch": done,
        "total_batches": total,
        "validations": 0,
        "validated_at": total if is_validated else total - 1,
        "due_at": -1,
        "phase": phase,
    }


def _is_within_validation(fit: Mapping[str, Any]) -> bool:
    validation = fit.get(_VALIDATION)
    if not isinstance(validation, Mapping):
        return False
    current = validation["current"]
    return bool(current["ready"]) and not (current["completed"] == current["ready"] and validation["is_last_batch"])


def loops_of(progress: Mapping[str, Any], epoch_length: float = float("inf")) -> dict[str, Any]:
    """The `loops` of a file of Lightning's, from the counters of a Trainer's checkpoint.

    Args:
        progress: The counters.
        epoch_length: Batches of a process in an epoch, where it is known.
    """
    epoch, steps, total = progress["epoch"], progress["global_step"], progress["total_batches"]
    done, phase = progress["batches_in_epoch"], progress["phase"]
    is_between = phase == "BATCHES" and done == 0
    is_closed = is_between or phase == "CLOSING"
    is_last = phase != "BATCHES" or (is_between and total > 0) or done >= epoch_length
    # Lightning then turns to the next epoch at once, rather than to hooks that miss what the validation logged.
    ends_batch = not is_closed and (is_last or progress["validated_at"] != total)
    if is_between:
        epochs = _counts(epoch, epoch, epoch, epoch)
        done = total // epoch if epoch else 0
    else:
        processed = epoch + is_closed
        epochs = _counts(epoch + 1, epoch + 1, processed, epoch)
    fit = {
        "state_dict": {},
        "epoch_loop.state_dict": {"_batches_that_stepped": max(steps - ends_batch, 0)},
        _BATCHES: {
            **_both(_counts(done, done, done, done - ends_batch), _counts(total, total, total, total - ends_batch)),
            "is_last_batch": is_last,
        },
        "epoch_loop.scheduler_progress": _both(_ready(0), _ready(0)),
        "epoch_loop.automatic_optimization.state_dict": {},
        _STEPS: {
            "optimizer": {
                "step": _both(_ready(0), _ready(steps)),
                "zero_grad": _both(_started(0), _started(steps)),
            }
        },
        "epoch_loop.manual_optimization.state_dict": {},
        _STEPS_BY_HAND: _both(_ready(0), _ready(steps)),
        "epoch_loop.val_loop.state_dict": {},
        _VALIDATION: _no_batches(),
        _EPOCHS: {"total": dict(epochs), "current": dict(epochs)},
    }
    evaluation = {"state_dict": {}, "batch_progress": _no_batches()}
    predicting = {"state_dict": {}, "batch_progress": _both(_counts(0, 0, 0, 0), _counts(0, 0, 0, 0))}
    return {
        "fit_loop": fit,
        "validate_loop": evaluation,
        "test_loop": {"state_dict": {}, "batch_progress": _no_batches()},
        "predict_loop": predicting,
    }


def _counts(ready: int, started: int, processed: int, completed: int) -> dict[str, int]:
    return {"ready": ready, "completed": completed, "started": started, "processed": processed}


def _ready(count: int) -> dict[str, int]:
    return {"ready": count, "completed": count}


def _started(count: int) -> dict[str, int]:
    return {"ready": count, "completed": count, "started": count}


def _both(current: dict[str, int], total: dict[str, int]) -> dict[str, Any]:
    return {"total": total, "current": current}


def _no_batches() -> dict[str, Any]:
    return {**_both(_counts(0, 0, 0, 0), _counts(0, 0, 0, 0)), "is_last_batch": False}
