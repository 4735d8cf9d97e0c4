"""Models in the form in which megatron-core runs them, and the pipeline schedules that run them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn

from drivetrain.runtime.errors import ConfigurationError
from drivetrain.strategies.base import Topology
from drivetrain.strategies.megatron.configuration import MegatronGroups
from drivetrain.strategies.megatron.layout import Layout

if TYPE_CHECKING:
    from drivetrain.strategies.megatron.optimizer import MegatronOptimizerFront


# Interface between a task and `Megatron`


@runtime_checkable
class MegatronProgram(Protocol):
    """Protocol of tasks that the `Megatron` strategy can train: how to build a model and run a step.

    `MegatronTask` implements it.

    Attributes:
        chunks: The model chunks of this process.
    """

    chunks: list[nn.Module]

    def transformer_config(self) -> Any: ...

    def model_provider(
        self, pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None, config: Any = None
    ) -> nn.Module: ...

    def forward_step(self, data_iterator: Iterator[Any], model: nn.Module) -> tuple[Tensor, Any]: ...

    def batch_shape(self, batch: Any) -> tuple[int, int]:
        """Return the number of rows and the sequence length of a batch."""


def shape_of(batch: Any) -> tuple[int, int]:
    """Return the number of rows and the sequence length of a batch."""
    for tensor in _tensors(batch):
        if tensor.dim() >= 2:
            return tensor.shape[0], tensor.shape[1]
    raise ConfigurationError(
        "The batch has no tensor with two dimensions, from which pipeline stages derive the shapes they exchange. "
        "Override MegatronTask.batch_shape(batch) to return (rows, length).",
    )


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, dict):
        # Token ids first, because other tensors, such as attention masks, may have other shapes.
        for key in sorted(batch, key=lambda key: (key not in ("tokens", "input_ids"), str(key))):
            yield from _tensors(batch[key])
    elif isinstance(batch, list | tuple):
        for each in batch:
            yield from _tensors(each)


class PlacedModel:
    """A model that the `Megatron` strategy has prepared, with its task, model chunks and optimizer."""

    def __init__(self, owner: nn.Module, bare: list[nn.Module], wrapped: list[nn.Module], layout: Layout) -> None:
        self.owner, self.bare, self.wrapped, self.layout = owner, bare, wrapped, layout
        self.called: nn.Module = owner
        self.optimizer: MegatronOptimizerFront | None = None
        self.accumulates = False

    @property
    def config(self) -> Any:
        """Megatron-core's `TransformerConfig`, from which the model chunks were built."""
        return self.bare[0].config

    @property
    def program(self) -> MegatronProgram:
        if not isinstance(self.owner, MegatronProgram):
            raise ConfigurationError(
                f"{type(self.owner).__name__} is not a MegatronTask, so it has no forward_step. Subclass MegatronTask.",
                see="megatron.md",
            )
        return self.owner

    def finalize(self, chunks: list[nn.Module] | None = None, num_tokens: Any = None, **options: Any) -> None:
        # Called by megatron-core's schedule, as `finalize_model_grads_func`.
        from megatron.core.distributed import finalize_model_grads

        finalize_model_grads(self.wrapped, None, **options)
        if self.config.calculate_per_token_loss:
            # Megatron-core only sums gradients then, because it would divide them by a number of tokens.
            for chunk in self.wrapped:
                chunk.scale_gradients(1.0 / chunk.dp_cp_group.size())  # type: ignore[operator]

    def zero_gradients(self) -> None:
        """Clear the gradients that megatron-core has accumulated in its own buffers."""
        for chunk in self.wrapped:
            chunk.zero_grad_buffer()  # type: ignore[operator]

    def held_gradients(self) -> list[torch.Tensor]:
        parameters = (parameter for chunk in self.bare for parameter in chunk.parameters())
        return [parameter.main_grad for parameter in parameters if hasattr(parameter, "main_grad")]


class PlacedModels:
    def __init__(self) -> None:
        self._placed: list[PlacedModel] = []

    def __iter__(self) -> Iterator[PlacedModel]:
        return iter(self._placed)

    def add(self, placed: PlacedModel) -> None:
        # Replaces the entry of an earlier `prepare` of this model.
        self._placed = [known for known in self._placed if known.owner is not placed.owner]
        self._placed.append(placed)

    def clear(self) -> None:
        self._placed.clear()

    def find(self, model: nn.Module) -> PlacedModel | None:
        for placed in self._placed:
            if model is placed.owner or model is placed.called or any(model is chunk for chunk in placed.wrapped):
                return placed
        return None

    def require(self, model: nn.Module) -> PlacedModel:
        placed = self.find(model)
        if placed is None:
            raise ConfigurationError(f"{type(model).__name__} is not prepared. Pass it to Accelerator.prepare() first.")
        return placed


# Forward and backward over the micro-batches of a step, through megatron-core's schedules; and evaluation


MicroBatch = TypeVar("MicroBatch")
Output = TypeVar("Output")


class StageEnded(Exception):
    # Raised to leave a task's step after a model chunk that computes no loss.

    def __init__(self, output: Any) -> None:
        super().__init__("the step of a stage without the loss")
        self.output = output


class CurrentChunk:
    # The model chunk that a task's step must run now, or None outside of steps.

    chunk: nn.Module | None = None
    is_last: bool = True

    def run(self, program: MegatronProgram, batch: Any) -> tuple[Tensor, Any]:
        # Raises `StageEnded` if the chunk does not compute the loss.
        if self.chunk is None:
            raise ConfigurationError(
                f"{type(program).__name__} runs its model outside of a step. Run it within training_step, "
                "validation_step, test_step or predict_step, under Trainer(strategy='megatron').",
            )
        output, loss_function = program.forward_step(iter((batch,)), self.chunk)
        if not self.is_last:
            raise StageEnded(output)
        return output, loss_function

    def step(self, chunk: nn.Module, is_last: bool, step: Callable[..., Any], *args: Any) -> tuple[Any, Any]:
        # `(result, None)` for the last chunk, and `(None, output)` for others.
        self.chunk, self.is_last = chunk, is_last
        try:
            if is_last:
                return step(*args), None
            step(*args, probe=True)
        except StageEnded as ended:
            return None, ended.output
        finally:
            self.chunk = None
        raise ConfigurationError(
            "The step returned without running the model, while its parts on other processes wait for each other. "
            "Call super().training_step(batch, batch_idx), or self.run_model(batch).",
        )


class Schedule:
    def __init__(self, placed: PlacedModel, current: CurrentChunk, groups: MegatronGroups, topology: Topology) -> None:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self._placed, self._current, self._groups, self._topology = placed, current, groups, topology
        self._run = get_forward_backward_func()
        self._loss: Tensor | None = None
        self.running = False
        placed.config.finalize_model_grads_func = placed.finalize
        ddp = getattr(placed.wrapped[0], "ddp_config", None)
        if ddp is not None and ddp.overlap_grad_reduce:
            # Reduction that overlaps with the backward pass must wait for the last micro-batch.
            holds = [chunk.no_sync for chunk in placed.wrapped]
            placed.config.no_sync_func = holds if len(holds) > 1 else holds[0]
        if placed.optimizer is not None and placed.config.fp16:
            placed.config.grad_scale_func = placed.optimizer.inner.scale_loss

    def run(self, step_fn: Callable[..., Output], microbatches: Sequence[MicroBatch]) -> list[Output | None]:
        """Run the forward and backward passes of an optimizer step, by calling `step_fn` on each micro-batch.

        Returns the results of `step_fn`. Processes that do not compute the loss return None for each micro-batch.
        """
        self._groups.begin_window()
        outputs: list[Output | None] = [None] * len(microbatches)
        padded = [
            *enumerate(microbatches),
            *((None, microbatches[-1]) for _ in range(self._dummies_needed(len(microbatches)))),
        ]

        def forward_step(batches: Iterator[tuple[int | None, MicroBatch]], chunk: nn.Module) -> tuple[Any, Any]:
            index, microbatch = next(batches)
            is_last = self._topology.computes_loss and chunk is self._placed.wrapped[-1]
            self._loss = None
            # A dummy micro-batch must leave no trace in the task, and its loss is multiplied by zero.
            step = step_fn if index is not None or not is_last else _probing(step_fn)
            result, handed_over = self._current.step(chunk, is_last, step, microbatch)
            if not is_last:
                return handed_over, None
            if index is None:
                return _loss_in(result) * 0.0, _no_loss
            outputs[index] = result
            return self._taken_loss(), _no_loss

        chunks = self._placed.wrapped
        rows, length = self._shape(microbatches)
        self.running = True
        try:
            self._run(
                forward_step_func=forward_step,
                data_iterator=[iter(padded) for _ in chunks] if len(chunks) > 1 else iter(padded),
                model=chunks,
                num_microbatches=len(padded),
                seq_length=length,
                micro_batch_size=rows,
                # The loss is already weighted and scaled, and the schedule must not change it.
                collect_non_loss_data=True,
            )
        finally:
            self.running = False
        return outputs

    def backward(self, loss: Tensor) -> None:
        # The pipeline schedule computes the gradients later.
        if loss.numel() != 1 or not loss.requires_grad:
            raise RuntimeError(f"backward needs a scalar loss that requires gradients, got {loss}")
        # The schedule frees an output after sending it, which must not free the loss.
        self._loss = loss.clone() if self._placed.config.deallocate_pipeline_outputs else loss

    def _taken_loss(self) -> Tensor:
        loss, self._loss = self._loss, None
        if loss is None:
            raise ConfigurationError(
                f"{type(self._placed.owner).__name__}.training_step returned no loss, but a pipeline schedule runs "
                "backward for every micro-batch. To skip a micro-batch, return a loss of zero, such as loss * 0.",
            )
        return loss

    def _dummies_needed(self, count: int) -> int:
        if len(self._placed.wrapped) == 1:
            return 0
        # Interleaved stages need a multiple of their number of micro-batches.
        stages: int = self._placed.config.pipeline_model_parallel_size
        return -count % stages

    def _shape(self, microbatches: Sequence[Any]) -> tuple[int, int]:
        if self._placed.config.pipeline_model_parallel_size == 1:
            return 1, 1
        program = self._placed.program
        shapes = [program.batch_shape(getattr(each, "batch", each)) for each in microbatches]
        uneven = len(set(shapes)) > 1
        if uneven and len(self._placed.wrapped) > 1 and self._placed.config.pipeline_model_parallel_size == 2:
            # Both neighbours are the same process then, and the shapes that arrive from it cannot be told apart.
            raise ConfigurationError(
                f"The micro-batches of a step have the shapes {sorted(set(shapes))}, but virtual_pipeline with two "
                "stages needs equal shapes. Use DataLoader(drop_last=True), pad batches, or remove virtual_pipeline.",
            )
        # Stages then send the shape of each tensor in an additional message.
        self._placed.config.variable_seq_lengths = uneven
        return shapes[0]


class _EvaluationPass:
    def __init__(self, placed: PlacedModel, current: CurrentChunk, topology: Topology) -> None:
        self._placed, self._current, self._topology = placed, current, topology

    def run(self, step: Callable[..., Any], batch: Any, *args: Any) -> Any:
        from megatron.core import parallel_state
        from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
        from megatron.core.utils import get_attr_wrapped_model

        placed, topology = self._placed, self._topology
        communicator = P2PCommunicator(parallel_state.get_pipeline_model_parallel_group(), placed.config)
        # Every stage has the batch, and knows the shape without receiving it.
        placed.config.variable_seq_lengths = False
        shape = self._handed_over(batch)
        starts = parallel_state.is_pipeline_first_stage(ignore_virtual=True)
        result = None
        for number, chunk in enumerate(placed.wrapped):
            is_last = topology.computes_loss and number == len(placed.wrapped) - 1
            received = communicator.recv_forward(shape, starts and number == 0)
            get_attr_wrapped_model(chunk, "set_input_tensor")([received])
            result, output = self._current.step(chunk, is_last, step, batch, *args)
            communicator.send_forward(output, is_last)
        return result

    def _handed_over(self, batch: Any) -> tuple[int, int, int]:
        config = self._placed.config
        if config.pipeline_model_parallel_size == 1:
            return (1, 1, 1)
        rows, length = self._placed.program.batch_shape(batch)
        parts = config.context_parallel_size * (config.tensor_model_parallel_size if config.sequence_parallel else 1)
        return (length // parts, rows, config.hidden_size)


class Evaluation(nn.Module):
    """Module that runs evaluation steps, such as `validation_step`, through all stages of a pipeline.

    It is called as `module(step, batch, ...)`.
    """

    def __init__(self, placed: PlacedModel, current: CurrentChunk, topology: Topology) -> None:
        super().__init__()
        # A bound method hides the chunks, which must not be registered as submodules of this module, too.
        self._run: Callable[..., Any] = _EvaluationPass(placed, current, topology).run

    def forward(self, step: Callable[..., Any], batch: Any, *args: Any) -> Any:
        # None on all stages but the last.
        return self._run(step, batch, *args)


class MegatronRuntime:
    """Interface through which a `MegatronTask` builds and runs its model."""

    def __init__(
        self, build: Callable[[MegatronProgram], list[nn.Module]], current: CurrentChunk, config: Callable[[], Any]
    ) -> None:
        self.build, self.run, self._config = build, current.run, config

    def loss_of(self, result: Any) -> tuple[Any, dict[str, Any]]:
        config = self._config()
        if not isinstance(result, tuple) or len(result) not in (2, 3):
            raise ConfigurationError(
                f"The loss function returned {type(result).__name__}. It must return (loss, report) with a mean loss, "
                "or (loss, num_tokens, report) with a summed loss, as for megatron-core's schedules.",
                see="megatron.md",
            )
        if len(result) == 2:
            loss, report = result
            return loss * config.context_parallel_size if config.context_parallel_size > 1 else loss, report
        total, tokens, report = result
        if config.calculate_per_token_loss:
            return {"loss": total, "weight": tokens.detach()}, report
        return total / tokens.clamp(min=1), report

    def own_part(self, batch: dict[str, Any]) -> dict[str, Any]:
        if self._config().context_parallel_size == 1:
            return batch
        from megatron.core.utils import get_batch_on_this_cp_rank

        part: dict[str, Any] = get_batch_on_this_cp_rank(batch)
        return part

    def whole_vocabulary(self, logits: Tensor) -> Tensor:
        """Gather the parts of the vocabulary from all tensor-parallel processes, and return the full logits."""
        from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

        gathered: Tensor = gather_from_tensor_model_parallel_region(logits)
        return gathered


def _no_loss(output: Any, non_loss_data: bool = True) -> Any:
    return None


def _loss_in(result: Any) -> Tensor:
    loss: Tensor = result if isinstance(result, Tensor) else result["loss"]
    return loss


def _probing(step_fn: Callable[..., Any]) -> Callable[..., Any]:
    def step(*args: Any) -> Any:
        return step_fn(*args, probe=True)

    return step
