"""`SpikeDetection`: stop training at a loss spike, and record which batches to skip."""

from __future__ import annotations

import json
import math
import os
from collections import deque
from pathlib import Path
from typing import Any

from torch import Tensor

from drivetrain.runtime.collectives import gather_object
from drivetrain.runtime.errors import ConfigurationError

FILE = "skip_batches.json"


class TrainingSpikeException(RuntimeError):
    """Raised when a loss is far from the recent ones."""

    def __init__(self, batch_idx: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(f"Training spike detected in batch {batch_idx}", *args, **kwargs)
        self.batch_idx = batch_idx


class SpikeDetection:
    """Raise `TrainingSpikeException` if any rank's loss is far from the recent mean. Records the batch index.

    The batch before it counts too, since its step may be what spoilt the weights.

    Attributes:
        bad_batches: The numbers of batches to leave out.
    """

    def __init__(
        self,
        mode: str = "min",
        window: int = 10,
        warmup: int = 1,
        atol: float | None = None,
        rtol: float | None = 2.0,
        exclude_batches_path: str | os.PathLike[str] | None = None,
        finite_only: bool = True,
    ) -> None:
        if mode not in ("min", "max"):
            raise ConfigurationError(f"SpikeDetection(mode={mode!r}): give 'min' or 'max'.")
        self.mode, self.warmup, self.atol, self.rtol = mode, warmup, atol, rtol
        self.finite_only = finite_only
        self.exclude_batches_path = exclude_batches_path
        self.bad_batches: list[int] = []
        self._last: deque[float] = deque(maxlen=window)

    def on_train_batch_end(self, fabric: Any, loss: Tensor, batch: Any, batch_idx: int) -> None:
        """Check the loss of a batch. Call it on all processes."""
        value = float(loss)
        mine = batch_idx >= self.warmup and self._is_far(value)
        if not any(gather_object([mine])):
            if math.isfinite(value):  # other values in the mean would hide later spikes
                self._last.append(value)
            return
        self.bad_batches += [batch_idx - 1, batch_idx]
        if fabric.is_global_zero:
            path = self._file()
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(self.bad_batches, indent=4))
        raise TrainingSpikeException(batch_idx)

    def _is_far(self, value: float) -> bool:
        if self.finite_only and not math.isfinite(value):
            return True
        if not self._last:
            return False
        mean = sum(self._last) / len(self._last)
        worse_by = value - mean if self.mode == "min" else mean - value
        bounds = [self.atol, None if self.rtol is None else abs(self.rtol * mean)]
        return worse_by > 0 and all(worse_by >= bound for bound in bounds if bound is not None)

    def _file(self) -> Path:
        path = Path(self.exclude_batches_path or os.getcwd())
        return path if path.suffix == ".json" else path / FILE

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"bad_batches": self.bad_batches, "last": list(self._last)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state from a checkpoint."""
        self.bad_batches = list(state_dict["bad_batches"])
        self._last.clear()
        self._last.extend(state_dict["last"])
