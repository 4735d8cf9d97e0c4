"""What a model is made of: a row for each module, with its parameters, mode, operations and sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from drivetrain.callbacks.support.parameter_counts import ParameterCount, count_parameters
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.logging import get_logger
from drivetrain.runtime.nested import send_to_device
from drivetrain.runtime.seeds import isolated_random_state

if TYPE_CHECKING:
    from drivetrain.strategies import Strategy
    from drivetrain.strategies.precision import Precision

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

    Args:
        model: The model.
        max_depth: 1 for its own modules, 2 for those within them, and so on; -1 for all, 0 for none.
        strategy: What shards the model, if anything: all of it counts.
        precision: The number formats of the forward.

    Raises:
        ConfigurationError: If `max_depth` is no whole number of at least -1.
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
        return (type(module) if self._state is None else self._state.original_type(module)).__name__

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
    """Raise unless a depth can be.

    Raises:
        ConfigurationError: It is no whole number of at least -1.
    """
    if not isinstance(max_depth, int) or max_depth < -1:
        raise ConfigurationError(
            f"ModelSummary(max_depth={max_depth}): give 0 or more, or -1 for all modules.", code="DT-002"
        )


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
