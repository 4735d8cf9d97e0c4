"""Callback made of functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from drivetrain.callbacks.base import Callback

Hook = Callable[..., Any] | None


class LambdaCallback(Callback):
    """Callback built from functions, so that simple hooks need no subclass of `Callback`.

    Each argument is named after a hook and takes a function with the arguments of that hook. All arguments are
    optional. `Callback` documents when each hook is called.

    Raises:
        UnknownArgumentError: If an argument is not the name of a hook.

    Example:
        ```python
        from drivetrain import LambdaCallback, Trainer

        show = LambdaCallback(on_train_epoch_end=lambda trainer, task: print(trainer.current_epoch))
        trainer = Trainer(callbacks=[show], logger=False)
        ```
    """

    def __init__(
        self,
        setup: Hook = None,
        teardown: Hook = None,
        on_fit_start: Hook = None,
        on_fit_end: Hook = None,
        on_sanity_check_start: Hook = None,
        on_sanity_check_end: Hook = None,
        on_train_batch_start: Hook = None,
        on_train_batch_end: Hook = None,
        on_train_epoch_start: Hook = None,
        on_train_epoch_end: Hook = None,
        on_validation_epoch_start: Hook = None,
        on_validation_epoch_end: Hook = None,
        on_test_epoch_start: Hook = None,
        on_test_epoch_end: Hook = None,
        on_validation_batch_start: Hook = None,
        on_validation_batch_end: Hook = None,
        on_test_batch_start: Hook = None,
        on_test_batch_end: Hook = None,
        on_train_start: Hook = None,
        on_train_end: Hook = None,
        on_validation_start: Hook = None,
        on_validation_end: Hook = None,
        on_test_start: Hook = None,
        on_test_end: Hook = None,
        on_exception: Hook = None,
        on_save_checkpoint: Hook = None,
        on_load_checkpoint: Hook = None,
        on_before_backward: Hook = None,
        on_after_backward: Hook = None,
        on_before_optimizer_step: Hook = None,
        on_before_zero_grad: Hook = None,
        on_predict_start: Hook = None,
        on_predict_end: Hook = None,
        on_predict_batch_start: Hook = None,
        on_predict_batch_end: Hook = None,
        on_predict_epoch_start: Hook = None,
        on_predict_epoch_end: Hook = None,
        on_gradients_ready: Hook = None,
    ) -> None:
        # The Trainer checks the instance too, so hooks that are not set here cost nothing.
        given = {name: value for name, value in locals().items() if name != "self" and value is not None}
        vars(self).update(given)
