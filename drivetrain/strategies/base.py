"""`Strategy` base class: places a model on the processes of a run and runs its optimizer steps."""

from __future__ import annotations

import inspect
from abc import ABC
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, NoReturn, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.data.configuration import DataShard
from drivetrain.runtime.collectives import broadcast, reduce
from drivetrain.runtime.devices import DeviceKind
from drivetrain.runtime.environment import ProcessEnvironment
from drivetrain.runtime.errors import CheckpointError, ConfigurationError, known_keywords
from drivetrain.runtime.observer import leaves_empty
from drivetrain.runtime.pytrees import TensorInformation, is_tensor_information, recursively_apply, send_to_device
from drivetrain.runtime.state import PartialState
from drivetrain.strategies.precision import Precision
from drivetrain.strategies.step_module import StepModule

if TYPE_CHECKING:
    from drivetrain.strategies.parallel.mesh import MeshPlace

# Moving a model to a device without replacing its parameters


def move_model(model: nn.Module, device: torch.device) -> nn.Module:
    """Move a model to a device and return it.

    Optimizers stay valid, as the parameters stay the same objects.
    """
    return move_in_place(model, device) if replaces_parameters(device) else model.to(device)


def replaces_parameters(device: torch.device) -> bool:
    """Return True if `Module.to` creates new parameters for this device.

    XLA and PrivateUse1 backends do.
    """
    # An empty parameter shows what the backend does.
    probe = nn.ParameterList([nn.Parameter(torch.empty(0))])
    before = probe[0]
    return probe.to(device)[0] is not before


def move_in_place(
    model: nn.Module,
    device: torch.device,
    placed: Callable[[str, nn.Parameter], None] | None = None,
    moves: Callable[[Tensor], bool] = lambda tensor: True,
) -> nn.Module:
    # On XLA and PrivateUse1 backends, `Module.to` creates new parameters and separates tied ones, and optimizers built
    # earlier would step the old ones. So the tensors inside the existing objects are swapped. `placed` is called with
    # the name and the parameter after each move. Tensors for which `moves` returns False stay where they are.
    for name, parameter in model.named_parameters():
        if moves(parameter) and not _is_on(parameter, device):
            _move(name, parameter, device)
        if placed is not None:
            placed(name, parameter)
    moved: dict[int, Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and moves(buffer) and not _is_on(buffer, device):
                # A buffer that is registered in several modules stays one tensor.
                if id(buffer) not in moved:
                    moved[id(buffer)] = buffer.to(device)
                module._buffers[name] = moved[id(buffer)]
    for module in model.modules():
        if type(module)._apply is not nn.Module._apply:
            # The metrics of torchmetrics move their state here, which is neither parameters nor buffers.
            module._apply(lambda tensor: tensor.to(device) if moves(tensor) else tensor)  # type: ignore[no-untyped-call]
    return model


def keep_optimizers(before: Mapping[str, nn.Parameter], model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    # `before` maps names to the model's parameters before the move. A replaced parameter is no longer in the model, so
    # that its optimizer would not train the model.
    now = {id(parameter) for parameter in model.parameters()}
    gone = {id(parameter): name for name, parameter in before.items() if id(parameter) not in now}
    for optimizer in optimizers if gone else ():
        for parameter in (each for group in optimizer.param_groups for each in group["params"]):
            if id(parameter) in gone:
                raise ConfigurationError(
                    f"{type(optimizer).__name__} holds the old parameter {gone[id(parameter)]}, which was replaced "
                    "when the model was moved or converted, so it would not be trained. Move the model to its device "
                    "and dtype before you create the optimizer.",
                )
    for optimizer in optimizers:
        lay_out_state(optimizer)


def _is_on(tensor: Tensor, device: torch.device) -> bool:
    # A device without an index stands for any device of its type.
    return tensor.device.type == device.type and device.index in (None, tensor.device.index)


def _move(name: str, parameter: nn.Parameter, device: torch.device) -> None:
    gradient, attributes = parameter.grad, dict(parameter.__dict__)
    # `swap_tensors` does not move the gradient. It is detached here and moved separately below.
    parameter.grad = None
    target = nn.Parameter(parameter.detach().to(device), requires_grad=parameter.requires_grad)
    try:
        torch.utils.swap_tensors(parameter, target)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise ConfigurationError(
            f"Parameter {name!r} cannot be moved to {device}, because the autograd graph of an earlier forward pass "
            "or a weak reference still refers to it. Prepare the model, or call fit, before the model is used.",
        ) from error
    parameter.__dict__.update(attributes)
    if gradient is not None:
        parameter.grad = gradient.to(device)


# `Topology`: the role of this process in the run


Value = TypeVar("Value")


@dataclass(frozen=True)
class Topology:
    """Role of this process in a run: its rank and device, and the part of the dataset that it loads.

    Attributes:
        environment: Rank, local rank and world size of this process.
        kind: The device type.
        device: The device of this process.
        data_shard: The part of the dataset that this process loads.
        data_ranks: Ranks whose batches count, in data order, or None if all do.
        value_ranks: Ranks whose logged values count, in data order, or None if all do.
        averaging_processes: Number of processes over which gradients are averaged.
        stage_group: Process group of the pipeline stages of one model, or None without pipeline parallelism.
        loss_rank: Rank of the pipeline stage that computes the loss, or None if every rank computes it.
    """

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
        # Every process loads a different part of the data.
        count = state.environment.world_size
        shard = DataShard(state.environment.rank, count)
        return cls(state.environment, state.kind, state.device, shard, averaging_processes=count)

    @classmethod
    def in_grid(cls, state: PartialState, place: MeshPlace, stage_group: dist.ProcessGroup | None = None) -> Topology:
        return cls(
            state.environment,
            state.kind,
            state.device,
            place.data_shard,
            place.data_ranks,
            place.value_ranks,
            # Context-parallel processes compute gradients from parts of the same sequences, and average them, too.
            averaging_processes=place.data_shard.count * place.sizes.cp,
            stage_group=stage_group,
            loss_rank=None if stage_group is None else place.loss_rank,
        )

    @property
    def rank(self) -> int:
        """Global rank of this process."""
        return self.environment.rank

    @property
    def computes_loss(self) -> bool:
        """True if this process computes the loss, which in a pipeline only the last stage does."""
        return self.loss_rank is None or self.loss_rank == self.rank

    @property
    def counts_rows(self) -> bool:
        # If several processes load the same samples, gathers keep those of one of them.
        return self.data_ranks is None or self.rank in self.data_ranks

    @property
    def counts_values(self) -> bool:
        # If several processes compute the same values, metrics include those of one of them.
        return self.value_ranks is None or self.rank in self.value_ranks

    @property
    def value_place(self) -> tuple[int, int]:
        # The index among the ranks whose logged values metrics include, and their number. Saved metrics are distributed
        # by it when a run resumes with other ranks. A process whose values are not included has the index of its data
        # shard.
        if self.value_ranks is None:
            return self.rank, self.environment.world_size
        index = self.value_ranks.index(self.rank) if self.counts_values else self.data_shard.index
        return index, len(self.value_ranks)

    def select(self, per_rank: Sequence[Value], rows: bool = False) -> list[Value]:
        # `per_rank` is a list by rank. Entries of ranks whose data repeats another rank's are left out, and the others
        # are in data order. `rows` selects the ranks whose samples count, the default those whose logged values count.
        ranks = self.data_ranks if rows else self.value_ranks
        return list(per_rank) if ranks is None else [per_rank[rank] for rank in ranks]

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        # A collective call. Of processes with equal values, only one is added.
        total: torch.Tensor = reduce(tensor if self.counts_values else torch.zeros_like(tensor), "sum")
        return total

    def share(self, result: Any) -> Any:
        """Send a step's result from the last pipeline stage to all stages.

        Tensors on the device stay there, and no host waits for its device.
        """
        if self.stage_group is None:
            return result
        assert self.loss_rank is not None
        own: list[torch.Tensor] = []

        def take_out(tensor: torch.Tensor) -> TensorInformation:
            own.append(tensor.detach())
            return TensorInformation(tensor.shape, tensor.dtype)

        boxed: list[Any] = [None]
        if self.computes_loss:
            described = recursively_apply(take_out, result, test_type=self._stays_on_device)
            # Unpickling restores a tensor on its sender's device, which the receiving stages may not see.
            boxed[0] = send_to_device(described, torch.device("cpu"))
        # Without `device`, torch sends pickled bytes between CPUs if the group can do that.
        dist.broadcast_object_list(boxed, src=self.loss_rank, group=self.stage_group)
        expected: list[TensorInformation] = []
        recursively_apply(expected.append, boxed[0], test_type=is_tensor_information)
        received = {}
        for dtype in dict.fromkeys(each.dtype for each in expected):
            sizes = [each.shape.numel() for each in expected if each.dtype == dtype]
            parts = [tensor.reshape(-1) for tensor in own if tensor.dtype == dtype]
            flat = torch.cat(parts) if parts else torch.empty(sum(sizes), dtype=dtype, device=self.device)
            dist.broadcast(flat, src=self.loss_rank, group=self.stage_group)
            received[dtype] = iter(torch.split(flat, sizes))
        if self.computes_loss:
            return result
        return recursively_apply(
            lambda each: next(received[each.dtype]).view(each.shape), boxed[0], test_type=is_tensor_information
        )

    def _stays_on_device(self, value: Any) -> bool:
        plain = type(value) is torch.Tensor and value.layout is torch.strided
        return plain and self.device.type != "cpu" and value.device == self.device


def _refuse_old_names(cls: type, names: Mapping[str, str]) -> None:
    # A user's override of a method that is no longer called would silently have no effect.
    for old in names.keys() & vars(cls).keys():
        raise ConfigurationError(
            f"{cls.__name__} overrides {old}, which strategies no longer call. Override {names[old]} instead.",
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
    "teardown": "setup, and pass a function that releases the process group to state.before_leaving,",
}


# Gradients of a prepared model: reduction, scaling and clipping


class Gradients:
    """Operations on gradients that a strategy can override: reduction over processes, scaling, clipping.

    This class expects complete gradients in `.grad` after each backward pass. A strategy that reduces, shards or stores
    gradients differently uses a subclass.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        _refuse_old_names(cls, _OLD_GRADIENTS)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which backward passes do not reduce gradients.

        Used for all but the last micro-batch of a gradient accumulation window.

        Args:
            model: The prepared model.
        """
        return nullcontext()

    def are_held(self, model: nn.Module) -> bool:
        """Return True if some gradients of a model are currently stored elsewhere than in `.grad`."""
        return False

    def discard(self, model: nn.Module) -> None:
        """Clear those gradients of a model that the strategy stores outside of `Parameter.grad`.

        The base class stores none.

        Args:
            model: The prepared model.
        """

    def finish(self, optimizers: Sequence[Optimizer]) -> None:
        """Complete the averaging of gradients over all processes, before the optimizers step.

        All processes must call this method.

        Args:
            optimizers: The optimizers that `prepare` returned, without a wrapper.
        """

    def scale(
        self,
        parameters: Sequence[torch.Tensor],
        factor: torch.Tensor | float = 1.0,
        bound: float | None = None,
        model: nn.Module | None = None,
    ) -> None:
        """Multiply gradients by `factor` or, if `bound` is given, clamp their values to `[-bound, bound]`.

        Args:
            parameters: Parameters whose gradients are changed in place.
            factor: The factor, a number or a scalar tensor.
            bound: The largest absolute value of an element. If given, `factor` is ignored.
            model: The prepared model, whose accumulated gradients outside `.grad` are multiplied too.
        """
        scale_tensors([local_part(each.grad) for each in parameters if each.grad is not None], factor, bound)

    def clip_norm(self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip gradients to a total norm, and return the norm before clipping.

        Args:
            parameters: Parameters whose gradients are scaled in place.
            max_norm: The largest allowed norm.
            norm_type: The order of the norm.

        Returns:
            The total norm before clipping.
        """
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)


@torch.no_grad()
def scale_tensors(
    tensors: Sequence[torch.Tensor], factor: torch.Tensor | float = 1.0, bound: float | None = None
) -> None:
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        by_device.setdefault(tensor.device, []).append(tensor)
    for device, group in by_device.items():
        if bound is not None:
            # The `_foreach` functions take tensors of one device only.
            torch._foreach_clamp_min_(group, -bound)
            torch._foreach_clamp_max_(group, bound)
        elif isinstance(factor, Tensor):
            torch._foreach_mul_(group, factor.to(device))
        else:
            torch._foreach_mul_(group, factor)


def average_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Average the gradients of parameters over all processes.

    A collective call. A gradient that is missing on some processes counts as zero there.

    A parameter without a gradient on every process is left without one.
    """
    if not (parameters and PartialState().use_distributed):
        return
    # All processes must reduce the same parameters, so they first agree which of them have a gradient.
    here = torch.tensor([float(each.grad is not None) for each in parameters], device=parameters[0].device)
    for parameter, holders in zip(parameters, reduce(here, "sum").tolist(), strict=True):
        if holders:
            own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = reduce(own, "mean")


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's shard of a DTensor, or a plain tensor unchanged."""
    to_local = getattr(tensor, "to_local", None)
    local: torch.Tensor = tensor if to_local is None else to_local()
    return local


def refuse_several_losses(reason: str) -> NoReturn:
    raise ConfigurationError(
        f'training_step returned a loss for each optimizer. {reason} Return one loss, or use strategy="ddp" or "fsdp".',
    )


def zero_loss_of(parameters: Iterable[nn.Parameter]) -> torch.Tensor:
    # For steps without a batch. The backward gives each trainable parameter a zero gradient.
    parts = [parameter.reshape(-1)[:1].sum() for parameter in parameters if parameter.requires_grad]
    parts = [part.real if part.is_complex() else part for part in parts]
    # A product of 0 and an infinite or NaN parameter would be NaN.
    return torch.stack(parts).nan_to_num(0.0, 0.0, 0.0).sum() * 0.0


# Optimizer state by parameter name


IMPLEMENTATION = ("fused", "foreach")
"""Keys of a parameter group that select the optimizer's implementation. They are not restored from checkpoints."""


def named_optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return an optimizer's state dict with parameter names in place of indices.

    The format is `{"state": {parameter name: {...}}, "param_groups": [{"params": [names], ...}]}`.
    """
    names = _names_of(model, optimizer)
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter in (*held, *optimizer.state):
        if id(parameter) not in names:
            raise CheckpointError(
                f"{type(optimizer).__name__} holds a parameter of shape {tuple(parameter.shape)} that does not belong "
                "to the model, so its state cannot be saved by name. Register it as a parameter of the model."
            )
    groups = [{**group, "params": [names[id(each)] for each in group["params"]]} for group in optimizer.param_groups]
    state = {names[id(parameter)]: dict(value) for parameter, value in optimizer.state.items()}
    return {"state": state, "param_groups": groups}


# By optimizer: the names of its parameters by `id`, when it was prepared.
_first_names: WeakKeyDictionary[Optimizer, dict[int, str]] = WeakKeyDictionary()


def record_names(model: nn.Module, optimizer: Optimizer) -> None:
    # `prepare` may replace parameters that the optimizer holds. Their state is then saved under these first names.
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    held = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    if all(each in names for each in held):
        _first_names[optimizer] = {each: names[each] for each in held}


def _names_of(model: nn.Module, optimizer: Optimizer) -> dict[int, str]:
    # From `id` to name. A replaced parameter that the optimizer still holds keeps its first name.
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    held = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    used = {names[each] for each in held if each in names}
    first = _first_names.get(optimizer, {})
    return {**{each: first[each] for each in held if each in first and first[each] not in used}, **names}


def restore_optimizer_state(model: nn.Module, optimizer: Optimizer, saved: dict[str, Any]) -> None:
    """Load an optimizer state dict in which parameters are referred to by name."""
    names = _names_of(model, optimizer)
    current = optimizer.state_dict()
    here = [[names.get(id(p), "?") for p in group["params"]] for group in optimizer.param_groups]
    check_groups(here, saved, type(optimizer).__name__)
    position = {
        name: index
        for group_names, group in zip(here, current["param_groups"], strict=True)
        for name, index in zip(group_names, group["params"], strict=True)
    }
    groups = [
        # This run chooses the implementation, such as fused or foreach, not the checkpoint.
        {**saved_group, **{name: group[name] for name in ("params", *IMPLEMENTATION) if name in group}}
        for saved_group, group in zip(saved["param_groups"], current["param_groups"], strict=True)
    ]
    state = {position[name]: value for name, value in saved["state"].items()}
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    lay_out_state(optimizer)


def empty_optimizer_state(saved: Mapping[str, Any], parameters: Mapping[str, Tensor]) -> dict[str, Any]:
    # A checkpoint is read into these tensors. One with the shape of a sharded parameter is sharded like it. Values
    # other than tensors are copied.
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
    """Move an optimizer's state tensors to the devices and memory layouts of the optimizer's parameters.

    Checkpoints hold contiguous tensors. Torch's fused optimizers pair a parameter and its state by memory offset. For a
    transposed or channels_last parameter, contiguous state would therefore update the wrong elements. State of float64
    parameters is converted to float64.
    """
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if not isinstance(value, Tensor) or value.dim() == 0:
                continue
            if value.device != parameter.device:
                value = state[key] = value.to(parameter.device)
            if parameter.dtype == torch.float64 and value.dtype == torch.float32 and value.shape == parameter.shape:
                # Adagrad creates its state in its constructor, before precision 64 converts the model.
                value = state[key] = value.to(torch.float64)
            if value.shape == parameter.shape and _differ_in_strides(value, parameter):
                # If the parameter is not dense, empty_like makes a dense tensor, as optimizers do for their state.
                laid_out = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
                if _differ_in_strides(value, laid_out):
                    state[key] = laid_out.copy_(value)


def _differ_in_strides(one: Tensor, other: Tensor) -> bool:
    # Other tensor types, such as sparse or quantized tensors, have no strides that could be matched.
    parts = [local_part(one.detach()), local_part(other.detach())]
    is_plain = all(type(part) is Tensor and part.layout is torch.strided for part in parts)
    is_alike = hasattr(one, "to_local") == hasattr(other, "to_local")
    return is_plain and is_alike and parts[0].stride() != parts[1].stride()


def check_groups(here: Sequence[Sequence[str]], saved: Mapping[str, Any], owner: str = "The optimizer") -> None:
    there = [list(group["params"]) for group in saved["param_groups"]]
    if [sorted(group) for group in here] == [sorted(group) for group in there]:
        return
    own, other = {name for group in here for name in group}, {name for group in there for name in group}
    raise CheckpointError(
        f"{owner} has parameter groups that do not match the checkpoint: {len(here)} group(s) here, {len(there)} "
        f"saved; not in the checkpoint: {sorted(own - other)[:8]}; only in the checkpoint: {sorted(other - own)[:8]}. "
        "Create the optimizer as in the run that saved the checkpoint."
    )


def class_chosen(item: Any) -> str | None:
    # None if DeepSpeed or drivetrain chose the class, since their optimizers and schedulers are internal.
    while (package := type(item).__module__.partition(".")[0]) == "deepspeed" and hasattr(item, "optimizer"):
        item = item.optimizer
    return None if package in ("deepspeed", "drivetrain") else type(item).__name__


# State dicts of a prepared model and its optimizers, by the names of the unwrapped model


StateDict = dict[str, Any]
HeldAs = Literal["whole", "shards", "parts"]


class ModelState:
    """Base class that reads and loads state dicts of prepared models and their optimizers, for checkpoints.

    A strategy that shards the model uses a subclass.

    Attributes:
        held_as: `"whole"` if each process holds the whole model. `"shards"` if parameters are DTensors that
            checkpoints are loaded into. `"parts"` if the strategy assembles state from several processes or devices.
        strategy: The strategy that prepared the models.
    """

    held_as: HeldAs = "whole"

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        _refuse_old_names(cls, _OLD_STATE)

    def model(self, model: nn.Module, full: bool = False, everywhere: bool = False) -> StateDict:
        """Return the state dict of a prepared model, sharded for a checkpoint or, with `full`, unsharded.

        Names have no prefix of a wrapper such as DDP. A collective call.

        Args:
            model: The model that `prepare` returned.
            full: Return whole tensors on the CPU on rank 0, and an empty dict elsewhere. By default, return the tensors
                that this process writes to a checkpoint, which may be shards.
            everywhere: With `full`, return whole tensors on every process that holds the whole model.

        Returns:
            A dict from name to tensor. Without `full`, it may contain a module's extra state.
        """
        state = self.strategy.unwrap(model).state_dict() if not full or self._returns(everywhere) else {}
        # A module's extra state may be any object.
        tensors = ((name, value) for name, value in state.items() if isinstance(value, Tensor))
        return {name: value.detach().cpu() for name, value in tensors} if full else state

    def _returns(self, everywhere: bool) -> bool:
        return self.strategy.topology.rank == 0 or (everywhere and self.held_as == "whole")

    def optimizer(self, model: nn.Module, optimizer: Optimizer) -> StateDict:
        """Return an optimizer's state dict for a checkpoint, in which parameters are referred to by name.

        Args:
            model: The model that `prepare` returned.
            optimizer: An optimizer over the model's parameters.
        """
        return named_optimizer_state(self.strategy.unwrap(model), optimizer)

    def load_model(self, model: nn.Module, state: StateDict, strict: bool = True) -> Any:
        """Load a full or sharded state dict, saved under any strategy, into a prepared model.

        Args:
            model: The model that `prepare` returned.
            state: The state dict.
            strict: Raise if the names in the state dict and in the model differ.

        Returns:
            The missing and unexpected keys, as `Module.load_state_dict` returns them.
        """
        return self.strategy.unwrap(model).load_state_dict(state, strict=strict)

    def load_optimizer(self, model: nn.Module, optimizer: Optimizer, state: StateDict) -> None:
        """Load an optimizer's state, saved under any strategy and keyed by parameter name.

        Args:
            model: The model that `prepare` returned.
            optimizer: An optimizer over the model's parameters.
            state: The optimizer state by parameter name.
        """
        restore_optimizer_state(self.strategy.unwrap(model), optimizer, state)

    def parameters_in_place(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """Return the tensors that store a prepared model's parameters, keyed by name, to modify them in place.

        If the model is sharded, the tensors are this process's shards. Parameters gathered for a forward pass are freed
        first, so that the next forward pass uses the written values. Call this method again after `requires_grad` has
        changed on any parameter.
        """
        return dict(self.strategy.unwrap(model).named_parameters())

    def describe(self, parameter: nn.Parameter) -> tuple[int, bool]:
        """Return a parameter's number of elements before sharding, and True if the parameter is trained."""
        return parameter.numel(), parameter.requires_grad


def original_type(module: nn.Module) -> type[nn.Module]:
    # `fully_shard` puts its own subclasses in front of the module's class.
    return next(kind for kind in type(module).__mro__ if not kind.__module__.startswith("torch.distributed.fsdp"))


def with_buffers_of_rank_0(model: nn.Module, state: StateDict) -> StateDict:
    # A collective call. Buffers differ between processes until DDP's next forward pass broadcasts them. A checkpoint
    # would otherwise mix the buffers of several ranks.
    for name, _ in model.named_buffers():
        if name in state:
            state[name] = broadcast(state[name].detach().clone())
    return state


MicroBatch = TypeVar("MicroBatch")
Output = TypeVar("Output")

View = Literal["train", "manual", "evaluate"]


class Given(NamedTuple):
    """A setting's value and the name of the argument that set it, which error messages quote."""

    argument: str  # such as "Trainer(gradient_clip_val)"
    value: Any


@dataclass(frozen=True)
class RunOptions:
    """Settings of a run that `Strategy.check` receives, so that a strategy can refuse unsupported ones."""

    precision: Precision
    gradient_accumulation_steps: Given
    gradient_clipping: Given | None = None  # None without clipping


# Optional abilities: a strategy inherits from one of these classes in addition to `Strategy`


class SplitsSequences:
    """Mixin for strategies with context parallelism, which split each sequence over several processes."""

    def split_sequences(
        self, buffers: Sequence[torch.Tensor], seq_dims: Sequence[int], keep: Collection[torch.Tensor] = ()
    ) -> AbstractContextManager[Any]:
        """Return a context that splits `buffers` in place along sequences and, except for `keep`, restores them.

        Args:
            buffers: Tensors that contain whole sequences.
            seq_dims: The sequence dimension of each tensor in `buffers`.
            keep: Tensors that are not restored to whole sequences on exit.
        """
        raise NotImplementedError


class JoinsUnevenInputs:
    """Mixin for strategies that let processes train on different numbers of batches, in a `join` context."""

    def join(self, models: Sequence[nn.Module]) -> AbstractContextManager[Any]:
        """Return a context in which a process without further batches does not block the other processes.

        Args:
            models: The models that `prepare` returned.
        """
        raise NotImplementedError


class PlacesBatches:
    """Mixin for strategies that move batches to devices in their own way, through `batch_placement`.

    Attributes:
        batch_placement: The object that transfers batches.
    """

    batch_placement: BatchPlacement


class BatchPlacement:
    """Base class for a strategy's own way to move batches to its devices, such as TPUs.

    Attributes:
        fills_evaluation: True if short evaluation batches are padded even if the metrics then include the padding.
    """

    fills_evaluation: bool = False

    def around(self, place: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return the function to use instead of `place` to move batches to the strategy's devices.

        Args:
            place: The function that moves a batch by default. The returned function may call it.
        """
        raise NotImplementedError

    def finish(self) -> None:
        # Called after an epoch's last batch.
        raise NotImplementedError


_OF_FEW: dict[str, type] = {
    "split_sequences": SplitsSequences,
    "join": JoinsUnevenInputs,
    "batch_placement": PlacesBatches,
}


class Strategy(ABC):
    """Base class of strategies, which distribute models and reduce gradients.

    The base class runs one model on one device, without communication between processes. A subclass overrides the steps
    that differ, such as `prepare`, `view` or `optimizer_step`. Register it under a name with `register_strategy`.

    Attributes:
        name: The name that users pass as `strategy=`.
        schedules_microbatches: True if the strategy needs all micro-batches of an optimizer step at once, as pipeline
            parallelism does.
        needs_even_batches: True if each forward pass is collective, so that all processes need the same number of
            batches.
        repeats_steps: True if a training step that ran out of memory can be run again. Gradients must be plain tensors,
            and backward passes within `view(model, "manual")` must not communicate.
        topology: The position of this process in the run.
        gradients: Reduction, scaling and clipping of gradients.
        state: Saving and loading of model and optimizer state.
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
        of_few = {name: f"it in a class that also inherits from {kind.__name__}" for name, kind in _OF_FEW.items()}
        others = {name: new for name, new in of_few.items() if not issubclass(cls, _OF_FEW[name])}
        _refuse_old_names(cls, {**_OLD_STRATEGY, **others})
        if "__init__" in vars(cls) and cls.__module__.startswith("drivetrain."):  # a user's class is not changed
            cls.__init__ = known_keywords(cls.__init__)  # type: ignore[method-assign]

    def setup(self, state: PartialState) -> None:
        """Initialize this strategy at the start of a run, before a model is prepared.

        Set `topology`, `gradients` and `state` for this process. Pass a function to `state.before_leaving` to release
        objects that hold the process group alive.

        Args:
            state: The rank, the device and the process group.

        Raises:
            ConfigurationError: The strategy cannot run in this environment.
        """
        self.topology = Topology.data_parallel(state)
        self.gradients = Gradients()
        self.state = ModelState(self)

    def check(self, options: RunOptions) -> None:
        """Check the run's settings, and raise an error if this strategy does not support one of them.

        Called after `setup` and before a model is prepared.

        Args:
            options: The settings of the run.

        Raises:
            ConfigurationError: Two settings conflict. The message names a combination that works.
        """

    # Model

    def init_context(self) -> AbstractContextManager[Any]:
        """Return the context in which models are created, so that a strategy can create sharded parameters."""
        return nullcontext()

    def prepare(
        self, model: nn.Module, optimizers: Sequence[Optimizer] | None, precision: Precision, move: bool = True
    ) -> tuple[nn.Module, list[Optimizer]]:
        """Move, convert and wrap or shard a model, and return it with optimizers for its parameters.

        Args:
            model: The user's model.
            optimizers: The optimizers over the model's parameters, or None for a model that is only evaluated.
            precision: The numeric precision.
            move: Move the model to the device. False if the user places it.

        Returns:
            The module to call, and the optimizers to step.
        """
        # Recorded before the move: optimizers must not hold parameters that moving or converting has replaced.
        before = dict(self.unwrap(model).named_parameters())
        converted = precision.convert(model)
        placed = move_model(converted, self.topology.device) if move and not leaves_empty() else converted
        keep_optimizers(before, placed, optimizers or ())
        return placed, list(optimizers or ())

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the user's module from a prepared model, without wrappers.

        Args:
            model: The model that `prepare` returned.
        """
        while True:
            if isinstance(model, StepModule):
                model = model.task
            # `torch.compile` keeps the original module under this name.
            elif hasattr(model, "_orig_mod"):
                model = model._orig_mod  # type: ignore[assignment]
            else:
                return model

    def view(self, model: nn.Module, stage: View) -> nn.Module:
        """Return the module to call in the given stage, such as the DDP wrapper in training.

        Called on all processes when the stage begins.

        Args:
            model: The model that `prepare` returned.
            stage: `"train"`, `"manual"` if the task runs backward within its training step, or `"evaluate"`, which
                needs no gradient reduction.
        """
        return model

    # one optimizer step

    def forward_backward(
        self, model: nn.Module, step_fn: Callable[[MicroBatch], Output], microbatches: Sequence[MicroBatch]
    ) -> list[Output]:
        """Run `step_fn`, which computes loss and gradients, on each micro-batch, and return its results.

        Gradients are reduced across processes in the last micro-batch only.

        Args:
            model: The model that `prepare` returned.
            step_fn: Function that runs forward and backward on one micro-batch.
            microbatches: All micro-batches of the optimizer step.

        Returns:
            The results of `step_fn`, one for each micro-batch.
        """
        if len(microbatches) == 1:
            return [step_fn(microbatches[0])]
        # Gradients add up locally, so that one reduction in the last micro-batch is enough.
        with self.gradients.no_sync(model):
            outputs = [step_fn(microbatch) for microbatch in microbatches[:-1]]
        outputs.append(step_fn(microbatches[-1]))
        return outputs

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Compute the gradients of a loss.

        Override it if the strategy does not use `loss.backward()`.

        Args:
            loss: The loss, already multiplied by the loss scale.
            **kwargs: Arguments of `Tensor.backward`. `inputs` limits the backward pass to these parameters.
        """
        loss.backward(**kwargs)  # type: ignore[no-untyped-call]

    def optimizer_step(
        self, optimizer: Optimizer, precision: Precision, closure: Callable[[], Any] | None = None
    ) -> bool:
        """Step an optimizer through `precision`, which skips the step if gradients have overflowed.

        Args:
            optimizer: The optimizer.
            precision: The numeric precision, which may skip the step.
            closure: Function that recomputes the loss, for optimizers such as L-BFGS.

        Returns:
            False if the step was skipped because gradients overflowed, else True.
        """
        return precision.step(optimizer, closure)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


# Optimizer wrapper


class OptimizerProxy(Optimizer):
    """Base class of optimizer wrappers, whose parameter groups and state are those of the wrapped optimizer.

    A subclass must not call `Optimizer.__init__`, which would create separate parameter groups.
    """

    optimizer: Optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.optimizer.defaults = defaults

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r})"


def needs_closure(optimizer: Optimizer) -> bool:
    """Return True if an optimizer must be given a closure in each step, as L-BFGS must."""
    parameter = inspect.signature(type(optimizer).step).parameters.get("closure")
    return parameter is not None and parameter.default is inspect.Parameter.empty


# Special kinds of strategies


class Configured(Strategy):
    """Base class for strategies that can hold several configurations and use one for each prepared model.

    `select_configuration` selects the one for the models that are prepared next.
    """

    def add_configuration(self, name: str, other: Strategy) -> None:
        """Add a set of options under a name, by which `select_configuration` can select it.

        Args:
            name: The name for `select_configuration`.
            other: A strategy of the same class that holds the configuration and was not set up.

        Raises:
            ConfigurationError: The two configurations cannot be used in one run.
        """
        raise NotImplementedError

    def select_configuration(self, name: str) -> None:
        """Select the configuration for the next models that are prepared, by its name in `add_configuration`."""
        raise NotImplementedError

    def choose_precision(self, given: str | Precision | None) -> str | Precision | None:
        """Return the precision to train with, from the selected configuration or from the argument `given`.

        Args:
            given: A precision or its name, or None.
        """
        raise NotImplementedError

    def accelerate_name(self, precision: Precision) -> str:
        # The precision's name as a `mixed_precision` argument, such as "bf16".
        raise NotImplementedError


class StartsProcesses:
    """Mixin for strategies that run each Trainer call in new processes.

    Notebooks need this.

    Attributes:
        within: Factory of the strategy that the started processes use.
        start_method: `"spawn"` or `"fork"`.
        num_processes: Number of processes to start, 0 until a Trainer sets it.
        kind: Name of the device type that the processes use.
        first_call: A function and its arguments, called in each process before the task is unpickled, or None.
    """

    within: Callable[[], Strategy]
    start_method: str
    num_processes: int
    kind: str
    first_call: tuple[Callable[..., Any], tuple[Any, ...]] | None = None


class ReducingWrapper(nn.Module):
    """Base class for model wrappers that average gradients during backward, like DDP."""

    def prepare_backward(self, loss: torch.Tensor) -> None:
        """Enable gradient averaging for the backward pass of a loss that was not computed by this wrapper."""
        raise NotImplementedError

    def zero_loss(self) -> torch.Tensor:
        """Return a zero loss, whose backward lets a process that skips its batch join the averaging of gradients."""
        raise NotImplementedError

    def require_reduced(self) -> None:
        """Raise an error if some gradients were not averaged in the last backward pass.

        No communication takes place, so it is safe before a collective call that the other processes cannot reach.
        """
        raise NotImplementedError


def evaluation_context(strategy: Strategy, inference_mode: bool) -> AbstractContextManager[Any]:
    """Return the `torch.inference_mode()` or `no_grad()` context for an evaluation.

    Strategies that assemble the model from parts need `no_grad`. Inference tensors cannot be gathered or passed
    between pipeline stages.
    """
    return torch.inference_mode() if inference_mode and strategy.state.held_as != "parts" else torch.no_grad()


def joined(strategy: Strategy, models: Sequence[nn.Module]) -> AbstractContextManager[Any] | None:
    """Return a context in which a process that runs out of batches does not block the other processes.

    Returns None if the strategy does not support this. Raises a `ConfigurationError` if every forward pass of the
    strategy is collective.
    """
    if isinstance(strategy, JoinsUnevenInputs):
        return strategy.join(models)
    if strategy.needs_even_batches and strategy.topology.environment.is_distributed:
        raise ConfigurationError(
            f"join_uneven_inputs is not supported with {strategy!r}: each forward pass communicates with all "
            "processes, so all need the same number of batches. Keep even_batches=True, the default.",
        )
    return None


def zero_loss(strategy: Strategy, task: nn.Module, model: nn.Module | None) -> torch.Tensor:
    # Its backward pass joins the reduction of gradients with processes that do not skip their batch.
    if strategy.needs_even_batches:
        raise ConfigurationError(
            f"{type(task).__name__}.training_step returned None on rank {strategy.topology.rank}. With {strategy!r}, "
            "every process must run the same number of forward and backward passes. Return a loss of zero instead, "
            "such as loss * 0, or remove the sample from the dataset.",
        )
    return model.zero_loss() if isinstance(model, ReducingWrapper) else zero_loss_of(task.parameters())
