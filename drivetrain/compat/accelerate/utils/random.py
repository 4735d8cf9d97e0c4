"""Seed generators, and synchronize random states across processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from drivetrain.runtime.collectives import broadcast
from drivetrain.runtime.devices import available_device_kinds
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.seeds import set_seed

__all__ = ["set_seed", "synchronize_rng_state", "synchronize_rng_states"]


def synchronize_rng_state(rng_type: Any = None, generator: torch.Generator | None = None) -> None:
    """Copy rank 0's random state of one generator to all processes."""
    name = getattr(rng_type, "value", rng_type)
    if name == "generator":
        if generator is None:
            raise ConfigurationError('synchronize_rng_state("generator") needs the generator.')
        generator.set_state(broadcast(generator.get_state()))
    elif name == "torch":
        torch.set_rng_state(broadcast(torch.get_rng_state()))
    else:
        kind = next((each for each in available_device_kinds() if each.name == name), None)
        state = None if kind is None else kind.get_rng_state()
        if kind is None or state is None:
            raise ConfigurationError(f"synchronize_rng_state({name!r}): there is no such generator here.")
        kind.set_rng_state(broadcast(state.cpu()))


def synchronize_rng_states(rng_types: Sequence[Any], generator: torch.Generator | None = None) -> None:
    """Copy rank 0's random states of several generators to all processes."""
    for rng_type in rng_types:
        synchronize_rng_state(rng_type, generator=generator)
