"""`MNIST` and `MNISTDataModule` for examples."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, random_split

from drivetrain.compat.lightning.pytorch.core.datamodule import LightningDataModule
from drivetrain.runtime.errors import ConfigurationError

__all__ = ["MNIST", "MNISTDataModule"]

_FOLDER = "./data"


def MNIST(*args: Any, **kwargs: Any) -> Dataset[Any]:
    """Create torchvision's MNIST dataset."""
    made: Dataset[Any] = _torchvision().datasets.MNIST(*args, **kwargs)
    return made


class MNISTDataModule(LightningDataModule):
    """MNIST split into training, validation and test sets."""

    name = "mnist"
    num_classes = 10

    def __init__(
        self,
        data_dir: str = _FOLDER,
        val_split: int = 5000,
        num_workers: int = 16,
        normalize: bool = False,
        seed: int = 42,
        batch_size: int = 32,
    ) -> None:
        super().__init__()
        self.data_dir, self.val_split, self.num_workers = data_dir, val_split, num_workers
        self.normalize, self.seed, self.batch_size = normalize, seed, batch_size

    @property
    def default_transforms(self) -> Any:
        """Transform from images to normalized tensors."""
        transforms = _torchvision().transforms
        scaling = [transforms.Normalize(mean=(0.5,), std=(0.5,))] if self.normalize else []
        return transforms.Compose([transforms.ToTensor(), *scaling])

    def prepare_data(self) -> None:
        for train in (True, False):
            MNIST(self.data_dir, train=train, download=True)

    def setup(self, stage: str) -> None:
        images: Any = MNIST(self.data_dir, train=True, transform=self.default_transforms)
        parts = [len(images) - self.val_split, self.val_split]
        generator = torch.Generator().manual_seed(42)
        self.dataset_train, self.dataset_val = random_split(images, parts, generator=generator)

    def train_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.dataset_train, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.dataset_val)

    def test_dataloader(self) -> DataLoader[Any]:
        return self._loader(MNIST(self.data_dir, train=False, transform=self.default_transforms))

    def _loader(self, images: Dataset[Any], shuffle: bool = False) -> DataLoader[Any]:
        size, workers = self.batch_size, self.num_workers
        return DataLoader(images, size, shuffle=shuffle, num_workers=workers, drop_last=True, pin_memory=True)


def _torchvision() -> Any:
    try:
        return importlib.import_module("torchvision")
    except ImportError as error:
        raise ConfigurationError('MNIST is torchvision\'s. Install it: pip install "torchvision"') from error
