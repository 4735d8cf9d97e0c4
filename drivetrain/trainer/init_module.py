"""Making modules where and as they will be trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from drivetrain.trainer.trainer import Trainer


class WithoutValues(TorchFunctionMode):
    """Leaves out what `torch.nn.init` would fill tensors with."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


@contextmanager
def init_module(trainer: Trainer, empty_init: bool | None) -> Iterator[None]:
    """Make modules in the body on the device and in the dtype of a run, or as its strategy makes them.

    Args:
        trainer: The trainer.
        empty_init: Whether parameters stay without initial values.
    """
    strategy = trainer.strategy
    # The strategy comes last: one that shards has another device for parameters that it fills later.
    with (
        torch.device(strategy.topology.device),
        trainer.accelerator.precision.init_context(),
        strategy.init_context(),
        WithoutValues() if empty_init else nullcontext(),
    ):
        yield
