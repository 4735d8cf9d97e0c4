"""Train a GAN, as a Task that optimizes by hand or as a loop of one's own on the Trainer's engine.

    python examples/gan.py
    drivetrain launch --num_processes 2 examples/gan.py --how loop

The data are points in the plane, eight clusters on a ring. A generator turns noise into such points, a discriminator
tells them from real ones. At the end: how many of the generated points lie in a cluster, and how many clusters they
reach.
"""

from __future__ import annotations

import math
import time

import click
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Task, Trainer

CLUSTERS, SPREAD, NOISE = 8, 0.15, 8


def cluster_centers() -> Tensor:
    angles = torch.arange(CLUSTERS) * (2 * math.pi / CLUSTERS)
    return 2 * torch.stack([angles.cos(), angles.sin()], dim=1)


def real_points(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    centers = cluster_centers()[torch.randint(CLUSTERS, (count,), generator=generator)]
    return TensorDataset(centers + SPREAD * torch.randn(count, 2, generator=generator))


def layers(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, 128), nn.LeakyReLU(0.2), nn.Linear(128, 128), nn.LeakyReLU(0.2), nn.Linear(128, outputs)
    )


def adam(model: nn.Module, lr: float) -> torch.optim.Adam:
    return torch.optim.Adam(model.parameters(), lr=lr, betas=(0.5, 0.99))


def noise_like(points: Tensor) -> Tensor:
    return torch.randn(len(points), NOISE, device=points.device)


def discriminator_loss(discriminator: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    on_real, on_fake = discriminator(torch.cat([real, fake])).split([len(real), len(fake)])
    return F.softplus(-on_real).mean() + F.softplus(on_fake).mean()


def generator_loss(discriminator: nn.Module, fake: Tensor) -> Tensor:
    return F.softplus(-discriminator(fake)).mean()


class GAN(Task):
    """Two models, two optimizers, and a training step that steps each in turn."""

    automatic_optimization = False

    def __init__(self, lr: float) -> None:
        super().__init__()
        self.lr = lr
        self.generator, self.discriminator = layers(NOISE, 2), layers(2, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        [real] = batch
        optimizer_g, optimizer_d = self.optimizers()

        with optimizer_d.toggle_model():  # only the discriminator's parameters take gradients
            fake = self.generator(noise_like(real))
            loss_d = discriminator_loss(self.discriminator, real, fake)
            optimizer_d.zero_grad()
            self.manual_backward(loss_d)
            optimizer_d.step()

        with optimizer_g.toggle_model():
            loss_g = generator_loss(self.discriminator, self.generator(noise_like(real)))
            optimizer_g.zero_grad()
            self.manual_backward(loss_g)
            optimizer_g.step()

        self.log_dict({"loss_d": loss_d, "loss_g": loss_g}, prog_bar=True)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [adam(self.generator, self.lr), adam(self.discriminator, self.lr)]


def train_as_task(trainer: Trainer, data: DataLoader, lr: float) -> nn.Module:
    task = GAN(lr)
    trainer.fit(task, data)
    return task.generator


def train_in_own_loop(trainer: Trainer, data: DataLoader, lr: float) -> nn.Module:
    """The same on `trainer.accelerator`: devices, processes and precision are those that the Trainer was given."""
    accelerator = trainer.accelerator
    generator, discriminator = layers(NOISE, 2), layers(2, 1)
    generator, discriminator, optimizer_g, optimizer_d, data = accelerator.prepare(
        generator, discriminator, adam(generator, lr), adam(discriminator, lr), data
    )
    for epoch in range(trainer.max_epochs):
        for [real] in data:
            with torch.no_grad():
                fake = generator(noise_like(real))
            loss_d = discriminator_loss(discriminator, real, fake)
            optimizer_d.zero_grad()
            accelerator.backward(loss_d)
            optimizer_d.step()

            with accelerator.no_sync(discriminator):  # the gradients that it gets here are thrown away
                loss_g = generator_loss(discriminator, generator(noise_like(real)))
                optimizer_g.zero_grad()
                accelerator.backward(loss_g)
            optimizer_g.step()
        loss_d, loss_g = accelerator.reduce((loss_d.detach(), loss_g.detach()), "mean")
        accelerator.print(f"epoch {epoch}: loss_d={loss_d:.3f}, loss_g={loss_g:.3f}")
    return accelerator.unwrap_model(generator)


@torch.no_grad()
def judge(generator: nn.Module, device: torch.device) -> tuple[float, int]:
    """The share of points within four deviations of a center, and the clusters that get a fair number of them."""
    points = generator(torch.randn(4000, NOISE, device=device)).cpu()
    distances, nearest = torch.cdist(points, cluster_centers()).min(dim=1)
    inside = distances < 4 * SPREAD
    reached = (nearest[inside].bincount(minlength=CLUSTERS) > len(points) / CLUSTERS / 5).sum()
    return inside.float().mean().item(), int(reached)


@click.command()
@click.option("--how", type=click.Choice(["task", "loop"]), default="task", show_default=True)
@click.option("--epochs", default=20, show_default=True)
@click.option("--batch-size", default=128, show_default=True, help="Points of each step, over all processes.")
@click.option("--points", default=16384, show_default=True, help="Points in the data.")
@click.option("--lr", default=1e-3, show_default=True)
def main(how: str, epochs: int, batch_size: int, points: int, lr: float) -> None:
    trainer = Trainer(max_epochs=epochs, seed=0, logger=False, enable_checkpointing=False)
    data = DataLoader(real_points(points), max(1, batch_size // trainer.world_size), shuffle=True, drop_last=True)
    started = time.perf_counter()
    generator = {"task": train_as_task, "loop": train_in_own_loop}[how](trainer, data, lr)
    seconds = time.perf_counter() - started
    share, reached = judge(generator, trainer.strategy.topology.device)
    trainer.print(f"{share:.1%} of the generated points lie in a cluster; {reached} of {CLUSTERS} clusters are reached")
    trainer.print(f"trained in {seconds:.1f} s with {trainer.world_size} process(es)")


if __name__ == "__main__":
    main()
