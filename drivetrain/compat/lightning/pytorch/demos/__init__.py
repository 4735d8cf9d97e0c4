"""Small models and datasets for examples and tests."""

from __future__ import annotations

from drivetrain.compat.lightning.pytorch.demos.boring_classes import (
    BoringDataModule,
    BoringModel,
    DemoModel,
    ManualOptimBoringModel,
)
from drivetrain.compat.lightning.pytorch.demos.transformer import LightningTransformer, Transformer, WikiText2

__all__ = [
    "BoringDataModule",
    "BoringModel",
    "DemoModel",
    "LightningTransformer",
    "ManualOptimBoringModel",
    "Transformer",
    "WikiText2",
]
