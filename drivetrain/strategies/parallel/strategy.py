"""Strategy that combines data, sharded, tensor, context and pipeline parallelism on one device mesh.

Each kind of parallelism has its own module: `mesh`, `tensor`, `context` and `pipeline`. Sharding uses `FSDP`.
`Parallel.setup` combines the kinds whose size is above 1.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from drivetrain.runtime.errors import ConfigurationError, nearest
from drivetrain.runtime.state import PartialState
from drivetrain.strategies.base import MicroBatch, Output, SplitsSequences, Strategy, Topology, View
from drivetrain.strategies.fsdp import FSDP
from drivetrain.strategies.fsdp.model_sharding import ModelSharder
from drivetrain.strategies.parallel.context import (
    RingAttention,
    Sequences,
    SequenceShard,
    SharedAttention,
    SplitSequences,
)
from drivetrain.strategies.parallel.mesh import REST, MeshPlace, MeshSizes, make_mesh, submesh
from drivetrain.strategies.parallel.tensor import Layers, Plan, SplitLayers, step_one_by_one
from drivetrain.strategies.parallel.whole_model import WholeModelPlacer
from drivetrain.strategies.precision import Precision


class Parallel(Strategy, SplitsSequences):
    """Strategy that combines several kinds of parallelism on one device mesh.

    These are data, sharded, tensor, context and pipeline parallelism. The product of the five sizes must equal the
    world size.

    Args:
        dp_replicate: Number of replicas of the sharded model. Each replica trains on other data.
        dp_shard: Number of processes over which parameters, gradients and optimizer state are sharded. Each trains on
            other data. The default of -1 uses all processes that the other sizes leave over.
        tp: Number of tensor-parallel processes. They split layers and share each batch.
        cp: Number of context-parallel processes. They split each sequence. Parameters are sharded over them too.
        pp: Number of processes in each pipeline. They split the model's layers into stages.
        tp_plan: Mapping from patterns of module names to tensor-parallel styles, as in
            `{"layers.*.attention.wq": Colwise(), "layers.*.attention.wo": Rowwise()}`. `"auto"` uses the plan that the
            model carries. Required if `tp` is above 1.
        loss_parallel: Compute `F.cross_entropy` on logits that are sharded by class. The last layer must be
            `Colwise(use_local_output=False)`.
        cp_seq_dim: Sequence dimension of the batch's tensors.
        cp_load_balance: Give each process one chunk from the front of every sequence and the mirrored chunk from the
            back, so that causal attention costs the same on all processes.
        cp_attention: `"gather"` all-gathers keys and values, on any device. `"ring"` uses torch's `context_parallel`,
            which sends them around a ring during the computation, on GPUs only.
        cp_shard_batch: Function that splits a batch, called with the batch and a `SequenceShard`. The default splits
            the batch's tensors along `cp_seq_dim`.
        **options: Options of `FSDP`, such as `wrap`, and pipeline options, which begin with `pp_`.

    Attributes:
        sizes: Sizes of the device mesh. A `dp_shard` of -1 is replaced by a number in `setup`.
        options: Options of `FSDP`.
        place_in_mesh: Position of this process in the device mesh.
        layers: Splitter of tensor-parallel layers. It leaves layers whole if `tp` is 1.
        sequences: Splitter of sequences. It leaves sequences whole if `cp` is 1.
        inner: Strategy that places and runs models on the mesh.

    Raises:
        ConfigurationError: An option is invalid or does not fit the sizes.
    """

    name = "parallel"
    needs_even_batches = True
    place_in_mesh: MeshPlace
    layers: Layers
    sequences: Sequences
    inner: Strategy

    def __init__(
        self,
        *,
        dp_replicate: int = 1,
        dp_shard: int = REST,
        tp: int = 1,
        cp: int = 1,
        pp: int = 1,
        tp_plan: Plan | str | None = None,
        loss_parallel: bool = False,
        cp_seq_dim: int = 1,
        cp_load_balance: bool = True,
        cp_attention: str = "gather",
        cp_shard_batch: Callable[[Any, SequenceShard], Any] | None = None,
        **options: Any,
    ) -> None:
        self.sizes = MeshSizes(dp_replicate=dp_replicate, dp_shard=dp_shard, tp=tp, cp=cp, pp=pp)
        if cp_attention not in ("gather", "ring"):
            raise ConfigurationError(
                f"cp_attention must be 'gather' or 'ring', got {cp_attention!r}."
                f"{nearest(str(cp_attention), ('gather', 'ring'))}",
            )
        stages = {name.removeprefix("pp_"): options.pop(name) for name in [*options] if name.startswith("pp_")}
        _check_options(self.sizes, tp_plan, loss_parallel, stages, options)
        self._tp_plan, self._loss_parallel = tp_plan, loss_parallel
        self._cp_seq_dim, self._cp_load_balance = cp_seq_dim, cp_load_balance
        self.cp_attention, self._cp_shard_batch = cp_attention, cp_shard_batch
        self._stage_options, self._sharding = stages, options
        self.options = FSDP(**options).options
        self.schedules_microbatches = pp > 1

    @classmethod
    def from_config(cls, config: Mapping[str, Any], **options: Any) -> Parallel:
        """Create a `Parallel` strategy from the fields of `ParallelismConfig`.

        Args:
            config: Mapping with the keys `dp_replicate_size`, `dp_shard_size`, `tp_size`, `cp_size` and `pp_size`.
                Missing sizes are 1.
            **options: Other arguments of `Parallel`, such as `tp_plan`.

        Returns:
            The strategy.

        Raises:
            ConfigurationError: A key is not the name of a size.
        """
        sizes = MeshSizes.from_config(config)
        return cls(
            dp_replicate=sizes.dp_replicate,
            dp_shard=sizes.dp_shard,
            tp=sizes.tp,
            cp=sizes.cp,
            pp=sizes.pp,
            **options,
        )

    # processes

    def setup(self, state: PartialState) -> None:
        """Arrange the processes in a device mesh, and set up each kind of parallelism, when a run begins.

        All ranks must call this method.

        Raises:
            ConfigurationError: The sizes do not fit the world size, or an option does not work on the device.
        """
        self.sizes = self.sizes.fill(state.num_processes)
        mesh = make_mesh(self.sizes, state.device.type)
        split, stages = submesh(mesh, "tp"), submesh(mesh, "pp")
        self.layers = Layers()
        if split is not None:
            assert self._tp_plan is not None
            self.layers = SplitLayers(split, state.kind, self._tp_plan, self._loss_parallel, self.unwrap)
        self.sequences = self._make_sequences(submesh(mesh, "cp"), state)
        shards = self._shard_mesh(mesh)
        self.inner = self._make_sharded(state, shards) if stages is None else self._make_pipeline(state, shards, stages)
        self.topology, self.gradients, self.state = self.inner.topology, self.inner.gradients, self.inner.state
        state.before_leaving(self.layers.teardown)

    def _make_sequences(self, mesh: DeviceMesh | None, state: PartialState) -> Sequences:
        if mesh is None:
            return Sequences()
        shard = SequenceShard(mesh.get_group(), mesh.get_local_rank(), mesh.size(), self._cp_load_balance)
        attention = SharedAttention(shard)
        if self.cp_attention == "ring":
            if state.kind.name == "cpu":
                raise ConfigurationError(
                    "cp_attention='ring' uses torch's context_parallel, which has no kernels for the CPU. Use the "
                    "default, 'gather', which works on any device.",
                )
            attention = RingAttention(shard, mesh, state.device)
        return SplitSequences(shard, attention, self._cp_seq_dim, self._cp_shard_batch)

    def _shard_mesh(self, mesh: DeviceMesh | None) -> DeviceMesh | None:
        shard = submesh(mesh, "dp_shard", "cp")
        if mesh is None or shard is None or self.sizes.dp_replicate == 1:
            return shard
        assert shard.mesh_dim_names
        return mesh["dp_replicate", shard.mesh_dim_names[0]]

    def _make_sharded(self, state: PartialState, mesh: DeviceMesh | None) -> Strategy:
        self.place_in_mesh = MeshPlace(self.sizes, state.process_index)
        topology = Topology.in_grid(state, self.place_in_mesh)
        strategy = FSDP(**self._sharding)
        sharder = ModelSharder(
            strategy.options, topology, self.unwrap, lambda: cast("DeviceMesh", mesh), self.layers.split
        )
        whole = WholeModelPlacer(self.sizes, topology, self.unwrap, self.layers.split, sharder.rewrite_blocks)
        strategy.assemble(topology, whole if mesh is None else sharder)
        return strategy

    def _make_pipeline(self, state: PartialState, mesh: DeviceMesh | None, stages: DeviceMesh) -> Strategy:
        from drivetrain.strategies.parallel.pipeline.schedule import PipelineGroup, PipelineOptions
        from drivetrain.strategies.parallel.pipeline.strategy import Pipeline, StagePlacer  # slow to import

        chosen = PipelineOptions.from_arguments(self._stage_options)
        group = PipelineGroup(stages.get_group(), stages.get_local_rank(), chosen.stages_among(stages.size()))
        self.place_in_mesh = MeshPlace(self.sizes, state.process_index, group.stages.last)
        topology = Topology.in_grid(state, self.place_in_mesh, group.group)
        placer = StagePlacer(
            ModelSharder(self.options, topology, self.unwrap, lambda: cast("DeviceMesh", mesh)), shards=mesh is not None
        )
        pipeline = Pipeline(chosen, self.sizes, topology, group, placer, self.layers)
        pipeline.setup(state)
        return pipeline

    def split_sequences(
        self, buffers: Sequence[torch.Tensor], seq_dims: Sequence[int], keep: Collection[torch.Tensor] = ()
    ) -> AbstractContextManager[Any]:
        """Return a context within which `buffers` contain only this process's part of each sequence.

        Within the context, attention covers the tokens of all context-parallel processes.

        Args:
            buffers: The tensors, whose data is replaced until the context ends.
            seq_dims: The dimension of each tensor along which its sequences are split.
            keep: Tensors in `buffers` that keep this process's part when the context ends.
        """
        return self.sequences.split(buffers, seq_dims, keep)

    # model

    def init_context(self) -> AbstractContextManager[Any]:
        return self.inner.init_context()

    def prepare(
        self, model: nn.Module, optimizers: Sequence[Optimizer] | None, precision: Precision, move: bool = True
    ) -> tuple[nn.Module, list[Optimizer]]:
        prepared = self.inner.prepare(model, optimizers, precision, move)
        if optimizers is not None:
            self.layers.begin(prepared[0])
        return prepared

    def view(self, model: nn.Module, stage: View) -> nn.Module:
        return self.sequences.view(self.inner.view(model, stage), stage)

    # one optimizer step

    def forward_backward(
        self, model: nn.Module, step_fn: Callable[[MicroBatch], Output], microbatches: Sequence[MicroBatch]
    ) -> list[Output]:
        with self.sequences.attention():  # also around backward, where checkpointed blocks run their forward again
            return self.inner.forward_backward(model, step_fn, microbatches)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        self.inner.backward(loss, **kwargs)

    def optimizer_step(
        self, optimizer: Optimizer, precision: Precision, closure: Callable[[], Any] | None = None
    ) -> bool:
        # With a closure, gradients are computed within the step, and there are none to compare yet.
        if closure is None:
            self.layers.check(optimizer)
        step_one_by_one(optimizer)  # here, because callbacks may add groups during the run
        return self.inner.optimizer_step(optimizer, precision, closure)

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}={size}" for name, size in vars(self.sizes).items() if size != 1)
        return f"Parallel({sizes})"


def _check_options(
    sizes: MeshSizes, plan: Any, loss_parallel: bool, pipeline: Mapping[str, Any], rest: Mapping[str, Any]
) -> None:
    if sizes.tp > 1 and plan is None:
        raise ConfigurationError(
            f'tp={sizes.tp} needs a plan of the layers to split. Set tp_plan={{"layers.*.attention.wq": Colwise(), '
            '"layers.*.attention.wo": Rowwise()}, or tp_plan="auto" for a model that carries a plan.',
            see="parallel.md",
        )
    if isinstance(plan, str) and plan != "auto":
        raise ConfigurationError(f"tp_plan must be a mapping of patterns to styles, or 'auto', got {plan!r}.")
    if plan is not None and not isinstance(plan, str | Mapping):
        raise ConfigurationError(f"tp_plan must be a mapping of patterns to styles, or 'auto', got {plan!r}.")
    if loss_parallel and sizes.tp == 1:
        raise ConfigurationError("loss_parallel=True requires tp > 1. Set tp, or remove loss_parallel.")
    if sizes.cp > 1 and sizes.pp > 1:
        raise ConfigurationError(
            f"cp={sizes.cp} and pp={sizes.pp} cannot be combined yet, because pipeline stages exchange full "
            "sequences. Use cp with tp and dp_shard, or pp with tp and dp_shard.",
        )
    if pipeline and sizes.pp == 1:
        given = ", ".join(f"pp_{name}" for name in pipeline)
        raise ConfigurationError(f"Pipeline options ({given}) require pp > 1. Set pp, or remove these options.")
    allowed = [name for name in inspect.signature(FSDP.__init__).parameters if name not in ("self", "replicate_size")]
    for name in rest:
        if name not in allowed:
            known = [*allowed, *inspect.signature(Parallel.__init__).parameters]
            raise ConfigurationError(
                f"Parallel has no option {name!r}. Besides its own options, it accepts those of FSDP "
                f"({', '.join(allowed)}) and those of the pipeline, which begin with pp_.{nearest(name, known)}",
            )
