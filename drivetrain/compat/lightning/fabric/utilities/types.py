"""Names of types."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeAlias

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

_PATH: TypeAlias = str | Path
LRSchedulerLike: TypeAlias = LRScheduler | ReduceLROnPlateau
Optimizable: TypeAlias = Any
