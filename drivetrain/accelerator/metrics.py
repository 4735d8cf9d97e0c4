"""Gathering of per-sample values for metrics, without the rows that only pad a batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from drivetrain.data import ActiveLoaders, PreparedLoader, SkippingLoader
from drivetrain.runtime import collectives
from drivetrain.runtime.errors import DataError
from drivetrain.runtime.pytrees import field_names, honor_type, recursively_apply, with_fields
from drivetrain.strategies.base import Topology


def gather_real_rows(
    data: Any,
    loader: PreparedLoader | SkippingLoader | None,
    active: ActiveLoaders,
    topology: Topology,
    as_objects: bool = False,
) -> Any:
    # A loader that skips batches is a view of the loader that knows the current batch.
    given = loader.whole if isinstance(loader, SkippingLoader) else loader
    # Without a given loader, all loaders that are being iterated count.
    source = active if given is None else given
    if topology.environment.world_size == 1 and not _has_padding(source):
        return _cut(data, source) if any(map(_missing, _loaders(source))) else data
    if as_objects:
        return _gather_objects(data, source, topology)
    return _gather(data, source, topology)


def _cut(data: Any, source: PreparedLoader | ActiveLoaders) -> Any:

    def cut(tensor: Tensor) -> Tensor:
        keep = _real_rows(source, tensor)
        return tensor if keep is None or keep == len(tensor) else tensor[:keep]

    return recursively_apply(cut, data)


def _gather_same_shape(topology: Topology, data: Any) -> Any:
    count = topology.environment.world_size

    def pick(tensor: Tensor) -> Tensor:
        return torch.cat(topology.select(tensor.chunk(count), rows=True))

    # Processes that share a batch, as in tensor parallelism, have equal values. Keep one copy.
    everything = collectives.gather(data)
    return everything if topology.data_ranks is None else recursively_apply(pick, everything)


def _gather(data: Any, source: PreparedLoader | ActiveLoaders, topology: Topology) -> Any:
    if _holds_tensors_only(data):
        return _gather_tensors(data, source, topology)
    if isinstance(data, Mapping):
        values = {key: _gather(value, source, topology) for key, value in data.items()}
        return values if type(data) is dict else type(data)(values)  # type: ignore[call-arg]
    names = field_names(data)
    if names is not None:
        return with_fields(data, [_gather(getattr(data, name), source, topology) for name in names])
    if isinstance(data, list | tuple) and _is_structure(data):
        return honor_type(data, [_gather(value, source, topology) for value in data])
    return _gather_objects(data, source, topology)


def _is_structure(data: list[Any] | tuple[Any, ...]) -> bool:
    if any(isinstance(value, Tensor) for value in data):
        return True
    # Anything else is a list with one value per sample.
    return isinstance(data, tuple) and any(isinstance(value, Mapping | list | tuple) for value in data)


def _holds_tensors_only(data: Any) -> bool:
    if isinstance(data, Tensor):
        return True
    if isinstance(data, Mapping):
        return bool(data) and all(map(_holds_tensors_only, data.values()))
    if isinstance(data, list | tuple):
        return bool(data) and all(map(_holds_tensors_only, data))
    names = field_names(data)
    return names is not None and all(_holds_tensors_only(getattr(data, name)) for name in names)


def _gather_tensors(data: Any, source: PreparedLoader | ActiveLoaders, topology: Topology) -> Any:
    if _batches_are_full(source):
        return _gather_same_shape(topology, data)
    kept: list[int | None] = []  # real rows of each tensor; None for one that is not per-sample

    def note(tensor: Tensor) -> None:
        kept.append(_real_rows(source, tensor))

    try:
        recursively_apply(note, data)
        everyone = collectives.gather_object([kept])
    # Other processes are already in the collective: take part in it, so that all can raise the error.
    except DataError as error:
        everyone = collectives.gather_object([_Ambiguous(error)])
    _raise_what_any_raised(everyone)
    # All ranks must cut the same tensors. If they disagree about a tensor, none of them cuts it.
    verdicts = iter([None not in votes for votes in zip(*everyone, strict=True)])
    counts = iter(kept)

    def gather_one(tensor: Tensor) -> Tensor:
        keep = next(counts)
        result: Tensor
        if next(verdicts) and keep is not None:
            result = collectives.gather_rows(tensor, keep if topology.counts_rows else 0)
        else:
            result = _gather_same_shape(topology, tensor)
        return result

    return recursively_apply(gather_one, data)


def _gather_objects(data: Any, source: PreparedLoader | ActiveLoaders, topology: Topology) -> list[Any]:
    try:
        if isinstance(data, Tensor) and data.dim():
            data = data[: _real_rows(source, data)]
        elif isinstance(data, list | tuple):
            data = data[: len(data) - _padding(source, len(data))]
        own = list(data) if isinstance(data, Tensor) and data.dim() else data
        everyone = collectives.gather_object(own if topology.counts_rows else [])
    except DataError as error:
        everyone = collectives.gather_object([_Ambiguous(error)])
    _raise_what_any_raised(everyone)
    return everyone


class _Ambiguous(str):
    # Error message that a process sends in place of its values. All processes then raise the error.
    ...


def _raise_what_any_raised(everyone: list[Any]) -> None:
    for each in everyone:
        if isinstance(each, _Ambiguous):
            raise DataError(str(each))


def _loaders(source: PreparedLoader | ActiveLoaders) -> list[PreparedLoader]:
    return source.loaders if isinstance(source, ActiveLoaders) else [source]


def _batches_are_full(source: PreparedLoader | ActiveLoaders) -> bool:
    # All processes must get the same answer. It therefore follows from the global batch size alone, which a loader with
    # batches of one size reports.
    for loader in _loaders(source):
        info = loader.current
        if info is not None:
            fixed = isinstance(loader.loader, DataLoader) and loader.loader.batch_size is not None
            # If each process reads its own data, the counts differ between processes.
            if not fixed or not loader.is_shared or info.global_rows != loader.total_batch_size:
                return False
    return True


def _has_padding(source: PreparedLoader | ActiveLoaders) -> bool:
    return any(loader.current is not None and loader.current.padding for loader in _loaders(source))


def _real_rows(source: PreparedLoader | ActiveLoaders, tensor: Tensor) -> int | None:
    if not tensor.dim():
        return None
    # A tensor belongs to a current batch with as many rows. A tensor with the rows of a full batch also counts if the
    # current batch has fewer, such as a loss repeated by the batch size. In nested loops, such as an evaluation during
    # training, the inner loop comes first.
    rows, loaders = tensor.shape[0], _loaders(source)
    alike = [loader for loader in loaders if loader.current is not None and loader.current.rows == rows]
    repeated = [loader for loader in loaders if loader.batch_rows == rows and _missing(loader)]
    if repeated:
        latest = max(repeated, key=lambda loader: loader.advanced)
        if all(isinstance(source, ActiveLoaders) and source.encloses(other, latest) for other in alike):
            return rows - _missing(latest)
    return rows - _padding(source, rows) if alike else None


def _missing(loader: PreparedLoader) -> int:
    full, info = loader.batch_rows, loader.current
    real = None if info is None else info.real_rows
    return 0 if full is None or real is None else max(0, full - real)


def _padding(source: PreparedLoader | ActiveLoaders, rows: int) -> int:
    if isinstance(source, ActiveLoaders):
        return source.padding_for(rows)
    return source.current.padding if source.current is not None and source.current.rows == rows else 0
