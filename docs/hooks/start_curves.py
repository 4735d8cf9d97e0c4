"""Draw the losses of one script under another framework and under drivetrain, for the Start pages.

    python docs/hooks/start_curves.py pytorch digits
    python docs/hooks/start_curves.py lightning accelerate transformers --python .venv-compat/bin/python

The scripts below are run twice, as they are and with `drivetrain.compat.install`, by a Python that has the frameworks.
Needs matplotlib, which brings Pillow.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

PICTURES = Path(__file__).parent.parent / "images" / "start"
EPOCHS = 5
NAMES = {"lightning": "Lightning", "accelerate": "Accelerate", "transformers": "Transformers' Trainer"}
MARK = "LOSSES "


def digits() -> Any:
    import torch
    from sklearn.datasets import load_digits
    from torch.utils.data import TensorDataset

    x, y = map(torch.tensor, load_digits(return_X_y=True))
    return TensorDataset(x.float() / 16, y)


def network() -> Any:
    import torch
    from torch import nn

    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def loader() -> Any:
    import torch
    from torch.utils.data import DataLoader

    return DataLoader(digits(), batch_size=64, shuffle=True, generator=torch.Generator().manual_seed(1))


def by_plain_loop() -> list[float]:
    import torch
    from torch.nn.functional import cross_entropy

    model, losses = network(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    batches = loader()
    for _ in range(EPOCHS):
        for x, y in batches:
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


def by_accelerate() -> list[float]:
    import torch
    from accelerate import Accelerator
    from torch.nn.functional import cross_entropy

    accelerator = Accelerator(cpu=True)
    model, losses = network(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader())
    for _ in range(EPOCHS):
        for x, y in batches:
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            losses.append(loss.item())
    return losses


def by_lightning() -> list[float]:
    import lightning
    import torch
    from torch.nn.functional import cross_entropy

    losses = []

    class Digits(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            loss = cross_entropy(self.net(x), y)
            losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=2e-3)

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    lightning.Trainer(max_epochs=EPOCHS, accelerator="cpu", **quiet).fit(Digits(), loader())
    return losses


def by_trainer() -> list[float]:
    import torch
    from torch.nn.functional import cross_entropy

    from drivetrain import Task, Trainer

    losses = []

    class Digits(Task):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            loss = cross_entropy(self.net(x), y)
            losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=2e-3)

    Trainer(max_epochs=EPOCHS, accelerator="cpu", barebones=True).fit(Digits(), loader())
    return losses


def by_transformers() -> list[float]:
    import tempfile

    import torch
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

    set_seed(0)
    tokens = torch.randint(3, 64, (512, 24))
    rows = [{"input_ids": row, "labels": int(row.float().mean() > 33)} for row in tokens]
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    model = BertForSequenceClassification(BertConfig(vocab_size=64, max_position_embeddings=32, **sizes))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            num_train_epochs=EPOCHS,
            per_device_train_batch_size=32,
            learning_rate=1e-3,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = Trainer(model, arguments, train_dataset=rows)
        trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


SCRIPTS: dict[str, Callable[[], list[float]]] = {
    "plain": by_plain_loop,
    "accelerate": by_accelerate,
    "lightning": by_lightning,
    "trainer": by_trainer,
    "transformers": by_transformers,
}


def losses(script: str, python: str, mirrored: str | None = None) -> list[float]:
    """The losses of a script, in a process of its own."""
    command = [python, __file__, "--script", script, *(["--mirrored", mirrored] if mirrored else [])]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    [line] = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    found: list[float] = json.loads(line.removeprefix(MARK))
    return found


def draw(name: str, curves: dict[str, list[float]]) -> None:
    """Draw curves over one another, the first one broad."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from PIL import Image

    figure, axes = plt.subplots(figsize=(7.2, 3.6), layout="constrained")
    looks = [
        {"color": "#f5a35c", "linewidth": 6.0, "solid_capstyle": "round"},
        {"color": "#00796b", "linewidth": 2.4},
        {"color": "#1b2a3a", "linewidth": 1.0, "linestyle": (0, (4, 3))},
    ]
    for (label, values), look in zip(curves.items(), looks, strict=False):
        axes.plot(range(1, len(values) + 1), values, label=label, **look)
    first, *others = curves.values()
    difference = max(abs(a - b) for other in others for a, b in zip(first, other, strict=True))
    axes.set(xlabel="step", ylabel="training loss", title=f"Largest difference of a loss: {difference:.1g}")
    axes.title.set_fontsize(10)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    picture = PICTURES / f"{name}.png"
    figure.savefig(picture, dpi=110)
    Image.open(picture).convert("RGB").quantize(48, dither=Image.Dither.NONE).save(picture, optimize=True)
    print(f"wrote {picture}: {picture.stat().st_size:,} bytes, largest difference {difference:.3g}")


def draw_digits() -> None:
    """Train the quickstart's model, and draw twelve test images with what it predicts."""
    import runpy

    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    found = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "quickstart.py"))
    figure, panels = plt.subplots(1, 12, figsize=(9.6, 1.25), layout="constrained")
    for axes, (image, label), predicted in zip(panels, found["test"], found["digits"], strict=False):
        axes.imshow(image.reshape(8, 8), cmap="gray_r")
        axes.set_title(int(predicted), color="#00796b" if predicted == label else "#c62828", fontsize=13)
        axes.set_axis_off()
    figure.savefig(PICTURES / "quickstart_digits.png", dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the losses of one script under two frameworks.")
    parser.add_argument("pictures", nargs="*", help=f"Any of pytorch, digits, {', '.join(NAMES)}.")
    parser.add_argument("--python", default=sys.executable, help="A Python that has the other frameworks.")
    parser.add_argument("--script", choices=SCRIPTS)
    parser.add_argument("--mirrored")
    given = parser.parse_args()
    if given.script:
        if given.mirrored:
            import drivetrain.compat

            drivetrain.compat.install(given.mirrored)
        print(MARK + json.dumps(SCRIPTS[given.script]()))
    for name in given.pictures:
        if name == "digits":
            draw_digits()
        elif name == "pytorch":
            wanted = {"plain PyTorch": "plain", "Accelerator": "accelerate", "Trainer": "trainer"}
            mirrored = {"accelerate": "accelerate"}
            curves = {label: losses(each, given.python, mirrored.get(each)) for label, each in wanted.items()}
            draw("from_pytorch", curves)
        else:
            mirrored_by = "accelerate" if name == "transformers" else name
            theirs = losses(name, given.python)
            draw(
                f"from_{name}",
                {NAMES[name]: theirs, "the same script on drivetrain": losses(name, given.python, mirrored_by)},
            )


if __name__ == "__main__":
    main()
