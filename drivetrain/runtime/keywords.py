"""Keyword arguments that a function does not take: an error that names the nearest that it does."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from drivetrain.runtime.errors import ConfigurationError, nearest


class UnknownArgumentError(ConfigurationError, TypeError):
    """A function was given a keyword argument that it does not take."""


def refuse_unknown(unknown: Mapping[str, Any], function: Callable[..., Any]) -> None:
    """Raise where a function was given keyword arguments that it does not take.

    A function that asks for this ends its parameters with ``**unknown: NoReturn``, which a type checker reads as
    "nothing else", and calls this first. It costs an empty dict.

    Args:
        unknown: The keyword arguments that no parameter took.
        function: The function; for a constructor the class.

    Raises:
        UnknownArgumentError: There are some.
    """
    if not unknown:
        return
    parameters = inspect.signature(function).parameters.values()
    allowed = [each.name for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    given = next(iter(unknown))
    guess = nearest(given, allowed)
    raise UnknownArgumentError(
        f"{function.__qualname__}() takes no argument {given!r}.{guess}"
        + ("" if guess else f" It takes {', '.join(name for name in allowed if name != 'self')}.")
    )
