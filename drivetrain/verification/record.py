"""Program that `drivetrain verify` runs in each process: the user's script, and a recorder of its first steps."""

from __future__ import annotations

import hashlib
import json
import math
import os
import pickle
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drivetrain.runtime import observer
from drivetrain.runtime.environment import ProcessEnvironment
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.memory import is_out_of_memory
from drivetrain.runtime.seeds import GENERATORS, set_seed
from drivetrain.trackers.base import Tracker
from drivetrain.verification.loaders import counts_of, joined, rows_of, seed_of
from drivetrain.verification.row_random import RowRandom

SAMPLES = 64
"""Number of elements that are recorded of each parameter and gradient."""
SUMS = 64
"""Number of sums that are recorded of each gradient and buffer."""
_BLOCK = 2**17
"""Number of elements that are summed at once."""
_EVALUATION_BATCHES = 8
"""Largest number of batches of a loader that is not trained on."""
SEED = 20240
"""Seed of a script that sets none."""


@dataclass(frozen=True)
class Recording:
    """Options that `drivetrain verify` passes to each process, which records the script's training steps.

    Attributes:
        folder: Folder for the records, and for what the script saves.
        steps: Number of steps of each optimizer.
        shards: Number of batches of the script's loaders that become one batch. 1 leaves loaders unchanged.
        processes: Number of processes that prepared schedulers step for, or None for that of the run.
        reversed: True to reverse the rows of each batch.
        strategy: Strategy in place of the script's, such as `"fsdp"` or `"fsdp+pp2"`, see `strategy_of`. None keeps it.
        precision: Name of the precision in place of the script's, or None.
        uneven_over: Number of processes for which epochs are cut so that their last batch is not full, or None.
        stop_after: Number of steps after which the process gets SIGTERM, as from a cluster that needs the machine.
        options: Options to add to the script's command line, which a `TrainerCLI` parses: `"model.layers=2"`.
        output: Folder for what the script saves in place of `folder`, or None.
    """

    folder: str
    steps: int = 8
    shards: int = 1
    processes: int | None = None
    reversed: bool = False
    strategy: str | None = None
    precision: str | None = None
    uneven_over: int | None = None
    stop_after: int | None = None
    options: Sequence[str] = ()
    output: str | None = None


class SilentTracker(Tracker):
    """Tracker that only forwards the logged values to the function `log`, and stores nothing."""

    in_background = False

    def __init__(self, log: Callable[[Mapping[str, Any], int | None], None]) -> None:
        self.name = "verify"  # type: ignore[misc]
        self._log = log

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        pass

    def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        self._log(values, step)

    @property
    def tracker(self) -> Any:
        return self


@cache
def _positions(name: str, size: int) -> Tensor:
    # The positions depend only on name and size, so that all runs record equal elements.
    if size <= SAMPLES:
        return torch.arange(size)
    generator = torch.Generator().manual_seed(seed_of(name, size))
    return torch.randint(size, (SAMPLES,), generator=generator)


def _whole(tensor: Tensor) -> Tensor:
    full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.to_dense() if full.is_sparse else full


def _flat(tensor: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1)
    return torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat


def _elements(name: str, tensor: Tensor) -> list[float]:
    flat = _flat(tensor)
    values: list[float] = flat[_positions(name, flat.numel()).to(flat.device)].double().tolist()
    return values


@cache
def _signs(count: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    bits = torch.randint(2, (count,), generator=torch.Generator().manual_seed(SEED))
    return (2 * bits - 1).to(device, dtype)


def sums_of(tensor: Tensor) -> list[float]:
    """Reduce a tensor to at most 64 sums, so that tensors of two runs can be compared without storing either.

    Each is a sum over a part of the tensor with pseudorandom signs. This is a count sketch: the root of the sum of
    their squares is about the norm of the tensor. Tensors that differ, in a few elements or in many, have sums that
    differ by about as much, whereas norms hardly change with a few elements of a large tensor.
    """
    flat = _flat(tensor)
    if not flat.numel():
        return []
    sums = []
    with torch.autocast(flat.device.type, enabled=False):
        # Blocks are converted in the cache, and their sums keep more digits than those of all elements in float32.
        for block in torch.split(flat, _BLOCK):
            values = block if block.dtype == torch.float64 else block.float()
            parts = (F.pad(values, (0, -len(values) % SUMS)) if len(values) % SUMS else values).view(SUMS, -1)
            sums.append(parts @ _signs(parts.shape[1], parts.device, parts.dtype))
        blocks = torch.stack(sums).double()
        total: list[float] = (_signs(len(blocks), blocks.device, blocks.dtype) @ blocks)[: flat.numel()].tolist()
    return total


def _common_factor(values: Sequence[float], others: Sequence[float]) -> float | None:
    largest = max(map(abs, others), default=0.0)
    if not 0.0 < largest < math.inf:
        return None
    factor = max(map(abs, values)) / largest
    is_common = all(abs(a - factor * b) <= 1e-6 * factor * largest for a, b in zip(values, others, strict=True))
    return factor if is_common and factor > 0 else None


def _digest(state: Any) -> str:
    data = bytes(state.numpy()) if isinstance(state, Tensor) else pickle.dumps(state)
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def strategy_of(spec: str) -> Any:
    """Return the strategy that `spec` names, such as `fsdp` or `fsdp+tp2`.

    Args:
        spec: A registered name, `deepspeed:3` for a stage, or sizes of `Parallel` joined by "+", such as `fsdp+tp2`.
    """
    from drivetrain.strategies.registry import resolve_strategy

    named = spec.replace("deepspeed:", "deepspeed_stage_").split("+")
    sizes = {found[1]: int(found[2]) for part in named if (found := re.fullmatch(r"(tp|cp|pp)(\d+)", part))}
    rest = "+".join(part for part in named if not re.fullmatch(r"(tp|cp|pp)\d+", part))
    environment = ProcessEnvironment.detect()
    if not sizes:
        return resolve_strategy(rest, environment)
    from drivetrain.strategies.parallel import Parallel

    copies = environment.world_size // math.prod(sizes.values())
    data_parallel = {"": {}, "fsdp": {}, "ddp": {"dp_replicate": copies, "dp_shard": 1}}
    if rest not in data_parallel:
        raise ConfigurationError(f"strategy {spec!r} is not valid. Sizes go with ddp or fsdp, as in fsdp+tp2.")
    options: dict[str, Any] = {**sizes, **data_parallel[rest]}
    if "tp" in sizes:
        options["tp_plan"] = "auto"
    return Parallel(**options)


@dataclass(eq=False)
class Recorder(observer.Observer):
    """Recorder of the first optimizer steps of a user's script, to compare them with those of another run.

    Attributes:
        asked: The recording options.
        random: Mode that replaces the random numbers of a step.
        record: The result, as in the JSON file.
    """

    asked: Recording
    random: RowRandom = field(default_factory=RowRandom)
    record: dict[str, Any] = field(default_factory=lambda: {"steps": [], "logged": []})
    _step: dict[str, Any] = field(default_factory=dict)
    _engine: Any = None
    _precision: Any = None
    _prepared: Any = None
    _counts: dict[int, int] = field(default_factory=dict)
    _open: list[int] = field(default_factory=list)  # loaders that are being iterated, by number
    _loaders: list[Any] = field(default_factory=list)
    _training: set[int] = field(default_factory=set)
    _has_command_line: bool = False
    _evaluated: bool = False  # since the last step

    @property
    def is_done(self) -> bool:
        return bool(self._counts) and min(self._counts.values()) >= self.asked.steps

    # observer

    def command_line(self, arguments: Sequence[str] | None) -> Sequence[str]:
        self._has_command_line = True
        given = sys.argv[1:] if arguments is None else arguments
        return [*given, *(f"--{option}" for option in self.asked.options)]

    def strategy(self) -> Any:
        if self.asked.options and not self._has_command_line:
            self.record["ignores_options"] = True
            sys.exit(0)
        return None if self.asked.strategy is None else strategy_of(self.asked.strategy)

    def precision(self) -> str | None:
        return self.asked.precision

    def processes(self, count: int) -> int:
        return self.asked.processes or count

    def loader(self, loader: Any) -> Any:
        asked = self.asked
        return joined(loader, asked.shards, is_reversed=asked.reversed, uneven_over=asked.uneven_over)

    def model(self, model: nn.Module) -> None:
        model.register_forward_pre_hook(self._see_inputs, with_kwargs=True)

    def trackers(self, trackers: list[Any]) -> list[Any]:
        return [SilentTracker(self._log)]

    def directory(self, path: str) -> str:
        inside = os.path.join(self.asked.output or self.asked.folder, "output")
        full = os.path.abspath(path)
        return path if full.startswith(inside) else os.path.join(inside, full.lstrip(os.sep))

    def saved_in(self, path: str) -> str:
        inside = self.directory(path)
        return inside if os.path.exists(inside) else path

    def batches(self, loader: Any, pairs: Iterator[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
        if not any(each is loader for each in self._loaders):
            self._loaders.append(loader)
        number = next(n for n, each in enumerate(self._loaders) if each is loader)
        if self.is_done and number in self._training:
            sys.exit(0)
        return self._recorded(number, pairs)

    def _recorded(self, number: int, pairs: Iterator[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
        self._open.append(number)
        try:
            for count, (batch, info) in enumerate(pairs):
                trains = number in self._training or not self._counts
                self._evaluated |= not trains
                if (self.is_done and number in self._training) or (not trains and count >= _EVALUATION_BATCHES):
                    return
                rows = rows_of(batch, info.rows)
                kept = None if rows is None else rows[: len(rows) - info.padding]
                if self._open[-1] == number:
                    entry = {"loader": number, "rows": kept, "padding": info.padding, "counts": counts_of(batch)}
                    self._step.setdefault("batches", []).append(entry)
                self.random.begin(rows or [], info.index)
                try:
                    yield batch, info
                finally:
                    self.random.end()
        finally:
            self._open.remove(number)

    def hooks(self, hooks: Any, step: Any, precision: Any, prepared: Any) -> Any:
        if self._see_loss in hooks.before_backward:
            return hooks  # they are set again after trial steps
        self._engine, self._precision, self._prepared = step, precision, prepared
        strategy = step.weights.strategy
        self.record["strategy"], self.record["precision"] = strategy.name, getattr(precision, "name", str(precision))
        shard = strategy.topology.data_shard
        self.record["shards"], self.record["shard"] = shard.count, shard.index
        return replace(
            hooks,
            before_backward=(self._see_loss, *hooks.before_backward),
            before_step=(self._see_gradients, *hooks.before_step),
            optimizer_step=partial(self._take_step, hooks.optimizer_step or strategy.optimizer_step),
        )

    def before_clipping(self) -> None:
        for optimizer in self._prepared.optimizers:
            self._see_gradients(optimizer.optimizer)

    # parts of a step

    def _named(self) -> Iterator[tuple[str, nn.Parameter]]:
        strategy = self._engine.weights.strategy
        for number, model in enumerate(self._prepared.models):
            prefix = f"{number}." if len(self._prepared.models) > 1 else ""
            for name, parameter in strategy.unwrap(model).named_parameters():
                yield prefix + name.replace("_orig_mod.", ""), parameter

    def _weights(self) -> dict[str, list[float]]:
        strategy = self._engine.weights.strategy
        if strategy.state.held_as == "parts":
            found: dict[str, list[float]] = {}
            for model in self._prepared.models:
                found |= {name: _elements(name, each) for name, each in strategy.state.model(model, full=True).items()}
            return found
        return {name: _elements(name, _whole(each)) for name, each in self._named()}

    def _see_inputs(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if self._open or not model.training or not torch.is_grad_enabled():
            return
        tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor) and each.dim()]
        if tensors:
            self._step.setdefault("inputs", []).extend(rows_of(tensors, len(tensors[0])) or ())

    def _see_start(self) -> None:
        if "start" in self.record or not self._prepared.models:
            return
        strategy = self._engine.weights.strategy
        modules = [module for model in self._prepared.models for module in strategy.unwrap(model).modules()]
        self.record["start"] = self._weights()
        self.record["normalizations"] = sorted(
            {type(each).__name__ for each in modules if isinstance(each, nn.modules.batchnorm._BatchNorm)}
        )
        self.record["computes_loss"] = strategy.topology.computes_loss

    def _see_loss(self, loss: Tensor) -> None:
        self._see_start()
        self._step.setdefault("losses", []).append(float(loss.detach().float()) / self._scale())

    def _scale(self) -> float:
        scaler = getattr(self._precision, "scaler", None)
        return float(scaler.get_scale()) if scaler is not None and scaler.is_enabled() else 1.0

    def _see_gradients(self, optimizer: Any) -> None:
        self._see_start()
        found, elements = self._step.setdefault("gradients", {}), self._step.setdefault("elements", {})
        for name, gradient in self._gradients(optimizer):
            if name not in found:
                gradient = _whole(gradient)
                found[name], elements[name] = sums_of(gradient), _elements(name, gradient)

    def _gradients(self, optimizer: Any) -> Iterator[tuple[str, Tensor]]:
        mine = {id(each) for group in optimizer.param_groups for each in group["params"]}
        for name, parameter in self._named():
            if id(parameter) in mine and parameter.grad is not None:
                yield name, parameter.grad

    def _sums_now(self, name: str, gradient: Tensor) -> list[float]:
        # If clipping has only scaled the gradient, its sums are scaled, too, which saves a second pass over it.
        gradient = _whole(gradient)
        factor = _common_factor(_elements(name, gradient), self._step.get("elements", {}).get(name, ()))
        return sums_of(gradient) if factor is None else [factor * each for each in self._step["gradients"][name]]

    def _take_step(self, inner: Callable[..., bool], optimizer: Any, *args: Any, **named: Any) -> bool:
        self._see_start()
        step = self._step
        if "not_held" not in self.record:  # not earlier: during a forward pass FSDP has other parameters
            held = {id(p) for one in self._prepared.optimizers for group in one.param_groups for p in group["params"]}
            self.record["not_held"] = [name for name, p in self._named() if p.requires_grad and id(p) not in held]
        if sums := [self._sums_now(name, gradient) for name, gradient in self._gradients(optimizer)]:
            step["clipped"] = math.hypot(*chain(*sums))
        step["rates"] = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
        done = inner(optimizer, *args, **named)
        weights = self._engine.weights
        if weights.in_use and weights.total is not None:
            factor = weights.divisor / max(float(weights.total), 1e-30)
            step["losses"] = [each * factor for each in step.get("losses", ())]
        step["skipped"] = not done
        step["generators"] = {name: _digest(each.get_state()) for name, each in GENERATORS.items()}
        step["weights"] = self._weights()
        step["buffers"] = {
            name: sums_of(each)
            for model in self._prepared.models
            for name, each in self._engine.weights.strategy.unwrap(model).named_buffers()
            if each.numel() and not each.is_complex()
        }
        number = next(n for n, each in enumerate(self._prepared.optimizers) if each.optimizer is optimizer)
        # Loaders that have ended were evaluated before this step.
        step["batches"] = [each for each in step.get("batches", ()) if each["loader"] in self._open]
        self._counts[number] = self._counts.get(number, 0) + 1
        self.record["steps"].append(step)
        self._step, self._evaluated = {}, False
        if self._counts[number] == self.asked.stop_after:
            signal.raise_signal(signal.SIGTERM)
        if self._open:
            self._training.add(self._open[-1])
        elif self.is_done:  # the script's loader is not prepared, so nothing else can end its loop
            sys.exit(0)
        return done

    def _log(self, values: Mapping[str, Any], step: int | None) -> None:
        if not self._evaluated:
            return  # values of a training step may be those of one process, by convention
        numbers = {}
        for name, value in values.items():
            with suppress(TypeError, ValueError, RuntimeError):
                numbers[name] = float(value)
        self.record["logged"].append({"step": step, "values": numbers})

    def write(self, problem: str = "") -> None:
        rank = ProcessEnvironment.detect().rank
        self.record["problem"] = problem
        self.record["dropout"], self.record["unplaced"] = self.random.has_dropout, sorted(self.random.unplaced)
        self.record["loaders"] = len(self._loaders)
        path = Path(self.asked.folder) / f"rank{rank}.json"
        part = path.with_suffix(".part")
        part.write_text(json.dumps(self.record))
        part.replace(path)


def _main(options: str, script: str) -> None:
    from drivetrain.launch.worker import run_script

    recorder = Recorder(Recording(**json.loads(Path(options).read_text())))
    observer.current = recorder
    sys.argv = sys.argv[2:]
    set_seed(SEED)
    problem = ""
    try:
        with recorder.random:
            run_script(script)
    except SystemExit as stop:
        if stop.code not in (None, 0):
            problem = f"exit code {stop.code}"
        raise
    except BaseException as error:
        problem = "".join(traceback.format_exception_only(error)).strip()
        recorder.record["out_of_memory"] = is_out_of_memory(error)
        recorder.record["traceback"] = "".join(traceback.format_exception(error)).strip()
        raise
    finally:
        recorder.write(problem)


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2])
