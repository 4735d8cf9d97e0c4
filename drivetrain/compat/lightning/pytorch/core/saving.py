"""Hyper-parameters in files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import yaml

from drivetrain.trackers.base import hyperparameters_of, plain


def load_hparams_from_yaml(config_yaml: str | os.PathLike[str], use_omegaconf: bool = True) -> dict[str, Any]:
    """Read hyper-parameters; an empty dict where there is no such file.

    Args:
        config_yaml: The file.
        use_omegaconf: Taken for Lightning's sake; they are plain values.
    """
    path = Path(config_yaml)
    return dict(yaml.safe_load(path.read_text()) or {}) if path.is_file() else {}


def save_hparams_to_yaml(config_yaml: str | os.PathLike[str], hparams: Any, use_omegaconf: bool = True) -> None:
    """Write hyper-parameters, those that YAML has no form for as text.

    Args:
        config_yaml: The file, in a directory that is there.
        hparams: A dict, dataclass or namespace.
        use_omegaconf: Taken for Lightning's sake.
    """
    Path(config_yaml).write_text(yaml.safe_dump(plain(hyperparameters_of(hparams)), sort_keys=False))
