"""Steps of an evaluation, whose call of the model goes through all stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from drivetrain.runtime.errors import ConfigurationError
from drivetrain.strategies.parallel.pipeline.calls import Caught, ModelCalls
from drivetrain.strategies.parallel.pipeline.options import PipelineGroup
from drivetrain.strategies.parallel.pipeline.trace import Route
from drivetrain.strategies.topology import Topology


class StagedEvaluation(nn.Module):
    """Called as `module(step, batch, ...)` like `StepModule`; only the last stage's process returns something.

    Args:
        calls: What calls of the model do.
        place: This process among those of the pipeline.
        topology: This process's place.
    """

    def __init__(self, calls: ModelCalls, place: PipelineGroup, topology: Topology) -> None:
        super().__init__()
        self._calls, self._place, self._topology = calls, place, topology

    def forward(self, step: Callable[..., Any], *args: Any) -> Any:
        """Run a step, forward only."""
        with self._calls.answered(self._through_stages):
            try:
                result = step(*args) if self._topology.computes_loss else step(*args, probe=True)
            except Caught:
                return None
            called = self._calls.was_called
        if not called:
            raise ConfigurationError(
                f"The step never called {self._calls.name}, the module that is spread over stages.", code="DT-053"
            )
        return result

    def _through_stages(self, *args: Any, **kwargs: Any) -> Any:
        call = self._calls.routed(args, kwargs)
        place = self._place
        handed_over: tuple[Tensor, ...] = ()
        sends: list[Any] = []
        output: Any = None
        for module in self._calls.split.modules:
            stage = module.stage
            if stage and not place.holds(stage - 1):
                handed_over = self._receive(call.route, stage)
            output = module(*handed_over, inputs=(args, kwargs), call=call)
            if not module.is_last:
                handed_over = output
                if not place.holds(stage + 1):
                    to = place.stages.rank_of(stage + 1)
                    sends += [dist.isend(t.detach(), group=place.group, group_dst=to) for t in handed_over]
        for send in sends:
            send.wait()
        if self._topology.computes_loss:
            return output
        raise Caught

    def _receive(self, route: Route, stage: int) -> tuple[Tensor, ...]:
        source = self._place.stages.rank_of(stage - 1)
        received = tuple(
            torch.empty(tensor.shape, dtype=tensor.dtype, device=self._topology.device)
            for tensor in route.cuts[stage].tensors
        )
        for tensor in received:
            dist.recv(tensor, group=self._place.group, group_src=source)
        return received
