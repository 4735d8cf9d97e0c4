"""`Accelerator` with the members that only scripts written for Accelerate use."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from drivetrain import accelerator as engine
from drivetrain.accelerator import GradientAccumulationPlugin
from drivetrain.compat.accelerate.state import AcceleratorState, record_accelerator
from drivetrain.compat.accelerate.utils.fsdp_plugin import FullyShardedDataParallelPlugin
from drivetrain.data import DataLoaderConfiguration

__all__ = ["Accelerator", "DataLoaderConfiguration", "GradientAccumulationPlugin"]

_STRATEGIES = ("FSDP", "DEEPSPEED", "MEGATRON_LM")


class Accelerator(engine.Accelerator):
    """`drivetrain.Accelerator` as Accelerate's scripts make and read it.

    Args:
        *args: As there.
        **kwargs: As there.

    Attributes:
        kwargs_handlers: What was given under this name.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.kwargs_handlers: Sequence[Any] = kwargs.get("kwargs_handlers") or []
        if kwargs.get("gradient_accumulation_plugin") is not None and kwargs.get("gradient_accumulation_steps") == 1:
            del kwargs["gradient_accumulation_steps"]
        asked = os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"
        if asked and not any(kwargs.get(name) for name in ("fsdp_plugin", "deepspeed_plugin", "deepspeed_plugins")):
            kwargs["fsdp_plugin"] = FullyShardedDataParallelPlugin()
        if _places_otherwise(kwargs):
            # Accelerate ignores DDP's options then, which the Trainer of transformers counts on.
            kept = [each for each in self.kwargs_handlers if not isinstance(each, engine.DistributedDataParallelKwargs)]
            kwargs["kwargs_handlers"] = kept
        super().__init__(*args, **kwargs)
        record_accelerator(self)
        self.state: AcceleratorState = AcceleratorState(record=self.state.record)

    @property
    def native_amp(self) -> bool:
        """Whether the precision is one that torch's autocast computes."""
        return self.mixed_precision in ("fp16", "bf16")

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

    def _handler(self, kind: type) -> Any:
        return next((each for each in self.kwargs_handlers if isinstance(each, kind)), None)

    @property
    def _models(self) -> list[nn.Module]:
        return self.prepared.models

    @property
    def _optimizers(self) -> list[Any]:
        return self.prepared.optimizers

    @property
    def _schedulers(self) -> list[Any]:
        return self.prepared.schedulers

    @property
    def _dataloaders(self) -> list[Any]:
        return self.prepared.loaders

    @property
    def _custom_objects(self) -> list[Any]:
        return self.prepared.registered

    def join_uneven_inputs(
        self, joinables: Sequence[nn.Module], even_batches: bool | None = None
    ) -> AbstractContextManager[None]:
        """As `drivetrain.Accelerator.join_uneven_inputs`, with a warning where it has no effect.

        Args:
            joinables: The prepared models.
            even_batches: Overrides the instance's choice for loops that start in the context.
        """
        if self.use_distributed and not self.distributed_type.value.startswith("MULTI_"):
            warnings.warn(
                "Joining uneven inputs is only supported for multi-GPU training (DDP, on any device): "
                f"under {self.distributed_type.value} join_uneven_inputs has no effect.",
                UserWarning,
                stacklevel=2,
            )
            return nullcontext()
        return super().join_uneven_inputs(joinables, even_batches)

    def _do_sync(self) -> None:
        self.accumulation.advance()


def _places_otherwise(given: Mapping[str, Any]) -> bool:
    """Whether the arguments or the launcher ask for a strategy other than DDP."""
    arguments = ("fsdp_plugin", "deepspeed_plugin", "deepspeed_plugins", "megatron_lm_plugin", "parallelism_config")
    variables = [f"{owner}_USE_{name}" for owner in ("DRIVETRAIN", "ACCELERATE") for name in _STRATEGIES]
    asked = any(os.environ.get(name, "").lower() in ("1", "true") for name in variables)
    return asked or any(given.get(name) is not None for name in arguments)
