"""`Megatron`: strategy with the layers, schedules and optimizer of megatron-core."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.state import PartialState
from drivetrain.strategies.base import (
    MicroBatch,
    Output,
    RunOptions,
    Strategy,
    Topology,
    View,
)
from drivetrain.strategies.megatron import merged_state
from drivetrain.strategies.megatron.configuration import (
    MegatronGroups,
    MegatronOptions,
    arguments_from,
    complete,
    ddp_config,
    explained,
    low_dtype,
    require_device,
    require_megatron,
)
from drivetrain.strategies.megatron.layout import Layout
from drivetrain.strategies.megatron.merged_state import MergedState
from drivetrain.strategies.megatron.model import (
    CurrentChunk,
    Evaluation,
    MegatronProgram,
    MegatronRuntime,
    PlacedModel,
    PlacedModels,
    Schedule,
)
from drivetrain.strategies.megatron.optimizer import BufferedGradients, MegatronOptimizerFront, make_optimizer
from drivetrain.strategies.precision import Precision
from drivetrain.strategies.precision.mixed import Float16Mixed, MixedPrecision
from drivetrain.strategies.step_module import StepModule

_PRECISIONS = ("32", "bf16", "fp16")
MODEL = "model."


class Megatron(Strategy):
    """Strategy of tensor, pipeline, context and expert parallelism, with the layers of megatron-core.

    Sequence parallelism is supported, too. The task must be a `MegatronTask`. Processes that the sizes leave over are
    data-parallel.

    Args:
        tensor_parallel: The number of processes that share the computation of each layer, and the batch.
        pipeline_parallel: The number of pipeline stages.
        virtual_pipeline: The number of interleaved model chunks per stage. None means 1.
        context_parallel: The number of processes that share each sequence.
        expert_parallel: The number of data-parallel processes over which experts are spread.
        expert_tensor_parallel: The number of processes that share each expert. None uses `tensor_parallel`.
        sequence_parallel: True to shard activations between layers along the sequence over tensor-parallel processes.
        distributed_optimizer: True to shard the optimizer state over data-parallel processes.
        recompute: `"selective"` recomputes attention in the backward, `"full"` full layers. None stores all
            activations.
        gradient_clipping: The maximum gradient norm, like the Trainer's `gradient_clip_val`.
        gradient_accumulation_steps: The expected number of micro-batches per step. The loop sets the actual number.
        transformer: Additional fields of the task's `TransformerConfig`.
        ddp: Fields of megatron-core's `DistributedDataParallelConfig`, such as `overlap_grad_reduce`.
        optimizer: Fields of megatron-core's `OptimizerConfig`, such as `use_precision_aware_optimizer`.

    Attributes:
        options: The options as one object.

    Raises:
        ConfigurationError: Megatron-core is not installed, or an option is not supported.
    """

    name = "megatron"
    schedules_microbatches = True
    needs_even_batches = True

    def __init__(
        self,
        *,
        tensor_parallel: int = 1,
        pipeline_parallel: int = 1,
        virtual_pipeline: int | None = None,
        context_parallel: int = 1,
        expert_parallel: int = 1,
        expert_tensor_parallel: int | None = None,
        sequence_parallel: bool = False,
        distributed_optimizer: bool = True,
        recompute: str | None = None,
        gradient_clipping: float | None = None,
        gradient_accumulation_steps: int | None = None,
        transformer: Mapping[str, Any] | None = None,
        ddp: Mapping[str, Any] | None = None,
        optimizer: Mapping[str, Any] | None = None,
    ) -> None:
        require_megatron()
        self.options = MegatronOptions(
            tensor_parallel,
            pipeline_parallel,
            virtual_pipeline,
            context_parallel,
            expert_parallel,
            expert_tensor_parallel,
            sequence_parallel,
            distributed_optimizer,
            recompute,
            gradient_clipping,
            gradient_accumulation_steps,
            transformer or {},
            ddp or {},
            optimizer or {},
        )
        self._models = PlacedModels()
        self._current = CurrentChunk()
        self._schedules: dict[int, Schedule] = {}
        self._running: Schedule | None = None
        self._groups: MegatronGroups | None = None
        self._precision: Precision | None = None
        self._config: Any = None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Megatron:
        """Create a `Megatron` strategy from a launcher's configuration file.

        Args:
            config: The keys and values, as in a launcher's YAML.

        Raises:
            ConfigurationError: A key is unknown. The message names the closest match.
        """
        return cls(**arguments_from(config))

    # processes

    def setup(self, state: PartialState) -> None:
        require_device(state.device)
        options = self.options
        place = options.place(state.process_index, state.num_processes)
        self._groups = MegatronGroups(options, place, state.device)
        pipelined = options.pipeline_parallel > 1
        self.topology = Topology.in_grid(state, place, self._groups.stage_group if pipelined else None)
        self.gradients = BufferedGradients(self._models, self.topology, options.gradient_clipping)
        self.state = MergedState(self, self._models)
        state.before_leaving(self._release)

    def check(self, options: RunOptions) -> None:
        precision = options.precision
        if precision.name not in _PRECISIONS:
            raise ConfigurationError(
                f"precision={precision.name!r} cannot run under strategy='megatron', which uses low-precision weights "
                "with 32-bit master weights. Use '32', 'bf16' or 'fp16'. For FP8, use Megatron(transformer={'fp8': "
                "'hybrid'}) with TransformerEngine's layers.",
                see="precision.md",
            )
        steps, own = options.gradient_accumulation_steps, self.options.gradient_accumulation_steps
        if own is not None and steps.value != own:
            raise ConfigurationError(
                f"Megatron(gradient_accumulation_steps={own}) contradicts {steps.argument}={steps.value}. Set only "
                "one of the two.",
            )
        if isinstance(precision, MixedPrecision):
            precision.enabled = False  # the weights themselves are in low precision, so autocast is not needed
        if isinstance(precision, Float16Mixed):
            # Megatron-core's optimizer scales the loss, because only it sees overflows in gradient shards.
            precision.scaler = torch.amp.GradScaler(self.topology.kind.autocast_type, enabled=False)
        self._precision = precision

    @property
    def runtime(self) -> MegatronRuntime:
        """The `MegatronRuntime`, through which a `MegatronTask` builds its model and runs its steps."""
        return MegatronRuntime(self._build, self._current, lambda: self._config)

    # model

    def init_context(self) -> AbstractContextManager[Any]:
        return self._joined().initial_values(self.topology)

    def transformer_config(self, config: Any) -> Any:
        """Return a megatron-core `TransformerConfig` with the run's parallel sizes and dtypes filled in.

        Args:
            config: The model's configuration.

        Raises:
            ConfigurationError: The model's sizes do not fit the parallel sizes.
        """
        assert self._precision is not None, "the strategy has not been given to an Accelerator or a Trainer"
        self._config = complete(config, self.options, self._precision)
        return self._config

    def _build(self, program: MegatronProgram) -> list[nn.Module]:
        from megatron.core import parallel_state

        config = self.transformer_config(program.transformer_config())
        chunks = []
        for number in range(self.options.chunks):
            stage = number if self.options.chunks > 1 else None
            first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage)
            last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage)
            with explained():
                chunks.append(program.model_provider(first, last, stage, config))
        return chunks

    def _place(self, model: nn.Module, precision: Precision) -> nn.Module:
        known = self._models.find(model)
        if known is None:
            bare = self._parts_of(model)
            self._take(model, bare, [self._lowered(chunk, precision) for chunk in bare])
        return model

    def prepare(
        self, model: nn.Module, optimizers: Sequence[Optimizer] | None, precision: Precision, move: bool = True
    ) -> tuple[nn.Module, list[Optimizer]]:
        if not optimizers:
            return self._place(model, precision), []
        if len(optimizers) > 1:
            raise ConfigurationError(
                f"Megatron-core supports one optimizer per model, but {len(optimizers)} hold its parameters. "
                "Use one optimizer with several parameter groups.",
            )
        from megatron.core.distributed import DistributedDataParallel

        low = low_dtype(precision)
        bare = self._parts_of(model)
        wrapped = [
            DistributedDataParallel(
                chunk.config,
                ddp_config(self.options, low),
                self._lowered(chunk, precision),
                # As in megatron-core's own script: the reduction of later chunks overlaps with computation anyway.
                disable_bucketing=number > 0,
            )
            for number, chunk in enumerate(bare)
        ]
        for chunk in wrapped:
            chunk.broadcast_params()
        placed = self._take(model, bare, wrapped)
        front = make_optimizer(optimizers[0], placed, self.options, low)
        if isinstance(model, StepModule):
            self._schedules[id(placed)] = Schedule(placed, self._current, self._joined(), self.topology)
        else:
            placed.called = wrapped[0]
        return placed.called, [front]

    def _parts_of(self, model: nn.Module) -> list[nn.Module]:
        bare = super().unwrap(model)
        if isinstance(model, StepModule):
            if not isinstance(bare, MegatronProgram):
                raise ConfigurationError(
                    f"{type(bare).__name__} is not a MegatronTask, but strategy='megatron' runs models that are built "
                    "from megatron-core's layers. Subclass drivetrain.MegatronTask, with a model_provider and a "
                    "forward_step, or use strategy=Parallel(tp=..., pp=...), which splits any model.",
                    see="megatron.md",
                )
            return bare.chunks
        if isinstance(bare, MegatronProgram):
            raise ConfigurationError(
                f"{type(bare).__name__} is a MegatronTask, whose steps need a Trainer: megatron-core's schedule runs "
                "forward and backward itself, so that a loop cannot call accelerator.backward(loss). Use "
                "Trainer(accelerator=accelerator).fit(task, loader), or prepare the model that its model_provider "
                "builds under accelerator.init_context().",
            )
        if not hasattr(bare, "sharded_state_dict"):
            raise ConfigurationError(
                f"{type(bare).__name__} is not built from megatron-core's layers, as strategy='megatron' requires. "
                "Prepare a GPTModel or another MegatronModule, or use strategy=Parallel(tp=..., pp=...).",
                see="megatron.md",
            )
        if self.options.pipeline_parallel > 1:
            raise ConfigurationError(
                f"pipeline_parallel={self.options.pipeline_parallel} interleaves forward and backward of all "
                "micro-batches of a step, which a loop with accelerator.backward(loss) cannot do. Use a Trainer with "
                "a MegatronTask, or remove pipeline_parallel.",
            )
        return [bare]

    def _lowered(self, chunk: nn.Module, precision: Precision) -> nn.Module:
        chunk.to(self.topology.device)
        if low_dtype(precision) is None:
            return chunk
        from megatron.core.transformer.module import Float16Module

        lowered: nn.Module = Float16Module(chunk.config, chunk)
        return lowered

    def _take(self, model: nn.Module, bare: list[nn.Module], wrapped: list[nn.Module]) -> PlacedModel:
        prefix = MODEL if isinstance(model, StepModule) else ""
        placed = PlacedModel(super().unwrap(model), bare, wrapped, Layout(bare, prefix, self.topology.device))
        placed.called = model
        self._models.add(placed)
        self._config = placed.config
        return placed

    def unwrap(self, model: nn.Module) -> nn.Module:
        placed = self._models.find(model)
        return super().unwrap(model) if placed is None else placed.owner

    def view(self, model: nn.Module, stage: View) -> nn.Module:
        if stage != "evaluate" or not isinstance(model, StepModule):
            return model
        return Evaluation(self._models.require(model), self._current, self.topology)

    # one optimizer step

    def forward_backward(
        self, model: nn.Module, step_fn: Callable[[MicroBatch], Output], microbatches: Sequence[MicroBatch]
    ) -> list[Output]:
        schedule = self._schedules[id(self._models.require(model))]
        self._running = schedule
        try:
            return schedule.run(step_fn, microbatches)  # type: ignore[return-value]
        finally:
            self._running = None

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        if kwargs:
            raise ConfigurationError(f"Megatron's backward accepts no {', '.join(kwargs)}.")
        if self._running is not None:
            self._running.backward(loss)
            return
        # In a loop of the user's own, no schedule runs backward and reduces gradients.
        trained = [placed for placed in self._models if placed.optimizer is not None]
        if trained and trained[-1].config.fp16:
            loss = trained[-1].optimizer.inner.scale_loss(loss)  # type: ignore[union-attr]
        loss.backward()  # type: ignore[no-untyped-call]
        for placed in trained:
            if not placed.accumulates:
                placed.finalize()

    def optimizer_step(
        self, optimizer: Optimizer, precision: Precision, closure: Callable[[], Any] | None = None
    ) -> bool:
        if not isinstance(optimizer, MegatronOptimizerFront):
            raise ConfigurationError(
                f"{type(optimizer).__name__} was not prepared together with its model, as Megatron requires: model, "
                "optimizer = accelerator.prepare(model, optimizer).",
            )
        assert isinstance(self.gradients, BufferedGradients)
        self.gradients.clip_by_default(optimizer)
        return optimizer.step(closure)

    def _release(self) -> None:
        self._schedules.clear()
        self._models.clear()
        if self._groups is not None:
            self._groups.leave()
            self._groups = None

    # what only megatron-core has

    def save_native(self, model: nn.Module, directory: str | os.PathLike[str]) -> None:
        """Save a model's checkpoint in megatron-core's own format.

        A collective call: each process writes its part.

        Args:
            model: A prepared model.
            directory: The directory to write to. It is created, and must be empty.
        """
        merged_state.save(self._models.require(model), self._joined(), directory)

    def load_native(self, model: nn.Module, directory: str | os.PathLike[str]) -> None:
        """Load a checkpoint from `save_native` into a prepared model.

        A collective call. The run that saved the checkpoint may have had other parallel sizes.

        Args:
            model: A prepared model.
            directory: The checkpoint's directory.

        Raises:
            CheckpointError: There is no such checkpoint.
        """
        merged_state.load(self._models.require(model), self._joined(), directory)

    def _joined(self) -> MegatronGroups:
        if self._groups is None:
            raise ConfigurationError("strategy='megatron' is not set up yet. Pass it to a Trainer or Accelerator.")
        return self._groups

    def __repr__(self) -> str:
        names = ("tensor_parallel", "pipeline_parallel", "virtual_pipeline", "context_parallel", "expert_parallel")
        sizes = ", ".join(f"{n}={getattr(self.options, n)}" for n in names if getattr(self.options, n) not in (None, 1))
        return f"Megatron({sizes})"
