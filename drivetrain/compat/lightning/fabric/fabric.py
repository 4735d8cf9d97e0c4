"""`Fabric`: the Accelerator, as a raw loop written for Fabric calls it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.accelerator import Accelerator
from drivetrain.compat.lightning.accelerators import Accelerator as Kind
from drivetrain.compat.lightning.fabric.utilities.seed import seed_everything
from drivetrain.compat.lightning.plugins import Precision
from drivetrain.compat.lightning.reasons import PLUGIN
from drivetrain.runtime.collectives import broadcast, broadcast_object_list, reduce
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.nested import recursively_apply, send_to_device
from drivetrain.trackers import Tracker
from drivetrain.trainer.building import make_accelerator


def _nothing(fabric: Fabric) -> None:
    """What `launch` runs where nothing is given."""


class Fabric:
    """A raw loop's hold on devices, processes and number formats.

    Args:
        accelerator: `"auto"`, `"cpu"`, `"gpu"`, or another kind of device.
        strategy: A name, or a strategy.
        devices: How many processes on this machine, or which devices.
        num_nodes: Number of machines.
        precision: Such as `"bf16-mixed"`.
        plugins: A number format.
        callbacks: Objects whose methods `call` calls.
        loggers: Where `log` writes.

    Raises:
        ConfigurationError: A plugin was given that is not here.
    """

    def __init__(
        self,
        *,
        accelerator: Any = "auto",
        strategy: Any = "auto",
        devices: Any = "auto",
        num_nodes: int = 1,
        precision: Any = None,
        plugins: Any = None,
        callbacks: Any = None,
        loggers: Tracker | Sequence[Tracker] | None = None,
    ) -> None:
        for plugin in plugins if isinstance(plugins, Sequence) else [plugins]:
            if isinstance(plugin, Precision):
                precision = plugin.precision
            elif plugin is not None:
                raise ConfigurationError(f"Fabric(plugins={type(plugin).__name__}()) is not taken. {PLUGIN}")
        kind = accelerator.kind if isinstance(accelerator, Kind) else accelerator
        self._engine = make_accelerator(kind, strategy, devices, num_nodes, precision, 1, False)
        self._callbacks = list(callbacks) if isinstance(callbacks, Sequence) else [callbacks] if callbacks else []
        self._loggers = list(loggers) if isinstance(loggers, Sequence) else [loggers] if loggers else []

    seed_everything = staticmethod(seed_everything)

    # this process

    @property
    def accelerator(self) -> Accelerator:
        """The engine that does the work."""
        return self._engine

    @property
    def strategy(self) -> Any:
        """The strategy."""
        return self._engine.strategy

    @property
    def device(self) -> torch.device:
        """This process's device."""
        return self._engine.device

    @property
    def global_rank(self) -> int:
        """Global rank of this process."""
        return self._engine.process_index

    @property
    def local_rank(self) -> int:
        """Rank of this process on its machine."""
        return self._engine.local_process_index

    @property
    def node_rank(self) -> int:
        """The number of this machine."""
        return int(self.global_rank // self.strategy.topology.environment.local_world_size)

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self._engine.num_processes

    @property
    def is_global_zero(self) -> bool:
        """Whether this is the main process."""
        return self._engine.is_main_process

    @property
    def loggers(self) -> list[Any]:
        """All loggers."""
        return self._loggers

    @property
    def logger(self) -> Any:
        """The first logger."""
        return self._loggers[0]

    # preparing

    def launch(self, function: Callable[..., Any] = _nothing, *args: Any, **kwargs: Any) -> Any:
        """Run a function in every process; they are there already.

        Args:
            function: Called with this object.
            *args: Further arguments of it.
            **kwargs: The same.

        Returns:
            What it returned.
        """
        return function(self, *args, **kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Override it for code that `Fabric` subclasses run."""

    def setup(
        self, module: nn.Module, *optimizers: Optimizer, scheduler: Any = None, move_to_device: bool = True
    ) -> Any:
        """Prepare a module and its optimizers.

        Args:
            module: The module.
            *optimizers: Its optimizers.
            scheduler: Taken for Lightning's sake: it steps the optimizer that it was made of.
            move_to_device: Whether to move the module.

        Returns:
            The module alone, or a tuple of it and the optimizers (and the scheduler).
        """
        placement = [move_to_device, *([None] * len(optimizers))]
        prepared = self._engine.prepare(module, *optimizers, device_placement=placement)
        parts = list(prepared) if optimizers else [prepared]
        parts[0].__dict__["_fabric"] = True
        if scheduler is not None:
            parts.append(scheduler)
        return tuple(parts) if len(parts) > 1 else parts[0]

    def setup_module(self, module: nn.Module, move_to_device: bool = True) -> Any:
        """Prepare a module alone.

        Args:
            module: The module.
            move_to_device: Whether to move it.
        """
        return self.setup(module, move_to_device=move_to_device)

    def setup_optimizers(self, *optimizers: Optimizer) -> Any:
        """Prepare optimizers of a module that was prepared before.

        Args:
            *optimizers: The optimizers.
        """
        prepared = tuple(self._engine.prepare_optimizer(each) for each in optimizers)
        return prepared if len(prepared) > 1 else prepared[0]

    def setup_dataloaders(
        self, *dataloaders: Any, use_distributed_sampler: bool = True, move_to_device: bool = True
    ) -> Any:
        """Prepare loaders.

        Args:
            *dataloaders: The loaders.
            use_distributed_sampler: Whether each process gets its share; else each gets all.
            move_to_device: Whether batches are moved to the device.
        """
        from drivetrain.data import DataShard

        shard = None if use_distributed_sampler else DataShard(0, 1)
        place = None if move_to_device else _as_it_is
        prepared = [self._engine.prepare_data_loader(each, shard=shard, place=place) for each in dataloaders]
        return prepared if len(prepared) > 1 else prepared[0]

    def init_module(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """Make modules in the body as the strategy wants them.

        Args:
            empty_init: Taken for Lightning's sake; the strategy decides.
        """
        return self._engine.init_context()

    sharded_model = init_module

    def init_tensor(self) -> AbstractContextManager[Any]:
        """Make tensors in the body on the device."""
        return torch.device(self.device)

    def to_device(self, obj: Any) -> Any:
        """Move a module, a tensor or nested data to the device.

        Args:
            obj: What to move.
        """
        return obj.to(self.device) if isinstance(obj, nn.Module) else send_to_device(obj, self.device)

    # the step

    def backward(self, tensor: Tensor, *args: Any, model: Any = None, **kwargs: Any) -> None:
        """Compute gradients of a loss, in place of `loss.backward()`.

        Args:
            tensor: The loss.
            *args: As for `torch.Tensor.backward`.
            model: Taken for Lightning's sake.
            **kwargs: As for `torch.Tensor.backward`.
        """
        named = dict(zip(("gradient", "retain_graph", "create_graph"), args, strict=False))
        self._engine.backward(tensor, **named, **kwargs)

    def clip_gradients(
        self,
        module: nn.Module,
        optimizer: Any,
        clip_val: float | None = None,
        max_norm: float | None = None,
        norm_type: float | str = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor | None:
        """Clip gradients, by value or by norm.

        Args:
            module: Whose gradients.
            optimizer: Taken for Lightning's sake.
            clip_val: The bound of each element.
            max_norm: The bound of the norm.
            norm_type: The order of the norm.
            error_if_nonfinite: Whether a norm that is not finite is an error.

        Returns:
            The norm before, where it was clipped by norm.

        Raises:
            ConfigurationError: None or both of the bounds were given.
            RuntimeError: The norm is not finite.
        """
        if (clip_val is None) is (max_norm is None):
            raise ConfigurationError("clip_gradients takes one of clip_val and max_norm.")
        if clip_val is not None:
            self._engine.clip_grad_value_(module.parameters(), clip_val)
            return None
        assert max_norm is not None
        norm = self._engine.clip_grad_norm_(module.parameters(), max_norm, float(norm_type))
        if error_if_nonfinite and norm is not None and not bool(torch.isfinite(norm)):
            raise RuntimeError(f"The norm of the gradients is {norm}, so they cannot be clipped.")
        return norm

    def autocast(self) -> AbstractContextManager[Any]:
        """Compute in the number format in the body."""
        return self._engine.autocast()

    def no_backward_sync(self, module: nn.Module, enabled: bool = True) -> AbstractContextManager[Any]:
        """Let backwards in the body exchange nothing, to accumulate gradients.

        Args:
            module: The module.
            enabled: Whether to.
        """
        return self._engine.no_sync(module) if enabled else nullcontext()

    # processes

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on the main process."""
        self._engine.print(*args, **kwargs)

    def barrier(self, name: str | None = None) -> None:
        """Wait for all processes."""
        self._engine.wait_for_everyone()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Give all processes one process's object.

        Args:
            obj: Tensors, or anything that can be pickled.
            src: Whose.
        """
        return broadcast(obj, src) if isinstance(obj, Tensor) else broadcast_object_list([obj], src)[0]

    def all_gather(self, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Stack tensors of all processes along a new first dimension; the tensors themselves in a world of one.

        Args:
            data: Nested structure of tensors of equal shapes.
            group: Taken for Lightning's sake; all processes take part.
            sync_grads: Not supported.
        """
        if sync_grads:
            raise ConfigurationError("all_gather(sync_grads=True) is not supported; use torch.distributed.nn.")
        if self.world_size == 1:
            return data
        return recursively_apply(lambda tensor: self._engine.gather(tensor.unsqueeze(0)), data)

    def all_reduce(self, data: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce tensors over all processes.

        Args:
            data: Nested structure of tensors of equal shapes.
            group: Taken for Lightning's sake; all processes take part.
            reduce_op: `"mean"` or `"sum"`.
        """
        return reduce(data, str(reduce_op).lower())

    @contextmanager
    def rank_zero_first(self, local: bool = False) -> Iterator[None]:
        """Let the first process run the body before the others.

        Args:
            local: The first of each machine.
        """
        first = self._engine.local_main_process_first() if local else self._engine.main_process_first()
        with first:
            yield

    # what is kept

    def save(
        self, path: str | os.PathLike[str], state: Mapping[str, Any], filter: Mapping[str, Any] | None = None
    ) -> None:
        """Write a state: modules and optimizers as their states, anything else as it is; call it on all processes.

        Args:
            path: The file.
            state: What to write, by name.
            filter: For each name, a function `(key, value) -> bool` that chooses entries of its state.
        """
        written = {name: self._state_of(value) for name, value in state.items()}
        for name, keeps in (filter or {}).items():
            written[name] = {key: value for key, value in written[name].items() if keeps(key, value)}
        if self.is_global_zero:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._engine.save(written, path)
        self.barrier()

    def load(
        self,
        path: str | os.PathLike[str],
        state: dict[str, Any] | None = None,
        strict: bool = True,
        *,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Read a state that `save` wrote, into modules and optimizers.

        Args:
            path: The file.
            state: What to fill, by name; values that are neither modules nor optimizers are replaced.
            strict: Whether a name that the file does not have is an error.
            weights_only: False unpickles objects too: only for files of those whom you trust.

        Returns:
            What was left over; everything without `state`.

        Raises:
            KeyError: The file has no such name.
        """
        found = torch.load(path, map_location="cpu", weights_only=weights_only is not False)
        for name in list(state or {}):
            assert state is not None
            if name not in found:
                if strict:
                    raise KeyError(f"{os.fspath(path)} has no {name!r}; it has {', '.join(sorted(found))}.")
                continue
            value = found.pop(name)
            if not self._fill(state[name], value, strict):
                state[name] = value
        return dict(found)

    def load_raw(
        self,
        path: str | os.PathLike[str],
        obj: nn.Module | Optimizer,
        strict: bool = True,
        *,
        weights_only: bool | None = None,
    ) -> None:
        """Read the state of one module or optimizer.

        Args:
            path: The file.
            obj: What to fill.
            strict: Whether other names of weights are an error.
            weights_only: False unpickles objects too.
        """
        self._fill(obj, torch.load(path, map_location="cpu", weights_only=weights_only is not False), strict)

    def _state_of(self, value: Any) -> Any:
        if isinstance(value, nn.Module):
            return self._engine.get_state_dict(value)
        return value.state_dict() if callable(getattr(value, "state_dict", None)) else value

    def _fill(self, target: Any, value: Any, strict: bool) -> bool:
        """Give an object a state. Returns whether it takes one."""
        if isinstance(target, nn.Module):
            self._engine.unwrap_model(target).load_state_dict(value, strict=strict)
        elif callable(getattr(target, "load_state_dict", None)):
            target.load_state_dict(value)
        else:
            return False
        return True

    # around

    def log(self, name: str, value: Any, step: int | None = None) -> None:
        """Write one value.

        Args:
            name: Its name.
            value: A number, or a tensor of one element.
            step: The step that it belongs to.
        """
        self.log_dict({name: value}, step)

    def log_dict(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Write values, on the main process.

        Args:
            metrics: Names and values.
            step: The step that they belong to.
        """
        if self.is_global_zero:
            numbers = {name: value.item() if isinstance(value, Tensor) else value for name, value in metrics.items()}
            for logger in self._loggers:
                logger.log_metrics(numbers, step)

    def call(self, hook_name: str, *args: Any, **kwargs: Any) -> None:
        """Call a method of every callback that has it.

        Args:
            hook_name: The method.
            *args: Its arguments.
            **kwargs: The same.
        """
        for callback in self._callbacks:
            method = getattr(callback, hook_name, None)
            if callable(method):
                method(*args, **kwargs)


def _as_it_is(batch: Any) -> Any:
    return batch
