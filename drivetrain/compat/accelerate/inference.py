"""Pipelines for inference, which belong to big-model inference."""

from __future__ import annotations

from drivetrain.compat.accelerate.absent import BIG_MODELS, absent_names

__getattr__ = absent_names(
    __name__,
    (BIG_MODELS, ["build_pipeline", "find_pippy_batch_size", "generate_device_map", "pippy_forward", "prepare_pippy"]),
)
