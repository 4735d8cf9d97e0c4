"""`Strategy`: places one model on a set of processes and runs optimizer steps there."""

from __future__ import annotations

import inspect
from abc import ABC
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.data.configuration import DataShard
from drivetrain.runtime.collectives import broadcast, reduce
from drivetrain.runtime.devices import DeviceKind
from drivetrain.runtime.environment import ProcessEnvironment
from drivetrain.runtime.errors import CheckpointError, ConfigurationError, known_keywords
from drivetrain.runtime.pytrees import send_to_device
from drivetrain.runtime.state import PartialState
from drivetrain.strategies.precision import Precision
from drivetrain.strategies.step_module import StepModule

if TYPE_CHECKING:
    from drivetrain.strategies.parallel.mesh import MeshPlace

# Moving a model onto a device while its parameters stay the same objects


def move_model(model: nn.Module, device: torch.device) -> nn.Module:
    """Bring a model onto a device, whose parameters stay those that its optimizers hold."""
    probe = nn.ParameterList([nn.Parameter(torch.empty(0))])
    before = probe[0]
    return model.to(device) if probe.to(device)[0] is before else move_in_place(model, device)


def move_in_place(
    model: nn.Module, device: torch.device, placed: Callable[[str, nn.Parameter], None] | None = None
) -> nn.Module:
    """Bring parameters and buffers onto a device.

    On XLA, and on devices of other backends (PrivateUse1), `Module.to` makes new parameters, which optimizers that
    were built before do not hold, and unties tied ones. Here the same objects become tensors on the device, wherever
    they are held.
    """
    for name, parameter in model.named_parameters():
        if not _is_on(parameter, device):
            _move(name, parameter, device)
        if placed is not None:
            placed(name, parameter)
    moved: dict[int, Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and not _is_on(buffer, device):
                if id(buffer) not in moved:
                    moved[id(buffer)] = buffer.to(device)
                module._buffers[name] = moved[id(buffer)]
    return model


def keep_optimizers(before: Mapping[str, nn.Parameter], model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Lay out the state of optimizers as their model has been placed; refuse those over parameters of before."""
    now = {id(parameter) for parameter in model.parameters()}
    gone = {id(parameter): name for name, parameter in before.items() if id(parameter) not in now}
    for optimizer in optimizers if gone else ():
        for parameter in (each for group in optimizer.param_groups for each in group["params"]):
            if id(parameter) in gone:
                raise ConfigurationError(
                    f"{type(optimizer).__name__} holds {gone[id(parameter)]} as it was before the model was placed: "
                    "placing has made a new parameter, which would not be trained. Bring the model to its device and "
                    "dtype before you make the optimizer.",
                )
    for optimizer in optimizers:
        lay_out_state(optimizer)


def _is_on(tensor: Tensor, device: torch.device) -> bool:
    return tensor.device.type == device.type and device.index in (None, tensor.device.index)


def _move(name: str, parameter: nn.Parameter, device: torch.device) -> None:
    gradient, attributes = parameter.grad, dict(parameter.__dict__)
    parameter.grad = None
    target = nn.Parameter(parameter.detach().to(device), requires_grad=parameter.requires_grad)
    try:
        torch.utils.swap_tensors(parameter, target)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise ConfigurationError(
            f"Parameter {name!r} cannot be moved to {device} since something else refers to it: a graph of a forward "
            "that is still alive, or a weak reference. Prepare the model, or call fit, before anything computes "
            "with it.",
        ) from error
    parameter.__dict__.update(attributes)
    if gradient is not None:
        parameter.grad = gradient.to(device)


# `Topology`: this process's place among those of a run, and which processes count


Value = TypeVar("Value")


@dataclass(frozen=True)
class Topology:
    """Which share of the data and of the model is this process's, and which processes' results count."""

    environment: ProcessEnvironment
    kind: DeviceKind
    device: torch.device
    data_shard: DataShard
    data_ranks: tuple[int, ...] | None = None
    value_ranks: tuple[int, ...] | None = None
    averaging_processes: int = 1
    stage_group: dist.ProcessGroup | None = None
    loss_rank: int | None = None

    @classmethod
    def data_parallel(cls, state: PartialState) -> Topology:
        """Every process loads a shard of the data of its own and computes the whole model."""
        count = state.environment.world_size
        shard = DataShard(state.environment.rank, count)
        return cls(state.environment, state.kind, state.device, shard, averaging_processes=count)

    @classmethod
    def in_grid(cls, state: PartialState, place: MeshPlace, stage_group: dist.ProcessGroup | None = None) -> Topology:
        """Processes that share batches, sequences or the layers of a model."""
        return cls(
            state.environment,
            state.kind,
            state.device,
            place.data_shard,
            place.data_ranks,
            place.value_ranks,
            averaging_processes=place.data_shard.count * place.sizes.cp,
            stage_group=stage_group,
            loss_rank=None if stage_group is None else place.loss_rank,
        )

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self.environment.rank

    @property
    def computes_loss(self) -> bool:
        """Whether this process runs the task's steps to their end, rather than a part of the model only."""
        return self.loss_rank is None or self.loss_rank == self.rank

    @property
    def counts_rows(self) -> bool:
        """Whether this process's rows of a batch count: not where they repeat a peer's."""
        return self.data_ranks is None or self.rank in self.data_ranks

    @property
    def counts_values(self) -> bool:
        """Whether this process's logged values count: not where they repeat a peer's."""
        return self.value_ranks is None or self.rank in self.value_ranks

    @property
    def value_place(self) -> tuple[int, int]:
        """This process's number among those whose values count, and how many those are.

        A process whose values do not count has the number of its data shard.
        """
        if self.value_ranks is None:
            return self.rank, self.environment.world_size
        index = self.value_ranks.index(self.rank) if self.counts_values else self.data_shard.index
        return index, len(self.value_ranks)

    def select(self, per_rank: Sequence[Value], rows: bool = False) -> list[Value]:
        """Those of the values of all processes that count, in the order of the data."""
        ranks = self.data_ranks if rows else self.value_ranks
        return list(per_rank) if ranks is None else [per_rank[rank] for rank in ranks]

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of a tensor over the processes whose values count, the same on all; call it on all."""
        total: torch.Tensor = reduce(tensor if self.counts_values else torch.zeros_like(tensor), "sum")
        return total

    def share(self, result: Any) -> Any:
        """What the process that computes the loss passes, on every process that computes another part of the model."""
        if self.stage_group is None:
            return result
        assert self.loss_rank is not None
        boxed = [send_to_device(result, torch.device("cpu")) if self.computes_loss else None]
        dist.broadcast_object_list(boxed, src=self.loss_rank, group=self.stage_group, device=self.device)
        return result if self.computes_loss else boxed[0]


def _refuse_old_names(cls: type, names: Mapping[str, str]) -> None:
    """Raise if a class overrides a method of an earlier version, which nothing calls any more."""
    for old in names.keys() & vars(cls).keys():
        raise ConfigurationError(
            f"{cls.__name__} overrides {old}, which strategies do not have any more. Override {names[old]} instead.",
        )


_OLD_GRADIENTS = {
    "sync": "no_sync(model)",
    "held": "are_held(model)",
    "scale_held": "scale",
    "clip_value": "scale(parameters, bound=...)",
    "require_reduced": "require_reduced of a ReducingWrapper",
    "leaves": "Strategy.backward(loss, inputs=...)",
    "adopt": "ModelState.parameters_in_place(model), which is called again once others are trained",
    "reduce": "Strategy.repeats_steps, with which the Trainer averages plain gradients",
    "zero_loss": "Strategy.needs_even_batches, or zero_loss of a ReducingWrapper",
    "prepare_backward": "prepare_backward of a ReducingWrapper",
}
_OLD_STATE = {
    "full": "model(model, full=True)",
    "holds_whole": "held_as",
    "optimizer_targets": 'held_as = "shards"',
}
_OLD_STRATEGY = {
    "capability": "the members that docs/strategies.md lists, such as SplitsSequences.split_sequences",
    "place": "prepare, whose optimizers are None for a model that is only evaluated",
    "allows_inference_mode": 'held_as = "parts" in ModelState',
    "teardown": "setup, and give state.before_leaving what releases the process group",
}


# `Gradients`: how the gradients of a prepared model are reduced, held, scaled and clipped


class Gradients:
    """The gradients of one process on one device: plain tensors in `.grad`, complete after each backward.

    A strategy whose gradients are reduced, sharded or kept elsewhere has a subclass of its own.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        _refuse_old_names(cls, _OLD_GRADIENTS)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return a context whose backwards do not reduce gradients over processes, as within an accumulation window."""
        return nullcontext()

    def are_held(self, model: nn.Module) -> bool:
        """Return whether gradients that no step was taken with are elsewhere than in `.grad`."""
        return False

    def discard(self, model: nn.Module) -> None:
        """Forget gradients of a window that did not end, which are elsewhere than in `.grad`."""

    def finish(self, optimizers: Sequence[Optimizer]) -> None:
        """Complete what backwards have left to do, before the gradients of a window are unscaled, clipped or stepped.

        Args:
            optimizers: The bare optimizers, on all processes.
        """

    def scale(
        self,
        parameters: Sequence[torch.Tensor],
        factor: torch.Tensor | float = 1.0,
        bound: float | None = None,
        model: nn.Module | None = None,
    ) -> None:
        """Multiply gradients by a number, or clamp each element of them to [-bound, bound].

        Args:
            parameters: Those whose gradients are changed.
            factor: The number.
            bound: The bound, in place of a factor.
            model: The prepared model whose window may not have ended: gradients that it holds elsewhere than in `.grad`
                are multiplied, too.
        """
        scale_tensors([local_part(each.grad) for each in parameters if each.grad is not None], factor, bound)

    def clip_norm(self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale gradients down to a total norm of at most `max_norm`, over all shards. Returns the norm before."""
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)


@torch.no_grad()
def scale_tensors(
    tensors: Sequence[torch.Tensor], factor: torch.Tensor | float = 1.0, bound: float | None = None
) -> None:
    """Multiply tensors by a number in place; or with `bound`, clamp each element to [-bound, bound]."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        by_device.setdefault(tensor.device, []).append(tensor)
    for device, group in by_device.items():
        if bound is not None:
            torch._foreach_clamp_min_(group, -bound)
            torch._foreach_clamp_max_(group, bound)
        elif isinstance(factor, Tensor):
            torch._foreach_mul_(group, factor.to(device))
        else:
            torch._foreach_mul_(group, factor)


def average_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Average the gradients of all parameters that any process has one of; call it on all processes."""
    if not (parameters and PartialState().use_distributed):
        return
    here = torch.tensor([float(each.grad is not None) for each in parameters], device=parameters[0].device)
    for parameter, holders in zip(parameters, reduce(here, "sum").tolist(), strict=True):
        if holders:
            own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = reduce(own, "mean")


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this process holds of a tensor that may be sharded."""
    to_local = getattr(tensor, "to_local", None)
    local: torch.Tensor = tensor if to_local is None else to_local()
    return local


def refuse_several_losses(reason: str) -> NoReturn:
    """Raise where a backward cannot be limited to some parameters."""
    raise ConfigurationError(
        f'training_step returned a loss for each optimizer. {reason} Return one loss, or use strategy="ddp" or "fsdp".',
    )


def zero_loss_of(parameters: Iterable[nn.Parameter]) -> torch.Tensor:
    """A loss of zero that depends on all of these that are trained."""
    parts = [parameter.reshape(-1)[:1].sum() for parameter in parameters if parameter.requires_grad]
    parts = [part.real if part.is_complex() else part for part in parts]
    return torch.stack(parts).nan_to_num(0.0, 0.0, 0.0).sum() * 0.0


# Optimizer state under parameter names instead of positions, and laid out as the parameters it belongs to


IMPLEMENTATION = ("fused", "foreach")
"""Options of a group that choose how it is stepped. They are the optimizer's own, and not taken from a checkpoint."""


def named_optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return `{"state": {parameter name: {...}}, "param_groups": [{"params": [names], ...}]}`."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter in (*held, *optimizer.state):
        if id(parameter) not in names:
            raise CheckpointError(
                f"{type(optimizer).__name__} holds a parameter of shape {tuple(parameter.shape)} that is not the "
                "model's, so its state cannot be saved under a name. Make it a parameter of the model."
            )
    groups = [{**group, "params": [names[id(each)] for each in group["params"]]} for group in optimizer.param_groups]
    state = {names[id(parameter)]: dict(value) for parameter, value in optimizer.state.items()}
    return {"state": state, "param_groups": groups}


def restore_optimizer_state(model: nn.Module, optimizer: Optimizer, saved: dict[str, Any]) -> None:
    """Load what `named_optimizer_state` returned, in whatever order the parameters are now."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    current = optimizer.state_dict()
    here = [[names.get(id(p), "?") for p in group["params"]] for group in optimizer.param_groups]
    check_groups(here, saved, type(optimizer).__name__)
    position = {
        name: index
        for group_names, group in zip(here, current["param_groups"], strict=True)
        for name, index in zip(group_names, group["params"], strict=True)
    }
    groups = [
        {**saved_group, **{name: group[name] for name in ("params", *IMPLEMENTATION) if name in group}}
        for saved_group, group in zip(saved["param_groups"], current["param_groups"], strict=True)
    ]
    state = {position[name]: value for name, value in saved["state"].items()}
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    lay_out_state(optimizer)


def empty_optimizer_state(saved: Mapping[str, Any], parameters: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return memory for a saved optimizer state, as named ones are: shards like those of the parameters."""
    held = {
        name: {key: _empty_like(value, parameters.get(name)) for key, value in values.items()}
        for name, values in saved["state"].items()
    }
    groups = [{key: _empty_like(value, None) for key, value in group.items()} for group in saved["param_groups"]]
    return {"state": held, "param_groups": groups}


def _empty_like(described: Any, parameter: Tensor | None) -> Any:
    if not isinstance(described, Tensor):
        return described
    if parameter is not None and hasattr(parameter, "to_local") and described.shape == parameter.shape:
        return torch.empty_like(parameter, dtype=described.dtype, requires_grad=False)
    return torch.empty(described.shape, dtype=described.dtype)


def lay_out_state(optimizer: Optimizer) -> None:
    """Bring an optimizer's state to its parameters' devices, strides and 64 bits; call it after state was loaded.

    Files hold contiguous tensors. torch's fused implementations pair a parameter with its state by place in memory, so
    the state of a transposed or channels_last parameter would step other elements than its own.
    """
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if not isinstance(value, Tensor) or value.dim() == 0:
                continue
            if value.device != parameter.device:
                value = state[key] = value.to(parameter.device)
            if parameter.dtype == torch.float64 and value.dtype == torch.float32 and value.shape == parameter.shape:
                # Adagrad makes its state in its constructor, before precision 64 has converted the model.
                value = state[key] = value.to(torch.float64)
            if value.shape == parameter.shape and _differ_in_strides(value, parameter):
                # If the parameter is not dense, empty_like makes a dense tensor, as optimizers do for their state.
                laid_out = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
                if _differ_in_strides(value, laid_out):
                    state[key] = laid_out.copy_(value)


def _differ_in_strides(one: Tensor, other: Tensor) -> bool:
    """Compare the strides of two plain tensors or two shards; False for other kinds, such as quantized state."""
    parts = [local_part(one.detach()), local_part(other.detach())]
    is_plain = all(type(part) is Tensor and part.layout is torch.strided for part in parts)
    is_alike = hasattr(one, "to_local") == hasattr(other, "to_local")
    return is_plain and is_alike and parts[0].stride() != parts[1].stride()


def check_groups(here: Sequence[Sequence[str]], saved: Mapping[str, Any], owner: str = "The optimizer") -> None:
    """Compare the parameters of each group with those that were saved."""
    there = [list(group["params"]) for group in saved["param_groups"]]
    if [sorted(group) for group in here] == [sorted(group) for group in there]:
        return
    own, other = {name for group in here for name in group}, {name for group in there for name in group}
    raise CheckpointError(
        f"{owner} has other parameter groups than the checkpoint: {len(here)} group(s) here, {len(there)} saved; not "
        f"in the checkpoint: {sorted(own - other)[:8]}; only in the checkpoint: {sorted(other - own)[:8]}. Build the "
        "optimizer as in the run that wrote it."
    )


def class_chosen(item: Any) -> str | None:
    """The name of the class that a user chose for an optimizer or a scheduler."""
    while (package := type(item).__module__.partition(".")[0]) == "deepspeed" and hasattr(item, "optimizer"):
        item = item.optimizer
    return None if package in ("deepspeed", "drivetrain") else type(item).__name__


# `ModelState`: the state of a prepared model and its optimizers, under the names of the bare single-process model


StateDict = dict[str, Any]
HeldAs = Literal["whole", "shards", "parts"]


class ModelState:
    """The state of models that each process holds whole.

    Attributes:
        held_as: `"whole"` if every process holds models whole; `"shards"` if parameters are DTensors, which checkpoints
            are read into; `"parts"` if the strategy puts state together from several processes or devices.
        strategy: The strategy whose models these are.
    """

    held_as: HeldAs = "whole"

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        _refuse_old_names(cls, _OLD_STATE)

    def model(self, model: nn.Module, full: bool = False, everywhere: bool = False) -> StateDict:
        """Return parameters and buffers under their canonical names; call it on all processes.

        Args:
            model: What `prepare` returned.
            full: Return plain tensors on the CPU, whole, on rank 0 alone, and an empty dict elsewhere; else what a
                checkpoint is written from: on each process its part, or the whole.
            everywhere: With `full`, return them on every process that holds the model whole.
        """
        state = self.strategy.unwrap(model).state_dict() if not full or self._returns(everywhere) else {}
        # A module's extra state may be anything.
        tensors = ((name, value) for name, value in state.items() if isinstance(value, Tensor))
        return {name: value.detach().cpu() for name, value in tensors} if full else state

    def _returns(self, everywhere: bool) -> bool:
        """Whether this process is one that whole tensors are returned on."""
        return self.strategy.topology.rank == 0 or (everywhere and self.held_as == "whole")

    def optimizer(self, model: nn.Module, optimizer: Optimizer) -> StateDict:
        """An optimizer's state by canonical parameter name, and its groups."""
        return named_optimizer_state(self.strategy.unwrap(model), optimizer)

    def load_model(self, model: nn.Module, state: StateDict, strict: bool = True) -> Any:
        """Load what `model` returned under any strategy."""
        return self.strategy.unwrap(model).load_state_dict(state, strict=strict)

    def load_optimizer(self, model: nn.Module, optimizer: Optimizer, state: StateDict) -> None:
        """Load what `optimizer` returned under any strategy."""
        restore_optimizer_state(self.strategy.unwrap(model), optimizer, state)

    def parameters_in_place(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """The parameters by name, or this process's shards of them: what is written to them is what the model computes.

        What was gathered for a forward is freed, so that the next one sees what was written. Call it again after
        others of them were set to be trained.
        """
        return dict(self.strategy.unwrap(model).named_parameters())

    def describe(self, parameter: nn.Parameter) -> tuple[int, bool]:
        """How many elements the whole of a parameter has, wherever they are, and whether any process trains it."""
        return parameter.numel(), parameter.requires_grad


def original_type(module: nn.Module) -> type[nn.Module]:
    """Return the class that the user gave a module, which `fully_shard` replaces by one derived from it."""
    return next(kind for kind in type(module).__mro__ if not kind.__module__.startswith("torch.distributed.fsdp"))


def with_buffers_of_rank_0(model: nn.Module, state: StateDict) -> StateDict:
    """A model's state with rank 0's buffers in it; call it on all processes.

    Buffers such as running means differ between processes until the next forward sends rank 0's to all, and a
    checkpoint may take each tensor from another process.
    """
    for name, _ in model.named_buffers():
        if name in state:
            state[name] = broadcast(state[name].detach().clone())
    return state


MicroBatch = TypeVar("MicroBatch")
Output = TypeVar("Output")

View = Literal["train", "manual", "evaluate"]


class Given(NamedTuple):
    """What the user gave a loop.

    Attributes:
        argument: Where it was given, such as `"Trainer(gradient_clip_val)"`.
        value: Its value.
    """

    argument: str
    value: Any


@dataclass(frozen=True)
class RunOptions:
    """What a loop was asked for that a strategy may refuse, or that its own configuration may give too."""

    precision: Precision
    gradient_accumulation_steps: Given
    gradient_clipping: Given | None = None


# What few strategies can do: they inherit it beside `Strategy`, and are asked for it by their class


class SplitsSequences:
    """A strategy whose processes share sequences."""

    def split_sequences(
        self, buffers: Sequence[torch.Tensor], seq_dims: Sequence[int], keep: Collection[torch.Tensor] = ()
    ) -> AbstractContextManager[Any]:
        """Return a context in which tensors are this process's part of themselves.

        Args:
            buffers: Tensors that hold whole sequences, and this process's part of them in the context.
            seq_dims: For each, which dimension is the sequence.
            keep: Those that stay parts afterwards.
        """
        raise NotImplementedError


class JoinsUnevenInputs:
    """A strategy whose processes may run out of batches before others."""

    def join(self, models: Sequence[nn.Module]) -> AbstractContextManager[Any]:
        """Return a context in which they may.

        Args:
            models: What `prepare` returned.
        """
        raise NotImplementedError


class PlacesBatches:
    """A strategy that brings batches onto the devices in a way of its own.

    Attributes:
        batch_placement: That way.
    """

    batch_placement: BatchPlacement


class BatchPlacement:
    """Brings batches onto the devices in a way of its own, for devices that compile a graph for each shape.

    Attributes:
        fills_evaluation: Whether short batches are filled up in evaluations whose values include the padding, too.
    """

    fills_evaluation: bool = False

    def around(self, place: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """What a loader calls with each batch."""
        raise NotImplementedError

    def finish(self) -> None:
        """End the work on the last batch; called where an iteration over a loader ends."""
        raise NotImplementedError


_OF_FEW: dict[str, type] = {
    "split_sequences": SplitsSequences,
    "join": JoinsUnevenInputs,
    "batch_placement": PlacesBatches,
}


class Strategy(ABC):
    """Places one model on a set of processes and runs optimizer steps there.

    The base class is the whole behaviour of one process on one device; a strategy overrides what
    differs. A new one is a subclass in a file of its own and a line in the registry, and a third
    party adds its own with `register_strategy`. What is not about placing, running and stepping
    belongs to three parts, which `setup` makes.

    Attributes:
        name: The name that users write.
        schedules_microbatches: Whether the strategy must see all micro-batches of a step at once, as a pipeline does.
        needs_even_batches: Whether every process must run as many forwards, since they are collective: in evaluation
            all see as many batches, and in training none may be left out.
        repeats_steps: Whether gradients are plain tensors, and backwards within `view(model, "manual")` exchange
            nothing: a step that ran out of memory is computed again, and then its gradients are averaged.
        topology: This process's place among the others, and which processes count.
        gradients: How gradients are reduced, held, scaled and clipped.
        state: The state of models and optimizers, under the bare model's names.
    """

    name: ClassVar[str]
    schedules_microbatches: bool = False
    needs_even_batches: bool = False
    repeats_steps: bool = False

    topology: Topology
    gradients: Gradients
    state: ModelState

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        of_few = {name: f"it in a subclass of {kind.__name__}, too" for name, kind in _OF_FEW.items()}
        others = {name: new for name, new in of_few.items() if not issubclass(cls, _OF_FEW[name])}
        _refuse_old_names(cls, {**_OLD_STRATEGY, **others})
        if "__init__" in vars(cls) and cls.__module__.startswith("drivetrain."):  # a user's class stays as it is
            cls.__init__ = known_keywords(cls.__init__)  # type: ignore[method-assign]

    def setup(self, state: PartialState) -> None:
        """Take this process's place, and make the three parts.

        What would keep the process group alive is released by a function that is given to `state.before_leaving`.

        Args:
            state: This process, its device and its peers.

        Raises:
            ConfigurationError: The strategy cannot run in this environment.
        """
        self.topology = Topology.data_parallel(state)
        self.gradients = Gradients()
        self.state = ModelState(self)

    def check(self, options: RunOptions) -> None:
        """Refuse what cannot work with this strategy; called after `setup`, before anything is built.

        Args:
            options: What the loop was asked for.

        Raises:
            ConfigurationError: Names what contradicts what, and what would work.
        """

    # model

    def init_context(self) -> AbstractContextManager[Any]:
        """Context in which a model is best built."""
        return nullcontext()

    def prepare(
        self, model: nn.Module, optimizers: Sequence[Optimizer] | None, precision: Precision, move: bool = True
    ) -> tuple[nn.Module, list[Optimizer]]:
        """Bring a model's parameters onto the device and into the precision's dtype, together with its optimizers.

        Args:
            model: The model as the user built it.
            optimizers: The optimizers over its parameters; None for a model that is only evaluated.
            precision: The number formats.
            move: Whether to bring the model onto the device; not where its user places it by hand.

        Returns:
            The module to call, and the optimizers to step.
        """
        before = dict(self.unwrap(model).named_parameters())
        converted = precision.convert(model)
        placed = move_model(converted, self.topology.device) if move else converted
        keep_optimizers(before, placed, optimizers or ())
        return placed, list(optimizers or ())

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The user's own module inside whatever `prepare` wrapped around it."""
        while True:
            if isinstance(model, StepModule):
                model = model.task
            elif hasattr(model, "_orig_mod"):
                model = model._orig_mod  # type: ignore[assignment]
            else:
                return model

    def view(self, model: nn.Module, stage: View) -> nn.Module:
        """The module to call in a stage of the run; call it on all processes as the stage begins.

        Args:
            model: What `prepare` returned.
            stage: `"train"`; `"manual"` where the task runs backward within its training step; or `"evaluate"`, in
                which no gradients need reducing, and for which every process is given the same model.
        """
        return model

    # one optimizer step

    def forward_backward(
        self, model: nn.Module, step_fn: Callable[[MicroBatch], Output], microbatches: Sequence[MicroBatch]
    ) -> list[Output]:
        """Run forward and backward over the micro-batches of one optimizer step.

        Gradients are reduced over processes in the last one only.

        Args:
            model: What `prepare` returned.
            step_fn: Runs forward and backward on one micro-batch.
            microbatches: The window of one step.

        Returns:
            What `step_fn` returned for each.
        """
        if len(microbatches) == 1:
            return [step_fn(microbatches[0])]
        with self.gradients.no_sync(model):
            outputs = [step_fn(microbatch) for microbatch in microbatches[:-1]]
        outputs.append(step_fn(microbatches[-1]))
        return outputs

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Compute the gradients of a loss, scaled already.

        Args:
            loss: The loss.
            **kwargs: Those of `Tensor.backward`; `inputs` are the parameters that alone get gradients.
        """
        loss.backward(**kwargs)  # type: ignore[no-untyped-call]

    def optimizer_step(
        self, optimizer: Optimizer, precision: Precision, closure: Callable[[], Any] | None = None
    ) -> bool:
        """Step an optimizer. Returns False where the step was skipped on overflow."""
        return precision.step(optimizer, closure)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


# An optimizer in front of another one, whose groups, state and defaults it shows


class OptimizerProxy(Optimizer):
    """Shows the groups, the state and the defaults of `self.optimizer`, which a subclass provides, as its own.

    A subclass does not call `Optimizer.__init__`, which would make groups of its own.
    """

    optimizer: Optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's own groups."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        """The optimizer's own state."""
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        """The optimizer's own defaults."""
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.optimizer.defaults = defaults

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r})"


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether an optimizer, such as L-BFGS, cannot step without a closure."""
    parameter = inspect.signature(type(optimizer).step).parameters.get("closure")
    return parameter is not None and parameter.default is inspect.Parameter.empty


# What few strategies are beside a strategy


class Configured(Strategy):
    """A strategy with configuration files of its own, one of which places what is prepared."""

    def add_configuration(self, name: str, other: Strategy) -> None:
        """Hold one more.

        Args:
            name: What it is selected by.
            other: A strategy of the same kind, made but not set up, whose configuration it is.

        Raises:
            ConfigurationError: It cannot run beside this one.
        """
        raise NotImplementedError

    def select_configuration(self, name: str) -> None:
        """Place what is prepared from now on by one of them; what has been prepared stays as it is."""
        raise NotImplementedError

    def choose_precision(self, given: str | Precision | None) -> str | Precision | None:
        """Return the configuration's precision; what was given if it decides none, or another one.

        Args:
            given: A precision or its name; None if none was given.
        """
        raise NotImplementedError

    def accelerate_name(self, precision: Precision) -> str:
        """Return the name of a precision under this strategy, as `mixed_precision` spells it."""
        raise NotImplementedError


class StartsProcesses:
    """A strategy that runs each verb of a Trainer in processes that are started for it, and computes nothing itself.

    Attributes:
        within: Makes the strategy of those processes.
        start_method: `"spawn"` or `"fork"`.
        num_processes: How many; 0 until a Trainer has chosen.
        kind: Name of the kind of device that they run on.
        first_call: A function that each process calls before it unpickles the task, and its arguments; or None.
    """

    within: Callable[[], Strategy]
    start_method: str
    num_processes: int
    kind: str
    first_call: tuple[Callable[..., Any], tuple[Any, ...]] | None = None


class ReducingWrapper(nn.Module):
    """A module around a model whose forward arranges how the next backward reduces gradients, as DDP's does."""

    def prepare_backward(self, loss: torch.Tensor) -> None:
        """Arrange it for the backward of a loss that no forward of this module has computed."""
        raise NotImplementedError

    def zero_loss(self) -> torch.Tensor:
        """Return a loss with the gradients of zero that peers wait for, for a batch that this process leaves out."""
        raise NotImplementedError

    def require_reduced(self) -> None:
        """Raise if this process's backward has left out gradients that its peers wait for.

        Nothing is exchanged, so it may precede a collective that those peers would not meet.
        """
        raise NotImplementedError


def evaluation_context(strategy: Strategy, inference_mode: bool) -> AbstractContextManager[Any]:
    """Return the context without gradients that an evaluation runs in.

    Where a strategy puts a model together from parts, tensors that are made in inference mode cannot be recorded,
    handed over or gathered.
    """
    return torch.inference_mode() if inference_mode and strategy.state.held_as != "parts" else torch.no_grad()


def joined(strategy: Strategy, models: Sequence[nn.Module]) -> AbstractContextManager[Any] | None:
    """Return a context in which processes may run out of batches before others; None if it has no effect."""
    if isinstance(strategy, JoinsUnevenInputs):
        return strategy.join(models)
    if strategy.needs_even_batches and strategy.topology.environment.is_distributed:
        raise ConfigurationError(
            f"join_uneven_inputs does not work with {strategy!r}: every forward exchanges tensors with all processes, "
            "so all need as many batches. Keep even_batches=True, the default, and drop this context.",
        )
    return None


def zero_loss(strategy: Strategy, task: nn.Module, model: nn.Module | None) -> torch.Tensor:
    """Return a loss with gradients of zero, for a batch that a task leaves out while its peers wait for gradients.

    Raises:
        ConfigurationError: They wait for forwards, too.
    """
    if strategy.needs_even_batches:
        raise ConfigurationError(
            f"{type(task).__name__}.training_step returned None on rank {strategy.topology.rank}. With {strategy!r} "
            "every process must run as many forwards and backwards. Return a loss that counts for nothing instead, "
            "such as loss * 0, or leave the sample out of the dataset.",
        )
    return model.zero_loss() if isinstance(model, ReducingWrapper) else zero_loss_of(task.parameters())
