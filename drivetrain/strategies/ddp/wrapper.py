"""Torch's DDP wrapper, with errors that name the parameters which took no part in a loss."""

from __future__ import annotations

import inspect
import re
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn import parallel

from drivetrain.runtime.errors import ConfigurationError
from drivetrain.strategies.step_module import StepModule

# Torch 2.13 warns at the old name.
BROADCAST_BUFFERS = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(parallel.DistributedDataParallel).parameters
    else "broadcast_buffers"
)

_UNFINISHED = "Expected to have finished reduction in the prior iteration"
_INDICES = re.compile(r"did not receive grad for rank \d+:((?: ?\d+)+)")
_MOST_NAMES = 8


class DistributedDataParallel(parallel.DistributedDataParallel):
    """Torch's, which raises errors of ours where a reduction waits for gradients that no backward computes."""

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        try:
            return super()._pre_forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise self._explained(error) from error

    def require_reduced(self) -> None:
        """Raise where the last backward has left out parameters, whose gradients the peers wait for.

        Raises:
            ConfigurationError: Names the rank and the parameters.
        """
        reducer = self.__dict__.get("reducer")
        if reducer is None:  # the strategy has been torn down
            return
        try:
            reducer._check_reducer_finalized()
        except RuntimeError as error:
            raise self._explained(error) from error

    def _explained(self, error: RuntimeError) -> Exception:
        if _UNFINISHED not in str(error):
            return error
        names = self._names_without_gradients(str(error))
        shown = ", ".join(names[:_MOST_NAMES]) + (
            f" and {len(names) - _MOST_NAMES} more" if names[_MOST_NAMES:] else ""
        )
        return ConfigurationError(
            f"On rank {dist.get_rank()} no gradient was computed for {shown or 'some parameters'}: the loss does not "
            'depend on them, and DDP waits for the gradients of all. Use strategy="ddp_find_unused_parameters_true", '
            "or DDP(find_unused_parameters=True), where the parameters that a loss depends on differ between steps or "
            "processes; freeze those that are never trained (requires_grad_(False))."
        )

    def _names_without_gradients(self, message: str) -> list[str]:
        parameters = self._build_params_for_reducer()[0]  # type: ignore[no-untyped-call]
        found = _INDICES.search(message)
        chosen = [parameters[int(index)] for index in found[1].split()] if found else []
        module: nn.Module = self.module
        bare = module.task if isinstance(module, StepModule) else module
        names = {id(parameter): name for name, parameter in bare.named_parameters()}
        return [names[id(parameter)] for parameter in chosen if id(parameter) in names]
