"""Counter of XLA compilations, with a warning that names the changed shapes if XLA keeps recompiling."""

from __future__ import annotations

import importlib
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch

from drivetrain.runtime.logging import get_logger

logger = get_logger(__name__)

_WARM_UP = 2
"""Steps that compile in every run: the first, and the second, which is the first with optimizer state."""
# Warn if at least `_MANY` of the last `_WINDOW` steps compiled a graph.
_WINDOW, _MANY = 6, 3
_SHOWN = 4

Shapes = tuple[tuple[str, tuple[int, ...]], ...]


class Compilations:
    """Counter of XLA's compilations, which warns if many steps after the first still compile new graphs."""

    def __init__(self) -> None:
        self.steps = 0
        self.recompiled = 0
        self._metrics: Any = importlib.import_module("torch_xla.debug.metrics")
        self._started = self.total
        self._began = self.seconds
        self._in_steps = _Watched(self._started)
        self._between = _Watched(self._started)
        self._batch: Shapes = ()
        self._stepped = False
        self._next_warning = 1

    @property
    def total(self) -> int:
        """Number of graphs that XLA has compiled since this process started."""
        return int(self._metrics.counter_value("UncachedCompile") or 0)

    @property
    def count(self) -> int:
        """Number of graphs that XLA has compiled since this counter was created."""
        return self.total - self._started

    @property
    def seconds(self) -> float:
        """Total time in seconds that XLA has spent on compilation in this process."""
        data = self._metrics.metric_data("CompileTime")
        # torch_xla returns (count, total in nanoseconds, samples).
        return data[1] / 1e9 if data else 0.0

    def record_batch(self, batch: Any) -> None:
        # A warning about recompilations names the shapes that have changed.
        self._batch = shapes_of(batch)

    def end_step(self) -> None:
        # Warns if XLA has compiled in many of the recent steps.
        self.steps += 1
        self._stepped = True
        compiled = self._in_steps.note(self.total, self._batch)
        if self.steps <= _WARM_UP:
            self._in_steps.recent.clear()
            return
        self.recompiled += compiled
        if compiled and sum(self._in_steps.recent) >= _MANY and self.recompiled >= self._next_warning:
            # Ten times as many recompilations until the next warning, so that a long run logs few of them.
            self._next_warning = self.recompiled * 10
            self._warn(f"{self.recompiled} of {self.steps} steps", self._in_steps)

    def end_batch(self) -> None:
        # Outside of training, warns if XLA compiles for every batch.
        if self._stepped:
            self._stepped = False
            # The step has counted its own compilations.
            self._between.seen = self.total
            return
        self._between.note(self.total, self._batch)
        if sum(self._between.recent) == _WINDOW:
            self._warn(f"the last {_WINDOW} batches without an optimizer step", self._between)
            self._between.recent.clear()

    def _warn(self, where: str, watched: _Watched) -> None:
        seconds = self.seconds - self._began
        logger.warning(
            f"XLA compiled a graph in {where} ({self.count} compilations, {seconds:.1f} s in total). "
            f"{describe_change([*watched.shapes])}"
        )


class _Watched:
    def __init__(self, seen: int) -> None:
        self.seen = seen
        self.recent: deque[bool] = deque(maxlen=_WINDOW)
        self.shapes: deque[Shapes] = deque(maxlen=_WINDOW)

    def note(self, total: int, shapes: Shapes) -> bool:
        compiled, self.seen = total != self.seen, total
        self.recent.append(compiled)
        self.shapes.append(shapes)
        return compiled


def shapes_of(batch: Any, name: str = "batch") -> Shapes:
    # `name` is the prefix of the tensor names.
    if isinstance(batch, torch.Tensor):
        return ((name, tuple(batch.shape)),)
    if isinstance(batch, Mapping):
        return tuple(each for key, value in batch.items() for each in shapes_of(value, f"{name}[{key!r}]"))
    if isinstance(batch, list | tuple):
        return tuple(each for index, value in enumerate(batch) for each in shapes_of(value, f"{name}[{index}]"))
    return ()


def describe_change(seen: list[Shapes]) -> str:
    """Compare the tensor shapes of several batches, and return advice on how to avoid recompilations."""
    by_name: dict[str, list[tuple[int, ...]]] = {}
    for shapes in seen:
        for name, shape in shapes:
            known = by_name.setdefault(name, [])
            if shape not in known:
                known.append(shape)
    changed = {name: shapes for name, shapes in by_name.items() if len(shapes) > 1}
    if not changed:
        return (
            "The shapes of the batches did not change. Check the model for output shapes that depend on values "
            "(boolean masks, nonzero, unique), for Python numbers that forward takes from data or counts itself, and "
            "for .item() within a step."
        )
    listed = "; ".join(
        f"{name} had the shapes {', '.join(map(str, shapes[:_SHOWN]))}{' and others' if len(shapes) > _SHOWN else ''}"
        for name, shapes in changed.items()
    )
    return f"{listed}. Pad batches to one length or to a few in the collate function. Use drop_last=True in training."
