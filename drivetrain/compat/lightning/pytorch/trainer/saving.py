"""Save and load checkpoints in the mirror's Trainer."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from drivetrain.callbacks.step_schedule import decide_on_main_process
from drivetrain.checkpoint import PendingSave, is_checkpoint
from drivetrain.compat.formats.lightning import is_lightning_checkpoint, loops_of, opened
from drivetrain.compat.formats.lightning_file import LightningFormat
from drivetrain.compat.lightning.checkpoint_io import CheckpointIO, TorchCheckpointIO
from drivetrain.compat.lightning.pytorch.trainer.conventions import LightningConventions
from drivetrain.compat.lightning.strategy_members import with_members
from drivetrain.compat.lightning.unpickling import is_asked_for
from drivetrain.compat.lightning.version import VERSION
from drivetrain.runtime.logging import get_logger
from drivetrain.runtime.state import PartialState
from drivetrain.trainer.hyper_parameters import ENTRIES

logger = get_logger(__name__)

_ALWAYS = {"callbacks", "optimizer_states", "lr_schedulers"}
_WHERE_FILLED = {
    *("hyper_parameters", "hparams_name", "datamodule_hyper_parameters", "datamodule_hparams_name", "precision"),
}
_NEVER = {*ENTRIES, "loaders", "registered", "classes"} - _ALWAYS - _WHERE_FILLED


@contextmanager
def with_lightnings_names(state: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a checkpoint with only Lightning's keys, including loop counters and version."""
    hidden = {name for name in state if name in _NEVER or (name in _WHERE_FILLED and not state[name])}
    shown = {name: value for name, value in state.items() if name not in hidden}
    progress = state.get("progress")
    added = {"pytorch-lightning_version": VERSION, "loops": loops_of(progress) if progress else {}}
    shown |= added
    yield shown
    kept = {name: state[name] for name in hidden}
    state.clear()
    state.update(kept, **{name: value for name, value in shown.items() if name not in added})


class ScriptFiles(LightningFormat):
    """Checkpoint files in Lightning's format, with pickled objects, besides checkpoint directories."""

    keeps_objects = True
    shown_to_hooks = staticmethod(with_lightnings_names)

    def __init__(self, trainer: LightningSaving, weights_only: bool | None) -> None:
        self._trainer, self._weights_only = trainer, weights_only

    def content(self, path: str) -> Mapping[str, Any] | None:
        is_file = is_asked_for(self._weights_only) and is_lightning_checkpoint(path)
        return opened(path, given=None, objects=True) if is_file else None

    def may_replace(self, path: str, block: bool) -> bool:
        as_file = self._trainer.format_of_checkpoint(path, block) == self.name
        return super().may_replace(path, block) if as_file or os.path.islink(path) else not os.path.isfile(path)


class PluginFiles(ScriptFiles):
    """Checkpoints of a script's `CheckpointIO` plugin, in any location."""

    def __init__(
        self, trainer: LightningSaving, weights_only: bool | None, plugin: CheckpointIO, storage_options: Any
    ) -> None:
        super().__init__(trainer, weights_only)
        self._plugin, self._storage_options = plugin, storage_options

    def place_of(self, path: str | os.PathLike[str]) -> str | os.PathLike[str]:
        return path

    def place_beside(self, path: str | os.PathLike[str], root: str) -> str:
        return os.path.join(root, f".{os.path.basename(os.fspath(path))}.whole")

    def write(self, path: str | os.PathLike[str], content: dict[str, Any]) -> None:
        self._plugin.save_checkpoint(content, path, storage_options=self._storage_options)

    def content(self, path: str) -> Mapping[str, Any] | None:
        if os.path.isdir(path) and is_checkpoint(path):
            return None  # of a run without the plugin
        PartialState().wait_for_everyone()  # the main process may have it in hand
        return self._plugin.load_checkpoint(path, weights_only=self._weights_only)

    def remove(self, path: str) -> None:
        if os.path.islink(path):
            os.unlink(path)
            return
        # A resumed run repeats removals that were pending when its checkpoint was written.
        with suppress(FileNotFoundError):
            self._plugin.remove_checkpoint(path)

    def may_replace(self, path: str, block: bool) -> bool:
        return True

    def has_second_names(self, directory: str) -> bool:
        return False


class LightningSaving(LightningConventions):
    """Mixin that saves checkpoints as Lightning files or through a `CheckpointIO` plugin."""

    _weights_only: bool | None = None  # argument of the running method
    _storage_options: Any = None

    def save_checkpoint(  # type: ignore[override]
        self,
        filepath: str | os.PathLike[str],
        weights_only: bool | None = None,
        storage_options: Any = None,
        **options: Any,
    ) -> PendingSave:
        """Save a checkpoint. Call it on all processes."""
        if self.task is None:
            raise AttributeError(
                "Saving a checkpoint is only possible if a model is attached: call fit or another verb first."
            )
        self._storage_options = storage_options
        options["format"] = options.get("format") or self.format_of_checkpoint(filepath, options.get("block", True))
        try:
            return super().save_checkpoint(filepath, bool(weights_only), **options)
        finally:
            self._storage_options = None

    def format_of_checkpoint(self, filepath: str | os.PathLike[str], block: bool = True) -> str:
        """Return the default format of `save_checkpoint` for a path.

        `"lightning"` (one file) if each process holds the full state or a plugin writes the checkpoint. `"drivetrain"`
        (a directory) if the state is sharded, written in the background or saved to a URL.
        """
        if isinstance(self.checkpoint_format, PluginFiles):
            return "lightning"
        is_file = block and "://" not in os.fspath(filepath) and self.strategy.state.held_as == "whole"
        return "lightning" if is_file else "drivetrain"

    @property
    def checkpoint_format(self) -> ScriptFiles:
        """Writer of the checkpoints: the script's plugin, or the default files."""
        plugin = with_members(self.strategy, "32").given_checkpoint_io
        if self._storage_options is None and (plugin is None or type(plugin) is TorchCheckpointIO):
            return ScriptFiles(self, self._weights_only)
        return PluginFiles(self, self._weights_only, plugin or TorchCheckpointIO(), self._storage_options)

    @contextmanager
    def closing_checkpoints(self) -> Iterator[None]:
        """Call the checkpoint plugin's `teardown` after the `with` body.

        An error of `teardown` is raised on all processes. If the body has raised too, the error is only logged.
        """
        strategy: Any = self.strategy
        try:
            yield
        except BaseException:
            try:
                strategy.checkpoint_io.teardown()
            except Exception as error:
                logger.error(f"The checkpoints of this run may not be whole: {error!r}")
            raise
        decide_on_main_process(lambda: strategy.checkpoint_io.teardown())
        if not self.is_global_zero:
            strategy.checkpoint_io.teardown()
