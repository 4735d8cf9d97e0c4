"""What `self.log` keeps: detached tensors, folded rarely, turned into numbers only where something is shown."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from numbers import Number
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from drivetrain.runtime.collectives import gather_object
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.strategies.topology import Topology
from drivetrain.trainer.metrics.evaluation_counts import EvaluationCounts
from drivetrain.trainer.metrics.log_moments import ARGUMENTS as ARGUMENTS
from drivetrain.trainer.metrics.log_moments import moment_of, moments_of
from drivetrain.trainer.metrics.log_scopes import NOWHERE, TRAIN_STEP, LogScope
from drivetrain.trainer.metrics.logged_value import (
    REDUCTIONS,
    Arguments,
    EpochValue,
    LoggedValue,
    Mark,
    Value,
)
from drivetrain.trainer.metrics.metric_sync import compute_over_processes
from drivetrain.trainer.metrics.reductions import reduced, reduction_of
from drivetrain.trainer.metrics.step_sync import combined, entries_to_sync, latest_of

_REDUCE, _METRIC_PATH = 4, 7  # among the arguments
Call = tuple[str, Any, Arguments, "float | None"]
_RESTORED: Arguments = ("restored from a checkpoint",)


class LogMark(NamedTuple):
    """What all values were at one moment."""

    entries: list[tuple[LoggedValue, Mark]]
    epoch: dict[str, Value]
    bar: dict[str, Value]
    evaluated: dict[str, int]


class LoggedValues:
    """Everything that a run logs, by stage and name.

    Args:
        find_batch_size: Gives the rows of the current batch that are real; called only where a mean needs it.
        topology: Which processes' values together are those of the global batch; all if None.
        has_trackers: Whether there is any tracker.

    Attributes:
        scope: From where values are logged now.
        dataloader_idx: The number of the loader that is evaluated, where there are several.
        skips: Whether values are left out, since they come from a batch that only stands in; until `enter`.
        evaluated: How many batches were evaluated.
    """

    def __init__(
        self,
        find_batch_size: Callable[[], int],
        topology: Topology | None = None,
        has_trackers: Callable[[], bool] = lambda: True,
    ) -> None:
        self._topology, self._has_trackers = topology, has_trackers
        self._record: list[Call] | None = None
        self.scope = NOWHERE
        self.dataloader_idx: int | None = None
        self.skips = False
        self._find_batch_size = find_batch_size
        self._tables: dict[str, dict[str, LoggedValue]] = {"train": {}, "validate": {}, "test": {}}
        self._current: dict[str, LoggedValue] = {}
        self._by_loader: dict[tuple[Any, ...], dict[str, LoggedValue]] = {}
        self._epoch: dict[str, Value] = {}
        self._finished: list[Any] = []  # metrics whose epoch is over, to be reset after its hooks
        self._bar: dict[str, Value] = {}
        self._tried: dict[str, Value] = {}  # the sanity check's, until training begins
        self._tried_bar: dict[str, Value] = {}
        self.evaluated = EvaluationCounts()
        self._separates_moments = False

    # where we are

    def separate_moments(self) -> None:
        """Let one name be logged both by steps and where an epoch begins or ends, as two values."""
        self._separates_moments = True

    def enter(self, scope: LogScope, dataloader_idx: int | None = None) -> None:
        """Set from where values are logged from now on; whatever was muted belongs to the scope before."""
        self.scope = scope
        self.dataloader_idx = dataloader_idx
        self.skips = False
        if self._tried and scope.stage == "train":
            self._tried, self._tried_bar = {}, {}
        moment = scope.has_batch and self._separates_moments
        self._current = self._by_loader.setdefault((scope.stage, dataloader_idx, moment), {})

    @contextmanager
    def forbidden(self, scope: LogScope) -> Iterator[None]:
        """Let nothing be logged in the body; afterwards everything is as before."""
        before, skips = (self.scope, self.dataloader_idx), self.skips
        self.enter(scope)
        try:
            yield
        finally:
            self.enter(*before)
            self.skips = skips

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Log in the body into tables that are empty, and gone in the end."""
        before = dict(self.__dict__)
        self._tables = {stage: {} for stage in self._tables}
        self._by_loader, self._epoch, self._bar, self.evaluated = {}, {}, {}, EvaluationCounts()
        self._tried, self._tried_bar = {}, {}
        self.enter(NOWHERE)
        try:
            yield
        finally:
            self.__dict__.update(before)

    @contextmanager
    def diverted(self) -> Iterator[list[tuple[str, Any, Arguments, float | None]]]:
        """Collect the arguments of `log` in the body, rather than taking what it logs; none for values left out."""
        calls: list[tuple[str, Any, Arguments, float | None]] = []

        def collect(name: str, value: Any, arguments: Arguments, batch_size: float | None) -> None:
            if not self.skips:
                kept = value.detach().clone() if isinstance(value, Tensor) else value
                calls.append((name, kept, arguments, batch_size))

        self.__dict__["log"] = collect
        try:
            yield calls
        finally:
            del self.__dict__["log"]

    def rows_of_batch(self) -> int:
        """The rows that a mean of the batch under way is weighed with."""
        return self._find_batch_size()

    def log(self, name: str, value: Any, arguments: Arguments, batch_size: float | None) -> None:
        """Keep one value.

        Args:
            name: What to call it.
            value: A scalar tensor, a number, or a torchmetrics object.
            arguments: The other arguments of `Task.log`, in the order of `ARGUMENTS`.
            batch_size: Rows that a mean weighs it with; the batch's real rows if None.
        """
        entry = self._current.get(name)
        if entry is None or entry.arguments != arguments or entry.scope is not self.scope:
            entry = self._with_new_function(entry, arguments) or self._register(name, value, arguments)
        if self.skips:
            return
        if isinstance(value, Tensor):
            if value.numel() != 1:
                raise ConfigurationError(
                    f"log({name!r}, ...) takes a scalar, got a tensor of shape {tuple(value.shape)}. "
                    "Reduce it first, such as with .mean().",
                    code="DT-090",
                )
            # What requires gradients was computed in this step; anything else may be changed in place later.
            value = value.detach() if value.requires_grad else value.clone()
        elif entry.metric is not None:
            entry.fresh = True
            if entry.on_step:
                entry.last, entry.stepped = value._forward_cache, True
            if self._record is not None:
                self._record.append((name, value._forward_cache, arguments, None))
            return
        elif not isinstance(value, float | int):
            value = _number(name, value)
        weight = 1.0
        if entry.weighs:
            if batch_size is not None:
                weight = batch_size
            elif self.scope.has_batch:
                weight = self._find_batch_size()
        entry.update(value, weight)
        if self._record is not None:
            self._record.append((name, float(value), arguments, weight))

    @contextmanager
    def recorded(self) -> Iterator[list[Call]]:
        """Collect what the body logs, for processes that did not run it."""
        calls: list[Call] = []
        self._record = calls
        try:
            yield calls
        finally:
            self._record = None

    def replay(self, calls: Iterable[Call], task: nn.Module) -> None:
        """Log what another process has logged.

        Args:
            calls: What `recorded` collected there.
            task: The task, in which metrics are found.
        """
        for name, value, arguments, weight in calls:
            metric = _find_metric(task, arguments[_METRIC_PATH])
            if metric is not None:
                metric._forward_cache = value
            self.log(name, value if metric is None else metric, arguments, weight)

    def _with_new_function(self, entry: LoggedValue | None, arguments: Arguments) -> LoggedValue | None:
        """Return the entry if nothing but the object of its `reduce_fx` is new, as that of a lambda in a step is."""
        if entry is None or entry.scope is not self.scope or not _is_same_function(entry.reduction, arguments[_REDUCE]):
            return None
        if (
            entry.arguments[:_REDUCE] != arguments[:_REDUCE]
            or entry.arguments[_REDUCE + 1 :] != arguments[_REDUCE + 1 :]
        ):
            return None
        entry.arguments, entry.reduction = arguments, arguments[_REDUCE]
        return entry

    def _register(self, name: str, value: Any, arguments: Arguments) -> LoggedValue:
        scope = self.scope
        prog_bar, logger, on_step, on_epoch, reduce_fx, sync, several, metric_path, main_only = arguments
        known = self._current.get(name)
        steps, epochs = moments_of(name, scope, arguments, on_step, on_epoch, known)
        if logger:
            self._warn_without_trackers(name)
        suffix = f"/dataloader_idx_{self.dataloader_idx}" if self.dataloader_idx is not None and several else ""
        metric = value if _is_metric(value) else None
        entry = LoggedValue(
            name + suffix,
            arguments,
            scope,
            on_step=steps,
            on_epoch=epochs,
            prog_bar=prog_bar,
            logger=True if logger is None else logger,
            reduction=reduction_of(name, reduce_fx),
            sync=sync,
            main_only=main_only,
            metric=metric,
            metric_path=metric_path,
            loader=self.dataloader_idx,
            suffix=suffix,
        )
        table, key = self._tables[scope.stage], entry.name
        restored = table.get(key)
        if restored is not None and restored.arguments == _RESTORED:
            entry.adopt(restored)
        elif restored is not None and self._separates_moments and restored.scope.has_batch is not scope.has_batch:
            key = f"{key} of the {moment_of(scope)}"
        elif restored is not None:
            raise ConfigurationError(
                f"{entry.name!r} is logged for two loaders; use add_dataloader_idx=True.", code="DT-091"
            )
        self._current[name] = table[key] = entry
        return entry

    def _warn_without_trackers(self, name: str) -> None:
        if not self._has_trackers():
            words = f"You called `self.log({name!r}, ..., logger=True)` but have no logger configured."
            warnings.warn(words, stacklevel=5)

    # checkpoints

    def mark(self) -> LogMark:
        """Where the values stand now, for `state_dict` of a later moment."""
        entries = [(entry, entry.mark()) for entry in self._tables["train"].values()]
        return LogMark(entries, dict(self._epoch), dict(self._bar), dict(self.evaluated))

    def state_dict(self, mark: LogMark | None = None) -> dict[str, Any]:
        """What the training epoch under way has kept on this process, and the values of the last epochs.

        Args:
            mark: Give what they were then instead.
        """
        then = mark or self.mark()
        return {
            "train": [entry.state_dict(at) for entry, at in then.entries],
            "epoch": dict(then.epoch),
            "bar": dict(then.bar),
            "evaluated": dict(then.evaluated),
        }

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Resume from what `state_dict` returned.

        Args:
            state: The state.
            device: Where the values of this process live.
        """
        self.start(("train",))
        self.enter(self.scope, self.dataloader_idx)
        for saved in state["train"]:
            entry = LoggedValue(
                saved["name"],
                _RESTORED,
                TRAIN_STEP,
                on_step=saved["on_step"],
                on_epoch=saved["on_epoch"],
                prog_bar=saved["prog_bar"],
                logger=saved["logger"],
                reduction=saved["reduction"] or _forgotten,
                sync=saved["sync"],
                main_only=saved["main_only"],
                metric_path=saved["metric"],
            )
            entry.take_over(saved, device)
            self._tables["train"][entry.name] = entry
        self._epoch, self._bar = dict(state["epoch"]), dict(state["bar"])
        self.evaluated = EvaluationCounts(state.get("evaluated", {}))

    # what is shown and written

    def step_values(self, *, for_logger: bool = False, for_bar: bool = False) -> dict[str, Value]:
        """The training step's latest values, not yet turned into numbers."""
        return {
            entry.step_name: entry.last
            for entry in self._tables["train"].values()
            if entry.last is not None and (not for_logger or entry.logger) and (not for_bar or entry.prog_bar)
        }

    def synced_step_values(self) -> dict[str, Value]:
        """The training step's values for trackers; those logged with `sync_dist=True` reduced over processes."""
        values, entries = self.step_values(for_logger=True), self._tables["train"].values()
        if entries_to_sync(entries):
            synced = combined(entries, self._that_count(gather_object(latest_of(entries))))
            values.update({name: value for name, value in synced.items() if name in values})
        return values

    def unsynced_step_values(self, exchange: Callable[[str], list[str] | None]) -> tuple[dict[str, Value], list[str]]:
        """The training step's values for trackers where peers may be gone, so that no collective can be used.

        Args:
            exchange: Exchanges a text with all processes, in the order of ranks; None where it cannot.

        Returns:
            The values, and the names of those that are this process's own although they were to be reduced.
        """
        values, entries = self.step_values(for_logger=True), self._tables["train"].values()
        own = {name: value for name, value in latest_of(entries).items() if name in values}
        texts = exchange(json.dumps(latest_of(entries))) if own else None
        if texts is None:
            return values, sorted(own)
        synced = combined(entries, self._that_count([json.loads(text) for text in texts]))
        return values | {name: value for name, value in synced.items() if name in values}, []

    def callback_values(self, with_evaluation_steps: bool = True, newest: bool = False) -> dict[str, Value]:
        """All values by name: the latest of each step-wise one, the last epoch's of the others.

        Args:
            with_evaluation_steps: Whether those of single evaluation steps are among them.
            newest: Whether one that is kept by step and by epoch is the step's until the epoch under way ends.
        """
        values = {**self._epoch, **self._tried}
        for entry in self._tables["train"].values():
            if entry.last is not None:
                values[entry.step_name] = entry.last
                if not entry.on_epoch or entry.name not in values or (newest and entry.fresh):
                    values[entry.name] = entry.last
        for stage in ("validate", "test") if with_evaluation_steps else ():
            for entry in self._tables[stage].values():
                if entry.last is not None:
                    values[entry.step_name] = entry.last
        return values

    def end_evaluation_batch(self) -> tuple[dict[str, Value], int]:
        """Count a batch of the evaluation under way.

        Returns:
            What was logged of it with `on_step` and is for trackers, not yet turned into numbers, as this process has
            it; and how many batches of this loader there were before, in all evaluations of the kind.
        """
        number = self.evaluated.count(self.scope.stage, self.dataloader_idx or 0)
        values: dict[str, Value] = {}
        for entry in self._current.values():
            if entry.stepped:
                entry.stepped = False
                if entry.logger and entry.last is not None:
                    values[entry.step_name] = entry.last
        return values, number

    def names(self, stage: str) -> set[str]:
        """Every name under which this process has logged since the stage began, whether the values count or not."""
        entries = self._tables[stage].values()
        return {name for entry in entries for name in (entry.name, entry.step_name, entry.epoch_name)}

    def bar_values(self, with_evaluation_steps: bool = False) -> dict[str, Value]:
        """What the progress bar shows, not yet turned into numbers.

        Args:
            with_evaluation_steps: Whether those of single evaluation steps stay among them when they are over.
        """
        values = {**self._bar, **self._tried_bar, **self.step_values(for_bar=True)}
        entries: list[LoggedValue] = []
        if with_evaluation_steps:
            entries += [*self._tables["validate"].values(), *self._tables["test"].values()]
        if self.scope.stage in ("validate", "test"):
            entries += self._current.values()
        values.update((each.step_name, each.last) for each in entries if each.prog_bar and each.last is not None)
        return values

    # the end of an epoch

    def finish_epoch(self, stage: str, task: nn.Module, keep: bool = True) -> list[EpochValue]:
        """Reduce what was logged since the last call over the epoch and all processes; call it on all of them.

        Args:
            stage: `"train"`, `"validate"` or `"test"`.
            task: The task, in which metrics are found that only other processes have logged.
            keep: Whether the values stay visible; those of a sanity check only until training begins.

        Returns:
            The values, the same on all processes.
        """
        fresh = {name: entry for name, entry in self._tables[stage].items() if entry.on_epoch and entry.fresh}
        local = {name: entry.portable() for name, entry in fresh.items()}
        entries = self._tables[stage].values()
        both = self._that_count(gather_object([{"epoch": local, "steps": latest_of(entries)}]))
        everyone, steps = [each["epoch"] for each in both], combined(entries, [each["steps"] for each in both])
        results: list[EpochValue] = []
        for name in dict.fromkeys(name for each in everyone for name in each):
            parts = [each[name] for each in everyone if name in each]
            metric = _find_metric(task, parts[0]["metric"])
            value: Value | None
            if metric is not None:
                value = _computed(name, metric, self._that_count, self._separates_moments)
                self._finished.append(metric)
            else:
                value = reduced(fresh.get(name), local.get(name), parts)
            if value is not None:
                first = parts[0]
                shown = first["prog_bar"], first["logger"]
                results.append(EpochValue(first["name"], first["epoch_name"], *shown, value, first["loader"]))
        for entry in entries:
            if entry.metric is not None and entry.fresh and not entry.on_epoch:
                self._finished.append(entry.metric)
                entry.fresh = False
            if entry.step_name in steps:
                entry.last = entry.synced = steps[entry.step_name]
        seen, bar = (self._epoch, self._bar) if keep else (self._tried, self._tried_bar)
        for result in results:
            seen[result.epoch_name] = seen[result.name] = result.value
            if result.prog_bar:
                bar[result.epoch_name] = result.value
        for entry in fresh.values():
            last, synced = entry.last, entry.synced
            entry.reset()
            entry.last, entry.synced = last, synced
        names = {result.epoch_name for result in results} if self._separates_moments else ()
        for entry in entries:
            if entry.on_step and entry.step_name in names:  # the epoch's is newer, until the next step
                entry.last = None
        return results

    def finished_metrics(self, task: nn.Module) -> list[str]:
        """Return the places in the task of the metrics whose epoch is over, and which are not reset yet."""
        over = {id(metric) for metric in self._finished}
        return [path for path, module in task.named_modules() if id(module) in over]

    def resume_finished(self, task: nn.Module, paths: Iterable[str]) -> None:
        """Let the metrics be reset that `finished_metrics` returned."""
        self._finished = [task.get_submodule(path) for path in paths]

    def reset_finished(self) -> None:
        """Reset the metrics whose epoch is over; until then the hooks of its end can compute them."""
        for metric in self._finished:  # only now, since metrics of one collection may share their states
            metric.reset()
        self._finished.clear()

    def _that_count(self, everyone: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Of what all processes have, in the order of their ranks, the parts that together are the whole."""
        return everyone if self._topology is None else self._topology.select(everyone)

    def start(self, stages: Iterable[str]) -> None:
        """Forget the entries of some stages, before they run again."""
        for stage in stages:
            self._tables[stage] = {}
            for key in [key for key in self._by_loader if key[0] == stage]:
                del self._by_loader[key]

    def begin_verb(self, evaluates_alone: bool) -> None:
        """Forget what was logged in earlier runs, and what their metrics have gathered.

        Args:
            evaluates_alone: Whether the verb only evaluates: its batches are counted apart from those within `fit`.
        """
        self.evaluated.alone = evaluates_alone
        for table in self._tables.values():
            for entry in table.values():
                if entry.metric is not None:
                    entry.metric.reset()
        self.start(tuple(self._tables))
        for values in (self._epoch, self._bar, self._tried, self._tried_bar):
            values.clear()

    def remember(self, values: Mapping[str, Value], bar: Mapping[str, Value] | None = None) -> None:
        """Let callbacks see values that come from elsewhere.

        Args:
            values: Names and values.
            bar: Those that the progress bar shows, if any are among them.
        """
        self._epoch.update(values)
        self._bar.update(bar or {})


def _forgotten(values: Tensor) -> Tensor:
    """Stands for a reduction function, which no checkpoint can hold, until the name is logged again."""
    raise ConfigurationError(
        "A value that is reduced by a function was logged before the checkpoint and never since, so the function is "
        "not known any more. Log it in every epoch, or use one of " + ", ".join(REDUCTIONS) + ".",
        code="DT-091",
    )


def _is_metric(value: Any) -> bool:
    """Whether a value is a torchmetrics object; torchmetrics is not imported to find out."""
    torchmetrics = sys.modules.get("torchmetrics")
    return torchmetrics is not None and isinstance(value, torchmetrics.Metric)


def _find_metric(task: nn.Module, path: str | None) -> Any:
    return None if path is None else task.get_submodule(path)


def _computed(name: str, metric: Any, select: Callable[[list[Any]], list[Any]], lenient: bool) -> Value | None:
    """Compute a metric over all processes. Returns None if it has no value, which is left out then.

    Args:
        name: What it is logged as.
        metric: The torchmetrics object.
        select: Takes the states that count from those of all processes.
        lenient: Whether anything but tensors and numbers is left out, as in Lightning, rather than refused.
    """
    value = compute_over_processes(metric, select)
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.detach()
    if isinstance(value, int | float):
        return float(value)
    if value is None or (lenient and not isinstance(value, Tensor)):
        return None
    given = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    raise ConfigurationError(
        f"The `{type(metric).__name__}.compute()` return of the metric logged as {name!r} must be a tensor of one "
        f"number, a number or None, got {given}. Compute it in on_validation_epoch_end and log the parts by name.",
        code="DT-090",
    )


def _number(name: str, value: Any) -> float:
    if isinstance(value, Number) or (hasattr(value, "item") and getattr(value, "size", None) == 1):
        return float(value)
    raise ConfigurationError(
        f"`self.log({name}, {value})` was called, but {name!r} is a {type(value).__name__}. Give a number, a scalar "
        "tensor or a torchmetrics object.",
        code="DT-090",
    )


def _is_same_function(one: Any, other: Any) -> bool:
    """Whether two functions have been made by the same place of the source; of `partial`, those inside."""
    if isinstance(one, partial) and isinstance(other, partial):
        return _is_same_function(one.func, other.func)
    if not (callable(one) and callable(other)) or type(one) is not type(other):
        return False
    names = [(each.__module__, getattr(each, "__qualname__", None)) for each in (one, other)]
    return names[0] == names[1]
