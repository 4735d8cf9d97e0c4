"""Names of Accelerate that scripts import and that drivetrain does not have: they raise when they are called."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from drivetrain.runtime.errors import DrivetrainError

BIG_MODELS = (
    "Big-model inference (device maps, offloading, quantised loading) is not part of drivetrain yet. Keep the model on "
    'one device, shard it with Accelerator(strategy="fsdp"), or run this script with the original Accelerate.'
)
MEGATRON = (
    "Megatron-LM's own training loop is not run under Accelerate's names. Use Accelerator(strategy=\"megatron\") or "
    "drivetrain.MegatronTask; see the page on Megatron."
)
SAGEMAKER = "SageMaker is not started from here. Submit the script as a SageMaker job that runs `drivetrain launch`."
OTHER_LAUNCHER = "Processes are started by `drivetrain launch`, or drivetrain.launch.launch_script in Python."
INTERNAL = "It is a part of Accelerate's own machinery, which drivetrain does not have. Use the Accelerator's methods."


class AbsentNameError(DrivetrainError, NotImplementedError):
    """Something of Accelerate was called that drivetrain does not have."""


def absent(name: str, reason: str) -> type:
    """A class to import, to inherit from and to check instances against, that raises when it is called.

    Args:
        name: Its name in Accelerate.
        reason: Why it is not here, and what to do.
    """

    def refuse(cls: type, *args: Any, **kwargs: Any) -> Any:
        raise AbsentNameError(f"accelerate's {name} was called. {reason}")

    return type(name, (), {"__new__": refuse, "__doc__": f"Not in drivetrain. {reason}"})


def absent_names(module: str, *groups: tuple[str, Iterable[str]]) -> Callable[[str], Any]:
    """A module's `__getattr__` for the names that it does not have.

    Args:
        module: The module's name.
        groups: Reasons, each with the names that it holds for.
    """
    reasons = {name: reason for reason, names in groups for name in names}
    made: dict[str, type] = {}

    def get(name: str) -> Any:
        if name not in reasons:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return made.setdefault(name, absent(name, reasons[name]))

    return get
