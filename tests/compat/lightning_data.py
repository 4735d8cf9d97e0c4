"""Small data sets in the files that programs written for Lightning read, made in place: nothing is downloaded."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import zipfile
from io import BytesIO
from pathlib import Path

import numpy as np

from tests.compat.running import APART
from tests.pool import ROOT

ARCHIVE = "cats_and_dogs_filtered.zip"
TEXT = "a model reads the next word of every line and learns which one comes after it"


def digits(folder: Path, train: int = 60000, test: int = 10000) -> None:
    """Write scikit-learn's digits as the files of MNIST, as often as it takes to have as many.

    Args:
        folder: What is given to `torchvision.datasets.MNIST`.
        train: Training images.
        test: Test images.
    """
    from sklearn.datasets import load_digits

    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    images, labels = load_digits(return_X_y=True)
    pixels = np.pad(np.kron(images.reshape(-1, 8, 8), np.ones((3, 3))), ((0, 0), (2, 2), (2, 2))) * (255 / 16)
    for name, count in (("train", train), ("t10k", test)):
        chosen = np.random.default_rng(count).integers(0, len(labels), count)
        header = struct.pack(">IIII", 2051, count, 28, 28)
        (raw / f"{name}-images-idx3-ubyte").write_bytes(header + pixels[chosen].astype(np.uint8).tobytes())
        header = struct.pack(">II", 2049, count)
        (raw / f"{name}-labels-idx1-ubyte").write_bytes(header + labels[chosen].astype(np.uint8).tobytes())


def text(folder: Path, lines: int = 20000) -> None:
    """Write a text in the file of `lightning.pytorch.demos.WikiText2`.

    Args:
        folder: Where.
        lines: How many of 15 words.
    """
    folder.mkdir(parents=True, exist_ok=True)
    words = TEXT.split()
    chosen = np.random.default_rng(0).integers(0, len(words), (lines, 15))
    (folder / "wikitext-2.txt").write_text("".join(" ".join(words[each] for each in row) + "\n" for row in chosen))


def cats_and_dogs(folder: Path, each: int = 12) -> None:
    """Write the archive of two kinds of pictures that an example unpacks.

    Args:
        folder: Where.
        each: Pictures of a kind, for training and again for validation.
    """
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    draws = np.random.default_rng(0)
    with zipfile.ZipFile(folder / ARCHIVE, "w") as archive:
        for part in ("train", "validation"):
            for brightest, kind in ((128, "cats"), (255, "dogs")):
                for number in range(each):
                    picture = BytesIO()
                    Image.fromarray(draws.integers(0, brightest, (32, 32, 3), dtype=np.uint8)).save(picture, "PNG")
                    archive.writestr(f"cats_and_dogs_filtered/{part}/{kind}/{number}.png", picture.getvalue())


def weights(folder: Path, file: str = "resnet50-11ad3fa6.pth", name: str = "resnet50") -> None:
    """Write a model's weights where torch looks for those that it has downloaded.

    Args:
        folder: The variable `TORCH_HOME`.
        file: The name of the file.
        name: The model in torchvision.
    """
    place = folder / "hub" / "checkpoints"
    place.mkdir(parents=True)
    script = (
        "import sys, torch\n"
        "from tests.compat.beside_lightning import let_torchvision_be_imported\n"
        "let_torchvision_be_imported()\n"
        "from torchvision.models import get_model\n"
        "torch.manual_seed(0)\n"
        "torch.save(get_model(sys.argv[1]).state_dict(), sys.argv[2])\n"
    )
    # A process of its own: torchvision lies apart, and must not be found by other tests.
    path = os.pathsep.join([str(ROOT), APART, os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", script, name, str(place / file)]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": path})
