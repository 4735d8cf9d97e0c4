"""Hyper-parameters as a dict with attributes, and what can be pickled."""

from __future__ import annotations

import pickle
from typing import Any

from drivetrain.trainer.hyper_parameters import HyperParameters

AttributeDict = HyperParameters


def is_picklable(obj: object) -> bool:
    """Whether an object can be pickled.

    Args:
        obj: The object.
    """
    try:
        pickle.dumps(obj)
    except (pickle.PickleError, AttributeError, RuntimeError, TypeError):
        return False
    return True


def lightning_hasattr(model: Any, attribute: str) -> bool:
    """Whether a module, its hyper-parameters or its data module have an attribute.

    Args:
        model: The module.
        attribute: The attribute.
    """
    return any(_has(holder, attribute) for holder in _holders(model))


def lightning_getattr(model: Any, attribute: str) -> Any:
    """The attribute of a module, of its hyper-parameters or of its data module.

    Args:
        model: The module.
        attribute: The attribute.

    Raises:
        AttributeError: None of them has it.
    """
    for holder in _holders(model):
        if _has(holder, attribute):
            return holder[attribute] if isinstance(holder, dict) else getattr(holder, attribute)
    raise AttributeError(
        f"{attribute} is neither stored in the model namespace nor the `hparams` namespace/dict, nor the datamodule."
    )


def lightning_setattr(model: Any, attribute: str, value: Any) -> None:
    """Set an attribute wherever it is there: in a module, its hyper-parameters and its data module.

    Args:
        model: The module.
        attribute: The attribute.
        value: Its value.

    Raises:
        AttributeError: None of them has it.
    """
    holders = [holder for holder in _holders(model) if _has(holder, attribute)]
    if not holders:
        raise _missing(attribute)
    for holder in holders:
        if isinstance(holder, dict):
            holder[attribute] = value
        else:
            setattr(holder, attribute, value)


def _missing(attribute: str) -> AttributeError:
    return AttributeError(
        f"{attribute} is neither stored in the model namespace nor the `hparams` namespace/dict, nor the datamodule."
    )


def _holders(model: Any) -> list[Any]:
    trainer = model.__dict__.get("_trainer")
    data = None if trainer is None else trainer.datamodule
    return [model, model.hparams, *([] if data is None else [data])]


def _has(holder: Any, attribute: str) -> bool:
    return attribute in holder if isinstance(holder, dict) else hasattr(holder, attribute)
