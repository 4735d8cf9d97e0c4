"""Parts of Accelerate's launcher."""

from __future__ import annotations

from drivetrain.compat.accelerate.absent import OTHER_LAUNCHER, SAGEMAKER, absent_names

__getattr__ = absent_names(
    __name__,
    (
        OTHER_LAUNCHER,
        [
            "PrepareForLaunch",
            "_filter_args",
            "prepare_deepspeed_cmd_env",
            "prepare_multi_gpu_env",
            "prepare_simple_launcher_cmd_env",
            "prepare_tpu",
        ],
    ),
    (SAGEMAKER, ["prepare_sagemager_args_inputs"]),
)
