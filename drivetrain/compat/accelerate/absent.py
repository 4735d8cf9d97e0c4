"""Why names of Accelerate that scripts import are not in drivetrain."""

from __future__ import annotations

from drivetrain.compat.handed_on import AbsentNameError, absent, absent_names

__all__ = ["AbsentNameError", "absent", "absent_names"]

MEGATRON = (
    "Megatron-LM's own training loop is not run under Accelerate's names. Use Accelerator(strategy=\"megatron\") or "
    "drivetrain.MegatronTask; see the page on Megatron."
)
SAGEMAKER = "SageMaker is not started from here. Submit the script as a SageMaker job that runs `drivetrain launch`."
OTHER_LAUNCHER = "Processes are started by `drivetrain launch`, or drivetrain.launch.launch_script in Python."
INTERNAL = "It is a part of Accelerate's own machinery, which drivetrain does not have. Use the Accelerator's methods."
