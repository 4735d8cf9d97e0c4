"""`Parallel`: data, sharded, tensor, context and pipeline parallelism over one grid of processes.

What each dimension needs is elsewhere: the grid in `mesh`, layers split over processes in `layers`, sequences in
`sequences`, stages in `pipeline`; sharding is that of `FSDP`. `composition` puts together what the sizes ask for.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from drivetrain.runtime.errors import ConfigurationError, nearest
from drivetrain.runtime.state import PartialState
from drivetrain.strategies.base import MicroBatch, Output, Strategy, Topology, View
from drivetrain.strategies.fsdp import FSDP
from drivetrain.strategies.fsdp.model_sharding import ModelSharder, parameters_to_replicate
from drivetrain.strategies.fsdp.sharded_state import ShardedState
from drivetrain.strategies.parallel.context import (
    RingAttention,
    Sequences,
    SequenceShard,
    SharedAttention,
    SplitSequences,
    WholeSequences,
)
from drivetrain.strategies.parallel.mesh import REST, MeshPlace, MeshSizes, make_mesh, submesh
from drivetrain.strategies.parallel.tensor import Layers, Plan, SplitLayers, WholeLayers
from drivetrain.strategies.parallel.whole_model import WholeModelPlacer
from drivetrain.strategies.precision import Precision

# What a grid of processes is made of: decided once, from its sizes


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
    from drivetrain.strategies.parallel.pipeline.schedule import PipelineGroup, PipelineOptions
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


class Parallel(Strategy):
    """Several kinds of parallelism over one grid of processes.

    Args:
        dp_replicate: Copies of the sharded model, each for other data.
        dp_shard: Processes over which parameters, gradients and optimizer state are sharded, each for other data; -1
            takes all that are left by the other sizes.
        tp: Processes that share the computation of each layer, and the batch.
        cp: Processes that share each sequence; parameters are sharded over them too.
        pp: Stages that the layers are spread over.
        tp_plan: Which layers are split how, by patterns of module names, as in
            `{"layers.*.attention.wq": Colwise(), "layers.*.attention.wo": Rowwise()}`; `"auto"` takes the model's own.
        loss_parallel: Let `F.cross_entropy` take logits that are split by class, from a last layer
            `Colwise(use_local_output=False)`.
        cp_seq_dim: Which dimension of a batch's tensors is the sequence.
        cp_load_balance: Give each process a chunk of every sequence from the front and its mirror from the back, which
            makes causal attention cost the same on all.
        cp_attention: `"gather"` collects the keys and values of all processes, on any device; `"ring"` is torch's
            `context_parallel`, which passes them on while it computes, on GPUs.
        cp_shard_batch: Splits a batch instead, called with it and a `SequenceShard`.
        **options: Those of `FSDP`, such as `wrap`, and of the pipeline, which begin with `pp_`.

    Attributes:
        sizes: Those of the grid; `dp_shard` is known once the strategy is set up.
        options: Those of `FSDP`.
        place_in_mesh: This process's place in the grid.
        layers: Splits layers over processes, or leaves them whole.
        sequences: Splits sequences over processes, or leaves them whole.
        inner: The strategy that places and runs models on this grid.

    Raises:
        ConfigurationError: An option cannot be.
    """

    name = "parallel"
    needs_even_batches = True
    state: ShardedState
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
                code="DT-001",
            )
        stages = {name.removeprefix("pp_"): options.pop(name) for name in [*options] if name.startswith("pp_")}
        _check_options(self.sizes, tp_plan, loss_parallel, stages, options)
        self._options = GridOptions(
            tp_plan, loss_parallel, cp_seq_dim, cp_load_balance, cp_attention, cp_shard_batch, stages, options
        )
        self.options = FSDP(**options).options
        self.schedules_microbatches = pp > 1

    @classmethod
    def from_config(cls, config: Mapping[str, Any], **options: Any) -> Parallel:
        """Make one from Accelerate's `ParallelismConfig` names.

        Args:
            config: `dp_replicate_size`, `dp_shard_size`, `tp_size`, `cp_size`, `pp_size`; those left out are 1.
            **options: Everything else.

        Raises:
            ConfigurationError: A name is not a size.
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
        """Take this process's place in the grid, and compose what the sizes ask for."""
        self.sizes = self.sizes.fill(state.num_processes)
        grid = compose(self.sizes, self._options, self.unwrap, state)
        self.place_in_mesh = grid.place
        self.layers, self.sequences, self.inner = grid.layers, grid.sequences, grid.strategy
        self.topology, self.gradients, self.state = self.inner.topology, self.inner.gradients, grid.state

    @property
    def allows_inference_mode(self) -> bool:  # type: ignore[override]
        """Whether the strategy inside allows it."""
        return self.inner.allows_inference_mode

    def split_sequences(
        self, buffers: Sequence[torch.Tensor], seq_dims: Sequence[int], keep: Collection[torch.Tensor] = ()
    ) -> AbstractContextManager[Any]:
        """Split tensors over the processes that share sequences, and let attention see all of them."""
        return self.sequences.split(buffers, seq_dims, keep)

    def join(self, models: Sequence[nn.Module]) -> AbstractContextManager[Any] | None:
        """As the strategy inside."""
        return self.inner.join(models)

    # model

    def init_context(self) -> AbstractContextManager[Any]:
        """Build a model without values where they are filled in shard by shard, else as usual."""
        return self.inner.init_context()

    def place(self, model: nn.Module, precision: Precision, move: bool = True) -> nn.Module:
        """Spread a model over stages, split its layers, and shard what is left."""
        return self.inner.place(model, precision, move)

    def prepare(
        self, model: nn.Module, optimizers: Sequence[Optimizer], precision: Precision, move: bool = True
    ) -> tuple[nn.Module, list[Optimizer]]:
        """Split and shard a model, and let its optimizers hold the parts."""
        prepared = self.inner.prepare(model, optimizers, precision, move)
        self.layers.begin(prepared[0])
        return prepared

    def view(self, model: nn.Module, stage: View) -> nn.Module:
        """The module to call with whole batches."""
        return self.sequences.view(self.inner.view(model, stage), stage)

    # one optimizer step

    def forward_backward(
        self, model: nn.Module, step_fn: Callable[[MicroBatch], Output], microbatches: Sequence[MicroBatch]
    ) -> list[Output]:
        """Run forward and backward over the micro-batches of one optimizer step."""
        with self.sequences.attention():  # also around backward, where checkpointed blocks run their forward again
            return self.inner.forward_backward(model, step_fn, microbatches)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Compute the gradients of a loss, scaled already."""
        self.inner.backward(loss, **kwargs)

    def optimizer_step(
        self, optimizer: Optimizer, precision: Precision, closure: Callable[[], Any] | None = None
    ) -> bool:
        """Step an optimizer; the first time, see that copies have the same gradients."""
        if closure is None:
            self.layers.check(optimizer)
        return self.inner.optimizer_step(optimizer, precision, closure)

    def teardown(self) -> None:
        """Release the grid."""
        self.inner.teardown()
        self.layers.teardown()

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}={size}" for name, size in vars(self.sizes).items() if size != 1)
        return f"Parallel({sizes})"


def _check_options(
    sizes: MeshSizes, plan: Any, loss_parallel: bool, pipeline: Mapping[str, Any], rest: Mapping[str, Any]
) -> None:
    if sizes.tp > 1 and plan is None:
        raise ConfigurationError(
            f'tp={sizes.tp} needs to know which layers to split: give tp_plan={{"layers.*.attention.wq": Colwise(), '
            '"layers.*.attention.wo": Rowwise()}, or tp_plan="auto" for a model that carries a plan.',
            code="DT-057",
        )
    if isinstance(plan, str) and plan != "auto":
        raise ConfigurationError(
            f"tp_plan must be a mapping of patterns to styles, or 'auto', got {plan!r}.", code="DT-003"
        )
    if plan is not None and not isinstance(plan, str | Mapping):
        raise ConfigurationError(
            f"tp_plan must be a mapping of patterns to styles, or 'auto', got {plan!r}.", code="DT-003"
        )
    if loss_parallel and sizes.tp == 1:
        raise ConfigurationError("loss_parallel=True splits the loss over tp processes, but tp=1.", code="DT-005")
    if sizes.cp > 1 and sizes.pp > 1:
        raise ConfigurationError(
            f"cp={sizes.cp} and pp={sizes.pp} do not go together yet: what stages hand over has the shape of whole "
            "sequences. Use cp with tp and dp_shard, or pp with tp and dp_shard.",
            code="DT-068",
        )
    if pipeline and sizes.pp == 1:
        given = ", ".join(f"pp_{name}" for name in pipeline)
        raise ConfigurationError(f"{given}: an option of the pipeline, but pp=1.", code="DT-005")
    allowed = [name for name in inspect.signature(FSDP.__init__).parameters if name not in ("self", "replicate_size")]
    for name in rest:
        if name not in allowed:
            known = [*allowed, *inspect.signature(Parallel.__init__).parameters]
            raise ConfigurationError(
                f"Parallel has no option {name!r}. Beside its own it takes those of FSDP ({', '.join(allowed)}) and "
                f"of the pipeline, which begin with pp_.{nearest(name, known)}",
                code="DT-006",
            )
