"""What Fabric has prepared."""

from __future__ import annotations

from drivetrain.accelerator import PreparedOptimizer
from drivetrain.data import PreparedLoader


def is_wrapped(obj: object) -> bool:
    """Whether Fabric has prepared an object.

    Args:
        obj: A module, an optimizer or a loader.
    """
    return isinstance(obj, PreparedOptimizer | PreparedLoader) or hasattr(obj, "_fabric")
