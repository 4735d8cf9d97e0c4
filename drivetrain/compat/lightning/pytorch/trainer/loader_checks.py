"""What Lightning warns of in a loader."""

from __future__ import annotations

import multiprocessing

from torch.utils.data import DataLoader, RandomSampler

from drivetrain.callbacks.base import Stage
from drivetrain.compat.lightning.fabric.utilities import data
from drivetrain.compat.lightning.fabric.utilities.rank_zero import rank_zero_warn
from drivetrain.compat.lightning.fabric.utilities.warnings import PossibleUserWarning


def warn_of_loader(loader: object, stage: Stage, num_devices: int, spawns: bool) -> None:
    """Warn of a loader that is slow, or evaluates in a random order.

    Args:
        loader: The loader.
        stage: What it is for.
        num_devices: Processes on this machine.
        spawns: Whether processes are started from nothing rather than forked.
    """
    if not isinstance(loader, DataLoader):
        return
    name = stage.loader_name
    most = data.suggested_max_num_workers(num_devices)
    if loader.num_workers and not loader.persistent_workers and _starts_from_nothing(spawns):
        rank_zero_warn(
            f"The workers of '{name}' are started again for each epoch, from nothing. Consider setting "
            "`persistent_workers=True` in its `DataLoader`."
        )
    elif loader.num_workers < 2 <= most:
        rank_zero_warn(
            f"The '{name}' does not have many workers, so the model may wait for data. Consider increasing the value "
            f"of the `num_workers` argument to `num_workers={most}` in its `DataLoader`.",
            category=PossibleUserWarning,
        )
    if stage is not Stage.TRAIN and isinstance(loader.sampler, RandomSampler):
        rank_zero_warn(
            f"The '{name}' draws its samples in a random order. It is recommended that you turn shuffling off for "
            "val/test/predict dataloaders.",
            category=PossibleUserWarning,
        )


def _starts_from_nothing(spawns: bool) -> bool:
    return spawns or multiprocessing.get_start_method(allow_none=True) == "spawn"
