"""A `LightningModule` whose loop runs over Fabric: what it finds in the place of a Trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from drivetrain.runtime.errors import ConfigurationError
from drivetrain.trainer import Task

if TYPE_CHECKING:
    from drivetrain.compat.lightning.fabric.preparing import Preparing

_OF_FABRIC = ("global_rank", "local_rank", "node_rank", "world_size", "is_global_zero", "device", "strategy", "print")


class FabricSide:
    """Takes the place of `module.trainer`, and of the module's methods that need one.

    Args:
        fabric: The Fabric; None for a copy of the module that has come out of a pickle.
        module: The module.
        wrapped: What Fabric made of it.
        optimizers: The optimizers that were set up with it.
    """

    def __init__(self, fabric: Any, module: Any = None, wrapped: Any = None, optimizers: Any = ()) -> None:
        self.fabric = fabric
        self._module, self._wrapped, self._optimizers = module, wrapped, list(optimizers)

    def __getattr__(self, name: str) -> Any:
        if name in _OF_FABRIC:
            return getattr(self.fabric, name)
        raise AttributeError(
            f"Your LightningModule code tried to access `self.trainer.{name}`, which only a Trainer has. This module "
            f"runs under Fabric: use `self.fabric`, which has {', '.join(_OF_FABRIC)}, or give the module the value."
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return FabricSide, (None,)

    def __deepcopy__(self, memo: Any) -> FabricSide:
        return self

    @property
    def logger(self) -> Any:
        """The first logger."""
        return self.fabric.logger

    @property
    def loggers(self) -> list[Any]:
        """All loggers."""
        found: list[Any] = self.fabric.loggers
        return found

    def log(self, name: str, value: Any, prog_bar: bool = False, logger: bool | None = None, **_: Any) -> None:
        """Write a value; what concerns epochs and bars has no meaning here."""
        self.log_dict({name: value}, prog_bar, logger)

    def log_dict(
        self, dictionary: Mapping[str, Any], prog_bar: bool = False, logger: bool | None = None, **_: Any
    ) -> None:
        """Write values.

        Raises:
            ConfigurationError: One is no number.
        """
        for name, value in dictionary.items():
            if isinstance(value, Mapping):
                raise ConfigurationError(
                    f"`{name}`: nested dictionaries cannot be logged. Give each value a name of its own.", code="DT-090"
                )
            if not isinstance(value, Tensor | int | float):
                raise ConfigurationError(
                    f"`{name}`: `{type(value).__name__}` values cannot be logged. Give a number, or a tensor of one "
                    "element.",
                    code="DT-090",
                )
        if logger is not False:
            self.fabric.log_dict(dictionary)

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """The optimizer that was set up with the module, or the list of them."""
        return self._optimizers[0] if len(self._optimizers) == 1 else self._optimizers

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Compute gradients."""
        self.fabric.backward(loss, *args, **kwargs)

    def clip_gradients(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: Any = None
    ) -> None:
        """Clip the module's gradients, by norm (the default) or by value."""
        if gradient_clip_val is None:
            return
        by_value = str(getattr(gradient_clip_algorithm, "value", gradient_clip_algorithm)) == "value"
        bounds = {"clip_val": gradient_clip_val if by_value else None}
        bounds["max_norm"] = None if by_value else gradient_clip_val
        self.fabric.clip_gradients(self._module, optimizer, **bounds)


def attach(fabric: Preparing, module: Task, wrapped: Any, optimizers: Any) -> None:
    """Let a module, and the Lightning modules in it, find Fabric where they would find a Trainer.

    Args:
        fabric: The Fabric.
        module: The module.
        wrapped: What Fabric made of it.
        optimizers: The optimizers that were set up with it.
    """
    for each in module.modules():
        if isinstance(each, Task):
            side: Any = FabricSide(fabric, each, wrapped, optimizers)
            each.trainer = side
            own = each.__dict__
            own["log"], own["log_dict"] = side.log, side.log_dict
            own["optimizers"], own["clip_gradients"] = side.optimizers, side.clip_gradients
            own["backward"] = own["manual_backward"] = side.backward
