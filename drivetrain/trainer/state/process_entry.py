"""What a checkpoint keeps of each process, also for a run of another number of processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from drivetrain import checkpoint
from drivetrain.checkpoint.schema import process_in_schema
from drivetrain.strategies import Strategy
from drivetrain.trainer.metrics.metric_states import merged_metric_states


def layout_of(strategy: Strategy) -> list[Any]:
    """How processes share the data, the same on all: what one has kept belongs to its place in it."""
    topology = strategy.topology
    return [topology.data_shard.count, None if topology.value_ranks is None else list(topology.value_ranks)]


def taken_over(directory: str, strategy: Strategy, task: nn.Module) -> dict[str, Any]:
    """This process's part of what the processes of a run of another size or layout had kept.

    Every one of theirs is taken over by exactly one process, so that sums over an epoch stay whole.

    Args:
        directory: The checkpoint.
        strategy: Which processes' values count now.
        task: The task, whose metrics define how their states combine.

    Returns:
        Entries like those of one process; none where the processes had kept nothing.
    """
    world_size, own = checkpoint.read_processes(directory)
    first = process_in_schema(own(0))["driver"]
    if "logged" not in first:
        return {}
    _, ranks = first.get("layout", [None, None])
    there = range(world_size) if ranks is None else ranks
    position, count = strategy.topology.value_place
    states = [process_in_schema(own(each))["driver"] for each in there[position::count]]
    if not states:
        return {"logged": {**first["logged"], "train": []}, "metrics": {}}
    return {
        "logged": {**states[0]["logged"], "train": _merged([state["logged"]["train"] for state in states])},
        "metrics": merged_metric_states(task, [state["metrics"] for state in states]),
        "finished_metrics": states[0].get("finished_metrics", []),
    }


def _merged(tables: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """The entries of several processes as those of one."""
    found: dict[str, dict[str, Any]] = {}
    for table in tables:
        for entry in table:
            known = found.get(entry["name"])
            found[entry["name"]] = dict(entry) if known is None else _combined(known, entry)
    return list(found.values())


def _combined(one: dict[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    totals = [entry["total"] for entry in (one, other) if entry["total"] is not None]
    if len(totals) == 2:
        totals = [_total(one["reduction"], totals[0], totals[1])]
    pending = [entry["pending"] for entry in (one, other) if entry["pending"] is not None]
    return {
        **one,
        "total": totals[0] if totals else None,
        "weight": one["weight"] + other["weight"],
        "pending": torch.cat(pending) if pending else None,
        "weights": [*one["weights"], *other["weights"]],
        "fresh": one["fresh"] or other["fresh"],
    }


def _total(reduction: str | None, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    if reduction is None:  # by a function, of all values together
        return torch.cat([one, other])
    if reduction in ("mean", "sum"):
        return one + other
    return torch.maximum(one, other) if reduction == "max" else torch.minimum(one, other)
