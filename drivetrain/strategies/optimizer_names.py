"""Optimizer state under parameter names instead of positions, so that it belongs to the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from drivetrain.runtime.errors import CheckpointError
from drivetrain.strategies.fused_optimizers import IMPLEMENTATION, options_given


def named_optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return `{"state": {parameter name: {...}}, "param_groups": [{"params": [names], ...}]}`.

    Args:
        model: The bare model, whose names are used.
        optimizer: An optimizer over some of its parameters.

    Raises:
        CheckpointError: The optimizer holds a parameter that the model does not.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}

    def name_of(parameter: torch.Tensor) -> str:
        if id(parameter) not in names:
            raise CheckpointError(
                f"{type(optimizer).__name__} holds a parameter of shape {tuple(parameter.shape)} that is not the "
                "model's, so its state cannot be saved under a name. Make it a parameter of the model."
            )
        return names[id(parameter)]

    groups = [
        {**group, **options_given(optimizer, number), "params": [name_of(parameter) for parameter in group["params"]]}
        for number, group in enumerate(optimizer.param_groups)
    ]
    state = {name_of(parameter): dict(value) for parameter, value in optimizer.state.items()}
    return {"state": state, "param_groups": groups}


def restore_optimizer_state(model: nn.Module, optimizer: Optimizer, saved: dict[str, Any]) -> None:
    """Load what `named_optimizer_state` returned, in whatever order the parameters are now.

    Raises:
        CheckpointError: The groups hold other parameters than the saved ones; both are listed.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    current = optimizer.state_dict()
    here = [[names.get(id(p), "?") for p in group["params"]] for group in optimizer.param_groups]
    check_groups(here, saved, type(optimizer).__name__)
    position = {
        name: index
        for group_names, group in zip(here, current["param_groups"], strict=True)
        for name, index in zip(group_names, group["params"], strict=True)
    }
    groups = [
        {**saved_group, **{name: group[name] for name in ("params", *IMPLEMENTATION) if name in group}}
        for saved_group, group in zip(saved["param_groups"], current["param_groups"], strict=True)
    ]
    state = {position[name]: value for name, value in saved["state"].items()}
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def check_groups(here: Sequence[Sequence[str]], saved: Mapping[str, Any], owner: str = "The optimizer") -> None:
    """Compare the parameters of each group with those that were saved.

    Args:
        here: Their names, by group.
        saved: What `named_optimizer_state` returned.
        owner: What has the groups, for the message.

    Raises:
        CheckpointError: They are others; both are listed.
    """
    there = [list(group["params"]) for group in saved["param_groups"]]
    if [sorted(group) for group in here] == [sorted(group) for group in there]:
        return
    own, other = {name for group in here for name in group}, {name for group in there for name in group}
    raise CheckpointError(
        f"{owner} has other parameter groups than the checkpoint: {len(here)} group(s) here, {len(there)} saved; not "
        f"in the checkpoint: {sorted(own - other)[:8]}; only in the checkpoint: {sorted(other - own)[:8]}. Build the "
        "optimizer as in the run that wrote it."
    )


def class_chosen(item: Any) -> str | None:
    """The name of the class that a user chose for an optimizer or a scheduler.

    Args:
        item: What a strategy steps, which may hold the user's own as `.optimizer`.

    Returns:
        The name; None where a backend has chosen it, from a configuration that names none.
    """
    while _package_of(item) == "deepspeed" and hasattr(item, "optimizer"):
        item = item.optimizer
    return None if _package_of(item) in ("deepspeed", "drivetrain") else type(item).__name__


def _package_of(item: Any) -> str:
    return type(item).__module__.partition(".")[0]
