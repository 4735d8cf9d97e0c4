"""Deprecations: what will be removed warns until a named version, which a test holds.

```python
@deprecated(since="0.2.0", removed_in="0.4.0", use="Trainer.fit")
def train(trainer, task): ...

@renamed_arguments({"gpus": "devices"}, since="0.2.0", removed_in="0.4.0")
def start(devices, quietly=None):
    warn_ignored("start", "quietly", quietly, "", since="0.2.0", removed_in="0.4.0")
```
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from drivetrain.runtime.errors import ConfigurationError

F = TypeVar("F", bound=Callable[..., Any])


class DrivetrainDeprecationWarning(FutureWarning):
    """Something of drivetrain that a script uses will be removed; the message names the version and what to use.

    A `FutureWarning`, which Python shows by default also where the call is in a module of the script's.
    """


def deprecated(*, since: str, removed_in: str, use: str | None = None) -> Callable[[F], F]:
    """Mark a function, method or class that will be removed: a call warns.

    Args:
        since: The first version that warns.
        removed_in: The version without it.
        use: What to use instead; None where there is nothing.

    Returns:
        The decorator. A class stays a class: its constructor warns, and that of its subclasses.
    """
    until = _until(since, removed_in)

    def mark(target: F) -> F:
        message = f"{target.__qualname__} is deprecated {until}.{f' Use {use}.' if use else ''}"
        if inspect.isclass(target):
            target.__init__ = _warning(target.__init__, message)  # type: ignore[method-assign]
            return target
        return _warning(target, message)

    return mark


def renamed_arguments(names: Mapping[str, str], *, since: str, removed_in: str) -> Callable[[F], F]:
    """Let a function take arguments under their former names, too, with a warning.

    Args:
        names: The present name of each former one.
        since: The first version with the present names.
        removed_in: The version without the former ones.

    Returns:
        The decorator. An argument that is given under both names is a `ConfigurationError`.
    """
    until = _until(since, removed_in)

    def mark(function: F) -> F:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            for former in [name for name in kwargs if name in names]:
                present = names[former]
                if present in kwargs:
                    raise ConfigurationError(
                        f"{function.__qualname__}() got {present} under its former name {former}, too. Give {present}.",
                        code="DT-004",
                    )
                _warn(f"{function.__qualname__}({former}=...) is deprecated {until}. Use {present}.")
                kwargs[present] = kwargs.pop(former)
            return function(*args, **kwargs)

        return call  # type: ignore[return-value]

    return mark


def warn_ignored(function: str, name: str, value: object, hint: str, *, since: str, removed_in: str) -> None:
    """Warn the caller's caller of an argument that is taken and has no effect any more; do nothing if it is None.

    Args:
        function: The name of the function that takes the argument.
        name: The argument.
        value: What was given for it.
        hint: What to do instead, as a sentence.
        since: The first version in which it has no effect.
        removed_in: The version that refuses it.
    """
    if value is not None:
        _warn(f"{function}({name}={value!r}) has no effect {_until(since, removed_in)}. {hint}".rstrip(), stacklevel=4)


def _until(since: str, removed_in: str) -> str:
    return f"since drivetrain {since} and will be removed in {removed_in}"


def _warning(function: F, message: str) -> F:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        _warn(message)
        return function(*args, **kwargs)

    return call  # type: ignore[return-value]


def _warn(message: str, stacklevel: int = 3) -> None:
    warnings.warn(message, DrivetrainDeprecationWarning, stacklevel=stacklevel)
