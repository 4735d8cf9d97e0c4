"""What the examples of this folder share: scikit-learn's digits, a small network, and its accuracy."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Dataset, TensorDataset, random_split

from drivetrain import Accelerator

TRAIN, TEST = 1472, 325
"""Images; the first is a multiple of 32, so that every batch is full on two processes too."""


def load_images() -> TensorDataset:
    """All 1797 images, 64 pixels each, in [0, 1], with their digits."""
    data = load_digits()
    return TensorDataset(torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target))


def split_images() -> tuple[Dataset, Dataset]:
    """Images to train on and to test with, the same in every process."""
    return tuple(random_split(load_images(), [TRAIN, TEST], generator=torch.Generator().manual_seed(0)))


def make_model() -> nn.Module:
    """A classifier with the same weights in every process."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


@torch.no_grad()
def accuracy_of(accelerator: Accelerator, model: nn.Module, loader) -> float:
    """The share of images that are named right; each counts once. See distributed_evaluation.py."""
    model.eval()
    right = seen = 0
    for images, labels in loader:
        guesses, labels = accelerator.gather_for_metrics((model(images).argmax(dim=1), labels))
        right += (guesses == labels).sum().item()
        seen += len(labels)
    return right / seen
