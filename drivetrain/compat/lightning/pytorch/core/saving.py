"""Hyper-parameters in files."""

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
    """Make a module or data module of a checkpoint, for classes that override `load_from_checkpoint`."""
    from drivetrain.compat.lightning.pytorch import LightningDataModule, LightningModule

    kind: Any = LightningModule if issubclass(cls, LightningModule) else LightningDataModule
    if strict is not None:
        kwargs["strict"] = strict
    return kind.load_from_checkpoint.__func__(
        cls, checkpoint_path, map_location=map_location, hparams_file=hparams_file, **kwargs
    )


def load_hparams_from_yaml(config_yaml: str | os.PathLike[str], use_omegaconf: bool = True) -> dict[str, Any]:
    """Read hyper-parameters; an empty dict where there is no such file."""
    path = Path(config_yaml)
    return dict(load_yaml(path.read_text()) or {}) if path.is_file() else {}


def save_hparams_to_yaml(config_yaml: str | os.PathLike[str], hparams: Any, use_omegaconf: bool = True) -> None:
    """Write hyper-parameters: objects as text, members of an `Enum` by name, with a warning of what is left out."""
    values = {
        name: value.name if isinstance(value, Enum) else value for name, value in hyperparameters_of(hparams).items()
    }
    written = {name: value for name, value in values.items() if _has_form(name, value)}
    Path(config_yaml).write_text(yaml.safe_dump(plain(written), sort_keys=False))


def _has_form(name: str, value: Any) -> bool:
    """Whether YAML has a form for a value; warns where it has none."""
    try:
        yaml.dump(value)
    except (TypeError, ValueError, yaml.YAMLError):  # whatever the object raises where it is pickled
        rank_zero_warn(f"Skipping {name!r} parameter because it is not possible to safely dump to YAML.")
        return False
    return True


def load_hparams_from_tags_csv(tags_csv: str | os.PathLike[str]) -> dict[str, Any]:
    """Read hyper-parameters of a CSV file with a line for each; an empty dict where there is no such file."""
    return hyper_parameters_in(tags_csv) if Path(tags_csv).is_file() else {}


def save_hparams_to_tags_csv(tags_csv: str | os.PathLike[str], hparams: Any) -> None:
    """Write hyper-parameters to a CSV file, a line for each."""
    with open(tags_csv, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("key", "value"))
        writer.writerows(hyperparameters_of(hparams).items())
