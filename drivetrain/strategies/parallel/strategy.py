"""`Parallel`: data, sharded, tensor, context and pipeline parallelism over one grid of processes.

What each dimension needs is elsewhere: the grid in `mesh`, layers split over processes in `tensor`, sequences in
`context`, stages in `pipeline`; sharding is that of `FSDP`, whose mesh and units are chosen here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from drivetrain.runtime.collectives import broadcast
from drivetrain.runtime.errors import ConfigurationError, nearest
from drivetrain.runtime.state import PartialState
from drivetrain.strategies.base import StateDict, StepModule
from drivetrain.strategies.fsdp import FSDP, dividing
from drivetrain.strategies.fsdp.clipping import scale_by_norm_, total_norm_over_meshes
from drivetrain.strategies.fsdp.parameters import slots_of
from drivetrain.strategies.fsdp.replicated import parameters_to_replicate
from drivetrain.strategies.parallel.context import (
    RingAttention,
    SequenceShard,
    SharedAttention,
    split_in_place,
)
from drivetrain.strategies.parallel.copies import CopyCheck, share_random_state
from drivetrain.strategies.parallel.loss import LossParallel
from drivetrain.strategies.parallel.mesh import REST, MeshPlace, MeshSizes, make_mesh, submesh
from drivetrain.strategies.parallel.sequence_step import SequenceStep
from drivetrain.strategies.parallel.tensor import (
    Plan,
    apply_plan,
    plan_of_model,
    whole_outputs_without_gradients,
)
from drivetrain.strategies.precision import Precision

if TYPE_CHECKING:
    from drivetrain.strategies.parallel.pipeline.pipeline import Pipeline

MicroBatch = TypeVar("MicroBatch")
Output = TypeVar("Output")


class Parallel(FSDP):
    """Several kinds of parallelism over one grid of processes.

    Args:
        dp_replicate: copies of the sharded model, each for other data.
        dp_shard: processes over which parameters, gradients and optimizer state are sharded, each for other data; -1
            takes all that are left by the other sizes.
        tp: processes that share the computation of each layer, and the batch.
        cp: processes that share each sequence; parameters are sharded over them too.
        pp: stages that the layers are spread over.
        tp_plan: which layers are split how, by patterns of module names, as in
            `{"layers.*.attention.wq": Colwise(), "layers.*.attention.wo": Rowwise()}`; `"auto"` takes the model's own.
        loss_parallel: let `F.cross_entropy` take logits that are split by class, from a last layer
            `Colwise(use_local_output=False)`.
        cp_seq_dim: which dimension of a batch's tensors is the sequence.
        cp_load_balance: give each process a chunk of every sequence from the front and its mirror from the back, which
            makes causal attention cost the same on all.
        cp_attention: `"gather"` collects the keys and values of all processes, on any device; `"ring"` is torch's
            `context_parallel`, which passes them on while it computes, on GPUs.
        cp_shard_batch: splits a batch instead, called with it and a `SequenceShard`.
        **options: those of `FSDP`, such as `wrap`, and of the pipeline, which begin with `pp_`.

    Raises:
        ConfigurationError: an option cannot be.
    """

    name = "parallel"

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
        self.tp_plan = tp_plan
        self.loss_parallel = loss_parallel
        self.cp_seq_dim = cp_seq_dim
        self.cp_load_balance = cp_load_balance
        self.cp_shard_batch = cp_shard_batch
        self.cp_attention = cp_attention
        if cp_attention not in ("gather", "ring"):
            raise ConfigurationError(
                f"cp_attention must be 'gather' or 'ring', got {cp_attention!r}."
                f"{nearest(str(cp_attention), ('gather', 'ring'))}"
            )
        self._pipeline_options = {
            name.removeprefix("pp_"): options.pop(name) for name in [*options] if name.startswith("pp_")
        }
        _check_options(self.sizes, tp_plan, loss_parallel, self._pipeline_options, options)
        super().__init__(**options)
        self.schedules_microbatches = pp > 1
        self.mesh: DeviceMesh | None = None
        self.pipeline: Pipeline | None = None
        self._units_of_all: list[nn.Module] = []
        self._elsewhere: frozenset[int] = frozenset()  # modules whose parameters other stages hold
        self.sequence: SequenceShard | None = None
        self._attention: SharedAttention | None = None
        self._copies: CopyCheck | None = None
        self._loss = LossParallel()

    @classmethod
    def from_config(cls, config: Mapping[str, Any], **options: Any) -> Parallel:
        """Make one from Accelerate's `ParallelismConfig` names.

        Args:
            config: `dp_replicate_size`, `dp_shard_size`, `tp_size`, `cp_size`, `pp_size`; those left out are 1.
            **options: everything else.

        Raises:
            ConfigurationError: a name is not a size.
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
        """Take this process's place in the grid."""
        self.sizes = self.sizes.fill(state.num_processes)
        super().setup(state)
        self.place_in_mesh = MeshPlace(self.sizes, state.process_index)
        self.data_shard = self.place_in_mesh.data_shard
        self.data_ranks = self.place_in_mesh.data_ranks
        self.value_ranks = self.place_in_mesh.value_ranks
        self.mesh = make_mesh(self.sizes, self.device.type)
        self.tp_mesh, self.pp_mesh = submesh(self.mesh, "tp"), submesh(self.mesh, "pp")
        cp = submesh(self.mesh, "cp")
        if cp is not None:
            self.sequence = SequenceShard(cp.get_group(), cp.get_local_rank(), cp.size(), self.cp_load_balance)
            self._attention = self._make_attention(self.sequence, cp)
        if self.pp_mesh is not None:
            from drivetrain.strategies.parallel.pipeline.pipeline import Pipeline

            self.pipeline = Pipeline(self, **self._pipeline_options)

    def _make_attention(self, sequence: SequenceShard, mesh: DeviceMesh) -> SharedAttention:
        if self.cp_attention == "gather":
            return SharedAttention(sequence)
        if self.kind.name == "cpu":
            raise ConfigurationError(
                "cp_attention='ring' is torch's context_parallel, which has no kernels for the CPU. Use 'gather', the "
                "default, which is exact on any device."
            )
        return RingAttention(sequence, mesh, self.device)

    def averaging_processes(self) -> int:
        """Data shards, times the processes that share a sequence."""
        return self.data_shard.count * self.sizes.cp

    @property
    def shards(self) -> bool:
        """Whether parameters are sharded, or gradients averaged, over any processes."""
        return self.sizes.dp_replicate * self.sizes.dp_shard * self.sizes.cp > 1

    def check_sizes(self) -> None:
        """Nothing is left to check: the sizes multiply to the number of processes."""

    def make_shard_mesh(self) -> DeviceMesh:
        """The processes with other data or other parts of sequences."""
        shard = submesh(self.mesh, "dp_shard", "cp")
        assert self.mesh is not None
        assert shard is not None
        if self.sizes.dp_replicate == 1:
            return shard
        assert shard.mesh_dim_names
        return self.mesh["dp_replicate", shard.mesh_dim_names[0]]

    # model

    def init_context(self) -> AbstractContextManager[Any]:
        """Build a model without values where they are filled in shard by shard, else as usual."""
        return super().init_context() if self.shards and self.pipeline is None else nullcontext()

    def place(self, model: nn.Module, precision: Precision, move: bool = True) -> nn.Module:
        """Spread a model over stages, split its layers, and shard what is left."""
        if self.shards and self.pipeline is None:
            return super().place(model, precision, move)
        known = self._placed_before(model)
        if known is not None:
            if self.pipeline is not None:
                self.pipeline.adopt(known)
            return known
        model = precision.convert(model)
        if self.environment.is_distributed:
            with torch.no_grad():
                broadcast([tensor.detach() for tensor in (*model.parameters(), *model.buffers())])
        stages = [] if self.pipeline is None else self._split_into_stages(model, precision)
        if move:
            move_real_tensors(model, self.device)
        self.before_sharding(model)
        if self.pipeline is None:
            self._rewrite_blocks(model)
        for stage in stages:
            if self.shards:
                self.shard(stage, precision, frozenset(parameters_to_replicate(stage, [])))
            else:
                self._rewrite_blocks(stage)
        if self.pipeline is not None:
            self.pipeline.build_schedule()
        dividing.take_shards_on_load(model)
        self.unwrap(model).__dict__["_placed_as"] = (model, self.sizes)
        return model

    def _split_into_stages(self, model: nn.Module, precision: Precision) -> Sequence[nn.Module]:
        assert self.pipeline is not None
        self._units_of_all = self.units(model)
        slots = slots_of(model)
        stages = self.pipeline.split(model, precision)
        gone = [module for module, name, before in slots if not before.is_meta and module._parameters[name].is_meta]  # type: ignore[union-attr]
        self._elsewhere = frozenset(id(module) for module in gone)
        return stages

    def _placed_before(self, model: nn.Module) -> nn.Module | None:
        """What an earlier `prepare` made of the same model."""
        known, sizes = self.unwrap(model).__dict__.get("_placed_as", (None, None))
        if known is None or sizes == self.sizes:
            return known  # type: ignore[no-any-return]
        raise ConfigurationError(
            f"This model was split before, over other processes ({sizes}). Make a new one, and load the state of this "
            "one into it."
        )

    def before_sharding(self, model: nn.Module) -> None:
        """Split layers over the tensor-parallel processes."""
        if self.tp_mesh is None:
            return
        assert self.tp_plan is not None
        bare = self.unwrap(model)
        plan = plan_of_model(bare) if isinstance(self.tp_plan, str) else self.tp_plan
        root = apply_plan(bare, self.tp_mesh, plan, self._elsewhere)
        if self.loss_parallel:
            whole_outputs_without_gradients(root)

    def units(self, model: nn.Module) -> list[nn.Module]:
        """The modules that are gathered as one; in a stage, those of the whole model that are in it."""
        if self.pipeline is None or isinstance(model, StepModule):
            return super().units(model)
        inside = {id(module) for module in model.modules() if module is not model}
        return [unit for unit in self._units_of_all if id(unit) in inside]

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """The modules that are recomputed as one."""
        return super().blocks(model) if self.pipeline is None else self.units(model)

    def prepare(
        self, model: nn.Module, optimizers: Sequence[Optimizer], precision: Precision, move: bool = True
    ) -> tuple[nn.Module, list[Optimizer]]:
        """Split and shard a model, and let its optimizers hold the parts."""
        model, prepared = super().prepare(model, optimizers, precision, move)
        if self.pipeline is not None:
            self.pipeline.follow(prepared)
        if self.loss_parallel:
            self._loss.enable()
        if self.tp_mesh is not None:
            share_random_state(self.tp_mesh, self.kind)
            self._copies = CopyCheck(self.tp_mesh, self.unwrap(model))
        return model, prepared

    def before_evaluation(self, model: nn.Module) -> None:
        """Give all processes rank 0's buffers; stages have their own."""
        if self.pipeline is None:
            super().before_evaluation(model)

    def training_model(self, model: nn.Module, automatic: bool) -> nn.Module:
        """The module to call in training, with whole batches."""
        model = super().training_model(model, automatic)
        return model if self.sequence is None else self._on_own_tokens(model, joins=False)

    def evaluation_model(self, model: nn.Module) -> nn.Module:
        """The module to call in evaluation, with whole batches."""
        if self.pipeline is not None:
            return self.pipeline.evaluation_model()
        model = super().evaluation_model(model)
        return model if self.sequence is None else self._on_own_tokens(model, joins=True)

    def _on_own_tokens(self, model: nn.Module, joins: bool) -> nn.Module:
        assert self._attention is not None
        return SequenceStep(model, self._attention, self.shard_batch, self.cp_seq_dim if joins else None)

    def shard_batch(self, batch: Any) -> Any:
        """This process's tokens of a batch of whole sequences."""
        if self.sequence is None:
            return batch
        if self.cp_shard_batch is not None:
            return self.cp_shard_batch(batch, self.sequence)
        return self.sequence.split_batch(batch, self.cp_seq_dim)

    def shared_attention(self) -> AbstractContextManager[Any]:
        """Context in which attention is over the tokens of all processes that share a sequence."""
        return nullcontext() if self._attention is None else self._attention.entered()

    @contextmanager
    def context_parallel(
        self, buffers: Sequence[torch.Tensor], seq_dims: Sequence[int], keep: Collection[torch.Tensor] = ()
    ) -> Iterator[None]:
        """Split tensors over the processes that share sequences, and let attention see all of them."""
        if self.sequence is None:
            yield
            return
        assert self._attention is not None
        before = self._attention.calls
        with split_in_place(self.sequence, buffers, seq_dims, keep), self.shared_attention():
            yield
        self._attention.check(before)

    # one optimizer step

    def forward_backward(
        self, model: nn.Module, step_fn: Callable[[MicroBatch], Output], microbatches: Sequence[MicroBatch]
    ) -> list[Output]:
        """Run forward and backward over the micro-batches of one optimizer step."""
        if self.pipeline is not None:
            return self.pipeline.forward_backward(step_fn, microbatches)  # type: ignore[return-value]
        if self.sequence is None:
            return super().forward_backward(model, step_fn, microbatches)
        with self.shared_attention():  # also around backward, where checkpointed blocks run their forward again
            return super().forward_backward(model, step_fn, microbatches)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Compute the gradients of a loss, scaled already."""
        if self.pipeline is not None:
            self.pipeline.backward(loss, **kwargs)
        else:
            super().backward(loss, **kwargs)

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        """Scale gradients down to a total norm of at most `max_norm`, over all shards and stages."""
        if self.pipeline is None:
            return super().clip_grad_norm_(parameters, max_norm, norm_type)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        total = self.pipeline.combine_norm(total_norm_over_meshes(gradients, norm_type), norm_type)
        with torch.no_grad():
            scale_by_norm_(gradients, total, max_norm)
        return total

    def share(self, result: Any) -> Any:
        """What the last stage passes, on every stage."""
        return result if self.pipeline is None else self.pipeline.share(result)

    def optimizer_step(
        self, optimizer: Optimizer, precision: Precision, closure: Callable[[], Any] | None = None
    ) -> bool:
        """Step an optimizer; the first time, see that copies have the same gradients."""
        if self._copies is not None and closure is None:
            self._copies.check(optimizer)
            self._copies = None
        return super().optimizer_step(optimizer, precision, closure)

    # state

    def reshard(self, model: nn.Module) -> None:
        """Free whatever is gathered at the moment."""
        for part in [model] if self.pipeline is None else self.pipeline.modules:
            super().reshard(part)
        if self.pipeline is not None:
            self.pipeline.put_back()

    def describe_parameter(self, parameter: nn.Parameter) -> tuple[int, bool]:
        """As everywhere; what stands for a parameter of another stage tells of that one."""
        elements, trained = super().describe_parameter(parameter)
        return elements, trained or (self.pipeline is not None and self.pipeline.state.is_trained_by_peer(parameter))

    def model_state(self, model: nn.Module) -> StateDict:
        """Parts of the parameters under canonical names."""
        if self.pipeline is None:
            return super().model_state(model)
        self.reshard(model)
        return self.pipeline.state.model_state()

    def optimizer_state(self, model: nn.Module, optimizer: Optimizer) -> StateDict:
        """An optimizer's state by canonical parameter name, its tensors divided as the parameters are."""
        own = super().optimizer_state(model, optimizer)
        return own if self.pipeline is None else self.pipeline.state.optimizer_state(optimizer, own)

    def load_model_state(self, model: nn.Module, state: StateDict, strict: bool = True) -> Any:
        """Take this process's parts of what `model_state` returned under any strategy."""
        if self.pipeline is not None:
            state = self.pipeline.state.own_model_state(state)
        return super().load_model_state(model, state, strict)

    def load_optimizer_state(self, model: nn.Module, optimizer: Optimizer, state: StateDict) -> None:
        """Take this process's parts of what `optimizer_state` returned under any strategy."""
        if self.pipeline is not None:
            state = self.pipeline.state.own_optimizer_state(state)
        super().load_optimizer_state(model, optimizer, state)

    def full_state_dict(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """All parameters and buffers, whole and on the CPU, on rank 0; an empty dict elsewhere."""
        if self.pipeline is None:
            return super().full_state_dict(model)
        self.reshard(model)
        return self.pipeline.state.full_state_dict()

    def teardown(self) -> None:
        """Let go of the grid."""
        if self.pipeline is not None:
            self.pipeline.teardown()
        self._loss.disable()
        super().teardown()

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}={size}" for name, size in vars(self.sizes).items() if size != 1)
        return f"Parallel({sizes})"


def move_real_tensors(model: nn.Module, device: torch.device) -> None:
    """Bring to a device what of a model has values."""
    model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))  # type: ignore[no-untyped-call]


def _check_options(
    sizes: MeshSizes, plan: Any, loss_parallel: bool, pipeline: Mapping[str, Any], rest: Mapping[str, Any]
) -> None:
    if sizes.tp > 1 and plan is None:
        raise ConfigurationError(
            f'tp={sizes.tp} needs to know which layers to split: give tp_plan={{"layers.*.attention.wq": Colwise(), '
            '"layers.*.attention.wo": Rowwise()}, or tp_plan="auto" for a model that carries a plan.'
        )
    if isinstance(plan, str) and plan != "auto":
        raise ConfigurationError(f"tp_plan must be a mapping of patterns to styles, or 'auto', got {plan!r}.")
    if plan is not None and not isinstance(plan, str | Mapping):
        raise ConfigurationError(f"tp_plan must be a mapping of patterns to styles, or 'auto', got {plan!r}.")
    if loss_parallel and sizes.tp == 1:
        raise ConfigurationError("loss_parallel=True splits the loss over tp processes, but tp=1.")
    if sizes.cp > 1 and sizes.pp > 1:
        raise ConfigurationError(
            f"cp={sizes.cp} and pp={sizes.pp} do not go together yet: what stages hand over has the shape of whole "
            "sequences. Use cp with tp and dp_shard, or pp with tp and dp_shard."
        )
    if pipeline and sizes.pp == 1:
        given = ", ".join(f"pp_{name}" for name in pipeline)
        raise ConfigurationError(f"{given}: an option of the pipeline, but pp=1.")
    allowed = [name for name in inspect.signature(FSDP.__init__).parameters if name not in ("self", "replicate_size")]
    for name in rest:
        if name not in allowed:
            known = [*allowed, *inspect.signature(Parallel.__init__).parameters]
            raise ConfigurationError(
                f"Parallel has no option {name!r}. Beside its own it takes those of FSDP ({', '.join(allowed)}) and "
                f"of the pipeline, which begin with pp_.{nearest(name, known)}"
            )
