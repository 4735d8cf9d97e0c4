"""The `Trainer` of denoising-diffusion-pytorch: trains, saves, and loads, on pictures made in place."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from accelerate.utils import set_seed

# What torchvision registers for tracing needs its compiled operators, which a build for CUDA lacks on a CPU.
sys.modules["torchvision._meta_registrations"] = ModuleType("torchvision._meta_registrations")

from denoising_diffusion_pytorch import GaussianDiffusion, Trainer, Unet  # noqa: E402
from made_here import folder, keep, options, report  # noqa: E402
from PIL import Image  # noqa: E402


def pictures() -> str:
    # The Trainer reads a folder in the order of the disk, which one process alone leaves always the same.
    place = Path(folder(), f"pictures of {os.environ.get('RANK', '0')}")
    if not place.exists():
        place.mkdir()
        draws = np.random.default_rng(0)
        for index in range(120):
            Image.fromarray(draws.integers(0, 255, (8, 8, 3), dtype=np.uint8)).save(place / f"{index:03}.png")
    return str(place)


def trainer(steps: int, losses: list[float]) -> Trainer:
    set_seed(13)
    diffusion = GaussianDiffusion(
        Unet(dim=8, dim_mults=(1, 2), flash_attn=False), image_size=8, timesteps=10, sampling_timesteps=2
    )
    diffusion.register_forward_hook(lambda module, inputs, loss: losses.append(loss.item()))
    return Trainer(
        diffusion,
        pictures(),
        train_batch_size=16 if "split" in options() else 8,
        train_lr=1e-3,
        train_num_steps=steps,
        gradient_accumulate_every=2,
        save_and_sample_every=3,
        num_samples=4,
        results_folder=f"{folder()}/results",
        calculate_fid=False,
        amp=False,
        max_grad_norm=1.0,
        augment_horizontal_flip="unflipped" not in options(),
    )


def weight_of(each: Trainer) -> float:
    model = each.accelerator.unwrap_model(each.model)
    return float(sum(parameter.detach().double().abs().sum() for parameter in model.parameters()))


def let_torch_load_to_numbered_cpus() -> None:
    torch.serialization.register_package(
        0, lambda storage: None, lambda storage, location: storage if location.startswith("cpu:") else None
    )


def main() -> None:
    if "numbered" in options():
        let_torch_load_to_numbered_cpus()
    losses: list[float] = []
    first = trainer(3, losses)
    before = weight_of(first)
    first.train()
    measured = {"before": before, "weights": weight_of(first)}
    first.accelerator.wait_for_everyone()  # the first process has saved
    again = trainer(4, losses)
    again.load(1)
    measured["loaded"] = weight_of(again)
    torch.manual_seed(1)
    again.train()
    measured |= {"steps": again.step, "weights at the end": weight_of(again)}
    report(measured | {f"loss {number}": loss for number, loss in enumerate(losses)})
    keep(first, again)


main()
