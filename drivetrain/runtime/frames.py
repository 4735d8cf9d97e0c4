"""Which line of a stack is the user's: what is inside drivetrain, torch and the standard library is not.

Imports no torch.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from functools import cache

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_STANDARD_LIBRARY = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


def is_library(filename: str) -> bool:
    """Whether a file belongs to drivetrain, torch, the standard library or the interpreter."""
    if filename.startswith((_PACKAGE, _torch(), "<frozen ")):
        return True
    return filename.startswith(_STANDARD_LIBRARY) and not any(part in filename for part in _INSTALLED)


def in_package(filename: str, folder: str = "") -> bool:
    """Whether a file is in a folder of drivetrain, such as `"runtime"`."""
    return filename.startswith(os.path.join(_PACKAGE, folder))


def in_torch(filename: str, folder: str = "") -> bool:
    """Whether a file is in a folder of torch, such as `"distributed"`."""
    return filename.startswith(os.path.join(_torch(), folder))


@cache
def _torch() -> str:
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return os.path.dirname(os.path.abspath(spec.origin)) + os.sep


def user_line() -> str:
    """Return the innermost line of the user's code that is running, as `"train.py:12 in main"`."""
    frame = sys._getframe(1)
    while frame.f_back is not None and is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{shown_path(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}"


def shown_path(filename: str) -> str:
    """Shorten a path to one relative to the working directory where it lies below it."""
    below = os.path.join(os.getcwd(), "")
    return filename.removeprefix(below)
