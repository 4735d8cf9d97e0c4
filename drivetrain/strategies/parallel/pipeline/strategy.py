"""`Pipeline`: pipeline parallelism, which spreads a model's layers over processes.

The schedules are those of `torch.distributed.pipelining`. Each process runs its part of the model's own forward
(`pipeline_stage`). The task is unchanged: its step ends at the call of the model on all stages but the last, which
continues with the pipeline's output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.runtime.collectives import broadcast
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.observer import leaves_empty
from drivetrain.runtime.seeds import isolated_random_state, own_generator, sample_seed, seed_all_generators
from drivetrain.runtime.state import PartialState
from drivetrain.strategies.base import MicroBatch, Output, StateDict, Strategy, Topology, View
from drivetrain.strategies.fsdp import sharding
from drivetrain.strategies.fsdp.model_sharding import ModelSharder, parameters_to_replicate
from drivetrain.strategies.fsdp.sharded_state import ShardedState
from drivetrain.strategies.fsdp.sharding import ReplacedParameters, slots_of
from drivetrain.strategies.fsdp.strategy import (
    ShardedGradients,
    largest_anywhere,
    scale_by_norm_,
    total_norm_over_meshes,
)
from drivetrain.strategies.parallel.mesh import MeshSizes
from drivetrain.strategies.parallel.pipeline.schedule import PipelineGroup, PipelineOptions, ScheduledStage, Scheduler
from drivetrain.strategies.parallel.pipeline.split import Route
from drivetrain.strategies.parallel.pipeline.split_model import Caught, ModelCalls, SplitModel
from drivetrain.strategies.parallel.pipeline.stage import Call
from drivetrain.strategies.parallel.tensor import Layers
from drivetrain.strategies.parallel.whole_model import move_real_tensors, placed_before, remember_placed
from drivetrain.strategies.precision import Precision
from drivetrain.strategies.step_module import StepModule

# Forward and backward over the micro-batches of a step, interleaved over stages


class TrainingWindow:
    """Executor of optimizer steps under pipeline parallelism, which runs all micro-batches through all stages.

    Each step runs up to its call of the model, to get the arguments. On the last stage, it then runs again with the
    pipeline's output, to get the loss.
    """

    def __init__(self, calls: ModelCalls, place: PipelineGroup, topology: Topology) -> None:
        self._calls, self._place, self._topology = calls, place, topology
        self._precision = calls.split.precision
        stages = [
            ScheduledStage(module, module.stage, place.stages.count, topology.device, place.group)
            for module in calls.split.modules
        ]
        self._scheduler = Scheduler(place.stages.kind, stages)
        self._generator = own_generator("pipeline")
        self._loss: Tensor | None = None
        self._zero = torch.zeros((), device=topology.device)

    def run(self, step_fn: Callable[..., Output], microbatches: Sequence[MicroBatch]) -> list[Output | None]:
        # On processes without the last stage, the results are None.
        # Only the last stage scales losses, but all stages must have the same scale and change it together.
        self._precision.scale(self._zero)
        seeds = self._seeds(len(microbatches))
        calls = [self._probe(step_fn, microbatch, seed) for microbatch, seed in zip(microbatches, seeds, strict=True)]
        outputs: list[Output | None] = [None] * len(microbatches)

        def finishing(index: int) -> Callable[[Any], Tensor]:
            def finish(output: Any) -> Tensor:
                with self._seeded(seeds[index]):
                    outputs[index], loss = self._compute_loss(step_fn, microbatches[index], output)
                return loss

            return finish

        for index, call in enumerate(calls):
            call.finish = finishing(index)
        arguments = [{"inputs": (call.args, call.kwargs), "call": call} for call in calls]
        self._scheduler.run([call.route for call in calls], arguments)
        return outputs

    def _probe(self, step_fn: Callable[..., Any], microbatch: Any, seed: int) -> Call:
        # The step runs up to its call of the split model.
        found: list[Call] = []

        def catch(*args: Any, **kwargs: Any) -> Any:
            found.append(self._calls.routed(args, kwargs))
            raise Caught

        # With the seed of the later run, so that both draw the same random numbers before the call.
        with self._calls.answered(catch), self._seeded(seed):
            try:
                step_fn(microbatch, probe=True)
            except Caught:
                return found[0]
        raise ConfigurationError(
            f"training_step never called {self._calls.name}, the module that is split into stages. Set pp_module to "
            "the module that it calls.",
        )

    def _compute_loss(self, step_fn: Callable[..., Output], microbatch: Any, output: Any) -> tuple[Output, Tensor]:
        # The step gets `output` from its call of the model.
        self._loss = None
        with self._calls.answered(lambda *args, **kwargs: output):
            result = step_fn(microbatch)
            called = self._calls.was_called
        loss, self._loss = self._loss, None
        if not called:
            raise ConfigurationError(f"training_step must call {self._calls.name} each time it runs.")
        if loss is None and result is not None:
            raise ConfigurationError(
                "training_step returned a loss, but its backward did not run through the strategy. In a pipeline, a "
                "task cannot override backward().",
            )
        # A skipped batch still runs backward through all stages, with gradients of zero.
        return result, torch.zeros((), device=self._topology.device, requires_grad=True) if loss is None else loss

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        # The pipeline schedule computes the gradients later.
        if kwargs:
            raise ConfigurationError(
                f"With pipeline stages, backward(loss) accepts no {', '.join(kwargs)}, because the pipeline's schedule "
                "runs the backward passes later. Leave the arguments out."
            )
        if loss.numel() != 1 or not loss.requires_grad:
            raise RuntimeError(f"backward needs a scalar loss that requires gradients, got {loss}")
        self._loss = loss

    def _seeds(self, count: int) -> list[int]:
        # Equal on all stages. The seeds come from a separate generator, so that the data order equals that of one
        # process.
        drawn = [int(torch.randint(2**62, (), generator=self._generator))]
        # An object is sent between CPUs, so that no stage waits for its device.
        if not leaves_empty():
            dist.broadcast_object_list(drawn, group=self._place.group, group_src=0)
        return [sample_seed(drawn[0], 0, index) for index in range(count)]

    @contextmanager
    def _seeded(self, seed: int) -> Iterator[None]:
        kind = self._topology.kind
        with isolated_random_state(devices=kind.name != "cpu"):
            seed_all_generators(seed)
            if kind.name != "cpu":
                kind.manual_seed_all(seed % 2**32)
            yield


# The gradients of a model that is spread over stages


class StagedGradients(ShardedGradients):
    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__()
        self._group, self._device = group, device
        self._held: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()

    def finish(self, optimizers: Sequence[Optimizer]) -> None:
        for optimizer in optimizers:
            count = sum(len(group["params"]) for group in optimizer.param_groups)
            if count > self._held.setdefault(optimizer, count):
                raise ConfigurationError(
                    "A pipeline cannot train additional parameters after the model is split. Train all from the "
                    'start, or use strategy="fsdp".',
                )

    def clip_norm(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        total = self._over_stages(total_norm_over_meshes(gradients, norm_type), norm_type)
        with torch.no_grad():
            scale_by_norm_(gradients, total, max_norm)
        return total

    def _over_stages(self, norm: Tensor, norm_type: float) -> Tensor:
        # A collective call.
        # In one dtype on all processes, because one without gradients has no dtype to take from them.
        power = norm.detach().to(self._device, torch.float64)
        if norm_type == float("inf"):
            dist.all_reduce(power, op=dist.ReduceOp.MAX, group=self._group)
            return power
        power = power**norm_type
        dist.all_reduce(power, group=self._group)
        return power ** (1.0 / norm_type)


# The state of a model that is spread over stages, under the names of the whole


class StagedState(ShardedState):
    # Each process has the state of its own stages.

    held_as = "parts"

    def __init__(self, strategy: Strategy, find: Callable[[], SplitModel]) -> None:
        super().__init__(strategy)
        self._find = find

    def model(self, model: nn.Module, full: bool = False, everywhere: bool = False) -> StateDict:
        self.reshard(model)
        stages = self._find().stage_state
        return stages.full_state_dict() if full else stages.model_state()

    def optimizer(self, model: nn.Module, optimizer: Optimizer) -> StateDict:
        return self._find().stage_state.optimizer_state(optimizer, super().optimizer(model, optimizer))

    def load_model(self, model: nn.Module, state: StateDict, strict: bool = True) -> Any:
        return super().load_model(model, self._find().stage_state.own_model_state(state), strict)

    def load_optimizer(self, model: nn.Module, optimizer: Optimizer, state: StateDict) -> None:
        super().load_optimizer(model, optimizer, self._find().stage_state.own_optimizer_state(state))

    def describe(self, parameter: nn.Parameter) -> tuple[int, bool]:
        elements, trained = super().describe(parameter)
        return elements, trained or self._find().stage_state.is_trained_by_peer(parameter)

    def reshard(self, model: nn.Module) -> None:
        split = self._find()
        for module in split.modules:
            super().reshard(module)
        split.put_back()


# Steps of an evaluation, whose call of the model goes through all stages


class StagedEvaluation(nn.Module):
    # Called as `module(step, batch, ...)`.

    def __init__(self, calls: ModelCalls, place: PipelineGroup, topology: Topology) -> None:
        super().__init__()
        self._calls, self._place, self._topology = calls, place, topology

    def forward(self, step: Callable[..., Any], *args: Any) -> Any:
        # None on all stages but the last.
        with self._calls.answered(self._through_stages):
            try:
                result = step(*args) if self._topology.computes_loss else step(*args, probe=True)
            except Caught:
                return None
            called = self._calls.was_called
        if not called:
            raise ConfigurationError(
                f"The step did not call {self._calls.name}, the module that is split into pipeline stages. "
                "Call it in each step."
            )
        return result

    def _through_stages(self, *args: Any, **kwargs: Any) -> Any:
        call = self._calls.routed(args, kwargs)
        place = self._place
        handed_over: tuple[Tensor, ...] = ()
        sends: list[Any] = []
        output: Any = None
        for module in self._calls.split.modules:
            stage = module.stage
            if stage and not place.holds(stage - 1):
                handed_over = self._receive(call.route, stage)
            output = module(*handed_over, inputs=(args, kwargs), call=call)
            if not module.is_last:
                handed_over = output
                if not place.holds(stage + 1):
                    to = place.stages.rank_of(stage + 1)
                    sends += [dist.isend(t.detach(), group=place.group, group_dst=to) for t in handed_over]
        for send in sends:
            send.wait()
        if self._topology.computes_loss:
            return output
        raise Caught

    def _receive(self, route: Route, stage: int) -> tuple[Tensor, ...]:
        source = self._place.stages.rank_of(stage - 1)
        received = tuple(
            torch.empty(tensor.shape, dtype=tensor.dtype, device=self._topology.device)
            for tensor in route.cuts[stage].tensors
        )
        for tensor in received:
            dist.recv(tensor, group=self._place.group, group_src=source)
        return received


class StagePlacer:
    def __init__(self, sharder: ModelSharder, shards: bool) -> None:
        self.shards, self.units, self._sharder = shards, sharder.units, sharder

    def place(self, stage: nn.Module, precision: Precision, units: Sequence[nn.Module]) -> None:
        if not self.shards:
            self._sharder.rewrite_blocks(stage, units)
            return
        replicated = frozenset(parameters_to_replicate(stage, []))
        self._sharder.shard(stage, precision, replicated, units)
        self._sharder.average(stage, replicated)


class Pipeline(Strategy):
    """Strategy that splits a model into stages, and runs micro-batches through them."""

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
            # These compute gradients of weights later than fully_shard expects (torch 2.13), which gave wrong losses.
            raise ConfigurationError(
                f"pp_schedule={kind.name!r} computes the gradients of weights separately, which sharded or replicated "
                "stages (dp_shard, dp_replicate) do not support. Use 'interleaved_1f1b' or '1f1b'.",
            )
        self._options, self._sizes, self._place = options, sizes, place
        self._stage_placer, self._layers = stage_placer, layers
        self._replaced = ReplacedParameters()
        self._calls: ModelCalls | None = None
        self._window: TrainingWindow | None = None
        self.topology = topology
        self.gradients = StagedGradients(place.group, topology.device)
        self.state = StagedState(self, lambda: self._prepared().split)

    def setup(self, state: PartialState) -> None:
        state.before_leaving(self._close)

    def _close(self) -> None:
        if self._calls is not None:
            self._calls.close()

    # model

    def _spread(self, model: nn.Module, precision: Precision, move: bool) -> nn.Module:
        bare = self.unwrap(model)
        known = placed_before(bare, self._sizes)
        if known is not None:
            self._take(SplitModel.found_in(self.unwrap(known), self._options, self._place))
            return known
        model = precision.convert(model)
        if not leaves_empty():
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
        # Also returns the `id` of each module whose parameters are on other processes.
        if not isinstance(model, StepModule):
            raise ConfigurationError(
                f"pp={self._place.stages.ranks} splits {type(model).__name__} into stages, which interleave forward "
                "and backward of all micro-batches of a step. A loop with loss.backward() cannot do this. Use a "
                "Trainer, or another strategy.",
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
        split.put_back()
        split.remember()
        self._calls = ModelCalls(split, self._place.stages.count)
        self._window = TrainingWindow(self._calls, self._place, self.topology)

    def _prepared(self) -> ModelCalls:
        assert self._calls is not None, "no model has been prepared"
        return self._calls

    def prepare(
        self, model: nn.Module, optimizers: Sequence[Optimizer] | None, precision: Precision, move: bool = True
    ) -> tuple[nn.Module, list[Optimizer]]:
        slots = slots_of(model)
        placed = self._spread(model, precision, move)
        if optimizers is None:
            return placed, []
        # Sharding has replaced parameters that the optimizers still hold.
        self._replaced.follow(slots, optimizers)
        precision.agree_on_overflow(largest_anywhere)
        for optimizer in optimizers:
            if isinstance(optimizer, torch.optim.LBFGS):
                raise ConfigurationError("LBFGS needs all parameters at once, which a pipeline has split.")
            self._prepared().split.stage_state.follow(optimizer)
        return placed, list(optimizers)

    def view(self, model: nn.Module, stage: View) -> nn.Module:
        return StagedEvaluation(self._prepared(), self._place, self.topology) if stage == "evaluate" else model

    # one optimizer step

    def forward_backward(
        self, model: nn.Module, step_fn: Callable[[MicroBatch], Output], microbatches: Sequence[MicroBatch]
    ) -> list[Output]:
        assert self._window is not None
        return self._window.run(step_fn, microbatches)  # type: ignore[return-value]

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        assert self._window is not None
        self._window.backward(loss, **kwargs)

    def optimizer_step(
        self, optimizer: Optimizer, precision: Precision, closure: Callable[[], Any] | None = None
    ) -> bool:
        self._replaced.check(optimizer)
        return super().optimizer_step(optimizer, precision, closure)
