"""Print what a task is made of."""

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
from drivetrain.runtime.logging import get_logger
from drivetrain.runtime.memory import parameter_size
from drivetrain.runtime.nested import send_to_device
from drivetrain.runtime.seeds import isolated_random_state
from drivetrain.runtime.terminal import print_text
from drivetrain.strategies.base import original_type

if TYPE_CHECKING:
    from drivetrain.strategies import Strategy
    from drivetrain.strategies.base import ModelState
    from drivetrain.strategies.precision import Precision
    from drivetrain.trainer.task import Task
    from drivetrain.trainer.trainer import Trainer


# How many parameters a model has, and what they take, with those that are frozen and stored in fewer bits


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
    """Count a model's parameters, each once; lazy ones have no elements yet."""
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


# What a model is made of: a row for each module, with its parameters, mode, operations and sizes


logger = get_logger(__name__)

UNKNOWN_SIZE = "?"
OTHER = "other params"
NOT_APPLICABLE = "n/a"
_UNITS = ((10**15, "P"), (10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K"))


@dataclass
class Layer:
    """One row.

    Attributes:
        name: The module's name in the model.
        kind: Its class.
        parameters: Elements of all parameters in it.
        mode: `"train"` or `"eval"`.
        flops: Floating-point operations of its part of a forward.
        in_size: The shape of its input, nested as the input is; `"?"` where it did not run.
        out_size: The same of its output.
    """

    name: str
    kind: str
    parameters: int
    mode: str
    flops: int = 0
    in_size: Any = UNKNOWN_SIZE
    out_size: Any = UNKNOWN_SIZE


class ModuleTable:
    """The modules of a model down to some depth.

    Where the model has an `example_input_array`, a forward runs with it once, in evaluation mode and without gradients,
    for sizes and operations; not where a strategy shards the model, whose forward needs all processes, nor where
    modules are lazy, which it would change.
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
        """The rows, each module before those within it."""
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
        return self._state is None or self._state.holds_whole

    @property
    def parameters(self) -> tuple[int, int]:
        """Elements of all parameters, and of those that are trained."""
        counted = self._count(self._model)
        return counted.elements, counted.trained

    @property
    def other_parameters(self) -> int:
        """Elements of the parameters that are in no module of the model."""
        return count_parameters(self._model, self._state, recurse=False).elements

    @property
    def megabytes(self) -> float:
        """What the parameters take, each as it is stored, in millions of bytes."""
        return self._count(self._model).nbytes / 1e6

    @property
    def modes(self) -> dict[str, int]:
        """Modules in each mode, the model itself left out."""
        inner = [module for module in self._model.modules() if module is not self._model]
        training = sum(module.training for module in inner)
        return {"train": training, "eval": len(inner) - training}

    @property
    def is_lazy(self) -> bool:
        """Whether a module has parameters that its first forward makes."""
        return any(isinstance(parameter, UninitializedParameter) for parameter in self._model.parameters())

    def columns(self) -> list[tuple[str, list[str]]]:
        """The columns of the table, each a title and its cells; operations and sizes where a forward has run."""
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

    def _kind(self, module: nn.Module) -> str:
        return original_type(module).__name__

    def _count(self, module: nn.Module) -> ParameterCount:
        return count_parameters(module, self._state)

    # a forward, for sizes and operations

    def _run(self, modules: Mapping[str, nn.Module], rows: Mapping[str, Layer]) -> None:
        given = _on_device_of(self._model, self._model.example_input_array)
        context: AbstractContextManager[Any] = nullcontext()
        if self._precision is not None:
            context, given = self._precision.forward_context(), self._precision.convert_batch(given)
        from torch.utils.flop_counter import FlopCounterMode  # not imported before it is used: it takes long

        counter = FlopCounterMode(display=False)
        modes = [(module, module.training) for module in self._model.modules()]
        with ExitStack() as stack:
            for name, module in modules.items():
                if not isinstance(module, torch.jit.ScriptModule):
                    handle = module.register_forward_hook(partial(_record_sizes, rows[name]), with_kwargs=True)
                    stack.callback(handle.remove)
            self._model.eval()
            stack.enter_context(torch.no_grad())
            stack.enter_context(isolated_random_state(devices=True))
            stack.enter_context(context)
            stack.enter_context(counter)
            try:
                _call(self._model, given)
            except Exception as error:
                logger.warning("The summary has no sizes: the model cannot run its example_input_array: %r.", error)
            else:
                self.has_run = True
            finally:
                for module, mode in modes:
                    module.training = mode
        counts = counter.get_flop_counts()
        self.total_flops = int(counter.get_total_flops())
        root = type(self._model).__name__
        for name, row in rows.items():
            row.flops = int(sum(counts.get(f"{root}.{name}", counts.get(name, {})).values()))


def check_depth(max_depth: Any) -> None:
    """Raise unless a depth can be."""
    if not isinstance(max_depth, int) or max_depth < -1:
        raise ConfigurationError(f"ModelSummary(max_depth={max_depth}): give 0 or more, or -1 for all modules.")


def short(count: int) -> str:
    """Write a count in few characters, such as `2.1 M`."""
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
    """The shape of a tensor, or those of nested ones."""
    if hasattr(value, "shape") and not isinstance(value, type):
        return list(value.shape) or UNKNOWN_SIZE
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_size(each) for each in value] or UNKNOWN_SIZE
    return UNKNOWN_SIZE


def _on_device_of(model: nn.Module, given: Any) -> Any:
    place = next((tensor.device for tensor in [*model.parameters(), *model.buffers()]), torch.device("cpu"))
    return given if place.type == "meta" else send_to_device(given, place)


def _call(model: nn.Module, given: Any) -> Any:
    if isinstance(given, Mapping):
        return model(**given)
    if isinstance(given, (list, tuple)):
        return model(*given)
    return model(given)


class ModelSummary(Callback):
    """Prints a table of the task's modules when fit begins, on the main process.

    Each module has its class, parameters and mode. A task with an `example_input_array` has also the operations of a
    forward with it (FLOPs) and the sizes of each module's input and output, but not where the strategy shards the
    model: its forward needs all processes. Below the table are the parameters and their size in MB. Quantised weights
    count with the elements that they had before, and with the bytes that they take.

    Args:
        max_depth: How deep to look: 1 for the task's own modules, 2 for those within them, and so on; -1 for
            all, 0 for the totals only.
        **summarize_kwargs: Given to `summarize`, for classes that override it.

    Raises:
        ConfigurationError: If `max_depth` is no whole number of at least -1.

    Example:
        ```python
        from drivetrain import ModelSummary, Trainer

        trainer = Trainer(callbacks=[ModelSummary(max_depth=2)], logger=False)
        ```
    """

    def __init__(self, max_depth: int = 1, **summarize_kwargs: Any) -> None:
        check_depth(max_depth)
        self.max_depth = max_depth
        self.summarize_options = summarize_kwargs

    def on_fit_start(self, trainer: Trainer, task: Task) -> None:
        if trainer.is_global_zero and not trainer.fast_dev_run:
            table = ModuleTable(task, self.max_depth, trainer.strategy, trainer.accelerator.precision)
            columns = table.columns()
            totals = (*table.parameters, table.megabytes, table.modes)
            self.summarize(columns, *totals, total_flops=table.total_flops, **self.summarize_options)
            if table.is_lazy:
                print_text("Lazy modules count from their first forward on.")

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
        """Print the table; override it to show the same in another way.

        Args:
            summary_data: The columns, each a title and its cells.
            total_parameters: Elements of all parameters.
            trainable_parameters: Elements of those that are trained.
            model_size: What the parameters take, in millions of bytes.
            total_training_modes: Modules in each mode, by its name.
            total_flops: Floating-point operations of a forward; 0 where none has run.
            **summarize_kwargs: What the callback was made with.
        """
        totals = total_lines(total_parameters, trainable_parameters, model_size, total_training_modes, total_flops)
        print_text("\n".join([*table_lines(summary_data), *totals]))


def summarize(model: nn.Module, max_depth: int = 1, strategy: Strategy | None = None) -> str:
    """Return a table of a model's modules and their parameters."""
    table = ModuleTable(model, max_depth, strategy)
    lines = table_lines(table.columns())
    return "\n".join([*lines, *total_lines(*table.parameters, table.megabytes, table.modes, table.total_flops)])


def table_lines(columns: Sequence[tuple[str, Sequence[str]]]) -> list[str]:
    """Return the table as lines; none where it has no rows."""
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
    """Return the columns that are shown: without numbers, and without operations where none were counted."""
    has_run = any(title == "In sizes" for title, _ in columns)
    return [column for column in columns if column[0] != " " and (has_run or column[0] != "FLOPs")]


def total_lines(
    parameters: int, trainable: int, megabytes: float, modes: Mapping[str, int], flops: int = 0
) -> list[str]:
    """Return the lines below the table."""
    counted = f", {short(flops)} floating-point operations in a forward" if flops else ""
    training, evaluating = modes["train"], modes["eval"]
    switched = f"; {training} modules train, {evaluating} are in evaluation mode" if evaluating else ""
    return [f"{parameters:,} parameters ({megabytes:,.3f} MB), {trainable:,} of them trainable{counted}{switched}"]
