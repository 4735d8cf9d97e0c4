"""Keeping what tensor-parallel processes hold in copies the same: random numbers and gradients."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from drivetrain.runtime.devices import DeviceKind
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.strategies.gradients import local_part

# Copies are computed alike, so they differ by nothing or by much.
_TOLERANCE = 1e-3


def share_random_state(mesh: DeviceMesh, kind: DeviceKind) -> None:
    """Give all processes of a mesh the random state of its first: dropout of copies must leave out the same.

    Args:
        mesh: The processes, in one dimension.
        kind: The kind of their devices.
    """
    group = mesh.get_group()
    states = [torch.get_rng_state(), None if kind.name == "cpu" else kind.get_rng_state()]
    dist.broadcast_object_list(states, src=dist.get_global_rank(group, 0), group=group)
    assert states[0] is not None
    torch.set_rng_state(states[0])
    if states[1] is not None:
        kind.set_rng_state(states[1])


class CopyCheck:
    """Sees once that parameters which all processes of a mesh hold whole have the same gradients on all of them.

    They drift apart otherwise, without any error.

    Args:
        mesh: The processes, in one dimension.
        model: The model, for the names of its parameters.
    """

    def __init__(self, mesh: DeviceMesh, model: nn.Module) -> None:
        self._mesh = mesh
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}

    def check(self, optimizer: Optimizer) -> None:
        """Compare the gradients of an optimizer's parameters.

        Raises:
            ConfigurationError: Some differ; their names are listed.
        """
        copies = [
            (self._names.get(id(parameter), "?"), parameter.grad)
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None and not self._is_split(parameter)
        ]
        if not copies:
            return
        norms = torch.stack([local_part(gradient).detach().float().norm() for _, gradient in copies])
        every = norms.new_empty(self._mesh.size(), len(copies))
        dist.all_gather(list(every.unbind()), norms, group=self._mesh.get_group())
        gap = (every - every[0]).abs().amax(0) > _TOLERANCE * every.amax(0)
        wrong = [name for (name, _), differs in zip(copies, gap.tolist(), strict=True) if differs]
        if wrong:
            shown = ", ".join(wrong[:6]) + (f" and {len(wrong) - 6} more" if len(wrong) > 6 else "")
            raise ConfigurationError(
                f"The gradients of {shown} differ between the {self._mesh.size()} tensor-parallel processes, which "
                "hold these parameters in copies that must stay the same. A module that sees a part of a sequence "
                "belongs into tp_plan as SequenceParallel(); dropout on whole activations must draw the same numbers "
                "on all of them, so make no generator of your own for it.",
                code="DT-063",
            )

    def _is_split(self, parameter: Tensor) -> bool:
        """Whether processes of the mesh hold different parts of a parameter."""
        if not isinstance(parameter, DTensor):
            return False
        names = parameter.device_mesh.mesh_dim_names or ()
        placements = dict(zip(names, parameter.placements, strict=True))
        return "tp" in placements and not placements["tp"].is_replicate()
