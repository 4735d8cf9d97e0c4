"""A model whose layers are split over pipeline stages, and the interception of its forward calls."""

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

# Attribute of the task that holds its `SplitModel`, so that a second trainer finds the split.
_MEMORY = "_pipelined"


@dataclass(frozen=True)
class SplitModel:
    """A task split into pipeline stages, with the stage modules that this process runs.

    Attributes:
        bare: The task.
        whole: The task's module whose layers are split over stages.
        outline: The module's forward without weights, from which routes through the stages are traced.
        stage_state: Maps each parameter and buffer to the rank that holds it.
        modules: The stage modules of this process.
        precision: The precision of the forward.
        made_with: The schedule kind, the stages per rank and the pipeline options that the split was made with.
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
        # Parameters and buffers that other ranks hold are replaced by tensors on the meta device.
        name = find_pipelined(bare, options.module)
        whole = bare.get_submodule(name)
        if not whole_outside:
            inside = {id(parameter) for parameter in whole.parameters()}
            outside = [n for n, p in bare.named_parameters() if p.requires_grad and id(p) not in inside]
            if outside:
                raise ConfigurationError(
                    f"Trainable parameters ({', '.join(outside[:4])}) are outside of {type(whole).__name__}, which is "
                    "split into stages and sharded. Move them into this module, or use a pipeline without data "
                    "parallelism.",
                )
        layout = lay_out(whole, _splits(whole, name, options, place.stages.count), options.place)
        outline = ModelOutline(whole, layout, device)
        stage_state = StageState(bare, name, layout, place.group, place.stages.all)
        stage_state.drop_foreign()
        modules = [StageModule(whole, layout, stage, device, precision.forward_context) for stage in place.own]
        return cls(bare, whole, outline, stage_state, modules, precision, _signature(options, place))

    @staticmethod
    def found_in(bare: nn.Module, options: PipelineOptions, place: PipelineGroup) -> SplitModel:
        # `bare` is a task whose model an earlier trainer has split.
        split: SplitModel = bare.__dict__[_MEMORY].split
        if split.made_with != _signature(options, place):
            raise ConfigurationError(
                "This model was split into stages before, with other pipeline options, and parts of it are on other "
                "processes. Create a new model, and load the state of this one into it.",
            )
        return replace(split, stage_state=split.stage_state.among(place.group))

    def remember(self) -> None:
        self.bare.__dict__[_MEMORY] = _Memory(self)

    def put_back(self) -> None:
        for module in self.modules:
            module.put_back()


def _signature(options: PipelineOptions, place: PipelineGroup) -> tuple[Any, ...]:
    return (place.stages.kind, place.stages.per_rank, options.module, options.split, options.place)


def _splits(whole: nn.Module, name: str, options: PipelineOptions, count: int) -> Sequence[str]:
    if isinstance(options.split, str):
        return choose_splits(whole, count)
    return [path.removeprefix(f"{name}.") if name else path for path in options.split]


class _Memory:
    # An attribute of the task.

    def __init__(self, split: SplitModel | None = None) -> None:
        self.split = split

    # A copy of the task has no stages yet, and is split on its own.
    def __reduce__(self) -> Any:
        return _Memory, ()


# Calls of the split module within a step


# Size of the cache of routes, which has one entry for each signature of inputs.
_MOST_ROUTES = 64


class Caught(BaseException):
    # Raised to leave a task's step once its call of the model is recorded. It is no `Exception`, so that a step's own
    # `except Exception` does not catch it.
    ...


class ModelCalls:
    # Intercepts the calls of a split model, so that the pipeline answers them.

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
                f"{self.name} is split into {self._stages} stages, so it can only be called within training_step, "
                "validation_step, test_step and predict_step, and only once in each.",
            )
        # Reset first: a second call in one step must raise, because stages run once a step.
        answer, self._answer = self._answer, None
        return answer(*args, **kwargs)

    @contextmanager
    def answered(self, answer: Callable[..., Any]) -> Iterator[None]:
        self._answer = answer
        try:
            yield
        finally:
            self._answer = None

    @property
    def was_called(self) -> bool:
        return self._answer is None

    def routed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                raise ConfigurationError(
                    f"An argument of {self.name} requires gradients, so it depends on parameters outside of it, "
                    "which no pipeline stage holds. Move this computation into the module that is split.",
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
        # Parameters of other stages remain on the meta device.
        self.split.whole.__dict__.pop(CALL, None)
