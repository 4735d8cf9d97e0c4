"""What writes predictions, as Lightning's scripts subclass it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset

from drivetrain import callbacks
from drivetrain.compat.absent import absent_names
from drivetrain.compat.lightning.reasons import CALLBACK
from drivetrain.data import CombinedLoader

if TYPE_CHECKING:
    from drivetrain.trainer import Trainer

__all__ = ["BasePredictionWriter"]


class BasePredictionWriter(callbacks.BasePredictionWriter):
    """`drivetrain.BasePredictionWriter` without indices of a stream's samples: which are whose, its dataset decides."""

    def indices_of_batch(self, trainer: Trainer, dataloader_idx: int) -> list[int] | None:
        """Where the samples of the batch under way are in the dataset; None if unknown.

        Args:
            trainer: The Trainer that runs.
            dataloader_idx: The number of the loader.
        """
        loaders: Any = trainer.predict_dataloaders
        loader = CombinedLoader(loaders).loaders[dataloader_idx] if trainer.holds_loaders(loaders) else loaders
        is_stream = isinstance(getattr(loader, "dataset", None), IterableDataset)
        return None if is_stream else super().indices_of_batch(trainer, dataloader_idx)


__getattr__ = absent_names(__name__, (CALLBACK, ("WriteInterval",)), room="drivetrain.callbacks")
