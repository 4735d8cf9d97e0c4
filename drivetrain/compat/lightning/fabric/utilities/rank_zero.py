"""What only the first process does."""

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
    """What Lightning's deprecations warn with."""


def rank_zero_only(function: Callable[..., Any], default: Any = None) -> Callable[..., Any]:
    """Let a function run on the first process alone."""

    @wraps(function)
    def on_the_first(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if _rank() == 0 else default

    return on_the_first


def _rank() -> int:
    """This process's rank, as a script has set it, or else as its launcher has.

    The variable is enough: scripts read it before anything needs the number of processes.
    """
    stated = getattr(rank_zero_only, "rank", None)
    if stated is not None:
        return int(stated)
    return int(next((os.environ[name] for name in _VARIABLES if name in os.environ), 0))


@rank_zero_only
def rank_zero_debug(*args: Any, stacklevel: int = 4, **kwargs: Any) -> None:
    """Log for debugging, on the first process."""
    logger.debug(*args, stacklevel=stacklevel, **kwargs)


@rank_zero_only
def rank_zero_info(*args: Any, stacklevel: int = 4, **kwargs: Any) -> None:
    """Log, on the first process."""
    logger.info(*args, stacklevel=stacklevel, **kwargs)


@rank_zero_only
def rank_zero_warn(message: str | Warning, stacklevel: int = 4, **kwargs: Any) -> None:
    """Warn, on the first process."""
    warnings.warn(message, stacklevel=stacklevel, **kwargs)


def rank_zero_deprecation(message: str | Warning, stacklevel: int = 5, **kwargs: Any) -> None:
    """Warn of a deprecation, on the first process."""
    rank_zero_warn(message, stacklevel=stacklevel, **{"category": LightningDeprecationWarning, **kwargs})


def rank_prefixed_message(message: str, rank: int | None) -> str:
    """A message with the rank that it is about, if there is one."""
    return message if rank is None else f"[rank: {rank}] {message}"


def _share_rank() -> None:
    """Set the rank of the function of this name in `lightning_utilities` too: scripts import it from there."""
    if importlib.util.find_spec("lightning_utilities") is not None:
        theirs: Any = importlib.import_module("lightning_utilities.core.rank_zero").rank_zero_only
        theirs.rank = getattr(theirs, "rank", _rank())


_share_rank()
