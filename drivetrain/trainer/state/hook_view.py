"""A checkpoint as the hooks of tasks and callbacks see it, in Lightning's names, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drivetrain.checkpoint.schema import LOSS_IS_FINITE

# what hooks see of the engine's part, by the name that they use -> the engine's name
_ENGINE = {
    "optimizer_states": "optimizers",
    "lr_schedulers": "schedulers",
    "precision": "precision",
    "loaders": "loaders",
    "registered": "registered",
    "classes": "classes",
}
ENTRIES = (
    "progress",
    "hyper_parameters",
    "hparams_name",
    "hparams_constructor",
    "datamodule_hyper_parameters",
    "datamodule_hparams_name",
    "datamodule_hparams_constructor",
    "callbacks",
    "trackers",
    "should_stop",
    "stop_askers",
    "datamodule",
    "combined_loader",
    "hooks",
    LOSS_IS_FINITE,
)
"""The names of what a Trainer adds to the state of a run."""


def for_hooks(engine: Mapping[str, Any], number: int, entries: Mapping[str, Any]) -> dict[str, Any]:
    """A checkpoint as `on_save_checkpoint` and `on_load_checkpoint` see it, in Lightning's names.

    Args:
        engine: The engine's part of the shared state.
        number: Which of its models is the task.
        entries: The Trainer's entries.
    """
    progress = entries.get("progress", {})
    state: dict[str, Any] = {"epoch": progress.get("epoch", 0), "global_step": progress.get("global_step", 0)}
    if number < len(engine["models"]):
        state["state_dict"] = engine["models"][number]
    state |= {name: engine[place] for name, place in _ENGINE.items() if place in engine}
    return state | dict(entries) | dict(entries.get("hooks", {}))


def take_back(state: dict[str, Any], engine: dict[str, Any], number: int) -> dict[str, Any]:
    """Give the engine's part what hooks have left of it, and sort the rest into entries.

    Args:
        state: What `for_hooks` returned, changed by hooks.
        engine: The engine's part of the shared state, which is changed.
        number: Which of its models is the task.
    """
    if "state_dict" in state:
        engine["models"][number] = state["state_dict"]
    engine.update({place: state[name] for name, place in _ENGINE.items() if name in state})
    known = {"epoch", "global_step", "state_dict", *_ENGINE, *ENTRIES}
    entries = {name: state[name] for name in ENTRIES if name in state}
    return entries | {"hooks": {name: value for name, value in state.items() if name not in known}}


def state_of(kind: type, entries: Mapping[str, Any]) -> Any:
    """The state of a data module in a checkpoint; a file of Lightning's has it under the name of its class.

    Args:
        kind: The data module's class.
        entries: The Trainer's entries.
    """
    return entries.get("datamodule") or entries.get("hooks", {}).get(kind.__qualname__)
