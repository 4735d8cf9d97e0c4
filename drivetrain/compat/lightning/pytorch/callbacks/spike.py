"""`SpikeDetection` as a callback."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drivetrain.callbacks import Callback
from drivetrain.compat.lightning.fabric.utilities.spike import SpikeDetection as Detection
from drivetrain.compat.lightning.fabric.utilities.spike import TrainingSpikeException

__all__ = ["SpikeDetection", "TrainingSpikeException"]


class SpikeDetection(Detection, Callback):
    """Callback that raises `TrainingSpikeException` when a training loss is far from the recent mean.

    `drivetrain.LossSpikeGuard` instead returns to a checkpoint and skips the batches automatically.
    """

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if self.exclude_batches_path is None:
            self.exclude_batches_path = trainer.default_root_dir

    def on_train_batch_end(  # type: ignore[override]
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = outputs["loss"] if isinstance(outputs, Mapping) else outputs
        if loss is not None:
            super().on_train_batch_end(trainer, loss.detach(), batch, batch_idx)
