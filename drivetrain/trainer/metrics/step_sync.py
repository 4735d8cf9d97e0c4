"""The values of single steps that are reduced over processes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from drivetrain.trainer.metrics.logged_value import LoggedValue
from drivetrain.trainer.metrics.reductions import combine_plain


def entries_to_sync(entries: Iterable[LoggedValue]) -> list[LoggedValue]:
    """Those logged with `on_step=True` and `sync_dist=True`.

    Args:
        entries: All of a stage.
    """
    return [entry for entry in entries if entry.on_step and entry.sync and entry.metric is None]


def latest_of(entries: Iterable[LoggedValue]) -> dict[str, float]:
    """This process's latest values to reduce, by the names of steps, but for those that have been.

    Args:
        entries: All of a stage.
    """
    local = [each for each in entries_to_sync(entries) if each.last is not each.synced]
    return {each.step_name: float(each.last) for each in local if each.last is not None}


def combined(entries: Iterable[LoggedValue], everyone: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The values of all processes, each name's as one.

    Args:
        entries: All of a stage.
        everyone: What `latest_of` returned on each process.
    """
    values: dict[str, float] = {}
    for entry in entries_to_sync(entries):
        found = [each[entry.step_name] for each in everyone if entry.step_name in each]
        if found:
            values[entry.step_name] = combine_plain(entry.reduction, found)
    return values
