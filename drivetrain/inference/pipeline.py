"""Models whose layers are spread over processes, for inference."""

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
    """Runs a model whose layers are spread over all processes of the run, a stage on each.

    Every process makes it of the same model and calls it at the same times. The inputs of the first process count; the
    last one has the outputs.

    Args:
        model: The model. It may be on the meta device, with `weights` given; only this process's stage is kept.
        split_points: Names of the modules that the second and later stages begin with; `"auto"` spreads the blocks
            that repeat evenly by their sizes.
        no_split_module_classes: Names of the classes of these blocks; found by themselves if None.
        example_args: Positional arguments of a call, to find out at once whether the model can be split so.
        example_kwargs: Keyword arguments of that call.
        num_chunks: How many parts a call splits its batch into, so that all stages have work; as many as there are
            processes if None. A smaller batch is split into fewer.
        gather_output: Whether all processes get the outputs of a call, rather than the last one alone.
        weights: Where tensors on the meta device come from: a file, an index or a directory of weights, or a mapping.
            Each process reads those of its stage.
        in_flight: How many requests or parts of a batch a stage may be ahead of the next one.
        pp_place: Stages of modules or parameters that are registered in another order than that in which the forward
            uses them, by name; errors name those.

    Attributes:
        model: The model.
        split_points: Names of the modules that the second and later stages begin with.

    Raises:
        ConfigurationError: The model cannot be split so.
        CheckpointError: `weights` do not hold all that is on the meta device.

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
                raise ConfigurationError(f"{name} must be at least 1, got {number}.")
        self.model, self._chunks = model, num_chunks or self._state.num_processes
        self._gathers = gather_output
        loader = _Loader(weights, find_tied_parameters(model), self._state.device)
        self.split_points: list[str] = []
        self._staged: StagedModel | None = None
        if self._state.num_processes == 1:
            tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
            loader(model, [name for name, _ in tensors])
            return
        _return_no_cache(model)
        layout = _lay_out(model, split_points, self._state.num_processes, no_split_module_classes or (), pp_place)
        self.split_points = list(layout.splits)
        self._staged = StagedModel(model, layout, self._state.device, loader, in_flight)
        if example_args or example_kwargs:
            self._staged.check(self._on_device((tuple(example_args), dict(example_kwargs or {}))))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on one batch, split into parts that follow each other through the stages.

        Call it on all processes. Tensors whose first dimension is that of the first tensor are split along it.

        Args:
            *args: Positional arguments of the model.
            **kwargs: Keyword arguments of the model.

        Returns:
            The output, on the last process or, with `gather_output`, on all; else None.
        """
        requests = _parts(self._on_device((args, kwargs)), self._chunks) if self._state.is_main_process else ()
        results = [*self._run(requests)]
        output = None
        if self._state.is_last_process:
            output = _merged([result for _, result in results], [_rows(request) for request, _ in results])
        return self._to_all(output) if self._gathers and self._staged is not None else output

    def stream(self, requests: Iterable[Any] | None = None) -> Iterator[Any]:
        """Run requests one after the other; a stage computes one while the stage before it computes the next.

        Call it on all processes, and iterate to the end.

        Args:
            requests: On the first process: tuples of positional arguments, mappings of keyword arguments, or single
                arguments. They may be of any shapes, and are asked for as they are needed.

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
        own: Any = self.model._call_impl  # not the call, which may lead here
        for request in requests:
            with torch.no_grad():
                output = own(*request[0], **request[1])
            yield request, output

    def _on_device(self, request: Request) -> Request:
        moved: Request = send_to_device(request, self._state.device)
        return moved

    def _to_all(self, output: Any) -> Any:
        """Give all processes what the last one has."""
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
    """Spread a model over all processes of the run, so that calling it runs through all of its stages.

    Args:
        model: The model; see `PipelineInference` for this and all that follows.
        split_points: `"auto"`, or names of the modules that stages begin with.
        no_split_module_classes: Names of the classes of blocks that stay whole.
        example_args: Positional arguments of a call.
        example_kwargs: Keyword arguments of that call.
        num_chunks: How many parts a batch is split into.
        gather_output: Whether all processes get the output.
        weights: Where tensors on the meta device come from.
        pp_place: Stages of modules or parameters that are registered in another order than they are used in.

    Returns:
        The model. Calls return the output on the last process, and None on the others unless `gather_output` is set.
        `hf_split_points` are the names of the modules that stages begin with.

    Raises:
        ConfigurationError: The model cannot be split so.
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
    vars(model)[CALL] = pipeline
    vars(model)["hf_split_points"] = pipeline.split_points
    return model


def _return_no_cache(model: nn.Module) -> None:
    """Have a model of transformers return no cache of keys and values: each stage has its own layers' alone."""
    configs = [getattr(module, "config", None) for module in model.modules()]  # an encoder and a decoder have their own
    for config in {id(each): each for each in configs if getattr(each, "use_cache", False)}.values():
        config.use_cache = False  # type: ignore[union-attr]
        logger.info_once("%s is spread over processes, so config.use_cache is off.", type(model).__name__)


def _lay_out(
    model: nn.Module,
    split_points: str | Sequence[str],
    count: int,
    classes: Sequence[str],
    placed: Mapping[str, int] | None,
) -> StageLayout:
    """The stages of a model; a tie between two of them is undone, since neither is trained."""
    if isinstance(split_points, str) and split_points != "auto":
        raise ConfigurationError(f"split_points must be 'auto' or a list of module names, got {split_points!r}.")
    splits = choose_splits(model, count, classes, _SPLITS) if isinstance(split_points, str) else tuple(split_points)
    if len(splits) != count - 1:
        raise ConfigurationError(
            f"split_points={list(splits)} makes {len(splits) + 1} stages, but there are {count} processes; name "
            f"{count - 1} modules, or start {len(splits) + 1} processes.",
        )
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
    """Gives tensors on the meta device their values, and brings a model onto a device."""

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
                f"{len(empty)} tensors of this stage are on the meta device, such as {empty[0]!r}; give weights=, a "
                "file or a directory to load them from.",
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


def _parts(request: Request, count: int) -> Iterator[Request]:
    """A batch in parts of about equally many rows, at most so many."""
    rows = _rows(request)
    if rows is None or min(count, rows) <= 1:
        yield request
        return
    count = min(count, rows)
    each, more = divmod(rows, count)
    start = 0
    for index in range(count):
        end = start + each + (index < more)

        def part(tensor: Tensor, start: int = start, end: int = end) -> Tensor:
            return tensor[start:end] if tensor.dim() and tensor.size(0) == rows else tensor

        yield recursively_apply(part, request)
        start = end


def _merged(outputs: Sequence[Any], rows: Sequence[int | None]) -> Any:
    """The output for a whole batch out of those for its parts."""
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
                    f"The model returns {what} for a part of {count} rows, which cannot be put together with those of "
                    "the other parts. Set num_chunks=1, or have it not returned (as with use_cache=False).",
                )
    whole = iter([None if parts[0] is None else torch.cat(parts) for parts in zip(*columns, strict=True)])
    return recursively_apply(lambda _: next(whole), outputs[0], test_type=is_leaf)
