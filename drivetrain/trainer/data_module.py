"""`DataModule`: the data loaders of a run and the code that prepares them, separate from the model."""

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
    from typing_extensions import Self

    from drivetrain.trainer.trainer import Trainer


# Hooks for data that both a DataModule and a Task may override


class DataHooks:
    """Hooks that create data loaders, prepare data, and move batches to the device."""

    def on_batch_size_too_large(self, batch_size: int) -> None:
        """Run code after the batch-size search ran out of memory with `batch_size`, before it tries a smaller size.

        Release caches here, or change what the loaders of the next trial return. Called on all processes.

        Args:
            batch_size: The size that was tried.
        """

    def prepare_data(self) -> None:
        """Download or unpack data, on the first process of each machine only.

        Do not set attributes here: the other processes would not have them.
        """

    def setup(self, stage: str) -> None:
        """Create the datasets. Called on every process at the start of `fit`, `validate`, `test` and `predict`.

        The data loaders are created afterwards.

        Args:
            stage: `"fit"`, `"validate"`, `"test"` or `"predict"`.
        """

    def teardown(self, stage: str) -> None:
        """Release what `setup` created. Called on every process when a stage ends, even after an error.

        Args:
            stage: `"fit"`, `"validate"`, `"test"` or `"predict"`.
        """

    def train_dataloader(self) -> Any:
        """Return the training data loader, or a list or dict of loaders that are iterated in parallel."""
        raise _undefined("train_dataloader")

    def val_dataloader(self) -> Any:
        """Return the validation data loader, or a list or dict of loaders that are evaluated one by one."""
        raise _undefined("val_dataloader")

    def test_dataloader(self) -> Any:
        """Return the test data loader, or a list or dict of loaders that are evaluated one by one."""
        raise _undefined("test_dataloader")

    def predict_dataloader(self) -> Any:
        """Return the prediction data loader, or a list or dict of loaders that are processed one by one."""
        raise _undefined("predict_dataloader")

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Change a batch before its transfer to the device, and return it.

        For example, augment it on the CPU.
        """
        return batch

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Move a batch to the device and return it. Override it for batches of special types."""
        return send_to_device(batch, device)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Change a batch after its transfer to the device, for example augment it there, and return it."""
        return batch


def _undefined(name: str) -> ConfigurationError:
    return ConfigurationError(f"`{name}` must be implemented to be used with the Trainer.")


class DataModule(HoldsHyperParameters, DataHooks):
    """Base class for the data of a run: its loaders, and the code that prepares them.

    Override the hooks you need.

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
    """The Trainer that uses the data module, or None before the first run."""

    def __getstate__(self) -> dict[str, Any]:
        # Copies, such as those in loader workers, do not need the Trainer.
        return {**self.__dict__, "trainer": None}

    def on_exception(self, exception: BaseException) -> None:
        """Handle an exception that ends the run, for example to close files.

        It is raised again afterwards.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the data module's own state as a dict, which is saved in each checkpoint."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the data module's own state from a checkpoint: the dict that `state_dict` returned."""

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
        """Create a data module whose loaders return batches of the given datasets.

        Args:
            train_dataset: The training dataset, or several as a list or dict. Shuffled unless it is iterable.
            val_dataset: The validation dataset or datasets.
            test_dataset: The test dataset or datasets.
            predict_dataset: The prediction dataset or datasets.
            batch_size: The batch size of every loader.
            num_workers: The number of workers of every loader.
            **datamodule_kwargs: Arguments of the constructor.

        Returns:
            The data module.
        """
        given = {"train": train_dataset, "val": val_dataset, "test": test_dataset, "predict": predict_dataset}
        made = cls(**datamodule_kwargs)
        for name, datasets in given.items():
            if datasets is not None:
                # A new loader at each call, as from a method that a subclass defines.
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
    ) -> Self:
        """Create a data module from the hyper-parameters and state in a checkpoint.

        Args:
            checkpoint_path: The checkpoint's directory, or a `.ckpt` file.
            map_location: Accepted without effect, because the state holds no device tensors.
            hparams_file: A YAML or CSV file with hyper-parameters to use instead of the saved ones.
            weights_only: Accepted without effect. Nothing in a checkpoint is unpickled into objects.
            instantiate: True to import and call classes named in the hyper-parameters, as a command line stores them.
                Use it only for trusted files. If False, such a checkpoint is refused.
            **kwargs: Constructor arguments that replace saved ones.

        Returns:
            The data module.

        Raises:
            CheckpointError: There is no complete checkpoint.
        """
        kept = ("hyper_parameters", "hparams_name", "hparams_constructor")
        # Only these entries are read, not the weights.
        entries = (*(f"datamodule_{name}" for name in kept), "datamodule", "hooks")
        parts = ("engine/precision", *(f"driver/{name}" for name in entries))
        given = kwargs if hparams_file is None else None
        driver = checkpoint.read_shared(checkpoint_path, parts, given)["driver"]
        made: Self = build(cls, driver, "datamodule_hyper_parameters", hparams_file, kwargs, instantiate)
        state = state_of(cls, driver)
        if state:
            made.load_state_dict(state)
        return made


def _loaders(datasets: Any, batch_size: int, num_workers: int, shuffle: bool) -> Any:
    if isinstance(datasets, Mapping):
        return {name: _loaders(each, batch_size, num_workers, shuffle) for name, each in datasets.items()}
    if isinstance(datasets, Sequence):
        return [_loaders(each, batch_size, num_workers, shuffle) for each in datasets]
    # DataLoader raises an error if an iterable dataset is shuffled.
    shuffles = shuffle and not isinstance(datasets, IterableDataset)
    return DataLoader(datasets, batch_size=batch_size, shuffle=shuffles, num_workers=num_workers)
