"""`SplitModel`: a model whose layers are spread over stages, and this process's part of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from drivetrain.runtime.errors import ConfigurationError
from drivetrain.strategies.parallel.pipeline.holdings import StageHoldings
from drivetrain.strategies.parallel.pipeline.options import PipelineGroup, PipelineOptions
from drivetrain.strategies.parallel.pipeline.split import choose_splits, find_pipelined, lay_out
from drivetrain.strategies.parallel.pipeline.stage import StageModule
from drivetrain.strategies.parallel.pipeline.trace import ModelOutline
from drivetrain.strategies.precision import Precision

# Where a task keeps the split that it is in.
_MEMORY = "_pipelined"


@dataclass(frozen=True)
class SplitModel:
    """A task that is spread over stages.

    Attributes:
        bare: The task.
        whole: The module in it whose layers are spread.
        outline: Its forward without weights.
        holdings: Which process holds what.
        modules: The modules of this process's stages.
        precision: The number formats.
        made_with: The options of the pipeline, and how many stages there are on each process.
    """

    bare: nn.Module
    whole: nn.Module
    outline: ModelOutline
    holdings: StageHoldings
    modules: list[StageModule]
    precision: Precision
    made_with: tuple[Any, ...]

    @classmethod
    def make(
        cls,
        bare: nn.Module,
        options: PipelineOptions,
        place: PipelineGroup,
        device: torch.device,
        precision: Precision,
        whole_outside: bool,
    ) -> SplitModel:
        """Keep the parameters of this process's stages; others' are on the meta device from now on.

        Args:
            bare: The task, with whole parameters in their dtype.
            options: Which module is split, and where.
            place: This process among those of the pipeline.
            device: Where it computes.
            precision: The number formats.
            whole_outside: Whether what is outside of the module that is split may be trained.

        Raises:
            ConfigurationError: The model cannot be split.
        """
        name = find_pipelined(bare, options.module)
        whole = bare.get_submodule(name)
        if not whole_outside:
            _refuse_outside(bare, whole)
        layout = lay_out(whole, _splits(whole, name, options, place.stages.count), options.place)
        outline = ModelOutline(whole, layout, device)
        holdings = StageHoldings(bare, name, layout, place.group, place.stages.all)
        holdings.drop_foreign()
        modules = [StageModule(whole, layout, stage, device, precision.forward_context) for stage in place.own]
        return cls(bare, whole, outline, holdings, modules, precision, _signature(options, place))

    @staticmethod
    def found_in(bare: nn.Module, options: PipelineOptions, place: PipelineGroup) -> SplitModel:
        """The split that a task is in already, as that of the trainer before.

        Args:
            bare: The task.
            options: Those of the pipeline that it comes to.
            place: This process among those of that pipeline.

        Raises:
            ConfigurationError: It was split otherwise.
        """
        split: SplitModel = bare.__dict__[_MEMORY].split
        if split.made_with != _signature(options, place):
            raise ConfigurationError(
                "This model was spread over stages before, with other options of the pipeline, and parts of it are "
                "elsewhere. Make a new one, and load the state of this one into it.",
                code="DT-045",
            )
        return replace(split, holdings=split.holdings.among(place.group))

    def remember(self) -> None:
        """Let the task keep this split, so that another pipeline finds it."""
        self.bare.__dict__[_MEMORY] = _Memory(self)

    def put_back(self) -> None:
        """Show the model the parameters that its stages hold for it."""
        for module in self.modules:
            module.put_back()


def _signature(options: PipelineOptions, place: PipelineGroup) -> tuple[Any, ...]:
    return (place.stages.kind, place.stages.per_rank, options.module, options.split, options.place)


def _splits(whole: nn.Module, name: str, options: PipelineOptions, count: int) -> Sequence[str]:
    if isinstance(options.split, str):
        return choose_splits(whole, count)
    return [path.removeprefix(f"{name}.") if name else path for path in options.split]


def _refuse_outside(bare: nn.Module, whole: nn.Module) -> None:
    inside = {id(parameter) for parameter in whole.parameters()}
    outside = [n for n, p in bare.named_parameters() if p.requires_grad and id(p) not in inside]
    if outside:
        raise ConfigurationError(
            f"{', '.join(outside[:4])} can be trained, but is outside of {type(whole).__name__}, which is "
            "spread over stages and sharded. Move it in there, or use a pipeline without data parallelism.",
            code="DT-068",
        )


class _Memory:
    """The split that a task is in; a copy of the task is in none.

    Args:
        split: The split.
    """

    def __init__(self, split: SplitModel | None = None) -> None:
        self.split = split

    def __reduce__(self) -> Any:
        return _Memory, ()
