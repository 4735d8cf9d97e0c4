"""The `Callback` base class with its hooks, and the names of the stages of a run."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar

from drivetrain.runtime.errors import deprecated, known_keywords
from drivetrain.runtime.terminal import print_all

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from drivetrain.runtime.durations import Duration
    from drivetrain.trainer.task import Task
    from drivetrain.trainer.trainer import Trainer


class Callback:
    """Base class of callbacks: objects whose methods the Trainer calls at fixed points of a run.

    Override a hook to run code at that point of the training loop. The Trainer checks once, when a run starts, which
    hooks a class overrides, and calls only those. Hooks that are not overridden cost nothing. Override hooks in a
    class: a function assigned to an instance is ignored. Every process of the run calls every hook, so hooks may use
    collectives. Put code that should run once under `if trainer.is_global_zero`.

    Example:
        ```python
        from drivetrain import Callback

        class StepCounter(Callback):
            def __init__(self):
                self.steps = 0

            def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx):
                self.steps += 1

            def state_dict(self):
                return {"steps": self.steps}

            def load_state_dict(self, state_dict):
                self.steps = state_dict["steps"]
        ```
    """

    # Class attributes that the Trainer reads. Override them in a subclass.

    runs_last_at_epoch_end: ClassVar[bool] = False
    """True if `on_train_epoch_end` must run after the task and all other callbacks have logged their epoch values. Set
    it for callbacks that read logged values. Such a hook cannot log values itself."""

    saves_checkpoints: ClassVar[bool] = False
    """True if the callback writes checkpoints. The Trainer then calls it after all other callbacks, so that their
    state is saved, and adds no `ModelCheckpoint` of its own."""

    is_progress_bar: ClassVar[bool] = False
    """True if the callback shows the progress of a run. The Trainer then adds no progress bar of its own, and
    `Trainer.print` calls the callback's `print`."""

    guards_values: ClassVar[bool] = False
    """True if the callback acts on losses that are NaN or infinite. The Trainer then does not warn about them."""

    run_identity: str | None = None
    """The identifier of the Trainer whose `fit` produced the callback's state, or None before the first `fit`."""

    schedule: Duration | tuple[Duration, ...] | None = None
    """The callback's interval if it is measured in samples, tokens or fractions of the run, else None. The Trainer then
    counts these units, and `trainer.progress.count` returns the counts."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__init__" in vars(cls) and cls.__module__.startswith("drivetrain."):  # users' classes are not changed
            cls.__init__ = known_keywords(cls.__init__)  # type: ignore[method-assign]

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print values like the built-in `print`, but above the progress display that this callback draws.

        `Trainer.print` calls this method on the callback that sets `is_progress_bar`.

        Args:
            *args: Values to print.
            **kwargs: Keyword arguments of the built-in `print`.
        """
        print_all(*args, **kwargs)

    saves_within_steps: bool = True
    """True if a hook within a training step (`on_train_batch_start`, `on_before_backward`, `on_exception`, ...) may
    save a checkpoint. If one of them is overridden, the Trainer records each step's start, which takes about 50 µs."""

    further_weights: str | None = None
    """The key of a second model state dict that the callback adds to checkpoints, such as averaged weights, or None.
    `Task.on_load_checkpoint` is called for them too, with a checkpoint copy that has them as `"state_dict"`."""

    @property
    @deprecated(since="0.1.0", removed_in="0.3.0", use="schedule")
    def rhythm(self) -> Duration | tuple[Duration, ...] | None:
        """Deprecated name of the attribute `schedule`, the interval at which a callback acts, such as `1M tokens`."""
        return self.schedule

    @rhythm.setter
    @deprecated(since="0.1.0", removed_in="0.3.0", use="schedule")
    def rhythm(self, schedule: Duration | tuple[Duration, ...] | None) -> None:
        self.schedule = schedule

    # state

    @property
    def state_key(self) -> str:
        """The key under which a checkpoint stores the callback's state.

        It must be unique within a Trainer. The default is the class name. If a Trainer may hold several callbacks of
        one class, override the property and return `build_state_key` with the arguments that distinguish them.
        """
        return type(self).__qualname__

    def build_state_key(self, **distinguishing: Any) -> str:
        """Return a state key that consists of the class name and the given arguments, such as `monitor="val_loss"`.

        Args:
            **distinguishing: Names and values of the arguments, such as `monitor="val_loss"`.
        """
        name = type(self).__qualname__
        return f"{name}{distinguishing!r}" if distinguishing else name

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a checkpoint stores for this callback: tensors, and values that JSON can represent."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the callback's state from a checkpoint.

        Args:
            state_dict: The dict that `state_dict` returned when the checkpoint was saved.
        """

    def forget_run(self) -> None:
        """Reset what this callback has recorded, such as a best score, before a new run starts.

        Called when a new Trainer starts `fit`. If that `fit` resumes from a checkpoint, `load_state_dict` then restores
        the state of the resumed run.
        """

    def is_state_sound(self, trainer: Trainer, task: Task) -> bool:
        """Return False to prevent the saving of a checkpoint, for example after NaN losses. True by default.

        Called on every callback before a checkpoint is saved. Called on all processes, which must return the same
        value. If any callback returns False, no checkpoint is saved.

        Args:
            trainer: The running Trainer.
            task: The task that the Trainer runs.
        """
        return True

    # all stages

    def setup(self, trainer: Trainer, task: Task, stage: str) -> None:
        """Run code when `fit`, `validate`, `test` or `predict` begins, before the model is moved to its device.

        Args:
            trainer: The running Trainer.
            task: The task that the Trainer runs.
            stage: `"fit"`, `"validate"`, `"test"` or `"predict"`.
        """

    def teardown(self, trainer: Trainer, task: Task, stage: str) -> None:
        """Run code at the very end of `fit`, `validate`, `test` or `predict`, after all other hooks.

        Args:
            trainer: The running Trainer.
            task: The task that the Trainer runs.
            stage: `"fit"`, `"validate"`, `"test"` or `"predict"`.
        """

    def on_exception(self, trainer: Trainer, task: Task, exception: BaseException) -> None:
        """Run code when an exception or an interrupt ends the run, before the exception is raised again.

        Other processes may still be running without an error, so the hook must not use collectives.

        Args:
            trainer: The running Trainer.
            task: The task that the Trainer runs.
            exception: The exception that ended the run.
        """

    def on_save_checkpoint(self, trainer: Trainer, task: Task, checkpoint: dict[str, Any]) -> None:
        """Run code before a checkpoint is written, for example to add or change entries of the checkpoint dict.

        Args:
            trainer: The running Trainer.
            task: The task that the Trainer runs.
            checkpoint: The checkpoint dict that will be written.
        """

    def on_load_checkpoint(self, trainer: Trainer, task: Task, checkpoint: dict[str, Any]) -> None:
        """Run code after a checkpoint has been read, before the run's state is restored from it.

        Args:
            trainer: The running Trainer.
            task: The task that the Trainer runs.
            checkpoint: The checkpoint dict that was read.
        """

    # fit

    def on_fit_start(self, trainer: Trainer, task: Task) -> None:
        """Run code when `fit` begins, after the model and the optimizers have been prepared."""

    def on_fit_end(self, trainer: Trainer, task: Task) -> None:
        """Run code when `fit` ends without an error or a preemption, after all checkpoints have been written."""

    def on_sanity_check_start(self, trainer: Trainer, task: Task) -> None:
        """Run code before the sanity check, which runs a few validation batches before training."""

    def on_sanity_check_end(self, trainer: Trainer, task: Task) -> None:
        """Run code after the sanity check, which runs a few validation batches before training."""

    def on_train_start(self, trainer: Trainer, task: Task) -> None:
        """Run code before the first training epoch, after the sanity check."""

    def on_train_end(self, trainer: Trainer, task: Task) -> None:
        """Run code after the last training epoch.

        Not called if an error or a preemption ends the run.
        """

    def on_train_epoch_start(self, trainer: Trainer, task: Task) -> None:
        """Run code at the start of each training epoch, before its first batch."""

    def on_train_epoch_end(self, trainer: Trainer, task: Task) -> None:
        """Run code when a training epoch ends, after any validation at its end.

        Metrics of the epoch are available.
        """

    def on_train_batch_start(self, trainer: Trainer, task: Task, batch: Any, batch_idx: int) -> None:
        """Run code before each training batch, which is already on the device.

        Args:
            trainer: The running Trainer.
            task: The task that the Trainer runs.
            batch: The batch of this process, on the device.
            batch_idx: The index of the batch in the epoch, from 0.
        """

    def on_train_batch_end(self, trainer: Trainer, task: Task, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Run code after each training batch, and after the optimizer step if the batch triggered one.

        Args:
            trainer: The running Trainer.
            task: The task that the Trainer runs.
            outputs: The value that `training_step` returned.
            batch: The batch of this process, on the device.
            batch_idx: The index of the batch in the epoch, from 0.
        """

    def on_before_zero_grad(self, trainer: Trainer, task: Task, optimizer: Optimizer) -> None:
        """Run code before an optimizer's gradients are cleared.

        Args:
            trainer: The running Trainer.
            task: The task that the Trainer runs.
            optimizer: The optimizer whose gradients will be cleared.
        """

    def on_before_backward(self, trainer: Trainer, task: Task, loss: Tensor) -> None:
        """Run code after the loss of a training batch has been computed, before its backward pass.

        Args:
            trainer: The running Trainer.
            task: The task that the Trainer runs.
            loss: The scalar loss, already scaled for gradient accumulation.
        """

    def on_after_backward(self, trainer: Trainer, task: Task) -> None:
        """Run code after each backward pass, before the optimizer step.

        Gradients may still be scaled for mixed precision.
        """

    def on_gradients_ready(self, trainer: Trainer, task: Task) -> bool | None:
        """Run code once per optimizer step, after its last backward pass and before gradients are unscaled or clipped.

        Called in automatic optimization only.

        Args:
            trainer: The running Trainer.
            task: The task that the Trainer runs.

        Returns:
            False to skip the optimizer step, else None. In a skipped step no optimizer and no scheduler steps, and the
            step is not counted. All processes must return the same value.
        """
        return None

    def on_before_optimizer_step(self, trainer: Trainer, task: Task, optimizer: Optimizer) -> None:
        """Run code before an optimizer steps.

        The accumulated gradients are unscaled, but not yet clipped.

        Args:
            trainer: The running Trainer.
            task: The task that the Trainer runs.
            optimizer: The optimizer that will step.
        """

    # validation

    def on_validation_start(self, trainer: Trainer, task: Task) -> None:
        """Run code when a validation starts, in `Trainer.validate` or during `Trainer.fit`."""

    def on_validation_end(self, trainer: Trainer, task: Task) -> None:
        """Run code at the end of each validation, when its metrics are in `trainer.callback_metrics`."""

    def on_validation_epoch_start(self, trainer: Trainer, task: Task) -> None:
        """Run code before the first validation batch, directly after `on_validation_start`."""

    def on_validation_epoch_end(self, trainer: Trainer, task: Task) -> None:
        """Run code after the last validation batch.

        `task.log` can still be called to log validation metrics.
        """

    def on_validation_batch_start(
        self, trainer: Trainer, task: Task, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Run code before each validation batch, which is already on the device.

        Args:
            trainer: The running Trainer.
            task: The task that the Trainer runs.
            batch: The batch of this process, on the device.
            batch_idx: The index of the batch in its loader, from 0.
            dataloader_idx: The index of the loader, from 0.
        """

    def on_validation_batch_end(
        self, trainer: Trainer, task: Task, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Run code after each validation batch, for example to collect the outputs of `validation_step`.

        Args:
            trainer: The running Trainer.
            task: The task that the Trainer runs.
            outputs: The value that `validation_step` returned.
            batch: The batch of this process, on the device.
            batch_idx: The index of the batch in its loader, from 0.
            dataloader_idx: The index of the loader, from 0.
        """

    # test

    def on_test_start(self, trainer: Trainer, task: Task) -> None:
        """Run code when `test` begins, before the first test batch."""

    def on_test_end(self, trainer: Trainer, task: Task) -> None:
        """Run code when `test` ends, when the test metrics are in `trainer.callback_metrics`."""

    def on_test_epoch_start(self, trainer: Trainer, task: Task) -> None:
        """Run code before the first test batch, directly after `on_test_start`."""

    def on_test_epoch_end(self, trainer: Trainer, task: Task) -> None:
        """Run code after the last test batch.

        `task.log` can still be called to log metrics of this test.
        """

    def on_test_batch_start(
        self, trainer: Trainer, task: Task, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Run code before each test batch, which is already on the device.

        The arguments are the same as for `on_validation_batch_start`.
        """

    def on_test_batch_end(
        self, trainer: Trainer, task: Task, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Run code after each test batch, for example to collect the outputs of `test_step`.

        The arguments are the same as for `on_validation_batch_end`.
        """

    # predict

    def on_predict_start(self, trainer: Trainer, task: Task) -> None:
        """Run code when `predict` begins, before the first prediction batch."""

    def on_predict_end(self, trainer: Trainer, task: Task) -> None:
        """Run code when `predict` ends, after the last prediction batch."""

    def on_predict_epoch_start(self, trainer: Trainer, task: Task) -> None:
        """Run code before the first prediction batch, directly after `on_predict_start`."""

    def on_predict_epoch_end(self, trainer: Trainer, task: Task) -> None:
        """Run code after the last prediction batch, directly before `on_predict_end`."""

    def on_predict_batch_start(
        self, trainer: Trainer, task: Task, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Run code before each prediction batch, which is already on the device.

        The arguments are the same as for `on_validation_batch_start`.
        """

    def on_predict_batch_end(
        self, trainer: Trainer, task: Task, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Run code after each prediction batch, for example to store the outputs of `predict_step`.

        The arguments are the same as for `on_validation_batch_end`.
        """


# Stages


class Verb(str, Enum):
    """Names of the Trainer methods that run a task. A member equals its string: `Verb.FIT == "fit"`.

    Attributes:
        FIT: Training, with validation during it.
        VALIDATE: Validation alone.
        TEST: Testing.
        PREDICT: Prediction.
    """

    FIT = "fit"
    VALIDATE = "validate"
    TEST = "test"
    PREDICT = "predict"

    def __str__(self) -> str:
        return str(self.value)


class Stage(str, Enum):
    """Stage of a run: training, validation, testing or prediction. Each member equals a string like `"train"`.

    Attributes:
        TRAIN: Training, in `fit`.
        VALIDATE: Validation, in `fit` or in `validate`.
        TEST: Testing.
        PREDICT: Prediction.
    """

    TRAIN = "train"
    VALIDATE = "validate"
    TEST = "test"
    PREDICT = "predict"

    def __str__(self) -> str:
        return str(self.value)

    @property
    def verb(self) -> Verb:
        return Verb.FIT if self is Stage.TRAIN else Verb(self.value)

    @property
    def hook(self) -> str:
        return "validation" if self is Stage.VALIDATE else str(self.value)

    @property
    def loader(self) -> str:
        return "val" if self is Stage.VALIDATE else str(self.value)

    @property
    def step_name(self) -> str:
        """The name of the task method for a batch of this stage, such as `"validation_step"`."""
        return "training_step" if self is Stage.TRAIN else f"{self.hook}_step"

    @property
    def loader_name(self) -> str:
        """The name of the method that returns the stage's dataloaders, such as `"val_dataloader"`."""
        return f"{self.loader}_dataloader"

    @property
    def limit_name(self) -> str:
        return f"limit_{self.loader}_batches"

    def hook_name(self, moment: str) -> str:
        return f"on_{self.hook}_{moment}"
