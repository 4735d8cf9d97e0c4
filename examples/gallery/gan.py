"""A conditional GAN, optimized by hand: a generator learns to draw the digit that it is asked for.

    python examples/gallery/gan.py

The data are scikit-learn's 1797 digits of 8x8 pixels. A classifier by nearest neighbours, which has seen only real
digits, reads what is drawn: the share that it reads as the digit asked for is the metric.
"""

from __future__ import annotations

import json
from pathlib import Path

import click
import torch
import torch.nn.functional as F
from matplotlib.image import imsave
from sklearn.datasets import load_digits
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import CSVLogger, Task, Trainer

NOISE = 32


def load_images() -> tuple[Tensor, Tensor]:
    """All images, 64 pixels each in [-1, 1], and their digits."""
    data = load_digits()
    return torch.tensor(data.data, dtype=torch.float32) / 8 - 1, torch.tensor(data.target)


class Generator(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.digits = nn.Embedding(10, NOISE)
        self.layers = nn.Sequential(
            *(nn.Linear(2 * NOISE, width), nn.BatchNorm1d(width), nn.LeakyReLU(0.2)),
            *(nn.Linear(width, width), nn.BatchNorm1d(width), nn.LeakyReLU(0.2)),
            *(nn.Linear(width, 64), nn.Tanh()),
        )

    def forward(self, digits: Tensor) -> Tensor:
        noise = torch.randn(len(digits), NOISE, device=digits.device)
        return self.layers(torch.cat([noise, self.digits(digits)], dim=1))


class Discriminator(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.digits = nn.Embedding(10, NOISE)
        self.layers = nn.Sequential(
            *(nn.Linear(64 + NOISE, width), nn.LeakyReLU(0.2), nn.Dropout(0.3)),
            *(nn.Linear(width, width), nn.LeakyReLU(0.2), nn.Dropout(0.3)),
            nn.Linear(width, 1),
        )

    def forward(self, images: Tensor, digits: Tensor) -> Tensor:
        return self.layers(torch.cat([images, self.digits(digits)], dim=1))


class GAN(Task):
    """Two networks and two optimizers; the task decides what steps when, so optimization is not automatic."""

    automatic_optimization = False

    def __init__(self, width: int = 256, lr: float = 4e-4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.generator, self.discriminator = Generator(width), Discriminator(width)
        self.reader = KNeighborsClassifier(5).fit(*(part.numpy() for part in load_images()))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        real, digits = batch
        optimizer_g, optimizer_d = self.optimizers()

        with optimizer_d.toggle_model():  # only the discriminator's parameters take gradients
            fake = self.generator(digits).detach()
            loss_d = F.softplus(-self.discriminator(real, digits)).mean()
            loss_d = loss_d + F.softplus(self.discriminator(fake, digits)).mean()
            optimizer_d.zero_grad()
            self.manual_backward(loss_d)
            optimizer_d.step()

        with optimizer_g.toggle_model():
            loss_g = F.softplus(-self.discriminator(self.generator(digits), digits)).mean()
            optimizer_g.zero_grad()
            self.manual_backward(loss_g)
            optimizer_g.step()

        self.log_dict({"loss_d": loss_d, "loss_g": loss_g}, on_step=False, on_epoch=True)

    def on_train_epoch_end(self) -> None:
        digits = torch.arange(10, device=self.device).repeat(50)
        read = self.reader.predict(self.draw(digits).cpu().numpy())
        self.log("read_as_asked", float((read == digits.cpu().numpy()).mean()), prog_bar=True)

    @torch.no_grad()
    def draw(self, digits: Tensor) -> Tensor:
        """Images (rows, 64) of these digits, by the generator in evaluation mode."""
        self.generator.eval()
        images = self.generator(digits)
        self.generator.train()
        return images

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.Adam(network.parameters(), lr=self.hparams["lr"], betas=(0.5, 0.99))
            for network in (self.generator, self.discriminator)
        ]


@click.command()
@click.option("--small", is_flag=True, help="Few epochs, to see that it runs.")
@click.option("--output", default="gan", type=click.Path(path_type=Path), help="Where to write.")
def main(small: bool, output: Path) -> None:
    trainer = Trainer(
        max_epochs=8 if small else 80,
        seed=0,
        logger=CSVLogger(output, name="run"),
        log_every_n_steps=28,
        default_root_dir=output,
        enable_checkpointing=False,
    )
    task = GAN()
    trainer.fit(task, DataLoader(TensorDataset(*load_images()), 64, shuffle=True, drop_last=True))
    share = float(trainer.callback_metrics["read_as_asked"])
    trainer.print(f"{share:.1%} of the digits that were drawn are read as the digit asked for")
    if trainer.is_global_zero:  # ten rows of one digit each
        images = task.draw(torch.arange(10).repeat_interleave(16)).view(10, 16, 8, 8)
        grid = F.pad(images, (1, 1, 1, 1), value=-1).permute(0, 2, 1, 3).reshape(100, 160)
        imsave(output / "samples.png", grid.numpy(), cmap="gray")
        (output / "results.json").write_text(json.dumps({"read_as_asked": share}))


if __name__ == "__main__":
    main()
