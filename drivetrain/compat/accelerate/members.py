"""Read-only members of Accelerate's `Accelerator`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import nn

from drivetrain import accelerator as engine
from drivetrain.accelerator.accelerate_names import FP8Handler
from drivetrain.accelerator.run_state import LoadHook, SaveHook


class ReadMembers(engine.Accelerator):
    """Arguments and prepared objects of an Accelerator, under Accelerate's attribute names.

    Attributes:
        kwargs_handlers: The argument of the constructor.
    """

    kwargs_handlers: Sequence[Any]

    @property
    def autocast_handler(self) -> Any:
        """The `AutocastKwargs` passed in `kwargs_handlers`, or None."""
        return self._handler(engine.AutocastKwargs)

    @property
    def ddp_handler(self) -> Any:
        """The `DistributedDataParallelKwargs` passed in `kwargs_handlers`, or None."""
        return self._handler(engine.DistributedDataParallelKwargs)

    @property
    def scaler_handler(self) -> Any:
        """The `GradScalerKwargs` passed in `kwargs_handlers`, or None."""
        return self._handler(engine.GradScalerKwargs)

    @property
    def init_handler(self) -> Any:
        """The `InitProcessGroupKwargs` passed in `kwargs_handlers`, or None."""
        return self._handler(engine.InitProcessGroupKwargs)

    @property
    def fp8_recipe_handler(self) -> Any:
        """The `FP8RecipeKwargs` passed in `kwargs_handlers`, or None."""
        return self._handler(engine.FP8RecipeKwargs)

    @property
    def ao_recipe_handler(self) -> Any:
        """The `AORecipeKwargs` (torchao fp8) passed in `kwargs_handlers`, or None."""
        return self._handler(engine.AORecipeKwargs)

    @property
    def te_recipe_handler(self) -> Any:
        """The `TERecipeKwargs` (Transformer Engine fp8) passed in `kwargs_handlers`, or None."""
        return self._handler(engine.TERecipeKwargs)

    @property
    def msamp_recipe_handler(self) -> Any:
        """The `MSAMPRecipeKwargs` (MS-AMP fp8) passed in `kwargs_handlers`, or None."""
        return self._handler(engine.MSAMPRecipeKwargs)

    @property
    def fp8_enabled(self) -> bool:
        """True if `mixed_precision` is `"fp8"`."""
        return self.mixed_precision == "fp8"

    @property
    def has_fp8_handler(self) -> bool:
        """True if `kwargs_handlers` contains fp8 options."""
        return any(isinstance(each, FP8Handler) for each in self.kwargs_handlers)

    @property
    def has_lomo_optimizer(self) -> bool:
        """True if a LOMO optimizer, which steps during the backward pass, was prepared."""
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
        """The device mesh of the run, or None."""
        return self.state.device_mesh

    def _get_named_parameters(self, *objects: Any, drop_refs: bool = False) -> dict[str, nn.Parameter]:
        models = [self.strategy.unwrap(each) for each in objects if isinstance(each, nn.Module)]
        return {name: parameter for model in models for name, parameter in model.named_parameters()}
