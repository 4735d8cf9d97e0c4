"""From where in the loop values may be logged, and what that means for them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LogScope:
    """From where in the loop values are logged now, and what that means for them.

    Attributes:
        stage: `"train"`, `"validate"`, `"test"`; or the hook's name where logging is not allowed.
        on_step: Default of `on_step`; None where logging is not allowed.
        on_epoch: Default of `on_epoch`.
        has_batch: Whether there is a batch whose rows weigh a value.
    """

    stage: str
    on_step: bool | None
    on_epoch: bool = False
    has_batch: bool = False


NOWHERE = LogScope("outside of the loop", None)
TRAIN_STEP = LogScope("train", True, False, has_batch=True)
TRAIN_EPOCH = LogScope("train", False, True)
TRAIN_END = LogScope("in on_train_end", None)
MONITORING = LogScope(
    "in on_train_epoch_end of a callback with `runs_last_at_epoch_end`, which reads what the others logged", None
)
SAVING = LogScope("in on_save_checkpoint", None)
VALIDATE_STEP = LogScope("validate", False, True, has_batch=True)
VALIDATE_EPOCH = LogScope("validate", False, True)
TEST_STEP = LogScope("test", False, True, has_batch=True)
TEST_EPOCH = LogScope("test", False, True)
PREDICT = LogScope("in predict", None)
TRANSFER = LogScope("in a hook that moves a batch to the device", None)
