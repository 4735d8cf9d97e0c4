"""Seeding, with Lightning's defaults and its variable."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from drivetrain.compat.lightning.fabric.utilities.rank_zero import rank_zero_info
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.seeds import MAX_SEED, isolated_random_state, set_seed

_VARIABLE = "PL_GLOBAL_SEED"


def seed_everything(seed: int | None = None, workers: bool = False, verbose: bool = True) -> int:
    """Seed Python's, NumPy's and torch's generators.

    Args:
        seed: The seed; that of the variable `PL_GLOBAL_SEED` if None, and 0 without it.
        workers: Taken for Lightning's sake: in a seeded run each sample has a seed of its own, whatever the worker.
        verbose: Whether to log the seed.

    Returns:
        The seed.
    """
    given = os.environ.get(_VARIABLE, "0") if seed is None else seed
    try:
        chosen = int(given)
    except ValueError:
        raise ConfigurationError(f"The seed must be a whole number, got {given!r}.") from None
    if not 0 <= chosen <= MAX_SEED:
        raise ConfigurationError(f"The seed must be from 0 to {MAX_SEED}, got {chosen}.")
    if verbose:
        rank_zero_info(f"Seed set to {chosen}")
    os.environ[_VARIABLE], os.environ["PL_SEED_WORKERS"] = str(chosen), str(int(workers))
    set_seed(chosen)
    return chosen


@contextmanager
def isolate_rng(include_cuda: bool = True) -> Iterator[None]:
    """Put all generators back to where they were, in the end.

    Args:
        include_cuda: Whether those of devices too.
    """
    with isolated_random_state(devices=include_cuda):
        yield
