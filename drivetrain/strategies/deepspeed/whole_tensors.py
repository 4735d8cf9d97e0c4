"""A model's weights and an optimizer's state under the names of the bare model, whole, in and out of an engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.runtime.collectives import broadcast
from drivetrain.runtime.errors import CheckpointError
from drivetrain.strategies.deepspeed.engine import TrainedModel
from drivetrain.strategies.optimizer_names import check_groups

State = dict[str, Any]
Holder = Callable[[int], bool]


def read_model(trained: TrainedModel, masters: bool, holder: Holder, whole: bool = False) -> State:
    """All parameters and buffers; collective.

    Args:
        trained: The engine's model.
        masters: Whether to take the 32-bit master weights where there are any, so that nothing is rounded.
        holder: Whether this process keeps the parameter of a number; else it stands on the meta device.
        whole: Whether all is copied to the CPU where it is kept, and left out elsewhere.
    """
    state: State = {}
    seen: dict[int, Tensor | None] = {}
    for number, (name, value) in enumerate(trained.bare.state_dict(keep_vars=True).items()):
        if not isinstance(value, Tensor):
            found: Any = value
        elif not isinstance(value, nn.Parameter):
            found = broadcast(value.detach().clone())
        else:
            if id(value) not in seen:
                seen[id(value)] = _read_parameter(trained, value, masters, holder(number))
            found = seen[id(value)]
        if whole and isinstance(found, Tensor):
            found = None if found.is_meta or not holder(number) else found.detach().cpu()
        if found is not None:
            state[name] = found
    return state


def _read_parameter(trained: TrainedModel, parameter: nn.Parameter, masters: bool, held: bool) -> Tensor:
    low = trained.is_low_precision
    if (is_partitioned(parameter) or low) and (masters or not low) and trained.layout.is_trained(parameter):
        value = trained.layout.read(parameter)
        return _kept(value if masters else value.to(parameter.dtype), held)
    if is_partitioned(parameter):
        return _kept(gathered(parameter), held)
    return parameter.detach()


def _kept(value: Tensor, held: bool) -> Tensor:
    """A tensor on the CPU, or what stands for it where a peer keeps it."""
    return value.cpu() if held else torch.empty_like(value, device="meta")


def write_model(trained: TrainedModel, state: State, strict: bool = True) -> Any:
    """Load whole tensors by name; collective.

    Returns:
        What `load_state_dict` returns: the names that were missing, and those that were not expected.
    """
    own = trained.bare.state_dict(keep_vars=True)
    partitioned = {name for name, value in own.items() if is_partitioned(value)}
    _check_shapes({name: own[name] for name in partitioned}, state)
    # What is partitioned has no shape to load into, so it is left out there.
    missing, unexpected = trained.bare.load_state_dict(
        {name: value for name, value in state.items() if name not in partitioned}, strict=False
    )
    missing = [name for name in missing if name not in state or name not in partitioned]
    if strict and (missing or unexpected):
        raise CheckpointError(
            f"The weights are not those of {type(trained.bare).__name__}: missing {sorted(missing)[:8]}, not expected "
            f"{sorted(unexpected)[:8]}."
        )
    done: set[int] = set()
    for name, value in own.items():
        if not isinstance(value, nn.Parameter) or name not in state or id(value) in done:
            continue
        done.add(id(value))
        if name in partitioned:
            _scatter(value, state[name])
        if trained.layout.is_trained(value):
            trained.layout.write(value, state[name])
    return type(trained.bare.load_state_dict({}, strict=False))(missing, unexpected)


def _check_shapes(parameters: dict[str, Any], state: State) -> None:
    for name, parameter in parameters.items():
        if name in state and tuple(state[name].shape) != tuple(parameter.ds_shape):
            raise CheckpointError(
                f"{name} has the shape {tuple(state[name].shape)} in the checkpoint, but "
                f"{tuple(parameter.ds_shape)} here."
            )


def read_optimizer(trained: TrainedModel, holder: Holder) -> State:
    """`{"state": {parameter name: {...}}, "param_groups": [{"params": [names], ...}]}`; collective."""
    known = trained.layout.shared_state()
    untouched = trained.participation.never_stepped
    state: State = {}
    for number, (name, parameter) in enumerate(trained.parameters.items()):
        if name in untouched:
            continue  # it has state only because the flat tensor that it is in has
        tensors, rest = known.get(id(parameter), ([], {}))
        if tensors or rest:
            whole = {key: _kept(trained.layout.read(parameter, key), holder(number)) for key in tensors}
            state[name] = whole | rest
    inner = trained.layout.inner.param_groups
    groups = [{**group, "params": list(names)} for group, names in zip(inner, trained.groups, strict=True)]
    return {"state": state, "param_groups": groups}


def write_optimizer(trained: TrainedModel, saved: State) -> None:
    """Load what `read_optimizer`, or any other strategy, returned.

    Raises:
        CheckpointError: The groups hold other parameters than the saved ones.
    """
    check_groups(trained.groups, saved)
    layout = trained.layout
    for group, options in zip(layout.inner.param_groups, saved["param_groups"], strict=True):
        group.update({key: value for key, value in options.items() if key != "params"})
    by_name = {name: saved["state"][name] for name in trained.parameters if name in saved["state"]}
    layout.make_state({id(trained.parameters[name]): state for name, state in by_name.items()})
    trained.participation.resume(set(trained.parameters) - set(by_name))
    for name, state in by_name.items():
        parameter = trained.parameters[name]
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dim() > 0 and layout.is_trained(parameter):
                layout.write(parameter, value, key)


def is_partitioned(value: Any) -> bool:
    """Whether ZeRO-3 has taken a parameter apart."""
    return hasattr(value, "ds_id")


def gathered(parameter: nn.Parameter) -> Tensor:
    """A whole copy of a parameter that is partitioned; collective."""
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter]), torch.no_grad():
        return parameter.detach().clone()


def _scatter(parameter: nn.Parameter, value: Tensor) -> None:
    """Give every process its part of a whole value."""
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
        parameter.copy_(value)
