"""The accumulation window: which micro-batch is this, how many does an optimizer step hold, and is this the last."""

from __future__ import annotations

from dataclasses import replace

from drivetrain.accelerator.gradients import HeldGradients
from drivetrain.accelerator.handlers import GradientAccumulationPlugin
from drivetrain.data import ActiveLoaders, PreparedLoader


class AccumulationWindow:
    """Counts the micro-batches of optimizer steps, for a raw loop and for a driver that plans its windows.

    A raw loop enters each micro-batch by `advance`, and the end of its loader ends the window. A driver that has the
    micro-batches of a step at hand sets how many there are (`begin`) and enters each by `advance_planned`. The count
    belongs to the loop over one loader: when that loop ends, however it ends, the next window starts from zero.

    Args:
        plugin: The options.
        active: The loaders that are being iterated.
        gradients: What accumulates.

    Attributes:
        plugin: The options.
        sync_gradients: Whether the current micro-batch ends a window, so that optimizers step.
        size: Micro-batches of the current window: fewer than `num_steps` where the loader ends before.
        planned: Whether a driver has set how many micro-batches the current window holds.
        holds_gradients: Whether a backward of the current window's earlier or present micro-batches has run, so
            that clearing gradients now would lose some of it.
        is_abandoned: Whether gradients are left of a window whose loop ended before its step; they are discarded.
        weighted: Whether the window's losses have weights, so that no gradient was normalised by `size`.
        count: Micro-batches of the current window that were entered; 0 if the next one begins a window.
    """

    def __init__(self, plugin: GradientAccumulationPlugin, active: ActiveLoaders, gradients: HeldGradients) -> None:
        self.plugin = plugin
        self.sync_gradients = True
        self.size = plugin.num_steps
        self.planned = False
        self._active = active
        self._gradients = gradients
        self.holds_gradients = self.weighted = False
        self._entered = False
        self.is_abandoned = False
        self.count = 0
        self._loader: PreparedLoader | None = None
        active.on_leave.append(self._loop_ended)

    @property
    def is_within(self) -> bool:
        """Whether gradients are held of a window that has not ended."""
        return self.count > 0 and self.holds_gradients

    def advance(self) -> None:
        """Enter the next micro-batch of a raw loop."""
        loader = self._active.innermost
        info = loader.current if loader is not None and self.plugin.sync_with_dataloader else None
        if self.count == 0:
            self._discard_abandoned()
            self._loader = loader
            self.holds_gradients = self.weighted = self.planned = False
            self.size = self.plugin.num_steps
            if loader is not None and info is not None and self.plugin.average_short_window:
                remaining = loader.remaining
                if remaining is not None:
                    self.size = max(1, min(self.size, remaining))
        self.count += 1
        self._entered = True
        self.sync_gradients = self.count >= self.plugin.num_steps or (info is not None and info.last)
        if self.sync_gradients:
            if self.count != self.size and self.plugin.average_short_window:
                # The loader had no length, or not the one it reported: what is held was normalised by a wrong number.
                if self.holds_gradients and not self.weighted:
                    self._gradients.scale(self.size / self.count)
                self.size = self.count
            self.count = 0

    def begin(self, size: int) -> None:
        """Open a window of a known number of micro-batches.

        Args:
            size: How many micro-batches the optimizer step holds.
        """
        if self.is_abandoned:
            self._discard_abandoned()
        self.size = size
        self.planned = self.sync_gradients = True
        self.holds_gradients = self.weighted = False
        self.count = 0

    def advance_planned(self) -> None:
        """Enter the next micro-batch of a window that `begin` has opened."""
        self.count += 1
        self._entered = True
        self.sync_gradients = self.count == self.size
        if self.sync_gradients:
            self.count = 0

    def end_planned(self) -> None:
        """Leave the windows that a driver planned; gradients that no step was taken with are discarded."""
        if self.count and self.holds_gradients:
            self.is_abandoned = True
            self._gradients.abandon()
        self.reset()

    def set_steps(self, num_steps: int) -> None:
        """Change how many micro-batches a window holds, from the next window on."""
        plugin = self.plugin
        self.plugin = replace(plugin, num_steps=num_steps)
        if self.count == 0:
            self.size = num_steps

    def mark_backward(self) -> None:
        """Record that gradients of the current window have been computed."""
        self.holds_gradients = self._entered

    def _discard_abandoned(self) -> None:
        if self.is_abandoned:
            self.is_abandoned = False
            self._gradients.discard_abandoned()

    def _loop_ended(self, loader: PreparedLoader) -> None:
        if loader is self._loader and self.plugin.sync_with_dataloader:
            if self.holds_gradients:
                self.is_abandoned = True
                self._gradients.abandon()
            self.reset()

    def reset(self) -> None:
        """Let the next micro-batch begin a window."""
        self.count = 0
        self.sync_gradients = True
        self.holds_gradients = self._entered = self.planned = False
        self.size = self.plugin.num_steps
        self._loader = None
