"""Engines, their models' parameters by name, and the optimizers that loops see."""

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
    """Records which of an engine's parameters got a gradient since its last step.

    Attributes:
        left_out: By name, how many steps have left a parameter out.
    """

    def __init__(self, layout: Layout, grouped: Mapping[str, nn.Parameter], device: torch.device) -> None:
        self._layout, self._device = layout, device
        trained = {id(parameter) for _, held in layout.holders() for parameter in held}
        self._trained = {name: p for name, p in grouped.items() if id(p) in trained}
        self._frozen_before = {name: p for name, p in grouped.items() if id(p) not in trained and not p.requires_grad}
        self._seen = torch.zeros(len(self._trained), dtype=torch.uint8)
        self._steps = 0
        self._froze: set[str] = set()
        self.left_out: dict[str, int] = {}
        self._handles: list[Any] = []
        self._unwatched = list(enumerate(self._trained.values()))
        self._watch()

    def _watch(self) -> None:
        """Add a hook to each parameter that has none; those that require no gradient cannot take one."""
        for number, parameter in self._unwatched:
            if parameter.requires_grad:
                watched: Any = parameter  # the method has no types
                self._handles.append(watched.register_post_accumulate_grad_hook(_setter(self._seen, number)))
        self._unwatched = [(number, parameter) for number, parameter in self._unwatched if not parameter.requires_grad]

    def require_known(self) -> None:
        """Raise if a parameter of the optimizer is to be trained that the engine does not hold."""
        if self._unwatched:
            self._watch()
        found = [name for name, parameter in self._frozen_before.items() if parameter.requires_grad]
        if found:
            raise ConfigurationError(
                f"{listed(found)} did not require gradients when the model was prepared, and now requires_grad is "
                "True. DeepSpeed settles which parameters it trains when the model is placed. Leave them frozen, "
                f"prepare the model with requires_grad=True, or {_ELSEWHERE}.",
            )

    def unused(self) -> list[nn.Parameter]:
        """Return the parameters without a gradient on any process since the last step, which is now. Collective."""
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
        """Report parameters that the optimizer has not stepped as often as the others of their group."""
        late = [name for name in names if self._layout.counts_steps(self._trained[name])]
        for name in names:
            del self.left_out[name]
        if not late:
            return
        text = (
            f"{listed(late)} had no gradient in earlier steps. DeepSpeed keeps one count of steps for all parameters "
            "of a group, where one process counts each parameter's own, so the optimizer corrects its moments by "
            "another count."
        )
        frozen = [name for name in late if name in self._froze]
        if frozen:
            raise ConfigurationError(
                f"{listed(frozen)} was frozen during training and is trained again. {text} Use an optimizer without "
                f"such a count (SGD), or {_ELSEWHERE}.",
            )
        _log.warning_once(f"{text} The numbers differ from those of one process; to have the same, {_ELSEWHERE}.")

    @property
    def never_stepped(self) -> set[str]:
        """The names of parameters that no step has changed."""
        return {name for name, steps in self.left_out.items() if steps == self._steps}

    def resume(self, without_state: Iterable[str]) -> None:
        """Take parameters that a checkpoint holds no optimizer state of as ones that no step has changed."""
        self._steps, self.left_out = 0, dict.fromkeys((name for name in without_state if name in self._trained), 0)

    def discard(self) -> None:
        """Forget which parameters got a gradient."""
        self._seen.zero_()

    def destroy(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


def names_of(parameters: Iterable[Tensor], model: nn.Module) -> list[str]:
    """Return the names of those of the parameters that are the model's."""
    known = {id(parameter): name for name, parameter in model.named_parameters()}
    return [known[id(parameter)] for parameter in parameters if id(parameter) in known]


def _setter(flags: Tensor, number: int) -> Callable[[Tensor], None]:
    def mark(_: Tensor) -> None:
        flags[number] = 1

    return mark


def listed(names: list[str], most: int = 8) -> str:
    """Return names as one text, beyond `most` only how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"


class TrainedModel:
    """An engine with what belongs to it.

    Attributes:
        layout: Where the engine keeps gradients and states.
        participation: Which parameters got a gradient since the last step.
        holds_gradients: Whether a backward has run since the last step.
        is_complete: Whether the gradients held are those of a window that has ended.
        pending_scale: What they are still to be multiplied with, once they are complete.
        forwards: The number of its last forward among those of all models; 0 where a backward has followed it.
        clipped: Whether the gradients held have been clipped to the configuration's norm.
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
        self._settled = self._count() if groups else 0  # between steps; stage 3 puts what it steps in for a moment

    @property
    def is_low_precision(self) -> bool:
        """Whether beside the model's parameters there are 32-bit master weights."""
        return bool(self.engine.bfloat16_enabled() or self.engine.fp16_enabled())

    def own(self, parameters: list[torch.Tensor]) -> list[nn.Parameter]:
        """Those of the model's parameters that are meant, by themselves or by the flat tensors that they are in."""
        found: dict[int, nn.Parameter] = {}
        for parameter in parameters:
            if id(parameter) in self._owned:
                found[id(parameter)] = parameter  # type: ignore[assignment]
            for each in self._held.get(id(parameter), []):
                found[id(each)] = each
        trained = {id(each) for held in self._held.values() for each in held}
        return [parameter for number, parameter in found.items() if number in trained]

    def all_trained(self) -> list[nn.Parameter]:
        """The parameters that the optimizer steps."""
        return [parameter for held in self._held.values() for parameter in held]

    def discard_gradients(self) -> None:
        """Forget what has been accumulated."""
        if self.holds_gradients:
            self.layout.discard()
            self.participation.discard()
            self.forget_gradients()

    def forget_gradients(self) -> None:
        """Record that no gradients are held."""
        self.holds_gradients = self.is_complete = self.clipped = False
        self.pending_scale = 1.0

    def _count(self) -> int:
        return sum(len(group["params"]) for group in self.layout.inner.param_groups)

    def step(self) -> None:
        """Step the engine; parameters that took no part in the losses stay as they are. Collective."""
        if len(self.layout.inner.param_groups) > len(self.groups) or self._count() > self._settled:
            _refuse_changed_groups()
        with self.layout.untouched(self.participation.unused()):
            self.engine.step()
        self.layout.finish_step()
        self.forget_gradients()

    def destroy(self) -> None:
        """Leave the process group."""
        self.participation.destroy()
        self.engine.destroy()


class Engines:
    """The engines of all prepared models, and which of them the next backward is for."""

    def __init__(self) -> None:
        self._trained: list[TrainedModel] = []
        self._forwards = 0

    def __iter__(self) -> Iterator[TrainedModel]:
        return iter(self._trained)

    def add(self, trained: TrainedModel) -> None:
        """Take one more engine."""
        self._trained.append(trained)

    def forget(self, bare: nn.Module) -> None:
        """Destroy the engine that a model had before: its hooks would see the new one's gradients too."""
        for trained in [trained for trained in self._trained if trained.bare is bare]:
            trained.destroy()
            self._trained.remove(trained)

    def destroy(self) -> None:
        """Destroy all engines."""
        for trained in self._trained:
            trained.destroy()
        self._trained.clear()

    def find(self, model: nn.Module) -> TrainedModel | None:
        """The engine of a model, given as it was or as it was prepared; None where it has none."""
        for trained in self._trained:
            if model is trained.engine or model is trained.bare or model is trained.engine.module:
                return trained
        return None

    def require(self, model: nn.Module) -> TrainedModel:
        """The engine of a model."""
        trained = self.find(model)
        if trained is None:
            raise ConfigurationError(
                f"{type(model).__name__} has no DeepSpeed engine: it was not prepared together with an optimizer.",
            )
        return trained

    def stepped_by(self, optimizer: Optimizer) -> TrainedModel:
        """The engine that steps an optimizer."""
        for trained in self._trained:
            if optimizer is trained.optimizer or optimizer is trained.layout.inner:
                return trained
        raise ConfigurationError(
            f"{type(optimizer).__name__} was not prepared together with its model, which DeepSpeed needs: "
            "model, optimizer = accelerator.prepare(model, optimizer).",
        )

    def record_forward(self, trained: TrainedModel) -> None:
        """Record that a forward has run which a backward may follow."""
        if torch.is_grad_enabled():
            self._forwards += 1
            trained.forwards = self._forwards

    def take_part(self) -> list[TrainedModel]:
        """The models whose forward has run since the last backward, in that order; the last one if none has."""
        trainable = [trained for trained in self._trained if trained.groups]
        ran = sorted((trained for trained in trainable if trained.forwards), key=lambda trained: trained.forwards)
        for trained in ran:
            trained.forwards = 0
        return ran or trainable[-1:]


class EngineOptimizer(OptimizerProxy):
    """What loops step and clear; groups, options and state are those of the optimizer inside the engine."""

    def __init__(self, trained: TrainedModel) -> None:
        # Not Optimizer.__init__: groups, state and defaults are those of the optimizer inside.
        self.__dict__["trained"] = trained

    @property
    def optimizer(self) -> Optimizer:  # type: ignore[override]
        """The optimizer that does the sums: the user's, or that of the configuration."""
        trained: TrainedModel = self.trained
        return trained.layout.inner

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizer's groups, with the model's own parameters in them."""
        names = self.trained.groups
        parameters = self.trained.parameters
        return _Settled(
            _Group(group, _Settled(parameters[name] for name in own))
            for own, group in zip(names, self.optimizer.param_groups, strict=False)
        )

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    def __getattr__(self, name: str) -> Any:
        if name == "trained":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in type(self).__dict__ or name in OptimizerProxy.__dict__:
            object.__setattr__(self, name, value)
        else:
            setattr(self.optimizer, name, value)  # such as what schedulers note about steps

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients that are still held; after a step the engine has done so itself."""
        self.trained.discard_gradients()

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Step the engine."""
        self.trained.step()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse: the engine has its parameters from the start."""
        given = param_group["params"]
        names = names_of([given] if isinstance(given, torch.Tensor) else given, self.trained.bare)
        raise ConfigurationError(
            f"A parameter group is added after prepare ({', '.join(names) or 'parameters of no prepared model'}). "
            "DeepSpeed settles which parameters it trains when the model is placed. Give the optimizer all groups "
            'before prepare, or use strategy="ddp" or "fsdp".',
        )


def _refuse_changed_groups(*_: Any) -> NoReturn:
    raise ConfigurationError(
        "Parameters were put into the optimizer's param_groups, or taken out of them, after prepare. DeepSpeed settles "
        "which parameters it trains when the model is placed, and would not see that. Give the optimizer all groups "
        'before prepare, or use strategy="ddp" or "fsdp".',
    )


class _Settled(list[Any]):
    """Groups, or parameters of one: what the engine has. Changing the list would change nothing, so it is refused."""

    append = extend = insert = remove = pop = clear = _refuse_changed_groups
    __iadd__ = __setitem__ = __delitem__ = _refuse_changed_groups

    def __reduce_ex__(self, protocol: Any) -> Any:
        return list, ([*self],)


class _Group(dict[str, Any]):
    """A parameter group: options are read from and written to the inner optimizer's group."""

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
    """The norm of the gradients of some parameters over all processes, a scalar; collective."""
    layout = trained.layout
    gradients = layout.gradients(parameters)
    infinite = norm_type == float("inf")
    local = torch.zeros((), device=trained.engine.device)
    if gradients:
        norms = torch.stack([norm.float() for norm in torch._foreach_norm(gradients, norm_type)])
        local = norms.max() if infinite else norms.pow(norm_type).sum()
    if not layout.replicated:
        local = reduce(local, "max" if infinite else "sum")
    total = local if infinite else local.pow(1.0 / norm_type)
    return total / layout.loss_scale


def clip_to_norm(trained: TrainedModel, parameters: Sequence[nn.Parameter], norm: Tensor, max_norm: float) -> None:
    """Scale gradients of this norm down to `max_norm` at most, as `torch.nn.utils.clip_grad_norm_` does."""
    coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    scale(trained, parameters, coefficient)


def scale(trained: TrainedModel, parameters: Sequence[nn.Parameter], factor: Tensor) -> None:
    """Multiply gradients."""
    _change(trained, parameters, lambda gradients: torch._foreach_mul_(gradients, factor.to(gradients[0].device)))


def clip_to_value(trained: TrainedModel, parameters: Sequence[nn.Parameter], value: float) -> None:
    """Clamp every gradient to [-value, value]."""
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
    """Gradients that engines reduce and keep, whole or in parts."""

    def __init__(self, engines: Engines, topology: Topology) -> None:
        self._engines, self._topology = engines, topology

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return a context whose backwards do not end an accumulation window."""
        trained = self._engines.find(model)
        return nullcontext() if trained is None else _within_window(trained.engine)

    def are_held(self, model: nn.Module) -> bool:
        """Whether the engine of a model holds gradients that it has not stepped with."""
        trained = self._engines.find(model)
        return trained is not None and trained.holds_gradients

    def discard(self, model: nn.Module) -> None:
        """Forget the gradients of a window that did not end."""
        trained = self._engines.find(model)
        if trained is not None:
            trained.discard_gradients()

    def clip_norm(self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale gradients down to a total norm of at most `max_norm`; returns the norm over all processes before."""
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
        """Change gradients; those of a window once it is complete: until then DeepSpeed keeps them in many places."""
        trained = None if model is None else self._engines.find(model)
        if model is not None and trained is None:
            super().scale(parameters, factor, bound)
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
    """Multiply an engine's gradients by what the end of their window has left to do, if the window has ended."""
    if trained.is_complete and trained.pending_scale != 1.0:
        scale(trained, trained.all_trained(), torch.tensor(trained.pending_scale))
        trained.pending_scale = 1.0


def added_to(trained: TrainedModel) -> AbstractContextManager[None]:
    """Return a context in which a backward adds to complete gradients, which DeepSpeed would forget."""
    if not trained.is_complete or trained.layout.adds_backwards:
        return nullcontext()
    if trained.layout.offloads:
        raise ConfigurationError(
            f"A second backward through {type(trained.bare).__name__} before its step, which DeepSpeed's stages 1 and "
            "2 with offload_optimizer cannot add to the first. Add the losses and run one backward, or use stage 3.",
        )
    return _adding(trained)


@contextmanager
def _adding(trained: TrainedModel) -> Iterator[None]:
    parameters = trained.all_trained()
    before = [gradient.clone() for gradient in trained.layout.gradients(parameters)]
    yield
    after = trained.layout.gradients(parameters)
    torch._foreach_add_(after, before)
    trained.layout.commit(parameters, after)


def _check_norm(configured: float | None, max_norm: float) -> None:
    if configured is not None and max_norm not in (configured, float("inf")):
        raise ConfigurationError(
            f"The DeepSpeed configuration says gradient_clipping={configured}, but the loop clips to {max_norm}. Give "
            "one of the two.",
        )


@contextmanager
def _within_window(engine: Any) -> Iterator[None]:
    engine.set_gradient_accumulation_boundary(False)
    try:
        yield
    finally:
        engine.set_gradient_accumulation_boundary(True)
