"""What `self.log` keeps: detached tensors, folded rarely, turned into numbers only where something is shown."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from numbers import Number
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from drivetrain.runtime.collectives import gather_object
from drivetrain.runtime.errors import ConfigurationError, nearest
from drivetrain.strategies.base import Topology
from drivetrain.trainer.metrics.metric_sync import compute_over_processes

# From where in the loop values may be logged, and what that means for them


@dataclass(frozen=True)
class LogScope:
    """From where in the loop values are logged now, and what that means for them.

    Attributes:
        stage: `"train"`, `"validate"`, `"test"`; or the hook's name where logging is not allowed.
        on_step: Default of `on_step`; None where logging is not allowed.
        on_epoch: Default of `on_epoch`.
        has_batch: Whether there is a batch whose rows weigh a value.
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


# One logged value: kept as detached tensors, added up rarely, and turned into a number only where it is shown


FOLD_AFTER = 64
"""Values of one name that are kept before they are added up on the device."""

REDUCTIONS = ("mean", "sum", "max", "min")

Value = Tensor | float
Reduction = str | Callable[[Tensor], Any]
Arguments = tuple[Any, ...]


class LoggedValue:
    """All that was logged under one name in one stage.

    Attributes:
        stepped: Whether a step has logged it, and nothing has taken the step's value since.
    """

    __slots__ = (
        "_pending",
        "_weights",
        "arguments",
        "fresh",
        "last",
        "loader",
        "logger",
        "main_only",
        "metric",
        "metric_path",
        "name",
        "on_epoch",
        "on_step",
        "prog_bar",
        "reduction",
        "scope",
        "stepped",
        "suffix",
        "sync",
        "synced",
        "total",
        "weighs",
        "weight",
    )

    def __init__(
        self,
        name: str,
        arguments: Arguments,
        scope: LogScope,
        *,
        on_step: bool,
        on_epoch: bool,
        prog_bar: bool,
        logger: bool,
        reduction: Reduction,
        sync: bool | None,
        main_only: bool,
        metric: Any = None,
        metric_path: str | None = None,
        loader: int | None = None,
        suffix: str = "",
    ) -> None:
        self.name, self.arguments, self.scope = name, arguments, scope
        self.on_step, self.on_epoch = on_step, on_epoch
        self.prog_bar, self.logger = prog_bar, logger
        self.reduction, self.sync, self.main_only = reduction, sync, main_only
        self.metric, self.metric_path = metric, metric_path
        self.loader, self.suffix = loader, suffix
        self.weighs = on_epoch and reduction == "mean" and metric is None
        self.reset()

    @property
    def step_name(self) -> str:
        """Its name among a step's values."""
        return self._forked("_step") if self.on_epoch else self.name

    @property
    def epoch_name(self) -> str:
        """Its name among an epoch's values."""
        return self._forked("_epoch") if self.on_step else self.name

    def _forked(self, ending: str) -> str:
        return self.name.removesuffix(self.suffix) + ending + self.suffix

    def reset(self) -> None:
        """Forget all values."""
        self.fresh = self.stepped = False
        self.last: Value | None = None
        self.synced: Value | None = None  # the last value, where it is that of all processes
        self.total: Any = None
        self.weight: float = 0.0
        self._pending: list[Value] = []
        self._weights: list[float] = []

    def update(self, value: Value, weight: float) -> None:
        """Keep one value; nothing is computed until enough have come together."""
        self.fresh = True
        if self.on_step:
            self.last, self.stepped = value, True
        if self.on_epoch:
            self._pending.append(value)
            self._weights.append(weight)
            if len(self._pending) >= FOLD_AFTER and not callable(self.reduction):
                self.fold()

    def fold(self) -> None:
        """Bring the values kept so far into one total, on their device."""
        if not self._pending:
            return
        values, weights = _stack(self._pending), self._weights
        self._pending, self._weights = [], []
        self.weight += sum(weights)
        if callable(self.reduction):
            part: Any = values
            self.total = part if self.total is None else torch.cat([self.total, part])
        elif self.reduction in ("mean", "sum"):
            if self.reduction == "mean":
                values = values * torch.tensor(weights, dtype=values.dtype).to(values.device, non_blocking=True)
            part = values.sum()
            self.total = part if self.total is None else self.total + part
        else:
            pick = torch.amax if self.reduction == "max" else torch.amin
            part = pick(values, 0)
            self.total = part if self.total is None else pick(torch.stack([self.total, part]), 0)

    def mark(self) -> Mark:
        """Where it stands now, for `state_dict` of a later moment; nothing is copied."""
        return Mark(self.total, self.weight, self._pending, self._weights, len(self._pending), self.last, self.fresh)

    def state_dict(self, mark: Mark | None = None) -> dict[str, Any]:
        """What was kept so far, not added up: adding later must give what it would have given without a checkpoint."""
        then = mark or self.mark()
        pending = then.pending[: then.kept]
        return {
            **self.portable(fold=False),
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
        """Resume from what `state_dict` returned."""
        pending, total = state["pending"], state["total"]
        self.total = None if total is None else total.to(device)
        self.weight = state["weight"]
        self._pending = [] if pending is None else list(pending.to(device).unbind())
        self._weights = list(state["weights"])
        self.last = state["last"]
        self.fresh = state["fresh"]

    def adopt(self, restored: LoggedValue) -> None:
        """Resume from an entry that came from a checkpoint, now that the name is logged again."""
        for slot in ("total", "weight", "_pending", "_weights", "last", "fresh"):
            setattr(self, slot, getattr(restored, slot))

    def portable(self, fold: bool = True) -> dict[str, Any]:
        """The local result as plain values, for the exchange between processes."""
        if fold:
            self.fold()
        return {
            "name": self.name,
            "total": None if self.total is None else self.total.tolist(),
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
    """What a logged value held at one moment.

    The lists are the value's own: they only grow until they are replaced, so their first `kept` items stay.
    """

    total: Any
    weight: float
    pending: list[Value]
    weights: list[float]
    kept: int
    last: Value | None
    fresh: bool


class EpochValue(NamedTuple):
    """One value of an epoch.

    Attributes:
        name: The name it was logged under.
        epoch_name: Its name where each step's value is kept too.
        prog_bar: Whether the progress bar shows it.
        logger: Whether trackers get it.
        value: The value.
        loader: The number of the loader that it belongs to, None if it belongs to all.
    """

    name: str
    epoch_name: str
    prog_bar: bool
    logger: bool
    value: Value
    loader: int | None


def to_numbers(values: Mapping[str, Value]) -> dict[str, float]:
    """Turn values into Python numbers, with one transfer from the device for all of them."""
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    numbers = {name: value for name, value in values.items() if not isinstance(value, Tensor)}
    if tensors:
        stacked = torch.stack([_wide(tensor.reshape(())) for tensor in tensors.values()])
        numbers.update(zip(tensors, stacked.tolist(), strict=True))
    return {name: numbers[name] for name in values}


def _stack(values: list[Value]) -> Tensor:
    """Values as one wide vector, on the device of the first tensor among them."""
    device = next((value.device for value in values if isinstance(value, Tensor)), torch.device("cpu"))
    if all(isinstance(value, Tensor) for value in values):
        return torch.stack([_wide(value.reshape(())) for value in values])  # type: ignore[union-attr]
    return torch.stack([_wide(_as_tensor(value).reshape(()).to(device)) for value in values])


def _as_tensor(value: Value) -> Tensor:
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)


def _wide(value: Tensor) -> Tensor:
    """In 64 bits, so that a mean over many steps stays exact; in 32 on the one device kind that has no 64."""
    return value.to(torch.float32 if value.device.type == "mps" else torch.float64)


# When a value can be logged, and with which meaning: what `self.log` refuses


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
    """Decide whether a value is kept for its step, and for its epoch."""
    if scope.on_step is None:
        raise ConfigurationError(
            f"You can't call self.log({name!r}, ...) here ({scope.stage}): there is no step or epoch that the "
            "value belongs to. Log in a step, or in a hook between the start of training or evaluation and "
            "the end of its epoch.",
        )
    if known is not None:
        raise ConfigurationError(
            f"{name!r} is logged with two meanings: first with {_readable(known.arguments)} from the "
            f"{moment_of(known.scope)}, now with {_readable(arguments)} from the {moment_of(scope)}. "
            "Give the two different names.",
        )
    steps = scope.on_step if on_step is None else on_step
    epochs = bool(scope.on_epoch if on_epoch is None else on_epoch)
    if not (steps or epochs):
        raise ConfigurationError(f"log({name!r}, on_step=False, on_epoch=False) is not useful: it would keep nothing.")
    if steps and not scope.has_batch:
        raise ConfigurationError(
            f"log({name!r}, on_step=True) from the {moment_of(scope)}: there is no step there. Use on_epoch=True.",
        )
    return steps, epochs


def _readable(arguments: Arguments) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in zip(ARGUMENTS, arguments, strict=True))


def moment_of(scope: LogScope) -> str:
    """Name a scope, such as "train step"."""
    return f"{scope.stage} {'step' if scope.has_batch else 'epoch'}"


# How many batches were evaluated


class EvaluationCounts(dict[str, int]):
    """Batches of each loader, in all evaluations of a kind; those within `fit` and those of a verb are of two kinds.

    Attributes:
        alone: Whether the verb under way only evaluates.
    """

    alone = False

    def count(self, stage: str, loader: int) -> int:
        """Count a batch. Returns how many there were before."""
        key = f"{_kind(stage, self.alone)}/{loader}"
        before = self.get(key, 0)
        self[key] = before + 1
        return before

    def total(self, stage: str, alone: bool) -> int:
        """Batches of a kind of evaluation so far, of all loaders."""
        return sum(count for key, count in self.items() if key.startswith(f"{_kind(stage, alone)}/"))


def _kind(stage: str, alone: bool) -> str:
    return f"{stage} alone" if alone else stage


# One value out of what each process has kept of it


_COMBINE: dict[str, Callable[[list[float]], float]] = {"sum": sum, "max": max, "min": min}


def reduced(entry: LoggedValue | None, local: dict[str, Any] | None, everyone: list[dict[str, Any]]) -> Value | None:
    """One value from the totals of all processes, or from this one's own where it is not synchronised."""
    first = everyone[0]
    parts = everyone
    if first["sync"] is False:
        parts = [local] if local is not None else []
    elif first["main_only"]:
        parts = everyone[:1]
    parts = [part for part in parts if part["total"] is not None]
    if not parts:
        return None
    if first["reduction"] is None:
        if entry is None or not callable(entry.reduction):
            return None
        # In turn, as the batches came: a function may ask for the last value.
        turns = zip_longest(*(part["total"] for part in parts))
        stacked = torch.tensor([value for turn in turns for value in turn if value is not None], dtype=torch.float64)
        return torch.as_tensor(entry.reduction(stacked))
    totals = [part["total"] for part in parts]
    if first["reduction"] == "mean":
        weight = sum(part["weight"] for part in parts)
        return torch.tensor(sum(totals) / weight if weight else float("nan"), dtype=torch.float64)
    return torch.tensor(_COMBINE[first["reduction"]](totals), dtype=torch.float64)


def combine_plain(reduction: Reduction, values: list[float]) -> float:
    """One number from those of several processes."""
    if callable(reduction):
        return float(reduction(torch.tensor(values, dtype=torch.float64)))
    if reduction == "mean":
        return sum(values) / len(values)
    return float(_COMBINE[reduction](values))


def reduction_of(name: str, reduce_fx: Any) -> Reduction:
    """What `self.log(reduce_fx=)` means."""
    if callable(reduce_fx):
        return reduce_fx  # type: ignore[no-any-return]
    word = str(reduce_fx).lower()
    word = "mean" if word == "avg" else word
    if not isinstance(reduce_fx, str) or word not in REDUCTIONS:
        raise ConfigurationError(
            f"log({name!r}, reduce_fx={reduce_fx!r}): allowed are {', '.join(REDUCTIONS)} or a function of the "
            f"stacked values.{nearest(word, REDUCTIONS)}",
        )
    return word


# The values of single steps that are reduced over processes


def entries_to_sync(entries: Iterable[LoggedValue]) -> list[LoggedValue]:
    """Those logged with `on_step=True` and `sync_dist=True`."""
    return [entry for entry in entries if entry.on_step and entry.sync and entry.metric is None]


def latest_of(entries: Iterable[LoggedValue]) -> dict[str, float]:
    """This process's latest values to reduce, by the names of steps, but for those that have been."""
    local = [each for each in entries_to_sync(entries) if each.last is not each.synced]
    return {each.step_name: float(each.last) for each in local if each.last is not None}


def combined(entries: Iterable[LoggedValue], everyone: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The values of all processes, each name's as one."""
    values: dict[str, float] = {}
    for entry in entries_to_sync(entries):
        found = [each[entry.step_name] for each in everyone if entry.step_name in each]
        if found:
            values[entry.step_name] = combine_plain(entry.reduction, found)
    return values


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

    # where we are

    def group_of(self, scope: LogScope) -> tuple[Any, ...]:
        """Return what calls of `log` have in common in which one name is one value: the stage and the loader."""
        return (scope.stage, self.dataloader_idx)

    def enter(self, scope: LogScope, dataloader_idx: int | None = None) -> None:
        """Set from where values are logged from now on; whatever was muted belongs to the scope before."""
        self.scope = scope
        self.dataloader_idx = dataloader_idx
        self.skips = False
        if self._tried and scope.stage == "train":
            self._tried, self._tried_bar = {}, {}
        self._current = self._by_loader.setdefault(self.group_of(scope), {})

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
        """Keep one value."""
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
        """Log what another process has logged."""
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
        elif restored is not None:
            key = self.key_beside(restored, entry)
        self._current[name] = table[key] = entry
        return entry

    def key_beside(self, known: LoggedValue, entry: LoggedValue) -> str:
        """Return the key of a value whose name another one of the stage has.

        Raises:
            ConfigurationError: One of two loaders has the name already.
        """
        raise ConfigurationError(f"{entry.name!r} is logged for two loaders; use add_dataloader_idx=True.")

    def _warn_without_trackers(self, name: str) -> None:
        if not self._has_trackers():
            words = f"You called `self.log({name!r}, ..., logger=True)` but have no logger configured."
            warnings.warn(words, stacklevel=6)

    # checkpoints

    def mark(self) -> LogMark:
        """Where the values stand now, for `state_dict` of a later moment."""
        entries = [(entry, entry.mark()) for entry in self._tables["train"].values()]
        return LogMark(entries, dict(self._epoch), dict(self._bar), dict(self.evaluated))

    def state_dict(self, mark: LogMark | None = None) -> dict[str, Any]:
        """What the training epoch under way has kept on this process, and the values of the last epochs."""
        then = mark or self.mark()
        return {
            "train": [entry.state_dict(at) for entry, at in then.entries],
            "epoch": dict(then.epoch),
            "bar": dict(then.bar),
            "evaluated": dict(then.evaluated),
        }

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Resume from what `state_dict` returned."""
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
        """The training step's values for trackers where peers may be gone, so that no collective can be used."""
        values, entries = self.step_values(for_logger=True), self._tables["train"].values()
        own = {name: value for name, value in latest_of(entries).items() if name in values}
        texts = exchange(json.dumps(latest_of(entries))) if own else None
        if texts is None:
            return values, sorted(own)
        synced = combined(entries, self._that_count([json.loads(text) for text in texts]))
        return values | {name: value for name, value in synced.items() if name in values}, []

    def callback_values(self, with_evaluation_steps: bool = True, newest: bool = False) -> dict[str, Value]:
        """All values by name: the latest of each step-wise one, the last epoch's of the others."""
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
        """Count a batch of the evaluation under way."""
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
        """What the progress bar shows, not yet turned into numbers."""
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
        """Reduce what was logged since the last call over the epoch and all processes; call it on all of them."""
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
                value = self.value_of(name, metric, compute_over_processes(metric, self._that_count))
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
        return results

    def values_of(self, stage: str) -> Iterator[LoggedValue]:
        """Yield what this process has logged in a stage, by name."""
        yield from self._tables[stage].values()

    def value_of(self, name: str, metric: Any, computed: Any) -> Value | None:
        """Return what a metric has computed as a value, or None if it is left out.

        Raises:
            ConfigurationError: It is no number.
        """
        if computed is None:
            return None
        if isinstance(computed, Tensor) and computed.numel() == 1:
            return computed.detach()
        if isinstance(computed, int | float):
            return float(computed)
        given = f"shape {tuple(computed.shape)}" if isinstance(computed, Tensor) else f"a {type(computed).__name__}"
        raise ConfigurationError(
            f"The `{type(metric).__name__}.compute()` return of the metric logged as {name!r} must be a tensor of one "
            f"number, a number or None, got {given}. Compute it in on_validation_epoch_end and log the parts by name.",
        )

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
        """Forget what was logged in earlier runs, and what their metrics have gathered."""
        self.evaluated.alone = evaluates_alone
        for table in self._tables.values():
            for entry in table.values():
                if entry.metric is not None:
                    entry.metric.reset()
        self.start(tuple(self._tables))
        for values in (self._epoch, self._bar, self._tried, self._tried_bar):
            values.clear()

    def remember(self, values: Mapping[str, Value], bar: Mapping[str, Value] | None = None) -> None:
        """Let callbacks see values that come from elsewhere."""
        self._epoch.update(values)
        self._bar.update(bar or {})


def _forgotten(values: Tensor) -> Tensor:
    """Stands for a reduction function, which no checkpoint can hold, until the name is logged again."""
    raise ConfigurationError(
        "A value that is reduced by a function was logged before the checkpoint and never since, so the function is "
        "not known any more. Log it in every epoch, or use one of " + ", ".join(REDUCTIONS) + ".",
    )


def _is_metric(value: Any) -> bool:
    """Whether a value is a torchmetrics object; torchmetrics is not imported to find out."""
    torchmetrics = sys.modules.get("torchmetrics")
    return torchmetrics is not None and isinstance(value, torchmetrics.Metric)


def _find_metric(task: nn.Module, path: str | None) -> Any:
    return None if path is None else task.get_submodule(path)


def _number(name: str, value: Any) -> float:
    if isinstance(value, Number) or (hasattr(value, "item") and getattr(value, "size", None) == 1):
        return float(value)
    raise ConfigurationError(
        f"`self.log({name}, {value})` was called, but {name!r} is a {type(value).__name__}. Give a number, a scalar "
        "tensor or a torchmetrics object.",
    )


def _is_same_function(one: Any, other: Any) -> bool:
    """Whether two functions have been made by the same place of the source; of `partial`, those inside."""
    if isinstance(one, partial) and isinstance(other, partial):
        return _is_same_function(one.func, other.func)
    if not (callable(one) and callable(other)) or type(one) is not type(other):
        return False
    names = [(each.__module__, getattr(each, "__qualname__", None)) for each in (one, other)]
    return names[0] == names[1]


# What the parts of a micro-batch log, taken once for the whole


_REDUCTION = 4  # among the arguments


class _Call(NamedTuple):
    """One call of `self.log`: its value, arguments and rows, and whether these were given with it."""

    value: Any
    arguments: tuple[Any, ...]
    rows: float
    rows_given: bool


class HeldBack:
    """Collects what is logged in the parts of micro-batches, and logs it as if each had been computed whole."""

    def __init__(self, logged: LoggedValues) -> None:
        self._logged = logged
        self._parts: dict[int, list[dict[tuple[str, int], _Call]]] = {}

    def clear(self) -> None:
        """Forget what was collected."""
        self._parts.clear()

    @contextmanager
    def collecting(self, place: int) -> Iterator[None]:
        """Collect what the body logs, as that of a part."""
        calls: dict[tuple[str, int], _Call] = {}
        self._parts.setdefault(place, []).append(calls)
        with self._logged.diverted() as diverted:
            yield
        for name, value, arguments, given in diverted:
            number = sum(known == name for known, _ in calls)
            rows = self._logged.rows_of_batch() if given is None else given
            calls[name, number] = _Call(value, arguments, rows, given is not None)

    def log(self, place: int) -> None:
        """Log what a micro-batch has logged, each value once."""
        parts = self._parts.get(place, [])
        for key in dict.fromkeys(key for calls in parts for key in calls):
            found = [calls[key] for calls in parts if key in calls]
            rows = sum(call.rows for call in found) if found[0].rows_given else None
            self._logged.log(key[0], _combined(found), found[0].arguments, rows)


def _combined(calls: Sequence[_Call]) -> Any:
    """The value of a whole micro-batch, from those of its parts."""
    if len(calls) == 1 or not isinstance(calls[0].value, (Tensor, Number)):
        return calls[-1].value  # a metric has gathered all parts itself
    reduction = calls[0].arguments[_REDUCTION]
    stacked = torch.stack([torch.as_tensor(call.value).reshape(()) for call in calls])
    if reduction in ("sum", "max", "min"):
        return getattr(stacked, reduction)()
    weights = torch.tensor([call.rows for call in calls], dtype=torch.float32, device=stacked.device)
    return (stacked.float() * weights).sum() / weights.sum()
