"""Random seeds with Lightning's defaults and environment variable."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from drivetrain.compat.lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_only, rank_zero_warn
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.seeds import MAX_SEED, isolated_random_state, set_seed

_VARIABLE, _WORKERS = "PL_GLOBAL_SEED", "PL_SEED_WORKERS"


def seed_everything(seed: int | None = None, workers: bool = False, verbose: bool = True) -> int:
    """Seed the random generators of Python, NumPy and torch. Return the seed."""
    given = os.environ.get(_VARIABLE) if seed is None else seed
    if given is None:
        given = 0
        if verbose:
            rank_zero_warn("No seed found, so 0 is taken. Give one, or set PL_GLOBAL_SEED.")
    try:
        chosen = int(given)
    except ValueError:
        raise ConfigurationError(f"Invalid seed specified: it must be a whole number, got {given!r}.") from None
    if not 0 <= chosen <= MAX_SEED:
        raise ConfigurationError(f"The seed {chosen} is not in bounds: it must be from 0 to {MAX_SEED}.")
    if verbose:
        rank_zero_info(f"Seed set to {chosen}")
    os.environ[_VARIABLE], os.environ[_WORKERS] = str(chosen), str(int(workers))
    set_seed(chosen)
    return chosen


def reset_seed() -> None:
    """Seed again with the seed of the last `seed_everything`. Does nothing if there was none."""
    seed = os.environ.get(_VARIABLE)
    if seed is not None:
        seed_everything(int(seed), workers=os.environ.get(_WORKERS) == "1", verbose=False)


def pl_worker_init_function(worker_id: int, rank: int | None = None) -> None:
    """Seed the generators of a data loader worker, as `worker_init_fn` in custom training loops.

    In a loader that the Trainer or Fabric has prepared, each sample has a seed of its own, and needs none.
    """
    own = rank_zero_only.rank if rank is None and hasattr(rank_zero_only, "rank") else rank or 0
    base = (torch.initial_seed() - worker_id) % 2**64  # torch has already added the worker's index
    first, second, *words = np.random.SeedSequence([base, worker_id, own]).generate_state(6).tolist()
    torch.manual_seed(first * 2**32 + second)
    np.random.seed(words[:2])
    random.seed(words[2] * 2**32 + words[3])


@contextmanager
def isolate_rng(include_cuda: bool = True) -> Iterator[None]:
    """Restore all random generators after the `with` body."""
    with isolated_random_state(devices=include_cuda):
        yield
