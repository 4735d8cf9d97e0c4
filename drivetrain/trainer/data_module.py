"""`DataModule`: the loaders of a run and what prepares them, apart from the model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from drivetrain.trainer.data_hooks import DataHooks

if TYPE_CHECKING:
    from drivetrain.trainer.trainer import Trainer


class DataModule(DataHooks):
    """Loaders, and what prepares them. Override what you need.

    Example:
        ```python
        import torch
        from drivetrain import DataModule

        class Numbers(DataModule):
            def setup(self, stage):
                self.data = torch.arange(32.0).reshape(16, 2)

            def train_dataloader(self):
                return torch.utils.data.DataLoader(self.data, batch_size=4)
        ```
    """

    trainer: Trainer | None = None

    def on_exception(self, exception: BaseException) -> None:
        """See an exception that ends the run."""

    def state_dict(self) -> dict[str, Any]:
        """What to save with a checkpoint."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `state_dict` returned."""
