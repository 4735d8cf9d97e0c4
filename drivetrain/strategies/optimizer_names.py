"""Optimizer state under parameter names instead of positions, and laid out as the parameters it belongs to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.runtime.errors import CheckpointError
from drivetrain.strategies.gradients import local_part

IMPLEMENTATION = ("fused", "foreach")
"""Options of a group that choose how it is stepped. They are the optimizer's own, and not taken from a checkpoint."""


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
        {**group, "params": [name_of(parameter) for parameter in group["params"]]} for group in optimizer.param_groups
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
    lay_out_state(optimizer)


def lay_out_state(optimizer: Optimizer) -> None:
    """Bring an optimizer's state to its parameters' devices, strides and 64 bits; call it after state was loaded.

    Files hold contiguous tensors. torch's fused implementations pair a parameter with its state by place in memory, so
    the state of a transposed or channels_last parameter would step other elements than its own.
    """
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if not isinstance(value, Tensor) or value.dim() == 0:
                continue
            if value.device != parameter.device:
                value = state[key] = value.to(parameter.device)
            if parameter.dtype == torch.float64 and value.dtype == torch.float32 and value.shape == parameter.shape:
                # Adagrad makes its state in its constructor, before precision 64 has converted the model.
                value = state[key] = value.to(torch.float64)
            if value.shape == parameter.shape and _differ_in_strides(value, parameter):
                # If the parameter is not dense, empty_like makes a dense tensor, as optimizers do for their state.
                laid_out = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
                if _differ_in_strides(value, laid_out):
                    state[key] = laid_out.copy_(value)


def _differ_in_strides(one: Tensor, other: Tensor) -> bool:
    """Compare the strides of two plain tensors or two shards; False for other kinds, such as quantized state."""
    parts = [local_part(one.detach()), local_part(other.detach())]
    is_plain = all(type(part) is Tensor and part.layout is torch.strided for part in parts)
    is_alike = hasattr(one, "to_local") == hasattr(other, "to_local")
    return is_plain and is_alike and parts[0].stride() != parts[1].stride()


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
