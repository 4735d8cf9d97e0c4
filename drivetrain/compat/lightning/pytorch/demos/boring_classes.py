"""A linear layer on random data: the smallest module that trains, validates, tests and predicts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from drivetrain.compat.lightning.pytorch.core import LightningDataModule, LightningModule

_FEATURES, _SAMPLES = 32, 64
_PARTS = ("train", "val", "test", "predict")


def _needed(stage: str) -> tuple[str, ...]:
    """Return the splits that a stage needs."""
    return ("train", "val") if stage == "fit" else ("val",) if stage == "validate" else (stage,)


class RandomDataset(Dataset[Any]):
    """Dataset of random vectors."""

    def __init__(self, size: int, length: int) -> None:
        self.len = length
        self.data = torch.randn(length, size)

    def __getitem__(self, index: int) -> Any:
        return self.data[index]

    def __len__(self) -> int:
        return self.len


class RandomDictDataset(RandomDataset):
    """Dataset of dicts with a random vector `"a"` and `"b"`, which is `a + 1`."""

    def __getitem__(self, index: int) -> Any:
        row = self.data[index]
        return {"a": row, "b": row + 1}


class RandomIterableDataset(IterableDataset[Tensor]):
    """Iterable dataset of random vectors."""

    def __init__(self, size: int, count: int) -> None:
        self.size, self.count = size, count

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.randn(self.size) for _ in range(self.count))


class RandomIterableDatasetWithLen(RandomIterableDataset):
    """Iterable dataset of random vectors with a length."""

    def __len__(self) -> int:
        return self.count


class BoringModel(LightningModule):
    """Module with a linear layer whose target is a vector of ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(_FEATURES, 2)

    def forward(self, x: Tensor) -> Any:
        return self.layer(x)

    def loss(self, preds: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return the mean squared error to the labels, or to ones if `labels` is None."""
        return nn.functional.mse_loss(preds, torch.ones_like(preds) if labels is None else labels)

    def step(self, batch: Any) -> Tensor:
        """Return the loss of a batch."""
        return self.loss(self(batch))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.step(batch)}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return {"x": self.step(batch)}

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        return {"y": self.step(batch)}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)]

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(RandomDataset(_FEATURES, _SAMPLES))

    def val_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(RandomDataset(_FEATURES, _SAMPLES))

    def test_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(RandomDataset(_FEATURES, _SAMPLES))

    def predict_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(RandomDataset(_FEATURES, _SAMPLES))


class ManualOptimBoringModel(BoringModel):
    """Module with a linear layer that uses manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        loss = self.step(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss


class BoringDataModule(LightningDataModule):
    """Data module with random datasets of equal size for all stages."""

    random_train: Any
    random_val: Any
    random_test: Any
    random_predict: Any

    def __init__(self) -> None:
        super().__init__()
        self.random_full: Any = None

    def setup(self, stage: str) -> None:
        self.random_full = RandomDataset(_FEATURES, 4 * _SAMPLES)
        for name in _needed(stage):
            first = _PARTS.index(name) * _SAMPLES
            setattr(self, f"random_{name}", Subset(self.random_full, range(first, first + _SAMPLES)))

    def train_dataloader(self) -> Any:
        return DataLoader(self.random_train)

    def val_dataloader(self) -> Any:
        return DataLoader(self.random_val)

    def test_dataloader(self) -> Any:
        return DataLoader(self.random_test)

    def predict_dataloader(self) -> Any:
        return DataLoader(self.random_predict)


class BoringDataModuleNoLen(BoringDataModule):
    """Data module with random iterable datasets for all stages."""

    def setup(self, stage: str) -> None:
        for name in _needed(stage):
            setattr(self, f"random_{name}", RandomIterableDataset(_FEATURES, _SAMPLES))


class IterableBoringDataModule(LightningDataModule):
    """Data module with two loaders per stage, one of which has no length."""

    train_datasets: list[Any]
    val_datasets: list[Any]
    test_datasets: list[Any]
    predict_datasets: list[Any]

    def setup(self, stage: str) -> None:
        for name in _needed(stage):
            length = _SAMPLES // 4 * (1 + _PARTS.index(name))
            both = [RandomDataset(_FEATURES, length), RandomIterableDataset(_FEATURES, length)]
            setattr(self, f"{name}_datasets", both)

    def train_dataloader(self) -> Any:
        return [DataLoader(each) for each in self.train_datasets]

    def val_dataloader(self) -> Any:
        return [DataLoader(each) for each in self.val_datasets]

    def test_dataloader(self) -> Any:
        return [DataLoader(each) for each in self.test_datasets]

    def predict_dataloader(self) -> Any:
        return [DataLoader(each) for each in self.predict_datasets]


class DemoModel(LightningModule):
    """Module with a linear layer on vectors of 32 elements."""

    def __init__(self, out_dim: int = 10, learning_rate: float = 0.02) -> None:
        super().__init__()
        self.l1 = nn.Linear(32, out_dim)
        self.learning_rate = learning_rate

    def forward(self, x: Tensor) -> Any:
        return torch.relu(self.l1(x.view(x.size(0), -1)))

    def training_step(self, batch: Any, batch_nb: int) -> Any:
        return {"loss": self(batch).sum()}

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=self.learning_rate)


class Net(nn.Module):
    """Convolutional classifier: images (rows, 1, 28, 28) to log probabilities (rows, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(64 * 12 * 12, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        features = self.conv2(self.conv1(x).relu()).relu()
        pooled = self.dropout1(nn.functional.max_pool2d(features, 2))
        hidden = self.dropout2(self.fc1(pooled.flatten(1)).relu())
        result: Tensor = self.fc2(hidden).log_softmax(1)
        return result
