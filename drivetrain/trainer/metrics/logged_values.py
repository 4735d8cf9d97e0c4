"""Store of the values that a task logs with `self.log`, and their reduction over batches and ranks."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from itertools import groupby, zip_longest
from numbers import Number
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from drivetrain.runtime.collectives import gather_object
from drivetrain.runtime.errors import ConfigurationError, nearest
from drivetrain.strategies.base import Topology
from drivetrain.trainer.metrics.metric_sync import compute_over_processes
from drivetrain.trainer.metrics.transfer import on_cpu, to_lists, to_numbers, wide

# Scopes of logging


@dataclass(frozen=True)
class LogScope:
    """Rules for `self.log` in one hook or step, such as `training_step`: the stage and the default options.

    Attributes:
        stage: `"train"`, `"validate"` or `"test"`, or the hook's name if logging is not allowed there.
        on_step: Default of `on_step`, or None if logging is not allowed.
        on_epoch: Default of `on_epoch`.
        has_batch: True if there is a current batch, whose number of rows weighs a mean.
    """

    stage: str
    on_step: bool | None
    on_epoch: bool = False
    has_batch: bool = False


NOWHERE = LogScope("outside of the loop", None)
TRAIN_STEP = LogScope("train", True, False, has_batch=True)
TRAIN_EPOCH = LogScope("train", False, True)
TRAIN_END = LogScope("in on_train_end", None)
MONITORING = LogScope(
    "in on_train_epoch_end of a callback with `runs_last_at_epoch_end`, which reads what the others logged", None
)
SAVING = LogScope("in on_save_checkpoint", None)
VALIDATE_STEP = LogScope("validate", False, True, has_batch=True)
VALIDATE_EPOCH = LogScope("validate", False, True)
TEST_STEP = LogScope("test", False, True, has_batch=True)
TEST_EPOCH = LogScope("test", False, True)
PREDICT = LogScope("in predict", None)
TRANSFER = LogScope("in a hook that moves a batch to the device", None)


# One logged value


FOLD_AFTER = 64
"""Number of values of one name that are stored before they are reduced on the device."""

REDUCTIONS = ("mean", "sum", "max", "min")

Value = Tensor | float
Reduction = str | Callable[[Tensor], Any]
Arguments = tuple[Any, ...]


@dataclass(slots=True, eq=False)
class LoggedValue:
    """Values that a task has logged under one name in one stage, such as training, and their options.

    The values are detached tensors that stay on their device until they are reduced.
    """

    name: str
    arguments: Arguments
    scope: LogScope
    _: KW_ONLY
    on_step: bool
    on_epoch: bool
    prog_bar: bool
    logger: bool
    reduction: Reduction
    sync: bool | None
    main_only: bool
    metric: Any = None
    metric_path: str | None = None
    loader: int | None = None
    suffix: str = ""
    weighs: bool = field(init=False)
    fresh: bool = field(init=False)
    stepped: bool = field(init=False)
    last: Value | None = field(init=False)
    synced: Value | None = field(init=False)  # the last value once it is reduced over ranks
    total: Any = field(init=False)
    weight: float = field(init=False)
    _pending: list[Value] = field(init=False)
    _weights: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self.weighs = self.on_epoch and self.reduction == "mean" and self.metric is None
        self.reset()

    @property
    def step_name(self) -> str:
        return self._forked("_step") if self.on_epoch else self.name

    @property
    def epoch_name(self) -> str:
        return self._forked("_epoch") if self.on_step else self.name

    def _forked(self, ending: str) -> str:
        return self.name.removesuffix(self.suffix) + ending + self.suffix

    def reset(self) -> None:
        self.fresh = self.stepped = False
        self.last = self.synced = self.total = None
        self.weight, self._pending, self._weights = 0.0, [], []

    def update(self, value: Value, weight: float) -> None:
        # The tensor stays on its device, where stored values are reduced once 64 have been collected.
        self.fresh = True
        if self.on_step:
            self.last, self.stepped = value, True
        if self.on_epoch:
            self._pending.append(value)
            self._weights.append(weight)
            # A function of `reduce_fx` needs all values at once, so its values are not folded early.
            if len(self._pending) >= FOLD_AFTER and not callable(self.reduction):
                self.fold()

    def folded(self) -> Any:
        self.fold()
        return self.total

    def fold(self) -> None:
        if not self._pending:
            return
        values, weights = _stack(self._pending), self._weights
        self._pending, self._weights = [], []
        self.weight += sum(weights)
        # A total from a checkpoint is on the CPU, and a task may log from another device than before.
        total = None if self.total is None else self.total.to(values.device)
        if callable(self.reduction):
            part: Any = values
            self.total = part if total is None else torch.cat([total, part])
        elif self.reduction in ("mean", "sum"):
            if self.reduction == "mean":
                values = _weighted(values, weights)
            part = values.sum()
            self.total = part if total is None else total + part
        else:
            pick = torch.amax if self.reduction == "max" else torch.amin
            part = pick(values, 0)
            self.total = part if total is None else pick(torch.stack([total, part]), 0)

    def mark(self) -> Mark:
        return Mark(self.total, self.weight, self._pending, self._weights, len(self._pending), self.last, self.fresh)

    def state_dict(self, mark: Mark | None = None) -> dict[str, Any]:
        # Stored values are not reduced first: another order of additions would change the result of the epoch.
        then = mark or self.mark()
        pending = then.pending[: then.kept]
        return {
            **self.portable(),
            "on_step": self.on_step,
            "on_epoch": self.on_epoch,
            "total": then.total,
            "weight": then.weight,
            "pending": _stack(pending) if pending else None,
            "weights": then.weights[: then.kept],
            "last": then.last,
            "fresh": then.fresh,
        }

    def take_over(self, state: Mapping[str, Any], device: torch.device) -> None:
        pending, total = state["pending"], state["total"]
        self.total = None if total is None else total.to(device)
        self.weight = state["weight"]
        self._pending = [] if pending is None else list(pending.to(device).unbind())
        self._weights = list(state["weights"])
        self.last = state["last"]
        self.fresh = state["fresh"]

    def adopt(self, restored: LoggedValue) -> None:
        for slot in ("total", "weight", "_pending", "_weights", "last", "fresh"):
            setattr(self, slot, getattr(restored, slot))

    def portable(self, total: Any = None) -> dict[str, Any]:
        # Plain values, which can be sent to other ranks.
        return {
            "name": self.name,
            "total": total,
            "weight": self.weight,
            "metric": self.metric_path,
            "epoch_name": self.epoch_name,
            "prog_bar": self.prog_bar,
            "logger": self.logger,
            "reduction": None if callable(self.reduction) else self.reduction,
            "sync": self.sync,
            "main_only": self.main_only,
            "loader": self.loader,
        }


class Mark(NamedTuple):
    # The lists are shared with the value. They only grow until they are replaced, so their first `kept` items are
    # fixed.
    total: Any
    weight: float
    pending: list[Value]
    weights: list[float]
    kept: int
    last: Value | None
    fresh: bool


class EpochValue(NamedTuple):
    """Value of one metric for a whole epoch, computed from all values logged under the metric's name."""

    name: str
    epoch_name: str  # with the suffix `_epoch` if the value of each step is kept too
    prog_bar: bool
    logger: bool
    value: Value
    loader: int | None  # evaluation loader that it belongs to, or None for all


def _stack(values: list[Value]) -> Tensor:
    device = next((value.device for value in values if isinstance(value, Tensor)), torch.device("cpu"))
    return torch.stack([wide(_as_tensor(value).reshape(()).to(device)) for value in values])


def _weighted(values: Tensor, weights: list[float]) -> Tensor:
    # One multiplication per run of equal weights, since a tensor of weights would be a copy to the device.
    runs = [(weight, len(list(run))) for weight, run in groupby(weights)]
    parts = torch.split(values, [length for _, length in runs])
    return torch.cat([part * weight for part, (weight, _) in zip(parts, runs, strict=True)])


def _as_tensor(value: Value) -> Tensor:
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)


# Checks of `self.log`


ARGUMENTS = (
    "prog_bar",
    "logger",
    "on_step",
    "on_epoch",
    "reduce_fx",
    "sync_dist",
    "add_dataloader_idx",
    "metric_attribute",
    "rank_zero_only",
)


def moments_of(
    name: str,
    scope: LogScope,
    arguments: Arguments,
    on_step: bool | None,
    on_epoch: bool | None,
    known: LoggedValue | None,
) -> tuple[bool, bool]:
    # `known` holds what was logged under this name with other options before.
    if scope.on_step is None:
        raise ConfigurationError(
            f"You can't call self.log({name!r}, ...) here ({scope.stage}), because there is no current step or epoch. "
            "Log in a step, or in a hook between the start of training or evaluation and the end of an epoch.",
        )
    if known is not None:
        raise ConfigurationError(
            f"{name!r} is logged with two meanings: first with {_readable(known.arguments)} from the "
            f"{moment_of(known.scope)}, now with {_readable(arguments)} from the {moment_of(scope)}. "
            "Use the same options everywhere, or two different names.",
        )
    steps = scope.on_step if on_step is None else on_step
    epochs = bool(scope.on_epoch if on_epoch is None else on_epoch)
    if not (steps or epochs):
        raise ConfigurationError(f"log({name!r}, on_step=False, on_epoch=False) is not useful. It keeps no value.")
    if steps and not scope.has_batch:
        raise ConfigurationError(
            f"log({name!r}, on_step=True) is not possible from the {moment_of(scope)}. Use on_epoch=True.",
        )
    return steps, epochs


def _readable(arguments: Arguments) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in zip(ARGUMENTS, arguments, strict=True))


def moment_of(scope: LogScope) -> str:
    return f"{scope.stage} {'step' if scope.has_batch else 'epoch'}"


# Counts of evaluated batches


class EvaluationCounts(dict[str, int]):
    # Evaluated batches by stage and loader. Validations within `fit` are counted separately.

    alone = False

    def count(self, stage: str, loader: int) -> int:
        key = f"{_kind(stage, self.alone)}/{loader}"
        before = self.get(key, 0)
        self[key] = before + 1
        return before

    def total(self, stage: str, alone: bool) -> int:
        return sum(count for key, count in self.items() if key.startswith(f"{_kind(stage, alone)}/"))


def _kind(stage: str, alone: bool) -> str:
    return f"{stage} alone" if alone else stage


# Reduction over ranks


_COMBINE: dict[str, Callable[[list[float]], float]] = {"sum": sum, "max": max, "min": min}


def reduced(entry: LoggedValue | None, local: dict[str, Any] | None, everyone: list[dict[str, Any]]) -> Value | None:
    # With `sync_dist=False`, only the total of this rank (`local`) is used. None if there is no total.
    first = everyone[0]
    parts = everyone
    if first["sync"] is False:
        # Each rank then has its own result, and trackers receive the one of rank 0.
        parts = [local] if local is not None else []
    elif first["main_only"]:
        parts = everyone[:1]
    parts = [part for part in parts if part["total"] is not None]
    if not parts:
        return None
    if first["reduction"] is None:
        if entry is None or not callable(entry.reduction):
            return None
        # Interleaved in the order of the batches, since a function may return the last value.
        turns = zip_longest(*(part["total"] for part in parts))
        stacked = torch.tensor([value for turn in turns for value in turn if value is not None], dtype=torch.float64)
        return torch.as_tensor(entry.reduction(stacked))
    totals = [part["total"] for part in parts]
    if first["reduction"] == "mean":
        weight = sum(part["weight"] for part in parts)
        return torch.tensor(sum(totals) / weight if weight else float("nan"), dtype=torch.float64)
    return torch.tensor(_COMBINE[first["reduction"]](totals), dtype=torch.float64)


def combine_plain(reduction: Reduction, values: list[float]) -> float:
    if callable(reduction):
        return float(reduction(torch.tensor(values, dtype=torch.float64)))
    if reduction == "mean":
        return sum(values) / len(values)
    return float(_COMBINE[reduction](values))


def reduction_of(name: str, reduce_fx: Any) -> Reduction:
    if callable(reduce_fx):
        return reduce_fx  # type: ignore[no-any-return]
    word = str(reduce_fx).lower()
    word = "mean" if word == "avg" else word
    if not isinstance(reduce_fx, str) or word not in REDUCTIONS:
        raise ConfigurationError(
            f"log({name!r}, reduce_fx={reduce_fx!r}) is not valid. Allowed: {', '.join(REDUCTIONS)} or a function of "
            f"the stacked values.{nearest(word, REDUCTIONS)}",
        )
    return word


# Step values that are reduced over ranks


def entries_to_sync(entries: Iterable[LoggedValue]) -> list[LoggedValue]:
    return [entry for entry in entries if entry.on_step and entry.sync and entry.metric is None]


def latest_of(entries: Iterable[LoggedValue]) -> dict[str, Value]:
    # Values that are already reduced over ranks are left out.
    local = [each for each in entries_to_sync(entries) if each.last is not each.synced]
    return {each.step_name: each.last for each in local if each.last is not None}


def combined(entries: Iterable[LoggedValue], everyone: Sequence[Mapping[str, float]]) -> dict[str, float]:
    values: dict[str, float] = {}
    for entry in entries_to_sync(entries):
        found = [each[entry.step_name] for each in everyone if entry.step_name in each]
        if found:
            values[entry.step_name] = combine_plain(entry.reduction, found)
    return values


_REDUCE, _METRIC_PATH = 4, 7  # indices in `ARGUMENTS`
Call = tuple[str, Any, Arguments, "float | None"]
_RESTORED: Arguments = ("restored from a checkpoint",)


class LogMark(NamedTuple):
    entries: list[tuple[LoggedValue, Mark]]
    epoch: dict[str, Value]
    bar: dict[str, Value]
    evaluated: dict[str, int]


class LoggedValues:
    """All values that a task has logged with `self.log` during a run, by stage and name.

    Attributes:
        scope: Part of the run in which values are being logged.
        dataloader_idx: Index of the evaluation loader, or None if there is only one.
        skips: True if logged values are discarded because the current batch is only padding. Reset by `enter`.
        evaluated: Numbers of evaluated batches.
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
        self._finished: list[Any] = []  # metrics to reset after the hooks of the epoch's end
        self._bar: dict[str, Value] = {}
        self._tried: dict[str, Value] = {}  # results of the sanity check, dropped when training begins
        self._tried_bar: dict[str, Value] = {}
        self.evaluated = EvaluationCounts()

    # Scope

    def group_of(self, scope: LogScope) -> tuple[Any, ...]:
        # Within a group, each name has a single meaning.
        return (scope.stage, self.dataloader_idx)

    def enter(self, scope: LogScope, dataloader_idx: int | None = None) -> None:
        self.scope = scope
        self.dataloader_idx = dataloader_idx
        self.skips = False
        # Training begins: callbacks must not see results of the sanity check any longer.
        if self._tried and scope.stage == "train":
            self._tried, self._tried_bar = {}, {}
        self._current = self._by_loader.setdefault(self.group_of(scope), {})

    @contextmanager
    def forbidden(self, scope: LogScope) -> Iterator[None]:
        before, skips = (self.scope, self.dataloader_idx), self.skips
        # In this scope, each call of `self.log` raises an error.
        self.enter(scope)
        try:
            yield
        finally:
            self.enter(*before)
            self.skips = skips

    @contextmanager
    def kept(self) -> Iterator[None]:
        # Trial steps of a search must leave no logged values.
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
    def diverted(self) -> Iterator[list[Call]]:
        calls: list[Call] = []

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
        return self._find_batch_size()

    def log(self, name: str, value: Any, arguments: Arguments, batch_size: float | None) -> None:
        entry = self._current.get(name)
        if entry is None or entry.arguments != arguments or entry.scope is not self.scope:
            entry = self._with_new_function(entry, arguments) or self._register(name, value, arguments)
        if self.skips:
            return
        if isinstance(value, Tensor):
            if value.numel() != 1:
                raise ConfigurationError(
                    f"log({name!r}, ...) takes a scalar, got a tensor of shape {tuple(value.shape)}. "
                    "Reduce it first, for example with .mean().",
                )
            # A tensor without a graph may be a buffer that a later step changes in place, so it is copied.
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
            self._record.append((name, value if isinstance(value, Tensor) else float(value), arguments, weight))

    @contextmanager
    def recorded(self) -> Iterator[list[Call]]:
        """Yield a list that records the `self.log` calls of the `with` block.

        Their values are stored as usual. Other ranks of a pipeline then repeat the calls with `replay`.
        """
        calls: list[Call] = []
        self._record = calls
        try:
            yield calls
        finally:
            self._record = None

    def replay(self, calls: Iterable[Call], task: nn.Module) -> None:
        """Log the values that another rank of the pipeline has recorded, as if this rank's task had logged them."""
        for name, value, arguments, weight in calls:
            metric = _find_metric(task, arguments[_METRIC_PATH])
            if metric is not None:
                metric._forward_cache = value
            self.log(name, value if metric is None else metric, arguments, weight)

    def _with_new_function(self, entry: LoggedValue | None, arguments: Arguments) -> LoggedValue | None:
        # A lambda in a step is a new object at each call, but still the same reduction.
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
        elif restored is not None:
            key = self.key_beside(restored, entry)
        self._current[name] = table[key] = entry
        return entry

    def key_beside(self, known: LoggedValue, entry: LoggedValue) -> str:
        # A subclass may return a key under which the value of the second evaluation loader is stored.
        raise ConfigurationError(f"{entry.name!r} is logged for two loaders. Set add_dataloader_idx=True.")

    def _warn_without_trackers(self, name: str) -> None:
        if not self._has_trackers():
            words = f"You called `self.log({name!r}, ..., logger=True)` but have no logger configured."
            warnings.warn(words, stacklevel=6)

    # Checkpoints

    def mark(self) -> LogMark:
        entries = [(entry, entry.mark()) for entry in self._tables["train"].values()]
        return LogMark(entries, dict(self._epoch), dict(self._bar), dict(self.evaluated))

    def state_dict(self, mark: LogMark | None = None) -> dict[str, Any]:
        then = mark or self.mark()
        return {
            "train": [entry.state_dict(at) for entry, at in then.entries],
            "epoch": dict(then.epoch),
            "bar": dict(then.bar),
            "evaluated": dict(then.evaluated),
        }

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
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

    # Values for trackers and callbacks

    def step_values(self, *, for_logger: bool = False, for_bar: bool = False) -> dict[str, Value]:
        return {
            entry.step_name: entry.last
            for entry in self._tables["train"].values()
            if entry.last is not None and (not for_logger or entry.logger) and (not for_bar or entry.prog_bar)
        }

    def copy_step_values(self) -> None:
        # Trackers, callbacks and the progress bar then read the values without waiting for the device again.
        entries = list(self._tables["train"].values())
        last = {number: entry.last for number, entry in enumerate(entries) if entry.last is not None}
        for number, value in on_cpu(last).items():
            entries[number].last = value

    def synced_step_values(self) -> dict[str, Value]:
        entries = self._tables["train"].values()
        if not entries_to_sync(entries):
            return self.step_values(for_logger=True)
        self.copy_step_values()
        values = self.step_values(for_logger=True)
        # A collective, since a value was logged with `sync_dist=True`.
        synced = combined(entries, self._that_count(gather_object(to_numbers(latest_of(entries)))))
        return {name: synced.get(name, value) for name, value in values.items()}

    def unsynced_step_values(self, exchange: Callable[[str], list[str] | None]) -> tuple[dict[str, Value], list[str]]:
        # Called after an exception: a rank that failed would not take part in a collective. Also returns the names of
        # the values that are not reduced over ranks. `exchange` sends a text to all ranks and returns theirs, or None
        # if some do not reply.
        values, entries = self.step_values(for_logger=True), self._tables["train"].values()
        latest = to_numbers(latest_of(entries))
        own = {name: value for name, value in latest.items() if name in values}
        texts = exchange(json.dumps(latest)) if own else None
        if texts is None:
            return values, sorted(own)
        synced = combined(entries, self._that_count([json.loads(text) for text in texts]))
        return values | {name: value for name, value in synced.items() if name in values}, []

    def callback_values(self, with_evaluation_steps: bool = True, newest: bool = False) -> dict[str, Value]:
        # With `newest`, a value of a step precedes the result of the last epoch.
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
        # The number of batches of this loader before this one.
        number = self.evaluated.count(self.scope.stage, self.dataloader_idx or 0)
        values: dict[str, Value] = {}
        for entry in self._current.values():
            if entry.stepped:
                entry.stepped = False
                if entry.logger and entry.last is not None:
                    values[entry.step_name] = entry.last
        return values, number

    def names(self, stage: str) -> set[str]:
        entries = self._tables[stage].values()
        return {name for entry in entries for name in (entry.name, entry.step_name, entry.epoch_name)}

    def bar_values(self, with_evaluation_steps: bool = False) -> dict[str, Value]:
        """Return the newest values that were logged with `prog_bar=True`, by name, for the progress bar."""
        values = {**self._bar, **self._tried_bar, **self.step_values(for_bar=True)}
        entries: list[LoggedValue] = []
        if with_evaluation_steps:
            entries += [*self._tables["validate"].values(), *self._tables["test"].values()]
        if self.scope.stage in ("validate", "test"):
            entries += self._current.values()
        values.update((each.step_name, each.last) for each in entries if each.prog_bar and each.last is not None)
        return values

    # End of an epoch

    def finish_epoch(self, stage: str, task: nn.Module, keep: bool = True) -> list[EpochValue]:
        # All ranks must call this together. With `keep=False`, as in a sanity check, callbacks see the results only
        # until training begins.
        fresh = {name: entry for name, entry in self._tables[stage].items() if entry.on_epoch and entry.fresh}
        entries = self._tables[stage].values()
        # One transfer and one collective for epoch and step values. Ranks may have logged different names.
        latest = {(True, name): value for name, value in latest_of(entries).items()}
        numbers = to_lists({**{(False, name): entry.folded() for name, entry in fresh.items()}, **latest})
        local = {name: entry.portable(numbers[False, name]) for name, entry in fresh.items()}
        steps_here = {name: numbers[True, name] for _, name in latest}
        both = self._that_count(gather_object([{"epoch": local, "steps": steps_here}]))
        everyone, steps = [each["epoch"] for each in both], combined(entries, [each["steps"] for each in both])
        results: list[EpochValue] = []
        # The order of names must be equal on all ranks, since a metric below runs a collective.
        for name in dict.fromkeys(name for each in everyone for name in each):
            parts = [each[name] for each in everyone if name in each]
            metric = _find_metric(task, parts[0]["metric"])
            value: Value | None
            if metric is not None:
                value = self.value_of(name, metric, compute_over_processes(metric, self._that_count))
                self._finished.append(metric)
            else:
                value = reduced(fresh.get(name), local.get(name), parts)
            if value is not None:
                first = parts[0]
                shown = first["prog_bar"], first["logger"]
                results.append(EpochValue(first["name"], first["epoch_name"], *shown, value, first["loader"]))
        # Results of metrics are still on their device.
        copied = on_cpu({number: result.value for number, result in enumerate(results)})
        results = [result._replace(value=copied[number]) for number, result in enumerate(results)]
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
            # Callbacks and the progress bar still show the values of the last step after the epoch.
            last, synced = entry.last, entry.synced
            entry.reset()
            entry.last, entry.synced = last, synced
        return results

    def values_of(self, stage: str) -> Iterator[LoggedValue]:
        yield from self._tables[stage].values()

    def value_of(self, name: str, metric: Any, computed: Any) -> Value | None:
        if computed is None:
            return None
        if isinstance(computed, Tensor) and computed.numel() == 1:
            return computed.detach()
        if isinstance(computed, int | float):
            return float(computed)
        given = f"shape {tuple(computed.shape)}" if isinstance(computed, Tensor) else f"a {type(computed).__name__}"
        raise ConfigurationError(
            f"The `{type(metric).__name__}.compute()` return of the metric logged as {name!r} must be a tensor of one "
            f"number, a number or None, got {given}. Call compute() in a hook such as on_validation_epoch_end, and log "
            "each number under its own name.",
        )

    def finished_metrics(self, task: nn.Module) -> list[str]:
        # Their epoch is over, but they have not been reset yet.
        over = {id(metric) for metric in self._finished}
        return [path for path, module in task.named_modules() if id(module) in over]

    def resume_finished(self, task: nn.Module, paths: Iterable[str]) -> None:
        self._finished = [task.get_submodule(path) for path in paths]

    def reset_finished(self) -> None:
        # Not earlier: hooks at the epoch's end may read them, and metrics of one collection may share their states.
        for metric in self._finished:
            metric.reset()
        self._finished.clear()

    def _that_count(self, everyone: list[dict[str, Any]]) -> list[dict[str, Any]]:
        # Of ranks that share their batches, `select` keeps only one, so that each sample counts once.
        return everyone if self._topology is None else self._topology.select(everyone)

    def start(self, stages: Iterable[str]) -> None:
        for stage in stages:
            self._tables[stage] = {}
            for key in [key for key in self._by_loader if key[0] == stage]:
                del self._by_loader[key]

    def reset_for_run(self, evaluates_alone: bool) -> None:
        self.evaluated.alone = evaluates_alone
        for table in self._tables.values():
            for entry in table.values():
                if entry.metric is not None:
                    entry.metric.reset()
        self.start(tuple(self._tables))
        for values in (self._epoch, self._bar, self._tried, self._tried_bar):
            values.clear()

    def remember(self, values: Mapping[str, Value], bar: Mapping[str, Value] | None = None) -> None:
        self._epoch.update(values)
        self._bar.update(bar or {})


# Stands for a function of `reduce_fx` after a resume, since a checkpoint cannot store functions.
def _forgotten(values: Tensor) -> Tensor:
    raise ConfigurationError(
        "A value whose reduce_fx is a function was logged before the checkpoint, which cannot store functions, but not "
        f"since the run was resumed. Log it in every epoch, or use one of {', '.join(REDUCTIONS)} as reduce_fx.",
    )


def _is_metric(value: Any) -> bool:
    torchmetrics = sys.modules.get("torchmetrics")
    return torchmetrics is not None and isinstance(value, torchmetrics.Metric)


def _find_metric(task: nn.Module, path: str | None) -> Any:
    return None if path is None else task.get_submodule(path)


def _number(name: str, value: Any) -> float:
    if isinstance(value, Number) or (hasattr(value, "item") and getattr(value, "size", None) == 1):
        return float(value)
    raise ConfigurationError(
        f"`self.log({name}, {value})` was called, but {name!r} is a {type(value).__name__}. Log a number, a "
        "scalar tensor or a torchmetrics object.",
    )


def _is_same_function(one: Any, other: Any) -> bool:
    if isinstance(one, partial) and isinstance(other, partial):
        return _is_same_function(one.func, other.func)
    if not (callable(one) and callable(other)) or type(one) is not type(other):
        return False
    # By qualified name, since each execution of a definition creates a new function object.
    names = [(each.__module__, getattr(each, "__qualname__", None)) for each in (one, other)]
    return names[0] == names[1]


# Values logged in parts of a micro-batch


class _Call(NamedTuple):
    value: Any
    arguments: tuple[Any, ...]  # in the order of `ARGUMENTS`
    rows: float  # weight of the value in a mean
    rows_given: bool  # the caller passed `batch_size`


class MicroBatchLog:
    """Collects the `self.log` calls from all parts of a split micro-batch, to log each value only once."""

    def __init__(self, logged: LoggedValues) -> None:
        self._logged = logged
        self._parts: dict[int, list[dict[tuple[str, int], _Call]]] = {}

    def clear(self) -> None:
        self._parts.clear()

    @contextmanager
    def collecting(self, place: int) -> Iterator[None]:
        # `place` is the index of the micro-batch.
        calls: dict[tuple[str, int], _Call] = {}
        self._parts.setdefault(place, []).append(calls)
        with self._logged.diverted() as diverted:
            yield
        for name, value, arguments, given in diverted:
            number = sum(known == name for known, _ in calls)
            rows = self._logged.rows_of_batch() if given is None else given
            calls[name, number] = _Call(value, arguments, rows, given is not None)

    def log(self, place: int) -> None:
        parts = self._parts.get(place, [])
        for key in dict.fromkeys(key for calls in parts for key in calls):
            found = [calls[key] for calls in parts if key in calls]
            rows = sum(call.rows for call in found) if found[0].rows_given else None
            self._logged.log(key[0], _combined(found), found[0].arguments, rows)


def _combined(calls: Sequence[_Call]) -> Any:
    if len(calls) == 1 or not isinstance(calls[0].value, (Tensor, Number)):
        return calls[-1].value  # a metric accumulates all parts itself
    reduction = calls[0].arguments[_REDUCE]
    device = next((call.value.device for call in calls if isinstance(call.value, Tensor)), None)
    stacked = torch.stack([torch.as_tensor(call.value, device=device).reshape(()) for call in calls])
    if reduction in ("sum", "max", "min"):
        return getattr(stacked, reduction)()
    weights = torch.tensor([call.rows for call in calls], dtype=torch.float32, device=stacked.device)
    return (stacked.float() * weights).sum() / weights.sum()
