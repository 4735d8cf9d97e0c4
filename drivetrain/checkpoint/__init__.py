"""How state reaches disk and comes back: a directory that appears complete or not at all."""

from drivetrain.checkpoint.run_state import load_run_state, save_run_state

__all__ = ["load_run_state", "save_run_state"]
