"""The base of all callbacks: what happens around the loop, as named moments."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar

from drivetrain.runtime.errors import known_keywords
from drivetrain.runtime.terminal import print_all

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from drivetrain.runtime.durations import Duration
    from drivetrain.trainer.task import Task
    from drivetrain.trainer.trainer import Trainer


class Callback:
    """Something that happens around the loop: override the hooks you need, the others cost nothing.

    The Trainer looks once, when a run starts, which hooks a class overrides, and calls only those. Override
    them in a class: a function assigned to an instance is not seen. Every process of the run calls every
    hook, so a hook may use collectives; what should happen once belongs under `if trainer.is_global_zero`.

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

    # What the Trainer asks of a callback, each a class attribute to override.

    runs_last_at_epoch_end: ClassVar[bool] = False
    """Whether `on_train_epoch_end` waits until the task and other callbacks have logged what they log there: for
    callbacks that read logged values. Nothing can be logged in such a hook."""

    saves_checkpoints: ClassVar[bool] = False
    """Whether this callback writes checkpoints: it then comes after all others, whose state it saves, and the Trainer
    adds no `ModelCheckpoint` of its own."""

    is_progress_bar: ClassVar[bool] = False
    """Whether this callback shows the progress of a run: the Trainer then adds no bar of its own, and `Trainer.print`
    prints through the callback's `print`."""

    guards_values: ClassVar[bool] = False
    """Whether this callback acts on losses that are not finite, so that the Trainer need not warn of them."""

    run_identity: str | None = None
    """Which Trainer's `fit` the state of this callback belongs to; None before the first one."""

    rhythm: Duration | tuple[Duration, ...] | None = None
    """How often or when this callback acts, where that is measured in samples, tokens or parts of the run: the Trainer
    then counts these, and `trainer.progress.count` returns how many there were."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__init__" in vars(cls) and cls.__module__.startswith("drivetrain."):  # a user's class stays as it is
            cls.__init__ = known_keywords(cls.__init__)  # type: ignore[method-assign]

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print without breaking what this callback shows; called where `is_progress_bar` is set.

        Args:
            *args: What to print.
            **kwargs: As for the built-in `print`.
        """
        print_all(*args, **kwargs)

    saves_within_steps: bool = True
    """Whether a hook that runs within a step (`on_train_batch_start`, `on_before_backward`, `on_exception`, ...) may
    save a checkpoint. If one is overridden, the Trainer remembers where each step began, which takes some 50 µs."""

    further_weights: str | None = None
    """The entry of a checkpoint in which this callback keeps a second state dict of the model, such as an average.
    `Task.on_load_checkpoint` is called for it too, as the `"state_dict"` of a copy of the checkpoint."""

    # the state of a callback

    @property
    def state_key(self) -> str:
        """The name of this callback's state in a checkpoint: unique among the callbacks of one Trainer.

        The class's name here. A class of which one Trainer may hold several objects adds the arguments that
        distinguish them, see `build_state_key`.
        """
        return type(self).__qualname__

    def build_state_key(self, **distinguishing: Any) -> str:
        """Return the class's name, followed by the arguments that distinguish two objects of this class, as a dict.

        Args:
            **distinguishing: Arguments and their values, such as `monitor="val_loss"`.
        """
        name = type(self).__qualname__
        return f"{name}{distinguishing!r}" if distinguishing else name

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs of this callback: tensors, and values that JSON can hold."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `state_dict` returned.

        Args:
            state_dict: The state that the checkpoint holds under `state_key`.
        """

    def forget_run(self) -> None:
        """Forget what earlier runs left, such as a best value; called at the start of a `fit` of another Trainer.

        A `fit` that resumes a checkpoint gives the state of its run back with `load_state_dict` afterwards.
        """

    def is_state_sound(self, trainer: Trainer, task: Task) -> bool:
        """Return whether what would be saved now is worth going back to; asked before `ModelCheckpoint` saves.

        All processes are asked, and must answer alike. Where any callback returns False nothing is saved.

        Args:
            trainer: The Trainer that runs.
            task: The task that it runs.
        """
        return True

    # around everything

    def setup(self, trainer: Trainer, task: Task, stage: str) -> None:
        """Called when fit, validate, test or predict begins, before any model or optimizer is placed.

        Args:
            trainer: The Trainer that runs.
            task: The task that it runs.
            stage: `"fit"`, `"validate"`, `"test"` or `"predict"`.
        """

    def teardown(self, trainer: Trainer, task: Task, stage: str) -> None:
        """Called when fit, validate, test or predict is over, as the last hook.

        Args:
            trainer: The Trainer that runs.
            task: The task that it runs.
            stage: `"fit"`, `"validate"`, `"test"` or `"predict"`.
        """

    def on_exception(self, trainer: Trainer, task: Task, exception: BaseException) -> None:
        """Called when an exception or an interrupt ends the run, before it is raised on.

        Args:
            trainer: The Trainer that runs.
            task: The task that it runs.
            exception: What ended the run. Other processes may not have raised: no collectives here.
        """

    def on_save_checkpoint(self, trainer: Trainer, task: Task, checkpoint: dict[str, Any]) -> None:
        """Called when a checkpoint is about to be written, to add to it or change it.

        Args:
            trainer: The Trainer that runs.
            task: The task that it runs.
            checkpoint: The state that will be written.
        """

    def on_load_checkpoint(self, trainer: Trainer, task: Task, checkpoint: dict[str, Any]) -> None:
        """Called when a checkpoint was read, before the state is taken over.

        Args:
            trainer: The Trainer that runs.
            task: The task that it runs.
            checkpoint: The state that was read.
        """

    # fit

    def on_fit_start(self, trainer: Trainer, task: Task) -> None:
        """Called when fit begins, with the model and its optimizers in place."""

    def on_fit_end(self, trainer: Trainer, task: Task) -> None:
        """Called when fit ends."""

    def on_sanity_check_start(self, trainer: Trainer, task: Task) -> None:
        """Called before the few validation batches that try the validation code before training."""

    def on_sanity_check_end(self, trainer: Trainer, task: Task) -> None:
        """Called after the few validation batches that try the validation code before training."""

    def on_train_start(self, trainer: Trainer, task: Task) -> None:
        """Called when training begins, after the sanity check."""

    def on_train_end(self, trainer: Trainer, task: Task) -> None:
        """Called when training ends."""

    def on_train_epoch_start(self, trainer: Trainer, task: Task) -> None:
        """Called when a training epoch begins."""

    def on_train_epoch_end(self, trainer: Trainer, task: Task) -> None:
        """Called when a training epoch ends, after a validation at its end; the epoch's metrics are there."""

    def on_train_batch_start(self, trainer: Trainer, task: Task, batch: Any, batch_idx: int) -> None:
        """Called before each training batch.

        Args:
            trainer: The Trainer that runs.
            task: The task that it runs.
            batch: This process's batch, on the device.
            batch_idx: The number of the batch in the epoch, from 0.
        """

    def on_train_batch_end(self, trainer: Trainer, task: Task, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Called after each training batch and, at the end of an accumulation window, its optimizer step.

        Args:
            trainer: The Trainer that runs.
            task: The task that it runs.
            outputs: What training_step returned.
            batch: This process's batch, on the device.
            batch_idx: The number of the batch in the epoch, from 0.
        """

    def on_before_zero_grad(self, trainer: Trainer, task: Task, optimizer: Optimizer) -> None:
        """Called before the gradients are cleared.

        Args:
            trainer: The Trainer that runs.
            task: The task that it runs.
            optimizer: The optimizer whose parameters' gradients will be cleared.
        """

    def on_before_backward(self, trainer: Trainer, task: Task, loss: Tensor) -> None:
        """Called before backward.

        Args:
            trainer: The Trainer that runs.
            task: The task that it runs.
            loss: The loss, a scalar, weighed for accumulation.
        """

    def on_after_backward(self, trainer: Trainer, task: Task) -> None:
        """Called after backward, before the optimizer steps; gradients may still be scaled."""

    def on_gradients_ready(self, trainer: Trainer, task: Task) -> bool | None:
        """Called once for each optimizer step, after its last backward and before anything is unscaled or clipped.

        Automatic optimization only.

        Args:
            trainer: The Trainer that runs.
            task: The task that it runs.

        Returns:
            False to leave the step out: no optimizer and no scheduler steps, and it does not count. All processes
            must return the same.
        """
        return None

    def on_before_optimizer_step(self, trainer: Trainer, task: Task, optimizer: Optimizer) -> None:
        """Called before an optimizer steps, with the window's gradients unscaled and not yet clipped.

        Args:
            trainer: The Trainer that runs.
            task: The task that it runs.
            optimizer: The optimizer that will step.
        """

    # validation

    def on_validation_start(self, trainer: Trainer, task: Task) -> None:
        """Called when a validation begins."""

    def on_validation_end(self, trainer: Trainer, task: Task) -> None:
        """Called when a validation ends; its metrics are in `trainer.callback_metrics`."""

    def on_validation_epoch_start(self, trainer: Trainer, task: Task) -> None:
        """Called when the pass over the validation loaders begins."""

    def on_validation_epoch_end(self, trainer: Trainer, task: Task) -> None:
        """Called when the pass over the validation loaders ends; `task.log` still counts for this epoch."""

    def on_validation_batch_start(
        self, trainer: Trainer, task: Task, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called before each validation batch.

        Args:
            trainer: The Trainer that runs.
            task: The task that it runs.
            batch: This process's batch, on the device.
            batch_idx: The number of the batch in its loader, from 0.
            dataloader_idx: The number of the loader, from 0.
        """

    def on_validation_batch_end(
        self, trainer: Trainer, task: Task, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called after each validation batch.

        Args:
            trainer: The Trainer that runs.
            task: The task that it runs.
            outputs: What validation_step returned.
            batch: This process's batch, on the device.
            batch_idx: The number of the batch in its loader, from 0.
            dataloader_idx: The number of the loader, from 0.
        """

    # test

    def on_test_start(self, trainer: Trainer, task: Task) -> None:
        """Called when a test begins."""

    def on_test_end(self, trainer: Trainer, task: Task) -> None:
        """Called when a test ends; its metrics are in `trainer.callback_metrics`."""

    def on_test_epoch_start(self, trainer: Trainer, task: Task) -> None:
        """Called when the pass over the test loaders begins."""

    def on_test_epoch_end(self, trainer: Trainer, task: Task) -> None:
        """Called when the pass over the test loaders ends; `task.log` still counts for this epoch."""

    def on_test_batch_start(
        self, trainer: Trainer, task: Task, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called before each test batch, with arguments as for `on_validation_batch_start`."""

    def on_test_batch_end(
        self, trainer: Trainer, task: Task, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called after each test batch, with arguments as for `on_validation_batch_end`."""

    # predict

    def on_predict_start(self, trainer: Trainer, task: Task) -> None:
        """Called when a prediction run begins."""

    def on_predict_end(self, trainer: Trainer, task: Task) -> None:
        """Called when a prediction run ends."""

    def on_predict_epoch_start(self, trainer: Trainer, task: Task) -> None:
        """Called when the pass over the prediction loaders begins."""

    def on_predict_epoch_end(self, trainer: Trainer, task: Task) -> None:
        """Called when the pass over the prediction loaders ends."""

    def on_predict_batch_start(
        self, trainer: Trainer, task: Task, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called before each prediction batch, with arguments as for `on_validation_batch_start`."""

    def on_predict_batch_end(
        self, trainer: Trainer, task: Task, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called after each prediction batch, with arguments as for `on_validation_batch_end`."""


# `Stage`: what a run does now, and the words for it in verbs, hooks and loaders


class Verb(str, Enum):
    """A method of the Trainer that runs a task. Each is equal to its name as text: `stage == "fit"` in `setup`.

    Attributes:
        FIT: Training, with validation in between.
        VALIDATE: Validating alone.
        TEST: Testing.
        PREDICT: Predicting.
    """

    FIT = "fit"
    VALIDATE = "validate"
    TEST = "test"
    PREDICT = "predict"

    def __str__(self) -> str:
        return str(self.value)


class Stage(str, Enum):
    """What a run does now. Each is equal to its name as text: `trainer.stage == "validate"`.

    Attributes:
        TRAIN: Training, in `fit`.
        VALIDATE: Validating, in `fit` or in `validate`.
        TEST: Testing.
        PREDICT: Predicting.
    """

    TRAIN = "train"
    VALIDATE = "validate"
    TEST = "test"
    PREDICT = "predict"

    def __str__(self) -> str:
        return str(self.value)

    @property
    def verb(self) -> Verb:
        """The method of the Trainer that begins it: `"fit"`, `"validate"`, `"test"` or `"predict"`."""
        return Verb.FIT if self is Stage.TRAIN else Verb(self.value)

    @property
    def hook(self) -> str:
        """The word in the names of its hooks and its step: `"validation"` in `on_validation_start`."""
        return "validation" if self is Stage.VALIDATE else str(self.value)

    @property
    def loader(self) -> str:
        """The word in the names of its loader and its limit: `"val"` in `val_dataloader`."""
        return "val" if self is Stage.VALIDATE else str(self.value)

    @property
    def step_name(self) -> str:
        """The task's method for one batch, such as `"validation_step"`."""
        return "training_step" if self is Stage.TRAIN else f"{self.hook}_step"

    @property
    def loader_name(self) -> str:
        """The method that makes its loaders, such as `"val_dataloader"`."""
        return f"{self.loader}_dataloader"

    @property
    def limit_name(self) -> str:
        """The Trainer's argument that limits its batches, such as `"limit_val_batches"`."""
        return f"limit_{self.loader}_batches"

    def hook_name(self, moment: str) -> str:
        """Return the name of one of its hooks."""
        return f"on_{self.hook}_{moment}"
