"""Tensor and sequence parallelism: layers split over processes by a plan of module names.

The styles are torch's (`torch.distributed.tensor.parallel`). What is added here: plans are checked before anything is
split, by names and by sizes; frozen parameters stay frozen and tied ones tied; and gradients that are sums over
processes are added up before anybody reads them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from drivetrain.runtime.errors import ConfigurationError, nearest
from drivetrain.runtime.nested import recursively_apply
from drivetrain.strategies.parallel.attention_sharding import let_attention_run_split

Colwise = ColwiseParallel
Rowwise = RowwiseParallel

Plan = Mapping[str, ParallelStyle | str]

__all__ = [
    "Colwise",
    "ParallelStyle",
    "Plan",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "Replicate",
    "Rowwise",
    "SequenceParallel",
    "Shard",
    "PlanMatch",
    "apply_plan",
    "plan_matches",
    "plan_of_model",
    "whole_outputs_without_gradients",
]

# Names as in the plans that transformers' models carry; None: the module stays as it is on every process.
_STYLES: dict[str, Any] = {
    "colwise": lambda: ColwiseParallel(),
    "rowwise": lambda: RowwiseParallel(),
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    "sequence_parallel": lambda: SequenceParallel(),
    "replicate": lambda: None,
}
_HEADS = ("num_heads", "n_heads", "n_head", "num_attention_heads", "num_key_value_heads", "num_kv_heads", "n_kv_heads")


def plan_of_model(module: nn.Module) -> dict[str, str]:
    """The plan that a model carries, as those of transformers do.

    Args:
        module: The model, or a task that holds it.

    Returns:
        Names of styles by pattern, relative to `module`.

    Raises:
        ConfigurationError: Neither it nor anything in it carries one.
    """
    for name, part in module.named_modules():
        plan = getattr(part, "tp_plan", None) or getattr(part, "_tp_plan", None)
        if isinstance(plan, Mapping) and plan:
            return {f"{name}.{pattern}" if name else pattern: style for pattern, style in plan.items()}
    raise ConfigurationError(
        f"tp_plan='auto' takes the plan that the model carries, but {type(module).__name__} has no tp_plan, nor has "
        'anything in it. Give one: tp_plan={"layers.*.attention.wq": Colwise(), "layers.*.attention.wo": Rowwise()}.',
        code="DT-057",
    )


@dataclass(frozen=True)
class PlanMatch:
    """One module that a plan splits."""

    name: str
    module: nn.Module
    style: ParallelStyle


def apply_plan(module: nn.Module, mesh: DeviceMesh, plan: Plan, elsewhere: frozenset[int] = frozenset()) -> nn.Module:
    """Split a module's layers over processes, in place.

    Args:
        module: The model, or the task that holds it: patterns are taken from the outermost module in which all match.
        mesh: The processes that share each layer.
        plan: Styles by pattern of module names; `*` stands for one part of a name.
        elsewhere: The `id` of modules that other stages of a pipeline compute, which stay as they are.

    Returns:
        The module that the patterns' names begin in.

    Raises:
        ConfigurationError: A pattern matches nothing, a size is no multiple of the processes, or a tied parameter would
            be split in two ways.
    """
    let_attention_run_split()
    root, matches = _matches(module, plan)
    _check_sizes(module, matches, mesh.size())
    before = dict(module.named_parameters(remove_duplicate=False))
    for match in matches:
        if id(match.module) in elsewhere:
            continue
        try:
            parallelize_module(match.module, mesh, match.style, src_data_rank=None)
        except NotImplementedError:
            raise ConfigurationError(
                f"{type(match.style).__name__} splits nn.Linear and nn.Embedding, but {match.name!r} is a "
                f"{type(match.module).__name__}. Name the layers inside it.",
                code="DT-057",
            ) from None
    for name, parameter in module.named_parameters(remove_duplicate=False):
        parameter.requires_grad_(before[name].requires_grad)
    _tie_again(module, before)
    for parameter in module.parameters():
        if isinstance(parameter, DTensor) and parameter.requires_grad and not parameter.placements[0].is_shard():
            parameter.register_hook(_AddUp(parameter.placements))  # type: ignore[no-untyped-call]
    return root


def plan_matches(module: nn.Module, plan: Plan, count: int) -> list[PlanMatch]:
    """The modules that a plan splits.

    Args:
        module: The model, or the task that holds it.
        plan: Styles by pattern of module names.
        count: Over how many each is split.

    Raises:
        ConfigurationError: A pattern matches nothing, or a size is no multiple of `count`.
    """
    _, matches = _matches(module, plan)
    _check_sizes(module, matches, count)
    return matches


def whole_outputs_without_gradients(module: nn.Module) -> None:
    """Let a module return plain tensors in evaluation, also where a loss in training wants them split by class."""

    def make_whole(module: nn.Module, inputs: Any, output: Any) -> Any:
        if torch.is_grad_enabled():
            return output
        return recursively_apply(lambda t: t.full_tensor() if isinstance(t, DTensor) else t, output)

    module.register_forward_hook(make_whole)


class _AddUp:
    """Brings a gradient into its parameter's placements: that of a layer that saw parts of sequences is a sum."""

    def __init__(self, placements: tuple[Placement, ...]) -> None:
        self.placements = placements

    def __call__(self, gradient: Tensor) -> Tensor:
        if isinstance(gradient, DTensor) and gradient.placements != self.placements:
            return gradient.redistribute(placements=self.placements)
        return gradient


def _matches(module: nn.Module, plan: Plan) -> tuple[nn.Module, list[PlanMatch]]:
    """The outermost module in which a plan's names begin, and those that it names, each with its style."""
    roots = [("", module), *((name, part) for name, part in module.named_modules() if name and name.count(".") < 2)]
    for prefix, root in roots:
        names = dict(root.named_modules())
        by_pattern = {pattern: [name for name in names if _pattern(pattern).fullmatch(name)] for pattern in plan}
        if all(by_pattern.values()):
            return root, [
                PlanMatch(f"{prefix}.{name}" if prefix else name, names[name], style)
                for pattern, given in plan.items()
                for name in by_pattern[pattern]
                if (style := _style(pattern, given)) is not None
            ]
    raise ConfigurationError(_no_match(module, plan), code="DT-057")


def _no_match(module: nn.Module, plan: Plan) -> str:
    """The message about the patterns that match nothing in the root where most match."""
    roots = [module, *(part for name, part in module.named_modules() if name and name.count(".") < 2)]
    missing: list[list[str]] = []
    for root in roots:
        names = [name for name, _ in root.named_modules()]
        missing.append([p for p in plan if not any(_pattern(p).fullmatch(name) for name in names)])
    best = min(range(len(roots)), key=lambda index: len(missing[index]))
    names = sorted({re.sub(r"\.\d+(?=\.|$)", ".*", name) for name, _ in roots[best].named_modules() if name})
    hints = "".join(nearest(pattern, names) for pattern in missing[best][:1])
    shown = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
    return (
        f"tp_plan has patterns that match no module of {type(roots[best]).__name__}: "
        f"{', '.join(map(repr, missing[best]))}.{hints} Its modules: {shown}."
    )


def _pattern(pattern: str) -> re.Pattern[str]:
    """A pattern of names; `*` is one part, or some letters of one."""
    return re.compile("".join("[^.]*" if piece == "*" else re.escape(piece) for piece in re.split(r"(\*)", pattern)))


def _style(pattern: str, given: Any) -> ParallelStyle | None:
    if isinstance(given, ParallelStyle):
        return given
    if isinstance(given, str) and given in _STYLES:
        style: ParallelStyle | None = _STYLES[given]()
        return style
    raise ConfigurationError(
        f"tp_plan[{pattern!r}] is {given!r}. Allowed: a style such as Colwise() or Rowwise(), or one of "
        f"{', '.join(_STYLES)}.{nearest(given, _STYLES) if isinstance(given, str) else ''}",
        code="DT-001",
    )


def _check_sizes(module: nn.Module, matches: list[PlanMatch], count: int) -> None:
    """Raise where a size is not a multiple of the number of processes."""
    modules = dict(module.named_modules())
    for match in matches:
        for what, size in _split_sizes(match):
            if size % count:
                raise ConfigurationError(
                    f"{match.name!r} has {what} {size}, which tp={count} does not divide. Choose a tp that does, "
                    f"change the size (the next that works is {-(-size // count) * count}), or leave it out of the "
                    "plan.",
                    code="DT-042",
                )
        if isinstance(match.style, ColwiseParallel):
            parent = match.name.rpartition(".")[0]
            for what, size in _heads(modules[parent]):
                if size % count:
                    raise ConfigurationError(
                        f"{parent!r} has {what}={size}, which tp={count} does not divide, so its heads cannot be "
                        "split over processes. Choose a tp that does.",
                        code="DT-042",
                    )


def _split_sizes(match: PlanMatch) -> Iterator[tuple[str, int]]:
    layer, style = match.module, match.style
    if isinstance(style, ColwiseParallel):
        if isinstance(layer, nn.Linear):
            yield "out_features", layer.out_features
        elif isinstance(layer, nn.Embedding):
            yield "embedding_dim", layer.embedding_dim
    elif isinstance(style, RowwiseParallel):
        if isinstance(layer, nn.Linear):
            yield "in_features", layer.in_features
        elif isinstance(layer, nn.Embedding):
            yield "num_embeddings", layer.num_embeddings


def _heads(attention: nn.Module) -> Iterator[tuple[str, int]]:
    for owner in (attention, getattr(attention, "config", None)):
        for name in _HEADS:
            size = getattr(owner, name, None)
            if isinstance(size, int):
                yield name, size


def _tie_again(module: nn.Module, before: dict[str, nn.Parameter]) -> None:
    """Make parameters one that were one before."""
    groups: dict[int, list[str]] = defaultdict(list)
    for name, parameter in before.items():
        groups[id(parameter)].append(name)
    for names in groups.values():
        parts = [(name, module.get_parameter(name)) for name in names]
        first = parts[0][1]
        for name, parameter in parts[1:]:
            if _placement(parameter) != _placement(first):
                raise ConfigurationError(
                    f"{names[0]!r} and {name!r} are one tied parameter, but tp_plan places them as {_placement(first)} "
                    f"and {_placement(parameter)}. Split both alike: an embedding by Rowwise(), its head by Colwise().",
                    code="DT-054",
                )
            owner, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(owner), leaf, first)


def _placement(parameter: Tensor) -> str:
    return str(parameter.placements[0]) if isinstance(parameter, DTensor) else "a whole copy on each process"
