"""Execution of one pipeline stage: the model's forward from the stage's first module to that of the next stage."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from drivetrain.runtime.errors import CollectiveError, ConfigurationError
from drivetrain.strategies.base import StateDict
from drivetrain.strategies.fsdp.sharding import gather
from drivetrain.strategies.parallel.pipeline.split import (
    Cut,
    ModelOutline,
    Returned,
    Route,
    StageLayout,
    TensorShape,
    signature_of,
)

# Attribute whose function a module's call runs in place of hooks and forward. `nn.Module.compile` sets it, too.
CALL = "_compiled_call_impl"
_MOST_BLANKS = 16


@dataclass
class Call:
    """Arguments of a call to a model split into pipeline stages, and the tensors that the stages exchange.

    Attributes:
        args: Positional arguments.
        kwargs: Keyword arguments.
        route: The tensors that the stages exchange.
        finish: Converts the last stage's output to the return value of the module.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    route: Route
    finish: Callable[[Any], Any] | None = None


class _Reached(BaseException):
    # Raised to end a forward where the next pipeline stage begins. It is no `Exception`, so that a forward's own
    # `except Exception` does not catch it.

    def __init__(self, handed_over: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.handed_over = handed_over


@dataclass(frozen=True)
class _Unregistered:
    # Hides a module, which `nn.Module` would register as a child.

    module: nn.Module


class StageModule(nn.Module):
    """Module that runs one pipeline stage, with only the stage's parameters."""

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
        for name, part in names.items():
            outer = [path for path in self.layout.modules if path and name.startswith(f"{path}.")]
            if outer:
                continue  # registered with the module around it
            if name in self.layout.modules:
                if self.layout.modules[name] == self.stage:
                    self.add_module(_flat(name), part)
                continue
            # Several stages run this module, and each registers only its own parameters of it.
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
        """True if this is the last pipeline stage, which computes the model's output."""
        return self.stage == self.layout.count - 1

    def put_back(self) -> None:
        # Sharding may have replaced the stage's parameters on this module.
        for own, name in self._loose.items():
            module, key = self._slot(name)
            module._parameters[key] = self._parameters[own]

    def forward(self, *received: Tensor, inputs: tuple[tuple[Any, ...], dict[str, Any]], call: Call) -> Any:
        # The tensors to send, or the model's output on the last stage.
        module = self._whole.module
        try:
            with self._context(), self._routed(call.route, received):
                # The model's own calls are intercepted, which `_call_impl` bypasses.
                output = module._call_impl(*inputs[0], **inputs[1])  # type: ignore[no-untyped-call]
        except _Reached as reached:
            return reached.handed_over
        if not self.is_last:
            raise ConfigurationError(
                f"{type(module).__name__} did not call {self.layout.splits[self.stage]}, the first module of the next "
                "stage. Its forward must call the same modules for all inputs of the same shapes.",
            )
        return output if call.finish is None else call.finish(output)

    @contextmanager
    def _routed(self, route: Route, received: Sequence[Tensor]) -> Iterator[None]:
        # Within this context, the model's forward computes only this stage, from the tensors in `received`.
        parts = self._parts
        replaced: list[tuple[nn.Module, Any]] = []

        def replace(module: nn.Module, call: Callable[..., Any]) -> None:
            replaced.append((module, module.__dict__.get(CALL)))
            module.__dict__[CALL] = call

        # Sharding replaces parameters on this module only, so that the model gets them for each call.
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
                # A copy, because `passed` also collects outputs of this stage's own modules below.
                replace(parts[name], self._stand_in(name, outputs, dict(passed)))
            if self.stage:
                entry = parts[self.layout.splits[self.stage - 1]]
                replace(entry, _entry_of_stage(entry, cut, received))
            if not self.is_last:
                following = route.cuts[self.stage + 1]
                for name in {key.module for key in following.returned if key is not None and key not in passed}:
                    replace(parts[name], _storing_outputs(parts[name], name, set(following.returned), passed))
                replace(parts[self.layout.splits[self.stage]], _exit_of_stage(self._name(), following, passed))
            yield
        finally:
            # In reverse, because a module may have been replaced twice.
            for module, call in reversed(replaced):
                if call is None:
                    module.__dict__.pop(CALL, None)
                else:
                    module.__dict__[CALL] = call
            for module, key, parameter in before:
                module._parameters[key] = parameter

    def _slot(self, name: str) -> tuple[nn.Module, str]:
        path, _, key = name.rpartition(".")
        return self._whole.module.get_submodule(path), key

    def _name(self) -> str:
        return f"stage {self.stage} of {type(self._whole.module).__name__}"

    def _stand_in(self, name: str, outputs: Sequence[Any], passed: Mapping[Returned, Tensor]) -> Callable[..., Any]:
        # Returns received tensors, or zeros for those that this stage does not need.
        remaining = iter(enumerate(outputs))

        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                number, output = next(remaining)
            except StopIteration:
                raise ConfigurationError(
                    f"{type(self._whole.module).__name__} calls {name} more often than for other inputs of the same "
                    "shapes. Its forward must call the same modules for all of them.",
                ) from None
            leaves, spec = pytree.tree_flatten(output)
            for index, leaf in enumerate(leaves):
                if isinstance(leaf, TensorShape):
                    given = passed.get(Returned(name, number, index))
                    leaves[index] = self._blank(leaf) if given is None else given
            return pytree.tree_unflatten(leaves, spec)

        return call

    def _blank(self, like: TensorShape) -> Tensor:
        # For outputs of other stages that this stage does not need.
        if like not in self._blanks:
            if len(self._blanks) >= _MOST_BLANKS:
                self._blanks.clear()
            # Tensors created in inference mode could not be used in training.
            with torch.inference_mode(False):
                self._blanks[like] = torch.zeros(like.shape, dtype=like.dtype, device=self._device)
        return self._blanks[like]


def _entry_of_stage(module: nn.Module, cut: Cut, received: Sequence[Tensor]) -> Callable[..., Any]:
    own = module.__dict__.get(CALL) or module._call_impl

    def call(*args: Any, **kwargs: Any) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        given = [leaf if place is None else received[place] for leaf, place in zip(leaves, cut.places, strict=True)]
        args, kwargs = pytree.tree_unflatten(given, spec)
        return own(*args, **kwargs)

    return call


def _storing_outputs(
    module: nn.Module, name: str, wanted: Collection[Returned | None], passed: dict[Returned, Tensor]
) -> Callable[..., Any]:
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
    # Called in place of the next stage's first module.

    def call(*args: Any, **kwargs: Any) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        handed_over = [None if key is None else passed.get(key) for key in cut.returned]
        for leaf, place in zip(leaves, cut.places, strict=True):
            if place is not None and handed_over[place] is None:
                handed_over[place] = leaf
        if any(tensor is None for tensor in handed_over):
            raise ConfigurationError(
                f"The forward of {name} skipped a module that it called in an earlier batch. A model with pipeline "
                "stages must call the same modules for every batch.",
            )
        given = zip(handed_over, cut.tensors, strict=True)
        raise _Reached(tuple(_as_expected(name, tensor, shape) for tensor, shape in given if tensor is not None))

    return call


def _as_expected(name: str, tensor: Tensor, expected: TensorShape) -> Tensor:
    if tuple(tensor.shape) != expected.shape:
        raise ConfigurationError(
            f"At the end of {name}, a tensor of shape {tuple(tensor.shape)} would be sent, but {expected.shape} is "
            "expected. Stages must not begin where activations between blocks are sharded (sequence parallel).",
        )
    return tensor.to(expected.dtype).contiguous()


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    # Uses the memory of one element.
    return torch.zeros((), dtype=dtype, device=device).expand(shape)


def _flat(name: str) -> str:
    return name.replace(".", "__")


# `StageState`: which process holds which parameter of a model that is spread over stages


class StageState:
    """Saves and loads the state of a model that is split into pipeline stages."""

    def __init__(
        self, bare: nn.Module, name: str, layout: StageLayout, group: dist.ProcessGroup, ranks: Sequence[int]
    ) -> None:
        self._bare = bare
        self.group = group
        self._rank = dist.get_rank(group)
        prefix = f"{name}." if name else ""
        # Modules outside the split one are used where losses are computed.
        outside = ranks[-1]
        holders = {prefix + own: ranks[stage] for own, stage in layout.owners.items()}
        parameters = {key for key, _ in bare.named_parameters(remove_duplicate=False)}
        buffers = {key for key, _ in bare.named_buffers(remove_duplicate=False)}
        self._holders = {key: holders.get(key, outside) for key in [*parameters, *buffers]}
        # A buffer stays with the parameters of its module. Other buffers, such as position tables, are on all stages.
        self._everywhere = {key for key in buffers if not self._goes_with_parameters(bare, key, prefix, layout)}
        self._groups: WeakKeyDictionary[Optimizer, list[list[str]]] = WeakKeyDictionary()
        self._trained_by_peers: set[int] = set()

    def among(self, group: dist.ProcessGroup) -> StageState:
        moved = copy.copy(self)
        moved.group = group
        return moved

    @staticmethod
    def _goes_with_parameters(bare: nn.Module, key: str, prefix: str, layout: StageLayout) -> bool:
        path = key.rpartition(".")[0]
        return path.startswith(prefix) and path[len(prefix) :] in layout.modules

    def is_foreign(self, name: str) -> bool:
        return name not in self._everywhere and self._holders.get(name, self._rank) != self._rank

    def is_trained_by_peer(self, parameter: nn.Parameter) -> bool:
        """Return True if another pipeline stage trains the parameter."""
        return id(parameter) in self._trained_by_peers

    def drop_foreign(self) -> None:
        stand_ins: dict[int, nn.Parameter] = {}
        for path, module in self._bare.named_modules(remove_duplicate=False):
            prefix = f"{path}." if path else ""
            for key, parameter in module._parameters.items():
                if parameter is not None and self.is_foreign(prefix + key):
                    if id(parameter) not in stand_ins:
                        # Frozen, so that neither the optimizer nor a search for trainable parameters finds it.
                        empty = torch.empty_like(parameter, device="meta")
                        stand_in = stand_ins[id(parameter)] = nn.Parameter(empty, requires_grad=False)
                        if parameter.requires_grad:
                            self._trained_by_peers.add(id(stand_in))
                    module._parameters[key] = stand_ins[id(parameter)]
            for key, buffer in module._buffers.items():
                if buffer is not None and self.is_foreign(prefix + key):
                    module._buffers[key] = torch.empty_like(buffer, device="meta")

    def follow(self, optimizer: Optimizer) -> None:
        names = {id(parameter): name for name, parameter in self._bare.named_parameters()}
        self._groups[optimizer] = [
            [names.get(id(parameter), "?") for parameter in group["params"]] for group in optimizer.param_groups
        ]
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if not self.is_foreign(names.get(id(p), "?"))]
        for parameter in [known for known in optimizer.state if self.is_foreign(names.get(id(known), "?"))]:
            del optimizer.state[parameter]

    def model_state(self) -> StateDict:
        # A collective call. Tensors of other stages are on the meta device.
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
        value = value.detach().clone()
        dist.broadcast(value, group=self.group, group_src=self._holders[name])
        return value

    def optimizer_state(self, optimizer: Optimizer, own: StateDict) -> StateDict:
        # A collective call. Tensors of other stages are on the meta device.
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
        # Loading skips tensors on the meta device.
        return {
            name: torch.empty(value.shape, dtype=value.dtype, device="meta")
            if isinstance(value, Tensor) and self.is_foreign(name)
            else value
            for name, value in state.items()
        }

    def own_optimizer_state(self, state: StateDict) -> StateDict:
        groups = [
            {**group, "params": [name for name in group["params"] if not self.is_foreign(name)]}
            for group in state["param_groups"]
        ]
        own = {name: value for name, value in state["state"].items() if not self.is_foreign(name)}
        return {**state, "state": own, "param_groups": groups}

    def full_state_dict(self) -> dict[str, Tensor]:
        """Gather the full state dict of all pipeline stages on rank 0.

        Other ranks get an empty dict.
        """
        # One pipeline contains rank 0, and the others only take part in gathering shards.
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
    # Sent in place of a tensor whose values other processes do not need.

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype


def _describe(value: Any) -> Any:
    return _Described(value) if isinstance(value, Tensor) else value


def _without_values(value: Any) -> Any:
    return torch.empty(value.shape, dtype=value.dtype, device="meta") if isinstance(value, _Described) else value


# Requests that run through the stages of a pipeline one after another, forward only


Request = tuple[tuple[Any, ...], dict[str, Any]]

_MOST_ROUTES = 64
_COMPUTED, _FAILED = 1, 0


class StagedModel:
    """Model for inference with one pipeline stage on each process."""

    def __init__(
        self,
        module: nn.Module,
        layout: StageLayout,
        device: torch.device,
        load: Callable[[nn.Module, list[str]], None],
        in_flight: int,
    ) -> None:
        self._module, self._device, self._in_flight = module, device, in_flight
        self._rank, self._last = dist.get_rank(), layout.count - 1
        self._outline = ModelOutline(module, layout, device)
        self._routes: dict[Any, Route] = {}
        world: Any = dist.group.WORLD
        self.stage_state = StageState(module, "", layout, world, range(layout.count))
        self.stage_state.drop_foreign()
        tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
        load(module, [name for name, _ in tensors if not self.stage_state.is_foreign(name)])
        self._stage = StageModule(module, layout, self._rank, device, nullcontext)

    @property
    def is_last(self) -> bool:
        """True if this process holds the last pipeline stage, which computes the outputs."""
        return self._rank == self._last

    def check(self, request: Request) -> None:
        self._route(request)

    def run(self, requests: Iterable[Request]) -> Iterator[tuple[Request, Any]]:
        # All processes must call this. Yields `(request, output)` on the last stage only. A stage computes one request
        # while the previous stage computes the next.
        link = _Link(self._rank, self._last, self._device, self._in_flight)
        for request in requests if self._rank == 0 else link.requests():
            link.forward_request(request)
            with torch.no_grad():
                output = self._compute(request, link)
            if self.is_last:
                yield request, output
        link.forward_request(None)
        link.finish()

    def _compute(self, request: Request, link: _Link) -> Any:
        try:
            route = self._route(request)
            received = link.receive_values(route.cuts[self._rank].tensors) if self._rank else ()
            output = self._stage(*received, inputs=request, call=Call(*request, route))
        except BaseException:
            # The next stage would otherwise wait forever.
            link.send_values(_FAILED, ())
            raise
        if not self.is_last:
            link.send_values(_COMPUTED, output)
        return output

    def _route(self, request: Request) -> Route:
        training = self._module.training
        key = signature_of(*request, training)
        if key not in self._routes:
            if len(self._routes) >= _MOST_ROUTES:
                self._routes.pop(next(iter(self._routes)))
            self._routes[key] = self._outline.route(*request, training)
        return self._routes[key]


class _Link:
    def __init__(self, rank: int, last: int, device: torch.device, in_flight: int) -> None:
        self._rank, self._last, self._device, self._in_flight = rank, last, device, in_flight
        self._sent: deque[list[Any]] = deque([[]])

    def requests(self) -> Iterator[Request]:
        # Ends when the previous stage sends None.
        while True:
            size = self._receive((1,), torch.int64)
            content = self._receive((int(size.item()),), torch.uint8)
            request = pickle.loads(content.cpu().numpy().tobytes())
            if request is None:
                return
            leaves, spec = pytree.tree_flatten(request)
            filled = [
                self._receive(leaf.shape, leaf.dtype) if isinstance(leaf, TensorShape) else leaf for leaf in leaves
            ]
            yield pytree.tree_unflatten(filled, spec)

    def forward_request(self, request: Request | None) -> None:
        # The next pipeline stage receives the arguments of a model call, or None if no more calls follow.
        if self._rank == self._last:
            return
        # Limits the memory of requests that the next stage has not received yet.
        while len(self._sent) > self._in_flight:
            self._wait(self._sent.popleft())
        self._sent.append([])
        leaves, spec = pytree.tree_flatten(request)
        shapes = [TensorShape(tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        content = pickle.dumps(pytree.tree_unflatten(shapes, spec))
        self._send(torch.tensor([len(content)], dtype=torch.int64))
        self._send(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                self._send(leaf)

    def send_values(self, status: int, values: Iterable[Tensor]) -> None:
        if self._rank == self._last:
            return
        self._send(torch.tensor([status], dtype=torch.int64))
        for value in values:
            self._send(value)

    def receive_values(self, shapes: Iterable[TensorShape]) -> tuple[Tensor, ...]:
        """Receive tensors of the given shapes from the previous stage."""
        if int(self._receive((1,), torch.int64).item()) == _FAILED:
            raise CollectiveError(
                f"Stage {self._rank - 1} of the pipeline failed, so stage {self._rank} cannot continue. The error is "
                "in the output of the failed process."
            )
        return tuple(self._receive(each.shape, each.dtype) for each in shapes)

    def finish(self) -> None:
        while self._sent:
            self._wait(self._sent.popleft())

    def _send(self, tensor: Tensor) -> None:
        tensor = tensor.detach().to(self._device).contiguous()
        # Stored with its tensor, which must stay alive until it has arrived.
        self._sent[-1].append((dist.isend(tensor, dst=self._rank + 1), tensor))

    def _receive(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        received = torch.empty(shape, dtype=dtype, device=self._device)
        dist.recv(received, src=self._rank - 1)
        return received

    @staticmethod
    def _wait(sent: list[Any]) -> None:
        for work, _ in sent:
            work.wait()
