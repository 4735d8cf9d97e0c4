"""Save and load hyper-parameter files."""

from __future__ import annotations

import csv
import os
from enum import Enum
from pathlib import Path
from typing import Any

import yaml

from drivetrain.compat.lightning.fabric.utilities.cloud_io import get_filesystem
from drivetrain.compat.lightning.fabric.utilities.rank_zero import rank_zero_warn
from drivetrain.runtime.yaml_text import load_yaml
from drivetrain.trackers.base import hyperparameters_of, plain
from drivetrain.trainer.hyper_parameters import hyper_parameters_in

__all__ = [
    "get_filesystem",
    "load_hparams_from_tags_csv",
    "load_hparams_from_yaml",
    "save_hparams_to_tags_csv",
    "save_hparams_to_yaml",
]


def _load_from_checkpoint(
    cls: Any,
    checkpoint_path: Any,
    map_location: Any = None,
    hparams_file: Any = None,
    strict: bool | None = None,
    **kwargs: Any,
) -> Any:
    """Create a module or data module from a checkpoint, for classes that override `load_from_checkpoint`."""
    from drivetrain.compat.lightning.pytorch import LightningDataModule, LightningModule

    kind: Any = LightningModule if issubclass(cls, LightningModule) else LightningDataModule
    if strict is not None:
        kwargs["strict"] = strict
    return kind.load_from_checkpoint.__func__(
        cls, checkpoint_path, map_location=map_location, hparams_file=hparams_file, **kwargs
    )


def load_hparams_from_yaml(config_yaml: str | os.PathLike[str], use_omegaconf: bool = True) -> dict[str, Any]:
    """Read hyper-parameters from a YAML file. Return an empty dict if the file does not exist."""
    path = Path(config_yaml)
    return dict(load_yaml(path.read_text()) or {}) if path.is_file() else {}


def save_hparams_to_yaml(config_yaml: str | os.PathLike[str], hparams: Any, use_omegaconf: bool = True) -> None:
    """Write hyper-parameters to a YAML file. Values that YAML cannot represent are skipped with a warning."""
    values = {
        name: value.name if isinstance(value, Enum) else value for name, value in hyperparameters_of(hparams).items()
    }
    written = {name: value for name, value in values.items() if _has_form(name, value)}
    Path(config_yaml).write_text(yaml.safe_dump(plain(written), sort_keys=False))


def _has_form(name: str, value: Any) -> bool:
    """Return True if YAML can represent a value. Warns if not."""
    try:
        yaml.dump(value)
    except (TypeError, ValueError, yaml.YAMLError):  # pickling can raise any exception
        rank_zero_warn(f"Skipping {name!r} parameter because it is not possible to safely dump to YAML.")
        return False
    return True


def load_hparams_from_tags_csv(tags_csv: str | os.PathLike[str]) -> dict[str, Any]:
    """Read hyper-parameters from a CSV file. Return an empty dict if the file does not exist."""
    return hyper_parameters_in(tags_csv) if Path(tags_csv).is_file() else {}


def save_hparams_to_tags_csv(tags_csv: str | os.PathLike[str], hparams: Any) -> None:
    """Write hyper-parameters to a CSV file with one row per value."""
    with open(tags_csv, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("key", "value"))
        writer.writerows(hyperparameters_of(hparams).items())
