"""`Parallel`: data, sharded, tensor, context and pipeline parallelism over one grid of processes.

What each dimension needs is elsewhere: the grid in `mesh`, layers split over processes in `layers`, sequences in
`sequences`, stages in `pipeline`; sharding is that of `FSDP`. `composition` puts together what the sizes ask for.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from drivetrain.runtime.errors import ConfigurationError, nearest
from drivetrain.runtime.state import PartialState
from drivetrain.strategies.base import Capability, MicroBatch, Output, Strategy, View
from drivetrain.strategies.capabilities import ContextParallel, StepInBackward
from drivetrain.strategies.fsdp import FSDP
from drivetrain.strategies.fsdp.sharded_state import ShardedState
from drivetrain.strategies.parallel.composition import GridOptions, compose
from drivetrain.strategies.parallel.context import SequenceShard
from drivetrain.strategies.parallel.layers import Layers
from drivetrain.strategies.parallel.mesh import REST, MeshPlace, MeshSizes
from drivetrain.strategies.parallel.sequences import Sequences
from drivetrain.strategies.parallel.tensor import Plan
from drivetrain.strategies.precision import Precision


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

    def capability(self, kind: type[Capability]) -> Capability | None:
        """What the strategy inside can do, and `ContextParallel` where sequences are split."""
        if kind is ContextParallel:
            return self.sequences.capability  # type: ignore[return-value]
        if kind is StepInBackward:  # what copies of a parameter have is added up after the backward
            return None
        return self.inner.capability(kind)

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
