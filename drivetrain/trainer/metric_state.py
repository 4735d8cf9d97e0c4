"""Keeping torchmetrics objects as they are while a batch of padding runs."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def untouched_metrics(task: nn.Module) -> Iterator[None]:
    """Undo in the end whatever the body did to the torchmetrics objects inside a task."""
    torchmetrics = sys.modules.get("torchmetrics")
    metrics = [m for m in task.modules() if torchmetrics is not None and isinstance(m, torchmetrics.Metric)]
    kept: list[dict[str, Any]] = [
        {
            name: copy.copy(metric.__dict__[name])
            for name in (*_states(metric), *_BOOKKEEPING)
            if name in metric.__dict__
        }
        for metric in metrics
    ]
    for metric in metrics:
        for name in _states(metric):
            state = getattr(metric, name)
            setattr(metric, name, list(state) if isinstance(state, list) else state.clone())
    try:
        yield
    finally:
        for metric, before in zip(metrics, kept, strict=True):
            metric.__dict__.update(before)


_BOOKKEEPING = ("_update_count", "_update_called", "_computed", "_forward_cache")


def _states(metric: Any) -> list[str]:
    return list(metric._defaults)
