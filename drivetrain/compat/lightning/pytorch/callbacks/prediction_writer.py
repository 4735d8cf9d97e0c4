"""What writes predictions, as Lightning's scripts subclass it."""

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
    """When predictions are written."""

    BATCH = "batch"
    EPOCH = "epoch"
    BATCH_AND_EPOCH = "batch_and_epoch"

    @property
    def on_batch(self) -> bool:
        """Whether after each batch."""
        return self is not WriteInterval.EPOCH

    @property
    def on_epoch(self) -> bool:
        """Whether at the end."""
        return self is not WriteInterval.BATCH


class BasePredictionWriter(callbacks.BasePredictionWriter):
    """`drivetrain.BasePredictionWriter` without indices of a stream's samples: which are whose, its dataset decides.

    Attributes:
        interval: The same, with `on_batch` and `on_epoch`.
    """

    interval: WriteInterval

    def __init__(self, write_interval: str = "batch") -> None:
        super().__init__(str(write_interval))
        self.interval = WriteInterval(str(write_interval))

    def indices_of_batch(self, trainer: Trainer, dataloader_idx: int) -> list[int] | None:
        """Where the samples of the batch under way are in the dataset; None if unknown."""
        loaders: Any = trainer.predict_dataloaders
        combined = trainer.combine_loaders(loaders, Stage.PREDICT)
        loader = combined.loaders[dataloader_idx] if combined is not loaders else loaders
        is_stream = isinstance(getattr(loader, "dataset", None), IterableDataset)
        return None if is_stream else super().indices_of_batch(trainer, dataloader_idx)
