"""The states of the torchmetrics objects inside a task: kept as they are while padding runs, saved and restored."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_BOOKKEEPING = ("_update_count", "_update_called", "_computed", "_forward_cache")


@contextmanager
def untouched_metrics(task: nn.Module) -> Iterator[None]:
    """Undo in the end whatever the body did to the torchmetrics objects inside a task."""
    metrics = list(find_metrics(task).values())
    kept: list[dict[str, Any]] = [
        {
            name: copy.copy(metric.__dict__[name])
            for name in (*metric._defaults, *_BOOKKEEPING)
            if name in metric.__dict__
        }
        for metric in metrics
    ]
    for metric in metrics:
        for name in metric._defaults:
            state = getattr(metric, name)
            setattr(metric, name, list(state) if isinstance(state, list) else state.clone())
    try:
        yield
    finally:
        for metric, before in zip(metrics, kept, strict=True):
            metric.__dict__.update(before)


def metric_states(metrics: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What this process's metrics have seen since they were last reset, by their place in the task.

    Args:
        metrics: From `find_metrics`.
    """
    return {
        path: {
            "updates": metric._update_count,
            "values": {
                name: [item.detach().clone() for item in value] if isinstance(value, list) else value.detach().clone()
                for name in metric._defaults
                if isinstance(value := getattr(metric, name), Tensor | list)
            },
        }
        for path, metric in metrics.items()
        if metric._update_count
    }


def merged_metric_states(task: nn.Module, states: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """The metric states of several processes as those of one, combined as each metric combines them over processes."""
    metrics = find_metrics(task)
    merged: dict[str, Any] = {}
    for path in dict.fromkeys(path for each in states for path in each):
        parts = [each[path] for each in states if path in each]
        reductions = metrics[path]._reductions if path in metrics else {}
        merged[path] = {
            "updates": sum(part["updates"] for part in parts),
            "values": {
                name: _combined([part["values"][name] for part in parts], reductions.get(name))
                for name in parts[0]["values"]
            },
        }
    return merged


def _combined(values: list[Any], reduction: Any) -> Any:
    if isinstance(values[0], list):
        return [item for value in values for item in value]
    if len(values) == 1 or reduction is None:
        return values[0]
    return reduction(torch.stack(values))


def restore_metric_states(task: nn.Module, states: Mapping[str, Mapping[str, Any]]) -> None:
    """Give metrics back what `metric_states` returned; those without a state are reset."""
    for path, metric in find_metrics(task).items():
        metric.reset()
        saved = states.get(path)
        if saved is None:
            continue
        for name, value in saved["values"].items():
            items = [item.to(metric.device) for item in value] if isinstance(value, list) else value.to(metric.device)
            setattr(metric, name, items)
        metric._update_count = saved["updates"]


def find_metrics(task: nn.Module) -> dict[str, Any]:
    """The torchmetrics objects inside a task, by their place; torchmetrics is not imported to find out."""
    torchmetrics = sys.modules.get("torchmetrics")
    if torchmetrics is None:
        return {}
    return {path: module for path, module in task.named_modules() if isinstance(module, torchmetrics.Metric)}
