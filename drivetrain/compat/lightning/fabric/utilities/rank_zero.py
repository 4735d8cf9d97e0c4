"""Functions that run on rank 0 only."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any

logger = logging.getLogger("lightning.pytorch")

_VARIABLES = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")


class LightningDeprecationWarning(DeprecationWarning):
    """Warning category of Lightning's deprecations."""


def rank_zero_only(function: Callable[..., Any], default: Any = None) -> Callable[..., Any]:
    """Decorate a function to run on rank 0 only. Other ranks return `default`."""

    @wraps(function)
    def on_the_first(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if _rank() == 0 else default

    return on_the_first


def _rank() -> int:
    """Return this process's rank: `rank_zero_only.rank` if set, else the launcher's variable, else 0.

    The variable is enough: scripts read it before anything needs the number of processes.
    """
    stated = getattr(rank_zero_only, "rank", None)
    if stated is not None:
        return int(stated)
    return int(next((os.environ[name] for name in _VARIABLES if name in os.environ), 0))


@rank_zero_only
def rank_zero_debug(*args: Any, stacklevel: int = 4, **kwargs: Any) -> None:
    """Log at level DEBUG on rank 0."""
    logger.debug(*args, stacklevel=stacklevel, **kwargs)


@rank_zero_only
def rank_zero_info(*args: Any, stacklevel: int = 4, **kwargs: Any) -> None:
    """Log at level INFO on rank 0."""
    logger.info(*args, stacklevel=stacklevel, **kwargs)


@rank_zero_only
def rank_zero_warn(message: str | Warning, stacklevel: int = 4, **kwargs: Any) -> None:
    """Issue a warning on rank 0."""
    warnings.warn(message, stacklevel=stacklevel, **kwargs)


def rank_zero_deprecation(message: str | Warning, stacklevel: int = 5, **kwargs: Any) -> None:
    """Issue a deprecation warning on rank 0."""
    rank_zero_warn(message, stacklevel=stacklevel, **{"category": LightningDeprecationWarning, **kwargs})


def rank_prefixed_message(message: str, rank: int | None) -> str:
    """Return a message prefixed with `[rank: N]`, or unchanged if `rank` is None."""
    return message if rank is None else f"[rank: {rank}] {message}"


def _share_rank() -> None:
    """Copy the rank to `lightning_utilities`, from which scripts also import `rank_zero_only`."""
    if importlib.util.find_spec("lightning_utilities") is not None:
        theirs: Any = importlib.import_module("lightning_utilities.core.rank_zero").rank_zero_only
        theirs.rank = getattr(theirs, "rank", _rank())


_share_rank()
