"""`XLA` and `XLAFSDP`: strategies for TPUs and other XLA devices, which compile each step to one graph."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim import Optimizer

from drivetrain.runtime import xla
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.logging import get_logger
from drivetrain.runtime.pytrees import recursively_apply
from drivetrain.runtime.state import PartialState
from drivetrain.strategies.base import (
    BatchPlacement,
    Gradients,
    ModelState,
    PlacesBatches,
    RunOptions,
    StateDict,
    Strategy,
    keep_optimizers,
    move_in_place,
)
from drivetrain.strategies.precision import Precision
from drivetrain.strategies.wrapping import units_of
from drivetrain.strategies.xla.compilations import Compilations

logger = get_logger(__name__)

# Gradients on XLA devices


class XLAGradients(Gradients):
    """Gradient clipping for XLA devices, with a norm that is computed at least in float32.

    XLA itself reduces gradients over the devices of one process.
    """

    def clip_norm(self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip gradients to a total norm, and return the norm before clipping.

        The norm is computed at least in float32. XLA sums squares in the gradients' dtype. In bfloat16, the norm of a
        small model was 5 % too low.
        """
        given = list(parameters)
        gradients = [p.grad if p.grad.itemsize > 2 else p.grad.float() for p in given if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients, norm_type)
        nn.utils.clip_grads_with_norm_(given, max_norm, norm)
        return norm


class AveragedGradients(XLAGradients):
    # XLA compiles the collective into the step's graph and overlaps it with the backward. Averaging again does not
    # change averaged gradients, so several backwards of a step may each do it.

    def __init__(self, processes: int) -> None:
        # A dict, because a set has no order and all processes must reduce in the same order.
        self._models: WeakKeyDictionary[nn.Module, None] = WeakKeyDictionary()
        self._processes = processes
        self._held = False

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        before, self._held = self._held, True
        try:
            yield
        finally:
            self._held = before

    def add(self, model: nn.Module) -> None:
        self._models[model] = None

    def average(self) -> None:
        if self._held:
            return
        gradients = [p.grad for model in self._models for p in model.parameters() if p.grad is not None]
        if gradients:
            functions = importlib.import_module("torch_xla.core.xla_model")
            # In place, as a part of the graph that is being recorded.
            functions.all_reduce(functions.REDUCE_SUM, gradients, scale=1.0 / self._processes)


# `DeviceMesh`: the devices of one process as a grid, whose axes shard the dimensions of tensors


DATA, SHARD, TENSOR = "data", "fsdp", "tensor"
REST = -1
"""As many devices as the other axes leave."""

Spec = tuple[Any, ...]
"""For each dimension of a tensor, the axis or axes that it is sharded over; None where it is whole."""


_SPEC = "_drivetrain_xla_spec"


@dataclass(frozen=True)
class MeshShape:
    # Numbers of replicas of the model, of shards, and of parts of a split layer.

    data: int = REST
    shard: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not isinstance(value, int) or isinstance(value, bool) or (value < 1 and value != REST):
                raise ConfigurationError(f"The size of {name} must be a whole number of at least 1, got {value!r}.")
        if [*vars(self).values()].count(REST) > 1:
            raise ConfigurationError(f"Only one size can be {REST} (all remaining devices), got {self}.")

    @property
    def size(self) -> int:
        """Number of devices in the mesh: the product of the sizes of its axes."""
        return self.data * self.shard * self.tensor

    def fill(self, devices: int) -> MeshShape:
        """Return the mesh shape with -1 replaced by the remaining number of devices."""
        sizes = dict(vars(self))
        open_axis = next((name for name, value in sizes.items() if value == REST), None)
        given = 1
        for value in sizes.values():
            given *= 1 if value == REST else value
        if open_axis is not None and devices % given == 0:
            return replace(self, **{open_axis: devices // given})
        if open_axis is None and given == devices:
            return self
        divisors = [number for number in range(1, devices + 1) if devices % number == 0]
        raise ConfigurationError(
            f"data={self.data}, shard={self.shard} and tensor={self.tensor} do not multiply to the {devices} XLA "
            f"device(s) of this process. Sizes that fit: {', '.join(map(str, divisors))}. {REST} means all others.",
        )


class DeviceMesh:
    """XLA devices of this process, as a mesh over which tensors are sharded."""

    def __init__(self, shape: MeshShape) -> None:
        self.shape = shape
        self._sharding = importlib.import_module("torch_xla.distributed.spmd")

    @cached_property
    def mesh(self) -> Any:
        shape = self.shape
        return self._sharding.Mesh(range(shape.size), (shape.data, shape.shard, shape.tensor), (DATA, SHARD, TENSOR))

    def shard(self, tensor: torch.Tensor, spec: Spec) -> None:
        # `spec` is the mesh axis for each dimension, or None.
        if not any(axes is not None for axes in spec):
            return
        if not self.is_spread(tensor):
            self._sharding.mark_sharding(tensor, self.mesh, spec)

    def shard_parameter(self, parameter: nn.Parameter, spec: Spec) -> None:
        # `spec` is the mesh axis for each dimension, or None.
        if self.is_spread(parameter):
            self._sharding.clear_sharding(parameter)
            self._sharding.mark_sharding(parameter, self.mesh, spec)
        else:
            self.shard(parameter, spec)
        setattr(parameter, _SPEC, spec)  # not in a weak dict, since weak references keep parameters from being moved

    def shard_rows(self, tensor: torch.Tensor) -> None:
        if tensor.dim() and self.shape.data * self.shape.shard > 1:
            self.shard(tensor, ((DATA, SHARD), *[None] * (tensor.dim() - 1)))

    def shard_like(self, tensor: torch.Tensor, parameter: torch.Tensor) -> None:
        # A parameter's optimizer state is sharded as the parameter is.
        self.shard(tensor, getattr(parameter, _SPEC, (None,) * tensor.dim()))

    @staticmethod
    def is_spread(tensor: torch.Tensor) -> bool:
        """Return True if a tensor is sharded, and False if each device has a copy."""
        return DeviceMesh.spec_of(tensor) not in ("", "{replicated}")

    @staticmethod
    def spec_of(tensor: torch.Tensor) -> str:
        # XLA's own description. Empty if the tensor is not sharded.
        package = importlib.import_module("torch_xla")
        return str(package._XLAC._get_xla_sharding_spec(tensor))


def shard_spec(shape: Sequence[int], devices: int, taken: Spec | None = None) -> Spec:
    # A mesh axis or None for each dimension. The largest dimension that the number of devices divides is chosen, or
    # else the largest. `taken` contains axes that are already assigned, for example by tensor parallelism.
    spec = list(taken or [None] * len(shape))
    free = [dim for dim, axis in enumerate(spec) if axis is None]
    if devices == 1 or not free:
        return tuple(spec)
    # An uneven dimension is padded by XLA, so it is the second choice.
    best = max(free, key=lambda dim: (shape[dim] % devices == 0, shape[dim]))
    if shape[best] >= devices:
        spec[best] = SHARD
    return tuple(spec)


# Transfer of batches to XLA devices


class XLABatches(BatchPlacement):
    # Before each transfer, the computation recorded so far is started.

    def __init__(self, compilations: Compilations, mesh: DeviceMesh | None, fills_evaluation: bool) -> None:
        self.fills_evaluation = fills_evaluation
        self._compilations, self._mesh = compilations, mesh

    def around(self, place: Callable[[Any], Any]) -> Callable[[Any], Any]:
        mesh, compilations = self._mesh, self._compilations

        def shard(tensor: torch.Tensor) -> torch.Tensor:
            if mesh is not None and tensor.device.type == "xla":
                mesh.shard_rows(tensor)
            return tensor

        def place_and_shard(batch: Any) -> Any:
            # Launched before the transfer, so that the devices compute while the host moves the next batch.
            self.finish()
            placed = place(batch)
            compilations.record_batch(placed)
            return placed if mesh is None else recursively_apply(shard, placed)

        return place_and_shard

    def finish(self) -> None:
        xla.sync()
        self._compilations.end_batch()


# Copies of sharded tensors on the CPU


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a full CPU copy of a tensor that may be sharded over XLA devices.

    `Tensor.cpu()` compiles and runs a program that gathers a sharded tensor on each device at every call (torch_xla
    2.9). This function transfers each part and compiles nothing.
    """
    bare = tensor.detach()
    if tensor.device.type != "xla" or not DeviceMesh.is_spread(tensor):
        return bare.cpu()
    sharded = importlib.import_module("torch_xla.distributed.spmd").XLAShardedTensor
    whole = torch.empty(tensor.shape, dtype=tensor.dtype)
    for part in sharded(tensor).local_shards:
        if part.replica_id == 0:
            # Parts have equal sizes, so the last ones may contain padding.
            own = tuple(slice(0, place.stop - place.start) for place in part.indices)
            whole[tuple(part.indices)] = part.data[own]
    return whole


# State of models on XLA devices, as full tensors on the CPU


class XLAState(ModelState):
    """State dicts for checkpoints on XLA devices, with full tensors on the CPU."""

    held_as = "parts"

    def __init__(self, strategy: Strategy, place_like: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
        super().__init__(strategy)
        self._place_like = place_like

    def model(self, model: nn.Module, full: bool = False, everywhere: bool = False) -> StateDict:
        xla.sync()
        if full and self.strategy.topology.rank != 0:
            return {}
        state = self.strategy.unwrap(model).state_dict(keep_vars=True)
        held = {name: to_host(value) if isinstance(value, torch.Tensor) else value for name, value in state.items()}
        return {name: value for name, value in held.items() if isinstance(value, torch.Tensor)} if full else held

    def optimizer(self, model: nn.Module, optimizer: Optimizer) -> StateDict:
        xla.sync()
        state = super().optimizer(model, optimizer)
        return {**state, "state": recursively_apply(to_host, state["state"])}

    def load_model(self, model: nn.Module, state: StateDict, strict: bool = True) -> Any:
        known = self.strategy.unwrap(model).state_dict(keep_vars=True)
        spread = {name: self._spread(value, known.get(name)) for name, value in state.items()}
        # The sync below keeps the transfer out of the next step's graph.
        result = super().load_model(model, spread, strict)
        xla.sync()
        return result

    def _spread(self, value: Any, parameter: Any) -> Any:
        tensors = isinstance(value, torch.Tensor) and isinstance(parameter, nn.Parameter)
        if not tensors or parameter.device.type != "xla" or value.shape != parameter.shape:
            return value
        # `copy_` would send the full value to each device.
        moved = value.detach().to(parameter.device, parameter.dtype)
        self._place_like(moved, parameter)
        return moved

    def load_optimizer(self, model: nn.Module, optimizer: Optimizer, state: StateDict) -> None:
        super().load_optimizer(model, optimizer, state)
        for parameter, held in optimizer.state.items():
            for value in held.values():
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.device.type == "xla":
                    self._place_like(value, parameter)
        xla.sync()


# Tensor parallelism on XLA devices


Plan = Mapping[str, Any]


def plan_specs(model: nn.Module, plan: Plan | str | None, devices: int) -> dict[str, Spec]:
    # By parameter name: a mesh axis or None for each dimension.
    if devices == 1 or plan is None:
        return {}
    from drivetrain.strategies.parallel.tensor import Colwise, Rowwise, plan_matches, plan_of_model

    if isinstance(plan, str):
        plan = plan_of_model(model)
    dimensions = {
        (Colwise, nn.Linear): 0,
        (Rowwise, nn.Linear): 1,
        (Colwise, nn.Embedding): 1,
        (Rowwise, nn.Embedding): 0,
    }
    specs: dict[str, Spec] = {}
    for match in plan_matches(model, plan, devices):
        kinds = [pair for pair in dimensions if type(match.style) is pair[0] and isinstance(match.module, pair[1])]
        if not kinds:
            raise ConfigurationError(
                f"tp_plan assigns the style {type(match.style).__name__} to {match.name!r}, a "
                f"{type(match.module).__name__}. On XLA devices, only nn.Linear and nn.Embedding take a style: "
                "Colwise() or Rowwise(). Remove the other modules, since XLA decides how to compute them.",
                see="parallel.md",
            )
        dimension = dimensions[kinds[0]]
        specs[f"{match.name}.weight"] = (TENSOR, None) if dimension == 0 else (None, TENSOR)
        if getattr(match.module, "bias", None) is not None and dimension == 0:
            specs[f"{match.name}.bias"] = (TENSOR,)
    return specs


class XLA(Strategy, PlacesBatches):
    """Strategy for XLA devices such as TPUs.

    XLA compiles each step as a whole at its first run. One process uses all devices of its machine (SPMD): its batch is
    the global batch, whose rows are sharded over the devices, and XLA inserts the collectives. With several processes,
    each uses one device.

    Args:
        tp: The number of devices that share the computation of each layer.
        tp_plan: The tensor-parallel plan, as in `Parallel`. Only `Colwise` and `Rowwise` are supported.
        spmd: True to use all devices of this process as one. None enables it for a single process with several devices.
        downcast_bf16: True to let XLA round float32 to bfloat16 and compute float64 in float32. None uses the
            launcher's setting.
        use_bf16: True to let XLA round both to bfloat16.
        pad_evaluation: True to pad short batches in validation and test too. Values that a step logs then include
            padding rows, unless it selects `self.trainer.batch_info.real_rows`.

    Attributes:
        compilations: The number of compilations so far.

    Raises:
        ConfigurationError: An option is not supported.
    """

    name = "xla"
    compilations: Compilations

    def __init__(
        self,
        *,
        tp: int = 1,
        tp_plan: Plan | str | None = None,
        spmd: bool | None = None,
        downcast_bf16: bool | None = None,
        use_bf16: bool = False,
        pad_evaluation: bool = False,
    ) -> None:
        if tp > 1 and tp_plan is None:
            raise ConfigurationError(
                f'tp={tp} needs a plan of the layers to split. Use tp_plan={{"layers.*.wq": Colwise(), "layers.*.wo": '
                'Rowwise()}, or tp_plan="auto" for a model that contains a plan.',
                see="parallel.md",
            )
        self._shape = MeshShape(tensor=tp)
        self._plan, self._spmd, self._pads = tp_plan, spmd, pad_evaluation
        self._rounding = Rounding.choose(downcast_bf16, use_bf16)
        self._mesh: DeviceMesh | None = None

    # processes and devices

    def setup(self, state: PartialState) -> None:
        start = getattr(state.kind, "start", None)
        if state.kind.name != "xla" or start is None:
            raise ConfigurationError(
                f"strategy={self.name!r} needs an XLA device, but this process runs on {state.kind.name!r}. Use "
                f"Trainer(accelerator='xla') or Accelerator(device='xla'), or set {xla.RUNTIME_VARIABLE} to TPU, or "
                "to CPU for a test.",
            )
        alone = not state.environment.is_distributed
        self._refuse_isolated_processes(alone)
        shape = self._shape
        wants_all = shape.tensor > 1 or shape.shard != 1
        spmd = alone and (xla.device_count() > 1 or wants_all) if self._spmd is None else self._spmd
        self._rounding.apply()
        # SPMD and the rounding must be chosen before the XLA runtime starts, which its first use does.
        start(spmd)
        super().setup(state)
        if spmd:
            runtime = importlib.import_module("torch_xla.runtime")
            if runtime.process_count() > 1:
                raise ConfigurationError(
                    f"One program for the devices of {runtime.process_count()} hosts is not supported. Run on one "
                    "host, or start one process for each device with notebook_launcher or XLA(spmd=False).",
                )
            self._mesh = DeviceMesh(shape.fill(int(runtime.global_runtime_device_count())))
        elif wants_all:
            raise ConfigurationError(f"{self!r} needs all devices of one process. Remove spmd=False.")
        self.compilations = Compilations()
        self.state = XLAState(self, self._place_like)
        self.gradients = XLAGradients() if alone else AveragedGradients(state.num_processes)

    def _refuse_isolated_processes(self, alone: bool) -> None:
        if alone:
            return
        if xla.runs_on_cpu():
            raise ConfigurationError(
                "XLA on the CPU cannot connect several processes, so each would train its own model. Start one "
                "process, for example with four devices by CPU_NUM_DEVICES=4.",
            )
        if self._spmd or self._shape.tensor > 1 or self._shape.shard != 1:
            raise ConfigurationError(
                f"{self!r} shards over all devices of one process, but this run has several processes with one device "
                "each. Start one process on each host, which is the default of `drivetrain launch`.",
            )

    def check(self, options: RunOptions) -> None:
        precision = options.precision.name
        if precision == "fp8":
            raise ConfigurationError(
                f"precision='fp8' is not supported with strategy={self.name!r}, because torch_xla cannot multiply "
                "float8 matrices. Use 'bf16', 'bf16-true' or '32'.",
                see="precision.md",
            )
        if precision in ("fp16", "fp16-true"):
            raise ConfigurationError(
                f"precision={precision!r} is not supported with strategy={self.name!r}, because TPUs compute in "
                "bfloat16. Use 'bf16', 'bf16-true' or '32'.",
                see="precision.md",
            )
        self._rounding.check(precision)

    @property
    def batch_placement(self) -> XLABatches:  # type: ignore[override]
        """Object that moves each batch to the XLA devices and splits its samples over them."""
        return XLABatches(self.compilations, self._mesh, self._pads)

    # model

    def _place(self, model: nn.Module, precision: Precision, move: bool) -> nn.Module:
        converted = precision.convert(model)
        if not move:
            return converted
        mesh, device = self._mesh, self.topology.device
        if mesh is None:
            placed = move_in_place(converted, device)
        else:
            specs = plan_specs(converted, self._plan, mesh.shape.tensor)

            def spread(name: str, parameter: nn.Parameter) -> None:
                mesh.shard_parameter(parameter, self._spec(parameter, specs.get(name)))

            placed = move_in_place(converted, device, spread)
        xla.sync()
        return placed

    def _spec(self, parameter: nn.Parameter, split: Spec | None) -> Spec:
        return split or (None,) * parameter.dim()

    def _place_like(self, tensor: torch.Tensor, parameter: torch.Tensor) -> None:
        if self._mesh is not None:
            self._mesh.shard_like(tensor, parameter)

    def prepare(
        self, model: nn.Module, optimizers: Sequence[Optimizer] | None, precision: Precision, move: bool = True
    ) -> tuple[nn.Module, list[Optimizer]]:
        before = dict(self.unwrap(model).named_parameters())
        placed = self._place(model, precision, move)
        if optimizers is None:
            return placed, []
        keep_optimizers(before, placed, optimizers)
        if isinstance(self.gradients, AveragedGradients):
            # All processes start with the weights of rank 0.
            importlib.import_module("torch_xla.core.xla_model").broadcast_master_param(placed)
            self.gradients.add(placed)
        return placed, list(optimizers)

    # one optimizer step

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        super().backward(loss, **kwargs)
        if isinstance(self.gradients, AveragedGradients):
            self.gradients.average()

    def optimizer_step(
        self, optimizer: Optimizer, precision: Precision, closure: Callable[[], Any] | None = None
    ) -> bool:
        stepped = super().optimizer_step(optimizer, precision, closure)
        xla.sync()
        # `xla.sync` launches the recorded graph of the step, and does not wait for its results.
        self.compilations.end_step()
        return stepped

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}()" if self._shape.tensor == 1 else f"{type(self).__name__}(tp={self._shape.tensor})"
        )


# Sharded parameters, gradients and optimizer state


class XLAFSDP(XLA):
    """Strategy for TPUs that shards each parameter, with its gradient and optimizer state, over XLA devices.

    Method: Xu et al., 2021, https://arxiv.org/abs/2105.04663. Each parameter is sharded along one dimension. XLA
    gathers it where it is used, and shards its gradient and optimizer state in the same way.

    Args:
        replicate_size: The number of replicas of the sharded model.
        wrap: The blocks, as in `FSDP`, whose outputs stay sharded by rows and between which gradients are not fused.
        tp: The number of devices that share the computation of each layer.
        tp_plan: The tensor-parallel plan, as in `Parallel`.
        **options: Further options of `XLA`.
    """

    name = "xla_fsdp"

    def __init__(
        self,
        *,
        replicate_size: int = 1,
        wrap: Any = "auto",
        tp: int = 1,
        tp_plan: Plan | str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(tp=tp, tp_plan=tp_plan, **options)
        self._shape = MeshShape(data=replicate_size, shard=REST, tensor=tp)
        self._wrap = wrap

    def _place(self, model: nn.Module, precision: Precision, move: bool) -> nn.Module:
        placed = super()._place(model, precision, move)
        mesh = self._mesh
        if mesh is None or not move:
            return placed

        def spread_output(module: nn.Module, inputs: Any, output: Any) -> Any:
            return recursively_apply(spread, output)

        def spread(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.device.type == "xla" and tensor.dim():
                mesh.shard_rows(tensor)
            return tensor

        barrier = importlib.import_module("torch_xla.distributed.spmd.xla_sharding").apply_backward_optimization_barrier
        # Outputs stay sharded by rows between blocks, and backward does not fuse the gradients of two blocks.
        for block in units_of(placed, self._wrap):
            if not hasattr(block, _MARKED):
                object.__setattr__(block, _MARKED, True)
                block.register_forward_hook(spread_output)
                barrier(block)
        return placed

    def _spec(self, parameter: nn.Parameter, split: Spec | None) -> Spec:
        assert self._mesh is not None
        return shard_spec(parameter.shape, self._mesh.shape.shard, split)


_MARKED = "_drivetrain_spread"


# Rounding of float tensors to bfloat16 inside XLA, while torch still reports float32


DOWNCAST_VARIABLE = "DRIVETRAIN_DOWNCAST_BF16"
"""Environment variable that `drivetrain launch --downcast_bf16` sets to 1."""


@dataclass(frozen=True)
class Rounding:
    """An option to round floats to bfloat16 in torch_xla, with the environment variable that enables it."""

    option: str | None = None
    variable: str | None = None

    @classmethod
    def choose(cls, downcast: bool | None, use: bool) -> Rounding:
        if downcast and use:
            raise ConfigurationError("downcast_bf16=True and use_bf16=True cannot be combined. Use only one.")
        if use:
            return cls("use_bf16=True", "XLA_USE_BF16")
        if downcast is None:
            downcast = os.environ.get(DOWNCAST_VARIABLE, "").lower() in {"1", "true", "yes", "on"}
        return cls("downcast_bf16=True", "XLA_DOWNCAST_BF16") if downcast else cls()

    def apply(self) -> None:
        # torch_xla reads the variable only when the XLA runtime starts.
        if self.variable is None or os.environ.get(self.variable) == "1":
            return
        if xla.is_started():
            raise ConfigurationError(
                f"{self.option} must be set before this process first uses XLA, which it has already done. Set "
                f"{self.variable}=1 before the process starts.",
            )
        os.environ[self.variable] = "1"

    def check(self, precision: str) -> None:
        if self.variable is None:
            return
        if precision != "bf16":
            raise ConfigurationError(
                f"{self.option} computes in bfloat16, but the precision is {precision!r}. Use precision='bf16' with "
                "it, or remove it.",
            )
        # 1 + 2^-12 needs more than the 8 bits of bfloat16's significand, so it becomes 1.0 if XLA rounds.
        value = torch.tensor([1.0 + 2.0**-12], device=xla.device()).cpu()
        if value.item() != 1.0:
            logger.warning(
                f"This version of torch_xla does not read {self.variable}, so {self.option} has no effect. The "
                "forward pass runs under autocast to bfloat16, and parameters stay in float32."
            )
