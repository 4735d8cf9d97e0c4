"""Remembering what a task was built with."""

from __future__ import annotations

import inspect
from argparse import Namespace
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any


class HyperParameters(dict[str, Any]):
    """A dict whose entries are attributes too: `self.hparams.lr`."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"There is no hyper-parameter {name!r}; known: {', '.join(self) or 'none'}.") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __delattr__(self, name: str) -> None:
        del self[name]


def constructor_arguments(frame: FrameType, owner: Any) -> dict[str, Any]:
    """The arguments of the outermost `__init__` of `owner` that led to `frame`.

    Args:
        frame: A frame inside the constructor.
        owner: The object under construction.

    Returns:
        Argument names and values, those of `**kwargs` among them.
    """
    found: dict[str, Any] = {}
    current: FrameType | None = frame
    while current is not None:
        first = current.f_code.co_varnames[:1]
        is_constructor = current.f_code.co_name == "__init__" and first and current.f_locals.get(first[0]) is owner
        if not is_constructor:
            break
        names, _, keywords, values = inspect.getargvalues(current)
        arguments = {name: values[name] for name in names[1:] if name in values}
        if keywords:
            arguments.update(values.get(keywords, {}))
        found.update(arguments)
        current = current.f_back
    return found


def select_hyper_parameters(
    names: Sequence[Any], arguments: dict[str, Any], ignore: Sequence[str] | str | None
) -> dict[str, Any]:
    """What `save_hyperparameters(*names)` means.

    Args:
        names: Argument names, or one mapping, dataclass or namespace to take instead; all arguments if empty.
        arguments: The constructor's arguments.
        ignore: Names to leave out.
    """
    left_out = {ignore} if isinstance(ignore, str) else set(ignore or ())
    if len(names) == 1 and not isinstance(names[0], str):
        given = names[0]
        if isinstance(given, Namespace):
            chosen = dict(vars(given))
        elif isinstance(given, Mapping):
            chosen = dict(given)
        else:
            matching = [name for name, value in arguments.items() if value is given]
            chosen = dict.fromkeys(matching[:1], given) or dict(vars(given))
    elif names:
        unknown = [name for name in names if name not in arguments]
        if unknown:
            raise ValueError(
                f"save_hyperparameters({', '.join(map(repr, names))}): {unknown} are no arguments of the constructor, "
                f"which has {sorted(arguments)}."
            )
        chosen = {name: arguments[name] for name in names}
    else:
        chosen = dict(arguments)
    return {name: value for name, value in chosen.items() if name not in left_out}
