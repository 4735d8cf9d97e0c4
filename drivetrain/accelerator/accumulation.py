"""Counting the micro-batches of an accumulation window in a loop that the user writes."""

from __future__ import annotations

from dataclasses import replace

from drivetrain.accelerator.gradients import HeldGradients
from drivetrain.accelerator.handlers import GradientAccumulationPlugin
from drivetrain.data import ActiveLoaders, PreparedLoader


class AccumulationWindow:
    """Which micro-batch of the window is this, how many does the window hold, and is this the last.

    The count belongs to the loop over one loader: when that loop ends, however it ends, the next
    window starts afresh.

    Args:
        plugin: the options.
        active: the loaders that are being iterated.
        gradients: what accumulates.

    Attributes:
        plugin: the options.
        sync_gradients: whether the current micro-batch ends a window, so that optimizers step.
        size: micro-batches of the current window: fewer than `num_steps` where the loader ends before.
        holds_gradients: whether a backward of the current window's earlier or present micro-batches has run, so
            that clearing gradients now would lose some of it.
        weighted: whether the window's losses say what they weigh, so that no gradient was divided by `size`.
    """

    def __init__(self, plugin: GradientAccumulationPlugin, active: ActiveLoaders, gradients: HeldGradients) -> None:
        self.plugin = plugin
        self.sync_gradients = True
        self.size = plugin.num_steps
        self._active = active
        self._gradients = gradients
        self.holds_gradients = self.weighted = False
        self._entered = False
        self._abandoned = False
        self._count = 0
        self._loader: PreparedLoader | None = None
        active.on_leave.append(self._loop_ended)

    def advance(self) -> None:
        """Enter the next micro-batch."""
        loader = self._active.innermost
        info = loader.current if loader is not None and self.plugin.sync_with_dataloader else None
        if self._count == 0:
            if self._abandoned:
                self._abandoned = False
                self._gradients.discard_abandoned()
            self._loader = loader
            self.holds_gradients = self.weighted = False
            self.size = self.plugin.num_steps
            if loader is not None and info is not None:
                remaining = loader.remaining
                if remaining is not None:
                    self.size = max(1, min(self.size, remaining))
        self._count += 1
        self._entered = True
        self.sync_gradients = self._count >= self.plugin.num_steps or (info is not None and info.last)
        if self.sync_gradients:
            if self._count != self.size:
                # The loader had no length, or not the one it said: what is held was divided by the wrong number.
                if self.holds_gradients and not self.weighted:
                    self._gradients.scale(self.size / self._count)
                self.size = self._count
            self._count = 0

    def set_steps(self, num_steps: int) -> None:
        """Change how many micro-batches a window holds, from the next window on."""
        plugin = self.plugin
        self.plugin = replace(plugin, num_steps=num_steps)
        if self._count == 0:
            self.size = num_steps

    def mark_backward(self) -> None:
        """Note that gradients of the current window have been computed."""
        self.holds_gradients = self._entered

    def _loop_ended(self, loader: PreparedLoader) -> None:
        if loader is self._loader and self.plugin.sync_with_dataloader:
            if self.holds_gradients:
                self._abandoned = True
                self._gradients.abandon()
            self.reset()

    def reset(self) -> None:
        """Let the next micro-batch begin a window."""
        self._count = 0
        self.sync_gradients = True
        self.holds_gradients = self._entered = False
        self.size = self.plugin.num_steps
        self._loader = None
