"""What is saved, and under which name."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from drivetrain.callbacks.checkpoint import folder
from drivetrain.callbacks.checkpoint.kept import KeptCheckpoints
from drivetrain.callbacks.checkpoint.policy import CheckpointName
from drivetrain.callbacks.support.monitored_metric import missing_metric_message, monitored_value
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.logging import get_logger

if TYPE_CHECKING:
    from drivetrain.callbacks.model_checkpoint import ModelCheckpoint
    from drivetrain.trainer.trainer import Trainer

logger = get_logger(__name__)


@dataclass
class Decision:
    """What is to be saved now, the same on all processes.

    Attributes:
        score: The monitored value.
        path: Save here, under a name of its own.
        among_best: Whether that one is kept for its score.
        last: Let this name stand for it too, or save here where there is no `path`.
        gone: The name that stood for the newest before, where names change as the run goes.
    """

    score: float | None = None
    path: str | None = None
    among_best: bool = False
    last: str | None = None
    gone: str = ""

    @property
    def target(self) -> str | None:
        """Where the state is written."""
        return self.path or self.last

    def report(self, options: ModelCheckpoint, trainer: Trainer) -> None:
        """Log it.

        Args:
            options: The callback that took it.
            trainer: The trainer.
        """
        where = f"Epoch {trainer.current_epoch}, step {trainer.global_step}"
        score = "" if self.score is None else f" with {options.monitor} = {self.score:.6g}"
        if self.path is not None:
            logger.info(f"{where}: saved {self.path}{score}.")
        else:
            logger.info(f"{where}: not among the best {options.save_top_k}{score}.")


def decide(
    options: ModelCheckpoint,
    kept: KeptCheckpoints,
    name: CheckpointName,
    trainer: Trainer,
    was_validated: bool,
    only_last: bool = False,
) -> Decision:
    """Decide what is saved now; called by the main process alone, changes nothing.

    Args:
        options: The callback, whose arguments count.
        kept: Its checkpoints.
        name: What a new one is called.
        trainer: The trainer.
        was_validated: Whether this run had a validation yet.
        only_last: Save `last` alone.

    Raises:
        ConfigurationError: The monitored metric was not logged.
    """
    metrics = trainer.callback_metrics
    decision = Decision(score=None if only_last else _score(options, trainer, was_validated))
    decision.among_best = not only_last and kept.best.wants(decision.score)
    if decision.among_best or (options.save_last == "link" and not only_last):
        text = name.format(trainer.current_epoch, trainer.global_step, metrics)
        _warn_of_unknown_fields(options, name, metrics)
        # A name is used again only for a checkpoint that goes anyway.
        going = [kept.beside, *kept.passing, *kept.doomed, *(kept.best.displaced() if decision.among_best else ())]
        decision.path = _path(options, trainer, text, own=going)
    if options.save_last:
        last = options.name_of(options.CHECKPOINT_NAME_LAST)
        text = last.format(trainer.current_epoch, trainer.global_step, metrics)
        decision.last = _path(options, trainer, text, own=(kept.last,))
        if last.fields and kept.last != decision.last:
            decision.gone = kept.last
    return decision


def _path(options: ModelCheckpoint, trainer: Trainer, name: str, own: Sequence[str]) -> str:
    """The path for a name: a free one, or one of this run's own, to be replaced."""
    path = os.path.join(options.dirpath or "", name)
    if not options.enable_version_counter:
        return path + options.FILE_EXTENSION
    as_file = trainer.format_of_checkpoint(path, block=not options.async_save) == "lightning"
    files = trainer.checkpoint_files

    def may_replace(candidate: str) -> bool:
        return candidate in own and files.may_replace(candidate, as_file)

    return folder.free_path(path, options.FILE_EXTENSION, may_replace, options.STARTING_VERSION)


def _score(options: ModelCheckpoint, trainer: Trainer, was_validated: bool) -> float | None:
    if options.monitor is None:
        return None
    metrics = {"epoch": trainer.current_epoch, "step": trainer.global_step, **trainer.callback_metrics}
    score = monitored_value(metrics, options.monitor)
    if score is None:
        message = missing_metric_message(metrics, options.monitor, "ModelCheckpoint")
        is_early = trainer.validates or options.every_n_epochs == 0 or trainer.check_val_every_n_epoch != 1
        if was_validated or not is_early:
            raise ConfigurationError(message, code="DT-089")
        logger.warning_once(f"{message} There was no validation yet, so nothing is kept for now.")
    elif score != score and options.keeps_nan:
        return math.inf if options.mode == "min" else -math.inf
    elif score != score:
        logger.warning(
            f"ModelCheckpoint: {options.monitor} is NaN at step {trainer.global_step}. Such a model is not kept among "
            "the best."
        )
    return score


def _warn_of_unknown_fields(options: ModelCheckpoint, name: CheckpointName, metrics: Mapping[str, Any]) -> None:
    for key in name.fields:
        if key not in metrics and key not in ("epoch", "step"):
            logger.warning_once(
                f"ModelCheckpoint(filename={options.filename!r}): there is no metric {key!r}, so the name has nan. "
                f"Logged so far: {', '.join(map(repr, sorted(metrics))) or 'nothing'}."
            )
