"""`LightningDataModule`: a data module with the additional members of Lightning's."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence, Sized
from functools import partial, wraps
from typing import Any, ClassVar

from torch.utils.data import DataLoader, IterableDataset

from drivetrain.compat.lightning.pytorch.core.mixins import HyperparametersMixin
from drivetrain.compat.lightning.unpickling import UnpicklesWhereAsked
from drivetrain.runtime.errors import ConfigurationError as MisconfigurationException
from drivetrain.trainer import DataModule


class LightningDataModule(UnpicklesWhereAsked, HyperparametersMixin, DataModule):
    """`drivetrain.DataModule` under Lightning's name.

    Attributes:
        name: A name for the data.
    """

    CHECKPOINT_HYPER_PARAMS_KEY: ClassVar[str] = "datamodule_hyper_parameters"
    CHECKPOINT_HYPER_PARAMS_NAME: ClassVar[str] = "datamodule_hparams_name"
    CHECKPOINT_HYPER_PARAMS_TYPE: ClassVar[str] = "datamodule_hparams_type"

    name: str | None = None

    @classmethod
    @wraps(DataModule.load_from_checkpoint.__func__)  # type: ignore[attr-defined]
    def load_from_checkpoint(cls, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        return super().load_from_checkpoint(checkpoint_path, *args, **kwargs)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)

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
        """Create a data module from datasets. Its constructor gets `batch_size` and `num_workers` if it accepts them.

        Args:
            train_dataset: Training dataset, or several. Shuffled unless it is iterable.
            val_dataset: Validation dataset, or several.
            test_dataset: Test dataset, or several.
            predict_dataset: Prediction dataset, or several.
            batch_size: Samples per batch of each loader.
            num_workers: Worker processes of each loader.
            **datamodule_kwargs: Further arguments of the constructor.
        """
        parameters = inspect.signature(cls.__init__).parameters.values()
        taken = {each.name for each in parameters}
        takes_all = cls is not LightningDataModule and any(each.kind is each.VAR_KEYWORD for each in parameters)
        special = {"batch_size": batch_size, "num_workers": num_workers}
        passed = {name: value for name, value in special.items() if takes_all or name in taken}
        made = cls(**{**passed, **datamodule_kwargs})
        given = {"train": train_dataset, "val": val_dataset, "test": test_dataset, "predict": predict_dataset}
        for stage, datasets in given.items():
            if datasets is not None:
                options = {"batch_size": batch_size, "num_workers": num_workers, "pin_memory": True}
                setattr(made, f"{stage}_dataloader", partial(_loaders, datasets, stage == "train", options))
        return made

    def __str__(self) -> str:
        words = {"Train": "train", "Validation": "val", "Test": "test", "Predict": "predict"}
        lines = [f"{{{word} dataloader: {_sizes(self, stage)}}}" for word, stage in words.items()]
        return os.linesep.join(lines)

    def remove_ignored_hparams(self, ignore_list: list[str]) -> None:
        """Remove hyper-parameters by name."""
        for name in ignore_list:
            self.hparams.pop(name, None)


def _loaders(datasets: Any, shuffle: bool, options: dict[str, Any]) -> Any:
    """Return data loaders in the same nested structure as the datasets."""
    if isinstance(datasets, Mapping):
        return {name: _loaders(each, shuffle, options) for name, each in datasets.items()}
    if isinstance(datasets, Sequence):
        return [_loaders(each, shuffle, options) for each in datasets]
    return DataLoader(datasets, shuffle=shuffle and not isinstance(datasets, IterableDataset), **options)


def _sizes(data: LightningDataModule, stage: str) -> str:
    """Return the number of samples of a stage as text, `"None"` if unknown."""
    try:
        made = getattr(data, f"{stage}_dataloader")()
    except (AttributeError, MisconfigurationException):
        return "None"
    loaders = list(made.values()) if isinstance(made, Mapping) else made if isinstance(made, Sequence) else [made]
    sizes = [f"size={_size(loader)}" for loader in loaders]
    return sizes[0] if len(sizes) == 1 else " ; ".join(f"{number}. {size}" for number, size in enumerate(sizes, 1))


def _size(loader: Any) -> str:
    dataset = getattr(loader, "dataset", loader)
    try:
        return str(len(dataset)) if isinstance(dataset, Sized) else "NA"
    except (TypeError, NotImplementedError):
        return "NA"
