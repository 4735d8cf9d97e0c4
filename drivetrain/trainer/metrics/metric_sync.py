"""Computation of torchmetrics objects over all ranks, and saving and restoring of their states."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.runtime.collectives import gather_object

Select = Callable[[list[Any]], list[Any]]


def compute_over_processes(metric: Any, select: Select = list) -> Any:
    # Works even if some ranks have not updated the metric. `select` picks, from the states of all ranks, those that
    # count.
    with _states_exchanged_whole(metric, select), warnings.catch_warnings():
        # On a rank without batches this warning is wrong, since the states of the other ranks are used.
        warnings.filterwarnings("ignore", message=".*`compute` method of metric .* was called before the `update`")
        return metric.compute()


def restrict_sync(metrics: Iterable[Any], ranks: Sequence[int] | None) -> Callable[[], None]:
    """Synchronize `metrics` only between `ranks`, so that no sample counts twice. Return an undo function.

    The other ranks saw the same batches, whose samples would count several times. Used for metrics that a task computes
    itself. Metrics with their own `process_group` or `dist_sync_fn` are left alone.
    """
    changed = []
    if ranks is not None:
        changed = [each for each in metrics if each.process_group is None and each.dist_sync_fn is None]
        for metric in changed:
            metric.dist_sync_fn = partial(_gather_from, ranks)

    def restore() -> None:
        for metric in changed:
            metric.dist_sync_fn = None

    return restore


def _gather_from(ranks: Sequence[int], state: Tensor, group: Any = None) -> list[Tensor]:
    from torchmetrics.utilities.distributed import gather_all_tensors

    everyone = gather_all_tensors(state, group)
    return [everyone[rank] for rank in ranks]


@contextmanager
def _states_exchanged_whole(metric: Any, select: Select) -> Iterator[None]:
    # torchmetrics (1.9) runs a collective for each tensor of a state. If a rank has seen no batch, or fewer than
    # others, the number, shape or dtype of these tensors differs between ranks. gloo then aborts the process or hangs.
    from torchmetrics import Metric

    changed = [
        inner
        for inner in metric.modules()
        if isinstance(inner, Metric) and type(inner)._sync_dist is Metric._sync_dist and inner.process_group is None
    ]
    for inner in changed:
        # On the instance, so that other metrics of the class stay as they are. There is no public hook for it.
        inner.__dict__["_sync_dist"] = partial(_exchange_states, inner, select)
    try:
        yield
    finally:
        for inner in changed:
            inner.__dict__.pop("_sync_dist", None)


def _exchange_states(metric: Any, select: Select, *_: Any, **__: Any) -> None:
    # torchmetrics calls this before `compute()`, and restores this rank's states afterwards.
    own = {name: _on_cpu(getattr(metric, name)) for name in metric._reductions}
    everyone: list[dict[str, Any]] = select(gather_object([own]))
    for name, reduction in metric._reductions.items():
        states = [each[name] for each in everyone]
        merged: Any
        if isinstance(states[0], list):
            merged = [item.to(metric.device) for state in states for item in state]
            merged = reduction(merged) if merged and reduction is not None else merged
        else:
            merged = torch.stack([state.to(metric.device) for state in states])
            merged = merged if reduction is None else reduction(merged)
        setattr(metric, name, merged)


def _on_cpu(state: Any) -> Any:
    return state.cpu() if isinstance(state, Tensor) else [item.cpu() for item in state]


# States of metrics inside a task


_BOOKKEEPING = ("_update_count", "_update_called", "_computed", "_forward_cache")


@contextmanager
def untouched_metrics(task: nn.Module) -> Iterator[None]:
    # Used for padding, which must not count.
    metrics = list(find_metrics(task).values())
    kept: list[dict[str, Any]] = [
        {
            name: copy.copy(metric.__dict__[name])
            for name in (*metric._defaults, *_BOOKKEEPING)
            if name in metric.__dict__
        }
        for metric in metrics
    ]
    # The body updates copies: metrics may change their tensors in place.
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
    """Return copies of the metrics' states by module path, to restore them later.

    Leave out unused metrics.
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
    # Without a reduction there is no rule for merging, so the first rank's state is kept.
    if len(values) == 1 or reduction is None:
        return values[0]
    return reduction(torch.stack(values))


def restore_metric_states(task: nn.Module, states: Mapping[str, Mapping[str, Any]]) -> None:
    """Load saved states into a task's metrics, and reset the other metrics."""
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
    """Return all torchmetrics objects inside a task, by module path.

    Return {} if torchmetrics is not imported.
    """
    torchmetrics = sys.modules.get("torchmetrics")
    if torchmetrics is None:
        return {}
    return {path: module for path, module in task.named_modules() if isinstance(module, torchmetrics.Metric)}
