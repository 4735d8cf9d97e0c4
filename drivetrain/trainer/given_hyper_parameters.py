"""Hyper-parameters that stand for the arguments of an object under construction.

Where a configuration file describes what an object is made of, that description can be kept and read again; the
arguments, which may be modules or functions, often cannot.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

CLASS_PATH = "_class_path"
"""The entry that names the class to make, where it was chosen by the configuration."""

INSTANTIATOR = "_instantiator"
"""The entry that says that the others are a configuration."""

_given: ContextVar[tuple[type, Mapping[str, Any]] | None] = ContextVar("_given", default=None)


@contextmanager
def hyper_parameters_given(kind: type, values: Mapping[str, Any]) -> Iterator[None]:
    """Let `save_hyperparameters` of one object that the body makes keep these values, not the constructor's arguments.

    Args:
        kind: The object's class; others, such as parts that its constructor makes, keep their own arguments.
        values: The hyper-parameters.
    """
    token = _given.set((kind, values))
    try:
        yield
    finally:
        _given.reset(token)


def given_hyper_parameters(owner: object) -> Mapping[str, Any] | None:
    """The hyper-parameters that stand for the arguments of an object; None where there are none."""
    given = _given.get()
    return given[1] if given is not None and type(owner) is given[0] else None


def loaded_subclass(kind: type, path: str) -> type | None:
    """Return the class with a path among a class and its subclasses, without importing anything; None if none has it.

    Args:
        kind: The class.
        path: The module and the name of the class that is looked for.
    """
    candidates = [kind]
    while candidates:
        found = candidates.pop()
        if f"{found.__module__}.{found.__qualname__}" == path:
            return found
        candidates += found.__subclasses__()
    return None
