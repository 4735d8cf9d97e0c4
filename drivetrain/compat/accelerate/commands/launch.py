"""`accelerate launch` as a function."""

from __future__ import annotations

from drivetrain.compat.accelerate.absent import OTHER_LAUNCHER, absent_names

__getattr__ = absent_names(
    __name__,
    (
        OTHER_LAUNCHER,
        [
            "deepspeed_launcher",
            "launch_command",
            "launch_command_parser",
            "multi_gpu_launcher",
            "simple_launcher",
            "tpu_launcher",
            "tpu_pod_launcher",
        ],
    ),
)
