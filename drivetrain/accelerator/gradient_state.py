"""`GradientState`: where an accumulation window and the loaders being iterated are, in Accelerate's words."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from drivetrain.accelerator.handlers import GradientAccumulationPlugin
from drivetrain.data import ActiveLoaders, PreparedLoader
from drivetrain.runtime.state import PartialState

if TYPE_CHECKING:
    from drivetrain.accelerator.accumulation import AccumulationWindow

_KEY = "gradients"


class GradientState:
    """A view of an engine's accumulation window and of the loaders that it iterates: `accelerator.gradient_state`.

    Made by itself it is a view of the engine that was made last.

    Args:
        gradient_accumulation_plugin: How gradients accumulate, where there is no engine to ask.
        window: The window of an engine.
        active: Its loaders.
    """

    def __init__(
        self,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        *,
        window: AccumulationWindow | None = None,
        active: ActiveLoaders | None = None,
    ) -> None:
        self._plugin = gradient_accumulation_plugin or GradientAccumulationPlugin()
        self._own = None if window is None or active is None else (weakref.ref(window), weakref.ref(active))
        self._synchronises = True
        if self._own is not None:
            PartialState.registry()[_KEY] = self._own

    @classmethod
    def _reset_state(cls) -> None:
        """Forget the engine that was made last."""
        PartialState.registry().pop(_KEY, None)

    def _find(self) -> tuple[AccumulationWindow | None, ActiveLoaders | None]:
        window, active = self._own or PartialState.registry().get(_KEY) or (_nothing, _nothing)
        return window(), active()

    @property
    def initialized(self) -> bool:
        """Whether there is an engine."""
        return self._find()[0] is not None

    @property
    def sync_gradients(self) -> bool:
        """Whether the current micro-batch ends a window."""
        window, _ = self._find()
        return self._synchronises if window is None else window.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        window, _ = self._find()
        if window is None:
            self._synchronises = value
        else:
            window.sync_gradients = value

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        self.sync_gradients = sync_gradients

    @property
    def plugin(self) -> GradientAccumulationPlugin:
        """How gradients accumulate."""
        window, _ = self._find()
        return self._plugin if window is None else window.plugin

    @property
    def plugin_kwargs(self) -> dict[str, Any]:
        """Return the options as a dict; an entry that is assigned holds from the next micro-batch on."""
        return vars(self.plugin)

    @property
    def num_steps(self) -> int:
        """Micro-batches of a window."""
        return self.plugin.num_steps

    @property
    def adjust_scheduler(self) -> bool:
        """As the plugin has it."""
        return self.plugin.adjust_scheduler

    @property
    def sync_with_dataloader(self) -> bool:
        """Whether the last batch of a loader ends a window."""
        return self.plugin.sync_with_dataloader

    @property
    def sync_each_batch(self) -> bool:
        """Whether gradients are reduced in each micro-batch."""
        return self.plugin.sync_each_batch

    @property
    def active_dataloader(self) -> PreparedLoader | None:
        """The loader that is being iterated, the innermost of several; None outside of loops."""
        _, active = self._find()
        return None if active is None else active.innermost

    @property
    def dataloader_references(self) -> list[PreparedLoader | None]:
        """The loaders that are being iterated, after a None that stands for no loop."""
        _, active = self._find()
        return [None, *(active.loaders if active is not None else [])]

    @property
    def in_dataloader(self) -> bool:
        """Whether a loader is being iterated."""
        return self.active_dataloader is not None

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the current batch is the last one of its loader."""
        loader = self.active_dataloader
        return loader is not None and loader.end_of_dataloader

    @property
    def remainder(self) -> int:
        """Real samples of all processes in the last step; -1 before, or if unknown."""
        loader = self.active_dataloader
        return -1 if loader is None else loader.remainder

    @property
    def is_xla_gradients_synced(self) -> bool:
        """Whether an XLA optimizer's step need not reduce gradients: they are when it is called."""
        return True

    def __repr__(self) -> str:
        return (
            f"Sync Gradients: {self.sync_gradients}\nAt end of current dataloader: {self.end_of_dataloader}\n"
            f"Extra samples added: {self.remainder}\nGradient accumulation plugin: {self.plugin_kwargs}\n"
        )


def _nothing() -> None:
    return None
