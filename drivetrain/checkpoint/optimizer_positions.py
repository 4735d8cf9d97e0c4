"""The states of optimizers in other tools' files, which name parameters by their position."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from drivetrain.checkpoint.torch_shards import bare_name
from drivetrain.runtime.errors import CheckpointError

BY_POSITION = "#"
"""What a parameter's name begins with in an optimizer's state that knows its position only."""


def by_name_or_position(state: Any, source: str | os.PathLike[str]) -> dict[str, Any]:
    """An optimizer's state by parameter: FSDP's is by names, any other by positions.

    Args:
        state: As `torch.optim.Optimizer.state_dict` gives it, or FSDP.
        source: Where it is from.

    Raises:
        CheckpointError: It is no such state.
    """

    def key(parameter: Any) -> str:
        return bare_name(parameter) if isinstance(parameter, str) else f"{BY_POSITION}{parameter}"

    try:
        return {
            "state": {key(parameter): dict(value) for parameter, value in state.get("state", {}).items()},
            "param_groups": [{**group, "params": list(map(key, group["params"]))} for group in state["param_groups"]],
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{os.fspath(source)} is not the state of an optimizer.") from error


def with_positions(state: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state by names in the form of `torch.optim.Optimizer.state_dict`, by positions."""
    positions: dict[str, int] = {}
    groups = []
    for group in state["param_groups"]:
        numbers = [positions.setdefault(name, len(positions)) for name in group["params"]]
        groups.append({**group, "params": numbers})
    return {
        "state": {positions[name]: dict(value) for name, value in state["state"].items() if name in positions},
        "param_groups": groups,
    }


def named_by_position(saved: Mapping[str, Any], groups: list[list[str]]) -> dict[str, Any]:
    """An optimizer's state with names in place of positions.

    Args:
        saved: Its state, as this module reads it, or as any other checkpoint has it, which stays as it is.
        groups: The names of the parameters of the optimizer that it is for, by group.
    """
    if not holds_positions(saved):
        return dict(saved)
    names = [name for group in groups for name in group]
    positions = [position for group in saved["param_groups"] for position in group["params"]]
    if len(names) != len(positions):
        raise CheckpointError(
            f"The checkpoint holds an optimizer over {len(positions)} parameters, but here it is over {len(names)}. "
            "Build it as in the run that wrote it."
        )
    named = dict(zip(positions, names, strict=True))
    return {
        "state": {named[position]: value for position, value in saved["state"].items()},
        "param_groups": [
            {**group, "params": [named[position] for position in group["params"]]} for group in saved["param_groups"]
        ],
    }


def holds_positions(saved: Any) -> bool:
    """Whether an optimizer's state names parameters by their position."""
    groups = saved.get("param_groups", ()) if isinstance(saved, Mapping) else ()
    return any(str(name).startswith(BY_POSITION) for group in groups for name in group["params"])
