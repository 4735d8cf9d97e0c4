"""Adagrad, which makes its state where it is built rather than in its first step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from drivetrain.strategies.deepspeed.layouts import Layout


class _Adagrad(Optimizer):
    """Stands for the class of an Adagrad while an engine is built around it."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise NotImplementedError


@contextmanager
def kept(optimizer: Optimizer) -> Iterator[None]:
    """Let an engine that is built in the body keep the user's Adagrad.

    DeepSpeed 0.19 would make another one over its flat tensors, with the defaults alone and all parameters in one
    group: a schedule over the user's would change nothing, and a second group would break the engine.

    Args:
        optimizer: The user's optimizer, of any class.
    """
    own: Any = type(optimizer)
    if not issubclass(own, torch.optim.Adagrad):
        yield
        return
    optimizer.__class__ = _Adagrad
    try:
        yield
    finally:
        optimizer.__class__ = own


def make_state(layout: Layout) -> None:
    """Make the state of an Adagrad for the tensors that it steps in an engine.

    Args:
        layout: Where the engine keeps them.
    """
    optimizer = layout.inner
    if not isinstance(optimizer, torch.optim.Adagrad):
        return
    holders = [holder for holder, _ in layout.holders()]
    missing = [holder for holder in holders if "sum" not in optimizer.state.get(holder, {})]
    if missing:
        made = torch.optim.Adagrad(missing, **optimizer.defaults).state
        optimizer.state.clear()
        optimizer.state.update(made)
