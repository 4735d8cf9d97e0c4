"""`BasePredictionWriter`, the base class of callbacks that write predictions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset

from drivetrain import callbacks
from drivetrain.callbacks.base import Stage
from drivetrain.compat.lightning.enums import LightningEnum

if TYPE_CHECKING:
    from drivetrain.trainer import Trainer

__all__ = ["BasePredictionWriter", "WriteInterval"]


class WriteInterval(LightningEnum):
    """When predictions are written: after each batch, at the end, or both."""

    BATCH = "batch"
    EPOCH = "epoch"
    BATCH_AND_EPOCH = "batch_and_epoch"

    @property
    def on_batch(self) -> bool:
        """True if predictions are written after each batch."""
        return self is not WriteInterval.EPOCH

    @property
    def on_epoch(self) -> bool:
        """True if predictions are written at the end of the run."""
        return self is not WriteInterval.BATCH


class BasePredictionWriter(callbacks.BasePredictionWriter):
    """`drivetrain.BasePredictionWriter` that passes no sample indices for iterable datasets.

    Attributes:
        interval: When predictions are written, as a `WriteInterval`.
    """

    interval: WriteInterval

    def __init__(self, write_interval: str = "batch") -> None:
        super().__init__(str(write_interval))
        self.interval = WriteInterval(str(write_interval))

    def indices_of_batch(self, trainer: Trainer, dataloader_idx: int) -> list[int] | None:
        """Return the dataset indices of the current batch's samples, or None if unknown."""
        loaders: Any = trainer.predict_dataloaders
        combined = trainer.combine_loaders(loaders, Stage.PREDICT)
        loader = combined.loaders[dataloader_idx] if combined is not loaders else loaders
        is_stream = isinstance(getattr(loader, "dataset", None), IterableDataset)
        return None if is_stream else super().indices_of_batch(trainer, dataloader_idx)
