"""`DataModule`: the loaders of a run and what prepares them, apart from the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from torch.utils.data import DataLoader, IterableDataset

from drivetrain import checkpoint
from drivetrain.trainer.data_hooks import DataHooks
from drivetrain.trainer.from_checkpoint import build
from drivetrain.trainer.hyper_parameters import HoldsHyperParameters
from drivetrain.trainer.state.hook_view import state_of

if TYPE_CHECKING:
    from drivetrain.trainer.trainer import Trainer


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
    def unpickles(cls, weights_only: bool | None) -> bool:
        """Whether `load_from_checkpoint` unpickles the objects in a file: never.

        Args:
            weights_only: What it was given.
        """
        return False

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
            checkpoint_path: The checkpoint's directory, or a `.ckpt` file of Lightning's.
            map_location: Taken for Lightning's sake: there is nothing on a device.
            hparams_file: A YAML or CSV file of hyper-parameters to take instead of the saved ones.
            weights_only: Taken for Lightning's sake: nothing in a checkpoint is ever unpickled into objects.
            instantiate: Whether classes that the hyper-parameters name, as a command line leaves them, are imported
                and called; only for files that you trust. Else a checkpoint that names one is refused.
            **kwargs: Arguments of the constructor that win over the saved ones.

        Raises:
            CheckpointError: There is no complete checkpoint.
        """
        kept = ("hyper_parameters", "hparams_name", "hparams_constructor")
        entries = (*(f"datamodule_{name}" for name in kept), "datamodule", "hooks")
        parts = ("engine/precision", *(f"driver/{name}" for name in entries))
        unpickles, given = cls.unpickles(weights_only), kwargs if hparams_file is None else None
        driver = checkpoint.read_shared(checkpoint_path, parts, unpickles, given)["driver"]
        made = build(cls, driver, "datamodule_hyper_parameters", hparams_file, kwargs, instantiate or unpickles)
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
