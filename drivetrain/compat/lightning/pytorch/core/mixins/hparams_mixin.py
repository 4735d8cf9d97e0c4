"""`HyperparametersMixin`: saves constructor arguments as hyper-parameters."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import FrameType
from typing import Any

from torch import nn

from drivetrain.compat.lightning.fabric.utilities.rank_zero import rank_zero_warn
from drivetrain.runtime.errors import known_keywords
from drivetrain.trainer.hyper_parameters import HoldsHyperParameters, arguments_for, constructor_arguments

__all__ = ["HyperparametersMixin"]

PRIMITIVES = (bool, int, float, str)


class HyperparametersMixin(HoldsHyperParameters):
    """Mixin that saves hyper-parameters, modules included, also from enclosing constructors.

    A module among the arguments is stored in `self.hparams` and in Lightning's checkpoint files, but is not logged.
    """

    @classmethod
    def construct_with(cls, arguments: Mapping[str, Any]) -> Any:
        """Create an object from a checkpoint, with the arguments that the constructor accepts."""
        return super().construct_with(arguments_for(cls, arguments))

    def keep_hyper_parameters(self, chosen: Mapping[str, Any]) -> None:
        """Add arguments to `hparams`, including modules."""
        self.hparams.update(chosen)

    @known_keywords
    def save_hyperparameters(self, *args: Any, ignore: Any = None, frame: Any = None, logger: bool = True) -> None:
        """Save the constructor's arguments in `hparams`, like `drivetrain.Task.save_hyperparameters`."""
        numbers = [value for value in args if isinstance(value, bool | int | float)]
        if numbers:
            raise ValueError(
                f"Primitives {PRIMITIVES} are not allowed as hyper-parameters by themselves, and {numbers} have no "
                "names. Give names of the constructor's arguments, or a dict, namespace or dataclass."
            )
        current = inspect.currentframe()
        if frame is None and current is not None:
            frame = current.f_back and current.f_back.f_back  # skip the frame of the decorator `known_keywords`
        super().save_hyperparameters(*args, ignore=ignore, frame=frame, logger=logger)
        if not args:
            left_out = {ignore} if isinstance(ignore, str) else set(ignore or ())
            around = {name: value for name, value in _arguments_around(frame, self).items() if name not in left_out}
            self._add(around)
        for name in [name for name, value in self.hparams.items() if isinstance(value, nn.Module)]:
            rank_zero_warn(
                f"Attribute {name!r} is an instance of `nn.Module` and is already saved with the weights. Name it in "
                f"`self.save_hyperparameters(ignore=[{name!r}])`, and give it again to "
                f"load_from_checkpoint({name}=...); else files hold it twice, and open with weights_only=False only."
            )

    def _add(self, values: dict[str, Any]) -> None:
        initial = self.hparams_initial
        for name, value in values.items():
            self.hparams.setdefault(name, value)
            initial.setdefault(name, value)
        self.__dict__["_hparams_initial"] = dict(initial)


def _arguments_around(frame: FrameType | None, owner: Any) -> dict[str, Any]:
    """Return the arguments of all enclosing constructor calls. The innermost one takes precedence."""
    found: dict[str, Any] = {}
    while frame is not None and frame.f_code.co_name in ("__init__", "__post_init__"):
        first = frame.f_code.co_varnames[:1]
        holder = frame.f_locals.get(first[0]) if first else None
        if not isinstance(holder, HoldsHyperParameters):
            break
        if holder is not owner:
            found = {**constructor_arguments(frame, holder), **found}
        frame = frame.f_back
    return found
