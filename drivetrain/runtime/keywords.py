"""Keyword arguments that nothing takes: an error that names the nearest one that is taken."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from drivetrain.runtime.errors import ConfigurationError, nearest


class UnknownArgumentError(ConfigurationError, TypeError):
    """A function was given a keyword argument that it does not take."""

    code = "DT-006"


def refuse_unknown(given: Collection[str], function: Callable[..., Any], name: str | None = None) -> None:
    """Raise where a function was given keyword arguments that it does not take.

    A method that asks for this ends its parameters with `**_unknown: NoReturn`, which type checkers read as "nothing
    else", and calls this with them.

    Args:
        given: The names of keyword arguments.
        function: The function.
        name: What it is called in the message; its own name if None.

    Raises:
        UnknownArgumentError: One of them is no parameter of the function.
    """
    if not given:
        return
    parameters = inspect.signature(function).parameters.values()
    taken = [each.name for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    unknown = next((each for each in given if each not in taken), None)
    if unknown is None:
        return
    guess = nearest(unknown, taken)
    known = "" if guess else f" It takes {', '.join(each for each in taken if each != 'self')}."
    raise UnknownArgumentError(f"{name or function.__qualname__}() takes no argument {unknown!r}.{guess}{known}")


@lru_cache(maxsize=256)
def _takes_all(function: Callable[..., Any], names: frozenset[str]) -> bool:
    """Whether a function takes keyword arguments of these names."""
    parameters = inspect.signature(function).parameters
    return names <= parameters.keys() or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


class KnownKeywords:
    """A class whose constructor refuses unknown keyword arguments by `UnknownArgumentError`.

    Attributes:
        made_with: The arguments that an object was made with, by position and by name.
    """

    made_with: tuple[tuple[Any, ...], dict[str, Any]]

    if not TYPE_CHECKING:

        def __new__(cls, *args: Any, **keywords: Any) -> Any:
            if keywords and not _takes_all(cls.__init__, frozenset(keywords)):
                refuse_unknown(keywords, cls.__init__, cls.__name__)
            made = super().__new__(cls)
            made.made_with = args, keywords
            return made


def made_again(kind: type[Any], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """An object of a class, made with the arguments that another one was made with."""
    return kind(*arguments, **keywords)
