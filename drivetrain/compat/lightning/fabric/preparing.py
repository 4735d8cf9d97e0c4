"""The part of Fabric that prepares modules, optimizers and loaders."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from drivetrain.accelerator import PreparedOptimizer
from drivetrain.compat.lightning.fabric.module_side import attach
from drivetrain.compat.lightning.fabric.reporting import Reporting
from drivetrain.compat.lightning.fabric.utilities.rank_zero import rank_zero_deprecation
from drivetrain.compat.lightning.fabric.wrappers import BackwardGuard, FabricDataLoader, FabricModule, is_wrapped
from drivetrain.data import DataShard
from drivetrain.runtime.errors import ArgumentTypeError, ConfigurationError
from drivetrain.runtime.nested import send_to_device
from drivetrain.trainer import Task


class Preparing(Reporting):
    """What a loop sets up before it runs."""

    _guard: BackwardGuard
    _strategy: Any

    @property
    def device(self) -> torch.device:
        """This process's device."""
        return self.accelerator.device

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

        Raises:
            ConfigurationError: One of them has been prepared before.
        """
        _refuse_prepared("model", "setup", [module])
        _refuse_prepared("optimizer", "setup", optimizers)
        engine = self.accelerator
        placement = [move_to_device, *([None] * len(optimizers))]
        prepared = engine.prepare(module, *optimizers, device_placement=placement)
        forward_module, *stepped = prepared if optimizers else [prepared]
        original = getattr(module, "_orig_mod", module)
        place = self.device if move_to_device else None
        wrapped = FabricModule(forward_module, engine.strategy, original, engine.precision, place, self._guard)
        self._announce_steps(stepped)
        if isinstance(original, Task):
            attach(self, original, wrapped, stepped)
        self.call("on_after_setup", fabric=self, module=wrapped)
        parts = [wrapped, *stepped] if scheduler is None else [wrapped, *stepped, scheduler]
        return tuple(parts) if len(parts) > 1 else wrapped

    def setup_module(self, module: nn.Module, move_to_device: bool = True) -> Any:
        """Prepare a module alone.

        Args:
            module: The module.
            move_to_device: Whether to move it.
        """
        _refuse_prepared("model", "setup_module", [module])
        return self.setup(module, move_to_device=move_to_device)

    def setup_optimizers(self, *optimizers: Optimizer) -> Any:
        """Prepare optimizers of a module that was prepared before.

        Args:
            *optimizers: The optimizers.
        """
        _refuse_prepared("optimizer", "setup_optimizers", optimizers)
        prepared = tuple(self.accelerator.prepare_optimizer(each) for each in optimizers)
        self._announce_steps(prepared)
        return prepared if len(prepared) > 1 else prepared[0]

    def setup_dataloaders(
        self, *dataloaders: Any, use_distributed_sampler: bool = True, move_to_device: bool = True
    ) -> Any:
        """Prepare loaders.

        Args:
            *dataloaders: The loaders.
            use_distributed_sampler: Whether each process gets its share; else each gets all.
            move_to_device: Whether batches are moved to the device.

        Raises:
            ConfigurationError: There is none, or one that cannot be prepared, or that has been.
        """
        if not dataloaders:
            raise ConfigurationError("`setup_dataloaders` requires at least one dataloader as input.", code="DT-097")
        _refuse_prepared("dataloader", "setup_dataloaders", dataloaders)
        for loader in dataloaders:
            if not isinstance(loader, DataLoader):
                raise ArgumentTypeError(
                    f"Only PyTorch DataLoader are currently supported in `setup_dataloaders`, got a "
                    f"{type(loader).__name__}. Iterate anything else as it is, and move batches with fabric.to_device.",
                    code="DT-100",
                )
        shard = None if use_distributed_sampler else DataShard(0, 1)
        place = None if move_to_device else _as_it_is
        device = self.device if move_to_device else None
        prepared = [
            FabricDataLoader(self.accelerator.prepare_data_loader(each, shard=shard, place=place), device)
            for each in dataloaders
        ]
        return prepared if len(prepared) > 1 else prepared[0]

    def init_module(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """Make modules in the body on the device, in the number format, or as the strategy wants them.

        Args:
            empty_init: Whether parameters stay without initial values, where a checkpoint follows that has them.
        """
        context: AbstractContextManager[Any] = self._strategy.module_init_context(empty_init=empty_init)
        return context

    def sharded_model(self) -> AbstractContextManager[Any]:
        """The same, under the name that it had before."""
        rank_zero_deprecation("`Fabric.sharded_model()` is deprecated. Use `Fabric.init_module()`.")
        return self.init_module()

    def init_tensor(self) -> AbstractContextManager[Any]:
        """Make tensors in the body on the device, in the number format."""
        context: AbstractContextManager[Any] = self._strategy.tensor_init_context()
        return context

    def to_device(self, obj: Any) -> Any:
        """Move a module, a tensor or nested data to the device.

        Args:
            obj: What to move.
        """
        return obj.to(self.device) if isinstance(obj, nn.Module) else send_to_device(obj, self.device)

    def _announce_steps(self, optimizers: Any) -> None:
        """Let callbacks that have `on_after_optimizer_step` see each step."""
        if not any(hasattr(each, "on_after_optimizer_step") for each in self._callbacks):
            return
        for prepared in optimizers:

            def announce(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
                self.call("on_after_optimizer_step", strategy=self.accelerator.strategy, optimizer=optimizer)

            (prepared.optimizer if isinstance(prepared, PreparedOptimizer) else prepared).register_step_post_hook(
                announce
            )


def _refuse_prepared(kind: str, method: str, objects: Any) -> None:
    for each in objects:
        if is_wrapped(each):
            article = "An" if kind == "optimizer" else "A"
            raise ConfigurationError(
                f"{article} {kind} should be passed only once to the `{method}` method; this one is what it returned.",
                code="DT-045",
            )


def _as_it_is(batch: Any) -> Any:
    return batch
