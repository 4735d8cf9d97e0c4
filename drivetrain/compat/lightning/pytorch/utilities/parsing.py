"""Hyper-parameters as a dict with attributes, and checks for pickling."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import MutableMapping
from types import FrameType
from typing import Any

from drivetrain.compat.lightning.fabric.utilities.rank_zero import rank_zero_warn
from drivetrain.trainer.hyper_parameters import HyperParameters
from drivetrain.trainer.tuning.trial import TunedAttribute

AttributeDict = HyperParameters


def is_picklable(obj: object) -> bool:
    """Return True if an object can be pickled."""
    try:
        pickle.dumps(obj)
    except (pickle.PickleError, AttributeError, RuntimeError, TypeError):
        return False
    return True


def clean_namespace(hparams: MutableMapping[str, Any]) -> None:
    """Remove hyper-parameters that cannot be pickled, with a warning."""
    for name in [name for name, value in hparams.items() if not is_picklable(value)]:
        rank_zero_warn(
            f"Attribute {name!r} removed from hparams because it cannot be pickled. You can suppress this warning by "
            f"`self.save_hyperparameters(ignore=[{name!r}])`."
        )
        del hparams[name]


def parse_class_init_keys(cls: type) -> tuple[str, str | None, str | None]:
    """Return the names of `self`, `*args` and `**kwargs` in a class's constructor. The last two may be None."""
    parameters = list(inspect.signature(cls.__init__).parameters.values())  # type: ignore[misc]
    of_kind = {each.kind: each.name for each in parameters}
    return parameters[0].name, of_kind.get(inspect.Parameter.VAR_POSITIONAL), of_kind.get(inspect.Parameter.VAR_KEYWORD)


def get_init_args(frame: FrameType) -> dict[str, Any]:
    """Return the arguments of the constructor call in a frame. Empty for other functions."""
    if frame.f_code.co_name != "__init__" or "__class__" not in frame.f_locals:
        return {}
    names, _, keywords, values = inspect.getargvalues(frame)
    return {**{name: values[name] for name in names[1:]}, **(values[keywords] if keywords else {})}


def collect_init_args(frame: FrameType, path_args: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the arguments of all constructor calls on the stack above a frame."""
    found = list(path_args)
    current: FrameType | None = frame
    while current is not None:
        if current.f_code.co_name == "__init__" and "__class__" in current.f_locals:
            found.append(get_init_args(current))
        elif len(found) > len(path_args):
            break
        current = current.f_back
    return found


def lightning_hasattr(model: Any, attribute: str) -> bool:
    """Return True if a module, its data module or their hyper-parameters have an attribute."""
    return _kept(model, attribute).is_kept


def lightning_getattr(model: Any, attribute: str) -> Any:
    """Return an attribute of a module, its data module or their hyper-parameters."""
    return _found(model, attribute).value


def lightning_setattr(model: Any, attribute: str, value: Any) -> None:
    """Set an attribute on every one of module, data module and hyper-parameters that has it."""
    _found(model, attribute).write(value)


def _kept(model: Any, attribute: str) -> TunedAttribute:
    trainer = model.__dict__.get("_trainer")
    return TunedAttribute(attribute, model, None if trainer is None else trainer.datamodule)


def _found(model: Any, attribute: str) -> TunedAttribute:
    found = _kept(model, attribute)
    if not found.is_kept:
        raise AttributeError(
            f"{attribute} is neither stored in the model namespace nor the `hparams` namespace/dict, nor the "
            "datamodule."
        )
    return found
