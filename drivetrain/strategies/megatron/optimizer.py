"""Megatron-core's optimizer behind the interface of the user's torch optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.runtime.errors import ConfigurationError
from drivetrain.strategies.base import Gradients, OptimizerProxy, Topology, scale_tensors
from drivetrain.strategies.megatron.configuration import MegatronOptions, optimizer_config
from drivetrain.strategies.megatron.model import PlacedModel, PlacedModels

GROUP = "group_index"
# Keys of a parameter group that megatron-core uses internally.
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
    # `prepare` returns this in place of the user's optimizer. Its steps are those of megatron-core's optimizer.

    def __init__(self, optimizer: Optimizer, placed: PlacedModel, inner: Any) -> None:
        # Not Optimizer.__init__: groups and defaults are those of the optimizer inside.
        self.__dict__.update(optimizer=optimizer, placed=placed, inner=inner, overflowed=None, clipped=False)

    @property
    def state(self) -> Any:
        # By the tensors that megatron-core's optimizer steps, not by the model's parameters.
        return self.inner.state

    @state.setter
    def state(self, state: Any) -> None:
        raise TypeError("The optimizer state is held by megatron-core. Load it with strategy.state.load_optimizer.")

    def __getattr__(self, name: str) -> Any:
        if name in ("optimizer", "placed", "inner"):
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    @property
    def parts(self) -> list[Any]:
        # Such as one for dense parameters and one for experts.
        return [part for part in self.inner.chained_optimizers if not getattr(part, "is_stub_optimizer", False)]

    def prepare_gradients(self) -> bool:
        # True on overflow. Further calls before the step only return the result of the first.
        if self.overflowed is None:
            self.__dict__["overflowed"] = bool(self.inner.prepare_grads())
        found: bool = self.overflowed
        return found

    def stepped_parameters(self) -> list[Tensor]:
        return [parameter for part in self.parts for parameter in part.get_parameters()]

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.placed.zero_gradients()
        self.inner.zero_grad(set_to_none)
        self.__dict__.update(overflowed=None, clipped=False)

    def step(self, closure: Callable[[], Any] | None = None) -> bool:  # type: ignore[override]
        """Step the optimizer. Return False if a gradient overflowed and the step was skipped."""
        if closure is not None:
            raise ConfigurationError(
                f"{type(self.optimizer).__name__} under strategy='megatron' accepts no closure, because the schedule "
                "runs forward and backward. Call step without it.",
            )
        overflowed = self.prepare_gradients()
        self.follow_options()
        stepped = not overflowed and bool(self.inner.step_with_ready_grads())
        self.__dict__.update(overflowed=None, clipped=False)
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers warn otherwise
        return stepped

    def follow_options(self) -> None:
        for group in self.inner.param_groups:
            given = self.optimizer.param_groups[group[GROUP]]
            for name, value in given.items():
                if name in group and name not in INTERNAL:
                    group[name] = value


def make_optimizer(
    optimizer: Optimizer, placed: PlacedModel, options: MegatronOptions, low: torch.dtype | None
) -> MegatronOptimizerFront:
    # A collective call.
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
        # Megatron-core's checkpoints tell groups apart by `lr_mult`, which nothing else reads.
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
            f"{type(optimizer).__name__} leaves out {len(left_out)} trainable parameters, such as {left_out[0]}, but "
            "megatron-core steps all of a model. Freeze them (requires_grad_(False)), or add them to the optimizer "
            "in a group with lr=0.",
        )
    if not held <= own.keys():
        raise ConfigurationError(
            f"{type(optimizer).__name__} holds parameters that model_provider did not create, which megatron-core "
            "does not step. Create them within the model.",
        )


# The gradients that megatron-core accumulates in buffers of its own


class BufferedGradients(Gradients):
    """Accumulation, scaling and clipping of gradients that megatron-core keeps in its own buffers."""

    def __init__(self, models: PlacedModels, topology: Topology, clipping: float | None) -> None:
        self._models, self._topology, self._clipping = models, topology, clipping

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        placed = self._models.find(model)
        return nullcontext() if placed is None or placed.optimizer is None else _within_window(placed)

    def are_held(self, model: nn.Module) -> bool:
        placed = self._models.find(model)
        return placed is not None and bool(placed.held_gradients())

    def clip_norm(self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        front = self._stepped(parameters)
        if front is None:
            return torch.zeros((), device=self._topology.device)
        if self._clipping is not None and max_norm not in (self._clipping, float("inf")):
            raise ConfigurationError(
                f"Megatron(gradient_clipping={self._clipping}) contradicts the loop, which clips to {max_norm}. Set "
                "only one of the two.",
            )
        front.prepare_gradients()
        total = _total_norm(front, norm_type)
        if max_norm != float("inf"):
            _clip(front, max_norm, total)
        return torch.tensor(total, device=self._topology.device)

    def clip_by_default(self, front: MegatronOptimizerFront) -> None:
        if self._clipping is not None and not front.clipped and not front.prepare_gradients():
            _clip(front, self._clipping, _total_norm(front, 2.0))

    def scale(
        self,
        parameters: Sequence[torch.Tensor],
        factor: torch.Tensor | float = 1.0,
        bound: float | None = None,
        model: nn.Module | None = None,
    ) -> None:
        if model is not None:
            placed = self._models.find(model)
            for chunk in placed.wrapped if placed is not None and placed.optimizer is not None else ():
                chunk.scale_gradients(factor)  # type: ignore[operator]
            return
        front = self._stepped(parameters)
        if front is not None and not front.prepare_gradients():
            stepped = front.stepped_parameters()
            scale_tensors([each.grad for each in stepped if each.grad is not None], factor, bound)

    def _stepped(self, parameters: Iterable[torch.Tensor]) -> MegatronOptimizerFront | None:
        wanted = {id(parameter) for parameter in parameters}
        for placed in self._models:
            if placed.optimizer is not None and any(id(p) in wanted for p in placed.owner.parameters()):
                return placed.optimizer
        return None


def _total_norm(front: MegatronOptimizerFront, norm_type: float) -> float:
    if norm_type == 2.0:
        return float(front.inner.get_grad_norm())
    from megatron.core.optimizer.clip_grads import get_grad_norm_fp32

    # Dense layers and experts are sharded over different groups, so that their norms are combined last.
    norms = [
        float(get_grad_norm_fp32(part.get_main_grads_for_grad_norm(), norm_type, part.get_grad_stats_parallel_group()))
        for part in front.inner.chained_optimizers
    ]
    return float(torch.linalg.vector_norm(torch.tensor(norms, dtype=torch.float64), norm_type))


def _clip(front: MegatronOptimizerFront, max_norm: float, total: float) -> None:
    from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

    for part in front.parts:
        decoupled = part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
        clip_grad_by_total_norm_fp32(part.get_parameters(), max_norm, total, decoupled)
    front.__dict__["clipped"] = True


@contextmanager
def _within_window(placed: PlacedModel) -> Iterator[None]:
    before, placed.accumulates = placed.accumulates, True
    try:
        with ExitStack() as stack:
            for chunk in placed.wrapped:
                stack.enter_context(chunk.no_sync())  # type: ignore[operator]
            yield
    finally:
        placed.accumulates = before


# State of megatron-core's optimizer for each parameter of this process's part of the model


class Stepped(NamedTuple):
    """Tensor that megatron-core steps to update a parameter, such as the parameter's float32 copy.

    Attributes:
        part: The megatron-core optimizer that steps it.
        main: The stepped tensor, or None if another process steps the full parameter.
        start: The offset in the flattened parameter if the optimizer is distributed, else None.
    """

    part: Any
    main: Tensor | None
    start: int | None

    @property
    def group(self) -> dist.ProcessGroup | None:
        return None if self.start is None else self.part.data_parallel_group


class ParameterState:
    """Reader and writer of each parameter's master weight and state in megatron-core's optimizer."""

    def __init__(self, front: MegatronOptimizerFront) -> None:
        self._front = front
        self._distributed: dict[int, Any] = {}
        self._whole: dict[int, Any] = {}
        for part in front.parts:
            if hasattr(part, "gbuf_ranges"):
                self._distributed.update({id(p): part for buffer in part.buffers for p in buffer.params})
            else:
                self._whole.update({id(p): part for p in part.get_parameters()})

    def is_stepped(self, parameter: Tensor) -> bool:
        main = getattr(parameter, "main_param", parameter)
        return id(parameter) in self._distributed or id(main) in self._whole

    def find(self, parameter: Tensor) -> Stepped:
        part = self._distributed.get(id(parameter))
        if part is None:
            main = getattr(parameter, "main_param", parameter)
            return Stepped(self._whole[id(main)], main, None)
        # Another process of the group steps the parameter.
        if parameter not in part.model_param_group_index_map:
            return Stepped(part, None, 0)
        group, order = part.model_param_group_index_map[parameter]
        main = part.optimizer.param_groups[group]["params"][order]
        return Stepped(part, main, part._get_model_param_range_map(parameter)["param"].start)

    def keys(self) -> dict[str, bool]:
        # Whether each kind of optimizer state has the parameter's size.
        found: dict[str, bool] = {}
        for part in self._front.parts:
            for main, values in part.optimizer.state.items():
                for key, value in values.items():
                    # By name, too, because a parameter with one element has the size of a step count.
                    found[key] = isinstance(value, Tensor) and value.numel() == main.numel() and key != "step"
        return found

    def steps(self) -> float | None:
        """Return the number of steps that the optimizer has taken, or None if uncounted."""
        for part in self._front.parts:
            for values in part.optimizer.state.values():
                if "step" in values:
                    return float(values["step"])
            for group in part.optimizer.param_groups:
                if "step" in group:
                    return float(group["step"])
        return None

    def make(self) -> None:
        # A checkpoint is loaded into the state, which megatron-core otherwise creates in its first step.
        for part in self._front.parts:
            if part.optimizer.state or not hasattr(part, "gbuf_ranges"):
                continue
            rates = [(group, group["lr"]) for group in part.optimizer.param_groups]
            for group, _ in rates:
                group["lr"] = 0.0  # the state is created by a step, which must not change any weights
            part._init_optimizer_states_with_dummy_values()
            for group, rate in rates:
                group["lr"] = rate
            self.write_steps(0.0)

    def read(self, parameter: Tensor, key: str | None) -> Tensor:
        # `key` names the state. None is the master weight. A collective call of the processes that step the parameter
        # together.
        stepped = self.find(parameter)
        value: Tensor | None = stepped.main
        if value is not None and key is not None:
            value = stepped.part.optimizer.state[value][key]
        if stepped.group is None:
            assert value is not None
            return value.detach().float()
        # Each process fills in its shard, and the sum over processes joins the shards.
        whole = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
        if value is not None:
            assert stepped.start is not None
            whole[stepped.start : stepped.start + value.numel()] = value.detach().float().view(-1)
        dist.all_reduce(whole, group=stepped.group)
        return whole.view(parameter.shape)

    def write(self, parameter: Tensor, key: str | None, value: Tensor) -> None:
        # `key` names the state. None is the master weight. `value` is a full tensor.
        stepped = self.find(parameter)
        if stepped.main is None:
            return
        if stepped.start is not None:
            value = value.reshape(-1)[stepped.start : stepped.start + stepped.main.numel()].view(stepped.main.shape)
        if key is None:
            with torch.no_grad():
                stepped.main.copy_(value)
        else:
            stepped.part.optimizer.state[stepped.main][key] = torch.empty_like(stepped.main).copy_(value)

    def write_steps(self, steps: float) -> None:
        for part in self._front.parts:
            inner = part.optimizer
            for group in inner.param_groups:
                if "step" in group:
                    group["step"] = int(steps)
            # Torch's optimizers keep the count in each parameter's state. SGD has none.
            if type(inner).__module__.startswith("torch.optim") and type(inner) is not torch.optim.SGD:
                for group in inner.param_groups:
                    for main in group["params"]:
                        inner.state[main]["step"] = torch.tensor(steps)
