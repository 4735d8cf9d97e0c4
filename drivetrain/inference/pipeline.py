"""Pipeline-parallel inference: the layers of a model split over processes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from drivetrain.checkpoint.export import open_weights
from drivetrain.inference.tensors import find_tied_parameters, locate, retie_parameters, set_module_tensor_to_device
from drivetrain.runtime.collectives import broadcast, broadcast_object_list
from drivetrain.runtime.errors import CheckpointError, ConfigurationError, nearest
from drivetrain.runtime.logging import get_logger
from drivetrain.runtime.pytrees import (
    batch_size_or_none,
    get_data_structure,
    initialize_tensors,
    is_leaf,
    recursively_apply,
    send_to_device,
)
from drivetrain.runtime.state import PartialState
from drivetrain.strategies.parallel.pipeline.split import StageLayout, choose_splits, lay_out
from drivetrain.strategies.parallel.pipeline.stage import CALL, Request, StagedModel

logger = get_logger(__name__)

ModuleT = TypeVar("ModuleT", bound=nn.Module)
_SPLITS = "split_points"
Weights = str | os.PathLike[str] | Mapping[str, Tensor]


class PipelineInference:
    """Model split into consecutive stages for inference, so that each process keeps and runs only its own stage.

    Every process must create the object from the same model and call it at the same times. The first process provides
    the inputs, and the last one gets the outputs.

    Args:
        model: The model. It may be on the meta device if `weights` are given. Each process keeps only its stage.
        split_points: Names of the modules that start the second and later stages. `"auto"` distributes the repeated
            blocks evenly by size.
        no_split_module_classes: Class names of the blocks. None detects them.
        example_args: Positional arguments of a forward, to check at once that the model can be split.
        example_kwargs: Keyword arguments of that forward.
        num_chunks: Number of micro-batches per call, or None for the world size. A batch with fewer rows is split into
            one-row micro-batches.
        gather_output: Return the outputs on all processes instead of the last one only.
        weights: Values of tensors on the meta device: a file, an index, a folder, or a dict. Each process reads its
            stage.
        in_flight: Maximum number of requests or micro-batches that a stage may be ahead of the next stage.
        pp_place: Stage index by name, for modules or parameters that the forward does not use in registration order.
            Error messages name them.

    Attributes:
        model: The model.
        split_points: Names of the modules that start the second and later stages.

    Raises:
        ConfigurationError: The model cannot be split at these points.
        CheckpointError: `weights` lack a tensor that is on the meta device.

    Example:
        ```text
        pipeline = PipelineInference(model)
        for output in pipeline.stream({"input_ids": each} for each in prompts):  # on the last process
            ...
        ```
    """

    def __init__(
        self,
        model: nn.Module,
        split_points: str | Sequence[str] = "auto",
        no_split_module_classes: Sequence[str] | None = None,
        example_args: Sequence[Any] = (),
        example_kwargs: Mapping[str, Any] | None = None,
        num_chunks: int | None = None,
        gather_output: bool = False,
        weights: Weights | None = None,
        in_flight: int = 4,
        pp_place: Mapping[str, int] | None = None,
    ) -> None:
        self._state = PartialState()
        for name, number in (("num_chunks", num_chunks), ("in_flight", in_flight)):
            if number is not None and number < 1:
                raise ConfigurationError(f"{name} is {number}, but must be at least 1.")
        self.model, self._chunks = model, num_chunks or self._state.num_processes
        self._gathers = gather_output
        loader = _Loader(weights, find_tied_parameters(model), self._state.device)
        self.split_points: list[str] = []
        self._staged: StagedModel | None = None
        if self._state.num_processes == 1:
            tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
            loader(model, [name for name, _ in tensors])
            return
        # An encoder and a decoder may each have a configuration of their own.
        configs = [getattr(module, "config", None) for module in model.modules()]
        for config in {id(each): each for each in configs if getattr(each, "use_cache", False)}.values():
            # Each stage would only have the cache of its own layers.
            config.use_cache = False  # type: ignore[union-attr]
            logger.info_once("%s is split over processes: config.use_cache is set to False.", type(model).__name__)
        layout = _lay_out(model, split_points, self._state.num_processes, no_split_module_classes or (), pp_place)
        self.split_points = list(layout.splits)
        self._staged = StagedModel(model, layout, self._state.device, loader, in_flight)
        if example_args or example_kwargs:
            self._staged.check(self._on_device((tuple(example_args), dict(example_kwargs or {}))))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on one batch, split into micro-batches.

        Returns the output on the last process. Call this on all processes. Tensors with the same first dimension as the
        first tensor are split along it.

        Args:
            *args: Positional arguments of the model.
            **kwargs: Keyword arguments of the model.

        Returns:
            The output on the last process, or on all processes with `gather_output`. None on other processes.
        """
        requests = _split(self._on_device((args, kwargs)), self._chunks) if self._state.is_main_process else ()
        results = [*self._run(requests)]
        output = None
        if self._state.is_last_process:
            output = _concatenate_outputs([result for _, result in results], [_rows(request) for request, _ in results])
        return self._broadcast_output(output) if self._gathers and self._staged is not None else output

    def stream(self, requests: Iterable[Any] | None = None) -> Iterator[Any]:
        """Run the model on each of many inputs, with all pipeline stages working in parallel, and yield the outputs.

        Call this on all processes, and iterate to the end on each.

        Args:
            requests: On the first process, an iterable of tuples (positional arguments), dicts (keyword arguments) or
                single arguments of any shape. It is consumed lazily.

        Yields:
            The outputs in the order of the requests, on the last process only.
        """
        given = (self._on_device(_as_request(each)) for each in requests or ())
        for _, output in self._run(given):
            yield output

    def _run(self, requests: Iterable[Request]) -> Iterator[tuple[Request, Any]]:
        if self._staged is not None:
            yield from self._staged.run(requests)
            return
        own: Any = self.model._call_impl  # calling the model may call this pipeline again
        for request in requests:
            with torch.no_grad():
                output = own(*request[0], **request[1])
            yield request, output

    def _on_device(self, request: Request) -> Request:
        moved: Request = send_to_device(request, self._state.device)
        return moved

    def _broadcast_output(self, output: Any) -> Any:
        last = self._state.num_processes - 1
        structure = get_data_structure(output) if self._state.is_last_process else None
        structure = broadcast_object_list([structure], from_process=last)[0]
        held = output if self._state.is_last_process else initialize_tensors(structure, self._state.device)
        return recursively_apply(lambda tensor: broadcast(tensor, from_process=last), held)


def prepare_pippy(
    model: ModuleT,
    split_points: str | Sequence[str] = "auto",
    no_split_module_classes: Sequence[str] | None = None,
    example_args: Sequence[Any] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    num_chunks: int | None = None,
    gather_output: bool = False,
    weights: Weights | None = None,
    pp_place: Mapping[str, int] | None = None,
) -> ModuleT:
    """Split a model into pipeline stages, one for each process.

    Calling the model then runs all stages.

    Args:
        model: The model. See `PipelineInference` for all arguments.
        split_points: `"auto"`, or names of the modules that start the second and later stages.
        no_split_module_classes: Class names of the blocks that are not split.
        example_args: Positional arguments of a forward.
        example_kwargs: Keyword arguments of that forward.
        num_chunks: Number of micro-batches per call.
        gather_output: Return the outputs on all processes.
        weights: Values of tensors on the meta device.
        pp_place: Stage index by name, for modules or parameters that the forward does not use in registration order.

    Returns:
        The model. Calls return the output on the last process, and None on the others unless `gather_output` is True.
        The attribute `hf_split_points` contains the names of the modules that start stages.

    Raises:
        ConfigurationError: The model cannot be split at these points.
    """
    pipeline = PipelineInference(
        model,
        split_points,
        no_split_module_classes,
        example_args,
        example_kwargs,
        num_chunks,
        gather_output,
        weights,
        pp_place=pp_place,
    )
    # Replaces the model's call, so that `model(...)` runs the pipeline.
    vars(model)[CALL] = pipeline
    vars(model)["hf_split_points"] = pipeline.split_points
    return model


def _lay_out(
    model: nn.Module,
    split_points: str | Sequence[str],
    count: int,
    classes: Sequence[str],
    placed: Mapping[str, int] | None,
) -> StageLayout:
    if isinstance(split_points, str) and split_points != "auto":
        raise ConfigurationError(f"split_points is {split_points!r}, but must be 'auto' or a list of module names.")
    splits = choose_splits(model, count, classes, _SPLITS) if isinstance(split_points, str) else tuple(split_points)
    if len(splits) != count - 1:
        raise ConfigurationError(
            f"split_points={list(splits)} makes {len(splits) + 1} stages, but there are {count} processes. Pass "
            f"{count - 1} module names, or start {len(splits) + 1} processes.",
        )
    # Two stages cannot share a parameter. Ties within one stage are restored below.
    ties = find_tied_parameters(model)
    for name in (name for group in ties for name in group[1:]):
        path, _, last = name.rpartition(".")
        parameter = model.get_parameter(name)
        model.get_submodule(path)._parameters[last] = nn.Parameter(parameter.data, parameter.requires_grad)
    layout = lay_out(model, splits, placed, _SPLITS)
    for group in ties:
        for stage in range(count):
            own = [name for name in group if layout.owners[name] == stage]
            retie_parameters(model, [own] if own else [])
    return layout


class _Loader:
    def __init__(self, weights: Weights | None, ties: Sequence[Sequence[str]], device: torch.device) -> None:
        self._weights, self._device = weights, device
        self._others = {name: group for group in ties for name in group}

    def __call__(self, model: nn.Module, names: Sequence[str]) -> None:
        saved = model.state_dict(keep_vars=True)
        own = {name: saved[name] for name in names if name in saved}
        empty = [name for name, tensor in own.items() if tensor.is_meta]
        if self._weights is not None:
            self._fill(model, own, self._weights)
        elif empty:
            raise ConfigurationError(
                f"{len(empty)} tensors of this stage are on the meta device, such as {empty[0]!r}. Pass a file or "
                "folder to load them from as weights=...",
            )
        moved: dict[int, Tensor] = {}
        for module in model.modules():
            tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            for table in tables:
                for name, tensor in table.items():
                    if tensor is not None and not tensor.is_meta and id(tensor) not in moved:
                        set_module_tensor_to_device(module, name, self._device, clear_cache=False)
                        moved[id(tensor)] = table[name]
                    elif tensor is not None and not tensor.is_meta:
                        table[name] = moved[id(tensor)]

    def _fill(self, model: nn.Module, own: Mapping[str, Tensor], weights: Weights) -> None:
        known = {name: self._others.get(name, [name]) for name in own}
        held = open_weights(weights)
        present = set(held)
        placed: dict[str, Tensor] = {}
        for name, names in known.items():
            source = next((each for each in (name, *names) if each in present), None)
            if source is not None:
                table, last = locate(model, name)
                if source not in placed:
                    set_module_tensor_to_device(model, name, self._device, value=held[source])
                    placed[source] = table[last]
                table[last] = placed[source]
            elif isinstance(own[name], nn.Parameter) or own[name].is_meta:
                raise CheckpointError(f"The weights have no {name!r}.{nearest(name, present)}")


def _as_request(given: Any) -> Request:
    if isinstance(given, tuple):
        return given, {}
    return ((), dict(given)) if isinstance(given, Mapping) else ((given,), {})


def _rows(request: Request) -> int | None:
    return batch_size_or_none(request)


def _split(request: Request, count: int) -> Iterator[Request]:
    rows = _rows(request)
    if rows is None or min(count, rows) <= 1:
        yield request
        return
    count = min(count, rows)
    each, more = divmod(rows, count)
    start = 0
    for index in range(count):
        end = start + each + (index < more)

        # The defaults bind the values of this iteration.
        def part(tensor: Tensor, start: int = start, end: int = end) -> Tensor:
            return tensor[start:end] if tensor.dim() and tensor.size(0) == rows else tensor

        yield recursively_apply(part, request)
        start = end


def _concatenate_outputs(outputs: Sequence[Any], rows: Sequence[int | None]) -> Any:
    if len(outputs) == 1:
        return outputs[0]
    columns = list[list[Any]]()
    for output, count in zip(outputs, rows, strict=True):
        columns.append([])
        recursively_apply(columns[-1].append, output, test_type=is_leaf)
        for leaf in columns[-1]:
            if leaf is not None and not (isinstance(leaf, Tensor) and leaf.dim() and leaf.size(0) == count):
                what = f"a tensor of shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else type(leaf).__name__
                raise ConfigurationError(
                    f"The model returns {what} for a micro-batch of {count} rows, so results cannot be concatenated. "
                    "Set num_chunks=1, or do not return this value (such as with use_cache=False).",
                )
    whole = iter([None if parts[0] is None else torch.cat(parts) for parts in zip(*columns, strict=True)])
    return recursively_apply(lambda _: next(whole), outputs[0], test_type=is_leaf)
