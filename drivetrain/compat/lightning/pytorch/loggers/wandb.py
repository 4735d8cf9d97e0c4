"""`WandbLogger` with annotations as types rather than strings, which command lines need."""

import inspect
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from drivetrain.compat.lightning.fabric.utilities.rank_zero import rank_zero_only, rank_zero_warn
from drivetrain.compat.lightning.pytorch.loggers.checkpoint_uploads import CheckpointUploads, SavedCheckpoint
from drivetrain.compat.lightning.pytorch.loggers.logger import Logger, rank_zero_experiment
from drivetrain.compat.lightning.pytorch.loggers.packages import check_installed, with_prefix
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.trackers.base import hyperparameters_of, plain

__all__ = ["WandbLogger"]

_STEP = "trainer/global_step"


class WandbLogger(Logger):
    """Logger for Weights & Biases that writes synchronously. `experiment` is the run, which stays open.

    If the script has already opened a run, the logger uses it.
    """

    def __init__(
        self,
        name: str | None = None,
        save_dir: str | os.PathLike[str] = ".",
        version: str | None = None,
        offline: bool = False,
        dir: str | os.PathLike[str] | None = None,
        id: str | None = None,
        anonymous: bool | None = None,
        project: str | None = None,
        log_model: Literal["all"] | bool = False,
        experiment: Any = None,
        prefix: str = "",
        checkpoint_name: str | None = None,
        add_file_policy: Literal["mutable", "immutable"] = "mutable",
        **kwargs: Any,
    ) -> None:
        check_installed("WandbLogger", "wandb", "wandb")
        if offline and log_model:
            raise ConfigurationError(
                f"WandbLogger(offline=True, log_model={log_model!r}): checkpoints cannot be uploaded in offline mode. "
                "Leave one of the two out.",
            )
        super().__init__()
        self._offline, self._prefix = offline, prefix
        self._experiment = experiment
        self._uploads = CheckpointUploads(log_model)
        self._checkpoint_name, self._add_file_policy = checkpoint_name, add_file_policy
        self._is_elsewhere = False
        place = save_dir if dir is None else dir
        self._wandb_init: dict[str, Any] = {
            "name": name,
            "project": project or os.environ.get("WANDB_PROJECT") or "lightning_logs",
            "dir": os.fspath(place),
            "id": version or id,
            "resume": "allow",
            "anonymous": ("allow" if anonymous else None),
            **kwargs,
        }

    @property
    def name(self) -> str:  # type: ignore[override]
        """Name of the project. The name of the run is `experiment.name`."""
        return str(self._wandb_init["project"])

    @property
    def version(self) -> str | None:
        """ID of the run, or None if it is not known yet."""
        known: str | None = self._wandb_init["id"] if self._experiment is None else self._experiment.id
        return known

    @property
    def save_dir(self) -> str:
        """Directory of all runs."""
        return str(self._wandb_init["dir"])

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The wandb run. On ranks other than 0, an object that does nothing."""
        if self._experiment is None:
            self._experiment = self._open()
            if callable(getattr(self._experiment, "define_metric", None)):
                self._define_axis()
        return self._experiment

    def _open(self) -> Any:
        import wandb

        if self._offline:
            os.environ["WANDB_MODE"] = "dryrun"
        if wandb.run is not None:
            rank_zero_warn(
                "There is a wandb run already in progress, which WandbLogger takes. Call `wandb.finish()` before for a "
                "run of its own."
            )
            return wandb.run
        if self._is_elsewhere and hasattr(wandb, "attach"):
            return wandb.attach(self._wandb_init["id"])
        taken = inspect.signature(wandb.init).parameters.get("anonymous")
        options = dict(self._wandb_init)
        if options["anonymous"] is None and taken is not None and taken.default is not None:
            del options["anonymous"]  # wandb 0.2x and later warn about this argument for every value
        return wandb.init(**options)

    @property
    def _has_axis_of_its_own(self) -> bool:
        """True if wandb reads the steps from TensorBoard's files."""
        return bool(self._wandb_init.get("sync_tensorboard"))

    def _define_axis(self) -> None:
        if self._has_axis_of_its_own:
            self._experiment.define_metric("*", step_metric="global_step")
        else:
            self._experiment.define_metric(_STEP)
            self._experiment.define_metric("*", step_metric=_STEP, step_sync=True)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state with which a copy in another process writes to the same run. Opens the run."""
        run = self.experiment
        known = getattr(run, "id", None)
        state = {**self.__dict__, "_experiment": None, "_is_elsewhere": True}
        return {**state, "_wandb_init": {**self._wandb_init, "id": known or self._wandb_init["id"]}}

    # values

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log the metrics of one step."""
        values = with_prefix(metrics, self._prefix)
        is_numbered = step is not None and not self._has_axis_of_its_own
        self.experiment.log({**values, _STEP: step} if is_numbered else values)

    @rank_zero_only
    def log_hyperparams(self, params: Any) -> None:
        """Add hyper-parameters to the run's configuration."""
        self.experiment.config.update(plain(hyperparameters_of(params)), allow_val_change=True)

    def watch(self, model: Any, log: str | None = "gradients", log_freq: int = 100, log_graph: bool = True) -> None:
        """Record gradients, parameters and the graph of a model in wandb."""
        self.experiment.watch(model, log=log, log_freq=log_freq, log_graph=log_graph)

    @rank_zero_only
    def log_table(
        self,
        key: str,
        columns: Sequence[str] | None = None,
        data: Any = None,
        dataframe: Any = None,
        step: int | None = None,
    ) -> None:
        """Log a table from columns and rows, or from a DataFrame."""
        import wandb

        self.log_metrics({key: wandb.Table(columns=columns, data=data, dataframe=dataframe)}, step)

    def log_text(  # type: ignore[override]
        self,
        key: str,
        columns: Sequence[str] | None = None,
        data: Any = None,
        dataframe: Any = None,
        step: int | None = None,
    ) -> None:
        """Log a table of texts."""
        self.log_table(key, columns, data, dataframe, step)

    @rank_zero_only
    def log_image(self, key: str, images: list[Any], step: int | None = None, **kwargs: Any) -> None:
        """Log a list of images."""
        import wandb

        self._log_media(wandb.Image, "images", key, images, step, kwargs)

    @rank_zero_only
    def log_audio(self, key: str, audios: list[Any], step: int | None = None, **kwargs: Any) -> None:
        """Log a list of audio clips."""
        import wandb

        self._log_media(wandb.Audio, "audios", key, audios, step, kwargs)

    @rank_zero_only
    def log_video(self, key: str, videos: list[Any], step: int | None = None, **kwargs: Any) -> None:
        """Log a list of videos."""
        import wandb

        self._log_media(wandb.Video, "videos", key, videos, step, kwargs)

    def _log_media(
        self, kind: Any, what: str, key: str, items: list[Any], step: int | None, options: Mapping[str, Any]
    ) -> None:
        if not isinstance(items, list):
            raise TypeError(f'Expected a list as "{what}", found {type(items)}')
        for name, given in options.items():
            if len(given) != len(items):
                raise ValueError(f"Expected {len(items)} items but only found {len(given)} for {name}")
        made = [
            kind(item, **{name: given[index] for name, given in options.items()}) for index, item in enumerate(items)
        ]
        self.log_metrics({key: made}, step)

    # artifacts

    def use_artifact(self, artifact: str, artifact_type: str | None = None) -> Any:
        """Mark an artifact as an input of the run, and return it."""
        return self.experiment.use_artifact(artifact, type=artifact_type)

    @staticmethod
    @rank_zero_only
    def download_artifact(
        artifact: str,
        save_dir: str | os.PathLike[str] | None = None,
        artifact_type: str | None = None,
        use_artifact: bool | None = True,
    ) -> str:
        """Download an artifact, and return its directory."""
        import wandb

        if wandb.run is not None and use_artifact:
            found = wandb.run.use_artifact(artifact)
        else:
            found = wandb.Api().artifact(artifact, type=artifact_type)
        return str(found.download(root=None if save_dir is None else os.fspath(save_dir)))

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        for saved in self._uploads.after_save(checkpoint_callback):
            self._upload(saved)

    @rank_zero_only
    def finalize(self, status: str = "success", message: str = "") -> None:
        if status == "success":
            for saved in self._uploads.at_end():
                self._upload(saved)

    def _upload(self, saved: SavedCheckpoint) -> None:
        import wandb

        run = self.experiment
        name = self._checkpoint_name or f"model-{run.id}"
        artifact = wandb.Artifact(name=name, type="model", metadata=saved.metadata)
        if os.path.isdir(saved.path):
            artifact.add_dir(saved.path, name="model.ckpt", policy=self._add_file_policy)
        else:
            artifact.add_file(saved.path, name="model.ckpt", policy=self._add_file_policy)
        run.log_artifact(artifact, aliases=saved.aliases)
