"""Tensor and sequence parallelism: layers that are split over processes by a plan of module names.

The styles are those of `torch.distributed.tensor.parallel`. This module adds checks of a plan's names and sizes before
any layer is split. It keeps frozen parameters frozen and tied parameters tied. Gradients that are partial sums are
reduced before they are used.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
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
    loss_parallel,
    parallelize_module,
)
from torch.optim import Optimizer

from drivetrain.runtime.devices import DeviceKind
from drivetrain.runtime.errors import ConfigurationError, nearest
from drivetrain.runtime.pytrees import recursively_apply
from drivetrain.strategies.base import local_part
from drivetrain.strategies.parallel.context import register_attention_sharding

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

# Style names used by plans in transformers' models. None leaves the module replicated.
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
    """Return the tensor-parallel plan that a model defines in `tp_plan` or `_tp_plan`."""
    for name, part in module.named_modules():
        plan = getattr(part, "tp_plan", None) or getattr(part, "_tp_plan", None)
        if isinstance(plan, Mapping) and plan:
            return {f"{name}.{pattern}" if name else pattern: style for pattern, style in plan.items()}
    raise ConfigurationError(
        f"tp_plan='auto' uses a model's own plan, but neither {type(module).__name__} nor its submodules have a "
        'tp_plan. Pass one: tp_plan={"layers.*.attention.wq": Colwise(), "layers.*.attention.wo": Rowwise()}.',
        see="parallel.md",
    )


@dataclass(frozen=True)
class PlanMatch:
    name: str
    module: nn.Module
    style: ParallelStyle


def apply_plan(module: nn.Module, mesh: DeviceMesh, plan: Plan, elsewhere: frozenset[int] = frozenset()) -> nn.Module:
    # Returns the submodule in which the plan's names begin. Modules with ids in `elsewhere` are skipped.
    register_attention_sharding()
    root, matches = _matches(module, plan)
    _check_sizes(module, matches, mesh.size())
    before = dict(module.named_parameters(remove_duplicate=False))
    for match in matches:
        if id(match.module) in elsewhere:
            continue
        try:
            # None: every rank has all values already and keeps its shard of them, without communication.
            parallelize_module(match.module, mesh, match.style, src_data_rank=None)
        except NotImplementedError:
            raise ConfigurationError(
                f"{type(match.style).__name__} splits nn.Linear and nn.Embedding, but {match.name!r} is a "
                f"{type(match.module).__name__}. Name the layers inside it.",
                see="parallel.md",
            ) from None
    # `parallelize_module` makes new parameters: restore frozen ones, then ties, before hooks are registered.
    for name, parameter in module.named_parameters(remove_duplicate=False):
        parameter.requires_grad_(before[name].requires_grad)
    _tie_again(module, before)
    for parameter in module.parameters():
        if isinstance(parameter, DTensor) and parameter.requires_grad and not parameter.placements[0].is_shard():
            parameter.register_hook(_AddUp(parameter.placements))  # type: ignore[no-untyped-call]
    return root


def plan_matches(module: nn.Module, plan: Plan, count: int) -> list[PlanMatch]:
    _, matches = _matches(module, plan)
    _check_sizes(module, matches, count)
    return matches


def whole_outputs_without_gradients(module: nn.Module) -> None:
    def make_whole(module: nn.Module, inputs: Any, output: Any) -> Any:
        if torch.is_grad_enabled():
            return output
        return recursively_apply(lambda t: t.full_tensor() if isinstance(t, DTensor) else t, output)

    module.register_forward_hook(make_whole)


class _AddUp:
    # A gradient hook for replicated parameters. Layers that process only a part of each sequence have partial
    # gradients, which are summed.

    def __init__(self, placements: tuple[Placement, ...]) -> None:
        self.placements = placements

    def __call__(self, gradient: Tensor) -> Tensor:
        if isinstance(gradient, DTensor) and gradient.placements != self.placements:
            return gradient.redistribute(placements=self.placements)
        return gradient


def _matches(module: nn.Module, plan: Plan) -> tuple[nn.Module, list[PlanMatch]]:
    # Also returns the module to which the names in the plan are relative.
    # A plan may have been written for the inner model, whose names lack up to two leading components.
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
    raise ConfigurationError(_no_match(module, plan), see="parallel.md")


def _no_match(module: nn.Module, plan: Plan) -> str:
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
    # `*` matches one part of a dotted module name, such as the number of a layer.
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
    )


def _check_sizes(module: nn.Module, matches: list[PlanMatch], count: int) -> None:
    modules = dict(module.named_modules())
    for match in matches:
        for what, size in _split_sizes(match):
            if size % count:
                raise ConfigurationError(
                    f"{match.name!r} has {what}={size}, which is not divisible by tp={count}. Choose another tp, "
                    f"change the size (for example to {-(-size // count) * count}), or remove it from the plan.",
                )
        if isinstance(match.style, ColwiseParallel):
            # A projection belongs to an attention module, which has the number of heads.
            parent = match.name.rpartition(".")[0]
            for what, size in _heads(modules[parent]):
                if size % count:
                    raise ConfigurationError(
                        f"{parent!r} has {what}={size}, which is not divisible by tp={count}, so its heads cannot be "
                        "split over processes. Choose another tp.",
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
    # `before` has the parameters by name, as they were before the layers were split.
    groups: dict[int, list[str]] = defaultdict(list)
    for name, parameter in before.items():
        groups[id(parameter)].append(name)
    for names in groups.values():
        parts = [(name, module.get_parameter(name)) for name in names]
        first = parts[0][1]
        for name, parameter in parts[1:]:
            if _placement(parameter) != _placement(first):
                raise ConfigurationError(
                    f"{names[0]!r} and {name!r} are one tied parameter, but tp_plan places them as "
                    f"{_placement(first)} and {_placement(parameter)}. Split both in the same way: an embedding with "
                    "Rowwise(), its head with Colwise().",
                )
            owner, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(owner), leaf, first)


def _placement(parameter: Tensor) -> str:
    return str(parameter.placements[0]) if isinstance(parameter, DTensor) else "a whole copy on each process"


# Consistency of replicated values: random state and gradients


# Copies of a gradient are computed alike, so real differences are far above this relative tolerance.
_TOLERANCE = 1e-3


def share_random_state(mesh: DeviceMesh, kind: DeviceKind) -> None:
    """Copy the CPU and device random state of a mesh's first rank to the others, so that dropout masks match."""
    group = mesh.get_group()
    states = [torch.get_rng_state(), None if kind.name == "cpu" else kind.get_rng_state()]
    dist.broadcast_object_list(states, src=dist.get_global_rank(group, 0), group=group)
    assert states[0] is not None
    torch.set_rng_state(states[0])
    if states[1] is not None:
        kind.set_rng_state(states[1])


class CopyCheck:
    # Parameters that are not split must have equal gradients on all tensor-parallel processes.

    def __init__(self, mesh: DeviceMesh, model: nn.Module) -> None:
        self._mesh = mesh
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}

    def check(self, optimizer: Optimizer) -> None:
        copies = [
            (self._names.get(id(parameter), "?"), parameter.grad)
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None and not self._is_split(parameter)
        ]
        if not copies:
            return
        # Norms suffice to detect different gradients, and need one small collective.
        norms = torch.stack([local_part(gradient).detach().float().norm() for _, gradient in copies])
        every = norms.new_empty(self._mesh.size(), len(copies))
        dist.all_gather(list(every.unbind()), norms, group=self._mesh.get_group())
        gap = (every - every[0]).abs().amax(0) > _TOLERANCE * every.amax(0)
        wrong = [name for (name, _), differs in zip(copies, gap.tolist(), strict=True) if differs]
        if wrong:
            shown = ", ".join(wrong[:6]) + (f" and {len(wrong) - 6} more" if len(wrong) > 6 else "")
            raise ConfigurationError(
                f"The gradients of {shown} differ between the {self._mesh.size()} tensor-parallel processes, which "
                "hold copies of these parameters that must stay equal. Add modules that see part of a sequence to "
                "tp_plan as SequenceParallel(). Dropout on full activations must be equal on all processes, so do "
                "not use a separate generator for it.",
            )

    def _is_split(self, parameter: Tensor) -> bool:
        if not isinstance(parameter, DTensor):
            return False
        names = parameter.device_mesh.mesh_dim_names or ()
        placements = dict(zip(names, parameter.placements, strict=True))
        return "tp" in placements and not placements["tp"].is_replicate()


# Cross entropy of logits that are sharded by class (Megatron-LM, https://arxiv.org/abs/1909.08053)


aten = torch.ops.aten

_FORWARD = (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
_BACKWARD = (aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)


class LossParallel:
    """Switch that makes `F.cross_entropy` accept logits whose classes are split over processes.

    Torch's `loss_parallel` returns DTensor losses, which cannot be combined with plain tensors. This class returns
    plain losses, so that a task can weigh, log and add them as usual.
    """

    def __init__(self) -> None:
        self._context: AbstractContextManager[Any] | None = None

    def enable(self) -> None:
        if self._context is not None:
            return
        self._context = loss_parallel()
        self._context.__enter__()
        # The context has registered handlers for DTensor losses, which are wrapped to use plain ones.
        handlers = _handlers()
        for op in _FORWARD:
            handlers[op] = _with_plain_loss(handlers[op])
        for op in _BACKWARD:
            handlers[op] = _from_plain_loss(handlers[op])

    def disable(self) -> None:
        if self._context is not None:
            self._context.__exit__(None, None, None)
            self._context = None


def _handlers() -> dict[Any, Callable[..., Any]]:
    handlers: dict[Any, Callable[..., Any]] = DTensor._op_dispatcher._custom_op_handlers
    return handlers


def _with_plain_loss(handler: Callable[..., Any]) -> Callable[..., Any]:
    def forward(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        loss, weight = handler(op, args, kwargs)
        return loss.to_local(), weight

    return forward


def _from_plain_loss(handler: Callable[..., Any]) -> Callable[..., Any]:
    def backward(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        gradient, logits, *rest = args
        # The gradient of a plain loss is plain, too, but the handler expects a DTensor.
        if not isinstance(gradient, DTensor):
            mesh = logits.device_mesh
            gradient = DTensor.from_local(gradient, mesh, [Replicate()] * mesh.ndim, run_check=False)
        return handler(op, (gradient, logits, *rest), kwargs)

    return backward


def step_one_by_one(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        chosen = group.get("foreach", False) is not None or group.get("fused")
        if not chosen and len({isinstance(each, DTensor) for each in group["params"]}) > 1:
            group["foreach"] = False  # torch refuses the mixture otherwise


# Splitting layers over tensor-parallel processes


class Layers:
    # Without tensor parallelism, layers stay whole. `SplitLayers` splits them.

    def split(self, model: nn.Module, elsewhere: frozenset[int] = frozenset()) -> None:
        # Modules whose `id` is in `elsewhere` are left out.
        ...

    def begin(self, model: nn.Module) -> None:
        # Tensor-parallel processes get equal random state, so that dropout agrees. If `loss_parallel` is set,
        # `F.cross_entropy` accepts logits that are sharded by class.
        ...

    def check(self, optimizer: Optimizer) -> None:
        """Check at the first step that replicated parameters have equal gradients."""

    def teardown(self) -> None:
        # Undoes the changes to `F.cross_entropy` at the end of a run.
        ...


class SplitLayers(Layers):
    """Tensor parallelism that splits the layers named in a plan."""

    def __init__(
        self,
        mesh: DeviceMesh,
        kind: DeviceKind,
        plan: Plan | str,
        loss_parallel: bool,
        unwrap: Callable[[nn.Module], nn.Module],
    ) -> None:
        self._mesh, self._kind, self._plan, self._unwrap = mesh, kind, plan, unwrap
        self._loss = LossParallel() if loss_parallel else None
        self._copies: CopyCheck | None = None

    def split(self, model: nn.Module, elsewhere: frozenset[int] = frozenset()) -> None:
        bare = self._unwrap(model)
        plan = plan_of_model(bare) if isinstance(self._plan, str) else self._plan
        root = apply_plan(bare, self._mesh, plan, elsewhere)
        if self._loss is not None:
            whole_outputs_without_gradients(root)

    def begin(self, model: nn.Module) -> None:
        # Shared random state: dropout must drop the same elements of replicated activations on every process.
        if self._loss is not None:
            self._loss.enable()
        share_random_state(self._mesh, self._kind)
        self._copies = CopyCheck(self._mesh, self._unwrap(model))

    def check(self, optimizer: Optimizer) -> None:
        if self._copies is not None:
            self._copies.check(optimizer)
            self._copies = None

    def teardown(self) -> None:
        if self._loss is not None:
            self._loss.disable()
