"""DeepSpeed engines of prepared models, their gradients, and the optimizers that training loops step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.runtime.collectives import reduce
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.logging import get_logger
from drivetrain.strategies.base import (
    Gradients,
    OptimizerProxy,
    Topology,
)
from drivetrain.strategies.deepspeed.config import Settings
from drivetrain.strategies.deepspeed.layouts import Layout, layout_of

# Parameters without a gradient in a step: the optimizer leaves them alone, as in one plain process


_log = get_logger(__name__)

_ELSEWHERE = 'use strategy="ddp" or "fsdp"'


class Participation:
    """Record of which parameters got no gradient, so that DeepSpeed's step can leave them unchanged.

    In plain PyTorch, a step leaves parameters without a gradient unchanged.

    Attributes:
        left_out: Number of steps without a gradient by parameter name.
    """

    def __init__(self, layout: Layout, grouped: Mapping[str, nn.Parameter], device: torch.device) -> None:
        self._layout, self._device = layout, device
        trained = {id(parameter) for _, held in layout.holders() for parameter in held}
        self._trained = {name: p for name, p in grouped.items() if id(p) in trained}
        self._frozen_before = {name: p for name, p in grouped.items() if id(p) not in trained and not p.requires_grad}
        self._seen = torch.zeros(len(self._trained))  # a float for each, which a plan reads as "took part"
        self._steps = 0
        self._froze: set[str] = set()
        self.left_out: dict[str, int] = {}
        self._handles: list[Any] = []
        self._unwatched = list(enumerate(self._trained.values()))
        self._watch()

    def _watch(self) -> None:
        for number, parameter in self._unwatched:
            if parameter.requires_grad:
                # Torch refuses such a hook on a frozen parameter, which is tried again once it is unfrozen.
                watched: Any = parameter  # the method has no types
                self._handles.append(watched.register_post_accumulate_grad_hook(_setter(self._seen, number)))
        self._unwatched = [(number, parameter) for number, parameter in self._unwatched if not parameter.requires_grad]

    def require_known(self) -> None:
        # DeepSpeed would ignore a parameter that was unfrozen after `prepare`.
        if self._unwatched:
            self._watch()
        found = [name for name, parameter in self._frozen_before.items() if parameter.requires_grad]
        if found:
            raise ConfigurationError(
                f"{listed(found)} did not require gradients when the model was prepared, but now requires_grad is "
                "True. DeepSpeed cannot train additional parameters after prepare. Keep them frozen, set "
                f"requires_grad=True before prepare, or {_ELSEWHERE}.",
            )

    def unused(self) -> list[nn.Parameter]:
        # A collective call. The record is cleared for the next step.
        # A gradient on any process is averaged over all, so that the parameter counts as used everywhere.
        seen = reduce(self._seen.to(self._device), "max").tolist()
        self._seen.zero_()
        used = [name for name, flag in zip(self._trained, seen, strict=True) if flag]
        if self.left_out:
            self._check_late([name for name in used if name in self.left_out])
        idle = [name for name, flag in zip(self._trained, seen, strict=True) if not flag]
        for name in idle:
            self.left_out[name] = self.left_out.get(name, 0) + 1
            if not self._trained[name].requires_grad:
                self._froze.add(name)
        self._steps += 1
        return [self._trained[name] for name in idle]

    def _check_late(self, names: list[str]) -> None:
        late = [name for name in names if self._layout.counts_steps(self._trained[name])]
        for name in names:
            del self.left_out[name]
        if not late:
            return
        text = (
            f"{listed(late)} had no gradient in earlier steps. DeepSpeed counts steps for a whole parameter group, and "
            "plain PyTorch for each parameter, so the optimizer's bias correction differs."
        )
        frozen = [name for name in late if name in self._froze]
        if frozen:
            raise ConfigurationError(
                f"Parameters were frozen and are trained again: {listed(frozen)}. {text} Use an optimizer without a "
                f"step count (SGD), or {_ELSEWHERE}.",
            )
        _log.warning_once(f"{text} Results differ from those of a single process. To avoid this, {_ELSEWHERE}.")

    @property
    def never_stepped(self) -> set[str]:
        """Names of the parameters that had no gradient in any step so far."""
        return {name for name, steps in self.left_out.items() if steps == self._steps}

    def resume(self, without_state: Iterable[str]) -> None:
        # Parameters in `without_state` count as never stepped.
        self._steps, self.left_out = 0, dict.fromkeys((name for name in without_state if name in self._trained), 0)

    def discard(self) -> None:
        self._seen.zero_()

    def destroy(self) -> None:
        for handle in self._handles:
            handle.remove()


def names_of(parameters: Iterable[Tensor], model: nn.Module) -> list[str]:
    """Return the names that the given parameters have in a model."""
    known = {id(parameter): name for name, parameter in model.named_parameters()}
    return [known[id(parameter)] for parameter in parameters if id(parameter) in known]


def _setter(flags: Tensor, number: int) -> Callable[[Tensor], None]:
    def mark(_: Tensor) -> None:
        flags[number] = 1

    return mark


def listed(names: list[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"


class TrainedModel:
    """Record of a model prepared by DeepSpeed: its engine, its optimizer and the state of its gradients.

    Attributes:
        layout: Access to the engine's gradients and optimizer state.
        participation: Record of the parameters that received a gradient since the last step.
        holds_gradients: True if backward has run since the last step.
        is_complete: True if the gradients belong to a finished accumulation window.
        pending_scale: Factor by which the gradients are multiplied once the window is finished.
        forwards: Number of the engine's last forward pass among all models, 0 once backward has followed.
        clipped: True if the gradients were clipped to the configuration's norm.
    """

    def __init__(self, engine: Any, bare: nn.Module, groups: list[list[str]], settings: Settings) -> None:
        self.engine, self.bare, self.groups, self.settings = engine, bare, groups, settings
        self.parameters: dict[str, nn.Parameter] = dict(bare.named_parameters())
        self.layout: Layout = layout_of(engine, self.parameters)
        self.participation = Participation(
            self.layout, {name: self.parameters[name] for names in groups for name in names}, engine.device
        )
        self.holds_gradients = self.is_complete = False
        self.pending_scale = 1.0
        self.clipped = False
        self.forwards = 0
        self.optimizer = EngineOptimizer(self)
        self._owned = {id(parameter) for parameter in self.parameters.values()}
        self._held: dict[int, list[nn.Parameter]] = {}
        for holder, held in self.layout.holders():
            self._held[id(holder)] = held
        self._settled = self._count() if groups else 0  # between steps, since stage 3 changes groups during a step

    @property
    def is_low_precision(self) -> bool:
        # Such a model has float32 master weights.
        return bool(self.engine.bfloat16_enabled() or self.engine.fp16_enabled())

    def own(self, parameters: list[torch.Tensor]) -> list[nn.Parameter]:
        # `parameters` may contain flat ZeRO tensors, each of which holds several of the model's parameters.
        found: dict[int, nn.Parameter] = {}
        for parameter in parameters:
            if id(parameter) in self._owned:
                found[id(parameter)] = parameter  # type: ignore[assignment]
            for each in self._held.get(id(parameter), []):
                found[id(each)] = each
        trained = {id(each) for held in self._held.values() for each in held}
        return [parameter for number, parameter in found.items() if number in trained]

    def all_trained(self) -> list[nn.Parameter]:
        """Return all parameters of the model that the engine's optimizer trains."""
        return [parameter for held in self._held.values() for parameter in held]

    def discard_gradients(self) -> None:
        if self.holds_gradients:
            self.layout.discard()
            self.participation.discard()
            self.forget_gradients()

    def forget_gradients(self) -> None:
        self.holds_gradients = self.is_complete = self.clipped = False
        self.pending_scale = 1.0

    def _count(self) -> int:
        return sum(len(group["params"]) for group in self.layout.inner.param_groups)

    def step(self) -> None:
        # A collective call. Parameters without a gradient stay unchanged, as in plain PyTorch.
        if len(self.layout.inner.param_groups) > len(self.groups) or self._count() > self._settled:
            _refuse_changed_groups()
        with self.layout.untouched(self.participation.unused()):
            self.engine.step()
        self.layout.finish_step()
        self.forget_gradients()

    def destroy(self) -> None:
        self.participation.destroy()
        # After the hooks are removed, a later engine of the model does not report gradients to this one.
        self.engine.destroy()


class Engines:
    """Registry of the DeepSpeed engines of all models that a strategy has prepared."""

    def __init__(self) -> None:
        self._trained: list[TrainedModel] = []
        self._forwards = 0

    def __iter__(self) -> Iterator[TrainedModel]:
        return iter(self._trained)

    def add(self, trained: TrainedModel) -> None:
        self._trained.append(trained)

    def forget(self, bare: nn.Module) -> None:
        # The hooks of the engine from an earlier `prepare` would affect the new engine.
        for trained in [trained for trained in self._trained if trained.bare is bare]:
            trained.destroy()
            self._trained.remove(trained)

    def destroy(self) -> None:
        for trained in self._trained:
            trained.destroy()
        self._trained.clear()

    def find(self, model: nn.Module) -> TrainedModel | None:
        for trained in self._trained:
            if model is trained.engine or model is trained.bare or model is trained.engine.module:
                return trained
        return None

    def require(self, model: nn.Module) -> TrainedModel:
        trained = self.find(model)
        if trained is None:
            raise ConfigurationError(
                f"{type(model).__name__} has no DeepSpeed engine. Pass it to prepare() together with its optimizer.",
            )
        return trained

    def stepped_by(self, optimizer: Optimizer) -> TrainedModel:
        for trained in self._trained:
            if optimizer is trained.optimizer or optimizer is trained.layout.inner:
                return trained
        raise ConfigurationError(
            f"{type(optimizer).__name__} was not prepared together with its model, as DeepSpeed requires: model, "
            "optimizer = accelerator.prepare(model, optimizer).",
        )

    def record_forward(self, trained: TrainedModel) -> None:
        if torch.is_grad_enabled():
            self._forwards += 1
            trained.forwards = self._forwards

    def take_part(self) -> list[TrainedModel]:
        # The models that ran since the last backward pass, in the order of their forward passes. Their engines must
        # join the next one. If none ran, it is only the model that was prepared last.
        trainable = [trained for trained in self._trained if trained.groups]
        ran = sorted((trained for trained in trainable if trained.forwards), key=lambda trained: trained.forwards)
        for trained in ran:
            trained.forwards = 0
        return ran or trainable[-1:]


class EngineOptimizer(OptimizerProxy):
    """Optimizer that the `DeepSpeed` strategy returns from `prepare`. Its `step` steps the DeepSpeed engine.

    Parameter groups, options and state are those of the optimizer inside the engine.
    """

    def __init__(self, trained: TrainedModel) -> None:
        # Not Optimizer.__init__: groups, state and defaults are those of the optimizer inside.
        self.__dict__["trained"] = trained

    @property
    def optimizer(self) -> Optimizer:  # type: ignore[override]
        trained: TrainedModel = self.trained
        return trained.layout.inner

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        # The model's parameters in place of DeepSpeed's flat tensors.
        names = self.trained.groups
        parameters = self.trained.parameters
        return _FixedList(
            _Group(group, _FixedList(parameters[name] for name in own))
            for own, group in zip(names, self.optimizer.param_groups, strict=False)
        )

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    def __getattr__(self, name: str) -> Any:
        # Not set yet, for example while unpickling: looking it up would recurse without end.
        if name == "trained":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in type(self).__dict__ or name in OptimizerProxy.__dict__:
            object.__setattr__(self, name, value)
        else:
            setattr(self.optimizer, name, value)  # such as the step counter that schedulers attach

    def zero_grad(self, set_to_none: bool = True) -> None:
        # `set_to_none` has no effect.
        self.trained.discard_gradients()

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        self.trained.step()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise `ConfigurationError`, because DeepSpeed cannot train parameters added later."""
        given = param_group["params"]
        names = names_of([given] if isinstance(given, torch.Tensor) else given, self.trained.bare)
        raise ConfigurationError(
            f"A parameter group was added after prepare ({', '.join(names) or 'parameters of no prepared model'}). "
            "DeepSpeed cannot train additional parameters after prepare. Pass all groups to the optimizer before "
            'prepare, or use strategy="ddp" or "fsdp".',
        )


def _refuse_changed_groups(*_: Any) -> NoReturn:
    raise ConfigurationError(
        "Parameters were added to or removed from the optimizer's param_groups after prepare, which DeepSpeed would "
        'ignore. Pass all groups to the optimizer before prepare, or use strategy="ddp" or "fsdp".',
    )


class _FixedList(list[Any]):
    # DeepSpeed would ignore a change of the parameter groups.

    append = extend = insert = remove = pop = clear = _refuse_changed_groups
    __iadd__ = __setitem__ = __delitem__ = _refuse_changed_groups

    # Copies and pickles are ordinary lists, which may be changed.
    def __reduce_ex__(self, protocol: Any) -> Any:
        return list, ([*self],)


class _Group(dict[str, Any]):
    # Passes changes of options, such as the learning rate, to DeepSpeed's optimizer.

    def __init__(self, inner: dict[str, Any], parameters: list[nn.Parameter]) -> None:
        super().__init__(inner, params=parameters)
        self._inner = inner

    def __setitem__(self, key: str, value: Any) -> None:
        if key == "params":
            _refuse_changed_groups()
        super().__setitem__(key, value)
        self._inner[key] = value

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value


# Norms, clipping and scaling of gradients that an engine holds in parts


def total_norm(trained: TrainedModel, parameters: Sequence[nn.Parameter], norm_type: float) -> Tensor:
    # A collective call.
    layout = trained.layout
    gradients = layout.gradients(parameters)
    infinite = norm_type == float("inf")
    # A process without gradients must take part in the reduction, too.
    local = torch.zeros((), device=trained.engine.device)
    if gradients:
        norms = torch.stack([norm.float() for norm in torch._foreach_norm(gradients, norm_type)])
        local = norms.max() if infinite else norms.pow(norm_type).sum()
    if not layout.replicated:
        local = reduce(local, "max" if infinite else "sum")
    total = local if infinite else local.pow(1.0 / norm_type)
    # The stored gradients still contain the loss scale.
    return total / layout.loss_scale


def clip_to_norm(trained: TrainedModel, parameters: Sequence[nn.Parameter], norm: Tensor, max_norm: float) -> None:
    coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    scale(trained, parameters, coefficient)


def scale(trained: TrainedModel, parameters: Sequence[nn.Parameter], factor: Tensor) -> None:
    _change(trained, parameters, lambda gradients: torch._foreach_mul_(gradients, factor.to(gradients[0].device)))


def clip_to_value(trained: TrainedModel, parameters: Sequence[nn.Parameter], value: float) -> None:
    bound = value * trained.layout.loss_scale

    def clamp(gradients: list[Tensor]) -> None:
        torch._foreach_clamp_min_(gradients, -bound)
        torch._foreach_clamp_max_(gradients, bound)

    _change(trained, parameters, clamp)


def _change(trained: TrainedModel, parameters: Sequence[nn.Parameter], change: Callable[[list[Tensor]], None]) -> None:
    gradients = trained.layout.gradients(parameters)
    if gradients:
        change(gradients)
        trained.layout.commit(parameters, gradients)


# The gradients that engines hold


class EngineGradients(Gradients):
    def __init__(self, engines: Engines, topology: Topology) -> None:
        self._engines, self._topology = engines, topology

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        trained = self._engines.find(model)
        return nullcontext() if trained is None else _within_window(trained.engine)

    def are_held(self, model: nn.Module) -> bool:
        trained = self._engines.find(model)
        return trained is not None and trained.holds_gradients

    def discard(self, model: nn.Module) -> None:
        trained = self._engines.find(model)
        if trained is not None:
            trained.discard_gradients()

    def clip_norm(self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        given = list(parameters)
        norms = []
        for trained in self._engines:
            own = trained.own(given)
            if own:
                complete(trained)
                _check_norm(trained.settings.clipping, max_norm)
                norms.append((trained, own, total_norm(trained, own, norm_type)))
        if not norms:
            return torch.zeros((), device=self._topology.device)
        # All engines are clipped by one factor, from the norm over all given parameters.
        total: torch.Tensor = torch.linalg.vector_norm(torch.stack([norm for *_, norm in norms]), norm_type)
        if max_norm != float("inf"):
            for trained, own, _ in norms:
                clip_to_norm(trained, own, total, max_norm)
                trained.clipped = True
        return total

    def scale(
        self,
        parameters: Sequence[Tensor],
        factor: Tensor | float = 1.0,
        bound: float | None = None,
        model: nn.Module | None = None,
    ) -> None:
        trained = None if model is None else self._engines.find(model)
        if model is not None and trained is None:
            super().scale(parameters, factor, bound)
        # Until its window ends, DeepSpeed adds further gradients, so that the factor must wait.
        elif trained is not None and not trained.is_complete:
            trained.pending_scale *= float(factor) if trained.holds_gradients else 1.0
        else:
            for each in self._engines if trained is None else [trained]:
                own = each.own(list(parameters)) if trained is None else each.all_trained()
                complete(each)
                if bound is None:
                    scale(each, own, torch.as_tensor(factor))
                else:
                    clip_to_value(each, own, bound)


def complete(trained: TrainedModel) -> None:
    if trained.is_complete and trained.pending_scale != 1.0:
        scale(trained, trained.all_trained(), torch.tensor(trained.pending_scale))
        trained.pending_scale = 1.0


def added_to(trained: TrainedModel) -> AbstractContextManager[None]:
    # Needed for a second backward pass before a step with DeepSpeed's stages 1 and 2.
    if not trained.is_complete or trained.layout.adds_backwards:
        return nullcontext()
    if trained.layout.offloads:
        raise ConfigurationError(
            f"A second backward through {type(trained.bare).__name__} before its step: DeepSpeed's stages 1 and 2 "
            "with offload_optimizer cannot add gradients. Add the losses and run one backward, or use stage 3.",
        )
    return _adding(trained)


@contextmanager
def _adding(trained: TrainedModel) -> Iterator[None]:
    parameters = trained.all_trained()
    # DeepSpeed overwrites finished gradients, so that they are saved and added back.
    before = [gradient.clone() for gradient in trained.layout.gradients(parameters)]
    yield
    after = trained.layout.gradients(parameters)
    torch._foreach_add_(after, before)
    trained.layout.commit(parameters, after)


def _check_norm(configured: float | None, max_norm: float) -> None:
    if configured is not None and max_norm not in (configured, float("inf")):
        raise ConfigurationError(
            f"The DeepSpeed configuration says gradient_clipping={configured}, but the loop clips to {max_norm}. Set "
            "only one of the two.",
        )


@contextmanager
def _within_window(engine: Any) -> Iterator[None]:
    engine.set_gradient_accumulation_boundary(False)
    try:
        yield
    finally:
        engine.set_gradient_accumulation_boundary(True)
