"""One small model under Lightning, or under drivetrain in Lightning's names: trains, saves, resumes, and prints losses.

python lightning_checkpoints.py {lightning|drivetrain} save FOLDER
python lightning_checkpoints.py {lightning|drivetrain} resume FOLDER NAME...
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

OURS = sys.argv[1] == "drivetrain"
if OURS:
    import drivetrain.compat

    drivetrain.compat.install("lightning", "pytorch_lightning")

import lightning as L  # noqa: E402
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint  # noqa: E402


class Line(L.LightningModule):  # type: ignore[misc]
    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(2, 1)
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = (self.layer(batch[0]) - batch[1]).square().mean()
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", (self.layer(batch[0]) - batch[1]).square().mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Saves(L.Callback):  # type: ignore[misc]
    """Saves at the end of the first epoch and within the second."""

    runs_last_at_epoch_end = True  # as ModelCheckpoint does

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.save(trainer, "end", 8)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.save(trainer, "middle", 12)

    def save(self, trainer: Any, name: str, step: int) -> None:
        if trainer.global_step == step:
            trainer.save_checkpoint(self.folder / f"{name}.ckpt", **({"format": "lightning"} if OURS else {}))


def data() -> DataLoader[Any]:
    fixed = torch.Generator().manual_seed(0)
    x = torch.randn(32, 2, generator=fixed)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4)


def trainer(*callbacks: Any) -> Any:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return L.Trainer(accelerator="cpu", max_epochs=3, callbacks=list(callbacks), **quiet)


def main(verb: str, folder: Path, names: list[str]) -> dict[str, Any]:
    L.seed_everything(1)
    found: dict[str, Any] = {}
    for name in names or ["whole"]:
        task, stopping = Line(), EarlyStopping("val_loss", patience=3)
        best = ModelCheckpoint(folder / f"kept-{sys.argv[1]}", monitor="val_loss")
        run = trainer(stopping, best, *([Saves(folder)] if verb == "save" else []))
        run.fit(task, data(), data(), ckpt_path=None if verb == "save" else folder / f"{name}.ckpt")
        loaded = [] if verb == "save" else [Line.load_from_checkpoint(folder / f"{name}.ckpt", lr=0.5).hparams.lr]
        found[name] = {
            "losses": task.losses,
            "ended": [run.global_step, run.current_epoch],
            "best": [float(stopping.best_score), float(best.best_model_score)],
            "loaded": loaded,
        }
        if verb == "save":
            run.save_checkpoint(folder / "after.ckpt", **({"format": "lightning"} if OURS else {}))
    return found


if __name__ == "__main__":
    print("FOUND " + json.dumps(main(sys.argv[2], Path(sys.argv[3]), sys.argv[4:])))
