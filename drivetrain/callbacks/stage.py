"""`Stage`: what a run does now, and the words for it in verbs, hooks and loaders."""

from __future__ import annotations

from enum import Enum


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
        """Return the name of one of its hooks.

        Args:
            moment: Such as `"start"` or `"batch_end"`.
        """
        return f"on_{self.hook}_{moment}"
