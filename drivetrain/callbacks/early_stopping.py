"""Callback that stops training when a metric no longer improves."""

from __future__ import annotations

import math
import os
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from drivetrain import checkpoint
from drivetrain.callbacks.base import Callback
from drivetrain.callbacks.step_schedule import (
    check_mode,
    decide_on_main_process,
    find_typo,
    is_better,
    missing_metric_message,
    monitored_value,
)
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.logging import get_logger

if TYPE_CHECKING:
    from torch import Tensor

    from drivetrain.trainer.task import Task
    from drivetrain.trainer.trainer import Trainer

logger = get_logger(__name__)


class EarlyStoppingReason(IntEnum):
    """Reason why `EarlyStopping` has stopped a run. Checkpoints store it as an integer.

    Attributes:
        NOT_STOPPED: The run was not stopped.
        STOPPING_THRESHOLD: The metric is better than `stopping_threshold`.
        DIVERGENCE_THRESHOLD: The metric is worse than `divergence_threshold`.
        PATIENCE_EXHAUSTED: The metric has not improved in `patience` checks.
        NON_FINITE_METRIC: The metric is NaN or infinite.
    """

    NOT_STOPPED = 0
    STOPPING_THRESHOLD = 1
    DIVERGENCE_THRESHOLD = 2
    PATIENCE_EXHAUSTED = 3
    NON_FINITE_METRIC = 4


class EarlyStopping(Callback):
    """Callback that stops training when a monitored metric has not improved for a number of checks.

    All processes stop together. The value of the main process decides.

    Cost on a device: no kernel, and no wait of the host between two checks.

    Args:
        monitor: The name of the logged metric.
        min_delta: The smallest improvement that counts. An improvement of exactly this size does not count.
        patience: The number of checks in a row without improvement after which training stops. Checks are counted, not
            epochs: with `Trainer(check_val_every_n_epoch=2)` and a patience of 3, training continues for 6 epochs.
        verbose: Log each improvement.
        mode: `"min"` if lower values are better, `"max"` if higher values are better.
        strict: Raise an error if the metric was not logged. If False, skip the check with a warning.
        check_finite: Stop when the metric is NaN or infinite.
        stopping_threshold: Stop at once when the metric is better than this value.
        divergence_threshold: Stop at once when the metric is worse than this value.
        check_on_train_epoch_end: Check at the end of each training epoch (True) or after each validation (False). If
            None, check at the end of the training epoch if each epoch ends with a validation, else after each
            validation.
        log_rank_zero_only: Log on the main process only, rather than on every process.
        restore_best_weights: At the end of `fit`, load the weights of the best check, whether or not this callback
            stopped the run. Each improvement saves them to `early_stopping_best_<run>` in the run's folder. The other
            state, such as that of optimizers, stays as it is.
        start_from_epoch: The first epoch whose checks count. Earlier ones are skipped, as in a warm-up.

    Attributes:
        best_score: The best value so far, a scalar tensor.
        wait_count: The number of checks since the best value.
        stopped_epoch: The epoch in which training was stopped, or 0.
        stopping_reason: The reason for the stop, an `EarlyStoppingReason`.
        stopping_reason_message: The reason for the stop as text, or None.

    Raises:
        ConfigurationError: If `mode` or `patience` is invalid. During the run, if the metric was not logged and
            `strict` is True.

    Example:
        ```python
        from drivetrain import EarlyStopping, Trainer

        trainer = Trainer(callbacks=[EarlyStopping("val_loss", patience=5)])
        ```
    """

    runs_last_at_epoch_end: ClassVar[bool] = True

    def __init__(
        self,
        monitor: str,
        min_delta: float = 0.0,
        patience: int = 3,
        verbose: bool = False,
        mode: str = "min",
        strict: bool = True,
        check_finite: bool = True,
        stopping_threshold: float | None = None,
        divergence_threshold: float | None = None,
        check_on_train_epoch_end: bool | None = None,
        log_rank_zero_only: bool = False,
        restore_best_weights: bool = False,
        start_from_epoch: int = 0,
    ) -> None:
        check_mode(mode, "EarlyStopping")
        if start_from_epoch < 0:
            raise ConfigurationError(f"EarlyStopping(start_from_epoch={start_from_epoch}): use an epoch from 0.")
        if patience < 0:
            raise ConfigurationError(f"EarlyStopping(patience={patience}): patience must be at least 0 checks.")
        self.monitor = monitor
        self.min_delta = abs(min_delta)
        self.patience = patience
        self.verbose = verbose
        self.mode = mode
        self.strict = strict
        self.check_finite = check_finite
        self.stopping_threshold = stopping_threshold
        self.divergence_threshold = divergence_threshold
        self.log_rank_zero_only = log_rank_zero_only
        self.restore_best_weights = restore_best_weights
        self.start_from_epoch = start_from_epoch
        self.forget_run()
        self._check_on_train_epoch_end = check_on_train_epoch_end
        self._checks_epoch_end = False  # set in `setup`
        self._fitting = False

    def forget_run(self) -> None:
        self.wait_count = 0
        self._forget_reason()
        self._best = math.inf if self.mode == "min" else -math.inf
        self._best_weights: str | None = None

    def _forget_reason(self) -> None:
        self.stopped_epoch = 0
        self.stopping_reason = EarlyStoppingReason.NOT_STOPPED
        self.stopping_reason_message: str | None = None

    @property
    def best_score(self) -> Tensor:
        """The best value of the monitored metric so far, as a scalar tensor, or infinity before the first check."""
        return torch.tensor(self._best)

    @property
    def state_key(self) -> str:
        return self.build_state_key(monitor=self.monitor, mode=self.mode)

    def state_dict(self) -> dict[str, Any]:
        return {
            "wait_count": self.wait_count,
            "stopped_epoch": self.stopped_epoch,
            "best_score": self._best,
            "patience": self.patience,
            "stopping_reason": int(self.stopping_reason),
            "stopping_reason_message": self.stopping_reason_message,
            "best_weights": self._best_weights,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.wait_count = state_dict["wait_count"]
        self.stopped_epoch = state_dict["stopped_epoch"]
        self._best = float(state_dict["best_score"])
        self.patience = state_dict["patience"]
        self.stopping_reason = EarlyStoppingReason(state_dict.get("stopping_reason", 0))
        self.stopping_reason_message = state_dict.get("stopping_reason_message")
        self._best_weights = state_dict.get("best_weights")

    def setup(self, trainer: Trainer, task: Task, stage: str) -> None:
        self._fitting = stage == "fit" and not trainer.fast_dev_run
        if self._check_on_train_epoch_end is not None:
            self._checks_epoch_end = self._check_on_train_epoch_end
        else:
            self._checks_epoch_end = trainer.validates_whole_epochs and trainer.check_val_every_n_epoch == 1

    def teardown(self, trainer: Trainer, task: Task, stage: str) -> None:
        self._fitting = False

    def on_sanity_check_end(self, trainer: Trainer, task: Task) -> None:
        if self._fitting:
            typo = decide_on_main_process(
                lambda: find_typo(trainer.logged.names("validate"), self.monitor, "EarlyStopping")
            )
            if typo is not None and self.strict:
                raise ConfigurationError(typo)
            if typo is not None:
                logger.warning(typo)

    def on_train_epoch_end(self, trainer: Trainer, task: Task) -> None:
        # Ctrl-C may end an epoch before its validation, so the metric would be that of an earlier one.
        if self._fitting and self._checks_epoch_end and not trainer.interrupted:
            self._run_early_stopping_check(trainer)

    def on_validation_end(self, trainer: Trainer, task: Task) -> None:
        if self._fitting and not self._checks_epoch_end and not trainer.sanity_checking:
            self._run_early_stopping_check(trainer)

    def on_fit_end(self, trainer: Trainer, task: Task) -> None:
        path = self._best_weights
        if not self.restore_best_weights or path is None or trainer.interrupted:
            return
        if not decide_on_main_process(lambda: checkpoint.is_checkpoint(path)):
            logger.warning(f"EarlyStopping: {path} is gone, so the weights of the last step are kept.")
            return
        trainer.load_weights(path)
        logger.info(f"EarlyStopping: the weights of the best {self.monitor}, {self._best:.6g}, are restored.")

    def _run_early_stopping_check(self, trainer: Trainer) -> None:
        if trainer.current_epoch < self.start_from_epoch:
            return
        value = decide_on_main_process(lambda: self._read(trainer))
        if value is None:
            return
        best = self._best
        stop, message = self._evaluate_stopping_criteria(value)
        if self.restore_best_weights and self._best != best:
            self._best_weights = decide_on_main_process(lambda: self._path(trainer))
            trainer.save_checkpoint(self._best_weights, weights_only=True)
        if stop:
            trainer.request_stop(f"EarlyStopping: {(message or '').rstrip('.')}", asker=self.state_key)
            self.stopped_epoch = trainer.current_epoch
            self.stopping_reason_message = message
        elif self.stopping_reason is not EarlyStoppingReason.NOT_STOPPED:
            # `min_epochs` or `min_steps` may have delayed the stop, and the metric has improved since.
            trainer.withdraw_stop(self.state_key)
            self._forget_reason()
        if message and (stop or self.verbose):
            logger.info(message, main_process_only=self.log_rank_zero_only)

    def _path(self, trainer: Trainer) -> str:
        # Not below `checkpoints`, where `resume="auto"` searches. Runs without a logger may share a folder.
        folder = os.path.abspath(trainer.log_dir or trainer.default_root_dir)
        return os.path.join(folder, f"early_stopping_best_{trainer.control.identity[:8]}")

    def _read(self, trainer: Trainer) -> float | None:
        metrics = trainer.callback_metrics
        value = monitored_value(metrics, self.monitor)
        if value is None:
            message = missing_metric_message(metrics, self.monitor, "EarlyStopping")
            if self.strict:
                raise ConfigurationError(f"{message} With strict=False, checks without the metric are skipped.")
            logger.warning_once(message)
        return value

    def _evaluate_stopping_criteria(self, value: float) -> tuple[bool, str | None]:
        """Compare a value with the best one. Return whether to stop training, and a message."""
        reason, message = self._reason_to_stop(value)
        if reason is not EarlyStoppingReason.NOT_STOPPED:
            self.stopping_reason = reason
            return True, message
        # The value must be better than the best one by more than `min_delta`.
        margin = self.min_delta if self.mode == "min" else -self.min_delta
        if is_better(value + margin, self._best, self.mode):
            better_by = abs(self._best - value)
            self._best, self.wait_count = value, 0
            known = f" by {better_by:.6g}" if math.isfinite(better_by) else ""
            return False, f"{self.monitor} has improved{known}; the best value is {value:.6g}."
        self.wait_count += 1
        if self.wait_count < self.patience:
            return False, None
        self.stopping_reason = EarlyStoppingReason.PATIENCE_EXHAUSTED
        return True, f"{self.monitor} did not improve in {self.wait_count} checks. The best value was {self._best:.6g}."

    def _reason_to_stop(self, value: float) -> tuple[EarlyStoppingReason, str | None]:
        name = self.monitor
        if self.check_finite and not math.isfinite(value):
            return (
                EarlyStoppingReason.NON_FINITE_METRIC,
                f"{name} = {value} is not finite. The best value was {self._best:.6g}.",
            )
        if self.stopping_threshold is not None and is_better(value, self.stopping_threshold, self.mode):
            return (
                EarlyStoppingReason.STOPPING_THRESHOLD,
                f"Stopping threshold reached: {name} = {value:.6g} has passed {self.stopping_threshold}.",
            )
        if self.divergence_threshold is not None and is_better(self.divergence_threshold, value, self.mode):
            return (
                EarlyStoppingReason.DIVERGENCE_THRESHOLD,
                f"Divergence threshold reached: {name} = {value:.6g} is worse than {self.divergence_threshold}.",
            )
        return EarlyStoppingReason.NOT_STOPPED, None
