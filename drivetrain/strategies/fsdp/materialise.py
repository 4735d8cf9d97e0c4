"""Building a model without its values, and giving each process the values of its shards."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from drivetrain.runtime.errors import ConfigurationError
from drivetrain.strategies.fsdp.parameters import local_slices, slots_of


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Put the parameters of modules that are built in the context on the meta device; buffers stay real.

    Buffers are small, and tables computed in a constructor could not be computed again.
    """
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
    """The same parameter without its values."""
    return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)


def take_values(model: nn.Module, whole: Collection[nn.Parameter]) -> dict[tuple[int, str], Tensor]:
    """Take the values out of a model; parameters that stay whole get memory for theirs.

    Args:
        model: The model, whose parameters are replaced.
        whole: Those that will not be sharded.

    Returns:
        The values that were there, by the `id` of the module and the parameter's name in it.
    """
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
    """What stands in a parameter's place until it has its values: without memory where it will be sharded."""
    if parameter.is_meta == sharded:
        return parameter
    if sharded:
        return on_meta(parameter)
    return nn.Parameter(torch.empty_like(parameter, device="cpu"), requires_grad=parameter.requires_grad)


class Materialiser:
    """Gives the shards of a model their values, one parameter at a time, from rank 0.

    No process holds more than one whole parameter at a time, beside what rank 0 had already.

    Args:
        device: Where tensors are exchanged.
        rank: Of this process.
        source: The rank that has the values.
        peers: Whether there are other processes.
    """

    def __init__(self, device: torch.device, rank: int, peers: bool, source: int = 0) -> None:
        self._device, self._peers = device, peers
        self._source = source
        self._is_source = rank == source

    def fill(self, parameter: Tensor, value: Tensor | None) -> None:
        """Fill one parameter, whole or this process's shard, with the source's value.

        Args:
            parameter: What to fill; a DTensor, or a plain tensor on all processes.
            value: The whole value on the source; ignored elsewhere.
        """
        if self._is_source:
            assert value is not None
            whole = value.detach().to(self._device, parameter.dtype).contiguous()
        else:
            whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=self._device)
        if self._peers:
            dist.broadcast(whole, src=self._source)
        with torch.no_grad():
            if isinstance(parameter, DTensor):
                parameter.to_local().copy_(whole[local_slices(parameter)])
            else:
                parameter.copy_(whole)

    def fill_all(self, model: nn.Module, values: Mapping[tuple[int, str], Tensor]) -> None:
        """Fill all parameters of a model.

        Args:
            model: The model, whose parameters are allocated.
            values: On the source, what `take_values` returned.
        """
        done: set[int] = set()
        for module, name, parameter in slots_of(model):
            if id(parameter) not in done:
                done.add(id(parameter))
                self.fill(parameter, values.get((id(module), name)))

    def fill_buffers(self, model: nn.Module) -> None:
        """Give all processes the source's buffers."""
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is None:
                    continue
                if buffer.is_meta:
                    raise ConfigurationError(
                        f"The buffer {name!r} of a {type(module).__name__} is on the meta device, so its values are "
                        "not known. Build the model under init_context() of the strategy, which leaves buffers real, "
                        "rather than under torch.device('meta').",
                        code="DT-066",
                    )
                if self._peers:
                    sent = buffer.detach().to(self._device).contiguous()
                    dist.broadcast(sent, src=self._source)
                    buffer.copy_(sent)

    def initialise(self, model: nn.Module, random_state: Tensor | None) -> None:
        """Fill what nothing has a value for by the modules' own initialisation, run on the source, module by module.

        Args:
            model: The model, whose parameters are allocated.
            random_state: Of the CPU's generator when the model was built, so that the values are those of a plain
                build; the present one if None.
        """
        check_initialisable(model)
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
    """Raise where a module with parameters does not define how they are initialised."""
    unknown = sorted(
        {
            type(module).__name__
            for module in model.modules()
            if any(p is not None for p in module._parameters.values()) and _initialiser_of(module, model) is None
        }
    )
    if unknown:
        raise ConfigurationError(
            f"The model was built without values, and {', '.join(unknown)} cannot make them: give these classes a "
            "reset_parameters() that fills their own parameters, give the weights with FSDP(weights='path'), or let "
            "rank 0 build the real model with FSDP(init='rank0').",
            code="DT-066",
        )


def _initialiser_of(module: nn.Module, model: nn.Module) -> Callable[[], Any] | None:
    """What fills a module's own parameters: its own method, or its model's, in the names of torch and transformers."""
    for name in ("reset_parameters", "_reset_parameters"):
        method = getattr(module, name, None)
        if callable(method):
            found: Callable[[], Any] = method
            return found
    for owner in model.modules():
        method = getattr(owner, "_init_weights", None)
        if callable(method) and any(inner is module for inner in owner.modules()):
            chosen = method
            return lambda: chosen(module)
    return None


def _initial_values(module: nn.Module, model: nn.Module) -> Mapping[str, Tensor]:
    """What a module's initialisation fills its own parameters with, on the CPU; the module is left as it was."""
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
