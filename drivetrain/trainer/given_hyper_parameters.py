"""Hyper-parameters that replace the constructor arguments of an object that is being created.

If a configuration file describes an object's parts, this description can be saved and read again. The actual arguments,
such as modules or functions, often cannot.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

CLASS_PATH = "_class_path"
"""Name of the entry with the import path of the class, if the configuration chose a subclass."""

INSTANTIATOR = "_instantiator"
"""Name of the entry that marks the other entries as a configuration, not as plain arguments."""

_given: ContextVar[tuple[type, Mapping[str, Any]] | None] = ContextVar("_given", default=None)


@contextmanager
def hyper_parameters_given(kind: type, values: Mapping[str, Any]) -> Iterator[None]:
    """Set the hyper-parameters of all objects of class `kind` that are created in the `with` block.

    A command line creates its objects in this `with` block, so that a checkpoint stores the configuration instead of
    objects that cannot be saved.
    """
    token = _given.set((kind, values))
    try:
        yield
    finally:
        _given.reset(token)


def given_hyper_parameters(owner: object) -> Mapping[str, Any] | None:
    given = _given.get()
    # Only for this class: the constructor may create other objects that record their own arguments.
    return given[1] if given is not None and type(owner) is given[0] else None


def loaded_subclass(kind: type, path: str) -> type | None:
    candidates = [kind]
    while candidates:
        found = candidates.pop()
        if f"{found.__module__}.{found.__qualname__}" == path:
            return found
        # Only classes that exist already: a checkpoint must not be able to import code.
        candidates += found.__subclasses__()
    return None
