"""`LightningModule`: a task with the members that only scripts written for Lightning use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from drivetrain.compat.absent import AbsentNameError
from drivetrain.trainer import Task


class LightningModule(Task):
    """`drivetrain.Task` under Lightning's name.

    Args:
        *args: For further base classes.
        **kwargs: The same.
    """

    CHECKPOINT_HYPER_PARAMS_KEY: ClassVar[str] = "hyper_parameters"
    CHECKPOINT_HYPER_PARAMS_NAME: ClassVar[str] = "hparams_name"
    CHECKPOINT_HYPER_PARAMS_TYPE: ClassVar[str] = "hparams_type"
    __jit_unused_properties__: ClassVar[list[str]] = [
        *Task.__jit_unused_properties__,
        "on_gpu",
        "device_mesh",
        "fabric",
    ]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)

    @property
    def on_gpu(self) -> bool:
        """Whether the tensors are on a GPU."""
        return self.device.type == "cuda"

    @property
    def device_mesh(self) -> Any:
        """The mesh of the strategy, where it has one."""
        return getattr(self.trainer.strategy, "mesh", None)

    @property
    def fabric(self) -> Any:
        """None: a Trainer runs this module."""
        return None

    @contextmanager
    def toggled_optimizer(self, optimizer: Any) -> Iterator[None]:
        """Let only this optimizer's parameters take gradients in the body.

        Args:
            optimizer: The optimizer.
        """
        self.toggle_optimizer(optimizer)
        try:
            yield
        finally:
            self.untoggle_optimizer(optimizer)

    def remove_ignored_hparams(self, ignore_list: list[str]) -> None:
        """Forget hyper-parameters.

        Args:
            ignore_list: Their names.
        """
        for name in ignore_list:
            self.hparams.pop(name, None)

    def to_tensorrt(self, *args: Any, **kwargs: Any) -> Any:
        """Not here."""
        raise AbsentNameError(
            "to_tensorrt is not here. Export with torch.export.export, and compile with Torch-TensorRT."
        )
