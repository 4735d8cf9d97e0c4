"""`StageHoldings`: which process holds which parameter of a model that is spread over stages."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.strategies.fsdp.parameters import gather
from drivetrain.strategies.model_state import StateDict
from drivetrain.strategies.parallel.pipeline.split import StageLayout


class StageHoldings:
    """Which process holds which parameter of a task, and the state of all.

    Args:
        bare: The task, with whole parameters.
        name: The module in it that is spread over stages.
        layout: Its stages.
        group: The processes of the pipeline.
        ranks: For each stage, the process of the group that holds it.

    Attributes:
        group: The processes of the pipeline.
    """

    def __init__(
        self, bare: nn.Module, name: str, layout: StageLayout, group: dist.ProcessGroup, ranks: Sequence[int]
    ) -> None:
        self._bare = bare
        self.group = group
        self._rank = dist.get_rank(group)
        prefix = f"{name}." if name else ""
        # What is outside of the split module is used where losses are computed.
        outside = ranks[-1]
        holders = {prefix + own: ranks[stage] for own, stage in layout.owners.items()}
        parameters = {key for key, _ in bare.named_parameters(remove_duplicate=False)}
        buffers = {key for key, _ in bare.named_buffers(remove_duplicate=False)}
        self._holders = {key: holders.get(key, outside) for key in [*parameters, *buffers]}
        # A buffer of a module with parameters goes where these are; others are on all, such as tables of positions.
        self._everywhere = {key for key in buffers if not self._goes_with_parameters(bare, key, prefix, layout)}
        self._groups: WeakKeyDictionary[Optimizer, list[list[str]]] = WeakKeyDictionary()
        self._trained_by_peers: set[int] = set()

    def among(self, group: dist.ProcessGroup) -> StageHoldings:
        """The same among other processes that stand for those, as a later trainer's do."""
        moved = copy.copy(self)
        moved.group = group
        return moved

    @staticmethod
    def _goes_with_parameters(bare: nn.Module, key: str, prefix: str, layout: StageLayout) -> bool:
        path = key.rpartition(".")[0]
        return path.startswith(prefix) and path[len(prefix) :] in layout.modules

    def is_foreign(self, name: str) -> bool:
        """Whether only a peer holds a parameter or buffer."""
        return name not in self._everywhere and self._holders.get(name, self._rank) != self._rank

    def is_trained_by_peer(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter stands for one that another stage trains."""
        return id(parameter) in self._trained_by_peers

    def drop_foreign(self) -> None:
        """Put tensors without values in place of those that peers hold."""
        stand_ins: dict[int, nn.Parameter] = {}
        for path, module in self._bare.named_modules(remove_duplicate=False):
            prefix = f"{path}." if path else ""
            for key, parameter in module._parameters.items():
                if parameter is not None and self.is_foreign(prefix + key):
                    if id(parameter) not in stand_ins:
                        # None of the optimizer's, nor of who looks for what can be trained here.
                        empty = torch.empty_like(parameter, device="meta")
                        stand_in = stand_ins[id(parameter)] = nn.Parameter(empty, requires_grad=False)
                        if parameter.requires_grad:
                            self._trained_by_peers.add(id(stand_in))
                    module._parameters[key] = stand_ins[id(parameter)]
            for key, buffer in module._buffers.items():
                if buffer is not None and self.is_foreign(prefix + key):
                    module._buffers[key] = torch.empty_like(buffer, device="meta")

    def follow(self, optimizer: Optimizer) -> None:
        """Take parameters of peers out of an optimizer's groups, and remember which were there."""
        names = {id(parameter): name for name, parameter in self._bare.named_parameters()}
        self._groups[optimizer] = [
            [names.get(id(parameter), "?") for parameter in group["params"]] for group in optimizer.param_groups
        ]
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if not self.is_foreign(names.get(id(p), "?"))]
        for parameter in [known for known in optimizer.state if self.is_foreign(names.get(id(known), "?"))]:
            del optimizer.state[parameter]

    def model_state(self) -> StateDict:
        """Parameters and buffers, those that a peer holds on the meta device; call it on all processes."""
        state: StateDict = {}
        for name, value in self._bare.state_dict().items():
            if not isinstance(value, Tensor):
                state[name] = value
            elif self.is_foreign(name):
                state[name] = torch.empty(value.shape, dtype=value.dtype, device="meta")
            elif name in self._everywhere:
                state[name] = self._from_holder(name, value)
            else:
                state[name] = value
        return state

    def _from_holder(self, name: str, value: Tensor) -> Tensor:
        """A buffer that all have, as it is where it is used first."""
        value = value.detach().clone()
        dist.broadcast(value, group=self.group, group_src=self._holders[name])
        return value

    def optimizer_state(self, optimizer: Optimizer, own: StateDict) -> StateDict:
        """An optimizer's state over all stages; call it on all processes.

        Args:
            optimizer: The optimizer.
            own: Its state over this process's parameters, by canonical name.
        """
        described = {name: {key: _describe(value) for key, value in s.items()} for name, s in own["state"].items()}
        everyone: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(everyone, described, group=self.group)
        merged: dict[str, Any] = {}
        for each in everyone:
            for name, values in each.items():
                merged[name] = {key: _without_values(value) for key, value in values.items()}
        merged.update(own["state"])
        order = {name: position for position, (name, _) in enumerate(self._bare.named_parameters())}
        state = {name: merged[name] for name in sorted(merged, key=lambda name: order.get(name, len(order)))}
        known = self._groups.get(optimizer, [])
        groups = [
            {**group, "params": known[index] if index < len(known) else group["params"]}
            for index, group in enumerate(own["param_groups"])
        ]
        return {**own, "state": state, "param_groups": groups}

    def own_model_state(self, state: StateDict) -> StateDict:
        """A whole state with what peers hold on the meta device, where loading it changes nothing."""
        return {
            name: torch.empty(value.shape, dtype=value.dtype, device="meta")
            if isinstance(value, Tensor) and self.is_foreign(name)
            else value
            for name, value in state.items()
        }

    def own_optimizer_state(self, state: StateDict) -> StateDict:
        """A whole optimizer state without what peers hold."""
        groups = [
            {**group, "params": [name for name in group["params"] if not self.is_foreign(name)]}
            for group in state["param_groups"]
        ]
        own = {name: value for name, value in state["state"].items() if not self.is_foreign(name)}
        return {**state, "state": own, "param_groups": groups}

    def full_state_dict(self) -> dict[str, Tensor]:
        """All parameters and buffers, whole and on the CPU, on rank 0, one by one; an empty dict elsewhere."""
        collects = dist.get_global_rank(self.group, 0) == 0
        whole: dict[str, Tensor] = {}
        for name, value in self._bare.state_dict().items():
            if not isinstance(value, Tensor):
                if collects and self._rank == 0:
                    whole[name] = value
                continue
            holder = self._holders.get(name, 0)
            if self._rank == holder:
                value = gather(value)
            if not collects:
                continue
            if self._rank == 0:
                whole[name] = (self._fetch(value, holder) if holder else value).detach().cpu().clone()
            elif self._rank == holder:
                dist.send(value.detach().contiguous(), group=self.group, group_dst=0)
        return whole

    def _fetch(self, like: Tensor, holder: int) -> Tensor:
        device = next((p.device for p in self._bare.parameters() if not p.is_meta), torch.device("cpu"))
        received = torch.empty(like.shape, dtype=like.dtype, device=device)
        dist.recv(received, group=self.group, group_src=holder)
        return received


class _Described:
    """A tensor without its values."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype


def _describe(value: Any) -> Any:
    return _Described(value) if isinstance(value, Tensor) else value


def _without_values(value: Any) -> Any:
    return torch.empty(value.shape, dtype=value.dtype, device="meta") if isinstance(value, _Described) else value
