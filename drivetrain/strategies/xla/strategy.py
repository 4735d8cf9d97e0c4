"""One model on the XLA devices of a process, which compile what a step computes as one graph."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from drivetrain.runtime import xla
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.state import PartialState
from drivetrain.strategies.base import Capability, RunOptions, Strategy
from drivetrain.strategies.capabilities import BatchPlacement, PlainEvaluation
from drivetrain.strategies.moving import move_in_place, refuse_left_behind
from drivetrain.strategies.optimizer_names import lay_out_state
from drivetrain.strategies.precision import Precision
from drivetrain.strategies.xla.batches import XLABatches
from drivetrain.strategies.xla.bfloat16 import Rounding
from drivetrain.strategies.xla.compilations import Compilations
from drivetrain.strategies.xla.gradients import AveragedGradients, XLAGradients
from drivetrain.strategies.xla.mesh import DeviceMesh, MeshShape, Spec
from drivetrain.strategies.xla.state import XLAState
from drivetrain.strategies.xla.tensor_plan import Plan, plan_specs


class XLA(Strategy):
    """A model on XLA devices such as TPUs; each step is recorded, compiled once, and launched as one graph.

    One process drives all devices of its machine (SPMD): its batch is the global one, whose rows are spread over the
    devices, and XLA inserts the collectives. Among several processes each drives one device.

    Args:
        tp: Devices that share the computation of each layer.
        tp_plan: Which layers are split how, as `Parallel` takes it; `Colwise` and `Rowwise` only.
        spmd: Drive all devices of this process as one; None where this is the only process and it has several.
        downcast_bf16: Let XLA round 32-bit floats to bfloat16, and compute 64-bit ones in 32 bits; as the launcher was
            asked if None.
        use_bf16: Let XLA round both to bfloat16.
        pad_evaluation: Fill up short batches in validation and test too; values that a step logs then include rows that
            stand in, unless it leaves them out by `self.trainer.batch_info.real_rows`.

    Attributes:
        compilations: How often XLA compiled.

    Raises:
        ConfigurationError: An option cannot be.
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
                f'tp={tp} needs to know which layers to split: give tp_plan={{"layers.*.wq": Colwise(), '
                '"layers.*.wo": Rowwise()}, or tp_plan="auto" for a model that carries a plan.',
                code="DT-057",
            )
        self._shape = MeshShape(tensor=tp)
        self._plan, self._spmd, self._pads = tp_plan, spmd, pad_evaluation
        self._rounding = Rounding.choose(downcast_bf16, use_bf16)
        self._mesh: DeviceMesh | None = None

    # processes and devices

    def setup(self, state: PartialState) -> None:
        """Start this process's XLA runtime, before anything else computes."""
        start = getattr(state.kind, "start", None)
        if state.kind.name != "xla" or start is None:
            raise ConfigurationError(
                f"strategy={self.name!r} needs an XLA device, but this process runs on {state.kind.name!r}. Give "
                f"Trainer(accelerator='xla') or Accelerator(device='xla'), or set {xla.RUNTIME_VARIABLE} (TPU, or CPU "
                "to try it out).",
                code="DT-022",
            )
        alone = not state.environment.is_distributed
        self._refuse_isolated_processes(alone)
        shape = self._shape
        wants_all = shape.tensor > 1 or shape.shard != 1
        spmd = alone and (xla.device_count() > 1 or wants_all) if self._spmd is None else self._spmd
        self._rounding.apply()
        start(spmd)
        super().setup(state)
        if spmd:
            runtime = importlib.import_module("torch_xla.runtime")
            if runtime.process_count() > 1:
                raise ConfigurationError(
                    f"One program over the devices of {runtime.process_count()} hosts is not supported yet. Run on "
                    "one host, or with one process for each device: notebook_launcher, or XLA(spmd=False).",
                    code="DT-034",
                )
            self._mesh = DeviceMesh(shape.fill(int(runtime.global_runtime_device_count())))
        elif wants_all:
            raise ConfigurationError(
                f"{self!r} shards over all devices of one process, which spmd=False forbids.", code="DT-004"
            )
        self.compilations = Compilations()
        self.state = XLAState(self.topology, self.unwrap, self._place_like)
        self.gradients = XLAGradients() if alone else AveragedGradients(state.num_processes)

    def _refuse_isolated_processes(self, alone: bool) -> None:
        if alone:
            return
        if xla.runs_on_cpu():
            raise ConfigurationError(
                "XLA on the CPU cannot join several processes: each would train alone and seem to work. Start one "
                "process; CPU_NUM_DEVICES=4 gives it four devices.",
                code="DT-034",
            )
        if self._spmd or self._shape.tensor > 1 or self._shape.shard != 1:
            raise ConfigurationError(
                f"{self!r} shards over all devices of one process, but this is one of several processes, each with a "
                "device of its own. Start one process on each host: without a number, `drivetrain launch` does.",
                code="DT-034",
            )

    def check(self, options: RunOptions) -> None:
        """Refuse formats that no XLA device computes in, and rounding that contradicts the precision."""
        precision = options.precision.name
        if precision == "fp8":
            raise ConfigurationError(
                f"precision='fp8' cannot run under strategy={self.name!r}: torch_xla compiles no products of 8-bit "
                "floats. Use 'bf16', 'bf16-true' or '32'.",
                code="DT-012",
            )
        if precision in ("fp16", "fp16-true"):
            raise ConfigurationError(
                f"precision={precision!r} cannot run under strategy={self.name!r}: TPUs compute in bfloat16. Use "
                "'bf16', 'bf16-true' or '32'.",
                code="DT-012",
            )
        self._rounding.check(precision)

    def capability(self, kind: type[Capability]) -> Capability | None:
        """Batches are spread over devices; tensors made in inference mode cannot be recorded."""
        if kind is BatchPlacement:
            return XLABatches(self.compilations, self._mesh, self._pads)  # type: ignore[return-value]
        return PlainEvaluation() if kind is PlainEvaluation else None  # type: ignore[return-value]

    # model

    def place(self, model: nn.Module, precision: Precision, move: bool = True) -> nn.Module:
        """Bring a model onto the devices: a copy on each, or spread over them."""
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
        """Over which axis each dimension of a parameter is sharded."""
        return split or (None,) * parameter.dim()

    def _place_like(self, tensor: torch.Tensor, parameter: torch.Tensor) -> None:
        if self._mesh is not None:
            self._mesh.shard_like(tensor, parameter)

    def prepare(
        self, model: nn.Module, optimizers: Sequence[Optimizer], precision: Precision, move: bool = True
    ) -> tuple[nn.Module, list[Optimizer]]:
        """Place a model; among several processes all begin with the values of the first."""
        before = dict(self.unwrap(model).named_parameters())
        placed = self.place(model, precision, move)
        refuse_left_behind(before, placed, optimizers)
        for optimizer in optimizers:
            lay_out_state(optimizer)
        if isinstance(self.gradients, AveragedGradients):
            importlib.import_module("torch_xla.core.xla_model").broadcast_master_param(placed)
            self.gradients.add(placed)
        return placed, list(optimizers)

    # one optimizer step

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Record the backward, and among several processes the averaging of gradients."""
        super().backward(loss, **kwargs)
        if isinstance(self.gradients, AveragedGradients):
            self.gradients.average()

    def optimizer_step(
        self, optimizer: Optimizer, precision: Precision, closure: Callable[[], Any] | None = None
    ) -> bool:
        """Record the step, and launch the graph; the host does not wait for it."""
        stepped = super().optimizer_step(optimizer, precision, closure)
        xla.sync()
        self.compilations.end_step()
        return stepped

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}()" if self._shape.tensor == 1 else f"{type(self).__name__}(tp={self._shape.tensor})"
        )
