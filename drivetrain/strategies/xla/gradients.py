"""Gradients on XLA devices of several processes: averaged by one collective after each backward."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from weakref import WeakSet

from torch import nn

from drivetrain.strategies.gradients import Gradients


class AveragedGradients(Gradients):
    """Gradients that are averaged over processes right after the backward that completes them.

    XLA compiles the collective into the step's graph and overlaps it with the backward by itself. Averaging gradients
    that are averages already changes nothing, so several backwards in a step may each do it.

    Args:
        processes: How many they are averaged over.
    """

    def __init__(self, processes: int) -> None:
        self.models: WeakSet[nn.Module] = WeakSet()
        self._processes = processes
        self._held = False

    def sync(self, model: nn.Module, enabled: bool) -> AbstractContextManager[Any]:
        """Whether backwards in this context average."""
        return self._holding(not enabled)

    @contextmanager
    def _holding(self, held: bool) -> Iterator[None]:
        before, self._held = self._held, held
        try:
            yield
        finally:
            self._held = before

    def average(self) -> None:
        """Average the gradients of all prepared models, unless they are held for a later backward."""
        if self._held:
            return
        gradients = [p.grad for model in self.models for p in model.parameters() if p.grad is not None]
        if gradients:
            functions = importlib.import_module("torch_xla.core.xla_model")
            functions.all_reduce(functions.REDUCE_SUM, gradients, scale=1.0 / self._processes)
