"""How many parameters a model has, and what they take, with those that are frozen and stored in fewer bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.parameter import UninitializedParameter

from drivetrain.inference.sizes import parameter_size

if TYPE_CHECKING:
    from drivetrain.strategies.model_state import ModelState


@dataclass(frozen=True)
class ParameterCount:
    """Parameters of a model.

    Attributes:
        elements: Elements of all of them; of a quantised weight, those that it had before.
        trained: Elements of those that are trained.
        nbytes: Bytes that they take as they are stored.
    """

    elements: int
    trained: int
    nbytes: int


def count_parameters(model: nn.Module, state: ModelState | None = None, recurse: bool = True) -> ParameterCount:
    """Count a model's parameters, each once; lazy ones have no elements yet.

    Args:
        model: The model.
        state: What shards it, if anything: all of each parameter counts.
        recurse: Whether those of modules within it count.
    """
    elements = trained = nbytes = 0
    seen: set[int] = set()
    for module in model.modules() if recurse else [model]:
        frozen: Any = getattr(module, "frozen_size", None)
        if frozen is not None:
            elements, nbytes = elements + frozen[0], nbytes + frozen[1]
        for name, parameter in module._parameters.items():
            if parameter is None or id(parameter) in seen or isinstance(parameter, UninitializedParameter):
                continue
            seen.add(id(parameter))
            if frozen is not None and name == "packed":
                continue  # the bytes of the frozen layer
            whole, is_trained = (
                (parameter.numel(), parameter.requires_grad) if state is None else state.describe(parameter)
            )
            own, size = parameter_size(module, name, whole)
            elements, nbytes, trained = elements + own, nbytes + size, trained + own * is_trained
    return ParameterCount(elements, trained, nbytes)
