"""A LightningModule over segmentation-models-pytorch, made as in the examples of that package."""

from __future__ import annotations

import sys

import pytorch_lightning as pl
import segmentation_models_pytorch as smp
import torch
from torch.utils.data import DataLoader, TensorDataset


class Segments(pl.LightningModule):
    def __init__(self, arch: str, encoder_name: str, in_channels: int, out_classes: int, **kwargs) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = smp.create_model(
            arch,
            encoder_name=encoder_name,
            encoder_weights=None,
            in_channels=in_channels,
            classes=out_classes,
            **kwargs,
        )
        self.loss_fn = smp.losses.DiceLoss(smp.losses.BINARY_MODE, from_logits=True)
        self.outputs: dict[str, list] = {"train": [], "valid": [], "test": []}

    def forward(self, image):
        return self.model(image)

    def shared_step(self, batch, stage):
        image, mask = batch
        logits = self(image)
        loss = self.loss_fn(logits, mask)
        stats = smp.metrics.get_stats(logits.sigmoid().gt(0.5).long(), mask.long(), mode="binary")
        self.outputs[stage].append((loss.detach(), *stats))
        return loss

    def shared_epoch_end(self, stage):
        losses, *stats = zip(*self.outputs[stage], strict=True)
        self.outputs[stage].clear()
        tp, fp, fn, tn = (torch.cat(each) for each in stats)
        metrics = {
            f"{stage}_loss": torch.stack(losses).mean(),
            f"{stage}_per_image_iou": smp.metrics.iou_score(tp, fp, fn, tn, reduction="micro-imagewise"),
            f"{stage}_dataset_iou": smp.metrics.iou_score(tp, fp, fn, tn, reduction="micro"),
        }
        self.log_dict(metrics, prog_bar=True)

    def training_step(self, batch, batch_idx):
        return self.shared_step(batch, "train")

    def on_train_epoch_end(self):
        self.shared_epoch_end("train")

    def validation_step(self, batch, batch_idx):
        return self.shared_step(batch, "valid")

    def on_validation_epoch_end(self):
        self.shared_epoch_end("valid")

    def test_step(self, batch, batch_idx):
        return self.shared_step(batch, "test")

    def on_test_epoch_end(self):
        self.shared_epoch_end("test")

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=2e-4)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8, eta_min=1e-5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step", "frequency": 1}}


def images(count: int) -> TensorDataset:
    made = torch.Generator().manual_seed(count)
    pictures = torch.rand(count, 3, 64, 64, generator=made)
    return TensorDataset(pictures, (pictures.mean(1, keepdim=True) > 0.5).float())


def main() -> None:
    processes = int(sys.argv[1])
    pl.seed_everything(3)
    model = Segments("FPN", "resnet18", in_channels=3, out_classes=1)
    trainer = pl.Trainer(
        max_epochs=2,
        log_every_n_steps=1,
        accelerator="cpu",
        devices=processes,
        strategy="ddp" if processes > 1 else "auto",
        enable_progress_bar=False,
        logger=False,
    )
    evaluated = DataLoader(images(8), batch_size=1)  # the loss of a batch is no mean over its pictures
    trainer.fit(model, DataLoader(images(16), batch_size=4, shuffle=True), evaluated)
    trainer.validate(model, evaluated, verbose=False)
    trainer.test(model, evaluated, verbose=False)


if __name__ == "__main__":
    main()
