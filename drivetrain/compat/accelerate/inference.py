"""Models that are spread over processes for inference."""

from __future__ import annotations

from drivetrain.compat.accelerate.absent import INTERNAL, absent_names
from drivetrain.inference import prepare_pippy as prepare_pippy

__getattr__ = absent_names(
    __name__, (INTERNAL, ["build_pipeline", "find_pippy_batch_size", "generate_device_map", "pippy_forward"])
)
