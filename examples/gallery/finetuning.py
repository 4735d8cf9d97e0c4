"""Fine-tuning: a small transformer, pre-trained on source code, learns from few labels which package a snippet is of.

    python examples/gallery/finetuning.py

The data are the sources of Python's standard library. The transformer is first trained to predict the next character
of its top modules. Fine-tuning then has 60 snippets of each of four packages: first the new head is trained alone, then
`BackboneFinetuning` unfreezes the rest at a lower learning rate. The same without pre-training is the reference.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import click
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from drivetrain import BackboneFinetuning, CSVLogger, LearningRateMonitor, ModelCheckpoint, Task, Trainer

LIBRARY, LENGTH, WIDTH = Path(os.__file__).parent, 96, 64
PACKAGES = ("asyncio", "email", "unittest", "xml")


def snippets_of(files: list[Path], count: int) -> Tensor:
    """The first so many snippets (count, 97) of a text, ASCII codes; the last character is only predicted."""
    text = "".join(path.read_text(encoding="utf-8") for path in sorted(files)).encode("ascii", "replace")
    codes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return codes.unfold(0, LENGTH + 1, LENGTH + 1)[:count].long()


def labelled_snippets() -> tuple[TensorDataset, TensorDataset, TensorDataset]:
    """Of each package 60 snippets to train on, 50 to validate and 100 to test, from all over its files."""
    parts: list[list[Tensor]] = [[], [], []]
    for package in PACKAGES:
        folder = LIBRARY / package
        rows = snippets_of([*folder.glob("*.py"), *folder.glob("[a-su-z]*/*.py")], 1500)
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[:210]
        for part, chosen in zip(parts, order.split([60, 50, 100]), strict=True):
            part.append(rows[chosen, :LENGTH])
    return tuple(  # type: ignore[return-value]
        TensorDataset(torch.cat(part), torch.arange(len(PACKAGES)).repeat_interleave(len(part[0]))) for part in parts
    )


class Backbone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.characters, self.positions = nn.Embedding(128, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 3, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH), persistent=False)

    def forward(self, characters: Tensor) -> Tensor:
        """Features (rows, 96, width) of each character and those before it."""
        x = self.characters(characters) + self.positions.weight
        return self.layers(x, mask=self.mask, is_causal=True)


class NextCharacter(Task):
    def __init__(self, lr: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.backbone, self.head = Backbone(), nn.Linear(WIDTH, 128)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        logits = self.head(self.backbone(batch[0][:, :-1]))
        loss = F.cross_entropy(logits.flatten(0, 1), batch[0][:, 1:].flatten())
        self.log("pretraining_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.hparams["lr"], total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class PackageClassifier(Task):
    def __init__(self, backbone: Backbone, lr: float = 2e-3) -> None:
        super().__init__()
        self.save_hyperparameters("lr")
        self.backbone = backbone
        self.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(2 * WIDTH, len(PACKAGES)))
        self.accuracy = nn.ModuleDict({part: MulticlassAccuracy(len(PACKAGES)) for part in ("val", "test")})

    def forward(self, characters: Tensor) -> Tensor:
        features = self.backbone(characters)
        return self.head(torch.cat([features.mean(1), features.amax(1)], dim=1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.evaluate(batch, "val")

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.evaluate(batch, "test")

    def evaluate(self, batch: list[Tensor], part: str) -> None:
        logits = self(batch[0])
        self.accuracy[part].update(logits, batch[1])
        self.log(f"{part}_loss", F.cross_entropy(logits, batch[1]))
        self.log(f"{part}_accuracy", self.accuracy[part], prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(filter(lambda p: p.requires_grad, self.parameters()), lr=self.hparams["lr"])


@click.command()
@click.option("--small", is_flag=True, help="A few steps, to see that it runs.")
@click.option("--output", default="finetuning", type=click.Path(path_type=Path), help="Where to write.")
def main(small: bool, output: Path) -> None:
    def make_trainer(name: str, **options: object) -> Trainer:
        logger = CSVLogger(output, name=name)
        return Trainer(seed=0, logger=logger, log_every_n_steps=5, default_root_dir=output, **options)

    text = TensorDataset(snippets_of(list(LIBRARY.glob("*.py")), 16_000))
    trainer = make_trainer("pretraining", max_steps=10 if small else 300, callbacks=LearningRateMonitor())
    language_model = NextCharacter()
    trainer.fit(language_model, DataLoader(text, 32, shuffle=True))

    train, val, test = labelled_snippets()
    results = {"chance": 1 / len(PACKAGES)}
    for name, backbone, frozen in (("finetuned", language_model.backbone, True), ("from_scratch", Backbone(), False)):
        limits = {f"limit_{part}_batches": 1 if small else 1.0 for part in ("train", "val", "test")}
        callbacks = [ModelCheckpoint(monitor="val_accuracy", mode="max", filename="{epoch}"), LearningRateMonitor()]
        if frozen:
            callbacks.append(BackboneFinetuning(3, lambda epoch: 1.0, backbone_initial_ratio_lr=0.2))
        trainer = make_trainer(name, max_epochs=1 if small else 10, callbacks=callbacks, **limits)
        task = PackageClassifier(backbone, lr=2e-3 if frozen else 1e-3)
        trainer.fit(task, DataLoader(train, 20, shuffle=True), DataLoader(val, 100))
        [tested] = trainer.test(task, DataLoader(test, 100), ckpt_path="best", verbose=False)
        results[name] = tested["test_accuracy"]
    trainer.print(", ".join(f"{name}: test accuracy {value:.1%}" for name, value in results.items()))
    if trainer.is_global_zero:
        (output / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
