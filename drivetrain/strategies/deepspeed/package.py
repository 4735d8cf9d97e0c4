"""The package deepspeed: whether it is there, and how it is imported."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from typing import Any

from drivetrain.runtime.errors import ConfigurationError


def require_deepspeed() -> None:
    """Raise where the package is not installed."""
    if importlib.util.find_spec("deepspeed") is None:
        raise ConfigurationError(
            "strategy='deepspeed' needs the package deepspeed, which is not installed. Install it: "
            "pip install 'drivetrain[deepspeed]' (torch first: another package may choose another build of it).",
            code="DT-013",
        )


def import_deepspeed(kind: str) -> Any:
    """Import the package for a kind of device; it settles on one where it is first imported.

    Args:
        kind: The device's name, such as `"cuda"`.

    Returns:
        The module.

    Raises:
        ConfigurationError: It is not installed, or runs on another kind of device in this process already.
    """
    require_deepspeed()
    if "deepspeed" not in sys.modules:
        asked = os.environ.get("DS_ACCELERATOR")
        os.environ["DS_ACCELERATOR"] = (
            asked or kind
        )  # else it tries all kinds there are, and takes a GPU if it finds one
        try:
            importlib.import_module("deepspeed")
        finally:
            if asked is None:
                del os.environ["DS_ACCELERATOR"]
    from deepspeed.accelerator import get_accelerator

    found = get_accelerator()._name
    if found != kind:
        raise ConfigurationError(
            f"This run is on {kind!r}, but deepspeed was imported for {found!r} in this process. Import it only after "
            f"the Trainer or Accelerator is made, or set DS_ACCELERATOR={kind}.",
            code="DT-023",
        )
    return importlib.import_module("deepspeed")
