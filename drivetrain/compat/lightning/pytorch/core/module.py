"""`LightningModule`: a task with the additional members of Lightning's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, ClassVar

import torch

from drivetrain.compat.handed_on import AbsentNameError
from drivetrain.compat.lightning.fabric.utilities.rank_zero import rank_zero_deprecation, rank_zero_warn
from drivetrain.compat.lightning.fabric.utilities.warnings import warn_by_warnings
from drivetrain.compat.lightning.pytorch.core.mixins import HyperparametersMixin
from drivetrain.compat.lightning.unpickling import UnpicklesWhereAsked
from drivetrain.runtime.errors import ConfigurationError, known_keywords
from drivetrain.trainer import Task


class LightningModule(UnpicklesWhereAsked, HyperparametersMixin, Task):
    """`drivetrain.Task` under Lightning's name."""

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
        # `requires_grad` of each parameter before toggling, by `id`
        self._before_toggling: dict[int, tuple[torch.Tensor, bool]] = {}

    @classmethod
    @wraps(Task.load_from_checkpoint.__func__)  # type: ignore[attr-defined]
    def load_from_checkpoint(cls, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        file = kwargs.get("hparams_file")
        if file is not None and not os.path.isfile(file):
            rank_zero_warn(f"There are no hyper-parameters in {os.fspath(file)}: the saved ones are taken.")
            del kwargs["hparams_file"]
        with warn_by_warnings():
            return super().load_from_checkpoint(checkpoint_path, *args, **kwargs)

    def on_validation_model_zero_grad(self) -> None:
        """Set gradients to None before a validation inside `fit`, also with manual optimization."""
        self.zero_grad()

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output for a batch."""
        return self(kwargs["batch"] if "batch" in kwargs else args[0])

    @known_keywords
    def clip_gradients(
        self,
        optimizer: Any,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip the gradients of an optimizer's parameters."""
        options = self.trainer.options
        bound = _one_of("gradient_clip_val", options.gradient_clip_val, gradient_clip_val)
        way = _one_of("gradient_clip_algorithm", options.gradient_clip_algorithm, gradient_clip_algorithm)
        super().clip_gradients(optimizer, bound, way)

    @property
    def on_gpu(self) -> bool:
        """True if the module is on a GPU."""
        return self.device.type == "cuda"

    @property
    def device_mesh(self) -> Any:
        """Device mesh of the strategy, or None."""
        return None if self._trainer is None else getattr(self.trainer.strategy, "mesh", None)

    @property
    def fabric(self) -> Any:
        """The Fabric that the module was set up with, or None under a Trainer."""
        return getattr(self._trainer, "fabric", None)

    def toggle_optimizer(self, optimizer: Any) -> None:
        """Set `requires_grad=False` on the parameters of all other optimizers."""
        mine = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        before = self._before_toggling
        for group in (group for each in self.trainer.optimizers for group in each.param_groups):
            for parameter in group["params"]:
                before.setdefault(id(parameter), (parameter, parameter.requires_grad))
        for parameter, took_gradients in before.values():
            parameter.requires_grad_(took_gradients and id(parameter) in mine)

    def untoggle_optimizer(self, optimizer: Any) -> None:
        """Restore `requires_grad` to the values before `toggle_optimizer`."""
        for parameter, took_gradients in self._before_toggling.values():
            parameter.requires_grad_(took_gradients)
        self._before_toggling.clear()

    @contextmanager
    def toggled_optimizer(self, optimizer: Any) -> Iterator[None]:
        """Restrict `requires_grad` to one optimizer's parameters in the `with` body."""
        self.toggle_optimizer(optimizer)
        try:
            yield
        finally:
            self.untoggle_optimizer(optimizer)

    def remove_ignored_hparams(self, ignore_list: list[str]) -> None:
        """Remove hyper-parameters by name."""
        for name in ignore_list:
            self.hparams.pop(name, None)

    @wraps(Task.to_torchscript)
    def to_torchscript(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        rank_zero_deprecation(
            "`LightningModule.to_torchscript` has been deprecated in v2.7 and will be removed in v2.8 of Lightning, as "
            "TorchScript is in torch. Export with `to_exported_program` or `to_onnx`."
        )
        return super().to_torchscript(*args, **kwargs)

    def to_tensorrt(self, *args: Any, **kwargs: Any) -> Any:
        """Raise `AbsentNameError`: TensorRT export is not supported."""
        raise AbsentNameError(
            "to_tensorrt is not here. Export with torch.export.export, and compile with Torch-TensorRT."
        )


def _one_of(name: str, of_trainer: Any, given: Any) -> Any:
    """Return the clipping option from the call or the Trainer. Raise an error if both are set and differ."""
    if given is None or of_trainer is None or given == of_trainer:
        return of_trainer if given is None else given
    raise ConfigurationError(
        f"You have set `Trainer({name}={of_trainer!r})` and have passed `clip_gradients({name}={given!r})`. Leave one "
        "of the two out.",
    )
