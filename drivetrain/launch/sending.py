"""What goes to a new interpreter, as bytes: by pickle, and where that cannot, by cloudpickle if it is installed."""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Iterator, Mapping
from types import FunctionType
from typing import Any

from drivetrain.launch.forking import cloudpickle_module

_DEPTH = 4  # attributes of attributes that are searched for the one that cannot be sent
_PLAIN = (str, bytes, int, float, type(None))


def sent(value: Any, has_script: bool) -> bytes:
    """The bytes that `pickle.loads` makes the value of in another process.

    Args:
        value: What to send.
        has_script: Whether what `__main__` defines is found there, too; else it must be sent by value.

    Raises:
        Exception: It cannot be pickled; whatever pickle raises.
    """
    cloud = cloudpickle_module()
    if has_script or cloud is None:
        try:
            return pickle.dumps(value)
        except Exception:
            if cloud is None:
                raise
    assert cloud is not None
    buffer = io.BytesIO()

    class Pickler(cloud.Pickler):  # type: ignore[misc, name-defined]
        """Sends by value only what the other process cannot find by its name."""

        def reducer_override(self, given: Any) -> Any:
            if has_script and isinstance(given, type | FunctionType) and _is_of_script(given):
                return NotImplemented
            return super().reducer_override(given)

    Pickler(buffer).dump(value)
    return buffer.getvalue()


def _is_of_script(given: type | FunctionType) -> bool:
    found: Any = sys.modules["__main__"] if given.__module__ == "__main__" else None
    for name in given.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is given


def what_cannot_be_sent(parts: Mapping[str, Any], has_script: bool) -> str:
    """Name the innermost object that keeps some parts from being sent, and why.

    Args:
        parts: What is sent, by the names that the message has for them.
        has_script: As for `sent`.

    Returns:
        Such as `task.transform (a function, <lambda>): Can't pickle ...`; empty where all can be sent.
    """
    for name, value in parts.items():
        reason = _reason(value, has_script)
        if reason:
            return _innermost(name, value, reason, has_script, _DEPTH)
    return ""


def _innermost(name: str, value: Any, reason: str, has_script: bool, depth: int) -> str:
    for inner, held in _held(name, value) if depth else ():
        found = _reason(held, has_script)
        if found:
            return _innermost(inner, held, found, has_script, depth - 1)
    return f"{name} ({type(value).__qualname__}) cannot be pickled: {reason}"


def _held(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """What an object holds, by how a user writes it."""
    if isinstance(value, Mapping):
        yield from ((f"{name}[{key!r}]", held) for key, held in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"{name}[{number}]", held) for number, held in enumerate(value))
    elif not isinstance(value, type | FunctionType):
        for key, held in getattr(value, "__dict__", {}).items():
            if key in ("_modules", "_parameters", "_buffers"):
                yield from ((f"{name}.{inner}", each) for inner, each in held.items())
            elif key != "_trainer":
                yield f"{name}.{key}", held


def _reason(value: Any, has_script: bool) -> str:
    if isinstance(value, _PLAIN):
        return ""
    try:
        sent(value, has_script)
    except Exception as error:
        return str(error) or type(error).__name__
    return ""
