"""A checkpoint as `on_save_checkpoint` and `on_load_checkpoint` of Lightning's scripts see it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from drivetrain.compat.formats.lightning import loops_of
from drivetrain.compat.lightning.version import VERSION
from drivetrain.trainer.data_module import ENTRIES

_ALWAYS = {"callbacks", "optimizer_states", "lr_schedulers"}
_WHERE_FILLED = {
    *("hyper_parameters", "hparams_name", "datamodule_hyper_parameters", "datamodule_hparams_name", "precision"),
}
_NEVER = {*ENTRIES, "loaders", "registered", "classes"} - _ALWAYS - _WHERE_FILLED


@contextmanager
def with_lightnings_names(state: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Give a checkpoint with Lightning's names alone, the counters of its loops and its version among them.

    Args:
        state: The checkpoint; it has in the end what was changed in the body.
    """
    hidden = {name for name in state if name in _NEVER or (name in _WHERE_FILLED and not state[name])}
    shown = {name: value for name, value in state.items() if name not in hidden}
    progress = state.get("progress")
    added = {"pytorch-lightning_version": VERSION, "loops": loops_of(progress) if progress else {}}
    shown |= added
    yield shown
    kept = {name: state[name] for name in hidden}
    state.clear()
    state.update(kept, **{name: value for name, value in shown.items() if name not in added})
