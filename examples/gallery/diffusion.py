"""Diffusion in a loop of one's own: the Accelerator, an average of the weights, and samples of each digit.

    python examples/gallery/diffusion.py
    drivetrain launch --num_processes 2 examples/gallery/diffusion.py

Denoising diffusion (Ho, Jain and Abbeel 2020, https://arxiv.org/abs/2006.11239) on scikit-learn's 1797 digits of 8x8
pixels, guided by the digit that is asked for (Ho and Salimans 2022, https://arxiv.org/abs/2207.12598). A classifier by
nearest neighbours, which has seen only real digits, reads what is drawn.
"""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path

import click
import torch
import torch.nn.functional as F
from matplotlib.image import imsave
from sklearn.datasets import load_digits
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator, set_seed

STEPS, ANY_DIGIT = 100, 10
# What is left of the image after each step: the cosine schedule of https://arxiv.org/abs/2102.09672.
KEPT = torch.cos((torch.arange(STEPS + 1) / STEPS + 0.008) / 1.008 * math.pi / 2).square().clamp(min=1e-4)[1:]


class Denoiser(nn.Module):
    """Estimates the noise in an image (rows, 64) from the step (rows,) and the digit (rows,), or 10 for any digit."""

    def __init__(self, width: int = 256, blocks: int = 3) -> None:
        super().__init__()
        self.steps, self.digits = nn.Embedding(STEPS, width), nn.Embedding(11, width)
        self.first, self.last = nn.Linear(64, width), nn.Linear(width, 64)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
            for _ in range(blocks)
        )

    def forward(self, noisy: Tensor, step: Tensor, digits: Tensor) -> Tensor:
        x, asked = self.first(noisy), self.steps(step) + self.digits(digits)
        for block in self.blocks:
            x = x + block(x + asked)
        return self.last(x)


def denoising_loss(model: nn.Module, images: Tensor, digits: Tensor) -> Tensor:
    """The error of the estimated noise at a random step; one digit in ten is hidden, for guidance."""
    step = torch.randint(STEPS, (len(images),), device=images.device)
    noise, kept = torch.randn_like(images), KEPT.to(images.device)[step, None]
    digits = torch.where(torch.rand(len(images), device=images.device) < 0.1, ANY_DIGIT, digits)
    return F.mse_loss(model(kept.sqrt() * images + (1 - kept).sqrt() * noise, step, digits), noise)


@torch.no_grad()
def draw(model: nn.Module, digits: Tensor, guidance: float = 1.0) -> Tensor:
    """Images (rows, 64) of these digits, from noise, step by step."""
    x = torch.randn(len(digits), 64, device=digits.device)
    for index in reversed(range(STEPS)):
        step = torch.full_like(digits, index)
        asked, free = model(x, step, digits), model(x, step, torch.full_like(digits, ANY_DIGIT))
        noise = asked + guidance * (asked - free)
        kept, before = KEPT[index], KEPT[index - 1] if index else torch.tensor(1.0)
        image = ((x - (1 - kept).sqrt() * noise) / kept.sqrt()).clamp(-1, 1)
        alpha = kept / before
        mean = (before.sqrt() * (1 - alpha) * image + alpha.sqrt() * (1 - before) * x) / (1 - kept)
        x = mean + ((1 - before) / (1 - kept) * (1 - alpha)).sqrt() * torch.randn_like(x)
    return x


@click.command()
@click.option("--small", is_flag=True, help="Few epochs, to see that it runs.")
@click.option("--output", default="diffusion", type=click.Path(path_type=Path), help="Where to write.")
def main(small: bool, output: Path) -> None:
    epochs, batch_size, lr = (10 if small else 100), 64, 1e-3
    accelerator = Accelerator(log_with="csv", project_dir=output, split_batches=True)
    set_seed(0)
    data = load_digits()
    images, labels = torch.tensor(data.data, dtype=torch.float32) / 8 - 1, torch.tensor(data.target)
    loader = DataLoader(TensorDataset(images, labels), batch_size, shuffle=True, drop_last=True)
    model = Denoiser()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=epochs * len(loader))
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    average = copy.deepcopy(accelerator.unwrap_model(model)).requires_grad_(False)
    accelerator.register_for_checkpointing(average)
    accelerator.init_trackers("run", config={"epochs": epochs, "batch_size": batch_size, "lr": lr})
    reader = KNeighborsClassifier(5).fit(images.numpy(), labels.numpy())

    for epoch in range(epochs):
        losses = []
        for batch, digits in loader:
            loss = denoising_loss(model, batch, digits)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for mean, value in zip(average.parameters(), accelerator.unwrap_model(model).parameters(), strict=True):
                    mean.lerp_(value, 0.01)
            losses.append(loss.detach())
        values = {"loss": accelerator.reduce(torch.stack(losses).mean(), "mean")}
        if (epoch + 1) % max(1, epochs // 10) == 0:
            asked = torch.arange(10, device=accelerator.device).repeat(30)
            read = torch.as_tensor(reader.predict(draw(average, asked).cpu().numpy()))
            values["read_as_asked"] = (read == asked.cpu()).float().mean()
            accelerator.print(f"epoch {epoch + 1}: " + ", ".join(f"{k} {float(v):.3f}" for k, v in values.items()))
        accelerator.log({**values, "lr": schedule.get_last_lr()[0]}, step=(epoch + 1) * len(loader))

    accelerator.save_state(output / "checkpoint")
    if accelerator.is_main_process:  # ten rows of one digit each
        drawn = (
            draw(average, torch.arange(10, device=accelerator.device).repeat_interleave(16)).cpu().view(10, 16, 8, 8)
        )
        grid = F.pad(drawn, (1, 1, 1, 1), value=-1).permute(0, 2, 1, 3).reshape(100, 160)
        imsave(output / "samples.png", grid.numpy(), cmap="gray")
        (output / "results.json").write_text(json.dumps({name: float(value) for name, value in values.items()}))
    accelerator.end_training()


if __name__ == "__main__":
    main()
