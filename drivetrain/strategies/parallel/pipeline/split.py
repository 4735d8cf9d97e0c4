"""Which part of a model each stage of a pipeline holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from drivetrain.runtime.errors import ConfigurationError, nearest


@dataclass(frozen=True)
class StageLayout:
    """How the parts of a module are spread over stages.

    A part belongs to the stage whose first module was registered last before it: modules are registered in the order
    in which their forward uses them, or else `placed` gives where they belong.

    Attributes:
        splits: Names of the modules that stages 1, 2, ... begin with.
        owners: Stage of each parameter and buffer, by name.
        modules: Stage of each submodule that has parameters of one stage only, by name.
        argument: What users name `splits` with, for errors.
    """

    splits: tuple[str, ...]
    owners: Mapping[str, int]
    modules: Mapping[str, int]
    argument: str = "pp_split"

    @property
    def count(self) -> int:
        """Number of stages."""
        return len(self.splits) + 1


def find_pipelined(model: nn.Module, name: str | None) -> str:
    """The name of the module that is spread over stages: the one child that holds most of the parameters.

    Args:
        model: The model or the task.
        name: What the user gives, "" for the model itself.

    Raises:
        ConfigurationError: There is no such module, or none that can be chosen.
    """
    known = {path for path, _ in model.named_modules()}
    if name is not None:
        if name not in known:
            raise ConfigurationError(
                f"pp_module={name!r} is no module of {type(model).__name__}. It has: "
                f"{', '.join(sorted(path for path, _ in model.named_children()))}.{nearest(name, known)}",
                code="DT-043",
            )
        return name
    sizes = {path: _size(child) for path, child in model.named_children()}
    largest = max(sizes, key=lambda path: sizes[path], default="")
    if not largest or not sizes[largest]:
        raise ConfigurationError(
            f"{type(model).__name__} has no module with parameters to spread over stages.", code="DT-044"
        )
    if 2 * sizes[largest] > _size(model):
        # A list is never called: the model itself goes through its blocks.
        return "" if isinstance(model.get_submodule(largest), nn.ModuleList | nn.ModuleDict) else largest
    holders = ", ".join(path for path, size in sizes.items() if size)
    raise ConfigurationError(
        f"{type(model).__name__} has several modules with parameters: {holders}. Say which one is spread over stages, "
        'with pp_module= ("" for the whole, if its steps call self(...)), or put all into one module that they call.',
        code="DT-059",
    )


def choose_splits(
    module: nn.Module, count: int, classes: Sequence[str] = (), argument: str = "pp_split"
) -> tuple[str, ...]:
    """Where stages begin so that they hold about equally many parameters of the blocks that repeat.

    Args:
        module: The module to split; its largest `ModuleList` or `Sequential` holds the blocks. In a model of
            transformers with an encoder and a decoder, the largest of each does.
        count: Number of stages.
        classes: Names of the blocks' classes, where they are known.
        argument: What the caller's users name modules with.

    Raises:
        ConfigurationError: It has too few blocks.
    """
    if classes:
        return _splits_between(module, count, classes)
    lists = {
        path: part
        for path, part in module.named_modules()
        if isinstance(part, nn.ModuleList | nn.Sequential) and len(part) > 1
    }
    if not lists:
        raise ConfigurationError(
            f"{type(module).__name__} holds no ModuleList or Sequential of blocks to spread over {count} stages. Name "
            f"the modules that stages begin with: {argument}=[...].",
            code="DT-044",
        )
    path = max(lists, key=lambda name: (_size(lists[name]), -len(name)))
    if getattr(getattr(module, "config", None), "is_encoder_decoder", False):
        pair = _encoder_and_decoder(lists, path)
        return _splits_between(module, count, [type(block).__name__ for each in pair for block in lists[each]], pair)
    blocks = list(lists[path].named_children())
    if len(blocks) < count:
        raise ConfigurationError(
            f"{path or type(module).__name__} has {len(blocks)} blocks, too few for {count} stages (processes along "
            f"pp x pp_stages_per_rank). Use fewer stages, or name their first modules with {argument}=[...].",
            code="DT-044",
        )
    begins = _even_begins([_size(block) for _, block in blocks], count)
    return tuple(f"{path}.{blocks[begin][0]}" if path else blocks[begin][0] for begin in begins)


def _encoder_and_decoder(lists: Mapping[str, nn.ModuleList | nn.Sequential], path: str) -> list[str]:
    """The largest list of blocks, and the largest one that is not within it or around it."""
    others = [each for each in lists if not is_within(each, path) and not is_within(path, each)]
    return [path, *sorted(others, key=lambda name: -_size(lists[name]))[:1]]


def _splits_between(
    module: nn.Module, count: int, classes: Sequence[str], within: Sequence[str] = ("",)
) -> tuple[str, ...]:
    """Where stages begin if each begins with a module of one of these classes."""
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
            f"stages.{hint} Name classes of blocks that repeat, or the modules that stages begin with.",
            code="DT-044",
        )
    return tuple(names[begin] for begin in _even_begins(sizes, count))


def lay_out(
    module: nn.Module, splits: Sequence[str], placed: Mapping[str, int] | None = None, argument: str = "pp_split"
) -> StageLayout:
    """Assign every parameter, buffer and submodule to a stage.

    Args:
        module: The module to split.
        splits: Names of the modules that stages 1, 2, ... begin with, in the order of the forward.
        placed: Stages of modules or parameters that the order of registration has wrong; negative from the end.
        argument: What the caller's users name `splits` with.

    Raises:
        ConfigurationError: A name is unknown, their order is not that of the model, or stages share a parameter.
    """
    count = len(splits) + 1
    _check_splits(module, splits, argument)
    owners = {name: stage for name, stage, _ in _walk(module, splits)}
    for prefix, stage in (placed or {}).items():
        fits = [name for name in owners if name == prefix or name.startswith(f"{prefix}.")]
        if not fits or not -count <= stage < count:
            raise ConfigurationError(
                f"pp_place={{{prefix!r}: {stage}}} must name a module or parameter of {type(module).__name__} and one "
                f"of its {count} stages.{nearest(prefix, owners)}",
                code="DT-043",
            )
        owners.update(dict.fromkeys(fits, stage % count))
    _refuse_shared(module, owners)
    return StageLayout(tuple(splits), owners, _stages_of_modules(module, splits, owners), argument)


def is_within(name: str, path: str) -> bool:
    """Whether a dotted name is that of a module, or of something in it."""
    return not path or name == path or name.startswith(f"{path}.")


def _check_splits(module: nn.Module, splits: Sequence[str], argument: str) -> None:
    known = [name for name, _ in module.named_modules(remove_duplicate=False)]
    for name in splits:
        if name not in known or not name:
            raise ConfigurationError(
                f"{argument} names {name!r}, which is no module of {type(module).__name__}.{nearest(name, known)} "
                "Names are relative to the module that is split.",
                code="DT-043",
            )
        if isinstance(module.get_submodule(name), nn.ModuleList | nn.ModuleDict):
            raise ConfigurationError(
                f"{argument} names {name!r}, a container that is never called. Name the block in it that a stage "
                f"begins with, such as {name}.0.",
                code="DT-059",
            )
    order = [known.index(name) for name in splits]
    if order != sorted(set(order)):
        raise ConfigurationError(
            f"{argument}={list(splits)} must name different modules in the order in which they are registered.",
            code="DT-059",
        )


def _walk(module: nn.Module, splits: Sequence[str]) -> Iterator[tuple[str, int, bool]]:
    """Parameters and buffers in the order of registration, each with its stage and whether it is a parameter."""
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
                "it. A pipeline needs them apart: untie them, place both on one stage with pp_place=, or use another "
                "strategy.",
                code="DT-054",
            )


def _stages_of_modules(module: nn.Module, splits: Sequence[str], owners: Mapping[str, int]) -> dict[str, int]:
    """Stages of the submodules that have parameters of one stage only and in which no other stage begins."""
    found: dict[str, int] = {}
    for path, part in module.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        stages = {owners[prefix + name] for name, _ in part.named_parameters(remove_duplicate=False)}
        begins_inside = any(split != path and is_within(split, path) for split in splits)
        if path and len(stages) == 1 and not begins_inside:
            found[path] = stages.pop()
    return found


def _even_begins(sizes: Sequence[int], count: int) -> list[int]:
    """Where runs 1, 2, ... begin if the largest of `count` runs of these sizes is to be as small as possible."""
    total = len(sizes)
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
