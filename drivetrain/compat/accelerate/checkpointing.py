"""The parts of `save_state` and `load_state`, which are the Accelerator's alone."""

from __future__ import annotations

from drivetrain.compat.accelerate.absent import INTERNAL, absent_names

__getattr__ = absent_names(
    __name__,
    (INTERNAL, ["load_accelerator_state", "load_custom_state", "save_accelerator_state", "save_custom_state"]),
)
