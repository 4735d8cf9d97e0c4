"""Lightning's members of `trainer.strategy` and `fabric.strategy`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from drivetrain.compat.lightning.checkpoint_io import CheckpointIO, TorchCheckpointIO
from drivetrain.compat.lightning.plugins import Precision, plugin_of, shown_as
from drivetrain.runtime.collectives import broadcast, broadcast_object_list, gather, reduce
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.groups import gather_with_gradients
from drivetrain.runtime.pytrees import send_to_device
from drivetrain.runtime.state import PartialState
from drivetrain.trainer.setup import WithoutValues

if TYPE_CHECKING:
    from drivetrain.compat.lightning.fabric.plugins.environments import ClusterEnvironment
    from drivetrain.strategies import Strategy

_CHECKPOINT_IO = "_drivetrain_checkpoint_io"
_REDUCTIONS = {"avg": "mean"}
_DRIVERS: WeakKeyDictionary[Any, ref[Any]] = WeakKeyDictionary()
"""The Trainer of each strategy, beside it: a strategy is pickled and copied without the Trainer."""


def _checked(environment: Any) -> ClusterEnvironment | None:
    from drivetrain.compat.lightning.fabric.plugins.environments import ClusterEnvironment

    if environment is None or isinstance(environment, ClusterEnvironment):
        return environment
    raise ConfigurationError(
        f"cluster_environment={environment!r} is no cluster environment. Give an object of a class derived from "
        "lightning.fabric.plugins.environments.ClusterEnvironment, or leave it out: the launcher's variables are "
        "found.",
    )


class StrategyMembers:
    """Mixin with Lightning's strategy attributes: ranks, devices and collectives.

    Attributes:
        precision_plugin: Precision plugin that the strategy was created with.
        given_precision: Name of that precision, or None.
        cluster_environment: Environment that the strategy was created with, or None.
    """

    precision_plugin: Precision = Precision()
    given_precision: str | None = None
    cluster_environment: ClusterEnvironment | None = None
    _given_device: torch.device | None = None

    def take_plugins(self, given: Mapping[str, Any]) -> None:
        """Store the plugins that the strategy was created with."""
        plugin = given.get("precision_plugin") or given.get("precision")
        if plugin is not None:
            self.precision_plugin, self.given_precision = plugin, plugin.precision
        self.cluster_environment = _checked(given.get("cluster_environment"))
        if given.get("checkpoint_io") is not None:
            self.take_checkpoint_io(given["checkpoint_io"])

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """Plugin that writes, reads and removes checkpoints. It can be assigned between two runs."""
        found: CheckpointIO | None = self.given_checkpoint_io
        if found is None:
            self.take_checkpoint_io(found := TorchCheckpointIO())
        return found

    @checkpoint_io.setter
    def checkpoint_io(self, checkpoint_io: CheckpointIO) -> None:
        self.take_checkpoint_io(checkpoint_io)

    def take_checkpoint_io(self, checkpoint_io: CheckpointIO) -> None:
        """Store the checkpoint plugin. Raise `ConfigurationError` for other objects."""
        if not isinstance(checkpoint_io, CheckpointIO):
            raise ConfigurationError(
                f"checkpoint_io={checkpoint_io!r} writes no checkpoints. Give an object of a class derived from "
                "lightning.pytorch.plugins.CheckpointIO, or leave it out.",
            )
        vars(self.holder)[_CHECKPOINT_IO] = checkpoint_io

    @property
    def given_checkpoint_io(self) -> CheckpointIO | None:
        """The checkpoint plugin that was given, or None."""
        found: CheckpointIO | None = vars(self.holder).get(_CHECKPOINT_IO)
        return found

    @property
    def holder(self) -> Any:
        """The strategy that stores the given plugins."""
        return self

    def remove_checkpoint(self, filepath: str | os.PathLike[str]) -> None:
        """Remove a checkpoint, on the main process only."""
        if self.is_global_zero:
            self.checkpoint_io.remove_checkpoint(filepath)

    # what it drives

    @property
    def _driver(self) -> Any:
        found = _DRIVERS.get(self.holder)
        return None if found is None else found()

    @property
    def lightning_module(self) -> Any:
        """Module of the Trainer, or None before a run."""
        return getattr(self._driver, "lightning_module", None)

    @property
    def model(self) -> Any:
        """The module as wrapped by the strategy, or None before a run."""
        return getattr(self._driver, "model", None)

    @property
    def optimizers(self) -> list[Any]:
        """Optimizers of the Trainer. They can be assigned during `fit`."""
        return list(getattr(self._driver, "optimizers", ()))

    @optimizers.setter
    def optimizers(self, optimizers: list[Any]) -> None:
        if self._driver is None:
            raise ConfigurationError("A strategy has optimizers while its Trainer runs fit. Assign them in a hook.")
        self._driver.replace_optimizers(optimizers)

    @property
    def lr_scheduler_configs(self) -> list[Any]:
        """Learning rate schedulers of the Trainer."""
        return list(getattr(self._driver, "lr_scheduler_configs", ()))

    @property
    def _lightning_module(self) -> Any:
        return self.lightning_module

    def on_exception(self, exception: BaseException) -> None:
        """Clean up after a run that ended with an exception, Ctrl-C included. Does nothing unless overridden."""

    # this process

    @property
    def root_device(self) -> torch.device:
        """Device of this process."""
        topology = getattr(self, "topology", None)
        return (self._given_device or PartialState().device) if topology is None else topology.device

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return PartialState().num_processes

    @property
    def global_rank(self) -> int:
        """Rank of this process."""
        return PartialState().process_index

    @property
    def local_rank(self) -> int:
        """Rank of this process on its machine."""
        return PartialState().local_process_index

    @property
    def node_rank(self) -> int:
        """Index of this machine."""
        return PartialState().environment.node_rank

    @property
    def is_global_zero(self) -> bool:
        """True on rank 0."""
        return self.global_rank == 0

    def barrier(self, name: str | None = None) -> None:
        """Block until all processes reach this call."""
        PartialState().wait_for_everyone()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Send an object from rank `src` to all processes. Return it."""
        if self.world_size == 1:
            return obj
        return broadcast(obj, src) if isinstance(obj, Tensor) else broadcast_object_list([obj], src)[0]

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Stack a tensor of all ranks along a new first dimension. One process gets its tensor back unchanged."""
        if self.world_size == 1:
            return tensor
        if sync_grads:
            return gather_with_gradients(tensor)
        gathered: Tensor = gather(tensor.unsqueeze(0))
        return gathered

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor across all ranks. Other objects, and tensors of a single process, are returned unchanged.

        Args:
            tensor: Tensor of the same shape on all ranks.
            group: Accepted without effect: all ranks take part.
            reduce_op: `"mean"`, `"sum"`, `"max"`, `"min"`, or torch's `ReduceOp`.
        """
        if self.world_size == 1 or not isinstance(tensor, Tensor):
            return tensor
        name = (reduce_op if isinstance(reduce_op, str) else str(reduce_op).rpartition(".")[2]).lower()
        return reduce(tensor, _REDUCTIONS.get(name, name))

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Call `all_reduce`: every rank gets the result."""
        return self.all_reduce(tensor, group, reduce_op)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return True if all ranks decided for something, or with `all=False` if any did."""
        votes = int(self.all_reduce(torch.tensor(int(decision), device=self.root_device), reduce_op="sum"))
        return votes == self.world_size if all else votes > 0

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Move the tensors of a batch to the device."""
        return send_to_device(batch, device or self.root_device)

    @property
    def parallel_devices(self) -> list[torch.device]:
        """Devices of this machine's processes."""
        root, count = self.root_device, PartialState().environment.local_world_size
        return [root if root.index is None or count == 1 else torch.device(root.type, index) for index in range(count)]

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Create tensors in the `with` body on this process's device, in the precision's dtype."""
        without_values = WithoutValues() if empty_init else nullcontext()
        with self.root_device, self.precision_plugin.tensor_init_context(), without_values:
            yield

    @contextmanager
    def module_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Create modules in the `with` body on this process's device, in the precision's dtype, or sharded."""
        own = getattr(self, "init_context", nullcontext)()
        with self.tensor_init_context(empty_init), own:
            yield

    def module_to_device(self, module: nn.Module) -> None:
        """Move a module to this process's device."""
        module.to(self.root_device)


class StrategyView(StrategyMembers):
    """View of a drivetrain strategy with Lightning's members. `isinstance` sees the strategy's own class."""

    def __init__(self, strategy: Strategy, precision: str) -> None:
        object.__setattr__(self, "_viewed", strategy)
        object.__setattr__(self, "_precision", precision)

    @property
    def precision_plugin(self) -> Precision:  # type: ignore[override]
        """Precision plugin of the run."""
        return plugin_of(shown_as(self._precision), self.root_device.type, None)

    @property
    def holder(self) -> Any:
        """The strategy behind the view."""
        return self._viewed

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._viewed)

    def __getattr__(self, name: str) -> Any:
        if name in ("_viewed", "_precision"):  # while the object is being copied
            raise AttributeError(name)
        return getattr(self._viewed, name)

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self if name in dir(type(self)) else self._viewed, name, value)

    def __eq__(self, other: object) -> bool:
        return self._viewed is getattr(other, "_viewed", other)

    def __hash__(self) -> int:
        return hash(self._viewed)

    def __repr__(self) -> str:
        return repr(self._viewed)


def with_members(strategy: Strategy, precision: str) -> Any:
    """Return a strategy with Lightning's members: itself if it has them, else a view of it."""
    return strategy if isinstance(strategy, StrategyMembers) else StrategyView(strategy, precision)


def record_driver(strategy: Any, trainer: Any) -> None:
    """Store a strategy's Trainer, from which its attributes read."""
    _DRIVERS[strategy.holder] = ref(trainer)
