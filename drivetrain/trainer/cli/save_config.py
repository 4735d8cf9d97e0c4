"""`SaveConfigCallback`: the configuration of a run, beside what the run writes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain.callbacks import Callback
from drivetrain.runtime.collectives import broadcast_object_list
from drivetrain.runtime.errors import ConfigurationError, DrivetrainError

if TYPE_CHECKING:
    from drivetrain.trainer.cli.parser import TrainerArgumentParser
    from drivetrain.trainer.task import Task
    from drivetrain.trainer.trainer import Trainer


class ConfigExistsError(DrivetrainError, RuntimeError):
    """A run would replace the configuration that another one has left."""


class SaveConfigCallback(Callback):
    """Writes the configuration of a run when it begins, so that `fit --config` of that file repeats the run.

    A `TrainerCLI` adds it. The file appears complete or not at all, and only one process writes.

    Args:
        parser: The parser that has read the configuration.
        config: The configuration.
        config_filename: The file's name.
        overwrite: Whether an existing file is replaced.
        multifile: Whether configurations that were read from files of their own become such files again.
        save_to_log_dir: Whether it is written to the first tracker's directory; without, only `save_config` is called.

    Raises:
        ConfigurationError: It would do nothing.
        ConfigExistsError: There is such a file already; raised when the run begins.

    Example:
        ```python
        from drivetrain.trainer.cli import SaveConfigCallback

        class LogConfig(SaveConfigCallback):
            def save_config(self, trainer, task, stage):
                trainer.logger.log_hyperparams({"config": self.parser.dump(self.config, skip_none=False)})
        ```
    """

    def __init__(
        self,
        parser: TrainerArgumentParser,
        config: Any,
        config_filename: str = "config.yaml",
        overwrite: bool = False,
        multifile: bool = False,
        save_to_log_dir: bool = True,
    ) -> None:
        self.parser = parser
        self.config = config
        self.config_filename = config_filename
        self.overwrite = overwrite
        self.multifile = multifile
        self.save_to_log_dir = save_to_log_dir
        self.already_saved = False
        if not save_to_log_dir and type(self).save_config is SaveConfigCallback.save_config:
            raise ConfigurationError(
                "`save_to_log_dir=False` only makes sense for a subclass of SaveConfigCallback that overrides "
                "save_config: else nothing is saved.",
                code="DT-005",
            )

    def setup(self, trainer: Trainer, task: Task, stage: str) -> None:
        if self.already_saved:
            return
        if self.save_to_log_dir:
            self._save(trainer)
        if trainer.is_global_zero:
            self.save_config(trainer, task, stage)
        self.already_saved = True

    def save_config(self, trainer: Trainer, task: Task, stage: str) -> None:
        """Save the configuration somewhere else, too; called in one process, so it cannot use collectives.

        Args:
            trainer: The Trainer that runs.
            task: The task that it runs.
            stage: `"fit"`, `"validate"`, `"test"` or `"predict"`.
        """

    def _save(self, trainer: Trainer) -> None:
        """Write the file in one process; all raise where it may not be written."""
        path = Path(trainer.local_dir, self.config_filename)
        refused = [trainer.is_global_zero and not self.overwrite and path.is_file()]
        if broadcast_object_list(refused)[0]:
            raise ConfigExistsError(
                f"{type(self).__name__} expected {path} not to exist. Aborting to avoid overwriting the configuration "
                "of another run. Remove the file, choose another --trainer.default_root_dir or a logger with a "
                'directory for each run, or give save_config_kwargs={"overwrite": True}, or '
                "save_config_callback=None to save none."
            )
        if trainer.is_global_zero:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._write(path)

    def _write(self, path: Path) -> None:
        if self.multifile:
            self.parser.save(self.config, path, skip_none=False, overwrite=self.overwrite, multifile=True)
            return
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        beside.write_text(self.parser.dump(self.config, skip_none=False), encoding="utf-8")
        os.replace(beside, path)
