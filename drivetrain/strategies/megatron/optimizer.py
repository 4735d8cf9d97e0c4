"""Megatron-core's optimizer behind the one that the user made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.runtime.errors import ConfigurationError
from drivetrain.strategies.megatron.configuration import optimizer_config
from drivetrain.strategies.megatron.model import PlacedModel
from drivetrain.strategies.megatron.options import MegatronOptions
from drivetrain.strategies.optimizer_proxy import OptimizerProxy

GROUP = "group_index"
# Of a group of parameters: what megatron-core keeps there for itself.
INTERNAL = (
    GROUP,
    "params",
    "is_expert_parallel",
    "default_config",
    "wd_mult",
    "lr_mult",
    "is_decoupled_lr",
    "max_lr",
    "min_lr",
)


class MegatronOptimizerFront(OptimizerProxy):
    """What loops step and clear: the user's optimizer, whose options megatron-core's follows.

    Args:
        optimizer: The user's, which learning-rate schedules change.
        placed: The model.
        inner: Megatron-core's optimizer.
    """

    def __init__(self, optimizer: Optimizer, placed: PlacedModel, inner: Any) -> None:
        # Not Optimizer.__init__: groups and defaults are those of the optimizer inside.
        self.__dict__.update(optimizer=optimizer, placed=placed, inner=inner, overflowed=None, clipped=False)

    @property
    def state(self) -> Any:
        """The state that megatron-core keeps, by its own parameters."""
        return self.inner.state

    @state.setter
    def state(self, state: Any) -> None:
        raise TypeError("Megatron-core keeps the state; load it with strategy.state.load_optimizer.")

    def __getattr__(self, name: str) -> Any:
        if name in ("optimizer", "placed", "inner"):
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    @property
    def parts(self) -> list[Any]:
        """The optimizers of dense layers and of experts, those that hold parameters here."""
        return [part for part in self.inner.chained_optimizers if not getattr(part, "is_stub_optimizer", False)]

    def prepare_gradients(self) -> bool:
        """Bring a window's gradients to the parameters that are stepped, unscaled; once a window.

        Returns:
            Whether one of them is infinite or NaN, where a loss scale is in use.
        """
        if self.overflowed is None:
            self.__dict__["overflowed"] = bool(self.inner.prepare_grads())
        found: bool = self.overflowed
        return found

    def stepped_parameters(self) -> list[Tensor]:
        """The parameters that are stepped: 32-bit copies, or this process's part of them, where there are such."""
        return [parameter for part in self.parts for parameter in part.get_parameters()]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients."""
        self.placed.zero_gradients()
        self.inner.zero_grad(set_to_none)
        self.__dict__.update(overflowed=None, clipped=False)

    def step(self, closure: Callable[[], Any] | None = None) -> bool:  # type: ignore[override]
        """Step, unless a gradient has overflowed.

        Args:
            closure: Not taken.

        Returns:
            Whether it has stepped.
        """
        if closure is not None:
            raise ConfigurationError(
                f"{type(self.optimizer).__name__} under strategy='megatron' takes no closure: the schedule runs "
                "forward and backward. Leave it out.",
                code="DT-048",
            )
        overflowed = self.prepare_gradients()
        self.follow_options()
        stepped = not overflowed and bool(self.inner.step_with_ready_grads())
        self.__dict__.update(overflowed=None, clipped=False)
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers warn otherwise
        return stepped

    def follow_options(self) -> None:
        """Take the learning rate and the other options from the user's groups."""
        for group in self.inner.param_groups:
            given = self.optimizer.param_groups[group[GROUP]]
            for name, value in given.items():
                if name in group and name not in INTERNAL:
                    group[name] = value


def make_optimizer(
    optimizer: Optimizer, placed: PlacedModel, options: MegatronOptions, low: torch.dtype | None
) -> MegatronOptimizerFront:
    """Build megatron-core's optimizer for a model; a collective.

    Args:
        optimizer: The user's, over the parameters of the parts that this process holds.
        placed: The model.
        options: Those of the strategy.
        low: The dtype of the weights, if it is a low one.

    Raises:
        ConfigurationError: There is no such optimizer, or it leaves parameters out.
    """
    from megatron.core.optimizer import get_megatron_optimizer
    from megatron.core.optimizer.optimizer_config import ParamKey, ParamWithNamePredicate

    groups = [{id(parameter) for parameter in group["params"]} for group in optimizer.param_groups]
    _check_parameters(optimizer, placed.bare, groups)

    def matching(index: int) -> Any:
        return ParamKey(
            with_name_predicate=ParamWithNamePredicate(
                f"group_{index}", lambda parameter, _: id(parameter) in groups[index]
            )
        )

    inner = get_megatron_optimizer(
        optimizer_config(optimizer, options, low),
        placed.wrapped,
        # Its own checkpoints distinguish groups by lr_mult, which nothing else reads.
        config_overrides={matching(index): {GROUP: index, "lr_mult": 1.0 + index} for index in range(len(groups))},
        use_gloo_process_groups=False,
    )
    front = MegatronOptimizerFront(optimizer, placed, inner)
    front.follow_options()
    placed.optimizer = front
    return front


def _check_parameters(optimizer: Optimizer, chunks: Sequence[nn.Module], groups: Sequence[set[int]]) -> None:
    held = {number for group in groups for number in group}
    own = {id(parameter): name for chunk in chunks for name, parameter in chunk.named_parameters()}
    left_out = [n for chunk in chunks for n, p in chunk.named_parameters() if p.requires_grad and id(p) not in held]
    if left_out:
        raise ConfigurationError(
            f"{type(optimizer).__name__} leaves out {len(left_out)} parameters that take gradients, such as "
            f"{left_out[0]}, but megatron-core steps all of a model. Freeze them (requires_grad_(False)), or give them "
            "to the optimizer, in a group with lr=0.",
            code="DT-046",
        )
    if not held <= own.keys():
        raise ConfigurationError(
            f"{type(optimizer).__name__} holds parameters outside of what model_provider built, which megatron-core "
            "does not step. Build them within the model.",
            code="DT-046",
        )
