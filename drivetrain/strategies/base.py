"""`Strategy`: places one model on a set of processes and runs optimizer steps there."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, NoReturn, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from drivetrain.data.configuration import DataShard
from drivetrain.runtime.collectives import reduce
from drivetrain.runtime.devices import DeviceKind
from drivetrain.runtime.environment import ProcessEnvironment
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.state import PartialState
from drivetrain.strategies.precision import Precision
from drivetrain.strategies.state_names import named_optimizer_state, restore_optimizer_state

MicroBatch = TypeVar("MicroBatch")
Output = TypeVar("Output")
StateDict = dict[str, Any]


class StepModule(nn.Module):
    """A module whose forward is whichever of its owner's steps it is handed.

    Wrappers such as DDP hook into `forward`; running `training_step` through this module lets them.

    Called with anything but a step, it is the task's own forward, so that a loop after `fit` may call it as a model.

    Args:
        task: the module that the steps belong to.
        partial_backwards: whether one step may run several backwards, each over some of the parameters.

    Attributes:
        presence: A zero that a step's real losses are added to, where a strategy makes one: its reduced gradient is
            above zero where any process had a real batch.
    """

    presence: nn.Parameter | None

    def __init__(self, task: nn.Module, partial_backwards: bool = False) -> None:
        super().__init__()
        self.task = task
        self.partial_backwards = partial_backwards
        self.register_parameter("presence", None)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step that is given first, with the other arguments; else the task's own forward."""
        if args and callable(args[0]) and not isinstance(args[0], nn.Module):
            return args[0](*args[1:], **kwargs)
        return self.task(*args, **kwargs)


class Strategy(ABC):
    """Places one model on a set of processes and runs optimizer steps there.

    The base class is the whole behaviour of one process on one device; a strategy overrides what
    differs. A new one is a subclass in a file of its own and a line in the registry, and a third
    party adds its own with `register_strategy`.

    Attributes:
        name: the name that users write.
        device: where this process's tensors live.
        data_shard: which slice of the data is this process's: not its rank where several processes share a batch.
        data_ranks: for each data shard, in their order, the rank whose rows stand for it; None where every rank does.
        value_ranks: the ranks whose logged values together are those of the global batch, each counted once; None
            where all are.
        schedules_microbatches: whether the strategy must see all micro-batches of a step at once, as a pipeline does.
        computes_loss: whether this process runs the task's steps to their end, rather than a part of the model only.
        reads_shards: whether it can take a checkpoint's tensors straight into this process's shards.
        needs_even_batches: whether every process must see as many evaluation batches, since its forward is collective.
    """

    name: ClassVar[str]
    schedules_microbatches: bool = False
    reads_shards: ClassVar[bool] = False
    needs_even_batches: ClassVar[bool] = False

    device: torch.device
    kind: DeviceKind
    environment: ProcessEnvironment
    data_shard: DataShard
    data_ranks: tuple[int, ...] | None = None
    value_ranks: tuple[int, ...] | None = None
    computes_loss: bool = True

    # processes

    def setup(self, state: PartialState) -> None:
        """Take this process's place.

        Args:
            state: this process, its device and its peers.

        Raises:
            ConfigurationError: the strategy cannot run in this environment.
        """
        self.environment = state.environment
        self.kind = state.kind
        self.device = state.device
        self.data_shard = DataShard(state.process_index, state.num_processes)

    def check_precision(self, precision: Precision) -> None:
        """Refuse a precision that cannot work with this strategy.

        Raises:
            ConfigurationError: names the pair and what would work.
        """

    def note_arguments(self, owner: str, **arguments: tuple[str, Any]) -> None:
        """See what a loop was told that a strategy's own configuration may say too.

        Args:
            owner: the loop, such as `"Trainer"`.
            **arguments: by its common name (`gradient_accumulation_steps`, `gradient_clipping`), what the loop calls
                it, and its value.
        """

    # model

    def init_context(self) -> AbstractContextManager[Any]:
        """Context in which a model is best built."""
        return nullcontext()

    def place(self, model: nn.Module, precision: Precision, move: bool = True) -> nn.Module:
        """Bring a model's parameters onto the device and into the precision's dtype, without wrapping it.

        Args:
            model: the model.
            precision: the number formats.
            move: whether to move it; not where its user places it by hand.
        """
        converted = precision.convert(model)
        return converted.to(self.device) if move else converted

    def prepare(
        self, model: nn.Module, optimizers: Sequence[Optimizer], precision: Precision, move: bool = True
    ) -> tuple[nn.Module, list[Optimizer]]:
        """Place a model together with its optimizers.

        Args:
            model: the model as the user built it.
            optimizers: the optimizers over its parameters.
            precision: the number formats.
            move: whether to bring the model onto the device.

        Returns:
            The module to call, and the optimizers to step.
        """
        placed = self.place(model, precision, move)
        for optimizer in optimizers:
            move_optimizer_state(optimizer)
        return placed, list(optimizers)

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The user's own module inside whatever `prepare` wrapped around it."""
        while True:
            if isinstance(model, StepModule):
                model = model.task
            elif hasattr(model, "_orig_mod"):
                model = model._orig_mod  # type: ignore[assignment]
            else:
                return model

    def before_evaluation(self, model: nn.Module) -> None:
        """Make every process evaluate the same model; called on all of them."""

    def evaluation_model(self, model: nn.Module) -> nn.Module:
        """The module to call in evaluation, where no gradients need reducing."""
        return model

    def context_parallel(
        self, buffers: Sequence[torch.Tensor], seq_dims: Sequence[int], keep: Collection[torch.Tensor] = ()
    ) -> AbstractContextManager[Any]:
        """Context in which sequences are split over processes, where the strategy does that.

        Args:
            buffers: tensors that hold whole sequences, and this process's part of them in the context.
            seq_dims: for each, which dimension is the sequence.
            keep: those that stay parts afterwards.
        """
        return nullcontext()

    # one optimizer step

    def forward_backward(
        self, model: nn.Module, step_fn: Callable[[MicroBatch], Output], microbatches: Sequence[MicroBatch]
    ) -> list[Output]:
        """Run forward and backward over the micro-batches of one optimizer step.

        Gradients are reduced over processes in the last one only.

        Args:
            model: what `prepare` returned.
            step_fn: runs forward and backward on one micro-batch.
            microbatches: the window of one step.

        Returns:
            What `step_fn` returned for each.
        """
        if len(microbatches) == 1:
            return [step_fn(microbatches[0])]
        with self.gradient_sync(model, enabled=False):
            outputs = [step_fn(microbatch) for microbatch in microbatches[:-1]]
        outputs.append(step_fn(microbatches[-1]))
        return outputs

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Compute the gradients of a loss, scaled already."""
        loss.backward(**kwargs)  # type: ignore[no-untyped-call]

    def before_manual_backward(self, model: nn.Module, loss: torch.Tensor) -> None:
        """Get ready for a backward that a task runs by itself, in the midst of its training step."""

    def training_model(self, model: nn.Module, automatic: bool) -> nn.Module:
        """The module to call in training.

        Args:
            model: what `prepare` returned.
            automatic: whether the trainer runs backward after the step; else the task does within it.
        """
        return model

    def gradient_sync(self, model: nn.Module, enabled: bool) -> AbstractContextManager[Any]:
        """Whether forwards and backwards in this context reduce gradients over processes."""
        return nullcontext()

    def held_gradients(self, model: nn.Module) -> Iterable[torch.Tensor]:
        """Gradients of an accumulation window that are not in `.grad` before they are reduced."""
        return ()

    def drop_held_gradients(self, model: nn.Module) -> None:
        """Forget those gradients, of a window that did not end."""

    def zero_loss(self, task: nn.Module) -> torch.Tensor:
        """A loss with gradients of zero, for a batch that a task leaves out while its peers wait for gradients.

        Raises:
            ConfigurationError: no batch can be left out here.
        """
        parts = [parameter.reshape(-1)[:1].sum() for parameter in task.parameters() if parameter.requires_grad]
        return torch.stack(parts).nan_to_num(0.0, 0.0, 0.0).sum() * 0.0

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        """Scale gradients down to a total norm of at most `max_norm`, over all shards.

        Returns:
            The total norm before clipping, a scalar tensor on the device.
        """
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        """Clamp every gradient to [-clip_value, clip_value]."""
        nn.utils.clip_grad_value_(parameters, clip_value)

    def sum_over_values(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of a tensor over the processes in `value_ranks`, the same on all; call it on all."""
        if self.value_ranks is not None and self.environment.rank not in self.value_ranks:
            tensor = torch.zeros_like(tensor)
        total: torch.Tensor = reduce(tensor, "sum")
        return total

    def averaging_processes(self) -> int:
        """Over how many processes gradients are averaged."""
        return self.data_shard.count

    def scale_gradients(self, model: nn.Module, optimizers: Sequence[Optimizer], factor: torch.Tensor) -> None:
        """Multiply the gradients of a window, which have been reduced already.

        Args:
            model: what `prepare` returned.
            optimizers: those whose parameters' gradients they are.
            factor: a scalar tensor, the same on all processes.
        """
        parameters = {id(p): p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
        gradients = [local_part(p.grad) for p in parameters.values() if p.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, factor.to(gradients[0].device))

    def share(self, result: Any) -> Any:
        """What the process that ran the model's last part passes, on every process that ran another part of it."""
        return result

    def optimizer_step(
        self, optimizer: Optimizer, precision: Precision, closure: Callable[[], Any] | None = None
    ) -> bool:
        """Step an optimizer. Returns False where the step was skipped on overflow."""
        return precision.step(optimizer, closure)

    def join(self, models: Sequence[nn.Module]) -> AbstractContextManager[Any]:
        """Let processes that run out of batches keep their peers company until those are done too."""
        return nullcontext()

    def own_type(self, module: nn.Module) -> type[nn.Module]:
        """The class that the user gave a module, where dividing it changed that."""
        return type(module)

    def describe_parameter(self, parameter: nn.Parameter) -> tuple[int, bool]:
        """How many elements the whole of a parameter has, wherever they are, and whether any process trains it."""
        return parameter.numel(), parameter.requires_grad

    # state, under the names that the bare single-process model gives its parameters

    def model_state(self, model: nn.Module) -> StateDict:
        """Parameters and buffers under their canonical names, the same on all processes; call it on all."""
        return self.unwrap(model).state_dict()

    def optimizer_state(self, model: nn.Module, optimizer: Optimizer) -> StateDict:
        """An optimizer's state by canonical parameter name, and its groups."""
        return named_optimizer_state(self.unwrap(model), optimizer)

    def load_model_state(self, model: nn.Module, state: StateDict, strict: bool = True) -> Any:
        """Load what `model_state` returned under any strategy."""
        return self.unwrap(model).load_state_dict(state, strict=strict)

    def load_optimizer_state(self, model: nn.Module, optimizer: Optimizer, state: StateDict) -> None:
        """Load what `optimizer_state` returned under any strategy."""
        restore_optimizer_state(self.unwrap(model), optimizer, state)

    def optimizer_targets(self, model: nn.Module, saved: StateDict) -> StateDict:
        """Tensors that a saved optimizer state is to be read into, where `reads_shards`.

        Args:
            model: what `prepare` returned.
            saved: what `optimizer_state` returned under any strategy, its tensors on the meta device.
        """
        raise NotImplementedError

    def full_state_dict(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """All parameters and buffers, whole and on the CPU, on rank 0; an empty dict elsewhere."""
        if self.environment.rank != 0:
            return {}
        return {name: value.detach().cpu() for name, value in self.unwrap(model).state_dict().items()}

    def teardown(self) -> None:
        """Let go of everything that would keep the process group alive."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def refuse_left_out_batch(task: nn.Module, rank: int) -> NoReturn:
    """Raise where a task leaves out a batch, but its peers' backward gathers over all processes.

    Raises:
        ConfigurationError: always.
    """
    raise ConfigurationError(
        f"{type(task).__name__}.training_step returned None on rank {rank}. With a sharded model every process must run "
        "as many forwards and backwards. Return a loss that counts for nothing instead, such as loss * 0, or leave the "
        "sample out of the dataset."
    )


def require_single_process_group(name: str, environment: ProcessEnvironment) -> None:
    """Raise where a strategy for one process meets several."""
    if environment.is_distributed:
        raise ConfigurationError(
            f"strategy={name!r} runs one process, but this is rank {environment.rank} of "
            f"{environment.world_size} (from {environment.source}). Use strategy='ddp' or 'auto', "
            "or start one process."
        )


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this process holds of a tensor that may be sharded."""
    to_local = getattr(tensor, "to_local", None)
    local: torch.Tensor = tensor if to_local is None else to_local()
    return local


def move_optimizer_state(optimizer: Optimizer) -> None:
    """Bring state that was loaded before its parameters moved onto their device."""
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim() > 0 and value.device != parameter.device:
                state[key] = value.to(parameter.device)
