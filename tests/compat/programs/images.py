"""What the examples of Accelerate for images do: a frozen base, one cycle of learning rates, checkpoints by step."""

from __future__ import annotations

import os
import re
import sys

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from made_here import folder, keep, report
from PIL import Image
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, Dataset


def pictures() -> list[str]:
    place = os.path.join(folder(), "pictures")
    os.makedirs(place, exist_ok=True)
    draws = np.random.default_rng(0)
    paths = []
    for index in range(50):
        kind = index % 3
        pixels = draws.integers(0, 120, (10, 10, 3), dtype=np.uint8)
        pixels[..., kind] += 100
        paths.append(os.path.join(place, f"{('red', 'green', 'blue')[kind]}_{index}.png"))
        if not os.path.exists(paths[-1]):
            written = f"{paths[-1]}.{os.getpid()}"
            Image.fromarray(pixels).save(written, format="png")
            os.replace(written, paths[-1])
    return paths


class Pictures(Dataset):
    def __init__(self, paths: list[str], augment: bool) -> None:
        self.paths, self.augment = paths, augment

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int):
        path = self.paths[index]
        image = Image.open(path).convert("RGB").resize((8, 8))
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255
        if self.augment:
            pixels = pixels.flip(2)
        label = ("red", "green", "blue").index(re.match(r"(\w+)_\d+", os.path.basename(path))[1])
        return {"image": pixels, "label": label}


def network() -> torch.nn.Module:
    base = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.BatchNorm2d(8))
    head = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(8, 3))
    return torch.nn.Sequential(base.requires_grad_(False), head)


def train(epochs: int, resume: str | None = None, workers: int = 0) -> dict[str, float]:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    set_seed(42)
    paths = pictures()
    order = np.random.permutation(len(paths))
    cut = int(0.8 * len(paths))
    loader = DataLoader(
        Pictures([paths[index] for index in order[:cut]], augment=True), 4, shuffle=True, num_workers=workers
    )
    held_out = DataLoader(Pictures([paths[index] for index in order[cut:]], augment=False), 4, num_workers=workers)
    model = network().to(accelerator.device)
    mean = torch.tensor((0.5, 0.5, 0.5))[None, :, None, None].to(accelerator.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-2 / 25)
    schedule = OneCycleLR(optimizer, max_lr=3e-2, epochs=epochs, steps_per_epoch=len(loader))
    model, optimizer, loader, held_out, schedule = accelerator.prepare(model, optimizer, loader, held_out, schedule)
    keep(model, loader, accelerator)
    step, first, skipped = 0, 0, 0
    if resume is not None:
        accelerator.load_state(resume)
        step = int(os.path.basename(resume).removeprefix("step_"))
        first, skipped = divmod(step, len(loader))
    measured = {}
    for epoch in range(first, epochs):
        model.train()
        total = torch.zeros(())
        active = accelerator.skip_first_batches(loader, skipped) if epoch == first and skipped else loader
        for batch in active:
            batch = {name: value.to(accelerator.device) for name, value in batch.items()}
            loss = torch.nn.functional.cross_entropy(model(batch["image"] - mean), batch["label"])
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            total += loss.detach()
            step += 1
            if resume is None and step % 4 == 0:
                accelerator.save_state(os.path.join(folder(), f"step_{step}"))
        model.eval()
        right = rows = 0
        for batch in held_out:
            with torch.no_grad():
                logits = model(batch["image"] - mean)
            guesses, labels = accelerator.gather_for_metrics((logits.argmax(-1), batch["label"]))
            right += int((guesses == labels).sum())
            rows += len(labels)
        named = f"{('rest of ' if epoch == first else 'resumed: ') if resume else ''}epoch {epoch}"
        measured |= {
            f"{named} loss": float(accelerator.reduce(total, "sum")),
            f"{named} right": right,
            f"{named} rows": rows,
            f"{named} lr": schedule.get_last_lr()[0],
        }
    accelerator.wait_for_everyone()
    if resume:
        accelerator.end_training()
    return measured


def main() -> None:
    first = train(2, workers=2)
    report(first | train(2, resume=os.path.join(folder(), "step_4")))


if __name__ == "__main__":
    sys.exit(main())
