"""`DataModule`: the loaders of a run and what prepares them, apart from the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from torch.utils.data import DataLoader, IterableDataset

from drivetrain import checkpoint
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.pytrees import send_to_device
from drivetrain.trainer.hyper_parameters import HoldsHyperParameters, build, state_of

if TYPE_CHECKING:
    import torch

    from drivetrain.trainer.trainer import Trainer


# Where loaders come from and how a batch gets to the device: what a DataModule and a Task may override


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
    return ConfigurationError(f"`{name}` must be implemented to be used with the Trainer.")


class DataModule(HoldsHyperParameters, DataHooks):
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
    """The Trainer that runs with it; None before."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "trainer": None}

    def on_exception(self, exception: BaseException) -> None:
        """See an exception that ends the run."""

    def state_dict(self) -> dict[str, Any]:
        """What to save with a checkpoint."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `state_dict` returned."""

    @classmethod
    def from_datasets(
        cls,
        train_dataset: Any = None,
        val_dataset: Any = None,
        test_dataset: Any = None,
        predict_dataset: Any = None,
        batch_size: int = 1,
        num_workers: int = 0,
        **datamodule_kwargs: Any,
    ) -> Any:
        """Make a data module of datasets.

        Args:
            train_dataset: The dataset to train on, shuffled unless it is iterable; or several, as a list or dict.
            val_dataset: The dataset to validate on, or several.
            test_dataset: The dataset to test on, or several.
            predict_dataset: The dataset to predict on, or several.
            batch_size: Of every loader.
            num_workers: Of every loader.
            **datamodule_kwargs: Arguments of the constructor.
        """
        given = {"train": train_dataset, "val": val_dataset, "test": test_dataset, "predict": predict_dataset}
        made = cls(**datamodule_kwargs)
        for name, datasets in given.items():
            if datasets is not None:
                make = partial(_loaders, datasets, batch_size, num_workers, name == "train")
                setattr(made, f"{name}_dataloader", make)
        return made

    @classmethod
    def load_from_checkpoint(
        cls,
        checkpoint_path: str | Path | BinaryIO,
        map_location: Any = None,
        hparams_file: str | Path | None = None,
        weights_only: bool | None = None,
        *,
        instantiate: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Build a data module from the hyper-parameters and the state that a checkpoint has of it.

        Args:
            checkpoint_path: The checkpoint's directory, or a `.ckpt` file.
            map_location: Without effect: there is nothing on a device.
            hparams_file: A YAML or CSV file of hyper-parameters to take instead of the saved ones.
            weights_only: Without effect: nothing in a checkpoint is ever unpickled into objects.
            instantiate: Whether classes that the hyper-parameters name, as a command line leaves them, are imported
                and called; only for files that you trust. Else a checkpoint that names one is refused.
            **kwargs: Arguments of the constructor that win over the saved ones.

        Raises:
            CheckpointError: There is no complete checkpoint.
        """
        kept = ("hyper_parameters", "hparams_name", "hparams_constructor")
        entries = (*(f"datamodule_{name}" for name in kept), "datamodule", "hooks")
        parts = ("engine/precision", *(f"driver/{name}" for name in entries))
        given = kwargs if hparams_file is None else None
        driver = checkpoint.read_shared(checkpoint_path, parts, given)["driver"]
        made = build(cls, driver, "datamodule_hyper_parameters", hparams_file, kwargs, instantiate)
        state = state_of(cls, driver)
        if state:
            made.load_state_dict(state)
        return made


def _loaders(datasets: Any, batch_size: int, num_workers: int, shuffle: bool) -> Any:
    """Loaders of datasets, in the same arrangement."""
    if isinstance(datasets, Mapping):
        return {name: _loaders(each, batch_size, num_workers, shuffle) for name, each in datasets.items()}
    if isinstance(datasets, Sequence):
        return [_loaders(each, batch_size, num_workers, shuffle) for each in datasets]
    shuffles = shuffle and not isinstance(datasets, IterableDataset)
    return DataLoader(datasets, batch_size=batch_size, shuffle=shuffles, num_workers=num_workers)
