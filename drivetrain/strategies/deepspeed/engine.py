"""Engines, their models' parameters by name, and the optimizers that loops see."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer

from drivetrain.runtime.errors import ConfigurationError
from drivetrain.strategies.deepspeed.layouts import Layout, layout_of
from drivetrain.strategies.deepspeed.settings import Settings
from drivetrain.strategies.deepspeed.unused import Participation, names_of
from drivetrain.strategies.optimizer_proxy import OptimizerProxy


class TrainedModel:
    """An engine with what belongs to it.

    Args:
        engine: The DeepSpeed engine.
        bare: The user's model, whose names are canonical.
        groups: The names of the parameters in each of the optimizer's groups.
        settings: The configuration that it was made with.

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
        """Step the engine; parameters that took no part in the losses stay as they are. Collective.

        Raises:
            ConfigurationError: The optimizer's groups have more parameters than the engine has.
        """
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
        """The engine of a model.

        Raises:
            ConfigurationError: It has none.
        """
        trained = self.find(model)
        if trained is None:
            raise ConfigurationError(
                f"{type(model).__name__} has no DeepSpeed engine: it was not prepared together with an optimizer.",
                code="DT-046",
            )
        return trained

    def stepped_by(self, optimizer: Optimizer) -> TrainedModel:
        """The engine that steps an optimizer.

        Raises:
            ConfigurationError: None does.
        """
        for trained in self._trained:
            if optimizer is trained.optimizer or optimizer is trained.layout.inner:
                return trained
        raise ConfigurationError(
            f"{type(optimizer).__name__} was not prepared together with its model, which DeepSpeed needs: "
            "model, optimizer = accelerator.prepare(model, optimizer).",
            code="DT-046",
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
    """What loops step and clear; groups, options and state are those of the optimizer inside the engine.

    Args:
        trained: The engine's model.
    """

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
        """Refuse: the engine has its parameters from the start.

        Raises:
            ConfigurationError: Always; names the parameters.
        """
        given = param_group["params"]
        names = names_of([given] if isinstance(given, torch.Tensor) else given, self.trained.bare)
        raise ConfigurationError(
            f"A parameter group is added after prepare ({', '.join(names) or 'parameters of no prepared model'}). "
            "DeepSpeed settles which parameters it trains when the model is placed. Give the optimizer all groups "
            'before prepare, or use strategy="ddp" or "fsdp".',
            code="DT-049",
        )


def _refuse_changed_groups(*_: Any) -> NoReturn:
    raise ConfigurationError(
        "Parameters were put into the optimizer's param_groups, or taken out of them, after prepare. DeepSpeed settles "
        "which parameters it trains when the model is placed, and would not see that. Give the optimizer all groups "
        'before prepare, or use strategy="ddp" or "fsdp".',
        code="DT-049",
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
