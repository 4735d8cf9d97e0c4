"""What megatron-core's optimizer keeps for each parameter, whole for this process's part of the model."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain.strategies.megatron.optimizer import MegatronOptimizerFront


class Stepped(NamedTuple):
    """What is stepped in place of a parameter.

    Attributes:
        part: The optimizer of megatron-core that steps it.
        main: The tensor that is stepped; None where another process steps all of the parameter.
        start: Where this begins in the flattened parameter, where the optimizer is distributed; None where it is whole.
    """

    part: Any
    main: Tensor | None
    start: int | None

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The processes that step it together; None where each steps all of it."""
        return None if self.start is None else self.part.data_parallel_group


class ParameterState:
    """Reads and writes the state of a parameter.

    Args:
        front: The optimizer.
    """

    def __init__(self, front: MegatronOptimizerFront) -> None:
        self._front = front
        self._distributed: dict[int, Any] = {}
        self._whole: dict[int, Any] = {}
        for part in front.parts:
            if hasattr(part, "gbuf_ranges"):
                self._distributed.update({id(p): part for buffer in part.buffers for p in buffer.params})
            else:
                self._whole.update({id(p): part for p in part.get_parameters()})

    def is_stepped(self, parameter: Tensor) -> bool:
        """Whether the optimizer steps a parameter."""
        main = getattr(parameter, "main_param", parameter)
        return id(parameter) in self._distributed or id(main) in self._whole

    def find(self, parameter: Tensor) -> Stepped:
        """What is stepped in place of a parameter."""
        part = self._distributed.get(id(parameter))
        if part is None:
            main = getattr(parameter, "main_param", parameter)
            return Stepped(self._whole[id(main)], main, None)
        if parameter not in part.model_param_group_index_map:
            return Stepped(part, None, 0)
        group, order = part.model_param_group_index_map[parameter]
        main = part.optimizer.param_groups[group]["params"][order]
        return Stepped(part, main, part._get_model_param_range_map(parameter)["param"].start)

    def keys(self) -> dict[str, bool]:
        """The names of what is kept here, and whether each is of the parameter's size."""
        found: dict[str, bool] = {}
        for part in self._front.parts:
            for main, values in part.optimizer.state.items():
                for key, value in values.items():
                    found[key] = isinstance(value, Tensor) and value.numel() == main.numel() and key != "step"
        return found

    def steps(self) -> float | None:
        """How many steps have been taken; None where the optimizer does not count them."""
        for part in self._front.parts:
            for values in part.optimizer.state.values():
                if "step" in values:
                    return float(values["step"])
            for group in part.optimizer.param_groups:
                if "step" in group:
                    return float(group["step"])
        return None

    def make(self) -> None:
        """Make the state of an optimizer that has not stepped yet, where megatron-core's checkpoints need it."""
        for part in self._front.parts:
            if part.optimizer.state or not hasattr(part, "gbuf_ranges"):
                continue
            rates = [(group, group["lr"]) for group in part.optimizer.param_groups]
            for group, _ in rates:
                group["lr"] = 0.0  # what fills the state in is a step, which must not change anything
            part._init_optimizer_states_with_dummy_values()
            for group, rate in rates:
                group["lr"] = rate
            self.write_steps(0.0)

    def read(self, parameter: Tensor, key: str | None) -> Tensor:
        """A state of the parameter's shape in 32 bits, on all processes that step it together; a collective of those.

        Args:
            parameter: Of the model.
            key: The name of the state; None for the value that is stepped.
        """
        stepped = self.find(parameter)
        value: Tensor | None = stepped.main
        if value is not None and key is not None:
            value = stepped.part.optimizer.state[value][key]
        if stepped.group is None:
            assert value is not None
            return value.detach().float()
        whole = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
        if value is not None:
            assert stepped.start is not None
            whole[stepped.start : stepped.start + value.numel()] = value.detach().float().view(-1)
        dist.all_reduce(whole, group=stepped.group)
        return whole.view(parameter.shape)

    def write(self, parameter: Tensor, key: str | None, value: Tensor) -> None:
        """Take this process's part of a state.

        Args:
            parameter: Of the model.
            key: The name of the state; None for the value that is stepped.
            value: Of the parameter's shape.
        """
        stepped = self.find(parameter)
        if stepped.main is None:
            return
        if stepped.start is not None:
            value = value.reshape(-1)[stepped.start : stepped.start + stepped.main.numel()].view(stepped.main.shape)
        if key is None:
            with torch.no_grad():
                stepped.main.copy_(value)
        else:
            stepped.part.optimizer.state[stepped.main][key] = torch.empty_like(stepped.main).copy_(value)

    def write_steps(self, steps: float) -> None:
        """Take how many steps have been taken."""
        for part in self._front.parts:
            inner = part.optimizer
            for group in inner.param_groups:
                if "step" in group:
                    group["step"] = int(steps)
            if type(inner).__module__.startswith("torch.optim") and type(inner) is not torch.optim.SGD:
                for group in inner.param_groups:
                    for main in group["params"]:
                        inner.state[main]["step"] = torch.tensor(steps)
