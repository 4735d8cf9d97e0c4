"""Where loaders come from and how a batch gets to the device: what a DataModule and a Task may override."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.nested import send_to_device

if TYPE_CHECKING:
    import torch


class DataHooks:
    """Loaders and what prepares them, each a documented no-op."""

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
        raise _undefined("train_dataloader")

    def val_dataloader(self) -> Any:
        """The loader or loaders to validate on."""
        raise _undefined("val_dataloader")

    def test_dataloader(self) -> Any:
        """The loader or loaders to test on."""
        raise _undefined("test_dataloader")

    def predict_dataloader(self) -> Any:
        """The loader or loaders to predict on."""
        raise _undefined("predict_dataloader")

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Change a batch before it is moved to the device."""
        return batch

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Move a batch to the device."""
        return send_to_device(batch, device)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Change a batch after it was moved to the device."""
        return batch


def _undefined(name: str) -> ConfigurationError:
    return ConfigurationError(f"`{name}` must be implemented to be used with the Trainer.", code="DT-081")
