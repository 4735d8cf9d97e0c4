"""Following parameters through sharding, which puts new ones in their place."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple
from weakref import ReferenceType, WeakSet, ref

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard
from torch.optim import SGD, Adagrad, Optimizer

from drivetrain.runtime.errors import ConfigurationError
from drivetrain.strategies.optimizer_names import lay_out_state
from drivetrain.strategies.optimizer_proxy import needs_closure


class Slot(NamedTuple):
    """A place that a parameter is registered at.

    Attributes:
        module: Its module.
        name: Its name there.
        parameter: The parameter that was there when asked.
    """

    module: nn.Module
    name: str
    parameter: nn.Parameter


def refuse_for_shards(optimizer: Optimizer) -> None:
    """Refuse an optimizer that steps whole parameters only, if it holds shards.

    Raises:
        ConfigurationError: It is L-BFGS, which makes one vector of all parameters, or one of torch's fused ones that
            have no rule for shards (torch 2.13).
    """
    if not any(isinstance(each, DTensor) for group in optimizer.param_groups for each in group["params"]):
        return
    name = type(optimizer).__name__
    if needs_closure(optimizer):
        raise ConfigurationError(
            f"{name} makes one vector of all parameters, which shards of them do not add up to. Use another optimizer, "
            'or strategy="ddp".',
            code="DT-046",
        )
    if type(optimizer) in (SGD, Adagrad) and any(group.get("fused") for group in optimizer.param_groups):
        raise ConfigurationError(
            f"{name}(fused=True) cannot step sharded parameters: torch has no rule for it. Leave fused out, or give "
            "foreach=True.",
            code="DT-046",
        )


def gather(value: Tensor) -> Tensor:
    """The whole of a tensor, also where this is a shard of it; call it on all processes that have one.

    One dimension of the mesh after another, the one that was sharded last first: torch gathers over all of them as
    well, but warns where several shard the same dimension of the tensor.
    """
    if not isinstance(value, DTensor):
        return value
    placements: list[Placement] = list(value.placements)
    late = [i for i, placement in enumerate(placements) if isinstance(placement, _StridedShard)]
    for i in [*late, *(i for i in reversed(range(len(placements))) if i not in late)]:
        if not placements[i].is_replicate():
            placements[i] = Replicate()
            value = value.redistribute(placements=placements)
    return value.to_local()


def slots_of(model: nn.Module) -> list[Slot]:
    """Every place where a parameter of a model is registered, tied ones several times."""
    return [
        Slot(module, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]


def replaced(slots: Iterable[Slot]) -> dict[int, nn.Parameter]:
    """What stands now in place of each parameter, by the `id` of the one before."""
    now: dict[int, nn.Parameter] = {}
    for slot in slots:
        current = slot.module._parameters[slot.name]
        if current is not None and current is not slot.parameter:
            now.setdefault(id(slot.parameter), current)
    return now


def point_optimizer(optimizer: Optimizer, now: dict[int, nn.Parameter]) -> None:
    """Give an optimizer the parameters that stand in place of its own, and its state the same shards.

    The optimizer, its groups and its options stay the objects they are, for schedulers hold on to them.
    """
    for group in optimizer.param_groups:
        group["params"] = [now.get(id(parameter), parameter) for parameter in group["params"]]
    for parameter in [known for known in optimizer.state if id(known) in now]:
        new = now[id(parameter)]
        state = optimizer.state.pop(parameter)
        optimizer.state[new] = {
            key: shard_like(value, new)
            if isinstance(value, Tensor) and isinstance(new, DTensor) and value.shape == new.shape
            else value
            for key, value in state.items()
        }


def local_slices(like: DTensor) -> tuple[slice, ...]:
    """Which part of the whole tensor this process holds."""
    shape, offset = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    return tuple(slice(start, start + length) for start, length in zip(offset, shape, strict=True))


def shard_like(whole: Tensor, like: DTensor, copy: bool = True) -> DTensor:
    """This process's shard of a tensor that every process holds whole; nothing is exchanged.

    Args:
        whole: The tensor.
        like: A DTensor of its shape, whose mesh and placements count.
        copy: Whether the shard is a copy on the device of `like`, rather than a view.
    """
    if isinstance(whole, DTensor):
        return whole
    part = whole[local_slices(like)]
    if copy:
        local = like.to_local()
        part = torch.empty_like(local, dtype=whole.dtype).copy_(part)
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


class ReplacedParameters:
    """Parameters that shards stand in place of, so that an optimizer which still holds one is found.

    An `id` may be another parameter's by now, hence the references.
    """

    def __init__(self) -> None:
        self._gone: dict[int, ReferenceType[nn.Parameter]] = {}
        self._checked: WeakSet[Optimizer] = WeakSet()

    def follow(self, slots: Sequence[Slot], optimizers: Iterable[Optimizer]) -> None:
        """Let optimizers hold what stands in place of their parameters.

        Args:
            slots: Where the model's parameters were registered before it was placed.
            optimizers: The optimizers over them.
        """
        now = replaced(slots)
        self._gone |= {id(slot.parameter): ref(slot.parameter) for slot in slots if id(slot.parameter) in now}
        for optimizer in optimizers:
            point_optimizer(optimizer, now)
            lay_out_state(optimizer)

    def check(self, optimizer: Optimizer) -> None:
        """Refuse an optimizer that holds parameters as they were before, the first time that it steps.

        Raises:
            ConfigurationError: Its steps would change nothing.
        """
        if optimizer in self._checked:
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                known = self._gone.get(id(parameter))
                if known is not None and known() is parameter:
                    raise ConfigurationError(
                        f"{type(optimizer).__name__} holds parameters as they were before the model was sharded, so "
                        "its steps would change nothing. Prepare both together, prepare(model, optimizer), or make "
                        "the optimizer after prepare(model).",
                        code="DT-046",
                    )
        self._checked.add(optimizer)
