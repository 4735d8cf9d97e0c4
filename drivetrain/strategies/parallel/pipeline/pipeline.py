"""Pipeline parallelism: a model's layers spread over processes, micro-batches running through them one after another.

The schedules are those of `torch.distributed.pipelining`; what a stage computes is the model's own forward, of which
each process runs its part (`pipeline_stage`). The task stays as it is: where its step calls the model, that ends the
step on all stages but the last, which goes on with what came out of the pipeline.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from drivetrain.runtime.errors import ConfigurationError, nearest
from drivetrain.runtime.nested import send_to_device
from drivetrain.runtime.seeds import isolated_random_state, sample_seed, seed_all_generators
from drivetrain.strategies.base import StateDict, StepModule
from drivetrain.strategies.parallel.mesh import MeshPlace
from drivetrain.strategies.parallel.pipeline.schedule import ScheduledStage, Scheduler, rank_of_stage, schedule_kind
from drivetrain.strategies.parallel.pipeline.split import StageLayout, choose_splits, find_pipelined, lay_out
from drivetrain.strategies.parallel.pipeline.stage import CALL, Call, StageModule
from drivetrain.strategies.parallel.pipeline.stage_state import StageState
from drivetrain.strategies.parallel.pipeline.trace import ModelOutline, Plan, signature_of
from drivetrain.strategies.precision import Precision

if TYPE_CHECKING:
    from drivetrain.strategies.parallel.strategy import Parallel

MicroBatch = TypeVar("MicroBatch")
Output = TypeVar("Output")

# Where a task remembers which pipeline it was split for.
_MEMORY = "_pipelined"
# Plans of so many different shapes of inputs are kept.
_MOST_PLANS = 64


class _Caught(BaseException):
    """A step called the model and is not to go on: not an `Exception`, which a step might catch."""


class Pipeline:
    """One process's part of a pipeline.

    Args:
        strategy: the strategy that this belongs to, which knows the grid of processes.
        module: name of the module that is spread over stages, "" for the task itself; None for the child that holds
            most parameters.
        split: names of the modules that stages begin with, relative to that module; `"auto"` spreads the blocks of
            its largest `ModuleList` or `Sequential` evenly by number of parameters.
        place: stages of modules or parameters that are registered elsewhere than where the forward uses them.
        schedule: `"gpipe"`, `"1f1b"`, `"looped_bfs"`, `"interleaved_1f1b"`, `"interleaved_zero_bubble"` or
            `"zbv_zero_bubble"`.
        stages_per_rank: stages of each process; by default 1, and 2 for the schedules after `"1f1b"`.

    Attributes:
        state: which process holds what, and the state of all stages; there once a model is split.

    Raises:
        ConfigurationError: an option cannot be.
    """

    def __init__(
        self,
        strategy: Parallel,
        module: str | None = None,
        split: str | Sequence[str] = "auto",
        place: Mapping[str, int] | None = None,
        schedule: str = "1f1b",
        stages_per_rank: int | None = None,
        **unknown: Any,
    ) -> None:
        allowed = ("module", "split", "place", "schedule", "stages_per_rank")
        for name in unknown:
            raise ConfigurationError(
                f"A pipeline has no option pp_{name}. Allowed: {', '.join(f'pp_{known}' for known in allowed)}."
                f"{nearest(f'pp_{name}', [f'pp_{known}' for known in allowed])}"
            )
        if isinstance(split, str) and split != "auto":
            raise ConfigurationError(f"pp_split must be 'auto' or a list of module names, got {split!r}.")
        self._strategy = strategy
        self._kind, self._per_rank = schedule_kind(schedule, stages_per_rank)
        assert strategy.pp_mesh is not None
        self._group = strategy.pp_mesh.get_group()
        self._rank, self._ranks = strategy.pp_mesh.get_local_rank(), strategy.pp_mesh.size()
        self._count = self._ranks * self._per_rank
        self._module_name, self._split, self._placed = module, split, place
        if strategy.sizes.cp > 1:
            raise ConfigurationError(
                f"pp={self._ranks} with cp={strategy.sizes.cp}: stages cannot hand over parts of sequences. Use one of "
                "the two, with tp or dp_shard for the other processes."
            )
        if strategy.shards and "zero_bubble" in self._kind.name:
            # Gradients of weights come late there, past what fully_shard watches (torch 2.13): losses went wrong.
            raise ConfigurationError(
                f"pp_schedule={self._kind.name!r} computes the gradients of weights apart, which sharded or replicated "
                "stages (dp_shard, dp_replicate) would lose. Use 'interleaved_1f1b' or '1f1b'."
            )
        if split != "auto" and len(split) + 1 != self._count:
            raise ConfigurationError(
                f"pp_split names {len(split)} modules, which makes {len(split) + 1} stages, but pp={self._ranks} x "
                f"{self._per_rank} stages on each process are {self._count}."
            )
        self._last_rank = rank_of_stage(self._kind, self._count - 1, self._ranks)
        self._own = [s for s in range(self._count) if rank_of_stage(self._kind, s, self._ranks) == self._rank]
        strategy.computes_loss = self._rank == self._last_rank
        if strategy.data_ranks is not None and strategy.value_ranks is not None:
            strategy.data_ranks = self._at_last_stage(strategy.data_ranks)
            strategy.value_ranks = self._at_last_stage(strategy.value_ranks)
        self._modules: list[StageModule] = []
        self._plans: OrderedDict[Any, Plan] = OrderedDict()
        self._answer: Callable[..., Any] | None = None
        self._loss: Tensor | None = None
        self._bare: nn.Module | None = None

    def _at_last_stage(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """The processes that compute losses, in place of others of the same pipelines."""
        sizes = self._strategy.sizes
        return tuple(MeshPlace(sizes, rank).rank_of(pp=self._last_rank) for rank in ranks)

    # model

    def split(self, model: nn.Module, precision: Precision) -> list[StageModule]:
        """Keep the parameters of this process's stages; others' are on the meta device from now on.

        Args:
            model: what the Trainer prepares, with whole parameters in their dtype.
            precision: the number formats.

        Returns:
            The modules of its stages, to be sharded and placed.

        Raises:
            ConfigurationError: the model cannot be split.
        """
        if not isinstance(model, StepModule):
            raise ConfigurationError(
                f"pp={self._ranks} spreads {type(model).__name__} over processes, and forward and backward of all "
                "micro-batches of a step run interleaved, which a loop with loss.backward() cannot do. Use the "
                "Trainer, or another strategy."
            )
        bare = self._strategy.unwrap(model)
        name = find_pipelined(bare, self._module_name)
        self._whole = bare.get_submodule(name)
        self._check_outside(bare)
        splits = self._splits(name)
        self._layout: StageLayout = lay_out(self._whole, splits, self._placed)
        self._outline = ModelOutline(self._whole, self._layout, self._strategy.device)
        self._plans.clear()
        self.state = StageState(
            bare,
            name,
            self._layout,
            self._group,
            [rank_of_stage(self._kind, s, self._ranks) for s in range(self._count)],
        )
        self.state.drop_foreign()
        self._modules = [
            StageModule(self._whole, self._layout, stage, self._strategy.device, precision.forward_context)
            for stage in self._own
        ]
        self._bare = bare
        self._precision = precision
        return self._modules

    def _check_outside(self, bare: nn.Module) -> None:
        inside = {id(parameter) for parameter in self._whole.parameters()}
        outside = [n for n, p in bare.named_parameters() if p.requires_grad and id(p) not in inside]
        if outside and self._strategy.shards:
            raise ConfigurationError(
                f"{', '.join(outside[:4])} can be trained, but is outside of {type(self._whole).__name__}, which is "
                "spread over stages and sharded. Move it in there, or use a pipeline without data parallelism."
            )

    def _splits(self, name: str) -> Sequence[str]:
        if isinstance(self._split, str):
            return choose_splits(self._whole, self._count)
        return [path.removeprefix(f"{name}.") if name else path for path in self._split]

    def build_schedule(self) -> None:
        """Make the schedule, once the stages' modules are sharded and placed."""
        self.put_back()
        self._stages = [
            ScheduledStage(module, module.stage, self._count, self._strategy.device, self._group)
            for module in self._modules
        ]
        self._scheduler = Scheduler(self._kind, self._stages)
        self._whole.__dict__[CALL] = self._called
        assert self._bare is not None
        self._bare.__dict__[_MEMORY] = _Memory(self)

    def adopt(self, model: nn.Module) -> None:
        """Take over a model that another pipeline has split, as that of the trainer before.

        Args:
            model: what `prepare` returned then.

        Raises:
            ConfigurationError: it was split otherwise.
        """
        bare = self._strategy.unwrap(model)
        other = bare.__dict__[_MEMORY].pipeline
        if other is self:
            return
        before = (other._kind, other._per_rank, other._module_name, other._split, other._placed)
        if before != (self._kind, self._per_rank, self._module_name, self._split, self._placed):
            raise ConfigurationError(
                "This model was spread over stages before, with other options of the pipeline, and parts of it are "
                "elsewhere. Make a new one, and load the state of this one into it."
            )
        for name in ("_whole", "_layout", "_outline", "_modules", "_precision", "state"):
            setattr(self, name, getattr(other, name))
        self.state.group = self._group
        self._bare = bare
        self.build_schedule()

    def put_back(self) -> None:
        """Show the model the parameters that its stages hold for it."""
        for module in self._modules:
            module.put_back()

    @property
    def modules(self) -> list[StageModule]:
        """The modules of this process's stages."""
        return self._modules

    def follow(self, optimizers: Sequence[Optimizer]) -> None:
        """Let optimizers step this process's parameters only; their groups stay, some of them empty."""
        for optimizer in optimizers:
            if isinstance(optimizer, torch.optim.LBFGS):
                raise ConfigurationError("LBFGS searches along all parameters at once, which a pipeline has spread.")
            self.state.follow(optimizer)

    # the call of the model within a step

    def _called(self, *args: Any, **kwargs: Any) -> Any:
        """What a call of the split module does."""
        if self._answer is None:
            raise ConfigurationError(
                f"{type(self._whole).__name__} is spread over {self._count} stages, so it can only be called within "
                "training_step, validation_step, test_step and predict_step, once in each."
            )
        answer, self._answer = self._answer, None
        return answer(*args, **kwargs)

    @contextmanager
    def _answering(self, answer: Callable[..., Any]) -> Iterator[None]:
        """Let the next call of the split module be answered so."""
        self._answer = answer
        try:
            yield
        finally:
            self._answer = None

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                raise ConfigurationError(
                    f"An argument of {type(self._whole).__name__} requires gradients, so it was computed from "
                    "parameters outside of it, where a pipeline has no stage. Move that computation into the module "
                    "that is split."
                )
        return Call(args, kwargs, self._plan(args, kwargs))

    def _plan(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
        key = signature_of(args, kwargs, self._whole.training)
        if key not in self._plans:
            if len(self._plans) >= _MOST_PLANS:
                self._plans.popitem(last=False)
            self._plans[key] = self._outline.plan(args, kwargs, self._whole.training)
        self._plans.move_to_end(key)
        return self._plans[key]

    # training

    def forward_backward(
        self, step_fn: Callable[..., Output], microbatches: Sequence[MicroBatch]
    ) -> list[Output | None]:
        """Run forward and backward over the micro-batches of one optimizer step.

        Args:
            step_fn: runs the task's step on one micro-batch, and with `probe=True` lets nothing of it count.
            microbatches: the window of one step.

        Returns:
            What `step_fn` returned for each on the process with the last stage, None elsewhere.
        """
        # Only the last stage scales losses, but all must know by how much, and change it at the same time.
        self._precision.scale(torch.zeros((), device=self._strategy.device))
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
        self._scheduler.run([call.plan for call in calls], arguments)
        return outputs

    def _probe(self, step_fn: Callable[..., Any], microbatch: Any, seed: int) -> Call:
        """Find out what the task's step calls the model with."""
        found: list[Call] = []

        def note(*args: Any, **kwargs: Any) -> Any:
            found.append(self._call(args, kwargs))
            raise _Caught

        with self._answering(note), self._seeded(seed):
            try:
                step_fn(microbatch, probe=True)
            except _Caught:
                return found[0]
        raise ConfigurationError(
            f"training_step never called {type(self._whole).__name__}, the module that is spread over stages. Name "
            "the one that it calls with pp_module=."
        )

    def _compute_loss(self, step_fn: Callable[..., Output], microbatch: Any, output: Any) -> tuple[Output, Tensor]:
        """Run the task's step with what came out of the pipeline; return its result and the loss to go back from."""
        self._loss = None
        with self._answering(lambda *args, **kwargs: output):
            result = step_fn(microbatch)
            called = self._answer is None
        loss, self._loss = self._loss, None
        if not called:
            raise ConfigurationError(f"training_step did not call {type(self._whole).__name__} the second time it ran.")
        if loss is None and result is not None:
            raise ConfigurationError(
                "training_step returned a loss, but its backward was not left to the strategy: a task cannot override "
                "backward() in a pipeline."
            )
        # A batch that is left out goes back through all stages as any other, with gradients of zero.
        return result, torch.zeros((), device=self._strategy.device, requires_grad=True) if loss is None else loss

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Keep a loss for the schedule, which goes back from it when it is its turn."""
        if kwargs:
            raise ConfigurationError(f"A pipeline runs backward itself and takes no {', '.join(kwargs)}.")
        if loss.numel() != 1 or not loss.requires_grad:
            raise RuntimeError(f"cannot go back from a tensor of shape {tuple(loss.shape)}: {loss}")
        self._loss = loss

    def _seeds(self, count: int) -> list[int]:
        """Seeds of the micro-batches, the same on all stages: what a step draws before the model must agree."""
        drawn = torch.randint(2**62, (1,)).to(self._strategy.device)
        dist.broadcast(drawn, group=self._group, group_src=0)
        return [sample_seed(int(drawn), 0, index) for index in range(count)]

    @contextmanager
    def _seeded(self, seed: int) -> Iterator[None]:
        kind = self._strategy.kind
        with isolated_random_state(devices=kind.name != "cpu"):
            seed_all_generators(seed)
            if kind.name != "cpu":
                kind.manual_seed_all(seed % 2**32)
            yield

    # evaluation

    def evaluation_model(self) -> nn.Module:
        """The module to call in evaluation: as `StepModule`, but only the last stage's process returns something."""
        return _Evaluation(self)

    def evaluate(self, step: Callable[..., Any], *args: Any) -> Any:
        """Run a step whose call of the model goes through all stages, forward only."""
        last = self._strategy.computes_loss
        with self._answering(self._forward_only):
            try:
                result = step(*args) if last else step(*args, probe=True)
            except _Caught:
                return None
            called = self._answer is None
        if not called:
            raise ConfigurationError(
                f"The step never called {type(self._whole).__name__}, the module that is spread over stages."
            )
        return result

    def _forward_only(self, *args: Any, **kwargs: Any) -> Any:
        call = self._call(args, kwargs)
        handed_over: tuple[Tensor, ...] = ()
        sends: list[Any] = []
        output: Any = None
        for module in self._modules:
            stage = module.stage
            if stage and not self._holds(stage - 1):
                handed_over = self._receive(call.plan, stage)
            output = module(*handed_over, inputs=(args, kwargs), call=call)
            if not module.is_last:
                handed_over = output
                if not self._holds(stage + 1):
                    to = rank_of_stage(self._kind, stage + 1, self._ranks)
                    sends += [dist.isend(t.detach(), group=self._group, group_dst=to) for t in handed_over]
        for send in sends:
            send.wait()
        if self._strategy.computes_loss:
            return output
        raise _Caught

    def _holds(self, stage: int) -> bool:
        return stage in self._own

    def _receive(self, plan: Plan, stage: int) -> tuple[Tensor, ...]:
        source = rank_of_stage(self._kind, stage - 1, self._ranks)
        received = tuple(
            torch.empty(tensor.shape, dtype=tensor.dtype, device=self._strategy.device)
            for tensor in plan.cuts[stage].tensors
        )
        for tensor in received:
            dist.recv(tensor, group=self._group, group_src=source)
        return received

    def share(self, result: Any) -> Any:
        """What the process with the last stage passes, on every process of the pipeline."""
        runs = self._strategy.computes_loss
        boxed = [send_to_device(result, torch.device("cpu")) if runs else None]
        source = dist.get_global_rank(self._group, self._last_rank)
        dist.broadcast_object_list(boxed, src=source, group=self._group, device=self._strategy.device)
        return result if runs else boxed[0]

    # gradients

    def combine_norm(self, norm: Tensor, norm_type: float) -> Tensor:
        """The norm of the gradients of all stages together.

        Args:
            norm: that of this process's stages.
            norm_type: the p of the p-norm.
        """
        # In one dtype on all, also on a process without any gradients, which does not know theirs.
        power = norm.detach().to(self._strategy.device, torch.float64)
        if norm_type == float("inf"):
            dist.all_reduce(power, op=dist.ReduceOp.MAX, group=self._group)
            return power
        power = power**norm_type
        dist.all_reduce(power, group=self._group)
        return power ** (1.0 / norm_type)

    def teardown(self) -> None:
        """Let the model be called as any other again; parameters of other stages stay away."""
        if self._bare is not None:
            self._whole.__dict__.pop(CALL, None)
            self._bare = None


class _Memory:
    """Which pipeline a task was split for; a copy of the task remembers nothing.

    Args:
        pipeline: the pipeline.
    """

    def __init__(self, pipeline: Pipeline | None = None) -> None:
        self.pipeline = pipeline

    def __reduce__(self) -> Any:
        return _Memory, ()


class _Evaluation(nn.Module):
    """Calls steps through a pipeline."""

    def __init__(self, pipeline: Pipeline) -> None:
        super().__init__()
        self._pipeline = pipeline

    def forward(self, step: Callable[..., Any], *args: Any) -> Any:
        """Run `step`."""
        return self._pipeline.evaluate(step, *args)
