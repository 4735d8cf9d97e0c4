"""The keys of callbacks' states, as Lightning spells them and as this package does.

`EarlyStopping{'monitor': 'val_loss', 'mode': 'min'}` there is `EarlyStopping(monitor='val_loss', mode='min')` here; a
time is a `datetime.timedelta(...)` there, and a number of seconds here.
"""

from __future__ import annotations

import ast
import re
from datetime import timedelta
from typing import Any

_INTERVAL = re.compile(r"datetime\.timedelta\(([\w=, ]*)\)")
_TIMES = ("train_time_interval",)


def key_here(key: str) -> str:
    """A key of Lightning's as this package spells it; any other as it is."""
    name, brace, rest = key.partition("{")
    try:
        found = ast.literal_eval(_INTERVAL.sub(_seconds, brace + rest)) if brace else None
    except (ValueError, SyntaxError, TypeError):
        return key
    if not isinstance(found, dict):
        return key
    return f"{name}({', '.join(f'{argument}={value!r}' for argument, value in found.items())})"


def key_there(key: str) -> str:
    """A key of this package as Lightning spells it; any other as it is."""
    try:
        call = ast.parse(key, mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return key
        values = {str(one.arg): ast.literal_eval(one.value) for one in call.keywords}
    except (ValueError, SyntaxError):
        return key
    written = ", ".join(f"{argument!r}: {_written(argument, value)}" for argument, value in values.items())
    return f"{key.partition('(')[0]}{{{written}}}"


def _written(argument: str, value: Any) -> str:
    return repr(timedelta(seconds=value)) if argument in _TIMES and value is not None else repr(value)


def _seconds(match: re.Match[str]) -> str:
    parts = dict(part.split("=") for part in match[1].split(", ") if part)
    return str(timedelta(**{name: float(value) for name, value in parts.items()}).total_seconds())
