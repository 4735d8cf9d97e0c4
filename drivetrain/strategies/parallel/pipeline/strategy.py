"""`Pipeline`: a model's layers spread over processes, micro-batches running through them one after another.

The schedules are those of `torch.distributed.pipelining`; what a stage computes is the model's own forward, of which
each process runs its part (`pipeline_stage`). The task stays as it is: where its step calls the model, that ends the
step on all stages but the last, which continues with what came out of the pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from drivetrain.runtime.collectives import broadcast
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.state import PartialState
from drivetrain.strategies.base import MicroBatch, Output, Strategy, View
from drivetrain.strategies.fsdp import sharding
from drivetrain.strategies.fsdp.parameters import ReplacedParameters, slots_of
from drivetrain.strategies.fsdp.strategy import largest_anywhere
from drivetrain.strategies.parallel.layers import Layers
from drivetrain.strategies.parallel.mesh import MeshSizes
from drivetrain.strategies.parallel.pipeline.calls import ModelCalls
from drivetrain.strategies.parallel.pipeline.evaluation import StagedEvaluation
from drivetrain.strategies.parallel.pipeline.gradients import StagedGradients
from drivetrain.strategies.parallel.pipeline.options import PipelineGroup, PipelineOptions
from drivetrain.strategies.parallel.pipeline.split_model import SplitModel
from drivetrain.strategies.parallel.pipeline.stage_state import StagedState
from drivetrain.strategies.parallel.pipeline.window import TrainingWindow
from drivetrain.strategies.parallel.whole_model import move_real_tensors, placed_before, remember_placed
from drivetrain.strategies.precision import Precision
from drivetrain.strategies.step_module import StepModule
from drivetrain.strategies.topology import Topology


class StagePlacer(Protocol):
    """What brings the modules of one stage onto the processes that share it."""

    @property
    def shards(self) -> bool:
        """Whether parameters are sharded, or gradients averaged, over any processes."""

    def units(self, model: nn.Module) -> list[nn.Module]:
        """The modules of the whole model that are gathered or recomputed as one."""

    def place(self, stage: nn.Module, precision: Precision, units: Sequence[nn.Module]) -> None:
        """Shard the modules of a stage, or leave them whole.

        Args:
            stage: The stage.
            precision: The number formats.
            units: Those of the whole model that are in it.
        """


class Pipeline(Strategy):
    """One process's part of a pipeline.

    Args:
        options: How the model is split and scheduled.
        sizes: Those of the grid of processes.
        topology: This process's place, at which the last stage computes losses.
        place: This process among those of the pipeline.
        stage_placer: Shards stages, or leaves them whole.
        layers: Splits layers over tensor-parallel processes, or leaves them whole.

    Raises:
        ConfigurationError: The schedule cannot run on sharded stages.
    """

    name = "parallel"
    schedules_microbatches = True
    needs_even_batches = True
    state: StagedState

    def __init__(
        self,
        options: PipelineOptions,
        sizes: MeshSizes,
        topology: Topology,
        place: PipelineGroup,
        stage_placer: StagePlacer,
        layers: Layers,
    ) -> None:
        kind = place.stages.kind
        if stage_placer.shards and "zero_bubble" in kind.name:
            # Gradients of weights come late there, past what fully_shard watches (torch 2.13): losses went wrong.
            raise ConfigurationError(
                f"pp_schedule={kind.name!r} computes the gradients of weights apart, which sharded or replicated "
                "stages (dp_shard, dp_replicate) would lose. Use 'interleaved_1f1b' or '1f1b'.",
                code="DT-068",
            )
        self._options, self._sizes, self._place = options, sizes, place
        self._stage_placer, self._layers = stage_placer, layers
        self._replaced = ReplacedParameters()
        self._calls: ModelCalls | None = None
        self._window: TrainingWindow | None = None
        self.topology = topology
        self.gradients = StagedGradients(topology.rank, place.group, topology.device)
        self.state = StagedState(topology, self.unwrap, lambda: self._prepared().split)

    def setup(self, state: PartialState) -> None:
        """Nothing is left to do: the grid that this pipeline is in has its place already."""

    # model

    def place(self, model: nn.Module, precision: Precision, move: bool = True) -> nn.Module:
        """Spread a model over stages, split its layers, and shard what is left."""
        bare = self.unwrap(model)
        known = placed_before(bare, self._sizes)
        if known is not None:
            self._take(SplitModel.found_in(self.unwrap(known), self._options, self._place))
            return known
        model = precision.convert(model)
        with torch.no_grad():
            broadcast([tensor.detach() for tensor in (*model.parameters(), *model.buffers())])
        units = self._stage_placer.units(model)
        split, elsewhere = self._split(model, precision)
        if move:
            move_real_tensors(model, self.topology.device)
        self._layers.split(model, elsewhere)
        for stage in split.modules:
            inside = {id(module) for module in stage.modules() if module is not stage}
            self._stage_placer.place(stage, precision, [unit for unit in units if id(unit) in inside])
        self._take(split)
        sharding.take_shards_on_load(model)
        remember_placed(bare, model, self._sizes)
        return model

    def _split(self, model: nn.Module, precision: Precision) -> tuple[SplitModel, frozenset[int]]:
        """Split a model; also the `id` of modules whose parameters other stages hold."""
        if not isinstance(model, StepModule):
            raise ConfigurationError(
                f"pp={self._place.stages.ranks} spreads {type(model).__name__} over processes, and forward and "
                "backward of all micro-batches of a step run interleaved, which a loop with loss.backward() cannot do. "
                "Use the Trainer, or another strategy.",
                code="DT-051",
            )
        slots = slots_of(model)
        split = SplitModel.make(
            self.unwrap(model),
            self._options,
            self._place,
            self.topology.device,
            precision,
            whole_outside=not self._stage_placer.shards,
        )
        gone = [module for module, name, before in slots if not before.is_meta and module._parameters[name].is_meta]  # type: ignore[union-attr]
        return split, frozenset(id(module) for module in gone)

    def _take(self, split: SplitModel) -> None:
        """Make the schedule, once the stages' modules are sharded and placed."""
        split.put_back()
        split.remember()
        self._calls = ModelCalls(split, self._place.stages.count)
        self._window = TrainingWindow(self._calls, self._place, self.topology)

    def _prepared(self) -> ModelCalls:
        assert self._calls is not None, "no model has been prepared"
        return self._calls

    def prepare(
        self, model: nn.Module, optimizers: Sequence[Optimizer], precision: Precision, move: bool = True
    ) -> tuple[nn.Module, list[Optimizer]]:
        """Split a model, and let optimizers step this process's parameters only; their groups stay, some empty."""
        slots = slots_of(model)
        placed = self.place(model, precision, move)
        self._replaced.follow(slots, optimizers)
        precision.agree_on_overflow(largest_anywhere)
        for optimizer in optimizers:
            if isinstance(optimizer, torch.optim.LBFGS):
                raise ConfigurationError(
                    "LBFGS searches along all parameters at once, which a pipeline has spread.", code="DT-048"
                )
            self._prepared().split.holdings.follow(optimizer)
        return placed, list(optimizers)

    def view(self, model: nn.Module, stage: View) -> nn.Module:
        """The module to call; in evaluation one whose calls go through all stages."""
        return StagedEvaluation(self._prepared(), self._place, self.topology) if stage == "evaluate" else model

    # one optimizer step

    def forward_backward(
        self, model: nn.Module, step_fn: Callable[[MicroBatch], Output], microbatches: Sequence[MicroBatch]
    ) -> list[Output]:
        """Run forward and backward over the micro-batches of one optimizer step, interleaved over stages."""
        assert self._window is not None
        return self._window.run(step_fn, microbatches)  # type: ignore[return-value]

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Leave a loss to the schedule."""
        assert self._window is not None
        self._window.backward(loss, **kwargs)

    def optimizer_step(
        self, optimizer: Optimizer, precision: Precision, closure: Callable[[], Any] | None = None
    ) -> bool:
        """Step an optimizer, once it is known to hold the shards."""
        self._replaced.check(optimizer)
        return super().optimizer_step(optimizer, precision, closure)

    def teardown(self) -> None:
        """Let the model be called as any other again."""
        if self._calls is not None:
            self._calls.close()
