"""Running one stage: the model's own forward, from the first module of the stage to that of the next."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from drivetrain.runtime.errors import ConfigurationError
from drivetrain.strategies.parallel.pipeline.split import StageLayout
from drivetrain.strategies.parallel.pipeline.trace import Cut, Returned, Route, TensorShape

# What a module's call runs in place of its hooks and forward; `nn.Module.compile` sets it too.
CALL = "_compiled_call_impl"
_MOST_BLANKS = 16


@dataclass
class Call:
    """One call of the module that is split, as a task's step makes it.

    Attributes:
        args: Positional arguments.
        kwargs: The other ones.
        route: How stages run it.
        finish: Takes what the last stage returns and gives what the stage module returns in its place.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    route: Route
    finish: Callable[[Any], Any] | None = None


class _Reached(BaseException):
    """The first module of the next stage was called: not an `Exception`, which a model's forward might catch."""

    def __init__(self, handed_over: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.handed_over = handed_over


@dataclass(frozen=True)
class _Unregistered:
    """A module that is not to be found among another's children."""

    module: nn.Module


class StageModule(nn.Module):
    """The modules of one stage, and a forward that runs the whole model's but computes only this part of it.

    Sharding and compilation are applied to this module: its parameters are those of the stage.

    Args:
        module: The module that is split; it stays whole, and is no child of this one.
        layout: Its stages.
        stage: Which of them.
        device: Where it computes.
        context: Makes the context of a forward, such as autocast.
    """

    def __init__(
        self,
        module: nn.Module,
        layout: StageLayout,
        stage: int,
        device: torch.device,
        context: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        super().__init__()
        self.stage = stage
        self.layout = layout
        self._device = device
        self._context = context
        self._whole = _Unregistered(module)
        names = dict(module.named_modules(remove_duplicate=False))
        self._parts = {name: names[name] for name in [*layout.modules, *layout.splits]}
        self._blanks: dict[TensorShape, Tensor] = {}
        self._loose: dict[str, str] = {}
        self._absent: list[tuple[nn.Module, str]] = []
        self._register_parts(names)

    def _register_parts(self, names: Mapping[str, nn.Module]) -> None:
        """Register the stage's own modules, outermost ones only, and parameters of modules that stages share."""
        for name, part in names.items():
            outer = [path for path in self.layout.modules if path and name.startswith(f"{path}.")]
            if outer:
                continue
            if name in self.layout.modules:
                if self.layout.modules[name] == self.stage:
                    self.add_module(_flat(name), part)
                continue
            prefix = f"{name}." if name else ""
            for key, parameter in part._parameters.items():
                if parameter is None:
                    continue
                if self.layout.owners[prefix + key] == self.stage:
                    self.register_parameter(_flat(prefix + key), parameter)
                    self._loose[_flat(prefix + key)] = prefix + key
                else:
                    self._absent.append((part, key))

    @property
    def is_last(self) -> bool:
        """Whether the model's output is computed here."""
        return self.stage == self.layout.count - 1

    def put_back(self) -> None:
        """Show the model the parameters that stand here in place of the ones it registered itself."""
        for own, name in self._loose.items():
            module, key = self._slot(name)
            module._parameters[key] = self._parameters[own]

    def forward(self, *received: Tensor, inputs: tuple[tuple[Any, ...], dict[str, Any]], call: Call) -> Any:
        """Compute this stage's part.

        Args:
            *received: What the stage before handed over.
            inputs: Arguments of the whole model, as `call` has them, where a wrapper may cast them.
            call: The call that this is part of.

        Returns:
            The tensors for the next stage; of the last stage, what `call.finish` makes of the output.
        """
        module = self._whole.module
        try:
            with self._context(), self._routed(call.route, received):
                output = module._call_impl(*inputs[0], **inputs[1])  # type: ignore[no-untyped-call]
        except _Reached as reached:
            return reached.handed_over
        if not self.is_last:
            raise ConfigurationError(
                f"{type(module).__name__} did not call {self.layout.splits[self.stage]}, which the next stage begins "
                "with. Its forward must take the same way through the blocks for inputs of the same shapes.",
                code="DT-060",
            )
        return output if call.finish is None else call.finish(output)

    @contextmanager
    def _routed(self, route: Route, received: Sequence[Tensor]) -> Iterator[None]:
        """Let the model's forward pass by other stages' modules, and take what was received at the first own one."""
        parts = self._parts
        replaced: list[tuple[nn.Module, Any]] = []

        def replace(module: nn.Module, call: Callable[..., Any]) -> None:
            replaced.append((module, module.__dict__.get(CALL)))
            module.__dict__[CALL] = call

        own = [(*self._slot(name), self._parameters[here]) for here, name in self._loose.items()]
        before = [(module, key, module._parameters[key]) for module, key, _ in own]
        before += [(module, key, module._parameters[key]) for module, key in self._absent]
        try:
            for module, key, parameter in own:
                module._parameters[key] = parameter
            for module, key in self._absent:
                absent = module._parameters[key]
                if absent is not None:
                    stand_in = _zeros(tuple(absent.shape), absent.dtype, self._device)
                    module._parameters[key] = nn.Parameter(stand_in, requires_grad=False)
            passed: dict[Returned, Tensor] = {}
            if self.stage:
                cut = route.cuts[self.stage]
                passed = {key: each for key, each in zip(cut.returned, received, strict=True) if key is not None}
            for name, outputs in route.stand_ins[self.stage].items():
                replace(parts[name], self._stand_in(name, outputs, dict(passed)))
            if self.stage:
                entry = parts[self.layout.splits[self.stage - 1]]
                replace(entry, _entry_of_stage(entry, cut, received))
            if not self.is_last:
                following = route.cuts[self.stage + 1]
                for name in {key.module for key in following.returned if key is not None and key not in passed}:
                    replace(parts[name], _kept(parts[name], name, set(following.returned), passed))
                replace(parts[self.layout.splits[self.stage]], _exit_of_stage(self._name(), following, passed))
            yield
        finally:
            for module, call in reversed(replaced):
                if call is None:
                    module.__dict__.pop(CALL, None)
                else:
                    module.__dict__[CALL] = call
            for module, key, parameter in before:
                module._parameters[key] = parameter

    def _slot(self, name: str) -> tuple[nn.Module, str]:
        """Where the model itself registers a parameter."""
        path, _, key = name.rpartition(".")
        return self._whole.module.get_submodule(path), key

    def _name(self) -> str:
        return f"stage {self.stage} of {type(self._whole.module).__name__}"

    def _stand_in(self, name: str, outputs: Sequence[Any], passed: Mapping[Returned, Tensor]) -> Callable[..., Any]:
        """A call that returns tensors of the shapes that a module's calls return, or what was passed on of them."""
        remaining = iter(enumerate(outputs))

        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                number, output = next(remaining)
            except StopIteration:
                raise ConfigurationError(
                    f"{type(self._whole.module).__name__} calls {name} more often than it did for other inputs of the "
                    "same shapes. Its forward must take the same way through the blocks.",
                    code="DT-060",
                ) from None
            leaves, spec = pytree.tree_flatten(output)
            for index, leaf in enumerate(leaves):
                if isinstance(leaf, TensorShape):
                    given = passed.get(Returned(name, number, index))
                    leaves[index] = self._blank(leaf) if given is None else given
            return pytree.tree_unflatten(leaves, spec)

        return call

    def _blank(self, like: TensorShape) -> Tensor:
        """A tensor of some shape whose values do not count: always the same one, which takes no time to fill."""
        if like not in self._blanks:
            if len(self._blanks) >= _MOST_BLANKS:
                self._blanks.clear()
            with torch.inference_mode(False):
                self._blanks[like] = torch.zeros(like.shape, dtype=like.dtype, device=self._device)
        return self._blanks[like]


def _entry_of_stage(module: nn.Module, cut: Cut, received: Sequence[Tensor]) -> Callable[..., Any]:
    """A call of a stage's first module, with what was received among its arguments."""
    own = module.__dict__.get(CALL) or module._call_impl

    def call(*args: Any, **kwargs: Any) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        given = [leaf if place is None else received[place] for leaf, place in zip(leaves, cut.places, strict=True)]
        args, kwargs = pytree.tree_unflatten(given, spec)
        return own(*args, **kwargs)

    return call


def _kept(
    module: nn.Module, name: str, wanted: Collection[Returned | None], passed: dict[Returned, Tensor]
) -> Callable[..., Any]:
    """A call of a module that keeps what later stages use of what it returns."""
    own = module.__dict__.get(CALL) or module._call_impl
    numbers = itertools.count()

    def call(*args: Any, **kwargs: Any) -> Any:
        output, number = own(*args, **kwargs), next(numbers)
        for index, leaf in enumerate(pytree.tree_leaves(output)):
            key = Returned(name, number, index)
            if key in wanted:
                passed[key] = leaf
        return output

    return call


def _exit_of_stage(name: str, cut: Cut, passed: Mapping[Returned, Tensor]) -> Callable[..., Any]:
    """A call of the next stage's first module, which ends this stage's forward with what to hand over."""

    def call(*args: Any, **kwargs: Any) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        handed_over = [None if key is None else passed.get(key) for key in cut.returned]
        for leaf, place in zip(leaves, cut.places, strict=True):
            if place is not None and handed_over[place] is None:
                handed_over[place] = leaf
        if any(tensor is None for tensor in handed_over):
            raise ConfigurationError(
                f"{name} did not call all of the modules that it called for other inputs of the same shapes. Its "
                "forward must take the same way through the blocks.",
                code="DT-060",
            )
        given = zip(handed_over, cut.tensors, strict=True)
        raise _Reached(tuple(_as_expected(name, tensor, shape) for tensor, shape in given if tensor is not None))

    return call


def _as_expected(name: str, tensor: Tensor, expected: TensorShape) -> Tensor:
    if tuple(tensor.shape) != expected.shape:
        raise ConfigurationError(
            f"At the end of {name} a tensor of shape {tuple(tensor.shape)} would be handed over, but {expected.shape} "
            "is expected. Where the activations between blocks are sharded (sequence parallel), stages must not begin "
            "there.",
            code="DT-060",
        )
    return tensor.to(expected.dtype).contiguous()


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that take no memory, for a parameter that another stage holds; nothing computed from them counts."""
    return torch.zeros((), dtype=dtype, device=device).expand(shape)


def _flat(name: str) -> str:
    return name.replace(".", "__")
