"""Keeps the ranks of the crash harness from importing packages that take longer than the rest of a restart."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch


@contextmanager
def not_installed(*names: str) -> Iterator[None]:
    """Let packages seem not to be installed, for code that asks for them before it imports them."""
    version = importlib.metadata.version

    def answer(name: str) -> str:
        if name in names:
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    gone: dict[str, Any] = dict.fromkeys(names)  # None stands for a module that cannot be found
    with patch.object(importlib.metadata, "version", answer), patch.dict(sys.modules, gone):
        before = set(sys.modules)
        yield
        new = {name: module for name, module in sys.modules.items() if name not in before}
    sys.modules.update(new)  # what was imported meanwhile stays
