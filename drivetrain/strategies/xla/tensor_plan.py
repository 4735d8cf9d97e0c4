"""Tensor parallelism on a mesh of XLA devices: a plan of module names as sharded dimensions of parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from drivetrain.runtime.errors import ConfigurationError
from drivetrain.strategies.xla.mesh import TENSOR, Spec

Plan = Mapping[str, Any]


def plan_specs(model: nn.Module, plan: Plan | str | None, devices: int) -> dict[str, Spec]:
    """How the parameters that a plan names are sharded.

    XLA splits what is computed with them, and adds up what must be.

    Args:
        model: The model, or the task that holds it.
        plan: Styles by pattern of module names, `"auto"` for the plan that the model carries, or None.
        devices: Over how many the layers are split.

    Returns:
        For each of those parameters, by its name in `model`, the axis of each dimension.

    Raises:
        ConfigurationError: A pattern matches nothing, a size is no multiple of the devices, or a style cannot be had
            here.
    """
    if devices == 1 or plan is None:
        return {}
    from drivetrain.strategies.parallel.tensor import Colwise, Rowwise, plan_matches, plan_of_model

    if isinstance(plan, str):
        plan = plan_of_model(model)
    dimensions = {
        (Colwise, nn.Linear): 0,
        (Rowwise, nn.Linear): 1,
        (Colwise, nn.Embedding): 1,
        (Rowwise, nn.Embedding): 0,
    }
    specs: dict[str, Spec] = {}
    for match in plan_matches(model, plan, devices):
        kinds = [pair for pair in dimensions if type(match.style) is pair[0] and isinstance(match.module, pair[1])]
        if not kinds:
            raise ConfigurationError(
                f"tp_plan gives {match.name!r}, a {type(match.module).__name__}, the style "
                f"{type(match.style).__name__}. On XLA devices nn.Linear and nn.Embedding take Colwise() or Rowwise(); "
                "XLA finds out by itself how the rest is computed, so leave it out.",
                code="DT-057",
            )
        dimension = dimensions[kinds[0]]
        specs[f"{match.name}.weight"] = (TENSOR, None) if dimension == 0 else (None, TENSOR)
        if getattr(match.module, "bias", None) is not None and dimension == 0:
            specs[f"{match.name}.bias"] = (TENSOR,)
    return specs
