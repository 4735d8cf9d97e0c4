"""Construction of models on the meta device, and initialization of their shards."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from drivetrain.checkpoint import Checkpoint
from drivetrain.checkpoint.export import files_of_index
from drivetrain.checkpoint.manifest import find_places, in_schema
from drivetrain.runtime.errors import CheckpointError, ConfigurationError
from drivetrain.strategies.fsdp.sharding import local_slices, slots_of


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Return a context in which new modules have parameters on the meta device.

    Their buffers are real. Buffers are small, and tables computed in a constructor could not be recomputed.
    """
    # Assigning a parameter to an attribute of a module calls this method, too.
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None and not parameter.is_meta:
            module._parameters[name] = on_meta(parameter)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def on_meta(parameter: nn.Parameter) -> nn.Parameter:
    """Return a parameter of the same shape on the meta device, where it uses no memory."""
    return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)


def take_values(model: nn.Module, whole: Collection[nn.Parameter]) -> dict[tuple[int, str], Tensor]:
    # The keys are pairs of a module's `id` and a parameter name. An unsharded parameter without values gets memory on
    # the CPU.
    twins: dict[int, nn.Parameter] = {}
    values: dict[tuple[int, str], Tensor] = {}
    for module, name, parameter in slots_of(model):
        if id(parameter) not in twins:
            twins[id(parameter)] = _twin(parameter, sharded=parameter not in whole)
        if not parameter.is_meta:
            values[id(module), name] = parameter.detach()
        module._parameters[name] = twins[id(parameter)]
    return values


def _twin(parameter: nn.Parameter, sharded: bool) -> nn.Parameter:
    # A parameter to be sharded needs no memory yet. An unsharded one needs memory for its values.
    if parameter.is_meta == sharded:
        return parameter
    if sharded:
        return on_meta(parameter)
    return nn.Parameter(torch.empty_like(parameter, device="cpu"), requires_grad=parameter.requires_grad)


class Materialiser:
    """Object that copies rank 0's values of parameters and buffers into a sharded model on all processes."""

    def __init__(self, device: torch.device, rank: int, peers: bool) -> None:
        self._device, self._peers = device, peers
        self._is_source = rank == 0

    def fill(self, parameter: Tensor, value: Tensor | None) -> None:
        # All processes must call this: rank 0 sends the full value, and each process stores its shard.
        if self._is_source:
            assert value is not None
            whole = value.detach().to(self._device, parameter.dtype).contiguous()
        else:
            whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=self._device)
        if self._peers:
            dist.broadcast(whole, src=0)
        with torch.no_grad():
            if isinstance(parameter, DTensor):
                parameter.to_local().copy_(whole[local_slices(parameter)])
            else:
                parameter.copy_(whole)

    def fill_all(self, model: nn.Module, values: Mapping[tuple[int, str], Tensor]) -> None:
        done: set[int] = set()
        for module, name, parameter in slots_of(model):
            if id(parameter) not in done:
                done.add(id(parameter))
                self.fill(parameter, values.get((id(module), name)))

    def fill_buffers(self, model: nn.Module) -> None:
        # A collective call. All processes get the buffers of rank 0.
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is None:
                    continue
                if buffer.is_meta:
                    raise ConfigurationError(
                        f"The buffer {name!r} of a {type(module).__name__} is on the meta device, so it has no "
                        "values. Build the model under the strategy's init_context(), which creates real buffers, "
                        "instead of torch.device('meta').",
                    )
                if self._peers:
                    sent = buffer.detach().to(self._device).contiguous()
                    dist.broadcast(sent, src=0)
                    buffer.copy_(sent)

    def initialise(self, model: nn.Module, random_state: Tensor | None) -> None:
        """Initialize a sharded model: rank 0 draws each module's values, and each process keeps its shards.

        Done module by module, to save memory.
        """
        check_initialisable(model)
        # The values are drawn with the random state in which the model was built.
        after = torch.get_rng_state()
        if random_state is not None:
            torch.set_rng_state(random_state)
        done: set[int] = set()
        try:
            for module in model.modules():
                own = {name: p for name, p in module._parameters.items() if p is not None and id(p) not in done}
                if not own:
                    continue
                values = _initial_values(module, model) if self._is_source else {}
                for name, parameter in own.items():
                    self.fill(parameter, values.get(name))
                    done.add(id(parameter))
        finally:
            if random_state is not None:
                torch.set_rng_state(after)


def check_initialisable(model: nn.Module) -> None:
    """Raise an error if a module has no method to initialize its parameters."""
    unknown = sorted(
        {
            type(module).__name__
            for module in model.modules()
            if any(p is not None for p in module._parameters.values()) and _initialiser_of(module, model) is None
        }
    )
    if unknown:
        raise ConfigurationError(
            f"The model was built without parameter values, and {', '.join(unknown)} cannot initialize them. Add a "
            "reset_parameters() method to these classes that fills their own parameters, load the weights with "
            "FSDP(weights='path'), or build the model with values on rank 0 with FSDP(init='rank0').",
        )


def _initialiser_of(module: nn.Module, model: nn.Module) -> Callable[[], Any] | None:
    for name in ("reset_parameters", "_reset_parameters"):
        method = getattr(module, name, None)
        if callable(method):
            found: Callable[[], Any] = method
            return found
    # Hugging Face models initialize all their modules with one method of the model.
    for owner in model.modules():
        method = getattr(owner, "_init_weights", None)
        if callable(method) and any(inner is module for inner in owner.modules()):
            chosen = method
            return lambda: chosen(module)
    return None


def _initial_values(module: nn.Module, model: nn.Module) -> Mapping[str, Tensor]:
    # The module itself stays unchanged.
    initialise = _initialiser_of(module, model)
    assert initialise is not None
    before = dict(module._parameters)
    try:
        for name, parameter in before.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype))
        with torch.no_grad():
            initialise()
        return {name: value.detach() for name, value in module._parameters.items() if value is not None}
    finally:
        module._parameters.update(before)


# Reading of weights from files, where each process reads the slices of its shards


_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


def load_weights(model: nn.Module, path: str | os.PathLike[str], strict: bool = True) -> None:
    """Load weights into a sharded model. Each process reads only its part."""
    place = Path(path)
    wanted = tensors_by_names(model)
    if place.is_dir() and not ((place / _INDEX).exists() or (place / _SINGLE).exists()):
        _from_checkpoint(wanted, place, strict)
        return
    files = _files_of(place)
    pairs, missing = [], []
    for names, tensor in wanted:
        found = next((name for name in names if name in files), None)
        if found is None:
            missing.append(names[0])
        else:
            pairs.append((found, tensor))
    left_over = sorted(set(files) - {name for names, _ in wanted for name in names})
    if strict and (missing or left_over):
        raise CheckpointError(
            f"The weights in {place} do not match the model. Missing: {missing[:8]}. Unexpected: {left_over[:8]}. "
            "Build the model as it was when the weights were saved, or use strict=False."
        )
    by_file: dict[Path, list[tuple[str, Tensor]]] = {}
    for name, tensor in pairs:
        by_file.setdefault(files[name], []).append((name, tensor))
    for file, held in by_file.items():
        _read(file, held)


def tensors_by_names(model: nn.Module) -> list[tuple[list[str], Tensor]]:
    """Return each distinct tensor of a model together with all its names."""
    names: dict[int, tuple[list[str], Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor):
            names.setdefault(id(tensor), ([], tensor))[0].append(name)
    return list(names.values())


def _files_of(place: Path) -> dict[str, Path]:
    from safetensors import safe_open

    if place.is_dir():
        index = place / _INDEX
        if index.exists():
            mapping = files_of_index(index.read_bytes(), os.fspath(index))
            return {name: place / file for name, file in mapping.items()}
        place = place / _SINGLE
    if not place.exists():
        raise CheckpointError(
            f"There are no weights at {place}. Use a safetensors file, a directory with {_SINGLE} or {_INDEX}, or a "
            "checkpoint."
        )
    with safe_open(place, framework="pt") as opened:
        return dict.fromkeys(opened.keys(), place)


@torch.no_grad()
def _read(file: Path, held: Iterable[tuple[str, Tensor]]) -> None:
    from safetensors import safe_open

    with safe_open(file, framework="pt") as opened:
        for name, tensor in held:
            part: Any = opened.get_slice(name)
            if tuple(part.get_shape()) != tuple(tensor.shape):
                raise CheckpointError(
                    f"Shape mismatch for {name!r}: {part.get_shape()} in {file}, but {list(tensor.shape)} in the model."
                )
            if not isinstance(tensor, DTensor):
                tensor.copy_(opened.get_tensor(name))
            elif tensor.to_local().numel():
                tensor.to_local().copy_(part[local_slices(tensor)])


def _from_checkpoint(wanted: list[tuple[list[str], Tensor]], place: Path, strict: bool) -> None:
    checkpoint = Checkpoint(place)
    state = {name: tensor.detach() for names, tensor in wanted for name in names}
    packed = checkpoint.packed()
    models = in_schema(packed)["engine"].get("models")
    if not isinstance(models, list) or len(models) != 1:
        raise CheckpointError(
            f"{place} contains {len(models) if isinstance(models, list) else 'no'} models instead of one. Load it "
            "with load_state, or export one model with Accelerator.save_model."
        )
    places = find_places(packed)
    checkpoint.shared(places.into("models", [state]), strict, only=[places.models])
