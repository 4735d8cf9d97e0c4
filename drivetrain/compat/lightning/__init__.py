"""Lightning's module paths and names, implemented with drivetrain. Scripts for Lightning 2.6 run with it.

`import drivetrain.compat.lightning as lightning`, `drivetrain.compat.install("lightning", "pytorch_lightning")` or
`drivetrain launch --as lightning` replace the original by it. `pytorch_lightning` is `lightning.pytorch`, and
`lightning_fabric` is `lightning.fabric`.
"""

from __future__ import annotations

from drivetrain.callbacks import Callback
from drivetrain.compat.lightning import fabric, pytorch
from drivetrain.compat.lightning.fabric.fabric import Fabric
from drivetrain.compat.lightning.fabric.utilities.seed import seed_everything
from drivetrain.compat.lightning.pytorch.core import LightningDataModule, LightningModule
from drivetrain.compat.lightning.pytorch.trainer import Trainer
from drivetrain.compat.lightning.version import VERSION as __version__

__all__ = [
    "Callback",
    "Fabric",
    "LightningDataModule",
    "LightningModule",
    "Trainer",
    "__version__",
    "fabric",
    "pytorch",
    "seed_everything",
]
