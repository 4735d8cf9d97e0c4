"""The workload of a plan: a model without memory, its batches, its loss and its optimizer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from drivetrain.inference.model_size import loss_of
from drivetrain.planning.candidates import Facts
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.strategies.parallel.tensor import plan_of_model

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "sgd_momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}
"""Optimizers by name."""


@dataclass(frozen=True)
class Workload:
    """Model, inputs and optimizer whose training the planner simulates, as the user has specified them.

    Attributes:
        source: A script, the config.json of a transformers model, or `package.module:Class`.
        arguments: Arguments of the script.
        kwargs: Arguments of the class.
        inputs: Shapes of inputs, as `--input` takes them. The first dimension is the batch.
        seq: Tokens of a sequence, for a config.json.
        optimizer: Name of the optimizer. A script's own optimizer is used in place of it.
        tp_plan: Names of layers, each with a style, or `"auto"`.
        real_init: True to build the model with values, in host memory.
        trust_remote_code: True to run code that the config.json names.
        sample_inputs: File of a batch with values, or `"first"` for the first batch of a script. The step then runs on
            values in host memory.
    """

    source: str
    arguments: tuple[str, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    inputs: tuple[str, ...] = ()
    seq: int | None = None
    optimizer: str = "adamw"
    tp_plan: Mapping[str, str] | str | None = None
    real_init: bool = False
    trust_remote_code: bool = False
    sample_inputs: str | None = None


class PlannedTask(nn.Module):
    """Wrapper that gives a plain model a `training_step`, so that the planner can simulate its training."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: tuple[tuple[Any, ...], dict[str, Any]]) -> Tensor:
        arguments, keywords = batch
        return loss_of(self.model(*arguments, **keywords))


@dataclass
class Loaded:
    """Model, input batch and optimizer that were built from a `Workload`, ready for the planner to simulate.

    Attributes:
        task: Module on the meta device, with the method `training_step`.
        batch: Batch on the meta device, of any number of rows.
        make_optimizer: Function from the trained parameters to an optimizer.
        rows: Rows of the batch. Tensors with another first dimension are the same for all rows.
        sample: The batch with values, if the step shall run on values.
    """

    task: nn.Module
    batch: Any
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    rows: int = 1
    sample: Any = None

    def batch_of(self, rows: int, seq: int | None = None) -> Any:
        if self.sample is not None:

            def repeated(value: Any) -> Any:
                is_batch = isinstance(value, Tensor) and value.dim() and value.shape[0] == self.rows
                return value[torch.arange(rows) % self.rows] if is_batch else value

            return tree_map(repeated, self.sample)
        lengths = {each.shape[1] for each in tensors_of(self.batch) if each.dim() > 1}

        def resized(value: Any) -> Any:
            if not isinstance(value, Tensor) or not value.dim() or value.shape[0] != self.rows:
                return value
            shape = [rows, *value.shape[1:]]
            if seq is not None and len(shape) > 1 and len(lengths) == 1:
                shape[1] = seq
            return torch.zeros(shape, dtype=value.dtype, device="meta")

        return tree_map(resized, self.batch)

    def tokens(self) -> int:
        # Tokens per row: the length of the longest integer input with two dimensions, or 1 if there is none.
        return max(
            [1, *(each.shape[1] for each in tensors_of(self.batch) if each.dim() == 2 and not each.is_floating_point())]
        )

    def blocks(self) -> int:
        held = _longest_list(self.task)
        return len(held) if held is not None else 0

    def names_of_blocks(self) -> dict[str, str]:
        # Blocks of the second half are counted from the end, so that models of any depth have a `layers.-1`.
        held = _longest_list(self.task)
        if held is None:
            return {}
        prefix = next(name for name, module in self.task.named_modules() if module is held)
        found = {}
        for index, block in enumerate(held):
            place = str(index) if index < len(held) / 2 else str(index - len(held))
            for name, _ in block.named_modules(prefix=f"{prefix}.{index}"):
                found[name] = f"{prefix}.{place}{name.removeprefix(f'{prefix}.{index}')}"
        return found

    def with_blocks(self, count: int) -> Loaded:
        task = copy.deepcopy(self.task)
        held = _longest_list(task)
        assert held is not None
        del held[count:]
        for module in task.modules():
            if getattr(module, "config", None) is not None and hasattr(module.config, "num_hidden_layers"):
                module.config.num_hidden_layers = count
        return replace(self, task=task)

    def facts(self, plan: Any) -> Facts:
        from drivetrain.strategies.wrapping import repeated_blocks

        config = next((m.config for m in self.task.modules() if hasattr(m, "config")), None)
        shapes = [each.shape for each in tensors_of(self.batch) if each.dim() > 1 and not each.is_floating_point()]
        heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", None) or 0
        return Facts(
            blocks=len(repeated_blocks(self.task)),
            plans_tp=plan is not None or _plans(self.task),
            heads=heads,
            width=getattr(config, "intermediate_size", None) or 0,
            seq=shapes[0][1] if shapes else 0,
            rows=self.rows,
        )


def _longest_list(task: nn.Module) -> nn.ModuleList | None:
    found = [
        module
        for module in task.modules()
        if isinstance(module, nn.ModuleList)
        and len({tuple((name, each.shape) for name, each in block.named_parameters()) for block in module}) == 1
    ]
    return max(found, key=len, default=None)


def _plans(task: nn.Module) -> bool:
    try:
        return bool(plan_of_model(task))
    except ConfigurationError:
        return False


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors in a nested structure."""
    return [each for each in tree_leaves(value) if isinstance(each, Tensor)]
