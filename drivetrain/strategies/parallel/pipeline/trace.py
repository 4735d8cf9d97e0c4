"""What crosses from stage to stage, found by running a model once on tensors that have shapes but no values."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils import checkpoint as checkpointing
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from drivetrain.runtime.errors import ConfigurationError
from drivetrain.strategies.parallel.pipeline.split import StageLayout, is_within


@dataclass(frozen=True)
class TensorShape:
    """What must be known of a tensor to receive it."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Cut:
    """What the stages before hand to a stage: arguments of its first module that come from parameters.

    Attributes:
        leaves: How many values the arguments hold, nested ones counted one by one.
        places: For each of them, which of the tensors handed over it is; None for what every stage has by itself.
        tensors: The tensors handed over.
    """

    leaves: int
    places: tuple[int | None, ...]
    tensors: tuple[TensorShape, ...]


@dataclass
class Route:
    """How to run the stages for arguments of given shapes.

    Attributes:
        cuts: For each stage but the first.
        stand_ins: For each stage, modules of earlier ones by name, and for each of their calls what it returns, with
            `TensorShape` in place of tensors.
    """

    cuts: dict[int, Cut] = field(default_factory=dict)
    stand_ins: dict[int, dict[str, list[Any]]] = field(default_factory=dict)


class ModelOutline:
    """A model's forward without its weights, which shows what passes between stages.

    A stage runs the model's own forward: modules of earlier stages are stood in for by zeros of the right shapes, its
    first module is given what was received, and the next stage's first module ends it. That is right if nothing else
    that was computed from parameters crosses over, which is what is checked here, by following every operation.

    Args:
        module: The module that is split, with whole parameters.
        layout: Its stages.
        device: Where it runs.
    """

    def __init__(self, module: nn.Module, layout: StageLayout, device: torch.device) -> None:
        self._layout = layout
        self._device = device
        self._name = type(module).__name__
        # What is missing has no shape either, so that a model may hold plain tensors besides its parameters.
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._owner_of: dict[int, tuple[int, str]] = {}
        self._skeleton = self._copy(module)
        self._modules = dict(self._skeleton.named_modules(remove_duplicate=False))

    def _copy(self, module: nn.Module) -> nn.Module:
        """The same modules around parameters and buffers without values."""
        memo: dict[int, Any] = {}
        parameters = dict(module.named_parameters(remove_duplicate=False))
        with self._fake, torch.no_grad():
            for name, tensor in [*parameters.items(), *module.named_buffers(remove_duplicate=False)]:
                if id(tensor) not in memo:
                    fake = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
                    memo[id(tensor)] = nn.Parameter(fake, requires_grad=False) if name in parameters else fake
                if name in parameters:
                    self._owner_of[id(memo[id(tensor)])] = (self._layout.owners[name], name)
        try:
            return copy.deepcopy(module, memo)
        except Exception as error:
            raise ConfigurationError(
                f"{self._name} cannot be copied, which is how its stages are found: {type(error).__name__}: {error}. "
                "Keep what cannot be copied out of the module that is split."
            ) from error

    def route(self, args: Sequence[Any], kwargs: dict[str, Any], training: bool) -> Route:
        """Run the forward on shapes alone.

        Args:
            args: Positional arguments of the module's call; of tensors only shapes and dtypes count.
            kwargs: Its other arguments.
            training: Whether the module trains.

        Raises:
            ConfigurationError: The model cannot be split there; the message names where and why.
        """
        self._skeleton.train(training)
        trace = _Trace(self._name, self._layout, self._owner_of)
        with torch.inference_mode(False), torch.no_grad(), self._fake:
            fake_args, fake_kwargs = pytree.tree_map_only(Tensor, self._without_values, (tuple(args), kwargs))
            removals = self._watch(trace)
            try:
                with trace:
                    output = self._skeleton(*fake_args, **fake_kwargs)
                trace.finish(output)
            except ConfigurationError:
                raise
            except Exception as error:
                raise ConfigurationError(
                    f"The forward of {self._name} cannot be run on shapes alone, which is how its stages are found: "
                    f"{type(error).__name__}: {str(error)[:400]} It must not depend on the values in its tensors."
                ) from error
            finally:
                for remove in removals:
                    remove()
        return trace.route

    def _without_values(self, tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)

    def _watch(self, trace: _Trace) -> list[Callable[[], None]]:
        """Let the trace see calls of the modules that stages begin with or that a stage may stand in for."""
        removals: list[Callable[[], None]] = []
        for stage, name in enumerate(self._layout.splits, start=1):
            module = self._modules[name]
            handle = module.register_forward_pre_hook(trace.entry_hook(stage, name), prepend=True, with_kwargs=True)
            removals.append(handle.remove)
        for name in self._layout.modules:
            begin, end = trace.call_hooks(name)
            module = self._modules[name]
            removals.append(module.register_forward_pre_hook(begin).remove)
            removals.append(module.register_forward_hook(end).remove)
        return removals


class _Trace(TorchDispatchMode):
    """Follows what was computed from which stage's parameters."""

    def __init__(self, name: str, layout: StageLayout, owner_of: dict[int, tuple[int, str]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._name, self._layout, self._owner_of = name, layout, owner_of
        self._stage = 0
        self._made_in = WeakTensorKeyDictionary()
        self._open: list[str] = []
        self.route = Route(stand_ins={stage: {} for stage in range(layout.count)})

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket in _OF_SHAPES_ONLY:
            return func(*args, **kwargs)
        depends = False
        for leaf in pytree.tree_leaves((args, kwargs)):
            if not isinstance(leaf, Tensor):
                continue
            if id(leaf) in self._owner_of:
                owner, name = self._owner_of[id(leaf)]
                self._check_parameter(owner, name)
                depends = True
            elif leaf in self._made_in:
                self._check_value(self._made_in[leaf], f"by {func}")
                depends = True
        output = func(*args, **kwargs)
        if depends:
            changed = [args[i] for i, a in enumerate(func._schema.arguments[: len(args)]) if _is_written(a)]
            for leaf in pytree.tree_leaves((output, changed)):
                if isinstance(leaf, Tensor):
                    self._made_in[leaf] = self._stage
        return output

    def _check_parameter(self, owner: int, name: str) -> None:
        if owner != self._stage:
            raise ConfigurationError(
                f"{self._name} uses {name} in stage {self._stage}, but it was placed on stage {owner}, by the order in "
                f"which modules are registered. Register it where it is used, or say pp_place={{{name!r}: "
                f"{self._stage}}}; a parameter that two stages use cannot be split."
            )

    def _check_value(self, stage: int, where: str) -> None:
        if stage != self._stage:
            split = self._layout.splits[self._stage - 1]
            raise ConfigurationError(
                f"{self._name} uses a value of stage {stage} in stage {self._stage} ({where}), which is not an "
                f"argument of {split}, the first module of a stage. Stages hand over nothing else: pass it through the "
                "blocks, or split elsewhere with pp_split=[...]."
            )

    def entry_hook(self, stage: int, name: str) -> Callable[..., Any]:
        """A hook for the first module of a stage: notes what it is called with and what of that is handed over."""

        def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if self._stage != stage - 1:
                order = list(self._layout.splits)
                raise ConfigurationError(
                    f"{self._name} must call the first modules of its stages once each and in this order: {order}; "
                    f"{name} was called in stage {self._stage}. Split elsewhere with pp_split=[...]."
                )
            if _is_checkpointed():
                raise ConfigurationError(
                    f"{self._name} calls {name}, the first module of a stage, through torch.utils.checkpoint, which "
                    "would run it again on other values. Checkpoint inside the block, or let the strategy do it."
                )
            leaves, spec = pytree.tree_flatten((args, kwargs))
            numbers: dict[int, int] = {}
            received: list[Tensor] = []
            places: list[int | None] = []
            for leaf in leaves:
                if not (isinstance(leaf, Tensor) and leaf in self._made_in):
                    places.append(None)
                    continue
                self._check_value(self._made_in[leaf], f"in the call of {name}")
                if id(leaf) not in numbers:
                    numbers[id(leaf)] = len(received)
                    received.append(leaf)
                places.append(numbers[id(leaf)])
            if not received:
                raise ConfigurationError(f"{name} receives nothing from the stage before it, so none can begin there.")
            shapes = tuple(TensorShape(tuple(tensor.shape), tensor.dtype) for tensor in received)
            self.route.cuts[stage] = Cut(len(leaves), tuple(places), shapes)
            self._stage = stage
            fresh = [torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in received]
            for tensor in fresh:
                self._made_in[tensor] = stage
            given = [leaf if place is None else fresh[place] for leaf, place in zip(leaves, places, strict=True)]
            return pytree.tree_unflatten(given, spec)

        return enter

    def call_hooks(self, name: str) -> tuple[Callable[..., None], Callable[..., None]]:
        """Hooks around a module with parameters of one stage: what it returns is what later stages put in its place."""
        owner = self._layout.modules[name]

        def begin(module: nn.Module, args: Any) -> None:
            self._open.append(name)

        def end(module: nn.Module, args: Any, output: Any) -> None:
            self._open.pop()
            shapes = pytree.tree_map_only(Tensor, lambda t: TensorShape(tuple(t.shape), t.dtype), output)
            for stage in range(owner + 1, self._layout.count):
                if not any(self._layout.modules[outer] != stage for outer in self._open):
                    self.route.stand_ins[stage].setdefault(name, []).append(shapes)

        return begin, end

    def finish(self, output: Any) -> None:
        """Check that all stages were reached and that what is returned comes from the last."""
        if self._stage != self._layout.count - 1:
            raise ConfigurationError(
                f"{self._name} never called {self._layout.splits[self._stage]}, which a stage begins with. "
                "Split elsewhere with pp_split=[...]."
            )
        for leaf in pytree.tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf in self._made_in:
                self._check_value(self._made_in[leaf], "in what it returns")


# What these return does not depend on the values that they are given.
_OF_SHAPES_ONLY = {
    *(getattr(torch.ops.aten, f"{name}_like") for name in ("empty", "zeros", "ones", "full", "rand", "randn")),
    *(getattr(torch.ops.aten, f"new_{name}") for name in ("empty", "zeros", "ones", "full")),
}


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _is_checkpointed() -> bool:
    """Whether a function is being run by `torch.utils.checkpoint`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == checkpointing.__file__:
            return True
        frame = frame.f_back
    return False


def signature_of(args: Sequence[Any], kwargs: dict[str, Any], training: bool) -> Any:
    """What a route depends on: shapes and dtypes of tensors, and values of everything else."""
    leaves, spec = pytree.tree_flatten((tuple(args), kwargs))
    known = tuple(_outline(leaf) for leaf in leaves)
    autocast = tuple(torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind))
    return spec, known, training, autocast


def _outline(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return TensorShape(tuple(leaf.shape), leaf.dtype)
    try:
        hash(leaf)
    except TypeError:
        return id(leaf)
    return leaf


__all__ = ["Cut", "ModelOutline", "Route", "TensorShape", "is_within", "signature_of"]
