"""Callback that prints a summary table of the task's modules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from drivetrain.callbacks.base import Callback
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.logging import collect, get_logger
from drivetrain.runtime.memory import parameter_size
from drivetrain.runtime.pytrees import send_to_device
from drivetrain.runtime.seeds import isolated_random_state
from drivetrain.runtime.terminal import print_text
from drivetrain.strategies.base import original_type

if TYPE_CHECKING:
    from drivetrain.strategies import Strategy
    from drivetrain.strategies.base import ModelState
    from drivetrain.strategies.precision import Precision
    from drivetrain.trainer.task import Task
    from drivetrain.trainer.trainer import Trainer


# Parameter counts


@dataclass(frozen=True)
class ParameterCount:
    """Number of elements and size in bytes of a model's parameters."""

    elements: int  # of quantized weights, their number before quantization
    trained: int
    nbytes: int  # as stored


def count_parameters(model: nn.Module, state: ModelState | None = None, recurse: bool = True) -> ParameterCount:
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
                continue  # counted in `frozen_size`
            whole, is_trained = (
                (parameter.numel(), parameter.requires_grad) if state is None else state.describe(parameter)
            )
            own, size = parameter_size(module, name, parameter, whole)
            elements, nbytes, trained = elements + own, nbytes + size, trained + own * is_trained
    return ParameterCount(elements, trained, nbytes)


# Module table


logger = get_logger(__name__)

UNKNOWN_SIZE = "?"
OTHER = "other params"
NOT_APPLICABLE = "n/a"
_UNITS = ((10**15, "P"), (10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K"))


@dataclass
class Layer:
    """Row of the model summary table that describes one module.

    Attributes:
        name: The name of the module in the model.
        kind: The class name of the module.
        parameters: The number of elements of all its parameters.
        mode: `"train"` or `"eval"`.
        flops: The number of floating-point operations in a forward pass.
        in_size: The shape of the input, nested as the input is, or `"?"` if the module did not run.
        out_size: The shape of the output, nested as the output is, or `"?"` if the module did not run.
    """

    name: str
    kind: str
    parameters: int
    mode: str
    flops: int = 0
    in_size: Any = UNKNOWN_SIZE
    out_size: Any = UNKNOWN_SIZE


class ModuleTable:
    """Summary table of a model's modules, down to a given depth.

    If the model has an `example_input_array`, one forward pass in eval mode without gradients measures sizes and
    FLOPs. It is skipped if the strategy shards the model, since the forward pass would then need all processes. It is
    also skipped for lazy modules, which it would initialize.
    """

    def __init__(
        self,
        model: nn.Module,
        max_depth: int = 1,
        strategy: Strategy | None = None,
        precision: Precision | None = None,
    ) -> None:
        check_depth(max_depth)
        self._model, self._max_depth = model, max_depth
        self._state = None if strategy is None else strategy.state
        self._precision = precision
        self.total_flops = 0
        self.has_run = False

    @cached_property
    def layers(self) -> list[Layer]:
        """The rows of a `ModelSummary`'s table, one for each module of the model."""
        modules = dict(_modules(self._model, "", self._max_depth))
        rows = {
            name: Layer(name, self._kind(module), self._count(module).elements, "train" if module.training else "eval")
            for name, module in modules.items()
        }
        if getattr(self._model, "example_input_array", None) is not None and self._runs_alone and not self.is_lazy:
            self._run(modules, rows)
        return list(rows.values())

    @property
    def _runs_alone(self) -> bool:
        return self._state is None or self._state.held_as == "whole"

    @property
    def parameters(self) -> tuple[int, int]:
        counted = self._count(self._model)
        return counted.elements, counted.trained

    @property
    def other_parameters(self) -> int:
        return count_parameters(self._model, self._state, recurse=False).elements

    @property
    def megabytes(self) -> float:
        """The memory that the parameters occupy, in millions of bytes."""
        return self._count(self._model).nbytes / 1e6

    @property
    def modes(self) -> dict[str, int]:
        inner = [module for module in self._model.modules() if module is not self._model]
        training = sum(module.training for module in inner)
        return {"train": training, "eval": len(inner) - training}

    @property
    def is_lazy(self) -> bool:
        return any(isinstance(parameter, UninitializedParameter) for parameter in self._model.parameters())

    def columns(self) -> list[tuple[str, list[str]]]:
        """Return the summary table as columns, each with a title and cells."""
        layers = list(self.layers)
        others = self.other_parameters if layers else 0
        extra = [Layer(OTHER, NOT_APPLICABLE, others, NOT_APPLICABLE, 0, NOT_APPLICABLE, NOT_APPLICABLE)]
        shown = layers + (extra if others else [])
        columns = [
            (" ", [*map(str, range(len(layers))), *([" "] if others else [])]),
            ("Name", [layer.name for layer in shown]),
            ("Type", [layer.kind for layer in shown]),
            ("Params", [short(layer.parameters) for layer in shown]),
            ("Mode", [layer.mode for layer in shown]),
            ("FLOPs", [short(layer.flops) for layer in shown]),
        ]
        if self.has_run:
            columns.append(("In sizes", [str(layer.in_size) for layer in shown]))
            columns.append(("Out sizes", [str(layer.out_size) for layer in shown]))
        return columns

    @staticmethod
    def random_state() -> AbstractContextManager[Any]:
        return isolated_random_state(devices=True)

    def _kind(self, module: nn.Module) -> str:
        return original_type(module).__name__

    def _count(self, module: nn.Module) -> ParameterCount:
        return count_parameters(module, self._state)

    def _run(self, modules: Mapping[str, nn.Module], rows: Mapping[str, Layer]) -> None:
        given = _on_device_of(self._model, self._model.example_input_array)
        context: AbstractContextManager[Any] = nullcontext()
        if self._precision is not None:
            # The example input may have another dtype than a converted model expects.
            context, given = self._precision.forward_context(), self._precision.convert_batch(given)
        from torch.utils.flop_counter import FlopCounterMode  # slow to import

        counter = FlopCounterMode(display=False)
        modes = [(module, module.training) for module in self._model.modules()]
        with ExitStack() as stack:
            for name, module in modules.items():
                if not isinstance(module, torch.jit.ScriptModule):
                    handle = module.register_forward_hook(partial(_record_sizes, rows[name]), with_kwargs=True)
                    stack.callback(handle.remove)
            self._model.eval()
            stack.enter_context(torch.no_grad())
            stack.enter_context(self.random_state())
            stack.enter_context(context)
            stack.enter_context(counter)
            try:
                _call(self._model, given)
            except Exception as error:
                logger.warning("The summary shows no sizes: the model failed on its example_input_array: %r.", error)
            else:
                self.has_run = True
            finally:
                for module, mode in modes:
                    module.training = mode
        counts = counter.get_flop_counts()
        self.total_flops = int(counter.get_total_flops())
        root = type(self._model).__name__
        for name, row in rows.items():
            # The counter's module names begin with the class of the root module.
            row.flops = int(sum(counts.get(f"{root}.{name}", counts.get(name, {})).values()))


def check_depth(max_depth: Any) -> None:
    if not isinstance(max_depth, int) or max_depth < -1:
        raise ConfigurationError(f"ModelSummary(max_depth={max_depth}): use 0 or more, or -1 for all modules.")


def short(count: int) -> str:
    """Format a large count with one decimal place and a unit: 2,100,000 becomes `2.1 M`."""
    for size, unit in _UNITS:
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return str(count)


def _modules(model: nn.Module, prefix: str, depth: int) -> Iterator[tuple[str, nn.Module]]:
    if depth == 0:
        return
    for name, module in model.named_children():
        yield f"{prefix}{name}", module
        yield from _modules(module, f"{prefix}{name}.", depth - 1)


def _record_sizes(row: Layer, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    given = [*args, *kwargs.values()]
    row.in_size = _size(given[0] if len(given) == 1 else given)
    row.out_size = _size(output)


def _size(value: Any) -> Any:
    if hasattr(value, "shape") and not isinstance(value, type):
        return list(value.shape) or UNKNOWN_SIZE
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_size(each) for each in value] or UNKNOWN_SIZE
    return UNKNOWN_SIZE


def _on_device_of(model: nn.Module, given: Any) -> Any:
    place = next((tensor.device for tensor in [*model.parameters(), *model.buffers()]), torch.device("cpu"))
    # A model on the meta device has no data, so its input need not be moved.
    return given if place.type == "meta" else send_to_device(given, place)


def _call(model: nn.Module, given: Any) -> Any:
    if isinstance(given, Mapping):
        return model(**given)
    if isinstance(given, (list, tuple)):
        return model(*given)
    return model(given)


class ModelSummary(Callback):
    """Callback that prints a table of the task's modules when `fit` begins, on the main process.

    Each row shows the name, class, parameters and mode of a module. If the task has an `example_input_array`, the
    table also shows the FLOPs of a forward pass and the input and output sizes. They are omitted if the strategy
    shards the model, since a forward pass would then need all processes. Below the table stand the number of
    parameters and their size in MB. Quantized weights count with their elements before quantization, and with the
    bytes that they occupy.

    Args:
        max_depth: The depth of the table: 1 for the task's direct submodules, 2 for their submodules too, -1 for all,
            or 0 for the totals only.
        **summarize_kwargs: Keyword arguments that are passed on to `summarize`, for subclasses that override it.

    Raises:
        ConfigurationError: If `max_depth` is not an int of at least -1.

    Example:
        ```python
        from drivetrain import ModelSummary, Trainer

        trainer = Trainer(callbacks=[ModelSummary(max_depth=2)], logger=False)
        ```
    """

    table_type: type[ModuleTable] = ModuleTable

    def __init__(self, max_depth: int = 1, **summarize_kwargs: Any) -> None:
        check_depth(max_depth)
        self.max_depth = max_depth
        self.summarize_options = summarize_kwargs

    def on_fit_start(self, trainer: Trainer, task: Task) -> None:
        if trainer.fast_dev_run:
            return
        table = self.table_type(task, self.max_depth, trainer.strategy, trainer.accelerator.precision)
        # On every rank: the forward pass of a subclass may draw random numbers, and ranks must not drift apart.
        columns = table.columns()
        if trainer.is_global_zero:
            totals = (*table.parameters, table.megabytes, table.modes)
            self.summarize(columns, *totals, total_flops=table.total_flops, **self.summarize_options)
            if table.is_lazy:
                print_text("Lazy modules are counted only after their first forward pass.")

    @staticmethod
    def summarize(
        summary_data: list[tuple[str, list[str]]],
        total_parameters: int,
        trainable_parameters: int,
        model_size: float,
        total_training_modes: dict[str, int],
        total_flops: int = 0,
        **summarize_kwargs: Any,
    ) -> None:
        """Print the model summary: the table and the totals below it.

        Override it to show the summary differently.

        Args:
            summary_data: The columns, each a title and its cells.
            total_parameters: The number of elements of all parameters.
            trainable_parameters: The number of trainable elements.
            model_size: The size of the parameters in millions of bytes.
            total_training_modes: The number of modules in `"train"` and in `"eval"` mode.
            total_flops: The number of floating-point operations in a forward pass, or 0 if none has run.
            **summarize_kwargs: Keyword arguments that were passed to the callback.
        """
        totals = total_lines(total_parameters, trainable_parameters, model_size, total_training_modes, total_flops)
        text = "\n".join([*table_lines(summary_data), *totals])
        collect(text)
        print_text(text)


def summarize(model: nn.Module, max_depth: int = 1, strategy: Strategy | None = None) -> str:
    """Return a text table of a model's modules with their parameter counts, as `ModelSummary` prints it.

    Args:
        model: The model.
        max_depth: The depth of the table: 1 for the direct submodules, -1 for all, or 0 for the totals only.
        strategy: The strategy that has wrapped the model, to count sharded parameters in full, or None.
    """
    table = ModuleTable(model, max_depth, strategy)
    lines = table_lines(table.columns())
    return "\n".join([*lines, *total_lines(*table.parameters, table.megabytes, table.modes, table.total_flops)])


def table_lines(columns: Sequence[tuple[str, Sequence[str]]]) -> list[str]:
    if not columns[0][1]:
        return []
    columns = shown_columns(columns)
    widths = [max(map(len, (title, *cells))) for title, cells in columns]
    rows: list[Sequence[str]] = [
        [title.lower() for title, _ in columns],
        *zip(*(cells for _, cells in columns), strict=True),
    ]
    right = [title in ("Params", "FLOPs") for title, _ in columns]
    layout = list(zip(widths, right, strict=True))
    lines = [
        "  ".join(cell.rjust(w) if flush else cell.ljust(w) for cell, (w, flush) in zip(row, layout, strict=True))
        for row in rows
    ]
    rule = "-" * len(lines[0])
    return [lines[0], rule, *(line.rstrip() for line in lines[1:]), rule]


def shown_columns(columns: Sequence[tuple[str, Sequence[str]]]) -> list[tuple[str, Sequence[str]]]:
    has_run = any(title == "In sizes" for title, _ in columns)
    # FLOPs are known only after a forward pass.
    return [column for column in columns if column[0] != " " and (has_run or column[0] != "FLOPs")]


def total_lines(
    parameters: int, trainable: int, megabytes: float, modes: Mapping[str, int], flops: int = 0
) -> list[str]:
    counted = f", {short(flops)} floating-point operations in a forward" if flops else ""
    training, evaluating = modes["train"], modes["eval"]
    switched = f"; {training} modules train, {evaluating} are in evaluation mode" if evaluating else ""
    return [f"{parameters:,} parameters ({megabytes:,.3f} MB), {trainable:,} of them trainable{counted}{switched}"]
