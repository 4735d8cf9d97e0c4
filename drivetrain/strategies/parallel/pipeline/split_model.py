"""`SplitModel`: a model whose layers are spread over stages, and this process's part of it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from drivetrain.runtime.errors import ConfigurationError
from drivetrain.strategies.parallel.pipeline.schedule import PipelineGroup, PipelineOptions
from drivetrain.strategies.parallel.pipeline.split import (
    ModelOutline,
    Route,
    choose_splits,
    find_pipelined,
    lay_out,
    signature_of,
)
from drivetrain.strategies.parallel.pipeline.stage import CALL, Call, StageModule, StageState
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
        stage_state: Which process holds what.
        modules: The modules of this process's stages.
        precision: The number formats.
        made_with: The options of the pipeline, and how many stages there are on each process.
    """

    bare: nn.Module
    whole: nn.Module
    outline: ModelOutline
    stage_state: StageState
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
        """Keep the parameters of this process's stages; others' are on the meta device from now on."""
        name = find_pipelined(bare, options.module)
        whole = bare.get_submodule(name)
        if not whole_outside:
            _refuse_outside(bare, whole)
        layout = lay_out(whole, _splits(whole, name, options, place.stages.count), options.place)
        outline = ModelOutline(whole, layout, device)
        stage_state = StageState(bare, name, layout, place.group, place.stages.all)
        stage_state.drop_foreign()
        modules = [StageModule(whole, layout, stage, device, precision.forward_context) for stage in place.own]
        return cls(bare, whole, outline, stage_state, modules, precision, _signature(options, place))

    @staticmethod
    def found_in(bare: nn.Module, options: PipelineOptions, place: PipelineGroup) -> SplitModel:
        """The split that a task is in already, as that of the trainer before."""
        split: SplitModel = bare.__dict__[_MEMORY].split
        if split.made_with != _signature(options, place):
            raise ConfigurationError(
                "This model was spread over stages before, with other options of the pipeline, and parts of it are "
                "elsewhere. Make a new one, and load the state of this one into it.",
            )
        return replace(split, stage_state=split.stage_state.among(place.group))

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
        )


class _Memory:
    """The split that a task is in; a copy of the task is in none."""

    def __init__(self, split: SplitModel | None = None) -> None:
        self.split = split

    def __reduce__(self) -> Any:
        return _Memory, ()


# What a call of the module that is split does, while a task's step runs


# Routes of so many different shapes of inputs are kept.
_MOST_ROUTES = 64


class Caught(BaseException):
    """A step called the model and must not continue: not an `Exception`, which a step might catch."""


class ModelCalls:
    """Answers the calls of the module that is split."""

    def __init__(self, split: SplitModel, stages: int) -> None:
        self.split = split
        self.name = type(split.whole).__name__
        self._stages = stages
        self._routes: OrderedDict[Any, Route] = OrderedDict()
        self._answer: Callable[..., Any] | None = None
        split.whole.__dict__[CALL] = self._called

    def _called(self, *args: Any, **kwargs: Any) -> Any:
        if self._answer is None:
            raise ConfigurationError(
                f"{self.name} is spread over {self._stages} stages, so it can only be called within "
                "training_step, validation_step, test_step and predict_step, once in each.",
            )
        answer, self._answer = self._answer, None
        return answer(*args, **kwargs)

    @contextmanager
    def answered(self, answer: Callable[..., Any]) -> Iterator[None]:
        """Let the next call be answered so."""
        self._answer = answer
        try:
            yield
        finally:
            self._answer = None

    @property
    def was_called(self) -> bool:
        """Whether the answer has been asked for."""
        return self._answer is None

    def routed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """A call and how the stages run it."""
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                raise ConfigurationError(
                    f"An argument of {self.name} requires gradients, so it was computed from "
                    "parameters outside of it, where a pipeline has no stage. Move that computation into the module "
                    "that is split.",
                )
        return Call(args, kwargs, self._route(args, kwargs))

    def _route(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Route:
        training = self.split.whole.training
        key = signature_of(args, kwargs, training)
        if key not in self._routes:
            if len(self._routes) >= _MOST_ROUTES:
                self._routes.popitem(last=False)
            self._routes[key] = self.split.outline.route(args, kwargs, training)
        self._routes.move_to_end(key)
        return self._routes[key]

    def close(self) -> None:
        """Let the module be called as any other again; parameters of other stages stay away."""
        self.split.whole.__dict__.pop(CALL, None)
