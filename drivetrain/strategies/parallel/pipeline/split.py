"""Assignment of a model's modules to pipeline stages, and detection of the tensors that stages exchange."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
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

from drivetrain.runtime.errors import ConfigurationError, nearest


@dataclass(frozen=True)
class StageLayout:
    """Assignment of a module's parameters and submodules to pipeline stages.

    Modules must be registered in the order in which the forward uses them. A module then belongs to the stage whose
    first module was registered last before it. `pp_place` can assign modules explicitly.

    Attributes:
        splits: Names of the first modules of stages 1, 2, ...
        owners: The stage of each parameter and buffer, by name.
        modules: The stage of each submodule whose parameters all belong to one stage, by name.
        argument: The name of the option for `splits`, for error messages.
    """

    splits: tuple[str, ...]
    owners: Mapping[str, int]
    modules: Mapping[str, int]
    argument: str = "pp_split"

    @property
    def count(self) -> int:
        return len(self.splits) + 1


def find_pipelined(model: nn.Module, name: str | None) -> str:
    # The default is the child with most of the parameters.
    known = {path for path, _ in model.named_modules()}
    if name is not None:
        if name not in known:
            raise ConfigurationError(
                f"pp_module={name!r} is not a module of {type(model).__name__}. It has: "
                f"{', '.join(sorted(path for path, _ in model.named_children()))}.{nearest(name, known)}",
            )
        return name
    sizes = {path: _size(child) for path, child in model.named_children()}
    largest = max(sizes, key=lambda path: sizes[path], default="")
    if not largest or not sizes[largest]:
        raise ConfigurationError(f"{type(model).__name__} has no module with parameters to split into stages.")
    if 2 * sizes[largest] > _size(model):
        # A list is never called itself: the model's own forward calls its blocks.
        return "" if isinstance(model.get_submodule(largest), nn.ModuleList | nn.ModuleDict) else largest
    holders = ", ".join(path for path, size in sizes.items() if size)
    raise ConfigurationError(
        f"{type(model).__name__} has several modules with parameters: {holders}. Choose the one to split into stages "
        'with pp_module ("" for all, if its steps call self(...)), or combine them in one module that the steps call.',
    )


def choose_splits(
    module: nn.Module, count: int, classes: Sequence[str] = (), argument: str = "pp_split"
) -> tuple[str, ...]:
    # All stages get similar numbers of parameters. Each later stage begins with a block of the largest `ModuleList` or
    # `Sequential`, or with a module of the given classes. `argument` is the option that errors name.
    if classes:
        return _splits_between(module, count, classes)
    lists = {
        path: part
        for path, part in module.named_modules()
        if isinstance(part, nn.ModuleList | nn.Sequential) and len(part) > 1
    }
    if not lists:
        raise ConfigurationError(
            f"{type(module).__name__} holds no ModuleList or Sequential of blocks to split into {count} stages. "
            f"List the first module of each later stage: {argument}=[...].",
        )
    path = max(lists, key=lambda name: (_size(lists[name]), -len(name)))
    if getattr(getattr(module, "config", None), "is_encoder_decoder", False):
        pair = _encoder_and_decoder(lists, path)
        return _splits_between(module, count, [type(block).__name__ for each in pair for block in lists[each]], pair)
    blocks = list(lists[path].named_children())
    if len(blocks) < count:
        raise ConfigurationError(
            f"{path or type(module).__name__} has {len(blocks)} blocks, too few for {count} stages (pp x "
            f"pp_stages_per_rank). Use fewer stages, or name their first modules with {argument}=[...].",
        )
    begins = _even_begins([_size(block) for _, block in blocks], count)
    return tuple(f"{path}.{blocks[begin][0]}" if path else blocks[begin][0] for begin in begins)


def _encoder_and_decoder(lists: Mapping[str, nn.ModuleList | nn.Sequential], path: str) -> list[str]:
    # `path` is one of the two lists of blocks.
    others = [each for each in lists if not is_within(each, path) and not is_within(path, each)]
    return [path, *sorted(others, key=lambda name: -_size(lists[name]))[:1]]


def _splits_between(
    module: nn.Module, count: int, classes: Sequence[str], within: Sequence[str] = ("",)
) -> tuple[str, ...]:
    names, sizes = list[str](), list[int]()
    for path, part in module.named_modules():
        if not path or not any(is_within(path, outer) for outer in within):
            continue
        if type(part).__name__ in classes and not any(is_within(path, outer) for outer in names):
            names.append(path)
            sizes.append(_size(part))
    if len(names) < count:
        found = {type(part).__name__ for part in module.modules()}
        unknown = [name for name in classes if name not in found]
        hint = f" It has no {unknown[0]!r}.{nearest(unknown[0], found)}" if unknown else ""
        raise ConfigurationError(
            f"{type(module).__name__} has {len(names)} modules of the classes {list(classes)}, too few for {count} "
            f"stages.{hint} Use the classes of repeated blocks, or the name of the first module of each stage.",
        )
    return tuple(names[begin] for begin in _even_begins(sizes, count))


def lay_out(
    module: nn.Module, splits: Sequence[str], placed: Mapping[str, int] | None = None, argument: str = "pp_split"
) -> StageLayout:
    # `placed` has the stages that the user chose for modules or parameters.
    count = len(splits) + 1
    _check_splits(module, splits, argument)
    owners = {name: stage for name, stage, _ in _tensors_by_stage(module, splits)}
    for prefix, stage in (placed or {}).items():
        fits = [name for name in owners if name == prefix or name.startswith(f"{prefix}.")]
        if not fits or not -count <= stage < count:
            raise ConfigurationError(
                f"pp_place={{{prefix!r}: {stage}}} must name a module or parameter of {type(module).__name__} and one "
                f"of its {count} stages.{nearest(prefix, owners)}",
            )
        owners.update(dict.fromkeys(fits, stage % count))
    _refuse_shared(module, owners)
    return StageLayout(tuple(splits), owners, _stages_of_modules(module, splits, owners), argument)


def is_within(name: str, path: str) -> bool:
    # An empty path contains all names.
    return not path or name == path or name.startswith(f"{path}.")


def _check_splits(module: nn.Module, splits: Sequence[str], argument: str) -> None:
    known = [name for name, _ in module.named_modules(remove_duplicate=False)]
    for name in splits:
        if name not in known or not name:
            raise ConfigurationError(
                f"{argument} names {name!r}, which is not a module of {type(module).__name__}.{nearest(name, known)} "
                "Names are relative to the module that is split.",
            )
        if isinstance(module.get_submodule(name), nn.ModuleList | nn.ModuleDict):
            raise ConfigurationError(
                f"{argument} names {name!r}, a container that is never called. Use the first block of the stage "
                f"instead, such as {name}.0.",
            )
    order = [known.index(name) for name in splits]
    if order != sorted(set(order)):
        raise ConfigurationError(
            f"{argument}={list(splits)} must name different modules in the order in which they are registered.",
        )


def _tensors_by_stage(module: nn.Module, splits: Sequence[str]) -> Iterator[tuple[str, int, bool]]:
    # The last value is True for a parameter and False for a buffer.
    stage = 0

    def visit(part: nn.Module, path: str) -> Iterator[tuple[str, int, bool]]:
        nonlocal stage
        if path in splits:
            stage = splits.index(path) + 1
        prefix = f"{path}." if path else ""
        for name, parameter in part._parameters.items():
            if parameter is not None:
                yield prefix + name, stage, True
        for name, buffer in part._buffers.items():
            if buffer is not None:
                yield prefix + name, stage, False
        for name, child in part._modules.items():
            if child is not None:
                yield from visit(child, prefix + name)

    return visit(module, "")


def _refuse_shared(module: nn.Module, owners: Mapping[str, int]) -> None:
    first: dict[int, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        other = first.setdefault(id(parameter), name)
        if owners[other] != owners[name]:
            raise ConfigurationError(
                f"{other} and {name} are one parameter, but stages {owners[other]} and {owners[name]} would each hold "
                "it. Untie them, place both on one stage with pp_place, or use another strategy.",
            )


def _stages_of_modules(module: nn.Module, splits: Sequence[str], owners: Mapping[str, int]) -> dict[str, int]:
    # Without submodules that lie in several stages.
    found: dict[str, int] = {}
    for path, part in module.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        stages = {owners[prefix + name] for name, _ in part.named_parameters(remove_duplicate=False)}
        begins_inside = any(split != path and is_within(split, path) for split in splits)
        if path and len(stages) == 1 and not begins_inside:
            found[path] = stages.pop()
    return found


def _even_begins(sizes: Sequence[int], count: int) -> list[int]:
    # Divides the blocks into consecutive runs, with the largest sum as small as possible. Returns the indices at which
    # runs 1, 2, ... begin.
    total = len(sizes)
    # best[end, runs] divides sizes[:end]: the largest run, the sum of squared runs as a tie-breaker, the beginnings.
    best: dict[tuple[int, int], tuple[float, float, list[int]]] = {(0, 0): (0.0, 0.0, [])}
    for runs in range(1, count + 1):
        for end in range(runs, total - (count - runs) + 1):
            options = []
            for begin in range(runs - 1, end):
                if (begin, runs - 1) in best:
                    largest, squares, begins = best[(begin, runs - 1)]
                    size = sum(sizes[begin:end])
                    options.append((max(largest, size), squares + float(size) ** 2, [*begins, begin]))
            best[(end, runs)] = min(options)
    return best[(total, count)][2][1:]


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


# Tensors sent between stages, found by running the model once on tensors without values


@dataclass(frozen=True)
class TensorShape:
    """Shape and dtype of a tensor that a pipeline stage receives."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Returned:
    # Where a module's output contains a tensor.

    module: str
    call: int  # index of the module's call
    leaf: int  # index in the flattened output


@dataclass(frozen=True)
class Cut:
    """Description of the tensors that a pipeline stage receives from earlier stages in a forward pass.

    These are arguments of the stage's first module that depend on parameters, and outputs of modules of earlier stages
    that this stage or a later one also uses.

    Attributes:
        leaves: The number of values in the flattened arguments.
        places: For each of these values, the index of the sent tensor, or None for values that every stage has.
        tensors: The sent tensors.
        returned: For each sent tensor, the module output that it is, or None if it is only an argument.
    """

    leaves: int
    places: tuple[int | None, ...]
    tensors: tuple[TensorShape, ...]
    returned: tuple[Returned | None, ...]


@dataclass
class Route:
    """Description of the tensors that pipeline stages exchange in forward passes with given input shapes.

    Attributes:
        cuts: The values that each stage but the first receives.
        stand_ins: For each stage, the outputs of earlier stages' modules by name and call, with `TensorShape` for
            tensors.
    """

    cuts: dict[int, Cut] = field(default_factory=dict)
    stand_ins: dict[int, dict[str, list[Any]]] = field(default_factory=dict)


class ModelOutline:
    """Weightless copy of a model, whose forward is traced to find the tensors that stages must exchange.

    Each stage runs the model's own forward. Modules of earlier stages return zeros of the right shapes, the stage's
    first module gets the received values, and the next stage's first module ends the forward. If a later stage uses an
    output of an earlier module, or a value computed from it outside modules, that output is sent as well and replaces
    the zeros. This is correct if no other value that depends on parameters crosses stages. The class checks this by
    tracing every operation.
    """

    def __init__(self, module: nn.Module, layout: StageLayout, device: torch.device) -> None:
        self._layout = layout
        self._device = device
        self._name = type(module).__name__
        # Allow ordinary tensors too, because a model may have tensors that are neither parameters nor buffers.
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._owner_of: dict[int, tuple[int, str]] = {}
        self._skeleton = self._copy(module)
        self._modules = dict(self._skeleton.named_modules(remove_duplicate=False))

    def _copy(self, module: nn.Module) -> nn.Module:
        # Parameters and buffers become fake tensors, which have no data.
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
                f"{self._name} cannot be copied, which is necessary to find its stages ({type(error).__name__}: "
                f"{error}). Move objects that cannot be copied out of the module that is split.",
            ) from error

    def route(self, args: Sequence[Any], kwargs: dict[str, Any], training: bool) -> Route:
        # Runs the forward on shapes alone, to find the tensors that stages must exchange.
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
                    f"The forward of {self._name} cannot run on shapes alone, which is necessary to find its stages "
                    f"({type(error).__name__}: {str(error)[:400]}). It must not depend on the values in its tensors.",
                ) from error
            finally:
                for remove in removals:
                    remove()
        return trace.route

    def _without_values(self, tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)

    def _watch(self, trace: _Trace) -> list[Callable[[], None]]:
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


@dataclass(frozen=True)
class _Origin:
    """The pipeline stage that computed a traced tensor, and the module outputs used to compute the tensor.

    Attributes:
        stage: The stage that computed it.
        returned: The module outputs from which it was computed outside modules, if nothing else was used.
        lost: The reason why a later stage cannot compute it from them, or an empty string.
    """

    stage: int
    returned: frozenset[Returned] = frozenset()
    lost: str = ""


@dataclass
class _Entry:
    """Recorded arguments of a pipeline stage's first module, with marks on those sent by the stage before.

    Attributes:
        places: For each flattened argument, its index in `received`, or None if it does not depend on parameters.
        received: The tensors that the stage must receive.
    """

    places: list[int | None]
    received: list[Tensor]


class _Trace(TorchDispatchMode):
    """Dispatch mode that records a model's forward, to find the tensors that each stage must receive."""

    def __init__(self, name: str, layout: StageLayout, owner_of: dict[int, tuple[int, str]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._name, self._layout, self._owner_of = name, layout, owner_of
        self._stage = 0
        self._made_in = WeakTensorKeyDictionary()
        self._drawn = WeakTensorKeyDictionary()  # random values that do not depend on parameters
        self._open: list[str] = []
        self._calls: dict[str, int] = {}
        self._entries: dict[int, _Entry] = {}
        self._tensors: dict[Returned, Tensor] = {}
        self._last_use: dict[Returned, tuple[int, str]] = {}
        self._in_memory: dict[int, list[Returned]] = {}
        self._written: set[Returned] = set()
        self.route = Route(stand_ins={stage: {} for stage in range(layout.count)})

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_drawn = torch.Tag.nondeterministic_seeded in func.tags
        origins: list[_Origin] = []
        given = () if func.overloadpacket in _OF_SHAPES_ONLY else pytree.tree_leaves((args, kwargs))
        for leaf in (leaf for leaf in given if isinstance(leaf, Tensor)):
            is_drawn = is_drawn or leaf in self._drawn
            if id(leaf) in self._owner_of:
                owner, name = self._owner_of[id(leaf)]
                if owner != self._stage:
                    raise ConfigurationError(
                        f"{self._name} uses {name} in stage {self._stage}, but the order in which modules are "
                        f"registered places it on stage {owner}. Register it where it is used, or set pp_place="
                        f"{{{name!r}: {self._stage}}}. A parameter that two stages use cannot be split.",
                    )
                # Later stages do not have this parameter, and cannot compute the value from what they receive.
                origins.append(_Origin(self._stage, lost=f"was computed from {name} outside of its module"))
            elif leaf in self._made_in:
                self._use(self._made_in[leaf], f"by {func}")
                origins.append(self._made_in[leaf])
        output = func(*args, **kwargs)
        # Arguments that an in-place operation writes to are results as well.
        changed = [args[i] for i, a in enumerate(func._schema.arguments[: len(args)]) if _is_written(a)]
        results = [leaf for leaf in pytree.tree_leaves((output, changed)) if isinstance(leaf, Tensor)]
        for leaf in results if changed else ():
            self._written.update(self._in_memory.get(_memory(leaf), ()))
        origin = self._joined(origins, is_drawn)
        for leaf in results if origins else ():
            self._made_in[leaf] = origin
        for leaf in results if is_drawn and not origins else ():
            self._drawn[leaf] = True
        return output

    def _joined(self, origins: Sequence[_Origin], is_drawn: bool) -> _Origin:
        lost = next((each.lost for each in origins if each.lost), "was drawn at random" if is_drawn else "")
        return _Origin(self._stage, frozenset().union(*(each.returned for each in origins)), lost)

    def _use(self, origin: _Origin, where: str) -> None:
        # Raises an error if the stage that computed the tensor cannot send it.
        if origin.stage == self._stage:
            return
        if origin.lost:
            self._refuse(origin.stage, self._stage, where, origin.lost)
        for each in origin.returned:
            if each not in self._last_use or self._last_use[each][0] < self._stage:
                self._last_use[each] = self._stage, where

    def _refuse(self, made_in: int, used_in: int, where: str, why: str) -> None:
        raise ConfigurationError(
            f"{self._name} uses a value of stage {made_in} in stage {used_in} ({where}) that {why}. A stage can send "
            f"only arguments of {self._layout.splits[used_in - 1]}, the first module of the next stage, and outputs "
            "of modules. Pass the value through the blocks, compute it in a module, or split elsewhere with "
            f"{self._layout.argument}=[...].",
        )

    def entry_hook(self, stage: int, name: str) -> Callable[..., Any]:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
            self._check_entry(stage, name)
            leaves, spec = pytree.tree_flatten((args, kwargs))
            numbers: dict[int, int] = {}
            entry = _Entry([], [])
            for leaf in leaves:
                if not (isinstance(leaf, Tensor) and leaf in self._made_in):
                    entry.places.append(None)
                    continue
                self._use(self._made_in[leaf], f"in the call of {name}")
                if id(leaf) not in numbers:
                    numbers[id(leaf)] = len(entry.received)
                    entry.received.append(leaf)
                entry.places.append(numbers[id(leaf)])
            if not entry.received:
                raise ConfigurationError(f"No stage can begin at {name}, which receives nothing from the previous one.")
            self._entries[stage] = entry
            self._stage = stage
            # Values of earlier stages enter this one only through received tensors, which have no history.
            fresh = [torch.empty(each.shape, dtype=each.dtype, device=each.device) for each in entry.received]
            for tensor in fresh:
                self._made_in[tensor] = _Origin(stage, lost=f"is an argument of {name}")
            given = [leaf if place is None else fresh[place] for leaf, place in zip(leaves, entry.places, strict=True)]
            return pytree.tree_unflatten(given, spec)

        return enter

    def _check_entry(self, stage: int, name: str) -> None:
        if self._stage != stage - 1:
            order = list(self._layout.splits)
            raise ConfigurationError(
                f"{self._name} must call the first modules of its stages once each and in the order {order}, but it "
                f"called {name} in stage {self._stage}. Split elsewhere with {self._layout.argument}=[...].",
            )
        if _is_checkpointed():
            raise ConfigurationError(
                f"{self._name} calls {name}, the first module of a stage, through torch.utils.checkpoint, which would "
                "run it again with other values. Use checkpoints inside the block, or let the strategy do it.",
            )

    def call_hooks(self, name: str) -> tuple[Callable[..., None], Callable[..., None]]:
        owner = self._layout.modules[name]

        def begin(module: nn.Module, args: Any) -> None:
            self._open.append(name)

        def end(module: nn.Module, args: Any, output: Any) -> None:
            self._open.pop()
            number = self._calls[name] = self._calls.get(name, -1) + 1
            shapes = pytree.tree_map_only(Tensor, _shape, output)
            for stage in range(owner + 1, self._layout.count):
                # A stage replaces an enclosing module of another stage as a whole, and does not call modules within.
                if not any(self._layout.modules[outer] != stage for outer in self._open):
                    self.route.stand_ins[stage].setdefault(name, []).append(shapes)
            # Only the outermost module's output is visible to the rest of the model.
            if not self._open:
                stood_in_for = self.route.stand_ins.get(owner + 1, {}).get(name, [])
                lost = "" if number == len(stood_in_for) - 1 else f"{name} returned, which other modules call too"
                for index, leaf in enumerate(pytree.tree_leaves(output)):
                    if isinstance(leaf, Tensor):
                        returned = Returned(name, number, index)
                        self._tensors[returned] = leaf
                        self._made_in[leaf] = _Origin(owner, frozenset([returned]), lost)
                        self._in_memory.setdefault(_memory(leaf), []).append(returned)

        return begin, end

    def finish(self, output: Any) -> None:
        if self._stage != self._layout.count - 1:
            raise ConfigurationError(
                f"{self._name} never called {self._layout.splits[self._stage]}, the first module of a stage. Split "
                f"elsewhere with {self._layout.argument}=[...].",
            )
        for leaf in pytree.tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf in self._made_in:
                self._use(self._made_in[leaf], "in what it returns")
        for each, (stage, where) in self._last_use.items():
            if each in self._written:
                self._refuse(self._owner(each), stage, where, "was changed in place after a module had returned it")
        for stage, entry in self._entries.items():
            self.route.cuts[stage] = self._cut(stage, entry)

    def _owner(self, returned: Returned) -> int:
        return self._layout.modules[returned.module]

    def _cut(self, stage: int, entry: _Entry) -> Cut:
        passing = [each for each, (last, _) in self._last_use.items() if self._owner(each) < stage <= last]
        returned: list[Returned | None] = []
        shapes: list[TensorShape] = []
        for tensor in entry.received:
            same = [each for each in passing if self._tensors[each] is tensor]
            returned.append(same[0] if same else None)
            shapes.append(_shape(tensor))
        besides = [each for each in passing if each not in returned]
        tensors = (*shapes, *(_shape(self._tensors[each]) for each in besides))
        return Cut(len(entry.places), tuple(entry.places), tensors, (*returned, *besides))


# Operations whose result depends only on the shapes of their arguments.
_OF_SHAPES_ONLY = {
    *(getattr(torch.ops.aten, f"{name}_like") for name in ("empty", "zeros", "ones", "full", "rand", "randn")),
    *(getattr(torch.ops.aten, f"new_{name}") for name in ("empty", "zeros", "ones", "full")),
}


def _shape(tensor: Tensor) -> TensorShape:
    return TensorShape(tuple(tensor.shape), tensor.dtype)


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _is_checkpointed() -> bool:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == checkpointing.__file__:
            return True
        frame = frame.f_back
    return False


def signature_of(args: Sequence[Any], kwargs: dict[str, Any], training: bool) -> Any:
    leaves, spec = pytree.tree_flatten((tuple(args), kwargs))
    known = tuple(_outline(leaf) for leaf in leaves)
    # Autocast changes the dtypes of the tensors that stages exchange.
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


__all__ = ["Cut", "ModelOutline", "Returned", "Route", "TensorShape", "is_within", "signature_of"]
