"""What a grid of processes is made of: decided once, from its sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.state import PartialState
from drivetrain.strategies.base import Strategy
from drivetrain.strategies.fsdp import FSDP
from drivetrain.strategies.fsdp.model_sharding import ModelSharder
from drivetrain.strategies.fsdp.replicated import parameters_to_replicate
from drivetrain.strategies.fsdp.sharded_state import ShardedState
from drivetrain.strategies.parallel.context import RingAttention, SequenceShard, SharedAttention
from drivetrain.strategies.parallel.layers import Layers, SplitLayers, WholeLayers
from drivetrain.strategies.parallel.mesh import MeshPlace, MeshSizes, make_mesh, submesh
from drivetrain.strategies.parallel.sequences import Sequences, SplitSequences, WholeSequences
from drivetrain.strategies.parallel.tensor import Plan
from drivetrain.strategies.parallel.whole_model import WholeModelPlacer
from drivetrain.strategies.precision import Precision
from drivetrain.strategies.topology import Topology

Unwrap = Callable[[nn.Module], nn.Module]


@dataclass(frozen=True)
class GridOptions:
    """The options of `Parallel` besides its sizes; see there.

    Args:
        tp_plan: Which layers are split how.
        loss_parallel: Whether losses take logits that are split by class.
        cp_seq_dim: Which dimension of a batch's tensors is the sequence.
        cp_load_balance: Whether each process has a chunk from the front of sequences and its mirror from the back.
        cp_attention: `"gather"` or `"ring"`.
        cp_shard_batch: Splits a batch instead.
        stages: The options of the pipeline, without their `pp_`.
        sharding: The options of `FSDP`.
    """

    tp_plan: Plan | str | None
    loss_parallel: bool
    cp_seq_dim: int
    cp_load_balance: bool
    cp_attention: str
    cp_shard_batch: Callable[[Any, SequenceShard], Any] | None
    stages: Mapping[str, Any]
    sharding: Mapping[str, Any]


class Composition(NamedTuple):
    """The parts of a grid.

    Attributes:
        place: This process's place.
        layers: Splits layers, or leaves them whole.
        sequences: Splits sequences, or leaves them whole.
        strategy: Places and runs models.
        state: Its state.
    """

    place: MeshPlace
    layers: Layers
    sequences: Sequences
    strategy: Strategy
    state: ShardedState


def compose(sizes: MeshSizes, options: GridOptions, unwrap: Unwrap, state: PartialState) -> Composition:
    """Make the parts of a grid; a collective.

    Args:
        sizes: Sizes that multiply to the number of processes.
        options: What else was asked for.
        unwrap: Returns the user's own module inside a wrapped one.
        state: This process, its device and its peers.

    Raises:
        ConfigurationError: An option cannot be on this device, or with these sizes.
    """
    mesh = make_mesh(sizes, state.device.type)
    layers = _layers(submesh(mesh, "tp"), options, unwrap, state)
    sequences = _sequences(submesh(mesh, "cp"), options, state)
    stages = submesh(mesh, "pp")
    if stages is not None:
        return _pipeline(sizes, options, unwrap, state, mesh, stages, layers, sequences)
    place = MeshPlace(sizes, state.process_index)
    topology = _topology(place, state)
    strategy = FSDP(**options.sharding)
    shard_mesh = _shard_mesh(mesh, sizes)
    sharder = ModelSharder(strategy.options, topology, unwrap, _given(shard_mesh), layers.split)
    if shard_mesh is None:
        strategy.assemble(topology, WholeModelPlacer(sizes, topology, unwrap, layers.split, sharder.rewrite_blocks))
    else:
        strategy.assemble(topology, sharder)
    return Composition(place, layers, sequences, strategy, strategy.state)


def _pipeline(
    sizes: MeshSizes,
    options: GridOptions,
    unwrap: Unwrap,
    state: PartialState,
    mesh: DeviceMesh | None,
    stages: DeviceMesh,
    layers: Layers,
    sequences: Sequences,
) -> Composition:
    from drivetrain.strategies.parallel.pipeline.options import PipelineGroup, PipelineOptions
    from drivetrain.strategies.parallel.pipeline.strategy import Pipeline  # its part of torch is slow to import

    chosen = PipelineOptions.from_arguments(options.stages)
    group = PipelineGroup(stages.get_group(), stages.get_local_rank(), chosen.stages_among(stages.size()))
    place = MeshPlace(sizes, state.process_index, group.stages.last)
    topology = _topology(place, state, group.group)
    shard_mesh = _shard_mesh(mesh, sizes)
    sharder = ModelSharder(FSDP(**options.sharding).options, topology, unwrap, _given(shard_mesh))
    placer = WholeStages(sharder) if shard_mesh is None else ShardedStages(sharder)
    strategy = Pipeline(chosen, sizes, topology, group, placer, layers)
    return Composition(place, layers, sequences, strategy, strategy.state)


def _topology(place: MeshPlace, state: PartialState, stages: Any = None) -> Topology:
    return Topology(
        state.environment,
        state.kind,
        state.device,
        place.data_shard,
        place.data_ranks,
        place.value_ranks,
        averaging_processes=place.data_shard.count * place.sizes.cp,
        stage_group=stages,
        loss_rank=None if stages is None else place.loss_rank,
    )


def _shard_mesh(mesh: DeviceMesh | None, sizes: MeshSizes) -> DeviceMesh | None:
    """The processes with other data or other parts of sequences; None where there are no others."""
    shard = submesh(mesh, "dp_shard", "cp")
    if mesh is None or shard is None or sizes.dp_replicate == 1:
        return shard
    assert shard.mesh_dim_names
    return mesh["dp_replicate", shard.mesh_dim_names[0]]


def _given(mesh: DeviceMesh | None) -> Callable[[], DeviceMesh]:
    """What a sharder asks for its mesh, where it has one."""

    def mesh_of_shards() -> DeviceMesh:
        assert mesh is not None, "nothing is sharded over this grid"
        return mesh

    return mesh_of_shards


def _layers(mesh: DeviceMesh | None, options: GridOptions, unwrap: Unwrap, state: PartialState) -> Layers:
    if mesh is None:
        return WholeLayers()
    assert options.tp_plan is not None
    return SplitLayers(mesh, state.kind, options.tp_plan, options.loss_parallel, unwrap)


def _sequences(mesh: DeviceMesh | None, options: GridOptions, state: PartialState) -> Sequences:
    if mesh is None:
        return WholeSequences()
    shard = SequenceShard(mesh.get_group(), mesh.get_local_rank(), mesh.size(), options.cp_load_balance)
    attention = _attention(shard, mesh, options, state)
    return SplitSequences(shard, attention, options.cp_seq_dim, options.cp_shard_batch)


def _attention(shard: SequenceShard, mesh: DeviceMesh, options: GridOptions, state: PartialState) -> SharedAttention:
    if options.cp_attention == "gather":
        return SharedAttention(shard)
    if state.kind.name == "cpu":
        raise ConfigurationError(
            "cp_attention='ring' is torch's context_parallel, which has no kernels for the CPU. Use 'gather', the "
            "default, which is exact on any device.",
            code="DT-024",
        )
    return RingAttention(shard, mesh, state.device)


class WholeStages:
    """Leaves each stage whole on its process.

    Args:
        sharder: Finds the modules that are recomputed as one.
    """

    shards = False

    def __init__(self, sharder: ModelSharder) -> None:
        self._sharder = sharder

    def units(self, model: nn.Module) -> list[nn.Module]:
        """The modules of a model that are recomputed as one."""
        return self._sharder.units(model)

    def place(self, stage: nn.Module, precision: Precision, units: Sequence[nn.Module]) -> None:
        """Let blocks recompute their activations, and compile them."""
        self._sharder.rewrite_blocks(stage, units)


class ShardedStages(WholeStages):
    """Shards each stage over the processes with other data."""

    shards = True

    def place(self, stage: nn.Module, precision: Precision, units: Sequence[nn.Module]) -> None:
        """Shard a stage, and average the gradients of what stays whole."""
        replicated = frozenset(parameters_to_replicate(stage, []))
        self._sharder.shard(stage, precision, replicated, units)
        self._sharder.average(stage, replicated)
