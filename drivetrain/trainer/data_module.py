"""`DataModule`: the loaders of a run and what prepares them, apart from the model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from drivetrain.runtime.nested import send_to_device

if TYPE_CHECKING:
    import torch

    from drivetrain.trainer.trainer import Trainer


class DataModule:
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

    def prepare_data(self) -> None:
        """Download or unpack; called on the first process of each machine only, so set no state here."""

    def setup(self, stage: str) -> None:
        """Build datasets; called on every process.

        Args:
            stage: `"fit"`, `"validate"`, `"test"` or `"predict"`.
        """

    def teardown(self, stage: str) -> None:
        """Clean up after `stage`."""

    def train_dataloader(self) -> Any:
        """The loader or loaders to train on."""
        return None

    def val_dataloader(self) -> Any:
        """The loader or loaders to validate on."""
        return None

    def test_dataloader(self) -> Any:
        """The loader or loaders to test on."""
        return None

    def predict_dataloader(self) -> Any:
        """The loader or loaders to predict on."""
        return None

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Change a batch before it is moved to the device."""
        return batch

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Move a batch to the device."""
        return send_to_device(batch, device)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Change a batch after it was moved to the device."""
        return batch

    def on_exception(self, exception: BaseException) -> None:
        """See an exception that ends the run."""

    def state_dict(self) -> dict[str, Any]:
        """What to save with a checkpoint."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `state_dict` returned."""
