"""Type aliases."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

_DEVICE: TypeAlias = torch.device | str | int
_MAP_LOCATION_TYPE: TypeAlias = _DEVICE | Callable[[Any, str], Any] | dict[Any, Any] | None
_PATH: TypeAlias = str | Path
LRSchedulerLike: TypeAlias = LRScheduler | ReduceLROnPlateau
Optimizable: TypeAlias = Any
