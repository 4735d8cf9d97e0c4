"""Forward and backward over the micro-batches of a step, interleaved over stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.seeds import isolated_random_state, own_generator, sample_seed, seed_all_generators
from drivetrain.strategies.base import MicroBatch, Output
from drivetrain.strategies.parallel.pipeline.calls import Caught, ModelCalls
from drivetrain.strategies.parallel.pipeline.options import PipelineGroup
from drivetrain.strategies.parallel.pipeline.schedule import ScheduledStage, Scheduler
from drivetrain.strategies.parallel.pipeline.stage import Call
from drivetrain.strategies.topology import Topology


class TrainingWindow:
    """Runs the steps of a task in two halves: up to the call of the model, and from its output to the loss.

    Args:
        calls: What calls of the model do.
        place: This process among those of the pipeline.
        topology: This process's place.
    """

    def __init__(self, calls: ModelCalls, place: PipelineGroup, topology: Topology) -> None:
        self._calls, self._place, self._topology = calls, place, topology
        self._precision = calls.split.precision
        stages = [
            ScheduledStage(module, module.stage, place.stages.count, topology.device, place.group)
            for module in calls.split.modules
        ]
        self._scheduler = Scheduler(place.stages.kind, stages)
        self._generator = own_generator("pipeline")
        self._loss: Tensor | None = None

    def run(self, step_fn: Callable[..., Output], microbatches: Sequence[MicroBatch]) -> list[Output | None]:
        """Run forward and backward over the micro-batches of one optimizer step.

        Args:
            step_fn: Runs the task's step on one micro-batch, and with `probe=True` lets nothing of it count.
            microbatches: The window of one step.

        Returns:
            What `step_fn` returned for each on the process with the last stage, None elsewhere.
        """
        # Only the last stage scales losses, but all must hold the same scale, and change it at the same time.
        self._precision.scale(torch.zeros((), device=self._topology.device))
        seeds = self._seeds(len(microbatches))
        calls = [self._probe(step_fn, microbatch, seed) for microbatch, seed in zip(microbatches, seeds, strict=True)]
        outputs: list[Output | None] = [None] * len(microbatches)

        def finishing(index: int) -> Callable[[Any], Tensor]:
            def finish(output: Any) -> Tensor:
                with self._seeded(seeds[index]):
                    outputs[index], loss = self._compute_loss(step_fn, microbatches[index], output)
                return loss

            return finish

        for index, call in enumerate(calls):
            call.finish = finishing(index)
        arguments = [{"inputs": (call.args, call.kwargs), "call": call} for call in calls]
        self._scheduler.run([call.route for call in calls], arguments)
        return outputs

    def _probe(self, step_fn: Callable[..., Any], microbatch: Any, seed: int) -> Call:
        """Find out what the task's step calls the model with."""
        found: list[Call] = []

        def catch(*args: Any, **kwargs: Any) -> Any:
            found.append(self._calls.routed(args, kwargs))
            raise Caught

        with self._calls.answered(catch), self._seeded(seed):
            try:
                step_fn(microbatch, probe=True)
            except Caught:
                return found[0]
        raise ConfigurationError(
            f"training_step never called {self._calls.name}, the module that is spread over stages. Name "
            "the one that it calls with pp_module=.",
            code="DT-053",
        )

    def _compute_loss(self, step_fn: Callable[..., Output], microbatch: Any, output: Any) -> tuple[Output, Tensor]:
        """Run the task's step with what came out of the pipeline; return its result and the loss to go back from."""
        self._loss = None
        with self._calls.answered(lambda *args, **kwargs: output):
            result = step_fn(microbatch)
            called = self._calls.was_called
        loss, self._loss = self._loss, None
        if not called:
            raise ConfigurationError(
                f"training_step did not call {self._calls.name} the second time it ran.", code="DT-053"
            )
        if loss is None and result is not None:
            raise ConfigurationError(
                "training_step returned a loss, but its backward was not left to the strategy: a task cannot override "
                "backward() in a pipeline.",
                code="DT-051",
            )
        # A batch that is left out goes back through all stages as any other, with gradients of zero.
        return result, torch.zeros((), device=self._topology.device, requires_grad=True) if loss is None else loss

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Keep a loss for the schedule, which goes back from it when it is its turn."""
        if kwargs:
            raise ConfigurationError(
                f"A pipeline runs backward itself and takes no {', '.join(kwargs)}.", code="DT-006"
            )
        if loss.numel() != 1 or not loss.requires_grad:
            raise RuntimeError(f"cannot go back from a tensor of shape {tuple(loss.shape)}: {loss}")
        self._loss = loss

    def _seeds(self, count: int) -> list[int]:
        """Seeds of the micro-batches, the same on all stages: what a step draws before the model must agree.

        They come from a generator of the pipeline's own, so that the order of the data is that of one process.
        """
        drawn = torch.randint(2**62, (1,), generator=self._generator).to(self._topology.device)
        dist.broadcast(drawn, group=self._place.group, group_src=0)
        return [sample_seed(int(drawn), 0, index) for index in range(count)]

    @contextmanager
    def _seeded(self, seed: int) -> Iterator[None]:
        kind = self._topology.kind
        with isolated_random_state(devices=kind.name != "cpu"):
            seed_all_generators(seed)
            if kind.name != "cpu":
                kind.manual_seed_all(seed % 2**32)
            yield
