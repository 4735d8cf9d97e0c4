"""torchgeo's trainer classes for classification, regression and segmentation: `torchgeo_tasks.py PROCESSES TASK`."""

from __future__ import annotations

import sys

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, Dataset
from torchgeo.trainers import ClassificationTask, RegressionTask, SemanticSegmentationTask


class Tiles(Dataset):
    def __init__(self, kind: str, count: int) -> None:
        made = torch.Generator().manual_seed(count)
        self.images = torch.rand(count, 3, 64, 64, generator=made)
        brightness = self.images.mean((1, 2, 3))
        self.targets = {
            "classification": {"label": (brightness > 0.5).long()},
            "regression": {"label": brightness[:, None]},
            "segmentation": {"mask": (self.images.mean(1) > 0.5).long()},
        }[kind]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"image": self.images[index], **{name: values[index] for name, values in self.targets.items()}}


class Data(pl.LightningDataModule):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def train_dataloader(self):
        return DataLoader(Tiles(self.kind, 16), batch_size=4, shuffle=True)

    def val_dataloader(self):
        return DataLoader(Tiles(self.kind, 8), batch_size=2)

    def test_dataloader(self):
        return DataLoader(Tiles(self.kind, 8), batch_size=2)

    def predict_dataloader(self):
        return DataLoader(Tiles(self.kind, 8), batch_size=2)


def main() -> None:
    processes, kind = int(sys.argv[1]), sys.argv[2]
    pl.seed_everything(0)
    task = {
        "classification": lambda: ClassificationTask(model="resnet18", num_classes=2, lr=1e-2),
        "regression": lambda: RegressionTask(model="resnet18", num_outputs=1, lr=1e-2),
        "segmentation": lambda: SemanticSegmentationTask(model="unet", backbone="resnet18", num_classes=2, lr=1e-2),
    }[kind]()
    trainer = pl.Trainer(
        max_epochs=2,
        callbacks=[ModelCheckpoint(monitor="val_loss", save_last=True)],
        accelerator="cpu",
        devices=processes,
        strategy="ddp" if processes > 1 else "auto",
        enable_progress_bar=False,
        log_every_n_steps=1,
        logger=False,
    )
    data = Data(kind)
    trainer.fit(task, datamodule=data)
    trainer.test(task, datamodule=data, ckpt_path="best", verbose=False)
    trainer.predict(task, datamodule=data)


if __name__ == "__main__":
    main()
