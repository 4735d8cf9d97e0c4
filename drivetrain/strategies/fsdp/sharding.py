"""Functions that shard modules with torch's `fully_shard`, and work with their shards."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast
from weakref import ReferenceType, WeakSet, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard
from torch.optim import SGD, Adagrad, Optimizer
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from drivetrain.runtime.devices import get_device_kind
from drivetrain.runtime.errors import ConfigurationError, some_of
from drivetrain.runtime.state import PartialState
from drivetrain.strategies.base import lay_out_state, move_in_place, needs_closure, replaces_parameters

# Recomputation and compilation of each block of a model


class BlockForward:
    # Replaces `forward` instead of wrapping the module, so that names in the state dict stay the same.

    def __init__(
        self, block: nn.Module, recompute: bool, offload: bool, compile_options: dict[str, Any] | None
    ) -> None:
        self.recompute, self.offload, self.compile_options = recompute, offload, compile_options
        forward: Callable[..., Any] = block.forward
        if compile_options is not None:
            forward = torch.compile(forward, **compile_options)
        self._forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (self.recompute and torch.is_grad_enabled()):
            return self._forward(*args, **kwargs)
        if not self.offload:
            return checkpoint(self._forward, *args, use_reentrant=False, **kwargs)
        # Moves only the block's inputs, since all other activations are recomputed.
        with save_on_cpu(pin_memory=torch.cuda.is_available()):
            return checkpoint(self._forward, *args, use_reentrant=False, **kwargs)

    def again_for(self, block: nn.Module) -> None:
        block.__dict__["forward"] = BlockForward(block, self.recompute, self.offload, self.compile_options)


def rewrite_blocks(
    recomputed: Iterable[nn.Module], offload: bool, compiled: Iterable[nn.Module], compile_options: dict[str, Any]
) -> None:
    again = {id(block): block for block in recomputed}
    fast = {id(block): block for block in compiled}
    for key, block in {**again, **fast}.items():
        if not isinstance(block.__dict__.get("forward"), BlockForward):
            options = compile_options if key in fast else None
            block.__dict__["forward"] = BlockForward(block, key in again, offload, options)


class NormInFull:
    # Torch's CPU kernels, and batch normalization on any device, reject half-precision parameters with float32 inputs
    # or statistics (torch 2.13). Under autocast, inputs may have either dtype.

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        parameters: dict[str, Any] = self._module._parameters
        before = dict(parameters)
        parameters.update({name: None if held is None else held.float() for name, held in before.items()})
        try:
            return type(self._module).forward(self._module, *args, **kwargs)
        finally:
            parameters.update(before)


def normalise_in_full(model: nn.Module, everywhere: bool) -> None:
    # All normalization layers compute in float32, or, unless `everywhere` is set, only batch normalization.
    batch = nn.modules.batchnorm._BatchNorm
    kinds = (batch, nn.LayerNorm, nn.GroupNorm, nn.modules.instancenorm._InstanceNorm) if everywhere else (batch,)
    for module in model.modules():
        if isinstance(module, kinds) and "forward" not in module.__dict__:
            module.__dict__["forward"] = NormInFull(module)


# Replacement of parameters by their shards, in modules and optimizers


class Slot(NamedTuple):
    # Where a module held a parameter before sharding replaced it.

    module: nn.Module
    name: str
    parameter: nn.Parameter


def refuse_for_shards(optimizer: Optimizer) -> None:
    if not any(isinstance(each, DTensor) for group in optimizer.param_groups for each in group["params"]):
        return
    name = type(optimizer).__name__
    if needs_closure(optimizer):
        raise ConfigurationError(
            f"{name} does not support sharded parameters, because it combines all parameters into one vector. Use "
            'another optimizer, or strategy="ddp".',
        )
    if type(optimizer) in (SGD, Adagrad) and any(group.get("fused") for group in optimizer.param_groups):
        raise ConfigurationError(
            f"{name}(fused=True) does not support sharded parameters in torch. Remove fused=True, or use foreach=True.",
        )


def gather(value: Tensor) -> Tensor:
    """Return the full tensor of a DTensor, or a plain tensor unchanged.

    All processes must call this. Mesh dimensions are gathered one by one, last first. Torch's own gather warns if
    several mesh dimensions shard the same tensor dimension.
    """
    if not isinstance(value, DTensor):
        return value
    # A strided shard was split after another mesh dimension, so it must be gathered first.
    placements: list[Placement] = list(value.placements)
    late = [i for i, placement in enumerate(placements) if isinstance(placement, _StridedShard)]
    for i in [*late, *(i for i in reversed(range(len(placements))) if i not in late)]:
        if not placements[i].is_replicate():
            placements[i] = Replicate()
            value = value.redistribute(placements=placements)
    return value.to_local()


def slots_of(model: nn.Module) -> list[Slot]:
    # A tied parameter is listed once per attribute.
    return [
        Slot(module, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]


def replaced(slots: Iterable[Slot]) -> dict[int, nn.Parameter]:
    # From the `id` of each old parameter to the one that sharding put in its place.
    now: dict[int, nn.Parameter] = {}
    for slot in slots:
        current = slot.module._parameters[slot.name]
        if current is not None and current is not slot.parameter:
            now.setdefault(id(slot.parameter), current)
    return now


def point_optimizer(optimizer: Optimizer, now: dict[int, nn.Parameter]) -> None:
    # `now` maps the `id` of a replaced parameter to its shard. The optimizer and its groups stay the same objects,
    # because learning rate schedulers hold them.
    for group in optimizer.param_groups:
        group["params"] = [now.get(id(parameter), parameter) for parameter in group["params"]]
    for parameter in [known for known in optimizer.state if id(known) in now]:
        new = now[id(parameter)]
        state = optimizer.state.pop(parameter)
        optimizer.state[new] = {
            key: shard_like(value, new)
            if isinstance(value, Tensor) and isinstance(new, DTensor) and value.shape == new.shape
            else value
            for key, value in state.items()
        }


def local_slices(like: DTensor) -> tuple[slice, ...]:
    # The slices cut this process's shard out of the full tensor.
    shape, offset = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    return tuple(slice(start, start + length) for start, length in zip(offset, shape, strict=True))


def shard_like(whole: Tensor, like: DTensor, copy: bool = True) -> DTensor:
    if isinstance(whole, DTensor):
        return whole
    part = whole[local_slices(like)]
    if copy:
        local = like.to_local()
        # A slice of the full tensor would keep all of its memory alive.
        part = torch.empty_like(local, dtype=whole.dtype).copy_(part)
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


class ReplacedParameters:
    # Parameters are held by reference, because Python may reuse the `id` of a freed one.

    def __init__(self) -> None:
        self._gone: dict[int, ReferenceType[nn.Parameter]] = {}
        self._checked: WeakSet[Optimizer] = WeakSet()

    def follow(self, slots: Sequence[Slot], optimizers: Iterable[Optimizer]) -> None:
        now = replaced(slots)
        self._gone |= {id(slot.parameter): ref(slot.parameter) for slot in slots if id(slot.parameter) in now}
        for optimizer in optimizers:
            point_optimizer(optimizer, now)
            lay_out_state(optimizer)

    def check(self, optimizer: Optimizer) -> None:
        if optimizer in self._checked:
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                known = self._gone.get(id(parameter))
                if known is not None and known() is parameter:
                    raise ConfigurationError(
                        f"{type(optimizer).__name__} holds the parameters from before the model was sharded, so its "
                        "steps would have no effect. Prepare both together with prepare(model, optimizer), or create "
                        "the optimizer after prepare(model).",
                    )
        self._checked.add(optimizer)


UNIT_SHARDING = "_unit_sharding"
_UNITS = "_sharded_units"


@dataclass(frozen=True)
class UnitSharding:
    """The `fully_shard` arguments of a module, stored with the module in order to shard copies of the module.

    Attributes:
        mesh: Device mesh with the dimensions (shard,) or (replicate, shard).
        mixed_precision: Dtypes for gathering and reduction.
        offload: Where shards are kept between uses.
        reshard_after_forward: True if the unit is freed between forward and backward.
        outermost: True if no other unit calls this one.
        whole: Parameters in the unit that are not sharded.
        reduce_unused: True if parameters that backward did not reach are reduced as zeros.
    """

    mesh: DeviceMesh
    mixed_precision: MixedPrecisionPolicy
    offload: OffloadPolicy
    reshard_after_forward: bool | int | None = None
    outermost: bool = False
    whole: frozenset[nn.Parameter] = field(default_factory=frozenset)
    reduce_unused: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> UnitSharding:
        return self

    def for_outermost(self, whole: frozenset[nn.Parameter] | None = None, frees: bool = False) -> UnitSharding:
        # `whole` replaces the set of unsharded parameters. `frees` frees the unit after forward, unless the user chose
        # otherwise.
        resharding = True if frees and self.reshard_after_forward is None else self.reshard_after_forward
        whole = self.whole if whole is None else whole
        return replace(self, outermost=True, reshard_after_forward=resharding, whole=whole)


def shard_unit(unit: nn.Module, unit_sharding: UnitSharding) -> None:
    # `fully_shard` leaves out submodules that are sharded already.
    mesh = unit_sharding.mesh
    kind = get_device_kind(mesh.device_type)
    if kind.name != "cpu" and replaces_parameters(torch.device(kind.name)):
        # `fully_shard` assigns `tensor.data`, which is an error on such a device (torch 2.13).
        device = PartialState().device
        move_in_place(unit, device, moves=lambda tensor: not (tensor.is_meta or isinstance(tensor, DTensor)))
    fully_shard(
        unit,
        mesh=mesh,
        reshard_after_forward=unit_sharding.reshard_after_forward,
        mp_policy=unit_sharding.mixed_precision,
        offload_policy=unit_sharding.offload,
        ignored_params=set(unit_sharding.whole) or None,
    )
    unit.__dict__[UNIT_SHARDING] = unit_sharding
    # `fully_shard` creates a class for this unit, with a `__deepcopy__` that raises.
    type(unit).__deepcopy__ = _copy_unit  # type: ignore[attr-defined]
    if unit_sharding.reduce_unused:
        unit.set_reduce_scatter_unused_params(True)  # type: ignore[operator]
    if unit_sharding.outermost:
        unit.register_forward_pre_hook(_allocate_outside_inference, prepend=True)
        unit.register_forward_hook(_free_after_evaluation)


def sharded_units(model: nn.Module) -> Sequence[FSDPModule]:
    """Return the modules to which `fully_shard` was applied."""
    known: tuple[FSDPModule, ...] | None = model.__dict__.get(_UNITS)
    if known is not None:
        return known
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def remember_units(model: nn.Module) -> None:
    # So that each step need not search for them.
    model.__dict__[_UNITS] = tuple(sharded_units(model))


def is_sharded(model: nn.Module) -> bool:
    """Return True if FSDP has sharded any module of a model."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def reshard_units(model: nn.Module) -> None:
    """Free the full parameters that FSDP has gathered in all modules.

    Torch creates a unit's full parameter once and copies `requires_grad` from the shard at that time (torch 2.13).
    Freeing it makes backward use the current `requires_grad`.
    """
    for module in sharded_units(model):
        module.reshard()
        for one in _records_of(module):
            if one.sharded_param.requires_grad and hasattr(one, "_unsharded_param"):
                one._unsharded_param.requires_grad_(True)


def _allocate_outside_inference(module: nn.Module, args: Any) -> None:
    # Torch keeps the full parameters, and cannot train with tensors created in inference mode (torch 2.13). Otherwise,
    # a validation before the first training step would break the run.
    if not torch.is_inference_mode_enabled():
        return
    with torch.inference_mode(False), torch.no_grad():
        for unit in sharded_units(module):
            if any(not hasattr(one, "_unsharded_param") for one in _records_of(unit)):
                unit.unshard()
                unit.reshard()


def _free_after_evaluation(module: nn.Module, args: Any, output: Any) -> None:
    """Forward hook that frees gathered parameters if no backward pass will follow.

    Code that changes parameters which are still gathered would lose its changes.
    """
    if not (torch.is_grad_enabled() and _takes_gradients(output)):
        module.reshard()  # type: ignore[operator]


def _takes_gradients(output: Any) -> bool:
    if isinstance(output, Tensor):
        return output.requires_grad
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(output))


def _records_of(unit: Any) -> list[Any]:
    state = unit._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        groups = state._fsdp_param_groups
    else:  # torch 2.9 has at most one group in a unit
        groups = [group for group in (state._fsdp_param_group,) if group is not None]
    return [one for group in groups for one in group.fsdp_params]


def set_shard(one: Any, local: Tensor) -> None:
    old = one.sharded_param
    shard = DTensor.from_local(
        local, old.device_mesh, old.placements, run_check=False, shape=old.shape, stride=old.stride()
    )
    one._setattr_on_modules(nn.Parameter(shard, requires_grad=old.requires_grad))
    # FSDP keeps references to the local tensor, which must follow the new one.
    one.reset_sharded_param()


def allocate(model: nn.Module) -> None:
    for unit in sharded_units(model):
        for one in _records_of(unit):
            if one.sharded_param.is_meta:
                local = one.sharded_param.to_local()
                device = "cpu" if one.offload_to_cpu else one.device
                set_shard(one, torch.empty(local.shape, dtype=local.dtype, device=device))


# Gradients that accumulate until the end of an accumulation window


def refuse_mixed_units(model: nn.Module, unwrap: Callable[[nn.Module], nn.Module]) -> None:
    names = {id(parameter): name for name, parameter in unwrap(model).named_parameters()}
    for unit in sharded_units(model):
        by_dtype: dict[torch.dtype, list[str]] = {}
        for one in _records_of(unit):
            if one.sharded_param.requires_grad:
                by_dtype.setdefault(one.sharded_param.dtype, []).append(names.get(id(one.sharded_param), "?"))
        refuse_several_dtypes(type(unwrap(cast("nn.Module", unit))).__name__.removeprefix("FSDP"), by_dtype)


def refuse_several_dtypes(unit: str, by_dtype: Mapping[torch.dtype, Sequence[str]]) -> None:
    if len(by_dtype) > 1:
        listed = "; ".join(f"{dtype}: {some_of(names)}" for dtype, names in by_dtype.items())
        raise ConfigurationError(
            f"FSDP gathers and reduces the parameters of {unit} together, but its trainable parameters have several "
            f"dtypes ({listed}). Convert them to one dtype, freeze the parameters of one dtype, or shard the modules "
            "that hold them separately with FSDP(wrap=...).",
        )


def gathered_parameters(models: Iterable[nn.Module], shards: Iterable[Tensor]) -> list[Tensor]:
    # `backward(inputs=...)` needs gathered parameters in place of their shards.
    gathered = {
        id(one.sharded_param): one._unsharded_param
        for model in models
        for unit in sharded_units(model)
        for one in _records_of(unit)
        if hasattr(one, "_unsharded_param")
    }
    return [gathered.get(id(shard), shard) for shard in shards]


def held_gradients(model: nn.Module) -> Iterator[Tensor]:
    """Yield the full gradients that FSDP has accumulated but not reduced yet."""
    for unit in sharded_units(model):
        for one in _records_of(unit):
            if one.unsharded_accumulated_grad is not None:
                # FSDP accumulates here if it reduces gradients in another dtype.
                yield one.unsharded_accumulated_grad
            unsharded = getattr(one, "_unsharded_param", None)
            if unsharded is not None and unsharded.grad is not None:
                yield unsharded.grad


def discard_held_gradients(model: nn.Module) -> None:
    """Drop the full gradients that FSDP has accumulated but not reduced yet."""
    for unit in sharded_units(model):
        for one in _records_of(unit):
            one.unsharded_accumulated_grad = None
            if getattr(one, "_unsharded_param", None) is not None:
                one._unsharded_param.grad = None


# Loading of full tensors


def take_shards_on_load(model: nn.Module) -> None:
    for module in model.modules():
        if any(isinstance(parameter, DTensor) for parameter in module._parameters.values()):
            module.register_load_state_dict_pre_hook(_take_shards)  # type: ignore[no-untyped-call]


def _take_shards(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    parameters: dict[str, Any] = dict(module._parameters)
    for name, parameter in parameters.items():
        given = state.get(prefix + name)
        if isinstance(parameter, DTensor) and isinstance(given, Tensor) and given.shape == parameter.shape:
            # A view is enough, since `load_state_dict` copies the values.
            state[prefix + name] = shard_like(given, parameter, copy=False)


# Copies of sharded modules


def _copy_unit(unit: nn.Module, memo: dict[int, Any]) -> nn.Module:
    own_class = type(unit).__mro__[type(unit)._orig_cls_mro_index]  # type: ignore[attr-defined]
    return copy_sharded(unit, unit, own_class, memo)


def copy_sharded(module: nn.Module, unit: nn.Module, own_class: type[nn.Module], memo: dict[int, Any]) -> nn.Module:
    # The copy gets shards of its own, with equal values.
    reshard_units(unit)
    unit_sharding: UnitSharding = unit.__dict__[UNIT_SHARDING]
    before = _records_of(unit)
    for one in before:
        # In the memo of `deepcopy`, so that the copy gets parameters without memory, to be sharded below.
        whole = torch.empty(one.sharded_param.shape, dtype=one.sharded_param.dtype, device="meta")
        memo[id(one.sharded_param)] = nn.Parameter(whole, requires_grad=one.sharded_param.requires_grad)
    twin = _copy_unsharded(module, own_class, memo)
    forward = module.__dict__.get("forward")
    if isinstance(forward, BlockForward):
        forward.again_for(twin)
    whole_ones = frozenset(memo[id(p)] for p in unit_sharding.whole if id(p) in memo)
    shard_unit(twin, unit_sharding.for_outermost(whole_ones))
    for one, new in zip(before, _records_of(twin), strict=True):
        set_shard(new, one.sharded_param.detach().to_local().clone())
        memo[id(one.sharded_param)] = new.sharded_param
    return twin


def _copy_unsharded(module: nn.Module, own_class: type[nn.Module], memo: dict[int, Any]) -> nn.Module:
    twin: nn.Module = own_class.__new__(own_class)
    memo[id(module)] = twin
    twin.__dict__.update(copy.deepcopy(_own_state(module), memo))
    return twin


class ShardedInside:
    # Replaces `__deepcopy__` of a module that FSDP has sharded inside of a wrapper.

    def __init__(self, module: nn.Module, outer: nn.Module) -> None:
        self.module, self.outer = module, outer

    def __call__(self, memo: dict[int, Any]) -> nn.Module:
        if id(self.outer) in memo:  # the copy of the outer module will shard this one, too
            return _copy_unsharded(self.module, type(self.module), memo)
        return copy_sharded(self.module, self.outer, type(self.module), memo)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a pickled module is not sharded


def _own_state(module: nn.Module) -> dict[str, Any]:
    # What sharding has added belongs to the original module. Sharding the copy adds it again.
    found: Any = module.__getstate__() if hasattr(type(module), "__getstate__") else None  # type: ignore[no-untyped-call]
    state: dict[str, Any] = dict(found if isinstance(found, dict) else module.__dict__)
    for key in (STATE_KEY, REGISTRY_KEY, UNIT_SHARDING, _UNITS, "__deepcopy__"):
        state.pop(key, None)
    if isinstance(state.get("forward"), BlockForward):
        del state["forward"]
    for key in ("_forward_pre_hooks", "_forward_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks"):
        state[key] = type(state[key])((i, hook) for i, hook in state[key].items() if not _is_torchs(hook))
    state["_load_state_dict_post_hooks"] = type(state["_load_state_dict_post_hooks"])()
    return state


def _is_torchs(hook: Any) -> bool:
    # A hook that `fully_shard` or `shard_unit` has registered, not the user.
    function = getattr(hook, "hook", hook)  # torch wraps some hooks in an object
    function = getattr(function, "__func__", function)
    return getattr(function, "__module__", "").startswith("torch.distributed.fsdp") or function in (
        _allocate_outside_inference,
        _free_after_evaluation,
    )


def prefetch(units: Sequence[FSDPModule], forward: int, backward: int) -> None:
    # With 0, FSDP's default is kept.
    for index, unit in enumerate(units):
        if forward:
            unit.set_modules_to_forward_prefetch(list(units[index + 1 : index + 1 + forward]))
        if backward:
            # Backward runs through the units in reverse order.
            unit.set_modules_to_backward_prefetch(list(reversed(units[max(0, index - backward) : index])))


# Full parameters in a context


@contextmanager
def whole_parameters(model: nn.Module, writeback: bool) -> Iterator[None]:
    """Context manager in which a sharded model has full parameters. All processes must enter it.

    With `writeback`, changes are copied to the shards on exit. The model cannot run a forward pass within the context.
    """
    slots = [slot for slot in slots_of(model) if isinstance(slot.parameter, DTensor)]
    whole: dict[int, nn.Parameter] = {}
    for module, name, shard in slots:
        if id(shard) not in whole:
            gathered = gather(shard.detach())
            whole[id(shard)] = nn.Parameter(gathered, requires_grad=shard.requires_grad)
        module._parameters[name] = whole[id(shard)]
    try:
        yield
        if writeback:
            with torch.no_grad():
                for shard in {id(slot.parameter): slot.parameter for slot in slots}.values():
                    assert isinstance(shard, DTensor)
                    shard.to_local().copy_(whole[id(shard)][local_slices(shard)])
    finally:
        for module, name, shard in slots:
            module._parameters[name] = shard
