"""What loaders and data sets are like."""

from __future__ import annotations

from typing import Any

from torch.utils.data import IterableDataset

from drivetrain.compat.lightning.fabric.utilities import suggested_max_num_workers
from drivetrain.compat.lightning.fabric.utilities.rank_zero import rank_zero_warn
from drivetrain.trainer.hyper_parameters import HyperParameters as AttributeDict

__all__ = ["AttributeDict", "has_iterable_dataset", "has_len", "sized_len", "suggested_max_num_workers"]


def has_iterable_dataset(dataloader: object) -> bool:
    """Whether a loader reads an `IterableDataset`.

    Args:
        dataloader: The loader.
    """
    return isinstance(getattr(dataloader, "dataset", None), IterableDataset)


def sized_len(dataloader: object) -> int | None:
    """The length of a loader; None where it has none.

    Args:
        dataloader: The loader.
    """
    sized: Any = dataloader
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return None


def has_len(dataloader: object) -> bool:
    """Whether a loader has a length.

    Args:
        dataloader: The loader.
    """
    length = sized_len(dataloader)
    if length == 0:
        rank_zero_warn(f"`{type(dataloader).__name__}` returned 0 length. Please make sure this was your intention.")
    if length is not None and has_iterable_dataset(dataloader):
        rank_zero_warn(
            "Your `IterableDataset` has `__len__` defined. Each of several workers must yield a part of it, or there "
            "are more samples than it says."
        )
    return length is not None
