"""How the state of a run is laid out in a checkpoint, and how earlier versions laid it out.

`engine` holds `models`, `optimizers`, `schedulers`, `loaders` and `registered`, a list each, `precision`, and under
`classes` what the things in those lists were made with. `driver` holds what a driver of the engine adds, by name: a
Trainer's `progress`, `callbacks`, `hyper_parameters` and so on. `kept` names those of its entries that come from an
earlier checkpoint, which another driver wrote.

A process's own file has the same parts: `engine`, with `random`, and `driver`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from drivetrain.runtime.errors import CheckpointError

LOSS_IS_FINITE = "loss_is_finite"
"""The entry of the shared state, or of its driver's, that is False where a loss before the save was not finite."""

# an earlier Trainer's name for a part of the engine -> its name now
_OF_A_TRAINER = {
    "optimizer_states": "optimizers",
    "lr_schedulers": "schedulers",
    "precision": "precision",
    "registered": "registered",
}
_OF_AN_ACCELERATOR = ("models", "optimizers", "schedulers", "loaders", "registered", "precision")


class Places(NamedTuple):
    """Where the large lists of a checkpoint are, as `only` and `into` of a reading name them.

    Attributes:
        models: The path of the models' states.
        optimizers: The path of the optimizers' states.
        one_model: Whether the first path leads to the state of an only model, rather than to a list.
    """

    models: str = "engine/models"
    optimizers: str = "engine/optimizers"
    one_model: bool = False

    def into(self, kind: str, states: list[Any]) -> dict[str, Any]:
        """The targets of a reading, laid out as the checkpoint is.

        Args:
            kind: `"models"` or `"optimizers"`.
            states: For each, its state with the tensors that are to be filled.
        """
        head, _, rest = getattr(self, kind).partition("/")
        value: Any = states
        if kind == "models" and self.one_model:
            if len(states) != 1:
                raise CheckpointError(f"The checkpoint holds 1 models, but here are {len(states)}.")
            value = states[0]
        return {head: {rest: value} if rest else value}


def find_places(names: Collection[str]) -> Places:
    """Where a checkpoint has its models and optimizers.

    Args:
        names: The top-level entries of its shared state.
    """
    if "engine" in names:
        return Places()
    if "state_dict" in names:
        return Places("state_dict", "optimizer_states", one_model=True)
    return Places("models", "optimizers")


EVERY_PLACE_OF_MODELS = ("engine/models", "state_dict", "models")
"""For a reading of the models alone, whatever version wrote them."""


def in_schema(shared: Mapping[str, Any]) -> dict[str, Any]:
    """The shared state of a run as this version lays it out, from that of any version. Its values stay what they are.

    Args:
        shared: All entries of a checkpoint, or some; packed or not.

    Raises:
        CheckpointError: An entry is of another kind than the schema's.
    """
    if "engine" in shared:
        found = {"driver": {}, "kept": [], **shared}
        for name, kind in (("engine", Mapping), ("driver", Mapping), ("kept", list)):
            if not isinstance(found[name], kind):
                raise CheckpointError(
                    f"The checkpoint is not the state of a run: its entry {name!r} is a {type(found[name]).__name__}."
                )
        return found
    driver = dict(shared)
    engine: dict[str, Any] = {}
    if "state_dict" in shared:
        engine["models"] = [driver.pop("state_dict")]
        for before, now in _OF_A_TRAINER.items():
            if before in driver:
                engine[now] = driver.pop(before)
        if "loader" in driver:
            position = driver.pop("loader")
            combined = isinstance(position, Mapping) and "loaders" in position
            engine["loaders"] = position["loaders"] if combined else [] if position is None else [position]
            if combined:
                driver["combined_loader"] = {"index": position["index"], "ended": position["ended"]}
    else:
        for name in _OF_AN_ACCELERATOR:
            if name in driver:
                engine[name] = driver.pop(name)
    return {"engine": engine, "driver": driver, "kept": []}


def process_in_schema(own: Mapping[str, Any]) -> dict[str, Any]:
    """One process's own state as this version lays it out, from that of any version."""
    if "engine" in own:
        return dict(own)
    return {
        "engine": {"random": own.get("random")},
        "driver": {name: value for name, value in own.items() if name != "random"},
    }
