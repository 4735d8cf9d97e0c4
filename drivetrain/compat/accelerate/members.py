"""Members of Accelerate's `Accelerator` that scripts only read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import nn

from drivetrain import accelerator as engine
from drivetrain.accelerator.accelerate_names import FP8Handler
from drivetrain.accelerator.run_state import LoadHook, SaveHook


class ReadMembers(engine.Accelerator):
    """What was given to an Accelerator and what it has prepared, under Accelerate's names.

    Attributes:
        kwargs_handlers: What was given under this name.
    """

    kwargs_handlers: Sequence[Any]

    @property
    def autocast_handler(self) -> Any:
        """The options of autocast that were given."""
        return self._handler(engine.AutocastKwargs)

    @property
    def ddp_handler(self) -> Any:
        """The options of DDP that were given."""
        return self._handler(engine.DistributedDataParallelKwargs)

    @property
    def scaler_handler(self) -> Any:
        """The options of the loss scale that were given."""
        return self._handler(engine.GradScalerKwargs)

    @property
    def init_handler(self) -> Any:
        """The options of the process group that were given."""
        return self._handler(engine.InitProcessGroupKwargs)

    @property
    def fp8_recipe_handler(self) -> Any:
        """The options of fp8 that were given under Accelerate's older name."""
        return self._handler(engine.FP8RecipeKwargs)

    @property
    def ao_recipe_handler(self) -> Any:
        """The options of torchao's fp8 that were given."""
        return self._handler(engine.AORecipeKwargs)

    @property
    def te_recipe_handler(self) -> Any:
        """The options of Transformer Engine's fp8 that were given."""
        return self._handler(engine.TERecipeKwargs)

    @property
    def msamp_recipe_handler(self) -> Any:
        """The options of MS-AMP's fp8 that were given."""
        return self._handler(engine.MSAMPRecipeKwargs)

    @property
    def fp8_enabled(self) -> bool:
        """Whether the precision is fp8."""
        return self.mixed_precision == "fp8"

    @property
    def has_fp8_handler(self) -> bool:
        """Whether options of fp8 were given."""
        return any(isinstance(each, FP8Handler) for each in self.kwargs_handlers)

    @property
    def has_lomo_optimizer(self) -> bool:
        """Whether an optimizer that steps within its backward was prepared."""
        return any(type(each.optimizer).__name__ in ("Lomo", "AdaLomo") for each in self.prepared.optimizers)

    @property
    def _save_model_state_pre_hook(self) -> Mapping[int, SaveHook]:
        return MappingProxyType(dict(enumerate(self.run_state.save_hooks.values())))

    @property
    def _load_model_state_pre_hook(self) -> Mapping[int, LoadHook]:
        return MappingProxyType(dict(enumerate(self.run_state.load_hooks.values())))

    def _handler(self, kind: type) -> Any:
        return next((each for each in self.kwargs_handlers if isinstance(each, kind)), None)

    @property
    def torch_device_mesh(self) -> Any:
        """The mesh of a grid of processes, if there is one."""
        return self.state.device_mesh

    def _get_named_parameters(self, *objects: Any, drop_refs: bool = False) -> dict[str, nn.Parameter]:
        models = [self.strategy.unwrap(each) for each in objects if isinstance(each, nn.Module)]
        return {name: parameter for model in models for name, parameter in model.named_parameters()}
