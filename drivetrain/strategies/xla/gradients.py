"""Gradients on XLA devices: their norm, and among several processes their average by one collective."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from drivetrain.strategies.gradients import Gradients


class XLAGradients(Gradients):
    """Gradients on one device, or spread over those of a process; XLA reduces over the devices by itself."""

    def clip_norm(self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale gradients down to a total norm of at most `max_norm`, computed in 32 bits at least.

        XLA adds up squares in the dtype that they have: in bfloat16 the norm of a small model came out 5 % too low.

        Args:
            parameters: The parameters whose gradients they are.
            max_norm: The largest norm allowed.
            norm_type: The p of the p-norm.

        Returns:
            The total norm before clipping, a scalar tensor on the device.
        """
        given = list(parameters)
        gradients = [p.grad if p.grad.itemsize > 2 else p.grad.float() for p in given if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients, norm_type)
        nn.utils.clip_grads_with_norm_(given, max_norm, norm)
        return norm


class AveragedGradients(XLAGradients):
    """Gradients that are averaged over processes right after the backward that completes them.

    XLA compiles the collective into the step's graph and overlaps it with the backward by itself. Averaging gradients
    that are averages already changes nothing, so several backwards in a step may each do it.

    Args:
        processes: How many they are averaged over.
    """

    def __init__(self, processes: int) -> None:
        # In the order in which they were prepared, which is the same on all processes: a set has none.
        self._models: WeakKeyDictionary[nn.Module, None] = WeakKeyDictionary()
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

    def add(self, model: nn.Module) -> None:
        """Average the gradients of a model's parameters from now on."""
        self._models[model] = None

    def average(self) -> None:
        """Average the gradients of all prepared models, unless they are held for a later backward."""
        if self._held:
            return
        gradients = [p.grad for model in self._models for p in model.parameters() if p.grad is not None]
        if gradients:
            functions = importlib.import_module("torch_xla.core.xla_model")
            functions.all_reduce(functions.REDUCE_SUM, gradients, scale=1.0 / self._processes)
