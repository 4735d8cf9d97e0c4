"""Gathering per-sample values without the rows that only pad a batch."""

from __future__ import annotations

from typing import Any

import torch

from drivetrain.data import ActiveLoaders, BatchInfo, PreparedLoader
from drivetrain.runtime import collectives
from drivetrain.runtime.nested import recursively_apply


def gather_real_rows(
    data: Any, source: PreparedLoader | ActiveLoaders, num_processes: int, as_objects: bool = False
) -> Any:
    """Gather nested per-sample values of the current batch from all processes.

    Args:
        data: nested structure of tensors, or a list of objects.
        source: the loader whose batch this is, or the loaders being iterated.
        num_processes: processes of the run.
        as_objects: gather as objects even where all are tensors.

    Returns:
        The real rows in rank order.
    """
    if num_processes == 1:
        return data
    tensors: list[torch.Tensor] = []
    others: list[Any] = []
    recursively_apply(tensors.append, data, test_type=lambda value: isinstance(value, torch.Tensor))
    _collect_others(data, others)
    if as_objects or others or not tensors:
        return collectives.gather_object(_without_padding(data, source))
    if not _any_padding(source, num_processes):
        return collectives.gather(data)
    # Which tensors are per-sample must be the same everywhere: where ranks disagree, none is cut.
    mine = [tensor.dim() > 0 and _matches(source, tensor.shape[0]) for tensor in tensors]
    agreed = [all(votes) for votes in zip(*collectives.gather_object([mine]), strict=True)]
    verdicts = iter(agreed)

    def gather_one(tensor: torch.Tensor) -> torch.Tensor:
        if not next(verdicts):
            gathered: torch.Tensor = collectives.gather(tensor)
            return gathered
        keep = tensor.shape[0] - _padding(source, tensor.shape[0])
        rows: torch.Tensor = collectives.gather_rows(tensor, keep)
        return rows

    return recursively_apply(gather_one, data)


def _infos(source: PreparedLoader | ActiveLoaders) -> list[BatchInfo]:
    loaders = [source] if isinstance(source, PreparedLoader) else source.loaders
    return [loader.current for loader in loaders if loader.current is not None]


def _any_padding(source: PreparedLoader | ActiveLoaders, num_processes: int) -> bool:
    """Whether on any rank a current batch is padded or shorter than its peers'; the same answer on all ranks."""
    return any(
        info.rows is None or info.global_rows is None or info.global_rows != info.rows * num_processes
        for info in _infos(source)
    )


def _matches(source: PreparedLoader | ActiveLoaders, rows: int) -> bool:
    return any(info.rows == rows for info in _infos(source))


def _padding(source: PreparedLoader | ActiveLoaders, rows: int) -> int:
    if isinstance(source, ActiveLoaders):
        return source.padding_for(rows)
    return source.current.padding if source.current is not None and source.current.rows == rows else 0


def _without_padding(data: Any, source: PreparedLoader | ActiveLoaders) -> Any:
    """A list or tensor of samples without its padding; anything else as it is."""
    if isinstance(data, list | tuple | torch.Tensor) and _matches(source, len(data)):
        return data[: len(data) - _padding(source, len(data))]
    return data


def _collect_others(data: Any, found: list[Any]) -> None:
    if isinstance(data, torch.Tensor):
        return
    if isinstance(data, dict):
        for value in data.values():
            _collect_others(value, found)
    elif isinstance(data, list | tuple):
        for value in data:
            _collect_others(value, found)
    else:
        found.append(data)
